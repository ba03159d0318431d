"""Files that a config names, from any directory."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from isobit.config import CompareConfig, Config, SftConfig, load_config, load_sft_config
from isobit.config.load import load_any_run_config, load_compare_config
from isobit.data import strict_yaml
from isobit.errors import IsobitError
from isobit.options.declare import FileName, Option, options_of, plain, sections, unwrapped
from isobit.run.format import FORMAT, FORMAT_NOW
from isobit.training.commands.quickstart import config_file
from tests.documents import ROOT

FILES = (
    "model/config.json", "base.yaml", "chat.jinja", "rows.jsonl", "more.jsonl", "held.jsonl",
    "mine.py", "judge/config.json", "adapter/x", "reference/x", "keys.txt",
)  # fmt: skip
NAMES = {name.partition("/")[0] for name in FILES}
RUN: dict[str, Any] = {
    "model": {"path": "model", "chat_template": "chat.jinja"},
    "task": {"files": ["rows.jsonl", {"path": "more.jsonl"}], "held_out_path": "held.jsonl"},
    "rewards": {
        "functions": ["mine.py:score", {"function": "mine.py:other", "name": "b"}],
        "models": [{"path": "judge"}],
    },
    "environment": {"tools": ["mine.py:tool"], "factory": {"maze": "mine.py:Maze"}},
    "algorithm": {"loss": "mine.py:loss", "advantage": "mine.py:advantage", "kl_coefficient": 0.1},
    "adapter": {"init": "adapter"},
    "reference": {"path": "reference"},
    "serve": {"token": "keys.txt"},
    "run": {"dir": "runs/mine"},
}


@pytest.fixture
def there(tmp_path: Path) -> Path:
    """A folder with a config and all that it names; the present directory is another one."""
    folder = tmp_path / "there"
    for name in FILES:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("")
    (folder / "run.yaml").write_text(yaml.safe_dump(RUN))
    return folder


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (folder := tmp_path / "here").mkdir()
    monkeypatch.chdir(folder)
    return folder


def files_in(value: Any) -> Iterator[str]:
    """Every text of a loaded config that names one of FILES."""
    if isinstance(value, dict):
        for inner in value.values():
            yield from files_in(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from files_in(inner)
    elif isinstance(value, str) and value.partition(":")[0].rpartition("/")[2] in NAMES:
        yield value


def test_what_lies_next_to_a_config_is_found_from_anywhere(there: Path) -> None:
    """Every key that names a file; by an absolute path of the config and a relative one. The
    controls: in its own folder every name is as it stands, and what a run writes always is."""
    os.chdir(there)
    names = sorted(files_in(plain(load_config("run.yaml"))))
    assert {name.partition(":")[0] for name in names} == NAMES - {"base.yaml"}
    assert not any("/" in name for name in names)
    os.chdir(there.parent / "here")
    for given, folder in (
        (there / "run.yaml", str(there)),
        (Path("../there/run.yaml"), "../there"),
    ):
        config = load_config(given)
        assert sorted(files_in(plain(config))) == [f"{folder}/{name}" for name in names]
        assert config.run.dir == "runs/mine"


def test_what_is_not_there_is_of_the_present_directory(
    there: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As always: without a word, and where it is nowhere as it stands. Where it is in both, it is
    the one next to the config, with a warning. The control: the same file by two paths."""
    shutil.rmtree(there / "model")
    (here / "model").mkdir()
    (there / "rows.jsonl").unlink()
    found = load_config(there / "run.yaml")
    assert (found.model.path, found.task.files[0].path) == ("model", "rows.jsonl")
    (there / "model").symlink_to(here / "model")
    assert load_config(there / "run.yaml").model.path == str(there / "model")
    assert capsys.readouterr().err == ""
    (there / "model").unlink()
    (there / "model").mkdir()
    assert load_config(there / "run.yaml").model.path == str(there / "model")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"warning: {there}/run.yaml: model is {there}/model, next to the config")


def test_overrides_and_mappings_are_of_the_present_directory(there: Path, here: Path) -> None:
    """The control: what stands in the file."""
    changes = ["model.path=model", "rewards.functions=[mine.py:score]", "task=held.jsonl"]
    found = load_config(there / "run.yaml", changes)
    assert found.model.path == "model"
    assert found.rewards.functions[0].function == "mine.py:score"
    assert found.task.path == "held.jsonl"
    assert found.model.chat_template == str(there / "chat.jinja")
    assert load_config(RUN).model.path == "model"


@pytest.mark.parametrize(
    ("short", "key"),
    [
        ({"model": "model", "task": "rows.jsonl"}, "path"),
        ({"model": "model", "task": {"files": "rows.jsonl"}}, "files"),
    ],
)
def test_short_forms_are_found_too(there: Path, short: dict[str, Any], key: str) -> None:
    """And a section that names no file stays short. The control: names of what is no file."""
    (there / "run.yaml").write_text(
        yaml.safe_dump({**short, "rewards": "mine.py:score", "algorithm": {"loss": "vespo"}})
    )
    (there / "vespo").mkdir()
    found = load_config(there / "run.yaml")
    assert found.model.path == str(there / "model")
    assert str(there / "rows.jsonl") in str(plain(found.task)[key])
    assert found.rewards.functions[0].function == f"{there}/mine.py:score"
    assert found.algorithm.loss == "vespo"


def test_a_run_goes_on_by_what_it_found_at_its_start(there: Path, here: Path) -> None:
    """The config in a run directory, which is of the directory that it began in; also as the config
    of a new run. The control: the same file without a run around it."""
    (run := here / "run").mkdir()
    (run / "model").mkdir()
    (run / "config.yaml").write_text(yaml.safe_dump({"model": "model", "task": "arithmetic"}))
    assert load_config(run / "config.yaml").model.path == str(run / "model")
    (run / FORMAT).write_text(str(FORMAT_NOW))
    assert load_config(run / "config.yaml").model.path == "model"
    found = load_any_run_config(run)
    assert isinstance(found, Config)
    assert found.model.path == "model"


def test_a_config_is_parsed_once(there: Path, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a run, of `isobit sft` too, and of a file. The control: what is wrong in a file still names
    the command that it is for, which takes a second look."""
    parsed: list[str] = []
    load = strict_yaml.load
    monkeypatch.setattr(strict_yaml, "load", lambda text: parsed.append(text) or load(text))
    (run := here / "run").mkdir()
    (run / FORMAT).write_text(str(FORMAT_NOW))
    for text, schema in (
        ("{model: model, task: arithmetic}", Config),
        ("{model: model, task: arithmetic, batch_size: 4}", SftConfig),
    ):
        (run / "config.yaml").write_text(text)
        parsed.clear()
        assert isinstance(load_any_run_config(run), schema)
        assert parsed == [text]
    parsed.clear()
    load_config(there / "run.yaml")
    assert len(parsed) == 1
    (here / "sft.yaml").write_text("{model: model, task: arithmetic, batch_size: 4}")
    with pytest.raises(IsobitError, match="isobit sft"):
        load_config(here / "sft.yaml")


def test_configs_that_name_configs(there: Path) -> None:
    """Of a base model, which names a template of its own, and of a comparison."""
    (there / "base.yaml").write_text(
        "{model: {path: model, chat_template: chat.jinja}, task: rows.jsonl, steps: 1, out: base}"
    )
    (there / "run.yaml").write_text("{model: {sft: base.yaml}, task: arithmetic}")
    (there / "both.yaml").write_text("{train: run.yaml, presets: [fp8], out: both}")
    compared = load_compare_config(there / "both.yaml", [], None, None)
    assert (compared.train, compared.out) == (str(there / "run.yaml"), "both")
    base = load_config(compared.train).model.sft
    assert base == str(there / "base.yaml")
    found = load_sft_config(base)
    assert (found.model.chat_template, found.run.dir) == (str(there / "chat.jinja"), "base")
    assert found.task.path == str(there / "rows.jsonl")


def test_the_config_of_the_quickstart_is_found_from_anywhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In the checkout's own folder as one types it, so that the run is the same one."""
    base = load_config(config_file()).model.sft
    assert base == str(ROOT / "configs" / "quickstart-sft.yaml")
    assert load_sft_config(base).steps == 600
    monkeypatch.chdir(ROOT)
    assert str(config_file()) == "configs/quickstart.yaml"
    assert load_config(config_file()).model.sft == "configs/quickstart-sft.yaml"
    monkeypatch.setattr("isobit.__file__", "/nowhere/isobit/__init__.py")
    with pytest.raises(IsobitError, match=r"quickstart.yaml: not there; install isobit again"):
        config_file()


def named(schema: Any, at: str = "") -> Iterator[tuple[str, Option]]:
    for name, option in options_of(schema).items():
        yield at + name, option
        for inner in sections(option.kind):
            yield from named(inner, f"{at}{name}.")


def test_every_option_that_names_a_file_says_so() -> None:
    """By the words of its text. The exceptions are what a run writes, and what is no file."""
    words = ("file.py", "directory", "folder", "a file", "a Jinja file", "a config of", "JSONL")
    written = {"run.dir", "tracking.name", "tracking.trackio.dir", "out", "evaluation.keep_best"}
    options = {key: o for schema in (Config, SftConfig, CompareConfig) for key, o in named(schema)}
    seem = {key for key, o in options.items() if any(word in o.text for word in words)}
    marked = {key for key, o in options.items() if FileName.__name__ in repr(o.kind)}
    assert seem - marked <= written | {"task.split", "task.held_out_size", "tracking.mlflow.uri"}
    assert "rewards.functions.function" in marked
    assert not marked & written
    assert all(FileName not in map(type, unwrapped(options[key].kind)[1]) for key in written)


@pytest.mark.slow
def test_the_quickstart_trains_from_anywhere(
    here: Path, tmp_path: Path, quickstart_cache: Path
) -> None:
    """The command, in an empty folder, twice: a finished run is done again. The checkout is a copy,
    whose base is trained for a few steps."""
    checkout = tmp_path / "checkout"
    for name in ("src/isobit", "configs"):
        shutil.copytree(ROOT / name, checkout / name, ignore=shutil.ignore_patterns("__pycache__"))
    base = checkout / "configs/quickstart-sft.yaml"
    text = base.read_text()
    assert "\nsteps: 600 " in text
    base.write_text(text.replace("\nsteps: 600 ", "\nsteps: 4 "))
    words = [
        sys.executable,
        "-m",
        "isobit",
        "quickstart",
        "steps=2",
        "evaluation.every=0",
        "--quiet",
    ]
    for _ in range(2):
        done = subprocess.run(
            words,
            env=os.environ
            | {"PYTHONPATH": str(checkout / "src"), "ISOBIT_CACHE": str(quickstart_cache)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert len((here / "runs/quickstart/metrics.jsonl").read_text().splitlines()) == 2
