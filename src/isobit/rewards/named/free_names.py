"""The names that tests of Python source take from the program, and the modules that they use
without importing them.

Read off the compiled tests, in the order in which they run: a name belongs to the program if the
tests read it before they bind it, and to the tests from where they bind it on. What a function of
the tests reads is read when the module has run, so a name that the tests bind anywhere is theirs in
it. Builtins are never taken, except where there is no other name and all tests call the same one
(`assert sum(1, 2) == 3`), nor are names like `__this__`.

Left out: names that are only in text (`eval`, `globals()["f"]`), and what `from m import *` brings,
which hides the program's when it is there (`sandbox/examiner.py`).
"""

import ast
import builtins
import dis
import sys
from collections.abc import Iterator, Sequence
from types import CodeType

from isobit.rewards.named.library_names import library_names

READS = ("LOAD_NAME", "LOAD_GLOBAL", "LOAD_FROM_DICT_OR_GLOBALS")
BINDS = ("STORE_NAME", "STORE_GLOBAL", "DELETE_NAME", "DELETE_GLOBAL")
KNOWN = {"np": "numpy", "numpy": "numpy"}  # whose arrays cross, so that the tests compare them


def names_of(sources: Sequence[str], tests: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """The names that the sources take from the program, and of others the module that each is, or
    `module:name` of what is in one.

    A name of a module of the standard library, or of numpy, of which only attributes are used is
    that module, whatever the program calls so; `library_names.py` has names in modules. `tests` are
    those of the sources that score.
    """
    free = {name for name in _free(sources) if not (name.startswith("__") and name.endswith("__"))}
    nodes = [node for source in sources for node in ast.walk(ast.parse(source))]
    uses = [node.id for node in nodes if isinstance(node, ast.Name)]
    based = [
        node.value.id
        for node in nodes
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    ]
    known = {name: name for name in sys.stdlib_module_names} | KNOWN
    modules = {
        name: known[name] for name in free & known.keys() if uses.count(name) == based.count(name)
    }
    names = free - modules.keys() - vars(builtins).keys()
    library = library_names(names, tests)
    modules, names = modules | library, names - library.keys()
    if not names:
        common = set.intersection(*map(_called, tests)) & vars(builtins).keys()
        names = common if len(common) == 1 else set()
    return sorted(names), dict(sorted(modules.items()))


def _free(sources: Sequence[str]) -> set[str]:
    read, bound, later = set[str](), set[str](), set[str]()
    for source in sources:
        for is_read, name, delayed in _events(
            compile(source, "tests.py", "exec", dont_inherit=True)
        ):
            if not is_read:
                bound.add(name)
            elif delayed:
                later.add(name)
            elif name not in bound:
                read.add(name)
    return read | (later - bound)


def _events(code: CodeType) -> Iterator[tuple[bool, str, bool]]:
    """Of a module, each reading (or else binding) of a global name, and whether it comes when the
    module has run."""
    for step in dis.get_instructions(code):
        if isinstance(step.argval, CodeType):
            at_once = step.argval.co_name in ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")
            for is_read, name in _inside(step.argval):
                yield is_read, name, not at_once
        elif step.opname in READS or step.opname in BINDS:
            yield step.opname in READS, str(step.argval), False


def _inside(code: CodeType) -> Iterator[tuple[bool, str]]:
    """The same of a function, or of the body of a class, whose own names are not global."""
    own = {step.argval for step in dis.get_instructions(code) if step.opname == "STORE_NAME"}
    for step in dis.get_instructions(code):
        if isinstance(step.argval, CodeType):
            yield from _inside(step.argval)
        elif step.opname in READS and step.argval not in own:
            yield True, str(step.argval)
        elif step.opname in ("STORE_GLOBAL", "DELETE_GLOBAL"):
            yield False, str(step.argval)


def _called(source: str) -> set[str]:
    calls = [node.func for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    return {function.id for function in calls if isinstance(function, ast.Name)}
