"""Every file of a run directory, harmed in every way, under every command that reads it: each says
in a line what is wrong, or says that something is and goes on, or does what it does for a whole
run. None has a traceback, and none gives other numbers without a word."""

import hashlib
import re
import shutil
import sys
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest

from isobit.cli import main
from isobit.config import load_config
from isobit.training.train import train
from tests.models import slow_where
from tests.runs import fingerprint, write_config

NEWEST = "checkpoints/step-000004"
FILES = [
    *(f"best/{name}" for name in ("best.json", "manifest.json", "model.safetensors")),
    *(f"{NEWEST}/{name}" for name in ("config.json", "generation_config.json", "manifest.json")),
    *(f"{NEWEST}/{name}" for name in ("model.safetensors", "tokenizer.json")),
    f"{NEWEST}/tokenizer_config.json",
    *(f"{NEWEST}/trainer/{name}.json" for name in ("certificate", "state")),
    f"{NEWEST}/trainer/optimizer.safetensors",
    *("certificate.jsonl", "completions.jsonl.gz", "held_out.jsonl.gz", "metrics.jsonl"),
    *("quantization.jsonl", "config.yaml", "format.txt", "inputs.json", "machine.json"),
    *("resolved.json", "report.html", ".lock"),
]


HARMS: dict[str, Callable[[Path, Path], object]] = {
    "half": lambda path, other: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "zeros": lambda path, other: path.write_bytes(bytes(path.stat().st_size or 1)),
    "another run's": lambda path, other: shutil.copy(other, path),
    "missing": lambda path, other: path.unlink(),
}
COMMANDS: dict[str, Callable[[Path, Path], tuple[object, ...]]] = {
    "report": lambda run, out: ("report", run, "--out", out),
    "watch": lambda run, out: ("watch", run, "--once"),
    "verify": lambda run, out: ("verify", run),
    "generate": lambda run, out: (
        "generate",
        run,
        "--prompt",
        "1+1=",
        "--json",
        "--max-new-tokens",
        3,
    ),
    "eval": lambda run, out: ("eval", run, "-n", 1),
    "eval --best": lambda run, out: ("eval", run, "--best", "-n", 1),
    "export": lambda run, out: ("export", run, "--to", out),
    "export --best": lambda run, out: ("export", run, "--best", "--to", out),
    "replay": lambda run, out: ("train", "--from-rollouts", run, "--out", out, "--quiet"),
    "resume": lambda run, out: ("train", "--resume", run, "--quiet"),
    "extend": lambda run, out: ("train", "--resume", run, "steps=5", "--quiet"),
}  # those that write into the run last


WITHOUT = {
    *(("report", name) for name in ("quantization.jsonl", "resolved.json", "held_out.jsonl.gz")),
    ("watch", "completions.jsonl.gz"),
}
"""Nothing is shown of what was never recorded."""
UNHELD = {
    *(("report", name) for name in ("completions.jsonl.gz", "config.yaml", "resolved.json")),
    *(("report", name) for name in ("held_out.jsonl.gz", "quantization.jsonl")),
    *(("watch", name) for name in ("completions.jsonl.gz", "config.yaml")),
    *((command, "config.yaml") for command in ("eval", "eval --best", "replay", "export")),
}
"""A page shows another run's whole file as it stands; `verify` says whose it is not."""
SHORTER = {(command, name) for command, name in UNHELD if name == "config.yaml"}
"""The first keys of a config may be a whole one, which `verify` says too."""
KEPT = {(command, "quantization.jsonl") for command in ("resume", "extend")}
"""A run that goes on appends to figures that nothing else is computed from."""


class Result(NamedTuple):
    """Of a command: its exit code, what it printed, and what it made."""

    code: int
    out: str
    err: str
    made: Any


def _run(command: str, run: Path, out: Path) -> Result:
    words = [str(word) for word in COMMANDS[command](run, out)]
    printed, said = StringIO(), StringIO()
    with (
        patch.object(sys, "argv", ["isobit", *words]),
        redirect_stdout(printed),
        redirect_stderr(said),
        pytest.raises(SystemExit) as end,
    ):
        main()
    code, made = int(end.value.code or 0), None
    if code == 0 and command in ("resume", "extend", "replay"):
        made = fingerprint(out if command == "replay" else run)
    elif code == 0 and out.is_dir():
        made = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in out.iterdir()}
    elif code == 0 and out.is_file():
        made = re.sub(r"20\d\d-\d\d-\d\d \d\d:\d\d", "", out.read_text())
    shutil.rmtree(out, ignore_errors=True)
    out.unlink(missing_ok=True)
    return Result(code, printed.getvalue(), said.getvalue(), made)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, base_model: Path) -> Path:
    """A folder with two runs, `whole` and `other`, of two seeds."""
    folder = tmp_path_factory.mktemp("harmed")
    more = {"evaluation": {"every": 2, "samples": 2}}
    for seed, name in enumerate(("whole", "other")):
        saved = {"dir": str(folder / name), "report": True, "keep_last": 3}
        config = write_config(folder, base_model, seed=seed, run=saved, **more)
        train(load_config(config), quiet=True)
    return folder


def _fresh(place: Path) -> Path:
    shutil.rmtree(place / "run", ignore_errors=True)
    return Path(shutil.copytree(place / "whole", place / "run"))


@pytest.fixture(scope="module")
def controls(place: Path) -> Mapping[str, Result]:
    """What each command does for a whole run: it works, and says nothing."""
    found = {}
    for command in COMMANDS:
        found[command] = _run(command, _fresh(place), place / "out")
        assert (found[command].code, found[command].err) == (0, ""), command
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "harm"),
    slow_where(
        [(name, harm) for name in FILES for harm in HARMS],
        lambda name, harm: (
            list(HARMS)[FILES.index(name) % len(HARMS)] != harm or FILES.index(name) % 4 != 0
        ),
    ),
)
def test_a_harmed_file_is_said_or_harmless(
    place: Path, controls: Mapping[str, Result], name: str, harm: str
) -> None:
    run, wrong = _fresh(place), list[str]()
    before = _bytes(run / name)
    HARMS[harm](run / name, place / "other" / name)
    if _bytes(run / name) == before:
        pytest.skip("both runs have the same file")
    harmed = place / "harmed"
    shutil.rmtree(harmed, ignore_errors=True)
    run.rename(harmed)
    for command, control in controls.items():
        shutil.rmtree(run, ignore_errors=True)
        shutil.copytree(harmed, run)
        found = _run(command, run, place / "out")
        lines = found.err.splitlines()
        shown = {
            "missing": WITHOUT, "another run's": UNHELD, "half": SHORTER, "zeros": KEPT,
        }.get(harm, ())  # fmt: skip
        same = found == control or (found.code == 0 and (command, name) in shown)
        told = bool(lines) and not any("Traceback" in line for line in lines)
        refused = found.code in (1, 2) and len(lines) == 1 and lines[0].startswith("isobit: ")
        if not (same or refused or (found.code == 0 and told)):
            wrong.append(f"{command}: {found.code} {found.err[-300:]!r} {found.out[:200]!r}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
def test_control_other_numbers_are_seen(place: Path, controls: Mapping[str, Result]) -> None:
    """Of the other run, whose files all belong together, each command says something else; its best model
    may be the same, that of their beginning."""
    shutil.rmtree(place / "run", ignore_errors=True)
    shutil.copytree(place / "other", place / "run")
    for command, control in controls.items():
        found = _run(command, place / "run", place / "out")
        assert found != control or "--best" in command, command


def _bytes(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None
