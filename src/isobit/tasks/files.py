"""Any JSONL file of the user's, scored by reward functions of the user's."""

from isobit.errors import IsobitError
from isobit.tasks.data import Dataset, TaskSettings, read_examples, split_held_out
from isobit.tasks.task import Task


def load(settings: TaskSettings) -> Task:
    """`path`, and `held_out_path` or `held_out_size` (default: a tenth, at most 256) for evaluation."""
    if settings.path is None:
        raise IsobitError("task.path: give a JSONL file, or a built-in task by task.name: arithmetic, countdown, gsm8k")
    if settings.options:
        raise IsobitError(f"task.options.{min(settings.options)}: a file task has no options")
    examples = read_examples(settings.path, settings)
    if settings.held_out_path is not None:
        held_out = Dataset(read_examples(settings.held_out_path, settings), settings.seed)
        return Task("file", Dataset(examples, settings.seed), held_out)
    size = min(256, len(examples) // 10) if settings.held_out_size is None else settings.held_out_size
    train, held_out = split_held_out(examples, size, settings.seed, settings.path)
    return Task("file", train, held_out)
