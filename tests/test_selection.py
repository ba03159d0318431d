"""What `make test` leaves out is what it says, and nothing that a change can reach is left out in
CI."""

import ast
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests import reach, rooms, selection
from tests.pairwise import covering
from tests.reach import ROOT

TRITON, ENGINE = "tests/kernels/triton/test_norm.py", "tests/engine/test_engine.py"
QUANTIZE, SELECTION = "tests/precision/test_quantize.py", "tests/test_selection.py"
SHAPES = [(2, 2), (4, 3), (2, 2, 2), (4, 4, 4), (6, 6, 2), (2, 3, 4, 5), (3, 3, 3, 3, 3)]


@pytest.fixture(scope="module")
def before() -> dict[str, str]:
    """The digests of the files as they are."""
    return selection.digests()


def missing(rows: list[tuple[int, ...]], shape: tuple[int, ...]) -> set[tuple[int, int, int, int]]:
    """Pairs of values (column, value, column, value) that no row has."""
    columns = itertools.combinations(range(len(shape)), 2)
    pairs = {(i, a, j, b) for i, j in columns for a in range(shape[i]) for b in range(shape[j])}
    return {
        (i, a, j, b) for i, a, j, b in pairs if not any(row[i] == a and row[j] == b for row in rows)
    }


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_pair_of_values_meets_and_no_row_is_for_nothing(shape: tuple[int, ...]) -> None:
    rows = list(itertools.product(*map(range, shape)))
    chosen = [rows[place] for place in covering(rows)]
    assert not missing(chosen, shape)
    assert all(missing([row for row in chosen if row != gone], shape) for gone in chosen), (
        "the control"
    )
    assert len(chosen) <= 1.6 * max(a * b for a, b in itertools.combinations(shape, 2))
    assert covering(rows) == covering(list(rows))


def test_pairs_that_no_row_has_are_not_asked_for() -> None:
    assert covering([]) == []
    assert covering([(0, 0, 0), (1, 1, 1)]) == [0, 1]
    assert covering([(0, 0, 0)] * 3) == [0]


CASES = """
import pytest

@pytest.mark.parametrize("a", [0, 1])
@pytest.mark.parametrize(("b", "c"), [(0, 1), (2, 3), (4, 5)])
@pytest.mark.parametrize("d", [0, 1])
def test_three(a, b, c, d): ...

@pytest.mark.parametrize("a", [0, 1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("b", [0, 1])
def test_two(a, b): ...

@pytest.mark.slow
def test_slow(): ...
"""


def collected(folder: Path, *options: str) -> set[str]:
    """The cases that run of a file with CASES, by pytest with this suite's options."""
    (folder / "conftest.py").write_text(
        "from tests.selection import *\n"
        "def pytest_collection_modifyitems(config, items):\n    select(config, items)\n"
        "pytest_collection_modifyitems.trylast = True\n"
    )
    (folder / "test_cases.py").write_text(CASES)
    command = [sys.executable, "-m", "pytest", "--collect-only", "-p", "no:cacheprovider"]
    command += ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(folder), *options, str(folder)]
    alone = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # others' plugins take a second
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=alone)
    return {line.rpartition("::")[2] for line in done.stdout.splitlines() if "::" in line} or {
        done.stdout
    }


@pytest.mark.slow
def test_make_test_and_the_rest_are_the_whole(tmp_path: Path) -> None:
    full = collected(tmp_path, "--full")
    assert len(full) == 12 + 6 + 1
    fast, rest = collected(tmp_path, "-m", "not slow"), collected(tmp_path, "--rest")
    assert fast | rest == full
    assert not fast & rest
    assert {name for name in fast if "two" in name} == {
        f"test_two[{b}-{a}]" for a in (0, 1) for b in (0, 1)
    }
    assert len([name for name in fast if "three" in name]) == 6
    one = collected(tmp_path, "-k", "test_three and 0-2-3-1")
    assert one == {"test_three[0-2-3-1]"}, "a case that is asked for runs"


def test_the_makefile_has_the_commands_after_which_files_may_be_left_out() -> None:
    text = (ROOT / "Makefile").read_text()
    for words in (selection.FAST, selection.FULL):
        quoted = " ".join(f'"{word}"' if " " in word else word for word in words)
        assert f"-m pytest {quoted}\n" in text


class Kept(dict[str, Any]):
    """pytest's cache."""

    def set(self, key: str, value: Any) -> None:
        self[key] = value


def session(kept: Kept, words: tuple[str, ...], status: int, **more: Any) -> list[str]:
    """The files that a run of pytest after these words leaves out; it ends with this status."""
    config: Any = SimpleNamespace(
        invocation_params=SimpleNamespace(args=words),
        cache=kept,
        stash=pytest.Stash(),
        **more,
    )
    selection.pytest_configure(config)
    node = SimpleNamespace(config=config, workerinput={})
    selection.pytest_configure_node(node)
    without = node.workerinput["unchanged"]
    assert bool(selection.pytest_report_header(config)) == bool(without)
    selection.pytest_sessionfinish(cast("pytest.Session", SimpleNamespace(config=config)), status)
    return cast("list[str]", without)


def test_files_are_left_out_only_where_the_whole_suite_has_passed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = {"a": "1", "b": "1"}
    monkeypatch.setattr(selection, "digests", found.copy)
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    kept, fast, full = Kept(), selection.FAST, selection.FULL
    for words in ((*fast, "-k", "a"), (*fast, "tests/rl"), fast[:-2], ()):
        assert not session(kept, words, 0)
    assert not session(kept, fast, 0, workerinput={})
    assert session(kept, fast, 0, workerinput={"unchanged": ["b"]}) == ["b"]
    assert not session(kept, fast, 1)
    assert not kept, "only the whole counts, and only where all has passed"
    assert not session(kept, fast, 0)
    assert session(kept, fast, 1) == ["a", "b"]
    assert not session(kept, full, 0)
    monkeypatch.setenv("PYTEST_ADDOPTS", "-k a")
    assert not session(kept, fast, 0)
    monkeypatch.delenv("PYTEST_ADDOPTS")
    found["b"] = "2"
    assert session(kept, fast, 1) == ["a"]
    assert not session(kept, full, 0)
    assert session(kept, fast, 0) == ["a", "b"]


def test_a_file_that_is_left_out_has_no_case(tmp_path: Path) -> None:
    items = [SimpleNamespace(path=ROOT / f"tests/test_{name}.py", nodeid=name) for name in "ab"]
    stash = pytest.Stash()
    hook = SimpleNamespace(pytest_deselected=lambda items: None)
    option = SimpleNamespace(rest=False, full=True, since="")
    config: Any = SimpleNamespace(
        stash=stash, hook=hook, option=option, workerinput={"unchanged": ["tests/test_b.py"]}
    )
    selection.pytest_configure(config)
    selection.select(config, cast("list[pytest.Item]", items))
    assert [item.nodeid for item in items] == ["a"]


def test_tritons_cases_are_where_they_are_looked_for() -> None:
    assert all(place.exists() for place in selection.TRITON)
    files = [path for path in (ROOT / "tests").rglob("test_*.py") if selection.is_triton(path)]
    assert len(files) > 15
    assert ROOT / "tests/kernels/triton/test_norm.py" in files
    assert ROOT / "tests/kernels/test_attention.py" not in files


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "noticed", "not_noticed"),
    [
        ("src/isobit/kernels/norms/triton/norm.py", {TRITON, ENGINE}, {QUANTIZE}),
        ("src/isobit/precision/quantize.py", {TRITON, ENGINE, QUANTIZE}, set()),
        ("src/isobit/kernels/native/interface.cpp", {TRITON, ENGINE, QUANTIZE}, set()),
        ("tests/kernels/triton/helpers.py", {TRITON}, {ENGINE, QUANTIZE}),
        ("tests/engine/helpers.py", {ENGINE}, {TRITON, QUANTIZE}),
        ("src/isobit/errors.py", {TRITON, ENGINE, QUANTIZE}, set()),
        ("tests/conftest.py", {TRITON, ENGINE, QUANTIZE}, set()),
        ("src/isobit/training/loop.py", set(), {TRITON, ENGINE, QUANTIZE}),
    ],
)
def test_what_a_file_reaches_changes_its_digest(
    file: str,
    noticed: set[str],
    not_noticed: set[str],
    before: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read = Path.read_bytes
    changed = lambda path: read(path) + b"\n" if path == ROOT / file else read(path)  # noqa: E731
    monkeypatch.setattr(Path, "read_bytes", changed)
    assert (ROOT / file).is_file()
    now = selection.digests()
    assert now.keys() == before.keys()
    differing = {name for name in now if now[name] != before[name]}
    assert differing >= noticed
    assert not differing & not_noticed


def test_what_runs_them_is_in_their_digests(
    before: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "version", "another")
    assert not set(before.items()) & set(selection.digests().items())


def test_what_starts_commands_is_always_run(before: dict[str, str]) -> None:
    assert not before.keys() & {"tests/test_docs.py", "tests/test_resume.py", SELECTION}
    assert len(before) > 150


@pytest.mark.parametrize(
    ("test", "changed", "runs"),
    [
        ("tests/precision/test_quantize.py", "src/isobit/precision/quantize.py", True),
        ("tests/precision/test_quantize.py", "src/isobit/engine/engine.py", False),
        ("tests/kernels/test_sums.py", "src/isobit/precision/quantize.py", True),
        ("tests/rl/test_loss.py", "src/isobit/rl/algorithm/loss.py", True),
        ("tests/rl/test_loss.py", "src/isobit/serve/app.py", False),
        ("tests/engine/test_engine.py", "tests/engine/helpers.py", True),
        ("tests/engine/test_engine.py", "src/isobit/training/loop.py", False),
        ("tests/engine/test_engine.py", "src/isobit/errors.py", True),
        ("tests/training/test_loop.py", "src/isobit/training/loop.py", True),
        ("tests/trackers/test_bad_input.py", "src/isobit/monitor/trackers/wandb.py", True),
        ("tests/kernels/test_sums.py", "tests/kernels/conftest.py", True),
        ("tests/precision/test_quantize.py", "tests/kernels/conftest.py", False),
        ("tests/precision/test_quantize.py", "tests/conftest.py", True),
        ("tests/precision/test_quantize.py", "pyproject.toml", False),
        ("tests/test_lock.py", "pyproject.toml", True),
        ("tests/test_docs.py", "docs/how-to/serve.md", True),
        ("tests/engine/test_engine.py", "docs/how-to/serve.md", False),
        ("tests/kernels/test_sums.py", "src/isobit/kernels/native/interface.cpp", True),
        ("tests/serve/test_chat.py", "src/isobit/kernels/native/interface.cpp", False),
        ("tests/test_stories.py", "src/isobit/kernels/native/interface.cpp", True),
    ],
)
def test_what_a_change_concerns(test: str, changed: str, runs: bool) -> None:
    assert (ROOT / changed).is_file()
    assert rooms.concerns(ROOT / test, {changed}) is runs
    assert rooms.concerns(ROOT / test, None), "what has changed is not known"
    assert not rooms.concerns(ROOT / test, set())


def test_every_room_has_tests_that_a_change_in_it_concerns() -> None:
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    for folder in sorted((ROOT / "src/isobit").glob("[a-z]*/")):
        module = next(path for path in sorted(folder.rglob("*.py")) if path.name != "__init__.py")
        name = module.relative_to(ROOT).as_posix()
        concerned = [path for path in files if rooms.concerns(path, {name})]
        own = [path for path in concerned if rooms.rooms_of_test(path)]
        assert own, name
        assert len(concerned) < 0.9 * len(files), f"{name} concerns nearly everything"


def test_a_name_in_a_text_is_an_import() -> None:
    """Workers are started, and trackers found, by their modules' names."""
    code = """
from isobit.run import directory
if TYPE_CHECKING:
    import isobit.engine
def start(name):
    call("-m", "isobit.tasks.rewards.worker", f"isobit.monitor.trackers.{name}", "isobit.cli:main", "isobit.nowhere")
"""
    found = set(reach.named(ast.parse(code), "isobit.engine.fleet"))
    assert found >= {
        "isobit.run.directory",
        "isobit.tasks.rewards.worker",
        "isobit.monitor.trackers.wandb",
        "isobit.cli",
    }
    assert not found & {"isobit.engine", "isobit.nowhere"}
    assert set(reach.named(ast.parse("from . import a\nfrom ..b import c"), "x.y")) == {
        "x.y.a",
        "x.b.c",
    }
    assert ROOT / "src/isobit/engine/engine.py" in reach.imports(ROOT / "src/isobit/__init__.py")


@pytest.mark.slow
def test_what_a_test_imports_is_what_it_reaches() -> None:
    """Against Python itself: every module of a test that is loaded is a file that it reaches."""
    test = "tests.engine.test_engine"
    code = (
        f"import {test}, json, sys; print(json.dumps([m for m in sys.modules if "
        "m.startswith(('isobit', 'tests'))]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    files = {path for name in json.loads(done.stdout) if (path := reach.file_of(name))}
    assert len(files) > 60
    found = reach.reached_by_test(ROOT / "tests/engine/test_engine.py") or set()
    assert not {path for path in files if path.name != "__init__.py"} - found
