"""Grade-school maths in GSM8K's form (Cobbe et al. 2021, arXiv 2110.14168): a question, and an answer after `####`."""

import re
from dataclasses import replace
from decimal import Decimal
from typing import Any

from isobit.errors import IsobitError
from isobit.tasks.data import Dataset, TaskSettings, read_examples, split_held_out
from isobit.tasks.task import RewardSpec, Task

_NUMBER = re.compile(r"(?:(?<![\w.,)])[-+])?\$?(?:\d[\d,]*(?:\.\d+)?|\.\d+)")
_HELD_OUT = 256


def load(settings: TaskSettings) -> Task:
    """A JSONL file with `question` and `answer`, or the columns that the settings name."""
    if settings.path is None:
        raise IsobitError("task.path: task gsm8k needs a JSONL file with question and answer")
    path = settings.path
    settings = replace(settings, prompt_column=settings.prompt_column or "question")
    examples = read_examples(path, settings)
    if "answer" not in examples[0].columns:
        raise IsobitError(f"{path}: no column 'answer'; name it with task.answer_column")
    if settings.held_out_path is not None:
        train = Dataset(examples, settings.seed)
        held_out = Dataset(read_examples(settings.held_out_path, settings), settings.seed)
    else:
        size = min(_HELD_OUT, len(examples) // 10) if settings.held_out_size is None else settings.held_out_size
        train, held_out = split_held_out(examples, size, settings.seed, path)
    return Task(
        name="gsm8k",
        train=train,
        held_out=held_out,
        rewards=(RewardSpec("isobit.tasks.gsm8k:reward", name="correct"),),
        gold=lambda columns: str(columns["answer"]),
    )


def reward(prompts: list[Any], completions: list[Any], answer: list[str], **columns: Any) -> list[float]:
    """1 where the completion's number equals the answer's, else 0."""
    return [float(_equal(_text(c), str(a))) for c, a in zip(completions, answer)]


def final_number(text: str) -> Decimal | None:
    """The first number after the last `####`, else the last number of the text; 1,000 = 1000 = 1000.0 = $1,000."""
    _, marker, tail = text.rpartition("####")
    found = _NUMBER.findall(tail)
    if not found:
        return None
    chosen = found[0] if marker else found[-1]
    sign = "-" if chosen.startswith("-") else ""
    return Decimal(sign + re.sub(r"[^\d.]", "", chosen))


def _equal(completion: str, answer: str) -> bool:
    expected, given = final_number(answer), final_number(completion)
    return expected is not None and given is not None and given == expected


def _text(completion: Any) -> str:
    """The text of a completion; conversational ones are lists of messages."""
    return completion if isinstance(completion, str) else str(completion[-1]["content"])
