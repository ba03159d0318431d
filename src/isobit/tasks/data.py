"""Examples: prompts with columns, read from JSONL or made by a task, in a seeded order without state.

The n-th example of a run is a function of the seed and n alone (`Dataset.at`), so a cursor is all that resuming needs.
Left out: Parquet and Hugging Face datasets.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from isobit.errors import IsobitError

Prompt = str | list[dict[str, Any]]


@dataclass(frozen=True)
class Example:
    """A prompt (text, or chat messages) and the other columns of its row, which the reward functions receive."""

    prompt: Prompt
    columns: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Dataset:
    """Examples in a fixed order; `at` walks through them in a shuffled order, epoch after epoch."""

    examples: Sequence[Example]
    seed: int = 0

    def __len__(self) -> int:
        return len(self.examples)

    def at(self, cursor: int) -> Example:
        """The example at an absolute position of the run: epoch `cursor // len`, shuffled by (seed, epoch)."""
        epoch, offset = divmod(cursor, len(self.examples))
        return self.examples[int(_order(len(self.examples), self.seed, epoch)[offset])]


@lru_cache(maxsize=8)
def _order(count: int, seed: int, epoch: int) -> np.ndarray:
    key = np.random.SeedSequence([seed, epoch]).generate_state(2, np.uint64)
    return np.random.Generator(np.random.Philox(key=key)).permutation(count)


@dataclass(frozen=True)
class TaskSettings:
    """What a task needs to know. `None` means the task's own default."""

    name: str = "file"
    path: str | None = None
    held_out_path: str | None = None
    held_out_size: int | None = None
    prompt_column: str | None = None
    answer_column: str | None = None
    prompt_template: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0


def split_held_out(examples: Sequence[Example], size: int, seed: int, where: str) -> tuple[Dataset, Dataset]:
    """(train, held out): `size` examples chosen by the seed are kept out of training."""
    if size >= len(examples):
        raise IsobitError(f"{where}: cannot hold out {size} of {len(examples)} examples; lower task.held_out_size")
    order = np.random.Generator(np.random.Philox(key=seed)).permutation(len(examples))
    held = sorted(int(i) for i in order[:size])
    chosen = set(held)
    train = [example for i, example in enumerate(examples) if i not in chosen]
    return Dataset(train, seed), Dataset([examples[i] for i in held], seed)


def read_examples(path: str | Path, settings: TaskSettings) -> list[Example]:
    """Rows of a JSONL file. Raises IsobitError, with file and line, for whatever is wrong with one."""
    column = settings.prompt_column or "prompt"
    examples: list[Example] = []
    known: set[str] | None = None
    for where, row in _rows(Path(path)):
        if column not in row:
            raise IsobitError(f"{where}: no column {column!r}; it has {', '.join(row) or 'none'} (task.prompt_column)")
        if known is not None and set(row) != known:
            odd = min(set(row) ^ known)
            raise IsobitError(f"{where}: column {odd!r} is not in every row; each row must have the same columns")
        known = set(row)
        examples.append(Example(_prompt(row[column], where, column, settings), _columns(row, column, settings, where)))
    if not examples:
        raise IsobitError(f"{path}: the file is empty; expected one JSON object a line")
    return examples


def _rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise IsobitError(f"cannot read data file {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise IsobitError(f"{path}: not UTF-8 text; expected one JSON object a line") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise IsobitError(f"{where}: not valid JSON: {error.msg}") from None
        if not isinstance(row, dict):
            raise IsobitError(f"{where}: expected a JSON object, got {type(row).__name__}")
        yield where, row


def _prompt(value: Any, where: str, column: str, settings: TaskSettings) -> Prompt:
    template = settings.prompt_template
    if isinstance(value, str) and value:
        return template.replace("{prompt}", value) if template is not None else value
    messages = isinstance(value, list) and value and all(_is_message(item) for item in value)
    if not messages:
        raise IsobitError(
            f"{where}: column {column!r} must be a non-empty text or a list of chat messages with role and content"
        )
    if template is not None:
        raise IsobitError(f"{where}: task.prompt_template is for text prompts, but this one is a list of chat messages")
    return value


def _is_message(item: Any) -> bool:
    return isinstance(item, dict) and isinstance(item.get("role"), str) and isinstance(item.get("content"), str)


def _columns(row: dict[str, Any], prompt_column: str, settings: TaskSettings, where: str) -> dict[str, Any]:
    columns = {key: value for key, value in row.items() if key != prompt_column}
    if settings.answer_column is not None:
        if settings.answer_column not in row:
            raise IsobitError(f"{where}: no column {settings.answer_column!r} (task.answer_column)")
        columns["answer"] = row[settings.answer_column]
    model = row.get("reward_model")  # veRL keeps the answer there
    if "answer" not in columns and isinstance(model, dict) and "ground_truth" in model:
        columns["answer"] = model["ground_truth"]
    return columns
