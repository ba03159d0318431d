"""GSM8K-style word problems (Cobbe et al. 2021, arXiv 2110.14168), scored by their final number.

Rows have `question` and `answer`. A text prompt is the question inside `TEXT_TEMPLATE`. Under
`task.chat` the user's message is the question alone, and the model's chat template does the rest.
`task.options.instruction` adds the line that asks for the answer's format, or leaves it out;
`task.prompt_template` replaces all of this.

The final number of a text is the first number after its last `####`, else its last number. Numbers
compare by value: 1,000 = 1000 = 1000.0 = $1,000 = 1000% = "1000.". A minus sign belongs to the
number that it touches unless it follows a term: `= -3` is minus three, `16-3` and `16 - 3` end in
three. Left out: fractions, exponents, number words.
"""

import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Annotated, Any

from isobit.data.answers import NoAnswer, answer_in, answer_text, completion_text, gold_text
from isobit.data.dataset import Prompt
from isobit.errors import IsobitError
from isobit.tasks.builtin.files import FileOptions, read_splits
from isobit.tasks.builtin.task import Task, TaskSettings, task_options
from isobit.tasks.rewards.spec import RewardSpec

INSTRUCTION = "End your answer with #### and the number."
TEXT_TEMPLATE = f"Question: {{prompt}}\n{INSTRUCTION}\nAnswer:"
REWARD = RewardSpec("isobit.tasks.builtin.gsm8k:reward", name="correct")

_NUMBER = re.compile(
    r"(?:(?<![\w)\]}%])(?P<minus>-))?"
    r"(?:\$\s?(?P<minus_after_currency>-)?)?"
    r"(?P<value>(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
)


@dataclass(frozen=True)
class Gsm8kOptions(FileOptions):
    """The question's instruction, and the split of the file."""

    instruction: Annotated[
        bool | None, "ask for the answer after ####; default: in text, and not in a chat"
    ] = None


def load(settings: TaskSettings) -> Task:
    """Build a task of rows with `question` and `answer`, or the columns that the settings name. The
    answer is the gold completion too."""
    options = task_options(Gsm8kOptions, settings)
    if options.instruction is not None and settings.prompt_template is not None:
        raise IsobitError(
            "task.options.instruction: task.prompt_template says what is asked; write it there"
        )
    template = prompt_template(settings.chat, options.instruction)
    train, held_out = read_splits(settings, options, {"prompt": "question"}, template)
    if options.instruction and not _asked(train.examples[0].prompt):
        raise IsobitError(
            f"task.options.instruction: the prompts of {settings.path} are chats already: write "
            "it there"
        )
    if "answer" not in train.examples[0].columns:
        raise IsobitError(
            f"{settings.path}: no column 'answer'; name yours with task.columns: {{answer: ...}}"
        )
    for example in [*train.examples, *held_out.examples]:
        if final_number(answer_in(example.columns, "answer", example.place, gold=True)) is None:
            raise IsobitError(f"{example.where}: the answer has no number in it")
    return Task("gsm8k", train, held_out, (REWARD,), gold="answer")


def prompt_template(chat: bool, instruction: bool | None) -> str:
    """Return the template around a question where the config names none; `instruction`: whether it
    asks for the answer behind ####."""
    if chat:
        return f"{{prompt}}\n{INSTRUCTION}" if instruction else "{prompt}"
    return TEXT_TEMPLATE if instruction is not False else "Question: {prompt}\nAnswer:"


def reward(
    prompts: Sequence[Any], completions: Sequence[Any], answer: Sequence[Any], **columns: Any
) -> list[float]:
    """Return 1.0 where the final number of the completion equals that of the answer, else 0.0.

    Raises ValueError for an answer without a number.
    """
    return [
        float(final_number(completion_text(c)) == _gold(a))
        for c, a in zip(completions, answer, strict=True)
    ]


def final_number(text: str) -> Decimal | None:
    """Return the first number after the last `####`, else the last number of the text; None without
    one."""
    text = text.replace("\N{MINUS SIGN}", "-")
    _, mark, tail = text.rpartition("####")
    marked = _NUMBER.search(tail) if mark else None
    if marked is not None:
        return _value(marked)
    numbers = deque(_NUMBER.finditer(text), maxlen=1)
    return _value(numbers[0]) if numbers else None


def _asked(prompt: Prompt) -> bool:
    """Return whether a prompt contains the instruction."""
    texts = [prompt] if isinstance(prompt, str) else [message["content"] for message in prompt]
    return any(INSTRUCTION in text for text in texts)


def _gold(answer: Any) -> Decimal:
    if isinstance(answer, int | float) and not isinstance(answer, bool):
        return Decimal(gold_text(answer))
    try:
        number = final_number(answer_text(answer))
    except NoAnswer:
        number = None
    if number is None:
        raise ValueError(f"the answer column has no number: {answer!r:.60}")
    return number


def _value(match: re.Match[str]) -> Decimal:
    value = Decimal(match["value"].replace(",", ""))
    return -value if bool(match["minus"]) != bool(match["minus_after_currency"]) else value
