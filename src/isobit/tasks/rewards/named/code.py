"""`code`: the program in a completion, run against the tests of its row in a cage
(`tasks/rewards/sandbox`).

`tests: asserts`: a column of Python source, or of a list of them, which is run after the program in
its namespace, as MBPP (Austin et al. 2021) and HumanEval (Chen et al. 2021) do. Each item of a list
is a test; of one source each statement that asserts or calls (`assert f(1) == 2`, `check(f)`) is
one, and the others prepare. So does, in a list too, what passes whatever the program is: imports,
definitions, and calls of modules or builtins alone (`random.seed(0)`).

`tests: stdin`: pairs of a text on stdin and the text expected on stdout, as in APPS (Hendrycks et
al. 2021) and verl's prime_code. They are compared here, outside the cage, which never sees the
expected text, by LiveCodeBench's rule (Jain et al. 2024): without white space at the ends of
text and lines, each line is the same text, or the same decimal numbers.

A program that fails, hangs, is killed, takes too much or breaks its cage fails its tests: that is a
reward, not an error. Asserts run in a separate process and cage, which the program answers with
plain values (what that cannot rule out: `sandbox/examiner.py`). Left out: other languages, APPS's
calls by function name, tolerances.
"""

import ast
import builtins
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Annotated, Any, ClassVar, Literal

from isobit.options.declare import at_least, at_most
from isobit.options.reading import OptionError
from isobit.tasks.rewards.by_name import Unscored
from isobit.tasks.rewards.named.base import NamedReward
from isobit.tasks.rewards.named.fences import program
from isobit.tasks.rewards.named.free_names import names_of
from isobit.tasks.rewards.named.prelude import with_imports
from isobit.tasks.rewards.sandbox.launch import Limits, check_cage, run_caged, side


@dataclass(frozen=True)
class Code(NamedReward):
    """The part of the row's tests that the program in the completion passes, run in a sandbox."""

    tests: Annotated[
        Literal["asserts", "stdin"],
        "statements run after the program, or pairs of input and output",
    ] = "asserts"
    column: Annotated[
        str | None,
        "column of the tests; default: `tests`, or `inputs` and `outputs`. For stdin one that "
        "holds both",
    ] = None
    reward: Annotated[
        Literal["fraction", "all"], "the part of the tests passed, or 1 if all are, else 0"
    ] = "fraction"
    timeout_s: Annotated[float, at_least(0.1), "seconds for one sample, all its tests together"] = (
        10.0
    )
    memory_mib: Annotated[int, at_least(32), "address space of each process"] = 512
    disk_mib: Annotated[
        int,
        at_least(1),
        "files in the working directory, 256 of them for each MiB, and the largest file",
    ] = 16
    output_mib: Annotated[
        int, at_least(1), "what one run may print; a row that expects more is refused"
    ] = 1
    processes: Annotated[
        int,
        at_least(1),
        at_most(4096),
        "processes and threads at a time (not under isolation: none)",
    ] = 16
    prelude: Annotated[
        Literal["none", "livecodebench"],
        "run before each program; livecodebench: its imports, so that List, deque or sqrt are known",
    ] = "none"
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
            if not examination(row[self.columns[0]], self.columns[0])["names"]:
                raise ValueError(
                    f"column {self.columns[0]!r}: the tests use no name of the program"
                )
        else:
            _input_output(row, self.columns)

    def score(
        self, text: str, row: Mapping[str, Any], token_ids: Sequence[int] | None
    ) -> float | Unscored:
        source = program(text)
        if self.prelude == "livecodebench":
            source = with_imports(source)
        passed, count = (
            self._asserts(source, row) if self.tests == "asserts" else self._pairs(source, row)
        )
        return passed / count if self.reward == "fraction" else float(passed == count)

    def _asserts(self, source: str, row: Mapping[str, Any]) -> tuple[int, int]:
        (column,) = self.columns
        exam = examination(row[column], column)
        outcomes = run_caged(
            *(
                side("examiner"),
                "examiner.py",
                [json.dumps(exam)],
                self._limits(),
                self.isolation,
                self.packages,
            ),
            companion=side("harness", program=source),
        )
        expected = {str(step["token"]) for step in exam["steps"] if step["token"] is not None}
        passed = {token for outcome in outcomes for token in outcome.output.split()}
        return len(passed & expected), len(expected)

    def _pairs(self, source: str, row: Mapping[str, Any]) -> tuple[int, int]:
        inputs, outputs = _input_output(row, self.columns)
        limits, column = self._limits(), self.columns[-1]
        largest = max(
            len(_printed(output).encode("utf-8", "surrogateescape")) for output in outputs
        )
        if largest > limits.output_bytes:
            raise ValueError(
                f"column {column!r}: {largest} bytes expected; options.output_mib: "
                f"{self.output_mib} lets a program print no more"
            )
        files = side("script", program=source)
        stdin = [text.replace("\r\n", "\n") for text in inputs]
        outcomes = run_caged(files, "script.py", stdin, limits, self.isolation, self.packages)
        passed = sum(
            outcome.status == 0
            and not outcome.long
            and same_output(outcome.output, _printed(output))
            for outcome, output in zip(outcomes, outputs)
        )
        return passed, len(inputs)

    def _limits(self) -> Limits:
        output_bytes = self.output_mib << 20
        return Limits(
            self.timeout_s,
            self.memory_mib,
            self.disk_mib,
            self.processes,
            output_bytes=output_bytes,
        )


def examination(tests: Any, column: str) -> dict[str, Any]:
    """Return the input of `sandbox/examiner.py`: the steps, the names that they take from the
    program, and the modules that they use without importing them. Raises ValueError as `steps_of`
    does."""
    steps = steps_of(tests, column)
    sources = [step["source"] for step in steps]
    names, modules = names_of(sources, [s["source"] for s in steps if s["token"] is not None])
    return {"steps": steps, "names": names, "modules": modules}


def steps_of(tests: Any, column: str) -> list[dict[str, Any]]:
    """Return the steps of the examiner: sources, each with the number of its test, or None if it
    only prepares.

    Raises ValueError for tests that are not Python, or hold no test.
    """
    if isinstance(tests, list) and all(isinstance(test, str) for test in tests):
        items = [(test, _parse(test, column).body) for test in tests]
        free = _own_names([statement for _, body in items for statement in body])
        sources = [
            (
                test,
                any(_asserts(statement) or _calls(statement, free) for statement in _run_in(body)),
            )
            for test, body in items
        ]
    elif isinstance(tests, str):
        statements = list(_run_in(_parse(tests, column).body))
        free = _own_names(statements)
        sources = [
            (
                ast.unparse(statement),
                _asserts(statement)
                or (isinstance(statement, ast.Expr) and _calls(statement, free)),
            )
            for statement in statements
        ]
    else:
        raise ValueError(
            f"column {column!r}: expected Python source or a list of it, got {tests!r:.60}"
        )
    steps: list[dict[str, Any]] = []
    count = 0
    for source, is_test in sources:
        steps.append({"source": source, "token": count if is_test else None})
        count += is_test
    if not count:
        raise ValueError(
            f"column {column!r}: no test in it: nothing asserts, or calls what it defines or the "
            "program does"
        )
    return steps


def _parse(source: str, column: str) -> ast.Module:
    try:
        compile(source, "tests.py", "exec", dont_inherit=True)
        return ast.parse(source)
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"column {column!r}: not Python: {error}") from None


def _own_names(statements: list[ast.stmt]) -> set[str]:
    """Return the names in the tests that are neither builtins nor modules: names of the program, or
    defined by the tests; and, if the tests define classes, the names of `unittest.main`."""
    imported = {
        (alias.asname or alias.name).split(".")[0]
        for statement in statements
        for node in ast.walk(statement)
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for alias in node.names
    }
    nodes = [node for statement in statements for node in ast.walk(statement)]
    read = {node.id for node in nodes if isinstance(node, ast.Name)}
    bases = {
        node.value.id
        for node in nodes
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    }
    free = read - imported - (bases & sys.stdlib_module_names) - vars(builtins).keys()
    if any(isinstance(node, ast.ClassDef) for node in nodes):  # unittest.main runs them
        free |= {"unittest.main"} | {
            alias.asname or alias.name
            for node in nodes
            if isinstance(node, ast.ImportFrom) and node.module == "unittest"
            for alias in node.names
            if alias.name == "main"
        }
    return free


def _run_in(statements: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield statements; an `if __name__ == "__main__"` is replaced by its body, since the tests run
    as the module `__main__`."""
    for statement in statements:
        if (
            isinstance(statement, ast.If)
            and ast.unparse(statement.test) == "__name__ == '__main__'"
        ):
            yield from statement.body
        else:
            yield statement


DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)


def _asserts(statement: ast.stmt) -> bool:
    return not isinstance(statement, DEFINITIONS) and any(
        isinstance(node, ast.Assert) for node in ast.walk(statement)
    )


def _calls(statement: ast.stmt, free: set[str]) -> bool:
    """Return whether a statement calls a function that may use the program: the function or an
    argument has one of the names in `free`."""
    return not isinstance(statement, DEFINITIONS) and any(
        isinstance(node, ast.Call)
        and any(
            isinstance(name, (ast.Name, ast.Attribute)) and ast.unparse(name) in free
            for name in ast.walk(node)
        )
        for node in ast.walk(statement)
    )


def _input_output(row: Mapping[str, Any], columns: Sequence[str]) -> tuple[list[str], list[str]]:
    if len(columns) == 1:
        value = row[columns[0]]
        try:
            both = json.loads(value) if isinstance(value, str) else value
            inputs, outputs = both["inputs"], both["outputs"]
        except (ValueError, TypeError, KeyError):
            raise ValueError(
                f"column {columns[0]!r}: expected an object with inputs and outputs"
            ) from None
        if both.get("fn_name"):
            raise ValueError(
                f"column {columns[0]!r}: it calls {both['fn_name']!r} by name; only stdin is "
                "supported"
            )
    else:
        inputs, outputs = (row[name] for name in columns)
    for values in (inputs, outputs):
        if not isinstance(values, list) or not all(isinstance(text, str) for text in values):
            raise ValueError(
                f"column {columns[0]!r}: inputs and outputs must be lists of text, got "
                f"{values!r:.60}"
            )
    if len(inputs) != len(outputs) or not inputs:
        raise ValueError(f"column {columns[0]!r}: {len(inputs)} inputs for {len(outputs)} outputs")
    return inputs, outputs


def same_output(printed: str, expected: str) -> bool:
    """Return whether two outputs have the same number of lines, and each pair of lines the same
    text or the same decimal numbers; white space at their ends is ignored."""
    ours, theirs = (
        [line.strip() for line in text.strip().split("\n")] for text in (printed, expected)
    )
    return len(ours) == len(theirs) and all(
        a == b or _same_numbers(a, b) for a, b in zip(ours, theirs)
    )


def _same_numbers(printed: str, expected: str) -> bool:
    ours, theirs = printed.split(), expected.split()
    try:
        return len(ours) == len(theirs) and all(
            Decimal(a) == Decimal(b) for a, b in zip(ours, theirs)
        )
    except InvalidOperation:
        return False


def _printed(text: str) -> str:
    """Return a text as the cage reports it if a program prints it (`sandbox/jail.py`): texts and
    bytes correspond one to one."""
    return text.encode("utf-8", "surrogatepass").decode("utf-8", "surrogateescape")
