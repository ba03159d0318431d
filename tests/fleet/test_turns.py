"""Episodes of several turns on engines in separate processes, whose environments answer where the
run is."""

from pathlib import Path

import pytest

from isobit.config import load_config
from isobit.training.train import train
from tests.fleet.test_training import bits
from tests.training.test_turns import config_of, history_of, rows_of, save_chat_model


@pytest.mark.slow
@pytest.mark.parametrize("history", ["append", "fork"])
def test_a_fleet_samples_the_episodes_of_one_process(
    tmp_path: Path, ray: object, history: str
) -> None:
    """Turns of an episode by whichever engine has room, ahead of the learner; the control is
    another seed."""
    model, found = save_chat_model(tmp_path / "model"), {}
    for name, changes in {
        "one": [],
        "fleet": ["fleet.engines=2"],
        "seed": ["seed=1"],
    }.items():
        config = config_of(tmp_path / name, model, slow=0.02)
        given = ["rollouts_ahead=1", "replay.max_staleness=1", "steps=2", *changes]
        given += history_of(tmp_path, history)
        result = train(load_config(config, given))
        assert all(row["mismatch/differing_tokens"] == 0 for row in result.metrics)
        assert any("forks" in row for row in rows_of(result.run_dir)) is (history == "fork")
        found[name] = bits(result.run_dir)
    assert found["fleet"]["completions"] == found["one"]["completions"]
    assert found["fleet"]["model.safetensors"] == found["one"]["model.safetensors"]
    assert found["seed"]["completions"] != found["one"]["completions"]
