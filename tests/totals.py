"""Count what may only fall: lines, imports between rooms, long signatures, prose.

    python -m tests.totals            print the counts beside those of totals.json
    python -m tests.totals --lower    write the counts that fell into totals.json

A room is a folder under `isobit`; the files beside them are `isobit`. A change that raises a count
changes totals.json in the same commit, by hand, and says why in its message.
"""

import ast
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tests.test_architecture import MODULES, ROOMS, SOURCE, functions, imported, parsed

TABLE = Path(__file__).with_name("totals.json")
MOST_ARGUMENTS = 8

_RIDDLE = re.compile(
    "Of|As|Those|These|This|That|So|It|They|None|Where|Which|Who|What|How|One|All|And|Likewise|Not"
)
_NO_VERB = re.compile(f"The|A|An|Whether|{_RIDDLE.pattern}")
_VAGUE = re.compile(
    "found|given|each|parts?|places?|kept|own|said|told|asked|ones?|before|after|others?|what"
    "|things?"
)
_UNCLEAR = re.compile(
    r"\b(so many|so much|nobody|somebody|whoever|whom|is no|are no|was no|of its own|of their own"
    r"|beside|besides that|what there is|it is none|as it is|what is said|is told|who asks|and of)"
    r"\b",
    re.IGNORECASE,
)


def room_of(path: Path) -> str:
    """Return the room of a source file."""
    folder, *rest = path.relative_to(SOURCE).parts
    return folder if rest else "isobit"


def lines_by_room() -> Counter[str]:
    """Count the lines of Python, C++ and the report's assets."""
    kinds = {".py", ".cpp", ".h", ".js", ".css", ".html"}
    lines = Counter[str]()
    for path in SOURCE.rglob("*.*"):
        if path.suffix in kinds and path.is_file():
            lines[room_of(path)] += len(path.read_text(encoding="utf-8").splitlines())
    return lines


def arrows() -> set[tuple[str, str]]:
    """Return which rooms import which others, anywhere in their files; the files beside the rooms
    do not count."""
    return {
        (room_of(path), name)
        for path in MODULES
        for name in imported(path)
        if {room_of(path), name} <= ROOMS and name != room_of(path)
    }


def circles(imports: set[tuple[str, str]]) -> int:
    """Count the rooms that import themselves through others."""
    reached = set(imports)
    while longer := {(a, d) for a, b in reached for c, d in imports if b == c} - reached:
        reached |= longer
    return sum(a == b for a, b in reached)


def long_signatures() -> int:
    """Count the functions with more than eight arguments; Triton's kernels do not count."""
    return sum(
        len(f.args.posonlyargs + f.args.args + f.args.kwonlyargs) > MOST_ARGUMENTS
        for path in MODULES
        if "triton" not in str(path.relative_to(SOURCE))
        for f in functions(path)
    )


def helpers_with_one_caller() -> int:
    """Count the private functions of modules that are named once in their file."""
    count = 0
    for path in MODULES:
        tree = parsed(path)
        names = Counter(n.id for n in ast.walk(tree) if isinstance(n, ast.Name))
        private = (
            n.name
            for n in tree.body
            if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef)) and n.name.startswith("_")
        )
        count += sum(names[name] == 1 for name in private)
    return count


def documented(tree: ast.Module) -> Iterator[tuple[ast.AST, str]]:
    """Yield what has a docstring, with it."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Module)):
            text = ast.get_docstring(node)
            if text:
                yield node, text


def reads_badly(node: ast.AST, first: str, text: str) -> bool:
    """Return whether a docstring is a place to look at: by its first word, length or phrases."""
    return (
        (bool(_RIDDLE.fullmatch(first)) and not isinstance(node, ast.Module))
        or len(text) < 24
        or bool(_UNCLEAR.search(text))
    )


def prose() -> dict[str, int]:
    """Count the docstrings of functions without a verb first, docstrings to look at, and vague
    local names."""
    count = Counter[str]()
    for path in MODULES:
        tree = parsed(path)
        for node, text in documented(tree):
            first = re.sub(r"\W", "", text.split()[0])
            count["docstrings to look at"] += reads_badly(node, first, text)
            if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                continue
            is_property = any("property" in ast.unparse(d) for d in node.decorator_list)
            verb = first.isalpha() and first[0].isupper() and not _NO_VERB.fullmatch(first)
            count["functions without a verb first"] += not verb and not is_property
        count["vague names"] += sum(
            _VAGUE.fullmatch(n.id) is not None
            for n in ast.walk(tree)
            if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
        )
    return dict(count)


def totals() -> dict[str, int]:
    """Count everything, by the names of totals.json."""
    lines, imports = lines_by_room(), arrows()
    return {
        "lines": lines.total(),
        **{f"lines of {room}": lines[room] for room in sorted(lines)},
        "rooms": len(ROOMS),
        "imports between rooms": len(imports),
        "rooms in a circle": circles(imports),
        "functions with more than 8 arguments": long_signatures(),
        "private helpers with one caller": helpers_with_one_caller(),
        **prose(),
    }


def table() -> dict[str, int]:
    """Read the counts that must not be exceeded."""
    return json.loads(TABLE.read_text(encoding="utf-8"))


def raised(counts: dict[str, int], most: dict[str, int]) -> dict[str, str]:
    """Return the counts above those of a table, or missing in it, with both numbers."""
    return {
        name: f"{count}, at most {most.get(name)}"
        for name, count in counts.items()
        if count > most.get(name, -1)
    }


def main(arguments: list[str]) -> None:
    """Print the counts beside the table's; lower the table where asked."""
    counts, most = totals(), table() if TABLE.exists() else {}
    for name, count in counts.items():
        print(f"{name:40} {count:7} {most.get(name, ''):>7}")
    if arguments == ["--lower"]:
        lowered = {name: min(count, most.get(name, count)) for name, count in counts.items()}
        TABLE.write_text(json.dumps(lowered, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
