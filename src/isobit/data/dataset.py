"""Examples, the way from a row to an example, and the order in which training sees examples.

A `Dataset` is a sequence of examples plus a seed. `at(cursor)` is example `order(cursor //
len)[cursor % len]`, where `order(epoch)` is a permutation that depends on (seed, epoch, length)
only: no state is saved, so a run that resumes at a cursor sees the same examples as without
the stop. If the examples are of several files with weights, `order` permutes the epoch's places
among the files (`mixture.py`), and each file has separate epochs.
Permutations sort the raw Philox4x64 words of numpy, whose stream is fixed by its specification,
rather than use a `Generator` method, whose stream numpy may change. Left out: reading files
(`readers.py`), and data that do not fit in memory.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from isobit.data.answers import ANSWERS, NoAnswer, answer_messages, content_text
from isobit.data.columns import sources_of
from isobit.data.given_rows import given_row
from isobit.data.messages import TOOLS, standard_message, tools_of
from isobit.data.mixture import shared_out
from isobit.data.readers import Source, read_rows
from isobit.data.text_rows import kind
from isobit.errors import IsobitError, brief, did_you_mean, listed

Message = dict[str, Any]
"""`role`, `content`, which is text, and other keys that a template may use, such as
`tool_calls`."""
Prompt = str | list[Message]

TEMPLATE_KWARGS = "chat_template_kwargs"
"""The column with a row's own variables of the chat template, as in TRL, and the key under which
the first message of its prompt has them."""
TEMPLATE_OWN = ("messages", "tools", "documents", "add_generation_prompt")
"""Variables of a chat template that a user may not set."""

# Names that a reward function receives from isobit itself; a data column may not have such a name.
RESERVED_COLUMNS = (
    "prompts",
    "completions",
    "completion_ids",
    ANSWERS,
    "trainer_state",
    "log_extra",
    "log_metric",
)
SPLIT_STREAM = (
    2**64 - 1
)  # the Philox key's second word for splits; epochs count up from 0 and never get there


_STREAMS_OF_A_FILE = 40
"""The bits of a stream's number that count epochs; the bits above them are the file's number."""


@dataclass(frozen=True)
class Example:
    """A prompt with its columns; `index` counts the rows of its source from 0, `where` names the
    row in messages. `answer`: the assistant's message that ended `messages`. `source`: the number
    of its file, if there are several. `sources`: see `columns.sources_of`."""

    index: int
    prompt: Prompt
    columns: dict[str, Any]
    where: str = field(default="", compare=False)
    answer: Message | None = None
    source: int = 0
    sources: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)

    @property
    def place(self) -> str:
        """The place of the example, for messages, also for an example that is not from a file."""
        return self.where or f"example {self.index}"


@dataclass(frozen=True)
class Dataset:
    """Examples in the order of their source, and a seeded endless order over them. A held-out
    dataset may be empty. `weights`: of the files of the examples, if the files have weights;
    `stream`: the stream of random words of the first epoch; `orders_kept`: the number of epochs
    whose orders are kept at a time; two epochs meet in a step."""

    examples: Sequence[Example]
    seed: int = 0
    shuffle: bool = True
    weights: tuple[float, ...] = ()
    stream: int = 0
    orders_kept: int = 2
    _orders: dict[int, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __len__(self) -> int:
        return len(self.examples)

    def order(self, epoch: int) -> Sequence[int]:
        """Return the permutation of 0..len-1 in which `epoch` visits the examples, or the places of
        files with weights."""
        if not self.shuffle:
            return range(len(self))
        if epoch not in self._orders:
            while len(self._orders) >= self.orders_kept:
                first = min(self._orders)
                del self._orders[first if epoch > first else max(self._orders)]
            self._orders[epoch] = _shuffled(len(self), self.seed, self.stream + epoch)
        permutation: Sequence[int] = self._orders[epoch]
        return permutation

    def at(self, cursor: int) -> Example:
        """Return the example at absolute position `cursor` >= 0 of the run. Raises IsobitError if
        the dataset is empty."""
        if not len(self):
            raise IsobitError("the training data has no examples")
        epoch, position = divmod(cursor, len(self))
        index = int(self.order(epoch)[position])
        if not self.weights:
            return self.examples[index]
        for dataset, count in self._files:
            if index < count:
                return dataset.at(epoch * count + index)
            index -= count
        raise AssertionError("the files' shares are the epoch")

    @cached_property
    def _files(self) -> tuple[tuple["Dataset", int], ...]:
        """For each file a dataset of its examples, with a separate order, and the number of prompts
        that it gives in an epoch."""
        datasets = []
        for number, count in enumerate(shared_out(len(self), self.weights)):
            rows = [example for example in self.examples if example.source == number]
            if not rows:
                raise IsobitError(
                    f"task.files.{number}: none of its rows is left to train on; leave the file out"
                )
            stream = (number + 1) << _STREAMS_OF_A_FILE
            orders = (
                count // len(rows) + 2
            )  # of a small file with a large weight, an epoch has many
            data = Dataset(rows, self.seed, self.shuffle, stream=stream, orders_kept=orders)
            datasets.append((data, count))
        return tuple(datasets)


def permutation(size: int, seed: int, stream: int) -> tuple[int, ...]:
    """Return a permutation of 0..size-1 that depends on the arguments only: the stable argsort of
    Philox words."""
    return tuple(_shuffled(size, seed, stream).tolist())


def _shuffled(size: int, seed: int, stream: int) -> Any:
    """Return the permutation of `permutation` as an array of int32, or int64 from 2^31 on."""
    # here: a reward worker never shuffles, and starts in a third of the time without numpy
    import numpy as np

    order = np.argsort(random_words(seed, stream, size), kind="stable")
    return order.astype(np.int32 if size < 2**31 else np.int64)


def random_words(seed: int, stream: int, count: int) -> Any:
    """Return the first `count` words of Philox4x64 under key (seed, stream), as a uint64 array."""
    import numpy as np  # here: as above

    return np.random.Philox(key=np.array([seed, stream], dtype=np.uint64)).random_raw(count)


def same_task(example: Example, by_columns: bool) -> str:
    """Return a text that two examples share if they ask the same: by their prompts, and where an
    environment begins with them by their columns too."""
    question = [example.prompt, example.columns] if by_columns else example.prompt
    return json.dumps(question, sort_keys=True, default=str)


def split(
    examples: Sequence[Example], size: int, seed: int, label: str, by_columns: bool = False
) -> tuple[list[Example], list[Example]]:
    """Split examples into (train, held out), both in file order and disjoint by prompt: `size` rows
    with distinct prompts are held out. `by_columns`: by prompt and columns.

    Rows that repeat a held-out prompt are left out of training too. Raises IsobitError if there are
    fewer than `size` different prompts, or none would remain to train on.
    """
    chosen: dict[str, Example] = {}
    keys = [same_task(example, by_columns) for example in examples]
    for i in permutation(len(examples), seed, SPLIT_STREAM):
        if len(chosen) == size:
            break
        chosen.setdefault(keys[i], examples[i])
    train = [example for example, key in zip(examples, keys) if key not in chosen]
    if len(chosen) < size or not train:
        prompts = len(set(keys))
        raise IsobitError(
            f"{label}: cannot hold out {size} prompts and keep some to train on: there are "
            f"{len(examples):,} rows of {prompts:,} different prompts; lower "
            "task.held_out_size or give task.held_out_path"
        )
    return train, sorted(chosen.values(), key=lambda example: example.index)


@dataclass(frozen=True)
class Shaping:
    """The settings by which a row becomes an example. `columns`: role or new name to column of the
    file; templates, chat and system as in `TaskSettings`; `text_template` replaces `template` if
    that is None and the prompt is text. `supervised`: the columns of supervised sets are known too
    (`given_rows.py`)."""

    columns: Mapping[str, str] = field(default_factory=dict)
    template: str | None = None
    text_template: str | None = None
    chat: bool = False
    system: str | None = None
    supervised: bool = False


def read_examples(source: Source, shaping: Shaping = Shaping()) -> list[Example]:
    """Read the examples of a file or directory, whose rows must all have the same columns, and
    prompts that are all text or all chats.

    The prompt is text or a chat list of {"role", "content"}; null keys of a message, with which
    Parquet fills up, are dropped, and a content in parts, [{"type": "text", "text": ...}], becomes
    their text. Without a column `prompt`, `messages` is the prompt: a chat whose last message, if
    the assistant wrote it, is the gold answer, and its text becomes the column `completion`.

    Every other column is passed through. A column that `columns` gives another name has both names,
    unless its old name is reserved. `answer` is verl's `reward_model.ground_truth` if a row has
    one, unless `columns` names another column: a file that `datasets` mapped keeps its old `answer`
    next to it. Raises IsobitError with the place.
    """
    examples: list[Example] = []
    first: tuple[str, dict[str, Any], str] | None = None
    kinds: set[tuple[bool, bool]] = set()
    sources: Mapping[str, str] | None = None
    for where, raw in read_rows(source):
        row, made_of = raw, tuple[str, ...]()
        if shaping.supervised:
            row, made_of = given_row(where, raw, shaping.columns)
        if first is None:
            first = (where, row, _check_columns(where, row, shaping.columns))
            _check_filled(where, row, shaping.template)
        elif row.keys() != first[1].keys():
            raise IsobitError(
                f"{where}: its columns are not those of {first[0]}: {_difference(first[1], row)}"
            )
        role = first[2]
        name = shaping.columns.get(role, role)
        prompt, answer = row[name], None
        if role == "messages":
            prompt, answer = _without_answer(where, name, prompt, shaping.supervised)
        prompt = _prompt(where, name, prompt)
        kinds.add((isinstance(prompt, str), answer is None))
        if len(kinds) > 1:
            raise IsobitError(f"{where}: {brief(name)!r} {_mixed(kinds)}")
        columns = _columns(row, name if role == "prompt" else None, shaping.columns)
        if answer is not None and "completion" not in columns:
            columns["completion"] = answer["content"]
        else:
            answer = None
        dressed = dress_prompt(where, prompt, shaping)
        dressed = _with_variables(where, dressed, columns, shaping.supervised)
        if sources is None:
            sources = sources_of(raw, columns, shaping.columns, (*made_of, name))
        examples.append(Example(len(examples), dressed, columns, where, answer, sources=sources))
    if not examples:
        raise IsobitError(f"{source.label}: no examples in it: expected a row for each prompt")
    return examples


def dress_prompt(where: str, prompt: Prompt, shaping: Shaping) -> Prompt:
    """Return the prompt inside its template, as a chat if `shaping.chat` is set, after the system's
    message if there is one. Raises IsobitError for a template or a second system message for a
    chat, and for a system message for text."""
    if isinstance(prompt, list):
        if shaping.template is not None:
            raise IsobitError(
                f"{where}: the prompt is a chat already: no task.prompt_template for it"
            )
        if shaping.system is not None and prompt[0]["role"] == "system":
            raise IsobitError(
                f"{where}: the chat has a system message of its own: no task.system for it"
            )
    else:
        template = shaping.text_template if shaping.template is None else shaping.template
        if template is not None:
            prompt = template.replace("{prompt}", prompt)
        if shaping.chat:
            prompt = [{"role": "user", "content": prompt}]
        elif shaping.system is not None:
            raise IsobitError(
                f"{where}: task.system needs a chat, and the prompt is text; set task.chat: true"
            )
        else:
            return prompt
    return (
        prompt
        if shaping.system is None
        else [{"role": "system", "content": shaping.system}, *prompt]
    )


def _with_variables(
    where: str, prompt: Prompt, columns: Mapping[str, Any], with_tools: bool
) -> Prompt:
    """Return the prompt with its row's own variables of the chat template, if the row has some, and
    with its tools. Keys that are null, with which Parquet fills up, are left out. Raises
    IsobitError for variables that are not a mapping or may not be set, for tools that are none, and
    for either of a text."""
    column = columns.get(TEMPLATE_KWARGS)
    if column is not None and not isinstance(column, Mapping):
        raise IsobitError(f"{where}: {TEMPLATE_KWARGS} must be a mapping, got {kind(column)}")
    variables = {key: value for key, value in (column or {}).items() if value is not None}
    check_variables(f"{where}: {TEMPLATE_KWARGS}", variables)
    try:
        tools = tools_of(columns.get(TOOLS)) if with_tools else []
    except ValueError as error:
        raise IsobitError(f"{where}: column {TOOLS!r}: {error}") from None
    if isinstance(prompt, str) and (tools or column is not None):
        raise IsobitError(
            f"{where}: {TOOLS if tools else TEMPLATE_KWARGS} is for the chat template, and the "
            "prompt is text; set task.chat: true"
        )
    variables |= {TOOLS: tools} if tools else {}
    if not variables or isinstance(prompt, str):
        return prompt
    return [{**prompt[0], TEMPLATE_KWARGS: variables}, *prompt[1:]]


def check_variables(where: str, variables: Mapping[str, Any]) -> None:
    """Raise IsobitError if the variables set one that every chat template is given."""
    for name in variables:
        if name in TEMPLATE_OWN:
            raise IsobitError(f"{where}: {name!r} is not yours to set: every template is given it")


def check_template(template: str | None, fields: Sequence[str] = ("prompt",)) -> None:
    """Raise IsobitError unless the template is None or contains one of the fields."""
    wanted = [f"{{{field}}}" for field in fields]
    if template is not None and not any(field in template for field in wanted):
        raise IsobitError(
            f"task.prompt_template {brief(template)!r} must have {' or '.join(wanted)} in it"
        )


def _check_columns(where: str, row: dict[str, Any], columns: Mapping[str, str]) -> str:
    """Return the role that the prompt is taken from: prompt or messages. Raises IsobitError for a
    column that is missing or has a reserved name."""
    for role, column in columns.items():
        if column not in row:
            hint = did_you_mean(column, list(row))
            raise IsobitError(
                f"{where}: no column {brief(column)!r} (task.columns.{brief(role)}); {hint}"
            )
    for column in row:
        if column in RESERVED_COLUMNS and column not in columns.values():
            raise IsobitError(
                f"{where}: column {column!r} has a name that reward functions get from isobit; "
                f"rename it, such as task.columns: {{my_{column}: {column}}}"
            )
    for names in (columns, row):  # the user's names come before the file's
        for role in ("prompt", "messages"):
            if role in names:
                return role
    hint = did_you_mean("prompt", list(row))
    raise IsobitError(
        f"{where}: no column 'prompt' and none named with task.columns: {{prompt: ...}}; {hint}"
    )


def _check_filled(where: str, row: Mapping[str, Any], template: str | None) -> None:
    """Raise IsobitError if a template names another column than the prompt, since that name would
    not be filled in."""
    for column in row:
        named = "{" + column + "}"
        if column != "prompt" and named in (template or ""):
            raise IsobitError(
                f"{where}: task.prompt_template has {brief(named)} in it, and only {{prompt}} is "
                "filled in; write such a column into the prompts themselves"
            )


def _difference(first: dict[str, Any], row: dict[str, Any]) -> str:
    missing = [repr(brief(column)) for column in first if column not in row]
    more = [repr(brief(column)) for column in row if column not in first]
    changes = [
        f"{word} {listed(columns)}"
        for word, columns in (("lacks", missing), ("adds", more))
        if columns
    ]
    return "; ".join(changes)


def _prompt(where: str, column: str, value: Any) -> Prompt:
    if isinstance(value, str):
        if not value.strip():
            raise IsobitError(f"{where}: {brief(column)!r} is empty")
        return value
    if not isinstance(value, list):
        raise IsobitError(
            f"{where}: {brief(column)!r} must be text or a list of chat messages, got {kind(value)}"
        )
    if not value:
        raise IsobitError(f"{where}: {brief(column)!r} is an empty list of messages")
    messages = []
    for i, message in enumerate(value):
        try:
            made = standard_message(message) if isinstance(message, dict) else {}
        except ValueError as error:
            raise IsobitError(f"{where}: message {i} of {brief(column)!r}: {error}") from None
        text = content_text(made.get("content"))
        if text is None or not isinstance(made.get("role"), str):
            raise IsobitError(
                f'{where}: message {i} of {brief(column)!r} must be {{"role": text, "content": '
                "text}"
            )
        messages.append(made | {"content": text})
    return messages


def _without_answer(
    where: str, column: str, messages: Any, learned: bool
) -> tuple[Any, Message | None]:
    """Split a chat into (the messages before the answer, the answer): the answer is the last
    message if the assistant wrote it, else None; one that is `learned` may be a call. Raises
    IsobitError for text, for an answer alone, and for an answer that cannot be read."""
    if isinstance(messages, str):
        raise IsobitError(
            f"{where}: {brief(column)!r} must be a list of chat messages, got text; is it the "
            "prompt column?"
        )
    last = messages[-1] if isinstance(messages, list) and messages else None
    if not isinstance(last, dict) or last.get("role") not in ("assistant", "function_call"):
        return messages, None
    if len(messages) == 1:
        raise IsobitError(
            f"{where}: {brief(column)!r} has the assistant's message only, and nothing that it "
            "answers"
        )
    try:
        return messages[:-1], answer_messages([last], learned=learned)[0]
    except NoAnswer as error:
        raise IsobitError(f"{where}: the last of {brief(column)!r}: {error}") from None


def _mixed(kinds: set[tuple[bool, bool]]) -> str:
    if len({is_text for is_text, _ in kinds}) > 1:
        return "is text in one row and chat messages in another"
    return "ends with the assistant's message in one row and not in another"


def _columns(row: dict[str, Any], prompt: str | None, renamed: Mapping[str, str]) -> dict[str, Any]:
    """Return the columns that reward functions get of a row whose prompt is in the column `prompt`
    (None: in `messages`)."""
    hidden = {*RESERVED_COLUMNS, *(("prompt",) if prompt == "prompt" else ())}
    columns = {name: value for name, value in row.items() if name not in hidden}
    columns |= {new: row[old] for new, old in renamed.items() if new != "prompt"}
    verl = row.get("reward_model")
    if "answer" not in renamed and isinstance(verl, dict) and "ground_truth" in verl:
        gold = verl["ground_truth"]
        columns["answer"] = columns.get("answer") if gold is None else gold
    return columns
