"""The process in which one reward function of the user's runs: `python -m isobit.tasks.worker FUNCTION IN OUT`.

Requests and answers are JSON, one line each, over two pipes of their own, so nothing that the user prints can disturb
them: standard output goes to standard error. The process ends when the pipe does, or when its parent dies.
"""

import asyncio
import ctypes
import importlib
import importlib.util
import inspect
import json
import math
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

Reward = Callable[..., Any]


def load_function(name: str) -> Reward:
    """The function of `path/to/file.py:function` or `package.module:function`; ValueError with one line if it fails."""
    place, _, attribute = name.rpartition(":")
    if not place or not attribute:
        raise ValueError("expected path/to/file.py:function or package.module:function")
    module = _load_file(Path(place)) if place.endswith(".py") else _load_module(place)
    function = getattr(module, attribute, None)
    if function is None:
        names = [n for n, value in vars(module).items() if inspect.isfunction(value) and not n.startswith("_")]
        raise ValueError(f"{place} has no function {attribute!r}; it has {', '.join(names) or 'none'}")
    if not callable(function):
        raise ValueError(f"{attribute!r} in {place} is not a function")
    return function


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise ValueError(f"no such file: {path}")
    sys.path.insert(0, str(path.resolve().parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        raise ValueError(f"{path}, line {error.lineno}: {error.msg}") from None
    except Exception as error:
        raise ValueError(f"{path}{_line_in(error, path)}: {_describe(error)}") from None
    return module


def _load_module(name: str) -> ModuleType:
    sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise ValueError(f"cannot import {name}: {_describe(error)}") from None


def call(function: Reward, request: dict[str, Any]) -> list[float | None]:
    """Call with TRL's arguments; ValueError if what comes back is not one number or None per completion."""
    arguments = {"prompts": request["prompts"], "completions": request["completions"], **request["columns"]}
    parameters = inspect.signature(function).parameters
    if not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        arguments = {key: value for key, value in arguments.items() if key in parameters}
    values = function(**arguments)
    if inspect.isawaitable(values):
        values = asyncio.run(_await(values))
    if hasattr(values, "tolist"):
        values = values.tolist()
    if not isinstance(values, (list, tuple)):
        raise ValueError(f"returned {type(values).__name__}; expected a list with one number per completion")
    if len(values) != len(request["completions"]):
        raise ValueError(f"returned {len(values)} values for {len(request['completions'])} completions")
    return [_number(value) for value in values]


async def _await(awaitable: Any) -> Any:
    return await awaitable


def _number(value: Any) -> float | None:
    if value is None:
        return None
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise ValueError(f"returned {value!r:.60}; expected a number or None") from None
    if not math.isfinite(number):
        raise ValueError(f"returned {number}; expected a finite number, or None for a sample that cannot be scored")
    return number


def _describe(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


def _line_in(error: BaseException, path: Path) -> str:
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename) == path]
    return f", line {lines[-1]}" if lines else ""


def _die_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def main() -> None:
    """Answer requests until the pipe ends."""
    name, requests, answers = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    _die_with_parent()
    for handled in (signal.SIGINT, signal.SIGTERM):
        signal.signal(handled, signal.SIG_IGN)  # the run decides when its workers end
    with os.fdopen(requests, encoding="utf-8") as incoming, os.fdopen(answers, "w", encoding="utf-8") as outgoing:
        os.dup2(2, 1)
        try:
            function = load_function(name)
        except ValueError as error:
            print(json.dumps({"error": str(error)}), file=outgoing, flush=True)
            return
        print(json.dumps({"ready": True}), file=outgoing, flush=True)
        for line in incoming:
            try:
                answer: dict[str, Any] = {"values": call(function, json.loads(line))}
            except Exception as error:
                traceback.print_exc()
                text = (
                    str(error) if type(error) is ValueError and str(error).startswith("returned") else _describe(error)
                )
                answer = {"error": text}
            print(json.dumps(answer), file=outgoing, flush=True)


if __name__ == "__main__":
    main()
