"""The shape of the code: imports one way, small files and functions, nothing that executes what a
user loads."""

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "isobit"
MODULES = sorted(SOURCE.rglob("*.py"))
MOST_FILE_LINES, MOST_FUNCTION_LINES = 500, 80

FLOORS = [
    {"cli"},
    {"training", "config"},
    {"evaluation", "rl", "engine", "serve"},
    {"model"},
    {"distributed", "kernels", "precision"},
    {"monitor", "run", "tasks", "data", "options", "errors", "moved"},
]
"""From the top down: a room imports what stands below it, and rooms of its own floor where no
circle comes of it."""
LIGHT = FLOORS[-1]
"""Nothing here imports torch: reward workers, pages and trackers start at once."""
MOST_LOOSE = {"model": 8, "rl": 0, "training": 10, "monitor": 0, "kernels": 9}
"""Files of a large room that lie beside its inner rooms, at most."""


@functools.cache
def text_of(path: Path) -> str:
    """A file of the source, read once."""
    return path.read_text(encoding="utf-8")


@functools.cache
def parsed(path: Path) -> ast.Module:
    """The same, parsed once."""
    return ast.parse(text_of(path))


def short(path: Path) -> str:
    """How a file is called in what a test says."""
    return str(path.relative_to(SOURCE))


def package(path: Path) -> str:
    """The module or package directly under isobit that a file belongs to; "" for isobit itself."""
    part = path.relative_to(SOURCE).parts[0]
    return part.removesuffix(".py").replace("__init__", "")


@functools.cache
def imported(path: Path) -> frozenset[str]:
    """What of isobit a file imports, anywhere in it: names directly under isobit."""
    return frozenset(_imported(path))


def _imported(path: Path) -> Iterator[str]:
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module == "isobit":
            names = [f"isobit.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names = [node.module or ""]
        else:
            continue
        yield from (name.split(".")[1] for name in names if name.startswith("isobit."))


@functools.cache
def module(path: Path) -> str:
    """The dotted name of a source file."""
    return ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts).removesuffix(".__init__")


@functools.cache
def imported_modules(path: Path) -> frozenset[str]:
    """Modules of isobit that a file imports when it runs, itself aside."""
    known = set(map(module, MODULES))
    tree = parsed(path)
    typing = [
        n for n in ast.walk(tree) if isinstance(n, ast.If) and "TYPE_CHECKING" in ast.dump(n.test)
    ]
    skipped = {id(inner) for node in typing for inner in ast.walk(node)}
    found = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and id(node) not in skipped:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in known else str(node.module) for name in names}
    return frozenset((found & known) - {module(path), "isobit"})


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(parsed(path)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node


def allowed(own: str) -> set[str]:
    level = next(i for i, floor in enumerate(FLOORS) if own in floor)
    return set[str]().union(*FLOORS[level:])


ROOMS = {package(path) for path in MODULES if path.parent != SOURCE}
"""The folders under isobit."""


def inner_room(name: str) -> str:
    """The innermost package that a module is in; a module that lies beside packages is taken by
    itself."""
    path = SOURCE.joinpath(*name.split(".")[1:])
    if path.is_dir():
        return name
    beside = any(
        each.is_dir() and (each / "__init__.py").exists() for each in path.parent.iterdir()
    )
    return name if beside else name.rpartition(".")[0]


def test_imports_go_one_way() -> None:
    rooms = {path: package(path) for path in MODULES}
    wrong = {
        short(path): foreign
        for path, own in rooms.items()
        if own
        not in ("", "__main__")  # `isobit` itself names its public surface, and starts the command
        and (
            foreign := {name for name in imported(path) if not name.startswith("__")}
            - allowed(own)
            - {own}
        )
    }
    assert not wrong


def test_every_module_has_a_place() -> None:
    assert {package(path) for path in MODULES} - {"", "__main__"} == set[str]().union(*FLOORS)


def test_few_modules_are_loose() -> None:
    assert {path.name for path in SOURCE.glob("*.py")} == {
        "__init__.py",
        "__main__.py",
        "errors.py",
        "moved.py",
    }


def test_large_rooms_have_inner_rooms() -> None:
    for name, most in MOST_LOOSE.items():
        loose = [path.name for path in (SOURCE / name).glob("*.py") if path.name != "__init__.py"]
        assert len(loose) <= most, f"{name}: {sorted(loose)}"


def test_the_lowest_floor_imports_no_torch() -> None:
    foreign = [
        path
        for path in MODULES
        if package(path) in LIGHT and re.search(r"^\s*(import|from) torch\b", text_of(path), re.M)
    ]
    assert not foreign


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Also inside functions; `if TYPE_CHECKING` does not count, since nothing is imported by it."""
    graph = {module(path): set(imported_modules(path)) for path in MODULES}
    done: set[str] = set()
    for start in graph:
        _refuse_circle(start, graph, [], done)


def test_no_rooms_import_each_other_in_a_circle() -> None:
    """Also inside functions, and where only types are imported."""
    graph = {room: set[str]() for room in ROOMS}
    for path in MODULES:
        if package(path) in ROOMS:
            graph[package(path)] |= imported(path) & (ROOMS - {package(path)})
    done: set[str] = set()
    for start in graph:
        _refuse_circle(start, graph, [], done)


def test_no_inner_rooms_import_each_other_in_a_circle() -> None:
    """Files that lie beside inner rooms count as rooms here; packages that only name what is in them do not count."""
    graph: dict[str, set[str]] = {}
    for path in MODULES:
        if path.name == "__init__.py" and any(each.is_dir() for each in path.parent.glob("[a-z]*")):
            continue
        own = graph.setdefault(inner_room(module(path)), set())
        for name in imported_modules(path) - {"isobit"}:
            graph.setdefault(inner_room(name), set())
            own.add(inner_room(name))
    done: set[str] = set()
    for start in graph:
        graph[start].discard(start)
    for start in graph:
        _refuse_circle(start, graph, [], done)


def test_the_circle_rule_can_fail() -> None:
    with pytest.raises(AssertionError, match="a > b > a"):
        _refuse_circle("a", {"a": {"b"}, "b": {"a"}}, [], set())


def _refuse_circle(name: str, graph: dict[str, set[str]], path: list[str], done: set[str]) -> None:
    assert name not in path, " > ".join([*path, name])
    if name not in done:
        for other in sorted(graph[name]):
            _refuse_circle(other, graph, [*path, name], done)
        done.add(name)


def test_the_import_rule_can_fail() -> None:
    """The control: kernels may not know models, and tasks may not know torch's side."""
    assert "model" not in allowed("kernels")
    assert "kernels" in allowed("model")
    assert "engine" not in allowed("tasks")
    assert "training" not in allowed("evaluation")


def length(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Its lines, decorators aside."""
    return (node.end_lineno or 0) - node.lineno + 1


def test_files_and_functions_are_small() -> None:
    large = {short(path): len(text_of(path).splitlines()) for path in MODULES}
    assert not {name: lines for name, lines in large.items() if lines > MOST_FILE_LINES}
    long = [(short(path), node) for path in MODULES for node in functions(path)]
    assert not [f"{name}: {node.name}" for name, node in long if length(node) > MOST_FUNCTION_LINES]


def test_modules_and_what_is_public_in_them_are_documented() -> None:
    """A module opens with what it computes. An operator is documented in `Ops`, once."""
    ops = SOURCE / "kernels" / "ops.py"
    operators = {node.name for node in functions(ops) if ast.get_docstring(node)}
    wanting = [
        short(path) for path in MODULES if parsed(path).body and not ast.get_docstring(parsed(path))
    ]
    for path in MODULES:
        definitions = [
            n for n in parsed(path).body if isinstance(n, (ast.FunctionDef, ast.ClassDef))
        ]
        wanting += [
            f"{short(path)}: {node.name}"
            for node in definitions
            if not node.name.startswith("_")
            and "overload" not in map(ast.unparse, node.decorator_list)
            and not ast.get_docstring(node)
            and not (node.name in operators and path.is_relative_to(ops.parent))
        ]
    assert not wanting


NAMED = re.compile(r"`((?:[\w-]+/)*[\w-]+\.(?:py|cpp|h))`")
OTHERS = {"configuration_llama.py", "difflib.py", "program.py"}
"""Files that the source names and that are not isobit's."""


TESTS = {path.name for path in (ROOT / "tests").rglob("*.py")}


def unknown_files(text: str, folder: Path) -> set[str]:
    """The files that a text of `folder` names, and that are neither in it, nor in the room around
    it, nor isobit's."""
    places = (folder, folder.parent, SOURCE, ROOT)
    return {
        name
        for name in NAMED.findall(text)
        if name not in OTHERS | TESTS and not any((place / name).exists() for place in places)
    }


def test_files_that_the_source_names_exist() -> None:
    unknown = {short(path): unknown_files(text_of(path), path.parent) for path in MODULES}
    assert not {name: files for name, files in unknown.items() if files}


def test_a_file_that_has_moved_is_noticed() -> None:
    assert unknown_files(
        "(`loop.py`, `restoring.py`, `running/restoring.py`)", SOURCE / "training"
    ) == {"restoring.py"}


def test_native_sources_are_small() -> None:
    for path in [*SOURCE.rglob("*.cpp"), *SOURCE.rglob("*.h")]:
        assert len(path.read_text().splitlines()) <= MOST_FILE_LINES, path.name


def test_the_loop_fits_on_a_page() -> None:
    lines = {node.name: length(node) for node in functions(SOURCE / "training" / "loop.py")}
    algorithm = lines["training_loop"] + lines["training_step"] + lines["roll_out"]
    assert algorithm <= 30


FORBIDDEN = re.compile(
    r"\bpickle\b|\btorch\.load\b|\btrust_remote_code\b|\bshell=True\b|(?<![.\w])eval\(|(?<![.\w])exec\("
    r"|\b(?:all_)?(?:gather|broadcast|scatter|send|recv)_object"  # they pickle
    r"|\bimport (?:requests|urllib|http|socket)\b|\bfrom (?:requests|urllib(?!\.parse)|http|socket)\b"
)


@pytest.mark.slow
def test_nothing_is_unpickled_evaluated_or_fetched() -> None:
    found = {
        short(path): match.group() for path in MODULES if (match := FORBIDDEN.search(code_of(path)))
    }
    assert not found


def code_of(path: Path) -> str:
    """The text of a file without its docstrings."""
    code = text_of(path)
    documented = {
        ast.get_docstring(n, clean=False) or ""
        for n in ast.walk(parsed(path))
        if _can_have_docstring(n)
    }
    for text in sorted(documented, key=len, reverse=True):
        code = code.replace(text, "")
    return code


def _can_have_docstring(node: ast.AST) -> bool:
    return isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("import isobit", ("torch", "pydantic", "matplotlib")),
        ("import isobit.cli", ("torch", "pydantic", "matplotlib")),
        (
            "import isobit.tasks.builtin, isobit.tasks.rewards.pool, isobit.config",
            ("torch", "transformers"),
        ),
        (
            "import isobit.tasks.rewards.worker",
            (
                "numpy",
                "pyarrow",
                "datasets",
                "pandas",
                "torch",
                "pydantic",
                "isobit.tasks.rewards.named",
            ),
        ),
        (
            "import isobit.tasks.environments.pool, isobit.tasks.environments.worker",
            ("numpy", "pyarrow", "datasets", "pandas", "torch", "pydantic", "transformers"),
        ),
        (
            "import isobit.rl, isobit.rl.algorithm.correction_rule, isobit.rl.algorithm.replay",
            ("torch", "pydantic"),
        ),
        ("import isobit.monitor.report", ("torch",)),
        ("import isobit.evaluation.shown", ("torch",)),
        (
            "import isobit.monitor.trackers.process",
            ("torch", "pydantic", "tensorboard", "wandb", "trackio", "mlflow"),
        ),
        (
            "import isobit.training.loop, torch; from isobit.training.plan.live_bytes import LiveBytes"
            "\nwith LiveBytes(): torch.ones(1)",
            ("transformers", "torch._dynamo"),
        ),
    ],
)
def test_imports_stay_light(statement: str, absent: tuple[str, ...]) -> None:
    code = f"{statement}; import sys; print(sorted(set({absent!r}) & set(sys.modules)))"
    environment = {
        "PYTHONPATH": str(ROOT / "src"),
        "PATH": "/usr/bin:/bin",
        "HOME": str(Path.home()),
    }
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True
    )
    assert done.stdout.strip() == "[]"


def test_the_public_surface_is_small_and_there() -> None:
    import isobit

    assert len(isobit.__all__) <= 12
    assert {"Engine", "Model", "Precision", "Sampling", "load_config", "train"} <= set(
        isobit.__all__
    )
    assert all(getattr(isobit, name) is not None for name in isobit.__all__)


def test_dependencies_are_declared() -> None:
    """Every module that the source imports is isobit's own, Python's, or named in
    pyproject.toml."""
    text = (ROOT / "pyproject.toml").read_text()
    declared = {
        name.replace("-", "_") for name in re.findall(r'"([\w-]+)(?:\[\w+\])?[>=]', text)
    } | {"yaml", "mlflow", "google", "PIL"}  # google.protobuf, which tinker's messages are of
    names = set()
    for path in MODULES:
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.Import):
                names |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names.add((node.module or "").split(".")[0])
    foreign = names - set(sys.stdlib_module_names) - {"isobit"}
    assert foreign <= declared, sorted(foreign - declared)
