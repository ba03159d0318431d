"""Which cases run: `make test` leaves out what takes long and says little more, `make test-full`
nothing.

- Where a test has three parameters or more, `make test` runs a covering of all pairs of their
  values (`pairwise.py`).
- Triton's cases, in its interpreter and its compiler, are run by `make test` if anything that they
  reach has changed since they passed here: a digest of it is kept in `.pytest_cache`. A fresh
  checkout has none, and runs them.
- What is marked slow is left to `make test-rest`, which runs all that `make test` leaves out.
"""

import os
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from tests.pairwise import covering
from tests.reach import ROOT, can_reach, changed_since, digest, reached

_COMPILED = ("test_kernel_table", "test_offsets", "test_small_heads")
TRITON = (
    ROOT / "tests/kernels/triton",
    *(ROOT / f"tests/kernels/{name}.py" for name in _COMPILED),
)
WORKERS = ("-n", "2", "--dist", "worksteal")
FAST, FULL = (*WORKERS, "-m", "not slow"), (*WORKERS, "--full")
"""What follows `python -m pytest` in the Makefile, for `test` and `test-full`: only after these a
digest is kept, and only in the first Triton's cases may be left out."""
_PASSED = "isobit/triton"


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options of this suite."""
    group = parser.getgroup("isobit")
    group.addoption(
        "--full", action="store_true", help="every combination of parameters, and Triton's cases"
    )
    group.addoption("--rest", action="store_true", help="only what `make test` leaves out")
    group.addoption(
        "--since",
        default="",
        metavar="REVISION",
        help="only files that a change since then can reach",
    )
    group.addoption(
        "--without-triton", action="store_true", help="leave out the cases of Triton's interpreter"
    )


def pytest_configure(config: pytest.Config) -> None:
    """What the whole suite leaves out; its workers are told."""
    command, told = _command(config), getattr(config, "workerinput", {})
    config.option.without_triton |= told.get("without_triton", False)
    if command in (FAST, FULL):
        now = triton_digest()
        passed = config.cache.get(_PASSED, "")
        config.option.without_triton |= command == FAST and passed == now
        config.stash[_KEY] = now


@pytest.hookimpl(optionalhook=True)  # xdist's
def pytest_configure_node(node: Any) -> None:
    """A worker is given the arguments of the command, and not what was set since."""
    node.workerinput["without_triton"] = node.config.option.without_triton


_KEY = pytest.StashKey[str]()


def pytest_report_header(config: pytest.Config) -> str | None:
    """That Triton's cases are left out, and why."""
    without = _command(config) == FAST and config.option.without_triton
    return (
        "Triton's cases passed here, and nothing that they reach has changed since"
        if without
        else None
    )


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Where all has passed, what Triton's cases have reached is written down."""
    now = session.config.stash.get(_KEY, None)
    if exitstatus == 0 and now:
        session.config.cache.set(_PASSED, now)


def _command(config: pytest.Config) -> tuple[str, ...]:
    worker = hasattr(config, "workerinput") or "PYTEST_ADDOPTS" in os.environ
    return () if worker else tuple(map(str, config.invocation_params.args))


def triton_digest() -> str:
    """Of the sources that Triton's cases reach, of all operators, of what they compile for the page
    of kernels, and of the versions that run them."""
    tests = [
        path for place in TRITON for path in (place.rglob("*.py") if place.is_dir() else [place])
    ]
    own = [ROOT / name for name in ("tests/conftest.py", "tests/models.py", "docs/gpu.md")]
    folders = [ROOT / name for name in ("src/isobit/kernels", "src/isobit/precision", "benchmarks")]
    files = {path for folder in folders for path in folder.rglob("*.*") if path.is_file()}
    versions = [f"{name} {_version(name)}" for name in ("torch", "triton", "numpy")]
    sources = reached([*tests, ROOT / "tests/models.py"]) | files | {*own}
    return digest({path for path in sources if path.suffix != ".pyc"}, sys.version, *versions)


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "none"


def is_slow(item: pytest.Item) -> bool:
    """Whether it is marked slow."""
    return item.get_closest_marker("slow") is not None


def is_triton(path: Path) -> bool:
    """Whether a file of tests is run by Triton's interpreter or compiler."""
    return any(path == place or place in path.parents for place in TRITON)


def select(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave in `items` what the options ask for."""
    option = config.option
    kept = list(items)
    if option.rest:
        fast = {item.nodeid for item in paired([item for item in items if not is_slow(item)])}
        kept = [item for item in items if item.nodeid not in fast]
    elif not option.full:
        kept = paired(items)
    if option.without_triton:
        kept = [item for item in kept if not is_triton(item.path)]
    if option.since:
        changed = changed_since(option.since)
        kept = [item for item in kept if can_reach(item.path, changed)]
    if len(kept) < len(items):
        names = {item.nodeid for item in kept}
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in names])
        items[:] = kept


def paired(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """The items, and of a function with three parameters or more only a covering of the pairs of
    their values."""
    kept: list[pytest.Item] = []
    for _, group in groupby(items, key=lambda item: item.nodeid.partition("[")[0]):
        cases = list(group)
        rows = [_values(case) for case in cases]
        many = all(len(row) > 2 for row in rows)
        kept += [cases[place] for place in covering(rows)] if many else cases
    return kept


def _values(item: pytest.Item) -> tuple[tuple[int, ...], ...]:
    """What a case has of every `parametrize` and of every fixture with parameters, by identity: the
    cases of a function share their values."""
    first = {}
    for mark in item.iter_markers("parametrize"):
        given = mark.args[0] if mark.args else mark.kwargs["argnames"]
        names = (
            [name.strip() for name in given.split(",")] if isinstance(given, str) else list(given)
        )
        first |= dict.fromkeys(names, names[0])
    values: dict[str, list[int]] = {}
    for name, value in item.callspec.params.items() if hasattr(item, "callspec") else ():
        values.setdefault(first.get(name, name), []).append(id(value))
    return tuple(map(tuple, values.values()))
