"""Progress on one line of stderr while a model answers, only in a terminal: the activity and the
completions done."""

from rich.console import Console
from rich.status import Status


class ProgressLine:
    """Use as a context manager, and call `update` with what is being done, completions done, and
    completions asked."""

    def __init__(self, title: str) -> None:
        console = Console(stderr=True)
        self._title = title
        self._status = Status(title, console=console) if console.is_terminal else None

    def __enter__(self) -> "ProgressLine":
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._status is not None:
            self._status.stop()

    def update(self, what: str, done: int, total: int) -> None:
        """Show how many of the completions are done."""
        if self._status is not None:
            self._status.update(f"{self._title}: {what}, {done} of {total} completions")
