"""The names that tests of Python source take from the program, and the modules that they use
without importing them.

The names are found in the compiled tests, in the order in which they run: a name belongs to the
program if the tests read it before they bind it, and to the tests after they bind it. A function of
the tests reads its names when the module has run, so in a function a name that the tests bind
anywhere belongs to the tests. Builtins are never taken, except if no other name is left and all
tests call the same builtin (`assert sum(1, 2) == 3`); names like `__this__` are never taken.

Left out: names that are only in text (`eval`, `globals()["f"]`), and names that `from m import *`
binds, which hide the program's names at run time (`sandbox/examiner.py`).
"""

import ast
import builtins
import dis
import sys
from collections.abc import Iterator, Sequence
from types import CodeType

from isobit.tasks.rewards.named.library_names import library_names

READS = ("LOAD_NAME", "LOAD_GLOBAL", "LOAD_FROM_DICT_OR_GLOBALS")
BINDS = ("STORE_NAME", "STORE_GLOBAL", "DELETE_NAME", "DELETE_GLOBAL")
KNOWN = {"np": "numpy", "numpy": "numpy"}  # whose arrays cross, so that the tests compare them


def names_of(sources: Sequence[str], tests: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Return the names that the sources take from the program, and for each name that means a
    module, or an object in a module, that module or `module:name`.

    A name of a module of the standard library, or of numpy, means that module if only its
    attributes are used, even if the program defines the name; `library_names.py` has names of
    objects in modules. `tests`: those of the sources that score.
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
    """Yield each read (True) or binding (False) of a global name in a module's code: which of the
    two, the name, and whether it happens only after the module has run."""
    for step in dis.get_instructions(code):
        if isinstance(step.argval, CodeType):
            at_once = step.argval.co_name in ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")
            for is_read, name in _inside(step.argval):
                yield is_read, name, not at_once
        elif step.opname in READS or step.opname in BINDS:
            yield step.opname in READS, str(step.argval), False


def _inside(code: CodeType) -> Iterator[tuple[bool, str]]:
    """Yield each read (True) or binding (False) of a global name in the code of a function, or of
    the body of a class, whose own names are not global."""
    bound = {step.argval for step in dis.get_instructions(code) if step.opname == "STORE_NAME"}
    for step in dis.get_instructions(code):
        if isinstance(step.argval, CodeType):
            yield from _inside(step.argval)
        elif step.opname in READS and step.argval not in bound:
            yield True, str(step.argval)
        elif step.opname in ("STORE_GLOBAL", "DELETE_GLOBAL"):
            yield False, str(step.argval)


def _called(source: str) -> set[str]:
    calls = [node.func for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    return {function.id for function in calls if isinstance(function, ast.Name)}
