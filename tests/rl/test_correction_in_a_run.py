"""A correction that leaves little of the step says so, once."""

from pathlib import Path

import pytest

from isobit.config import load_config
from isobit.training.train import train
from tests.runs import write_config


@pytest.mark.parametrize(("low", "said"), [(0.999999, 1), (0.0, 0)])
def test_a_shrunken_step_is_said_once(
    tmp_path: Path, base_model: Path, capsys: pytest.CaptureFixture[str], low: float, said: int
) -> None:
    """Bounds that few sequences of two engines meet, and bounds that all meet."""
    rule = (
        f"{{weight: sequence, rejection: {{level: sequence_sum, low: {low}, high: "
        f"{1e9 if not low else 1.000001}}}}}"
    )
    overrides = ["precision=fp8-rollout", f"algorithm.correction={rule}", "steps=3"]
    result = train(load_config(write_config(tmp_path, base_model), overrides), quiet=False)
    assert capsys.readouterr().err.count("of the step's size") == said
    left = [row["correction/effective_step"] for row in result.metrics]
    assert all((value < 0.5) == bool(said) for value in left)
    assert all((row["correction/kept_fraction"] < 0.5) == bool(said) for row in result.metrics)
