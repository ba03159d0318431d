"""`code`: the program in a completion, run against the tests of its row in a cage (`rewards/sandbox`).

`tests: asserts`: a column of Python source, or of a list of them, which is run after the program in its namespace, as
MBPP (Austin et al. 2021) and HumanEval (Chen et al. 2021) do. Each item of a list is a test; of one source each
statement that asserts or calls (`assert f(1) == 2`, `check(f)`) is one, and the others prepare. `tests: stdin`: pairs
of a text on stdin and the text expected on stdout, as in APPS (Hendrycks et al. 2021) and verl's prime_code; they are
compared line by line without white space at the ends, here, outside the cage, which never sees the expected text.

A program that fails, hangs, is killed, takes too much or breaks its cage fails its tests: that is a reward, not an
error. Asserts run in a process and cage of their own, which the program answers with plain values (what that cannot
rule out: `sandbox/examiner.py`). They take from the program only the names that they load and do not import or define;
builtins are never taken, except where there is no other name and all tests call the same one (`assert sum(1, 2) == 3`).
Left out: other languages, APPS's calls by function name.
"""

import ast
import builtins
import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from isobit.options.declare import at_least, at_most
from isobit.options.reading import OptionError
from isobit.rewards.named.base import NamedReward, Unscored
from isobit.rewards.sandbox.launch import Limits, check_cage, run_caged, side

_FENCE = re.compile(r"^[ \t]*```[ \t]*(\w*)[^\n]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)
_PYTHON = ("python", "python3", "py")


@dataclass(frozen=True)
class Code(NamedReward):
    """The part of the row's tests that the program in the completion passes, run in a sandbox."""

    tests: Annotated[Literal["asserts", "stdin"], "statements run after the program, or pairs of input and output"] = (
        "asserts"
    )
    column: Annotated[
        str | None, "column of the tests; default: `tests`, or `inputs` and `outputs`. For stdin one that holds both"
    ] = None
    reward: Annotated[Literal["fraction", "all"], "the part of the tests passed, or 1 if all are, else 0"] = "fraction"
    timeout_s: Annotated[float, at_least(0.1), "seconds for one sample, all its tests together"] = 10.0
    memory_mib: Annotated[int, at_least(32), "address space of each process"] = 512
    disk_mib: Annotated[int, at_least(1), "files in the working directory, and the largest file"] = 16
    processes: Annotated[
        int, at_least(1), at_most(4096), "processes and threads at a time (not under isolation: none)"
    ] = 16
    packages: Annotated[bool, "let programs import the packages installed for this Python"] = False
    isolation: Annotated[
        Literal["namespaces", "none"],
        "none: no isolation from network, files and processes; only where the programs are trusted",
    ] = "namespaces"

    chunk_size: ClassVar[int | None] = 1

    def __post_init__(self) -> None:
        if self.tests == "asserts" and self.column == "":
            raise OptionError(("column",), "expected the name of a column")

    @property
    def columns(self) -> tuple[str, ...]:
        if self.column is not None:
            return (self.column,)
        return ("tests",) if self.tests == "asserts" else ("inputs", "outputs")

    @property
    def time_limit_s(self) -> float | None:
        return self.timeout_s

    def prepare(self) -> None:
        check_cage(self.isolation, self.packages)

    def check(self, row: Mapping[str, Any]) -> None:
        if self.tests == "asserts":
            steps_of(row[self.columns[0]], self.columns[0])
        else:
            _input_output(row, self.columns)

    def score(self, text: str, row: Mapping[str, Any], token_ids: Sequence[int] | None) -> float | Unscored:
        source = program(text)
        passed, count = self._asserts(source, row) if self.tests == "asserts" else self._pairs(source, row)
        return passed / count if self.reward == "fraction" else float(passed == count)

    def _asserts(self, source: str, row: Mapping[str, Any]) -> tuple[int, int]:
        (column,) = self.columns
        steps = steps_of(row[column], column)
        names, modules = names_of([step["source"] for step in steps if step["token"] is not None], steps)
        given = json.dumps({"steps": steps, "names": names, "modules": modules})
        outcomes = run_caged(
            *(side("examiner"), "examiner.py", [given], self._limits(), self.isolation, self.packages),
            companion=side("harness", program=source),
        )
        expected = {str(step["token"]) for step in steps if step["token"] is not None}
        found = {token for outcome in outcomes for token in outcome.output.split()}
        return len(found & expected), len(expected)

    def _pairs(self, source: str, row: Mapping[str, Any]) -> tuple[int, int]:
        inputs, outputs = _input_output(row, self.columns)
        outcomes = run_caged(
            {"program.py": source}, "program.py", inputs, self._limits(), self.isolation, self.packages
        )
        passed = sum(
            outcome.status == 0 and not outcome.long and _lines(outcome.output) == _lines(output)
            for outcome, output in zip(outcomes, outputs)
        )
        return passed, len(inputs)

    def _limits(self) -> Limits:
        return Limits(self.timeout_s, self.memory_mib, self.disk_mib, self.processes)


def program(text: str) -> str:
    """The last fenced block of Python, else the last without a language, else the whole text."""
    blocks = [(match[1].lower(), match[2]) for match in _FENCE.finditer(text)]
    for wanted in (_PYTHON, ("",)):
        found = [source for language, source in blocks if language in wanted]
        if found:
            return found[-1]
    return text


def steps_of(tests: Any, column: str) -> list[dict[str, Any]]:
    """The steps of the harness: sources, each with the number of its test, or None where it only prepares.

    Raises ValueError for tests that are no Python, or none at all.
    """
    if isinstance(tests, list) and all(isinstance(test, str) for test in tests):
        sources = [(test, True) for test in tests]
    elif isinstance(tests, str):
        sources = [(ast.unparse(statement), _is_test(statement)) for statement in _parse(tests, column).body]
    else:
        raise ValueError(f"column {column!r}: expected Python source or a list of it, got {tests!r:.60}")
    for source, _ in sources:
        _parse(source, column)
    steps: list[dict[str, Any]] = []
    count = 0
    for source, is_test in sources:
        steps.append({"source": source, "token": count if is_test else None})
        count += is_test
    if not count:
        raise ValueError(f"column {column!r}: no test in it: nothing asserts or calls")
    return steps


def names_of(tests: Sequence[str], steps: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[str]]:
    """The names that the steps take from the program, and the modules that they use and do not import.

    A name of a module of the standard library of which only attributes are used is that module, whatever the program
    calls so.
    """
    nodes = [node for step in steps for node in ast.walk(ast.parse(step["source"]))]
    loaded = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    based = [node.value.id for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)]
    imports = [alias for node in nodes if isinstance(node, (ast.Import, ast.ImportFrom)) for alias in node.names]
    definitions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    own = {(alias.asname or alias.name).split(".")[0] for alias in imports}
    own |= {node.name for node in nodes if isinstance(node, definitions)}
    free = loaded - own
    uses = [node.id for node in nodes if isinstance(node, ast.Name)]
    modules = {name for name in free & sys.stdlib_module_names if uses.count(name) == based.count(name)}
    local = {node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
    local |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    known = set(vars(builtins))
    names = free - modules - known
    if not names - local:
        common = set.intersection(*(_called(test) for test in tests)) & known
        names |= common if len(common) == 1 else set()
    return sorted(names), sorted(modules)


def _called(source: str) -> set[str]:
    calls = [node.func for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    return {function.id for function in calls if isinstance(function, ast.Name)}


def _parse(source: str, column: str) -> ast.Module:
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"column {column!r}: not Python: {error}") from None


def _is_test(statement: ast.stmt) -> bool:
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)):
        return False
    if isinstance(statement, ast.Expr):
        return isinstance(statement.value, ast.Call)
    return any(isinstance(node, ast.Assert) for node in ast.walk(statement))


def _input_output(row: Mapping[str, Any], columns: Sequence[str]) -> tuple[list[str], list[str]]:
    if len(columns) == 1:
        value = row[columns[0]]
        try:
            both = json.loads(value) if isinstance(value, str) else value
            inputs, outputs = both["inputs"], both["outputs"]
        except (ValueError, TypeError, KeyError):
            raise ValueError(f"column {columns[0]!r}: expected an object with inputs and outputs") from None
        if both.get("fn_name"):
            raise ValueError(f"column {columns[0]!r}: it calls {both['fn_name']!r} by name; only stdin is supported")
    else:
        inputs, outputs = (row[name] for name in columns)
    for values in (inputs, outputs):
        if not isinstance(values, list) or not all(isinstance(text, str) for text in values):
            raise ValueError(f"column {columns[0]!r}: inputs and outputs must be lists of text, got {values!r:.60}")
    if len(inputs) != len(outputs) or not inputs:
        raise ValueError(f"column {columns[0]!r}: {len(inputs)} inputs for {len(outputs)} outputs")
    return inputs, outputs


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]
