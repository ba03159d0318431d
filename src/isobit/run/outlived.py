"""A stderr that a command outlives: what cannot be written there is lost, and the writing code goes
on. The disk of its log may be full, or the reader of its pipe gone; what counts is in the run's
files.

Left out: stdout, whose lines are results (`cli/__init__.py`).
"""

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO, cast


class _Outlived:
    """A text stream whose write errors are ignored; its other attributes are those of the wrapped
    stream."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with suppress(OSError):
            self._stream.write(text)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        with suppress(OSError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def outlived_stderr() -> Iterator[None]:
    """Ignore errors of writing on stderr inside this context. Without a stderr nothing is done."""
    stream = sys.stderr
    if stream is None or isinstance(stream, _Outlived):
        yield
        return
    mine = _Outlived(stream)
    sys.stderr = cast(TextIO, mine)
    try:
        yield
    finally:
        if sys.stderr is cast(TextIO, mine):
            sys.stderr = stream
