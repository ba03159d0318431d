"""The terminal view of a run while it works: live in its own process, or from its directory.
Imports no torch."""

from isobit.monitor.screen.display import Display
from isobit.monitor.screen.history import History, Shown

__all__ = ["Display", "History", "Shown"]
