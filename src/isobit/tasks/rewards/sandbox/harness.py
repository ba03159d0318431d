"""Runs a program inside the cage and does with it what the tests, in another cage (`examiner.py`),
ask for.

The program runs, as a module, when the first request has come. A request names an operation and its
arguments, which are plain values or objects of the program by number; the answer is a plain value
(`wire.py`), a number for what is not plain, or an exception. This side is not trusted: it shares
its interpreter with the program and holds nothing but two pipes, by which it learns the arguments
of calls, and never what is expected of their results.
"""

import builtins
import copy
import operator
import os
import site
import sys
import types
from collections.abc import Callable
from typing import Any

from isobit.tasks.rewards.sandbox import wire

MUTABLE = (list, dict, set, bytearray)


class Program:
    """The program, and its end of the pipes."""

    def __init__(self, read: int, write: int) -> None:
        self.read, self.write = read, write
        self.module = types.ModuleType("program")
        self.objects: list[Any] = []
        self.numbers: dict[int, int] = {}
        self.operations: dict[str, Callable[..., Any]] = {
            "call": lambda function, *args, **named: function(*args, **named),
            "names": self.names,
            "content": wire.content,
            "enter": lambda value: value.__enter__(),
            "copy": copy.copy,
            "deepcopy": copy.deepcopy,
            "exit": lambda value, kind: value.__exit__(kind, kind and kind(), None),
            **{function.__name__: function for function in (getattr, setattr, delattr, isinstance)},
            **{
                function.__name__: function
                for function in (len, iter, next, repr, str, bool, reversed)
            },
        }

    def run(self, path: str) -> None:
        """Run the source in a file as the program."""
        sys.modules["program"] = self.module
        with open(path, encoding="utf-8", errors="surrogatepass") as file:
            text = file.read()
        run = exec
        run(compile(text, "program.py", "exec"), vars(self.module))

    def names(self, *names: str) -> dict[str, Any]:
        """Return the objects of the program's module by these names; names that it lacks are left
        out."""
        return {name: vars(self.module)[name] for name in names if name in vars(self.module)}

    def answer(self, request: dict[str, Any]) -> None:
        """Carry out a request of the tests and send its result, or the exception that it raised."""
        try:
            arguments = [self.decode(value) for value in request["arguments"]]
            named = {name: self.decode(value) for name, value in request["named"].items()}
            operation = self.operations.get(request["do"]) or getattr(operator, request["do"])
            result = operation(*arguments, **named)
            reply = {"value": self.encode(result)}
            if result is None:  # as of a function that works in place
                lists = [value if type(value) in MUTABLE else None for value in arguments]
                reply["arguments"] = self.encode(lists)
        except BaseException as raised:
            if isinstance(raised, wire.Gone):
                raise
            number = None if type(raised).__module__ == "builtins" else self.number(type(raised))
            reply = {"raise": wire.error(raised), "class": number, "name": type(raised).__name__}
        wire.send(self.write, reply)

    def call_back(self, function: int, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Call a function of the tests; they may ask for more before they answer."""
        arguments = {name: self.encode(value) for name, value in named.items()}
        wire.send(
            self.write, {"call": function, "arguments": self.encode(list(args)), "named": arguments}
        )
        while "do" in (message := wire.receive(self.read)):
            self.answer(message)
        if "raise" in message:
            name, arguments = message["raise"]
            raise wire.CLASSES[name](*self.decode(arguments))
        return self.decode(message["value"])

    def number(self, value: Any) -> int:
        """Return the number of an object, the same in every call; the object is never freed."""
        if id(value) not in self.numbers:
            self.numbers[id(value)] = len(self.objects)
            self.objects.append(value)
        return self.numbers[id(value)]

    def encode(self, value: Any) -> Any:
        """Return a value as JSON; objects of the program become numbers."""
        return wire.encode(value, self._foreign)

    def decode(self, body: Any) -> Any:
        """Return the value of some JSON, with the functions and iterators that the tests pass."""
        return wire.decode(body, self._given)

    def _foreign(self, value: Any) -> Any:
        kind = type(value)
        if kind.__module__ == "numpy" and hasattr(value, "dtype"):
            return (
                {"array": [value.dtype.str, value.tolist()]}
                if value.shape
                else self.encode(value.item())
            )
        if (shared := wire.builtin_class(value)) in wire.SHARED:
            return {"type": shared}
        if isinstance(value, type) and issubclass(value, BaseException):
            name = next(
                base.__name__ for base in value.__mro__ if wire.CLASSES.get(base.__name__) is base
            )
            return {"error": [self.number(value), value.__name__, name]}
        if kind.__module__ != "program" and isinstance(value, wire.BASES):
            return self.encode(wire.content(value))
        return {"object": self.number(value)}

    def _given(self, name: str, content: Any) -> Any:
        if name == "object":
            return self.objects[content]
        if name in ("builtin", "type"):
            return getattr(builtins, content)
        if name == "iterator":
            return iter(self.decode(content))
        assert name == "function", name
        return lambda *args, **named: self.call_back(content, args, named)


def main() -> None:
    """Wait for the first request, run the program, then answer until the tests have ended."""
    program = Program(*map(int, sys.argv[1:3]))
    null = os.open("/dev/null", os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    try:
        request = wire.receive(program.read)
        site.setquit()
        sys.argv[:] = ["program.py"]
        program.run(sys.path[0] + "/program.py")
        while True:
            program.answer(request)
            request = wire.receive(program.read)
    except BaseException:
        os._exit(1)


if __name__ == "__main__":
    main()
