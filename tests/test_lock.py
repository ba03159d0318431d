"""requirements.lock: what `make install` installs beside PyTorch, for every Python and platform,
with hashes."""

import re

import pytest
from packaging.markers import Marker
from packaging.specifiers import SpecifierSet

from tests.documents import ROOT

LOCK = (ROOT / "requirements.lock").read_text(encoding="utf-8")
PROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
OLDEST_PYTHON = int(re.findall(r'requires-python = ">=3\.(\d+)"', PROJECT)[0])
DEPENDENCIES = re.findall(
    r'"(.+?)"', "".join(re.findall(r"^(?:requires|dependencies) = \[[^]]*\]", PROJECT, re.M))
)
MACHINES = [("linux", "x86_64"), ("linux", "aarch64"), ("darwin", "arm64")]
ENVIRONMENTS = [
    {"python_version": f"3.{minor}", "python_full_version": f"3.{minor}.0"}
    | {"sys_platform": system, "platform_system": system.capitalize(), "platform_machine": machine}
    for minor in range(OLDEST_PYTHON, 16)
    for system, machine in MACHINES
]

_PIN = re.compile(
    r"([\w.-]+)==([\w.]+) *(?:; (.+?))? +--hash=sha256:[0-9a-f]{64}(?: "
    r"+--hash=sha256:[0-9a-f]{64})*"
)
_DEPENDENCY = re.compile(r"([A-Za-z0-9-]+)(>=[0-9.]+)")
"""As `make floor` and `make ceiling` read it too."""


def faults(lock: str) -> set[str]:
    """What is wrong with a lock: a line that is not a version with its hashes, what is PyTorch's to
    choose, and a dependency of pyproject.toml that some Python or platform gets not at all, twice
    or in a version not allowed."""
    lines = re.sub(r"^ *#.*\n", "", lock, flags=re.M).replace("\\\n", " ").splitlines()
    pins = [(line, _PIN.fullmatch(line)) for line in lines]
    found = {f"not a version with hashes: {line}" for line, pin in pins if pin is None}
    found |= {
        f"PyTorch's: {line}" for line in lines if re.match("(torch|triton)==|(nvidia|cuda)-", line)
    }
    for dependency in DEPENDENCIES:
        parts = _DEPENDENCY.fullmatch(dependency)
        assert parts is not None, dependency
        name, allowed = parts.groups()
        own = [pin for _, pin in pins if pin and pin[1] == name.lower()]
        for environment in ENVIRONMENTS:
            versions = [pin[2] for pin in own if not pin[3] or Marker(pin[3]).evaluate(environment)]
            if name != "torch" and (
                len(versions) != 1 or not SpecifierSet(allowed).contains(versions[0])
            ):
                found.add(f"{dependency}: {versions}")
    return found


def test_the_lock_has_every_dependency_with_hashes_and_names_no_index() -> None:
    assert {"torch", "setuptools", "jinja2"} <= {
        re.split("[>=]", dependency)[0] for dependency in DEPENDENCIES
    }
    assert faults(LOCK) == set()


@pytest.mark.parametrize(
    ("jinja2", "fault"),
    [
        ("", "jinja2>=3.1.6: []"),
        (r"jinja2==3.1.5\1", "jinja2>=3.1.6: ['3.1.5']"),
        (r"jinja2==3.1.6\1jinja2==3.1.6\1", "jinja2>=3.1.6: ['3.1.6', '3.1.6']"),
        (r"jinja2==3.1.6 ; sys_platform == 'linux'\1", "jinja2>=3.1.6: []"),
        (r"jinja2==3.1.6 ; python_full_version >= '3.12'\1", "jinja2>=3.1.6: []"),
        ("jinja2==3.1.6\n", "not a version with hashes: jinja2==3.1.6"),
        (
            r"--index-url https://example.com/\n\g<0>",
            "not a version with hashes: --index-url https://example.com/",
        ),
        (r"\g<0>torch==2.13.0\1", "PyTorch's: torch==2.13.0"),
    ],
)
def test_another_lock_is_refused(jinja2: str, fault: str) -> None:
    """The control: the same lock with another entry for jinja2."""
    changed = re.sub(r"^jinja2==[\d.]+( \\\n(?: +--hash.*\n)+)", jinja2, LOCK, flags=re.M)
    assert changed != LOCK
    assert any(found.startswith(fault) for found in faults(changed))
