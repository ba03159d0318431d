"""Tasks: prompts, rewards and held-out splits. Nothing here imports torch."""

from difflib import get_close_matches

from isobit.errors import IsobitError
from isobit.tasks import arithmetic, countdown, files, gsm8k
from isobit.tasks.data import Dataset, Example, TaskSettings
from isobit.tasks.task import RewardSpec, Task

TASKS = {"arithmetic": arithmetic.load, "countdown": countdown.load, "gsm8k": gsm8k.load, "file": files.load}

__all__ = ["TASKS", "Dataset", "Example", "RewardSpec", "Task", "TaskSettings", "load_task"]


def load_task(settings: TaskSettings) -> Task:
    """Make or read a task. Raises IsobitError for an unknown name, a bad option or bad data."""
    if settings.name not in TASKS:
        close = get_close_matches(settings.name, list(TASKS), 1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        raise IsobitError(f"unknown task {settings.name!r}{hint}: choose from {', '.join(TASKS)}")
    return TASKS[settings.name](settings)
