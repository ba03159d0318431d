"""Command lines of the experiments: each says its own name, and asks for what it needs."""

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from benchmarks.experiments import (
    distillation,
    gradient_bias,
    kv_cache,
    non_inferiority,
    papers,
    recurrence,
    sparse_long,
)
from benchmarks.experiments.command import write

EXPERIMENTS = [
    distillation,
    gradient_bias,
    kv_cache,
    non_inferiority,
    papers,
    recurrence,
    sparse_long,
]
ON_RUNS = [distillation, non_inferiority, sparse_long]
"""Those that take no model and no prompts."""
WORDS = {papers: ["cache", "nothing"]} | {module: ["nothing"] for module in ON_RUNS}
"""What has to stand on the line of one, but for --out; else a model and a prompt."""


@pytest.mark.parametrize(
    "module", EXPERIMENTS, ids=lambda module: module.__name__.rpartition(".")[2]
)
def test_the_command_is_the_modules(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["x", "--help"])
    with pytest.raises(SystemExit, match=r"^0$"):
        module.main()
    said = " ".join(capsys.readouterr().out.split())
    assert said.startswith(f"usage: python -m {module.__name__} ")
    assert " ".join(str(module.__doc__).split())[:60] in said
    monkeypatch.setattr(sys, "argv", ["x", *WORDS.get(module, ["nothing", "--prompt", "a"])])
    with pytest.raises(SystemExit, match=r"^2$"):
        module.main()
    assert capsys.readouterr().err.endswith("error: the following arguments are required: --out\n")


def test_every_experiment_is_among_them() -> None:
    names = {path.stem for path in Path(str(non_inferiority.__file__)).parent.glob("*.py")}
    names -= {"__init__", "command", "sparse_long_tables", "papers_tables"}
    names -= {"cookbook"}  # of the recipes of a package that is not among ours
    assert names == {module.__name__.rpartition(".")[2] for module in EXPERIMENTS}


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    write(tmp_path / "out.json", {"a": [1, 2.5]})
    assert json.loads((tmp_path / "out.json").read_text()) == {"a": [1, 2.5]}
    assert (tmp_path / "out.json").read_text().endswith("}\n")
