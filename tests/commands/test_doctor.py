"""`isobit doctor` says what runs say, and finds what makes a machine slow."""

import json
import re
from pathlib import Path

import pytest

from isobit.kernels import get_ops
from isobit.options.consistency import default_order
from isobit.precision import PRESETS
from isobit.training.commands import doctor
from isobit.training.commands.doctor import _EXTRAS, diagnose
from tests import warm
from tests.documents import ROOT


def _doctor(folder: Path, *arguments: str, **environment: str) -> str:
    done = warm.isobit(folder, "doctor", *arguments, **environment)
    # whoever finds no compiler says so once, whatever else the command says
    lost = "isobit: there are no operators in C++: CXX=no-such-compiler is not a program"
    assert done.stderr.startswith(lost) if "CXX" in environment else not done.stderr
    assert done.stderr.count("\n") <= 1
    assert done.returncode == 0
    return done.stdout


@pytest.mark.slow
def test_it_says_what_a_run_says(tmp_path: Path) -> None:
    printed = json.loads(_doctor(tmp_path, "--json"))
    assert printed["facts"]["backend"] == get_ops().why
    assert printed["facts"]["order of sums"] == default_order()
    assert all(printed["facts"].values())
    text = _doctor(tmp_path)
    assert all(f"{name} " in text for name in printed["facts"])


def test_it_says_what_of_a_preset_is_not_in_cpp() -> None:
    """As a run of that preset does; and of no other preset."""
    ops, precision = get_ops(), PRESETS["fp8-rollout-kv"]
    if ops.backend != "native":
        pytest.skip("without a compiler all is in PyTorch")
    said = diagnose().facts["in PyTorch"]
    ops.check_precision(precision)
    assert f"fp8-rollout-kv: {ops.why.rpartition(': ')[2]}" in said
    assert "fp8: " not in said


@pytest.mark.slow
def test_without_a_compiler_it_says_why_everything_is_slow_and_what_helps(tmp_path: Path) -> None:
    slow = "the operators run in PyTorch, much slower than in C++: install a compiler"
    found = _doctor(tmp_path, CXX="no-such-compiler", ISOBIT_CACHE=str(tmp_path))
    assert (
        "reference backend, because native cannot be built: CXX=no-such-compiler is not a program"
        in found
    )
    assert slow in found
    assert "CXX=no-such-compiler" in found.split("threads")[1].split("\n")[0]
    assert slow not in _doctor(tmp_path)  # the control


def test_processors_and_other_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(doctor, "processor_features", lambda: frozenset({"avx2", "fma"}))
    monkeypatch.setattr(doctor.os, "getloadavg", lambda: (7.5, 0.0, 0.0))
    advice = "\n".join(diagnose().advice)
    assert "the processor has no BF16 instructions" in advice
    assert "other work runs here: 7.5 processes were busy" in advice
    monkeypatch.setattr(
        doctor, "processor_features", lambda: frozenset({"avx2", "fma", "avx512_bf16"})
    )
    monkeypatch.setattr(doctor.os, "getloadavg", lambda: (0.1, 0.0, 0.0))
    assert not any("BF16" in line or "other work" in line for line in diagnose().advice)


def test_it_names_what_can_be_installed() -> None:
    """Every extra that a user may want; those of developers are none."""
    text = (ROOT / "pyproject.toml").read_text()
    section = text.partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    extras = {*re.findall(r"^(\w+) = \[", section, re.MULTILINE)} - {"dev", "docs", "bench"}
    assert {"serve", "trackio"} < _EXTRAS.keys() == extras
