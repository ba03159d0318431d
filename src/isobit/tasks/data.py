"""Examples, JSONL files of them, and the order in which training sees them.

A `Dataset` is a sequence of examples plus a seed. `at(cursor)` is example
`order(cursor // len)[cursor % len]`, where `order(epoch)` is a permutation that depends on (seed, epoch, length) only:
there is no state to save, so a run that resumes at a cursor sees what it would have seen. Permutations sort the raw
Philox4x64 words of numpy, whose stream is fixed by its specification, rather than use a `Generator` method, whose
stream numpy may change. Left out: Parquet and Hugging Face datasets, and files that do not fit in memory.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

from isobit.errors import IsobitError

Message = dict[str, str]
Prompt = str | list[Message]

# Names that a reward function receives from isobit itself; a data column of that name could not be told apart.
RESERVED_COLUMNS = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
SPLIT_STREAM = 2**64 - 1  # the Philox key's second word for splits; epochs count up from 0 and never get there


@dataclass(frozen=True)
class Example:
    """One prompt with its columns; `index` counts the rows of its source from 0."""

    index: int
    prompt: Prompt
    columns: dict[str, Any]


@dataclass(frozen=True)
class Dataset:
    """Examples in the order of their source, and a seeded endless order over them. What is held out may be empty."""

    examples: Sequence[Example]
    seed: int = 0
    shuffle: bool = True

    def __len__(self) -> int:
        return len(self.examples)

    def order(self, epoch: int) -> tuple[int, ...]:
        """The permutation of 0..len-1 in which `epoch` visits the examples."""
        return permutation(len(self), self.seed, epoch) if self.shuffle else tuple(range(len(self)))

    def at(self, cursor: int) -> Example:
        """The example at absolute position `cursor` >= 0 of the run. Raises IsobitError where there are none."""
        if not len(self):
            raise IsobitError("the training data has no examples")
        epoch, position = divmod(cursor, len(self))
        return self.examples[self.order(epoch)[position]]


@dataclass(frozen=True)
class TaskSettings:
    """The `task` section of a config; None means the task's own default.

    `seed` (the run's) decides the order of training examples, nothing else. Which examples there are and which are held
    out depends on the option `seed` of the task (default 0), so that runs of different seeds, and a supervised run
    before them, share one held-out split.
    """

    name: str = "file"
    path: str | None = None
    held_out_path: str | None = None
    held_out_size: int | None = None
    prompt_column: str | None = None
    answer_column: str | None = None
    prompt_template: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0


@lru_cache(maxsize=8)  # the stream asks for the same epoch once per prompt
def permutation(size: int, seed: int, stream: int) -> tuple[int, ...]:
    """A permutation of 0..size-1 that depends on the arguments only: the stable argsort of Philox words."""
    import numpy as np  # here: a reward worker never shuffles, and starts in a third of the time without numpy

    return tuple(np.argsort(random_words(seed, stream, size), kind="stable").tolist())


def random_words(seed: int, stream: int, count: int) -> Any:
    """The first `count` words of Philox4x64 under key (seed, stream), as a uint64 array."""
    import numpy as np  # here: as above

    return np.random.Philox(key=np.array([seed, stream], dtype=np.uint64)).random_raw(count)


def split(examples: Sequence[Example], size: int, seed: int, path: Path) -> tuple[list[Example], list[Example]]:
    """(train, held out): `size` rows with distinct prompts held out, in file order; disjoint by prompt.

    Rows that repeat a held-out prompt are left out of training too. Raises IsobitError where nothing would remain.
    """
    chosen: dict[str, Example] = {}
    for i in permutation(len(examples), seed, SPLIT_STREAM):
        if len(chosen) == size:
            break
        chosen.setdefault(json.dumps(examples[i].prompt), examples[i])
    train = [example for example in examples if json.dumps(example.prompt) not in chosen]
    if len(chosen) < size or not train:
        raise IsobitError(
            f"{path}: cannot hold out {size} prompts and keep some to train on: the file has {len(examples)} rows; "
            "lower task.held_out_size or give task.held_out_path"
        )
    return train, sorted(chosen.values(), key=lambda example: example.index)


def read_jsonl(
    path: str | Path,
    prompt_column: str = "prompt",
    answer_column: str | None = None,
    prompt_template: str | None = None,
    chat: bool = False,
    system: str | None = None,
    text_template: str | None = None,
) -> list[Example]:
    """Read examples: one JSON object a line, the same columns in each; blank lines are passed over.

    The prompt is text or a chat list of {"role", "content"}. Every other column is passed through, also the prompt
    column itself where it has another name than `prompt`. `answer` is taken from `answer_column`, or from verl's
    `reward_model.ground_truth` where there is no `answer`. `prompt_template` puts text around {prompt}, and
    so does `text_template` where that is None and the prompt is text; `chat` makes a text prompt the message of a
    user, after one of `system`. Raises IsobitError with file and line.
    """
    source = Path(path)
    examples: list[Example] = []
    first: tuple[int, dict[str, Any]] | None = None
    for number, row in _rows(source):
        where = f"{source}:{number}"
        if first is None:
            first = (number, row)
            _check_columns(where, row, prompt_column, answer_column)
        elif row.keys() != first[1].keys():
            raise IsobitError(f"{where}: its columns are not those of line {first[0]}: {_difference(first[1], row)}")
        prompt = _prompt(where, prompt_column, row[prompt_column])
        if isinstance(prompt, str) != isinstance(first[1][prompt_column], str):
            raise IsobitError(f"{where}: {prompt_column!r} is text in one row and chat messages in another")
        if prompt_template is None and isinstance(prompt, str):
            prompt_template = text_template
        prompt = dress_prompt(where, prompt, prompt_template, chat, system)
        examples.append(Example(len(examples), prompt, _columns(row, prompt_column, answer_column)))
    if not examples:
        raise IsobitError(f"{source}: no examples: expected one JSON object a line")
    return examples


def dress_prompt(where: str, prompt: Prompt, template: str | None, chat: bool, system: str | None) -> Prompt:
    """The prompt inside its template, and as a chat where asked."""
    if isinstance(prompt, list):
        if template is not None or chat or system is not None:
            raise IsobitError(f"{where}: the prompt is a chat already: no prompt_template, chat or system for it")
        return prompt
    if template is not None:
        prompt = template.replace("{prompt}", prompt)
    if not chat:
        return prompt
    opening = [] if system is None else [{"role": "system", "content": system}]
    return [*opening, {"role": "user", "content": prompt}]


def check_template(template: str | None, fields: Sequence[str] = ("prompt",)) -> None:
    """Raise IsobitError unless the template is None or has one of the fields in it."""
    wanted = [f"{{{field}}}" for field in fields]
    if template is not None and not any(field in template for field in wanted):
        raise IsobitError(f"task.prompt_template {template!r} must have {' or '.join(wanted)} in it")


def completion_text(completion: str | Sequence[Mapping[str, str]]) -> str:
    """The text of a completion as reward functions get it: text, or the messages of an assistant."""
    if isinstance(completion, str):
        return completion
    return "".join(message["content"] for message in completion)


def did_you_mean(name: str, known: Sequence[str]) -> str:
    """A hint for a message about an unknown name: the nearest known one, else all of them."""
    close = get_close_matches(name, known, 1)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known)}"


def _rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        lines = path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n")
    except OSError as error:
        raise IsobitError(f"cannot read data file {path}: {error.strerror}") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line.decode("utf-8"))
        except UnicodeDecodeError:
            raise IsobitError(f"{path}:{number}: not UTF-8 text") from None
        except json.JSONDecodeError as error:
            raise IsobitError(f"{path}:{number}: malformed JSON: {error.msg} (column {error.colno})") from None
        except (RecursionError, ValueError):  # nested too deeply; an integer of more digits than Python converts
            raise IsobitError(f"{path}:{number}: malformed JSON: nested too deeply or a number too long") from None
        if not isinstance(row, dict):
            raise IsobitError(f"{path}:{number}: expected a JSON object of columns, got {_kind(row)}")
        yield number, row


def _check_columns(where: str, row: dict[str, Any], prompt_column: str, answer_column: str | None) -> None:
    for key, column in (("prompt_column", prompt_column), ("answer_column", answer_column)):
        if column is not None and column not in row:
            raise IsobitError(f"{where}: no column {column!r} (task.{key}); {did_you_mean(column, list(row))}")
    for column in row:
        if column in RESERVED_COLUMNS and column != prompt_column:
            raise IsobitError(f"{where}: column {column!r} has a name that reward functions get from isobit; rename it")


def _difference(first: dict[str, Any], row: dict[str, Any]) -> str:
    missing = [repr(column) for column in first if column not in row]
    more = [repr(column) for column in row if column not in first]
    parts = [f"{word} {', '.join(columns)}" for word, columns in (("lacks", missing), ("adds", more)) if columns]
    return "; ".join(parts)


def _prompt(where: str, column: str, value: Any) -> Prompt:
    if isinstance(value, str):
        if not value.strip():
            raise IsobitError(f"{where}: {column!r} is empty")
        return value
    if not isinstance(value, list):
        raise IsobitError(f"{where}: {column!r} must be text or a list of chat messages, got {_kind(value)}")
    if not value:
        raise IsobitError(f"{where}: {column!r} is an empty list of messages")
    for i, message in enumerate(value):
        if not isinstance(message, dict) or not all(isinstance(message.get(k), str) for k in ("role", "content")):
            raise IsobitError(f'{where}: message {i} of {column!r} must be {{"role": text, "content": text}}')
    return cast(list[Message], value)


def _columns(row: dict[str, Any], prompt_column: str, answer_column: str | None) -> dict[str, Any]:
    own_name = prompt_column != "prompt" and prompt_column not in RESERVED_COLUMNS
    columns = {name: value for name, value in row.items() if own_name or name != prompt_column}
    verl = row.get("reward_model")
    if answer_column is not None:
        columns["answer"] = row[answer_column]
    elif "answer" not in row and isinstance(verl, dict) and "ground_truth" in verl:
        columns["answer"] = verl["ground_truth"]
    return columns


def _kind(value: Any) -> str:
    kinds = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "null"}
    return kinds.get(type(value), "a number")
