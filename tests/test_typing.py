"""What type checkers see of the public names, and that the package says that it is typed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import isobit

ROOT = Path(__file__).resolve().parents[1]
REVEALED = {
    "Completion": "isobit.engine.types.Completion",
    "Engine": "isobit.engine.engine.Engine",
    "IsobitError": "isobit.errors.IsobitError",
    "Model": "isobit.model.model.Model",
    "Precision": "isobit.precision.flow.Precision",
    "RunFailed": "isobit.errors.RunFailed",
    "Sampling": "isobit.engine.types.Sampling",
    "Step": "isobit.data.turns.Step",
    "load_config": "isobit.config.schema.Config",
    "resume": "isobit.training.train.TrainResult",
    "train": "isobit.training.train.TrainResult",
}
"""What the type of each public name must speak of: the class itself, or what the function
returns."""


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What mypy says of a user's file, outside the package."""
    pytest.importorskip("mypy")
    folder = tmp_path_factory.mktemp("user")
    lines = [
        "import isobit",
        f"from isobit import {', '.join(isobit.__all__)}",
        *map("reveal_type({})".format, REVEALED),
    ]
    lines += [
        "isobit.trian",
        'print(train("run.yaml").metrics[0]["reward/mean"].is_integer())',
        "train(3, quiet=1)",
    ]
    (folder / "user.py").write_text("\n".join(lines) + "\n")
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--config-file",
        str(ROOT / "pyproject.toml"),
        "user.py",
    ]
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, env=_environment(), check=False
    )
    return done.stdout


def _environment() -> dict[str, str]:
    return {
        **os.environ,
        "MYPYPATH": str(ROOT / "src"),
        "MYPY_CACHE_DIR": str(ROOT / ".mypy_cache"),
    }


@pytest.mark.slow
def test_every_public_name_has_its_type(checked: str) -> None:
    assert set(REVEALED) == set(isobit.__all__)
    revealed = [
        line.partition("Revealed type is ")[2]
        for line in checked.splitlines()
        if "Revealed type" in line
    ]
    assert len(revealed) == len(REVEALED), checked
    for (name, wanted), text in zip(REVEALED.items(), revealed):
        assert wanted in text, f"{name}: {text}"
        assert text != '"Any"', name


@pytest.mark.slow
def test_mistakes_are_seen_by_a_checker(checked: str) -> None:
    """The control: a misspelled name and wrong arguments are errors; nothing else in the file
    is."""
    errors = [line for line in checked.splitlines() if ": error:" in line]
    assert any('has no attribute "trian"' in line for line in errors), checked
    assert any('Argument 1 to "train" has incompatible type "int"' in line for line in errors), (
        checked
    )
    assert all(
        line.startswith((f"user.py:{len(REVEALED) + 3}", f"user.py:{len(REVEALED) + 5}"))
        for line in errors
    ), checked


def test_a_checker_and_a_program_see_the_same_names() -> None:
    assert set(isobit._HOMES) == set(isobit.__all__)
    assert all(name in dir(isobit) for name in isobit.__all__)


def test_the_package_says_that_it_is_typed() -> None:
    data = (
        (ROOT / "pyproject.toml")
        .read_text()
        .split("[tool.setuptools.package-data]\n")[1]
        .split("\n[")[0]
    )
    assert '"py.typed"' in data
    assert (ROOT / "src" / "isobit" / "py.typed").is_file()
