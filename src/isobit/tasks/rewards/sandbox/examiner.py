"""Runs the tests of a row in a separate cage: the tests come on stdin, and the number of each test
that passed goes to stdout.

The program is in another cage, behind two pipes (`harness.py`). Names that the tests take from it
stand next to the builtins, where the tests' own names hide them, as plain values, or as objects of
class Remote where they are not plain. A call sends its arguments and takes back plain values, which
are made anew here (`wire.py`), so that nothing the program defines or changes has a part in an
assertion: builtins, modules and comparisons are this process's own. What a Remote compares equal
to, adds up to, or is rounded to is decided here, from its plain content if its class is derived
from a plain one; any other Remote equals nothing plain. The content is asked for once, until the
program has been asked for something else, and that of numbers and text for good: else it could be
above one bound and below the next. Only between two objects of the program is the program asked.
Functions of the tests can be arguments and are called back; iterators are given as lists of at most
MOST_ITEMS; other objects of the tests cannot be given to the program. Arguments are copies; a list,
dict, set or bytearray that a call which returns None has changed is changed here too.

Exceptions of the program are raised here, but for those that end an iteration: outside `next` they
come as RuntimeError, or `all(map(f, ...))` would be true of what it has not seen. An assertion that
fails in a function of the tests has failed though the program catches it, and no context manager of
the program suppresses what a block of the tests raises. What a runner of unittest counts as failed
has failed too, and `unittest.main` runs the tests' own module.

Left out: what the tests define or import is not visible to the program; coroutines, subclasses of
the program's classes, isinstance of its objects with builtin classes, and `type`, which is Remote
for all of them. It cannot rule out a
program that returns what it knows to be expected; objects whose methods, truth, length, items or
comparison with each other lie, where a test asks for just these; helpers that the tests take from
the program because they define none; a program that raises, or has the tests raise, what they
catch; and a program that changes, by returning None, an argument from which the tests make what
they expect. Under isolation `none` the program could reach this process.
"""

import builtins
import importlib
import inspect
import itertools
import json
import operator
import os
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

from isobit.tasks.rewards.sandbox import wire

MOST_ITEMS = 100_000
ENDS = (
    StopIteration,
    StopAsyncIteration,
    GeneratorExit,
)  # Python takes these for an iterator's end, not for an error
MIRRORED = ("__name__", "__qualname__", "__doc__", "__dict__", "__annotations__", "__wrapped__")
FIXED = (str, int, float, complex, bytes)  # whose values do not change
ITERATORS: tuple[Any, ...] = (types.GeneratorType, map, filter, zip, enumerate, reversed)
ITERATORS += (
    type(iter(())),
    type(iter([])),
    type(iter({})),
    type(iter("")),
    type(iter(range(0))),
    type({}.keys()),
)


class Connection:
    """The tests' end of the pipes."""

    def __init__(self, read: int, write: int) -> None:
        self.read, self.write = read, write
        self.gone = False
        self.failed = False  # an assertion, in a function that the program has called
        self.functions: list[Callable[..., Any]] = []
        self.errors: dict[int, type[BaseException]] = {}
        self.remotes: dict[int, Remote] = {}  # one for each object, so that `is` tells them apart
        self.contents: dict[int, Any] = {}

    def ask(self, operation: str, *args: Any, **named: Any) -> Any:
        """Send an operation with its arguments to the program's process, and return its result.
        Raises the program's exception as an exception of this process."""
        arguments = [self.encode(value) for value in args]
        options = {name: self.encode(value) for name, value in named.items()}
        if operation != "content":
            known = self.contents.items()
            self.contents = {number: value for number, value in known if type(value) in FIXED}
        try:
            if self.gone:
                raise wire.Gone
            wire.send(self.write, {"do": operation, "arguments": arguments, "named": options})
            while "call" in (message := self._message()):
                wire.send(self.write, self._called(message))
        except wire.Gone:
            self.gone = True
            raise
        if "raise" in message:
            raise self._error(message, operation)
        result = self.decode(message["value"])
        if result is None and operation == "call":
            for mine, theirs in zip(args, self.decode(message["arguments"])):
                _update(mine, theirs)
        return result

    def _message(self) -> dict[str, Any]:
        message = wire.receive(self.read)
        if not isinstance(message, dict):
            raise wire.Gone
        return message

    def _called(self, message: dict[str, Any]) -> dict[str, Any]:
        try:
            function = self.functions[message["call"]]
            named = {name: self.decode(value) for name, value in message["named"].items()}
            return {"value": self.encode(function(*self.decode(message["arguments"]), **named))}
        except Exception as raised:
            self.failed |= isinstance(raised, AssertionError)
            return {"raise": wire.error(raised)}

    def _error(self, message: dict[str, Any], operation: str) -> BaseException:
        name, arguments = message["raise"]
        kind = _exception(name)
        if operation == "next" and issubclass(kind, StopIteration):
            kind = StopIteration
        elif message["class"] is not None:
            kind = self._class(message["class"], message["name"], name)
        elif issubclass(kind, ENDS):
            kind = RuntimeError
        try:
            return kind(*self.decode(arguments))
        except Exception:
            return Exception(str(arguments))

    def _class(self, number: int, name: str, base: str) -> type[BaseException]:
        """Return the class of this process that stands for an exception class of the program."""
        kind = _exception(base)
        kind = RuntimeError if issubclass(kind, ENDS) else kind
        return self.errors.setdefault(int(number), type(str(name), (kind,), {}))

    def encode(self, value: Any) -> Any:
        """Return a value of the tests as JSON, for the program. Raises TypeError for a value that
        cannot be given to the program."""
        return wire.encode(value, self._foreign)

    def decode(self, body: Any) -> Any:
        """Return the value for JSON from the program."""
        return wire.decode(body, self._received)

    def _foreign(self, value: Any) -> Any:
        if isinstance(value, Remote):
            return {"object": value._number}
        if isinstance(value, type):
            numbers = [number for number, kind in self.errors.items() if kind is value]
            if numbers:
                return {"object": numbers[0]}
            if name := wire.builtin_class(value):
                return {"type": name}
        elif (
            isinstance(value, types.BuiltinFunctionType)
            and value.__module__ == "builtins"
            and not _bound(value)
        ):
            return {"builtin": value.__name__}
        elif isinstance(value, ITERATORS):
            return {"iterator": self.encode(list(itertools.islice(value, MOST_ITEMS)))}
        elif isinstance(value, wire.BASES):
            return self.encode(wire.content(value))
        elif callable(value):
            self.functions.append(value)
            return {"function": len(self.functions) - 1}
        raise TypeError(f"the tests' {type(value).__name__!r} cannot be given to the program")

    def _received(self, name: str, content: Any) -> Any:
        if name == "object":
            return self.remotes.setdefault(int(content), Remote(self, int(content)))
        if name == "error":
            return self._class(*content)
        if name == "type" and content in wire.SHARED:
            return wire.CLASSES[content]
        if name != "array":
            raise wire.Gone
        numpy = importlib.import_module("numpy")
        kind = numpy.dtype(str(content[0]))
        if kind.kind not in "biufc":
            raise wire.Gone
        return numpy.array(content[1], dtype=kind)


def _exception(name: str) -> type[BaseException]:
    kind = wire.CLASSES.get(name, Exception)
    return kind if issubclass(kind, BaseException) else Exception


def _bound(function: types.BuiltinFunctionType) -> bool:
    return not isinstance(function.__self__, types.ModuleType)


def _update(mine: Any, theirs: Any) -> None:
    """Change an argument of the tests, a list, dict, set or bytearray, as the program has changed
    its copy."""
    if (
        type(mine) is not type(theirs)
        or type(mine) not in (list, dict, set, bytearray)
        or mine == theirs
    ):
        return
    if isinstance(mine, (list, bytearray)):
        mine[:] = theirs
    else:
        mine.clear()
        mine.update(theirs)


class Remote:
    """An object of the program: operations on it are done in the program's process, except those
    that are decided here from its plain content."""

    __slots__ = ("_connection", "_number")
    _connection: Connection
    _number: int

    def __init__(self, connection: Connection, number: int) -> None:
        object.__setattr__(self, "_connection", connection)
        object.__setattr__(self, "_number", number)

    def _ask(self, operation: str, *args: Any, **named: Any) -> Any:
        return self._connection.ask(operation, self, *args, **named)

    def _content(self) -> Any:
        """Return the object's plain content. Raises TypeError if it has none."""
        known = self._connection.contents
        if self._number not in known:
            content = self._ask("content")
            if type(content) not in wire.BASES:
                raise TypeError("this object of the program has no plain value")
            known = self._connection.contents  # asking may have replaced it
            known.setdefault(self._number, content)
        return known[self._number]

    def _exactly(self, operation: str, kind: type) -> Any:
        value = self._ask(operation)
        if type(value) is not kind:
            raise TypeError(
                f"{operation} of an object of the program gave {type(value).__name__!r}"
            )
        return value

    def __call__(self, *args: Any, **named: Any) -> Any:
        return self._ask("call", *args, **named)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name not in MIRRORED:
            raise AttributeError(name)
        return self._ask("getattr", name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._ask("setattr", name, value)

    def __delattr__(self, name: str) -> None:
        self._ask("delattr", name)

    def __getitem__(self, key: Any) -> Any:
        return self._ask("getitem", key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._ask("setitem", key, value)

    def __delitem__(self, key: Any) -> None:
        self._ask("delitem", key)

    def __iter__(self) -> Iterator[Any]:
        items = self._ask("iter")
        return items if type(items) is not Remote else _Items(items)

    def __next__(self) -> Any:
        return self._ask("next")

    def __reversed__(self) -> Iterator[Any]:
        return _Items(self._ask("reversed"))

    def __len__(self) -> int:
        return self._exactly("len", int)

    def __bool__(self) -> bool:
        return self._exactly("bool", bool)

    def __repr__(self) -> str:
        return self._exactly("repr", str)

    def __str__(self) -> str:
        return self._exactly("str", str)

    def __hash__(self) -> int:
        try:
            return hash(self._content())
        except TypeError:
            return hash(self._number)

    def __enter__(self) -> Any:
        return self._ask("enter")

    def __exit__(self, kind: Any, *rest: Any) -> None:
        self._ask("exit", kind if kind in wire.CLASSES.values() else None)

    def __copy__(self) -> Any:
        return self._ask("copy")

    def __deepcopy__(self, memo: Any) -> Any:
        return self._ask("deepcopy")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("an object of the program cannot be pickled")

    def __instancecheck__(self, value: Any) -> bool:
        return isinstance(value, Remote) and self._connection.ask("isinstance", value, self) is True


class _Items:
    """An iterator of the program."""

    def __init__(self, remote: Remote) -> None:
        self._remote = remote

    def __iter__(self) -> "_Items":
        return self

    def __next__(self) -> Any:
        return next(self._remote)


def _binary(name: str, function: Callable[[Any, Any], Any]) -> Callable[[Remote, Any], Any]:
    def method(self: Remote, other: Any) -> Any:
        if isinstance(other, Remote):
            return self._ask(name, other)
        try:
            mine = self._content()
        except Exception:
            if name not in ("eq", "ne"):
                raise TypeError(
                    "an object of the program has no plain value to work with"
                ) from None
            return name == "ne"
        return function(mine, other)

    return method


def _unary(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, *args: function(self._content(), *args)


for _name in (
    "eq",
    "ne",
    "lt",
    "le",
    "gt",
    "ge",
    "add",
    "sub",
    "mul",
    "truediv",
    "floordiv",
    "mod",
    "and_",
    "or_",
    "xor",
):
    _function = getattr(operator, _name)
    setattr(Remote, f"__{_name.rstrip('_')}__", _binary(_name, _function))
for _function in (float, int, complex, round, abs, operator.index, operator.neg):
    setattr(Remote, f"__{_function.__name__}__", _unary(_function))


def _asked(name: str) -> property:
    """Return a property that asks the program's object for an attribute that Remote has too."""
    return property(lambda self: self._ask("getattr", name))


for _name in ("__doc__", "__annotations__"):
    setattr(Remote, _name, _asked(_name))


def _watch_runners(program: Connection) -> None:
    """Make each failure that unittest counts fail the test, since unittest's runners do not
    raise."""
    result: Any = importlib.import_module("unittest").TestResult

    def failing(method: Callable[..., Any]) -> Callable[..., Any]:
        def add(*args: Any) -> Any:
            program.failed |= args[-1] is not None  # that of a subtest which has passed is None
            return method(*args)

        return add

    for name in ("addFailure", "addError", "addSubTest", "addUnexpectedSuccess"):
        setattr(result, name, failing(getattr(result, name)))
    runner: Any = importlib.import_module("unittest").TestProgram
    begin = inspect.signature(runner.__init__)
    make = runner.__init__

    def run(*args: Any, **named: Any) -> None:
        """Run `unittest.main` without this process's arguments, and without ending the process. If
        no test is run, none has passed."""
        values = begin.bind(*args, **named).arguments
        values |= {"argv": values.get("argv") or ["tests"], "exit": False}
        itself = values.pop("self")
        make(itself, **{**values.pop("kwargs", {}), **values})
        program.failed |= not itself.result.testsRun or not itself.result.wasSuccessful()

    runner.__init__ = run


def main() -> None:
    """Run the tests one after another; each is {"source": ..., "token": number or null}."""
    exam = json.load(sys.stdin)
    program = Connection(*map(int, sys.argv[1:3]))
    report, null = os.dup(1), os.open("/dev/null", os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    run = exec
    beside = dict(vars(builtins))
    module = sys.modules["__main__"] = types.ModuleType("__main__")  # where unittest.main looks
    namespace = vars(module)
    namespace["__builtins__"] = beside
    names = [*exam["names"]]
    for name, origin in exam["modules"].items():
        try:
            namespace[name] = _library(origin)
        except ImportError:  # numpy, where packages are not let in
            names.append(name)
    if any("unittest" in step["source"] for step in exam["steps"]):
        _watch_runners(program)
    try:
        for step in exam["steps"]:
            _take(program, names, beside)
            program.failed = False
            try:
                run(compile(step["source"], "tests.py", "exec", dont_inherit=True), namespace)
                if program.failed:
                    raise AssertionError
            except BaseException:
                if step["token"] is None:  # what the tests need cannot be made
                    break
                continue
            if step["token"] is not None and not program.gone:
                os.write(report, f"{step['token']}\n".encode())
    finally:
        os._exit(0)


def _library(origin: str) -> Any:
    """Return a module, or an object in it: `math`, `math:isclose`."""
    module, _, name = origin.partition(":")
    library = importlib.import_module(module)
    return getattr(library, name) if name else library


def _take(program: Connection, names: list[str], beside: dict[str, Any]) -> None:
    """Put the program's present objects of these names next to the builtins; remove a name that the
    program does not have."""
    objects = program.ask("names", *names)
    if type(objects) is not dict:
        raise wire.Gone
    for name in names:
        if name in objects:
            beside[name] = objects[name]
        else:
            beside.pop(name, None)


if __name__ == "__main__":
    main()
