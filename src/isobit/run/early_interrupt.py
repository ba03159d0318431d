"""Ctrl-C while the `isobit` command is still being imported ends it at once: nothing has begun, so
one line and no traceback. The command's own handlers take its place (`cli/__init__.py`).

Imports nothing that is not there already: it is the first module of all.
"""

import os
import signal
import sys
from types import FrameType


def at_once(number: int, frame: FrameType | None) -> None:
    """The handler of SIGINT until the command has its own."""
    os.write(2, b"isobit: interrupted\n")
    os._exit(128 + number)


def is_command() -> bool:
    """Whether this process is the command, and not a program that imports isobit."""
    words = sys.orig_argv
    module = "-m" in words and words[words.index("-m") + 1 :][:1] == ["isobit"]
    return module or os.path.basename(sys.argv[0] if sys.argv else "") == "isobit"


def watch() -> None:
    """Have SIGINT end the command, unless it is handled or ignored already."""
    if is_command() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, at_once)
