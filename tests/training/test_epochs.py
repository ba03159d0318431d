"""`epochs` in place of `steps`: resolved by the data, kept as a number, and one of the two."""

from pathlib import Path

import pytest
import yaml

from isobit.config import load_config, load_sft_config
from isobit.errors import IsobitError
from isobit.training.train import resume, train, train_supervised
from tests.runs import dry_run_text, fingerprint, write_config
from tests.training.test_sft_run import written

TASK = {"name": "arithmetic", "held_out_size": 2, "options": {"digits": 1, "train_size": 10}}


def epochs_of(path: Path, value: float, model: Path) -> Path:
    """A run of ten prompts, four in a step, that says epochs."""
    config = write_config(path, model, task=TASK)
    values = yaml.safe_load(config.read_text())
    del values["steps"]
    config.write_text(yaml.safe_dump({**values, "epochs": value}))
    return config


def test_a_run_of_epochs_is_that_of_its_steps(tmp_path: Path, base_model: Path) -> None:
    """One of ten prompts is two and a half steps of four, so three. It goes on as any run."""
    path = epochs_of(tmp_path, 1.0, base_model)
    assert "3 steps of 4 prompts" in dry_run_text(load_config(path))
    found = train(load_config(path), quiet=True)
    kept = yaml.safe_load((found.run_dir / "config.yaml").read_text())
    assert (kept["steps"], kept["epochs"]) == (3, None)
    (tmp_path / "other").mkdir()
    other = write_config(tmp_path / "other", base_model, task=TASK, steps=3)
    assert fingerprint(train(load_config(other), quiet=True).run_dir) == fingerprint(found.run_dir)
    assert resume(found.run_dir, ["steps=4"], quiet=True).metrics[-1]["step"] == 4


def test_a_supervised_run_too(tmp_path: Path) -> None:
    path = written(tmp_path, task=TASK, evaluation={}, batch_size=4)
    values = yaml.safe_load(path.read_text())
    path.write_text(yaml.safe_dump({k: v for k, v in values.items() if k != "steps"}))
    found = train_supervised(load_sft_config(path, ["epochs=0.5"]), quiet=True)
    assert found.metrics[-1]["step"] == 2


def test_it_is_one_of_the_two(tmp_path: Path, base_model: Path) -> None:
    path = write_config(tmp_path, base_model, epochs=2)
    with pytest.raises(IsobitError, match="steps and epochs: give one of the two"):
        load_config(path)
    with pytest.raises(IsobitError, match="steps and epochs: give one of the two"):
        load_config(path, ["steps=3", "epochs=1"])
    assert load_config(path, ["steps=3"]).epochs is None
    assert load_config(path, ["epochs=3"]).epochs == 3.0
    assert load_config(path, ["epochs=null"]).steps == 4
    loaded = load_config(path, ["epochs=3"])
    assert load_config(loaded) == loaded
    assert load_config(loaded, ["steps=5"]).epochs is None
    with pytest.raises(IsobitError, match=r"epochs: under algorithm\.dynamic_sampling"):
        load_config(path, ["epochs=1", "algorithm.dynamic_sampling=true"])
    with pytest.raises(IsobitError, match="epochs: expected above 0"):
        load_config(path, ["epochs=0"])
