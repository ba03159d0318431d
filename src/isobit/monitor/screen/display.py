"""The view of a run in its own process: one live screen in a terminal, plain lines elsewhere,
warnings alone with `quiet`.

A thread of rich redraws the screen once a second, so that a long step shows its progress; the end
of a step redraws it at once, at most twice a second. Everything goes to stderr, which the run
outlives (`run/outlived.py`).
"""

import sys
import time
from collections.abc import Iterable, Mapping

from rich.console import Console, RenderableType
from rich.live import Live

from isobit.errors import printable
from isobit.monitor.screen.history import History, Shown
from isobit.monitor.screen.screen import screen, summary
from isobit.run.no_progress import PATIENCE

PLAIN_EVERY_S = 10.0
_REDRAW_EVERY_S = 0.5


class Display:
    """The screen of a run that is under way, used as a context manager. `history` is what it shows.
    `quiet`: no progress is shown; unless it `speaks`, as on ranks other than the first, no warnings
    either."""

    def __init__(
        self,
        total: int,
        quiet: bool = False,
        done: int = 0,
        name: str = "",
        details: str = "",
        speaks: bool = True,
    ) -> None:
        self.history = History(name, total, details, done)
        self.quiet, self._speaks = quiet or not speaks, speaks
        self._ended = time.monotonic()  # the last step
        self._printed = self._drawn = float("-inf")
        self._console = Console(stderr=True)
        self._live: Live | None = None
        if self._console.is_terminal and not self.quiet:
            self._live = Live(
                console=self._console,
                get_renderable=self._screen,
                refresh_per_second=1,
                vertical_overflow="crop",
            )

    def __enter__(self) -> "Display":
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self.history.phase = ""
            self._live.stop()

    def note(self, text: str) -> None:
        """Print a line that stays, above the screen."""
        if not self.quiet:
            self.warn(text)

    def warn(self, text: str) -> None:
        """Print a line about a fault, or how a run ended, also where `quiet` leaves notes out."""
        if self._speaks:
            self._console.print(printable(text), highlight=False, markup=False, soft_wrap=True)

    def phase(self, name: str) -> None:
        """Show the present phase of the run."""
        self.history.phase = name

    def step(self, metrics: Mapping[str, float], completions: Iterable[Shown] = ()) -> None:
        """Show a step that is done. `completions` are only looked at where they are shown."""
        now = time.monotonic()
        self.history.step += 1
        self.history.add({"time/step": now - self._ended, **metrics})
        self._ended = now
        for warning in (self.history.no_progress, self.history.cut_off):
            if warning.steps == PATIENCE:
                self.warn(f"step {self.history.step}: {warning.line}")
        if self.quiet:
            return
        if self._live is not None:
            if now - self._drawn >= _REDRAW_EVERY_S or self.history.step == self.history.total:
                self._drawn = now
                self.history.show(completions)
                self._live.refresh()
        elif now - self._printed >= PLAIN_EVERY_S or self.history.step == self.history.total:
            self._printed = now
            print(summary(self.history), file=sys.stderr, flush=True)

    def _screen(self) -> RenderableType:
        return screen(self.history, self._console.width, self._console.height)
