"""Ctrl-C while the `isobit` command is still being imported ends the command at once, with one
line and no traceback, since nothing has begun. Later the command's own handlers replace this one
(`cli/__init__.py`).

This module is imported before all others, and imports only modules that are loaded already.
"""

import os
import signal
import sys
from types import FrameType


def at_once(number: int, frame: FrameType | None) -> None:
    """Handle SIGINT until the command has its own handler: print one line and end the process."""
    os.write(2, b"isobit: interrupted\n")
    os._exit(128 + number)


def is_command() -> bool:
    """Return whether this process is the `isobit` command, not a program that imports isobit."""
    words = sys.orig_argv
    module = "-m" in words and words[words.index("-m") + 1 :][:1] == ["isobit"]
    return module or os.path.basename(sys.argv[0] if sys.argv else "") == "isobit"


def watch() -> None:
    """Make SIGINT end the command at once, unless SIGINT is handled or ignored already."""
    if is_command() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, at_once)
