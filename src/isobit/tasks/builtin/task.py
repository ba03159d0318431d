"""`Task`: examples to train on and to hold out, the rewards that score them, and the column that a
supervised warm start learns from.

A task's options are a frozen dataclass (`isobit.options`).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeVar

from isobit.data.dataset import SPLIT_STREAM, Dataset, Message, random_words
from isobit.errors import IsobitError
from isobit.options.declare import FileName, NotAnOption, above, at_least, at_most, text_as
from isobit.options.reading import read
from isobit.tasks.rewards.spec import RewardSpec


@dataclass(frozen=True)
class DataFile:
    """A file or directory of data among several. `FILE` is `{path: FILE}`."""

    path: Annotated[str, FileName(), "as `task.path`"]
    weight: Annotated[
        float | None,
        above(0),
        "how many of the prompts are from it, relative to the other files. Give it for all "
        "files, or for none; default: the number of its rows",
    ] = None
    split: Annotated[str | None, "which split of it is trained on; default: `task.split`"] = None
    columns: Annotated[Mapping[str, str], "as `task.columns`; these take precedence"] = field(
        default_factory=dict
    )

    def __post_init__(self) -> None:
        if not self.path:
            raise IsobitError("path: expected a file or directory, got ''")


@dataclass(frozen=True)
class TaskSettings:
    """The prompts: a built-in task, or your own data. Prompts outside the length limits stop the
    run before it starts, or are dropped and counted. `task: NAME` is `task.name`, `task: FILE` is
    `task.path`."""

    name: Annotated[
        str, "arithmetic, countdown, gsm8k, calculator, lookup, guess, or file (any data)"
    ] = "file"
    path: Annotated[
        str | None,
        FileName(),
        "JSONL, a JSON array, CSV (each also as .gz), Parquet, or a directory of them or of "
        "`datasets`; every column reaches the reward",
    ] = None
    files: Annotated[
        tuple[Annotated[DataFile, text_as("path")], ...],
        "several in place of path, mixed by weight: an epoch has as many prompts as all have rows",
    ] = field(default=(), kw_only=True)
    held_out_path: Annotated[str | None, FileName(), "held-out data; default: taken from path"] = (
        None
    )
    held_out_size: Annotated[
        int | None,
        at_least(0),
        "examples that are kept out of training, for evaluation; default of a file: a tenth of it, "
        "at most 256",
    ] = None
    format: Annotated[
        Literal["auto", "jsonl", "csv", "parquet", "dataset"], "auto: by name and content"
    ] = "auto"
    split: Annotated[str | None, "which split of a directory is trained on; default: train"] = None
    held_out_split: Annotated[
        str | None, "which split is held out: of held_out_path, or else of path"
    ] = None
    columns: Annotated[
        Mapping[str, str], "role or new name: column of the data, such as {prompt: question}"
    ] = field(default_factory=dict)
    prompt_template: Annotated[
        str | None,
        "text with {prompt} in it, into which every text prompt is put; gsm8k has its own",
    ] = None
    chat: Annotated[
        bool, "put each text prompt into the model's chat template, as the user's message"
    ] = False
    system: Annotated[str | None, "system message, put before every chat"] = None
    special_tokens_in_content: Annotated[
        Literal["escape", "allow", "refuse"],
        "what becomes of special tokens that a prompt spells, such as <|im_start|>. escape: plain "
        "text. allow: the tokens. refuse: an error",
    ] = "escape"
    max_prompt_tokens: Annotated[
        int | None,
        at_least(1),
        "the longest prompt; never more than the context minus max_new_tokens",
    ] = None
    min_prompt_tokens: Annotated[int, at_least(0), "the shortest prompt"] = 0
    too_long: Annotated[
        Literal["stop", "drop"], "what to do with a prompt that is too long or too short"
    ] = "stop"
    shuffle: Annotated[
        bool, "take the data in a new order in each epoch, by the seed; false: in its own order"
    ] = True
    options: Annotated[
        Mapping[str, Any],
        "options of a built-in task, such as digits of arithmetic or instruction of gsm8k",
    ] = field(default_factory=dict)
    seed: NotAnOption[int] = 0
    """The seed of the run, which decides the order of training examples and nothing else. The
    examples, and the choice of those held out, depend on the option `seed` of the task, so that
    runs of different seeds share one held-out split."""
    rows: NotAnOption[Mapping[str, Sequence[Mapping[str, Any]]]] = field(default_factory=dict)
    """Rows given as objects, by the path that stands for them."""
    supervised: NotAnOption[bool] = False
    """Whether the rows hold right answers, in any of the columns that `data/given_rows.py`
    knows."""

    by_columns: NotAnOption[bool] = False
    """Whether rows of one prompt ask different things where their other columns differ, since an
    environment begins with these."""

    def __post_init__(self) -> None:
        for key in ("path", "held_out_path"):
            if getattr(self, key) == "":
                raise IsobitError(f"{key}: expected a file or directory, got ''")
        if self.max_prompt_tokens is not None and self.min_prompt_tokens > self.max_prompt_tokens:
            raise IsobitError(
                f"min_prompt_tokens {self.min_prompt_tokens} exceeds max_prompt_tokens"
            )
        weighted = [file.weight is not None for file in self.files]
        if any(weighted) and not all(weighted):
            raise IsobitError(
                f"files.{weighted.index(False)}: give all files a weight, or none; without one each "
                "counts as many as it has rows"
            )
        if self.files and (self.path is not None or self.held_out_split is not None):
            option = "path" if self.path is not None else "held_out_split"
            raise IsobitError(
                f"files and {option} do not go together: leave {option} out"
                + ("" if option == "path" else ", and name what is held out with held_out_path")
            )


@dataclass(frozen=True)
class Task:
    """A loaded task. `rewards`: the task's own rewards, used if the user names none (a user's file
    has none).

    `gold`: the column with the right completion, which supervised training learns, or None.
    `alphabet`: every character of prompts and right completions, for a character tokenizer, or None
    if the text is open.
    """

    name: str
    train: Dataset
    held_out: Dataset
    rewards: Sequence[RewardSpec] = ()
    gold: str | None = None
    alphabet: str | None = None


SEED = Annotated[
    int,
    at_least(0),
    at_most(2**63 - 1),
    "decides the problems, or what is cut as the held-out split",
]
PRINTABLE = "\n" + "".join(map(chr, range(32, 127)))
"""The alphabet of conversations with tools: ASCII that prints."""
_Options = TypeVar("_Options")


def task_options(schema: type[_Options], settings: TaskSettings) -> _Options:
    """Return the options of a task as its frozen dataclass `schema`. Raises IsobitError for a wrong
    name, type or value."""
    return read(schema, settings.options, ("task", "options"))


def user_says(text: str) -> Message:
    """Return a text as a user's message."""
    return {"role": "user", "content": text}


def alphabet_of(characters: str) -> str:
    """Return the distinct characters of a text, in the order in which they first occur."""
    return "".join(dict.fromkeys(characters))


def made_here(
    schema: type[_Options], settings: TaskSettings, held_out: int, template: bool = False
) -> tuple[_Options, int]:
    """Return the options of a task that makes its own data, and the number of examples that it
    holds out (default: `held_out`). Raises IsobitError for a setting that it cannot use: those of
    a data file, and a prompt template unless it takes one (`template`)."""
    unused = TaskSettings()
    source = ("path", "files", "held_out_path", "format", "split", "held_out_split")
    for name in (*source, "columns", "chat", "system"):
        if getattr(settings, name) != getattr(unused, name):
            raise IsobitError(
                f"task.{name}: task {settings.name} makes its own data; for a file use "
                "task.name: file"
            )
    options = task_options(schema, settings)
    if settings.prompt_template is not None and not template:
        raise IsobitError(f"task.prompt_template: task {settings.name} has prompts of its own")
    return options, held_out_size(settings, held_out)


def held_out_size(settings: TaskSettings, default: int) -> int:
    """Return the number of examples of the held-out split. Raises IsobitError if it is
    negative."""
    size = default if settings.held_out_size is None else settings.held_out_size
    if size < 0:
        raise IsobitError(f"task.held_out_size must be at least 0, got {size}")
    return size


def draws_of(seed: int, stream: int = SPLIT_STREAM) -> Iterator[int]:
    """Yield Philox words without end, different ones for each stream. Modulo a small bound their
    bias is below 2^-40."""
    size = 1 << 14
    start = 0
    while True:
        yield from random_words(seed, stream, start + size)[start:].tolist()
        start, size = start + size, start + size
