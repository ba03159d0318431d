"""A checkout, for a user who has no home directory: every command works, and what must be kept is
in a private folder under the temporary directory."""

import json
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from isobit.kernels.native import available
from isobit.kernels.native.build import cache_directory
from tests.documents import ROOT
from tests.models import tiny_model
from tests.runs import write_config
from tests.strange_user import COMMANDS, USER, folder_of_their_own, give_away, run_as

NATIVE = pytest.mark.skipif(not available()[0], reason="needs a C++ compiler")
CACHE = Path("tmp", f"isobit-{USER}", ".cache", "isobit")


@pytest.fixture
def theirs() -> Iterator[Path]:
    """Their folder, with a model and a config in it."""
    with folder_of_their_own() as folder:
        prepared(folder)
        yield folder


def prepared(folder: Path) -> None:
    """Put a model, and a config of two steps, into a folder of theirs."""
    tiny_model().save(folder / "model")
    write_config(folder, folder / "model", steps=2)
    (folder / "sft.yaml").write_text(
        f"{{model: {{path: {folder}/model}}, task: {{name: arithmetic, held_out_size: 8, options: "
        "{digits: 1, train_size: 60}}, steps: 2, batch_size: 4, max_new_tokens: 3, out: sft}\n"
    )
    give_away(folder)


def all_commands() -> list[list[str]]:
    """Each command of `isobit` that ends by itself."""
    task = ["--task", "arithmetic", "task.options.digits=2", "--samples", "4"]
    return [
        ["doctor"],
        ["plan", "config.yaml"],
        ["train", "config.yaml", "--dry-run"],
        ["train", "config.yaml", "--quiet"],
        ["train", "--resume", "run", "steps=3", "--quiet"],
        ["train", "--from-rollouts", "run", "--out", "again", "--quiet"],
        ["sft", "sft.yaml", "--quiet"],
        ["train", "config.yaml", "model={sft: sft.yaml}", "--out", "based", "--quiet"],
        ["compare", "config.yaml", "steps=1", "--presets", "fp8,bf16", "--out", "both", "--quiet"],
        ["eval", "model", *task],
        ["generate", "model", "--prompt", "1+1=", "--max-new-tokens", "2"],
        ["inspect", "model", "--max-new-tokens", "4"],
        ["export", "model", "--to", "exported"],
        ["report", "run"],
        ["watch", "run"],
        ["verify", "run"],
    ]


@NATIVE
def test_what_was_compiled_is_found_under_the_temporary_directory(theirs: Path) -> None:
    """By the operators, silently. The control: in a home that can be written, it is in there."""
    (theirs / CACHE).mkdir(parents=True)
    shutil.copytree(cache_directory("native"), theirs / CACHE / "native", symlinks=True)
    for path in (theirs / "tmp").rglob("*"):
        path.chmod(0o700)
    give_away(theirs)
    script = "import isobit.kernels.native as n, isobit.kernels.cache as c; "
    script += "print(n.available()[1]); print(c.cache_directory('native'))"
    for home in (None, "/", "/nonexistent", str(ROOT)):
        done = run_as(["-c", script], theirs, ROOT / "src", home)
        assert (done.returncode, done.stderr) == (0, "")
        why, place = done.stdout.splitlines()
        assert why.startswith("compiled by")
        assert place == str(theirs / CACHE / "native")
    (theirs / "home").mkdir()
    give_away(theirs)
    script = "import isobit.kernels.cache as c; print(c.cache_directory('native'))"
    done = run_as(["-c", script], theirs, ROOT / "src", str(theirs / "home"))
    assert done.stdout.strip() == str(theirs / "home" / ".cache/isobit/native")


@pytest.mark.slow
@pytest.mark.parametrize("home", [None, "/"], ids=["no HOME", "HOME=/"])
def test_every_command_works_in_a_checkout(theirs: Path, home: str | None) -> None:
    """The operators are compiled into a private folder, once."""
    words = ["-c", COMMANDS, json.dumps(all_commands())]
    flags = "-O0" if available()[0] else ""
    done = run_as(words, theirs, ROOT / "src", home, ISOBIT_CXXFLAGS=flags)
    ended = [line for line in done.stdout.splitlines() if ": exit " in line]
    assert ended == [f"{command[0]}: exit 0" for command in all_commands()], done.stderr
    assert "Traceback" not in done.stderr
    assert stat.S_IMODE((theirs / CACHE).parents[1].stat().st_mode) == 0o700
    assert len(list((theirs / CACHE / "sft").glob("*/config.json"))) == 1
    if available()[0]:
        assert done.stderr.count("compiling the operators") == 1
        assert len(list((theirs / CACHE / "native").glob("*.so"))) == 1
