"""Whole runs of what is not a dense model alone, whose working weights a group of ranks holds
together: the bits of one process."""

from pathlib import Path

import pytest

from tests.distributed.test_by_rows import KINDS, model_of
from tests.distributed.test_divided import trained
from tests.runs import write_config

KIND_OF = {
    "experts": "experts",
    "experts by rows": "experts by rows",
    "biases and sinks": "biases and sinks",
    "scored by rows": "scored by rows",
    "latent": "latent",
    "linear": "linear",
    "adapter": "dense",
    "adapter of experts": "experts by rows",
}
ADAPTER = ["adapter={rank: 4, alpha: 16}"]


@pytest.mark.slow
@pytest.mark.parametrize("layout", [(2, 2), (3, 3), (4, 2)], ids=str)
@pytest.mark.parametrize("kind", KIND_OF)
def test_runs_have_the_bits_of_one_process(
    tmp_path: Path, kind: str, layout: tuple[int, int]
) -> None:
    assert KIND_OF[kind] in KINDS
    model_of(KIND_OF[kind], "bf16").save(tmp_path / "base")
    config = write_config(tmp_path, tmp_path / "base", steps=2)
    (tmp_path / "digit_reward.py").write_text(
        "def digits(prompts, completions, **columns):\n"
        "    return [sum(ord(c) % 5 for c in text) / 9 for text in completions]\n"
    )
    overrides = ADAPTER if "adapter" in kind else []
    alone = trained(config, tmp_path / "alone", (0, 0), overrides)
    assert trained(config, tmp_path / "run", layout, overrides) == alone
