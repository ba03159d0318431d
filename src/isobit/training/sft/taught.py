"""What supervised training learns of an example: the tokens of its prompt, and those of the answer
after it.

A text prompt and its answer are encoded as one text, a chat and its answer as the template writes
the conversation. The prompt's tokens are those with which the whole begins as the prompt alone
does, and what is learned is the rest, as TRL 1.16 cuts (tests/training/test_taught.py). It ends
with the token that ends the answer: after a text the tokenizer's own end of sequence; in a chat the
first token after the answer's text at which generation stops, else the last special token that the
template writes there, else the end of sequence too. What a template writes after that is left out.

A template that begins the assistant's turn in one way and writes it in another is refused, which
TRL is not: what would be learned does not follow what is sampled.

Of a conversation all of the assistant's turns may be learned. Each is cut as the last one is, after
the messages before it, so its boundaries are the template's own. Where the template writes every
message alike whatever follows, they are one row with a mask; else, as where it leaves out earlier
thoughts, each is a row of its own (tests/training/test_taught_turns.py). A text without an answer
is learned whole, but for its first token, which nothing predicts.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from isobit.data.answers import NoAnswer, answer_messages, answer_text, gold_text
from isobit.data.dataset import Example
from isobit.engine.prompts import encode_prompt as checked_ids
from isobit.errors import IsobitError, brief, printable
from isobit.model import Model, Tokenizer
from isobit.model.described import Described
from isobit.model.text.added_tokens import token_text
from isobit.rl.algorithm.given import PAIR_LOSSES
from isobit.tasks.builtin import Task
from isobit.training.rollouts.lengths import encode_prompt

_SHOWN = 40
"""Characters of what two renderings differ in."""


@dataclass(frozen=True)
class SupervisedSample:
    """A prompt and the tokens to learn after it, the end of the sequence included. `joined`: the
    prompt's last tokens are others where the answer follows, and are learned with it. `reward`: 1,
    or -1 of an answer that is undesirable."""

    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    completion_mask: tuple[bool, ...] | None = None
    joined: bool = False
    forks: tuple[int, ...] = ()
    reward: float = 1.0


class Teacher:
    """Makes samples of a task's examples for a model, and counts what is said about them before
    training starts. `turns`: which of the assistant's are learned, last or all."""

    def __init__(self, task: Task, model: Model | Described, turns: str = "last") -> None:
        self._task, self._model, self._tokenizer = task, model, model.tokenizer
        self._turns = turns
        added = self._tokenizer.fast.get_added_tokens_decoder()
        self._special = {token for token, entry in added.items() if entry.special} | set(
            self._tokenizer.eos_ids
        )

    def samples(self, example: Example) -> list[SupervisedSample]:
        """What is learned of an example: one row, or one for each of the assistant's turns. Raises
        IsobitError with its place."""
        if is_text(example, self._task):
            return [self._text(example)]
        last, prompt = self.sample(example), example.prompt
        if self._turns == "last" or isinstance(prompt, str):
            return [last]
        turns = [
            self._after(replace(example, prompt=prompt[:i]), prompt[i:j])
            for i, j in _answers(prompt)
        ]
        if not turns:
            return [last]
        merged = _merged([*turns, last])
        return [*turns, last] if merged is None else [merged]

    def lesson(self, example: Example, loss: str) -> list[SupervisedSample]:
        """What a `loss` learns of an example. Raises IsobitError with its place."""
        if loss in PAIR_LOSSES:
            return self.pair(example)
        return [self.labelled(example)] if loss == "kto" else self.samples(example)

    def labelled(self, example: Example) -> SupervisedSample:
        """The answer, and whether it is desirable: the column `completion` where there is one, also
        of a task that has right answers. Raises IsobitError with its place."""
        label = example.columns.get("label")
        if not isinstance(label, bool):
            found = "there is none" if label is None else f"got {brief(repr(label))}"
            raise IsobitError(f"{example.place}: column 'label': expected true or false, {found}")
        if example.answer is None and "completion" in example.columns:
            sample = self._after(example, _answer_in(example, "completion", gold=False))
        else:
            sample = self.sample(example)
        return replace(sample, reward=1.0 if label else -1.0)

    def pair(self, example: Example) -> list[SupervisedSample]:
        """The answer that is preferred, and the one that is not. Raises IsobitError with its
        place."""
        return [
            self._after(example, _answer_in(example, name, gold=False))
            for name in ("chosen", "rejected")
        ]

    def sample(self, example: Example) -> SupervisedSample:
        """The tokens of the last answer. Raises IsobitError with its place."""
        return self._after(example, _answer(example, self._task))

    def _text(self, example: Example) -> SupervisedSample:
        ids, end = encode_prompt(example, self._model), end_of_text(self._tokenizer)
        whole = ids if end is None or ids[-1:] == [end] else [*ids, end]
        if len(whole) < 2:
            raise IsobitError(f"{example.place}: the text is one token: there is nothing to learn")
        return SupervisedSample(tuple(whole[:1]), tuple(whole[1:]))

    def _after(self, example: Example, answer: list[dict[str, Any]]) -> SupervisedSample:
        """The tokens of an answer to an example's prompt."""
        prompt_ids = encode_prompt(example, self._model)
        try:
            whole, chat = _whole(example.prompt, answer, self._tokenizer)
            whole = checked_ids(
                "the prompt with its answer", whole, self._tokenizer, self._model.config.vocab_size
            )
            common = _common(prompt_ids, whole)
            joined = common < len(prompt_ids)
            if joined and chat is not None:
                _refuse_other_beginning(example.prompt, chat, self._tokenizer)
            cut = max(common, 1)  # nothing predicts the first token
            learned = self._ended(whole[cut:], by_template=chat is not None)
        except IsobitError as error:
            raise IsobitError(f"{example.place}: {error}") from None
        return SupervisedSample(tuple(whole[:cut]), tuple(learned), joined=joined)

    def _ended(self, ids: list[int], by_template: bool) -> list[int]:
        """The tokens up to the one that ends the answer, which is added where there is none."""
        start = len(ids)
        while start and (ids[start - 1] in self._special or not self._name(ids[start - 1]).strip()):
            start -= 1
        if by_template and not start:
            raise IsobitError(
                "the chat template writes nothing of the answer; expected one that writes text "
                "contents"
            )
        stops = [i for i in range(start, len(ids)) if ids[i] in self._tokenizer.eos_ids]
        if stops:
            return ids[: stops[0] + 1]
        written = [i for i in range(start, len(ids)) if ids[i] in self._special]
        if by_template and written:
            return ids[: written[-1] + 1]
        end = end_of_text(self._tokenizer)
        return ids if end is None else [*ids, end]

    def _name(self, token: int) -> str:
        return self._tokenizer.decode([token], special=True)

    def say(self, taught: Sequence[tuple[Example, SupervisedSample]]) -> None:
        """On stderr: where generation will not stop, and where sampling does not begin as what is
        learned does."""
        stops = self._tokenizer.eos_ids
        ends = [sample.completion_ids[-1] for _, sample in taught]
        missed = next((token for token in ends if token not in stops), None)
        if missed is not None and missed in self._special:
            known = " or ".join(map(self._named, stops)) or "no token"
            _warn(
                f"the chat template ends an answer with {self._named(missed)}, but generation "
                f"stops at {known}; add it to eos_token_id in the model's generation_config.json"
            )
        elif missed is not None:
            _warn(
                "the model names no end-of-sequence token, so answers are learned without an end; "
                "name one as eos_token_id in generation_config.json"
            )
        joined = [example.place for example, sample in taught if sample.joined]
        if joined:
            _warn(
                f"{len(joined):,} of {len(taught):,} prompts end inside a token of prompt and "
                f"answer together, the first: {joined[0]}; that token is learned, but sampling "
                "begins after the prompt's own; let prompts end where tokens do, such as without "
                "a space"
            )

    def _named(self, token: int) -> str:
        return f"{self._name(token)} (id {token})"


def _warn(text: str) -> None:
    print(printable(f"warning: {text}"), file=sys.stderr)


def _common(one: Sequence[object], other: Sequence[object]) -> int:
    """How many tokens both begin with."""
    return next(
        (i for i, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other))
    )


def is_text(example: Example, task: Task) -> bool:
    """Whether an example is a text to learn whole: it has a column `text`, and no answer."""
    given = isinstance(example.prompt, str) and "text" in example.columns
    return given and task.gold is None and "completion" not in example.columns


def _answers(chat: Sequence[Mapping[str, Any]]) -> list[tuple[int, int]]:
    """Where the assistant's turns in a prompt begin and end, but for one that the answer goes on
    with."""
    own = [message["role"] == "assistant" for message in chat]
    starts = [i for i in range(1, len(own)) if own[i] and not own[i - 1]]
    ends = [next((j for j in range(i, len(own)) if not own[j]), None) for i in starts]
    return [(i, j) for i, j in zip(starts, ends) if j is not None]


def _merged(turns: Sequence[SupervisedSample]) -> SupervisedSample | None:
    """One row of which the turns' tokens are learned; None where the last one does not begin with
    what each of the others is."""
    first, last = turns[0], turns[-1]
    whole, start = (*last.prompt_ids, *last.completion_ids), len(first.prompt_ids)
    learned = [False] * (len(whole) - start)
    for turn in turns:
        end = len(turn.prompt_ids) + len(turn.completion_ids)
        if whole[:end] != (*turn.prompt_ids, *turn.completion_ids):
            return None
        for place in range(len(turn.prompt_ids), end):
            learned[place - start] = True
    joined = any(turn.joined for turn in turns)
    return SupervisedSample(whole[:start], whole[start:], tuple(learned), joined)


def _answer(example: Example, task: Task) -> list[dict[str, Any]]:
    """The answer as messages of the assistant."""
    if example.answer is not None:
        return [example.answer]
    return _answer_in(example, task.gold or "completion", gold=task.gold is not None)


def _answer_in(example: Example, column: str, gold: bool) -> list[dict[str, Any]]:
    """The messages of the assistant in a column; `gold`: it may hold a number."""
    if column not in example.columns:
        raise IsobitError(
            f"{example.place}: no column {column!r} to learn from; name yours with "
            f"task.columns: {{{column}: ...}}"
        )
    value = example.columns[column]
    try:
        messages = answer_messages(gold_text(value) if gold else value)
    except NoAnswer as error:
        raise IsobitError(f"{example.place}: column {brief(column)!r}: {error}") from None
    if not answer_text(messages).strip():
        raise IsobitError(
            f"{example.place}: column {brief(column)!r} is empty: there is nothing to learn"
        )
    return messages


def _whole(
    prompt: str | Sequence[Mapping[str, Any]], answer: list[dict[str, Any]], tokenizer: Tokenizer
) -> tuple[list[int], list[Mapping[str, Any]] | None]:
    """(token ids of prompt and answer together, the conversation where it is one)."""
    if isinstance(prompt, str):
        return tokenizer.encode_text(prompt + answer_text(answer)), None
    *before, last = prompt
    if last["role"] == "assistant":  # the answer goes on with what the assistant began
        first = {**last, **answer[0], "content": last["content"] + answer[0]["content"]}
        chat = [*before, first, *answer[1:]]
    else:
        chat = [*prompt, *answer]
    return tokenizer.encode_chat(chat, add_generation_prompt=False), chat


def _refuse_other_beginning(
    prompt: Any, chat: list[Mapping[str, Any]], tokenizer: Tokenizer
) -> None:
    """Raise IsobitError unless the conversation begins with all that the template writes before an
    answer."""
    alone = tokenizer.render_chat(prompt)
    whole = tokenizer.render_chat(chat, add_generation_prompt=False)
    if whole.startswith(alone):
        return
    place = max(0, _common(alone, whole) - _SHOWN // 2)
    before, after = alone[place:][-_SHOWN:], whole[place:][:_SHOWN]
    raise IsobitError(
        f"the chat template writes {before!r} before an answer that is sampled, but {after!r} in a "
        "conversation: what is learned would not follow what is sampled; give answers the "
        "thoughts that it begins, or with model.chat_template a template that writes both alike"
    )


def end_of_text(tokenizer: Tokenizer) -> int | None:
    """The token that ends a text: the tokenizer's own where generation stops at it, else the first
    at which it does."""
    own = tokenizer.fast.token_to_id(token_text(tokenizer.settings.get("eos_token")))
    return own if own in tokenizer.eos_ids else next(iter(tokenizer.eos_ids), None)
