"""What a test can reach: the files that it imports, and those that they import, read from the
sources.

An import counts wherever it stands, in a function too; so does a text that is a module's name,
since processes are started and objects looked up by such. Only what `if TYPE_CHECKING` imports does
not: nothing runs by it. What starts a command can reach everything, and a file that is no Python
source can be read by any test.
"""

import ast
import functools
import hashlib
import re
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_FOLDERS = {"isobit": ROOT / "src", "tests": ROOT, "benchmarks": ROOT}
_EVERYTHING = {
    "subprocess",
    "run_isobit",
    "refused",
    "quickstart_cache",
    "opened",
    "documents",
    "warm",
}
_EVERYTHING |= {"ROOT", "SOURCE", "isobit.__file__"}
"""Names that a test or its helpers use where they may start a command, or read any file of the
tree."""
_FIRST = ROOT / "src/isobit/run/early_interrupt.py"
"""What the package itself imports, whatever of it a test imports."""
_ALIASES = ROOT / "src/isobit/moved.py"
"""So is this; what it names is imported by old names alone, which no test here uses."""
_MODEL = "base_model"
"""A fixture that every test may name, and that comes of `models.py`."""


def file_of(name: str) -> Path | None:
    """The file of a module or package, by its dotted name; None for what is not of this tree."""
    folder = _FOLDERS.get(name.partition(".")[0])
    if folder is None:
        return None
    path = folder.joinpath(*name.split("."))
    return next((p for p in (path.with_suffix(".py"), path / "__init__.py") if p.is_file()), None)


def module_of(path: Path) -> str:
    """The dotted name of a file."""
    top = ROOT / "src" if path.is_relative_to(ROOT / "src") else ROOT
    return ".".join(path.relative_to(top).with_suffix("").parts).removesuffix(".__init__")


@functools.cache
def imports(path: Path) -> frozenset[Path]:
    """The files that a file imports or names, with the packages around them, which are imported
    first."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    package = module_of(path) if path.name == "__init__.py" else module_of(path).rpartition(".")[0]
    found: set[Path] = set()
    for name in named(tree, package):
        parts = name.split(".")
        around = [".".join(parts[:end]) for end in range(2, len(parts) + 1)]
        surface = parts == ["isobit"] or (len(parts) == 2 and file_of(name) is None)
        if surface and ROOT / "src" not in path.parents:
            around.append(
                parts[0]
            )  # whose public names are looked up; the source itself does not use them
        found |= {file for each in around if (file := file_of(each))}
    return frozenset(found - {path})


def named(tree: ast.AST, package: str) -> Iterator[str]:
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            waiting += node.orelse
            continue
        waiting += ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = (
                package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            )
            whole = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{whole}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from _in_text(node.value)


def _in_text(text: str) -> Iterator[str]:
    """The modules that a text names: `isobit.a.b`, `isobit.a.b:function`, or all of a package, as
    `isobit.a.`."""
    name = text.partition(":")[0]
    if not re.fullmatch(r"(isobit|tests|benchmarks)(\.\w+)+\.?", name):
        return
    file = file_of(name.rstrip("."))
    if file:
        yield name.rstrip(".")
    if file and name.endswith("."):
        yield from (module_of(path) for path in file.parent.rglob("*.py"))


def reached(starts: Iterable[Path]) -> frozenset[Path]:
    """The starts, and every file of the tree that they reach."""
    found, waiting = set(starts), list(starts)
    while waiting:
        new = imports(waiting.pop()) - found
        found |= new
        waiting += new
    return frozenset(found)


@functools.cache
def reached_by_test(path: Path) -> frozenset[Path] | None:
    """What a file of tests reaches; None: everything."""
    beside = [folder / "conftest.py" for folder in path.parents if ROOT / "tests" in folder.parents]
    found = reached([path, _FIRST, *(file for file in beside if file.is_file())])
    names = set[str]().union(*(_used(each) for each in found if ROOT / "tests" in each.parents))
    if names & _EVERYTHING:
        return None
    if _MODEL in names:
        found = reached([*found, ROOT / "tests/models.py"])
    return found | {_ALIASES}


@functools.cache
def _used(path: Path) -> frozenset[str]:
    """Every name in a source: of variables, arguments and modules, `a.b` of attributes, and texts
    that are names."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.arg):
            found.add(node.arg)
        elif isinstance(node, ast.alias):
            found |= set(node.name.split("."))
        elif isinstance(node, ast.ImportFrom):
            found |= set((node.module or "").split("."))
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            found.add(f"{node.value.id}.{node.attr}")
        elif (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and node.value.isidentifier()
        ):
            found.add(node.value)
    return frozenset(found)


def changed_since(revision: str) -> set[str] | None:
    """Files, relative to the root, that differ from where this branch left a revision, committed or
    not. None where git does not say, or where nothing was committed since: then it is not known
    against what to compare."""
    base, head = _git("merge-base", revision, "HEAD"), _git("rev-parse", "HEAD")
    changed = _git("diff", "--name-only", *base) if base and base != head else None
    new = _git("ls-files", "--others", "--exclude-standard")
    return None if changed is None or new is None else {*changed, *new}


def _git(*words: str) -> list[str] | None:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.splitlines() if done.returncode == 0 else None


def sums(*folders: str) -> dict[Path, bytes]:
    """SHA-256 of every file below some folders of the tree, by path."""
    places = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()]
    return {
        path: hashlib.sha256(path.read_bytes()).digest()
        for path in places
        if "__pycache__" not in path.parts
    }


def digest(paths: Iterable[Path], known: Mapping[Path, bytes], *words: str) -> str:
    """SHA-256 of files, by name and content (`sums`), and of some words."""
    whole = hashlib.sha256("\n".join(words).encode())
    for path in sorted(paths):
        whole.update(f"\n{path.relative_to(ROOT)}\n".encode() + known[path])
    return whole.hexdigest()
