"""Mistakes of an environment's program: errors that every episode would have, whatever the model
wrote. A mistake ends the run; an error of one episode is for `environment.on_error`.
"""

import inspect
import os
import traceback
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from isobit.errors import IsobitError, listed
from isobit.tasks.workers.loading import lacks_variable


class Mistake(IsobitError):
    """A mistake of an environment's program, which every episode would have."""


def check_call(method: Callable[..., Any], arguments: Mapping[str, Any], name: str) -> None:
    """Raise Mistake if `method`, called `name` in the message, does not take the keyword
    `arguments`."""
    try:
        signature = inspect.signature(method)
    except (TypeError, ValueError):  # a builtin without a signature
        return
    try:
        signature.bind(**arguments)
    except TypeError as error:
        call = f"it is called with {listed(arguments)}" if arguments else "it is given none"
        more = "; take what it does not need as **columns" if "unexpected" in str(error) else ""
        raise Mistake(f"{name}{place_of(method)}: {error}; {call}{more}") from None


def place_of(method: Callable[..., Any]) -> str:
    """Return the file and line of a method, in parentheses after a space; an empty text for a
    method without Python code."""
    code = getattr(inspect.unwrap(method), "__code__", None)
    if code is None:
        return ""
    return f" ({os.path.basename(code.co_filename)}, line {code.co_firstlineno})"


def is_mistake(error: BaseException, owner: Any, file: str) -> bool:
    """Return whether an error is a mistake of the program in `file`, whatever the model wrote: a
    name, module or environment variable that the program lacks, an attribute that its object
    `owner` or a module lacks, or a Step made with arguments that Step does not have. An error
    raised by code that a model wrote (`eval`) is not a mistake."""
    frames = traceback.extract_tb(error.__traceback__)
    if lacks_variable(error):
        frames.pop()  # the frame of os itself
    at = os.path.realpath(frames[-1].filename) if frames else ""
    folder = os.path.dirname(os.path.realpath(file))
    if isinstance(error, TypeError):
        return "Step.__init__()" in str(error)
    if not at.startswith(folder + os.sep) or "site-packages" in at:
        return False
    if isinstance(error, AttributeError):
        lacks = getattr(error, "obj", None)
        return isinstance(lacks, ModuleType) or (owner is not None and lacks is owner)
    return isinstance(error, NameError | ImportError) or lacks_variable(error)
