"""Which cases run: `make test` leaves out what takes long and says little more, `make test-full`
nothing.

- Where a test has three parameters or more, `make test` runs a covering of all pairs of their
  values (`pairwise.py`).
- A file of tests is left out by `make test` if nothing that it reaches (`reach.py`) has changed
  since all tests passed here: digests are kept in `.pytest_cache`. What starts a command or reads
  the documents reaches everything, and always runs; of Triton's cases, in its interpreter and its
  compiler, it is known what they reach. A fresh checkout has no digests, and runs all.
- What is marked slow is left to `make test-rest`, which runs all that `make test` leaves out.
"""

import os
import sys
from collections.abc import Sequence
from importlib.metadata import distributions
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from tests.models import SHARED
from tests.pairwise import covering
from tests.reach import ROOT, changed_since, digest, reached, reached_by_test, sums
from tests.rooms import concerns

_COMPILED = ("test_kernel_table", "test_offsets", "test_small_heads")
TRITON = (
    ROOT / "tests/kernels/triton",
    *(ROOT / f"tests/kernels/{name}.py" for name in _COMPILED),
)
WORKERS = ("-n", "3", "--dist", "worksteal")
"""Three on two cores: tests wait for processes for a fifth of their time."""
FAST, FULL = (*WORKERS, "-m", "not slow"), (*WORKERS, "--full")
"""What follows `python -m pytest` in the Makefile, for `test` and `test-full`: only after these
digests are kept, and only in the first files may be left out."""
_PASSED = "isobit/passed"


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options of this suite."""
    group = parser.getgroup("isobit")
    group.addoption("--full", action="store_true", help="every combination of parameters")
    group.addoption("--rest", action="store_true", help="only what `make test` leaves out")
    group.addoption(
        "--since",
        default="",
        metavar="REVISION",
        help="only files that a change since then concerns, by rooms (tests/rooms.py)",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Which files are left out; workers are told."""
    command = _command(config)
    config.stash[_UNCHANGED] = frozenset(getattr(config, "workerinput", {}).get("unchanged", ()))
    if command in (FAST, FULL):
        now, passed = digests(), config.cache.get(_PASSED, {})
        if command == FAST:
            same = (file for file, known in now.items() if passed.get(file) == known)
            config.stash[_UNCHANGED] = frozenset(same)
        config.stash[_NOW] = now


@pytest.hookimpl(optionalhook=True)  # xdist's
def pytest_configure_node(node: Any) -> None:
    """A worker is given the arguments of the command, and not what was found since."""
    node.workerinput["unchanged"] = sorted(node.config.stash[_UNCHANGED])


_UNCHANGED = pytest.StashKey[frozenset[str]]()
_NOW = pytest.StashKey[dict[str, str]]()


def pytest_report_header(config: pytest.Config) -> str | None:
    """How many files are left out, and why."""
    count = len(config.stash[_UNCHANGED])
    why = "passed here, and nothing that they reach has changed since; all run: make test-full"
    return f"{count} files of tests {why}" if count else None


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Where all has passed, what every file of tests has reached is written down."""
    now = session.config.stash.get(_NOW, None)
    if exitstatus == 0 and now:
        session.config.cache.set(_PASSED, now)


def _command(config: pytest.Config) -> tuple[str, ...]:
    worker = hasattr(config, "workerinput") or "PYTEST_ADDOPTS" in os.environ
    return () if worker else tuple(map(str, config.invocation_params.args))


def digests() -> dict[str, str]:
    """Of every file of tests that cannot reach everything: of the Python that it reaches, of all
    else in the source and the tests, such as operators in C++, and of what runs it."""
    known = sums("src/isobit", "tests", "benchmarks", "docs")
    files = [path for path in known if path.name.startswith("test_") and path.suffix == ".py"]
    source, tests = ROOT / "src", ROOT / "tests"
    around = {
        path for path in known if path.suffix != ".py" and {source, tests} & {*path.parents}
    } | {tests / "conftest.py", source / "isobit/__init__.py", source / "isobit/__main__.py"}
    words, found = _what_runs_them(), {}
    triton = _reached_by_triton([path for path in files if is_triton(path)], set(known))
    for path in files:
        reach = triton if is_triton(path) else reached_by_test(path)
        if reach is not None:
            name = path.relative_to(ROOT).as_posix()
            found[name] = digest(reach | around, known, name, *words)
    return found


def _reached_by_triton(files: Sequence[Path], known: set[Path]) -> set[Path]:
    """What Triton's cases reach: the sources, all operators, and what they compile for the page of
    kernels."""
    folders = {ROOT / name for name in ("src/isobit/kernels", "src/isobit/precision", "benchmarks")}
    own = {ROOT / "docs/gpu.md"} | {path for path in known if folders & {*path.parents}}
    return own | reached([*files, ROOT / "tests/models.py"])


def _what_runs_them() -> list[str]:
    """Python, every installed package, the processor, and whether the data beside the checkout is
    there."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    packages = sorted({f"{each.name} {each.version}" for each in distributions()})
    processor = sorted({line for line in lines if line.startswith(("model name", "flags"))})
    return [sys.version, *packages, *processor, str(SHARED.is_dir())]


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
    unchanged = {ROOT / name for name in config.stash[_UNCHANGED]}
    kept = [item for item in kept if item.path not in unchanged]
    if option.since:
        changed = changed_since(option.since)
        kept = [item for item in kept if concerns(item.path, changed)]
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
