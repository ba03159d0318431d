"""The interruption of a run by a signal, after the current step."""

import os
import signal
import sys
from types import FrameType
from typing import Any


class Interruption:
    """A context in which SIGINT, SIGTERM and SIGHUP (unless SIGHUP is ignored, as under nohup) set
    a flag, `signal`, that the training loop reads between steps; a second signal ends the
    process."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "Interruption":
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue
            try:
                self._previous[number] = signal.signal(number, self._handle)
            except (
                ValueError
            ):  # not in the main thread: a program that embeds isobit keeps its own handlers
                break
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    @property
    def exit_code(self) -> int:
        return 0 if self.signal is None else 128 + self.signal

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None:
            os._exit(128 + number)
        self.signal = number
        print("isobit: finishing this step, then saving; once more to end at once", file=sys.stderr)
