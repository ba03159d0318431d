"""Which tests a change concerns, by rooms: what CI runs of the tests that `make test` leaves out.

A file of tests belongs to the room of its folder and to the rooms of the modules that it names. It
is concerned by a change in one of these rooms, by one in a module that such a room imports, and by
one in any file of the tests that it imports. A file that is no source concerns the tests that name
it or a folder around it.

This is narrower than all that a test can reach (`reach.py`), which is nearly everything for nearly
every test.
"""

import functools
from collections.abc import Iterable
from pathlib import Path

from tests.reach import ROOT, imports, reached

_SOURCE, _TESTS = ROOT / "src/isobit", ROOT / "tests"
_ROOMS = {
    "commands": {"cli", "training/commands"},
    "environments": {"tasks/environments"},
    "experiments": {"benchmarks"},
    "faults": {"run", "training"},
    "fleet": {"engine/fleet"},
    "gpu": {"benchmarks"},
    "inspection": {"evaluation"},
    "other_trainers": {"benchmarks"},
    "plan": {"training/plan"},
    "report": {"monitor"},
    "rewards": {"tasks/rewards"},
    "strangers": {"tasks/environments", "tasks/rewards", "tasks/workers"},
    "tasks": {"tasks/builtin"},
    "trackers": {"monitor"},
    "view": {"monitor"},
}
"""The rooms of folders of tests that have another name."""
_ROOMS_INSIDE = {"tasks", "engine/fleet", "training/commands", "training/plan"}
"""Folders whose inner folders, or which themselves, are rooms apart from the one around them."""
_CONCERN_ALL = {
    "tests/conftest.py",
    "tests/models.py",
    "tests/warm.py",
    "tests/__init__.py",
}


def room(path: Path) -> str:
    """Return the room of a file: a folder or file of `src/isobit`, `benchmarks`, or "" for
    others."""
    if _SOURCE in path.parents:
        outer, *inner = path.relative_to(_SOURCE).parts
        narrow = f"{outer}/{inner[0]}" if inner else ""
        if len(inner) > 1 and (outer in _ROOMS_INSIDE or narrow in _ROOMS_INSIDE):
            return narrow
        return outer.removesuffix(".py")
    return "benchmarks" if ROOT / "benchmarks" in path.parents else ""


@functools.cache
def rooms_of_test(test: Path) -> frozenset[str]:
    """Return the rooms that a file of tests belongs to; of none, where it names no module and its
    folder no room, as a test of commands alone."""
    folder = test.relative_to(_TESTS).parts[0]
    own = _ROOMS.get(folder, {folder} if (_SOURCE / folder).is_dir() else set[str]())
    return frozenset(own | {room(path) for path in _named(test)} - {""})


@functools.cache
def _named(test: Path) -> frozenset[Path]:
    """Return the modules that a test imports itself; packages around them do not count."""
    return frozenset(path for path in imports(test) if path.name != "__init__.py")


@functools.cache
def _importers() -> dict[Path, set[str]]:
    """Return the rooms that import each module directly."""
    rooms: dict[Path, set[str]] = {}
    for path in (*_SOURCE.rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")):
        for module in imports(path):
            rooms.setdefault(module, set()).add(room(path))
    return rooms


@functools.cache
def concerned_rooms(name: str) -> frozenset[str]:
    """Return the rooms that a change of a source file concerns: its own, and those that import it."""
    return frozenset({room(ROOT / name)} | _importers().get(ROOT / name, set()))


@functools.cache
def _texts(test: Path) -> str:
    """Return the sources of a test and of the tests' modules that it imports."""
    files = {test, *(path for path in reached([test]) if _TESTS in path.parents)}
    return "\n".join(path.read_text(encoding="utf-8") for path in sorted(files))


def _names(test: Path, name: str) -> bool:
    """Return whether a test names a file that is no source, or the folder that it is in."""
    texts = _texts(test)
    return any(word in texts for word in (Path(name).name, f"{name.partition('/')[0]}/"))


def concerns(test: Path, changed: Iterable[str] | None) -> bool:
    """Return whether a file of tests must run after changes of files, named from the root.

    None stands for changes that are not known, which concern every test.
    """
    if changed is None:
        return True
    own = rooms_of_test(test)
    for name in changed:
        path = ROOT / name
        if name in _CONCERN_ALL or path == test:
            return True
        if _TESTS in path.parents:
            beside = path.name == "conftest.py" and path.parent in test.parents
            if beside or path in reached([test]) or (path.suffix != ".py" and _names(test, name)):
                return True
        elif room(path) and (path.suffix == ".py" or _SOURCE in path.parents):
            if not own or own & concerned_rooms(name):
                return True
        elif _names(test, name):
            return True
    return False
