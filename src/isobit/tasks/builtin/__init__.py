"""Tasks: prompts, rewards and held-out splits. Nothing here imports torch, so that reward workers
start at once."""

from collections.abc import Callable
from os.path import exists  # False also for a name that no file can have

from isobit.errors import IsobitError, brief, did_you_mean
from isobit.tasks.builtin import arithmetic, calculator, countdown, files, gsm8k, guess, lookup
from isobit.tasks.builtin.task import Task, TaskSettings

Load = Callable[[TaskSettings], Task]
TASKS: dict[str, tuple[Load, type]] = {
    "arithmetic": (arithmetic.load, arithmetic.ArithmeticOptions),
    "countdown": (countdown.load, countdown.CountdownOptions),
    "gsm8k": (gsm8k.load, gsm8k.Gsm8kOptions),
    "calculator": (calculator.load, calculator.CalculatorOptions),
    "guess": (guess.load, guess.GuessOptions),
    "lookup": (lookup.load, lookup.LookupOptions),
    "file": (files.load, files.FileOptions),
}
"""How each is made, and what its `task.options` may hold."""

__all__ = ["TASKS", "Task", "TaskSettings", "load_task"]


def load_task(settings: TaskSettings) -> Task:
    """Make or read a task. Raises IsobitError, in one line, for an unknown name, a bad option or
    bad data."""
    if settings.name not in TASKS:
        file = "; a file is task.path (isobit eval: --data)" if exists(settings.name) else ""
        raise IsobitError(
            f"unknown task {brief(settings.name)!r}; "
            f"{did_you_mean(settings.name, list(TASKS))}{file}"
        )
    load, _ = TASKS[settings.name]
    return load(settings)
