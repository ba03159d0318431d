"""A change that a resumed run may not make is refused with the command of a new run, which works."""

import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file

from isobit.config import load_config, load_sft_config
from isobit.errors import IsobitError
from isobit.run.checkpoints import all_checkpoints
from isobit.training.train import resume, train, train_supervised
from tests import warm
from tests.runs import write_config
from tests.training.test_sft_run import written

RATE = "optimizer.learning_rate=0.00002"


def printed(run: Path, again: Any) -> list[str]:
    """The words of the command that the refusal ends with."""
    with pytest.raises(IsobitError, match="a resumed run repeats its own config") as refused:
        again(run, [RATE, "steps=1"], quiet=True)
    text = str(refused.value)
    assert "\n" not in text
    return shlex.split(text.partition("; or begin a new run from its newest checkpoint: ")[2])


def begun(words: list[str], folder: Path) -> tuple[dict[str, Any], Path]:
    """The config of the run that the command makes, and its first checkpoint."""
    ended = warm.start([*words, "--quiet"], folder).wait()
    assert ended.returncode == 0, ended.stderr
    made = Path(words[words.index("--out") + 1])
    values = yaml.safe_load((made / "config.yaml").read_text())
    assert values["optimizer"]["learning_rate"] == 2e-5
    return values, all_checkpoints(made / "checkpoints")[0]


def weights(checkpoint: Path) -> Any:
    (file,) = checkpoint.glob("*model.safetensors")
    return load_file(file)


@pytest.mark.slow
@pytest.mark.parametrize("adapter", [None, {"rank": 2}], ids=["whole", "adapter"])
def test_it_begins_where_the_run_was(adapter: Any, tmp_path: Path, base_model: Path) -> None:
    more = {} if adapter is None else {"adapter": adapter}
    kl = {"kl_coefficient": 0.01}
    path = write_config(tmp_path, base_model, steps=1, algorithm=kl, **more)
    run = train(load_config(path, ["run.keep_last=5"]), quiet=True).run_dir
    values, first = begun(printed(run, resume), tmp_path)
    newest = all_checkpoints(run / "checkpoints")[-1]
    assert first.name == "step-000000"
    before, after = weights(newest), weights(first)
    assert all((before[name].float() == after[name].float()).all() for name in before)
    other = weights(all_checkpoints(run / "checkpoints")[0])
    assert any((other[name].float() != after[name].float()).any() for name in other), "the control"
    assert values["reference"]["path"] == (str(base_model) if adapter is None else None)
    assert printed(run, resume)[-1] == f"{run}-3"


@pytest.mark.slow
def test_a_supervised_run_too(tmp_path: Path) -> None:
    run = train_supervised(load_sft_config(written(tmp_path, steps=1)), quiet=True).run_dir
    values, _ = begun(printed(run, resume), tmp_path)
    assert values["model"]["path"] == str(run)


def test_another_directory_is_no_other_run(tmp_path: Path, base_model: Path) -> None:
    run = train(load_config(write_config(tmp_path, base_model, steps=1)), quiet=True).run_dir
    with pytest.raises(IsobitError, match=r"\(except run\.dir\)$"):
        resume(run, ["run.dir=elsewhere"], quiet=True)
