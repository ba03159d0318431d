"""Functions of the user's file that a run calls after every step, by name: `run.callbacks`.

They are called as `train(callbacks=...)` calls objects of Python (`objects.py`), in the first
rank's process, after the step's row and checkpoint are written. They change nothing that is
learned, so a run that goes on may have others. What one raises ends the run, in one line.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from isobit.errors import IsobitError, RunFailed
from isobit.tasks.workers.loading import find_function, last_line
from isobit.training.objects import OnStep

_KEY = "run.callbacks"


def named_callbacks(names: Sequence[str]) -> list[OnStep]:
    """Return the callbacks that a config names. Raises IsobitError for one that cannot be found, or
    that cannot be called as on_step(step, metrics)."""
    return [_named(name) for name in names]


def _named(name: str) -> OnStep:
    function, file = find_function(name, _KEY)
    try:
        inspect.signature(function).bind(0, {})
    except TypeError:
        raise IsobitError(f"{_KEY} {name!r}: expected def on_step(step, metrics)") from None
    return _reported(function, name, file)


def _reported(function: Callable[..., Any], name: str, file: str) -> OnStep:
    def on_step(step: int, metrics: Mapping[str, float]) -> None:
        try:
            function(step, metrics)
        except Exception as error:  # the user's function may raise anything
            raise RunFailed(f"{_KEY} {name!r}: {last_line(error, file)}") from None

    return on_step
