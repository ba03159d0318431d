"""The lesson of an example in supervised training: the tokens of its prompt, and those of the answer
after it.

A text prompt and its answer are encoded as one text, a chat and its answer as the template writes
the conversation. The prompt's tokens are those with which the whole begins as the prompt alone
does, and what is learned is the rest, as TRL 1.16 cuts (tests/training/test_taught.py). It ends
with the token that ends the answer: after a text the tokenizer's own end of sequence; in a chat the
first token after the answer's text at which generation stops; else one with which the template
begins the message behind it, as GLM-4.5's does; else the last special token that it writes there,
else the end of sequence too. What a template writes after that is left out.

A template that begins the assistant's turn in one way and writes it in another is refused, which
TRL is not: what would be learned does not follow what is sampled.

Of a conversation all of the assistant's turns may be learned. Each is cut as the last one is, after
the messages before it, so its boundaries are the template's own. Where the template writes every
message alike whatever follows, they are one row with a mask; else, as where it leaves out earlier
thoughts, each is a separate row (tests/training/test_taught_turns.py). A text without an answer
is learned whole, but for its first token, which nothing predicts.
"""

import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from isobit.data.answers import ANSWER, GOLD, NoAnswer, answer_messages, answer_text, gold_text
from isobit.data.dataset import TEMPLATE_KWARGS, Example
from isobit.data.messages import TOOLS, is_learned
from isobit.engine.prompts import encode_prompt as checked_ids
from isobit.errors import IsobitError, brief, printable
from isobit.model import Model, Tokenizer
from isobit.model.described import Described
from isobit.model.text.added_tokens import token_text
from isobit.model.text.chat import TookTooMuch
from isobit.model.text.template_tools import check_calls, writes_tools
from isobit.rl.algorithm.given import PAIR_LOSSES
from isobit.tasks.builtin import Task
from isobit.training.rollouts.lengths import encode_prompt, say_spelled

Message = Mapping[str, Any]
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
    """A maker of samples of a task's examples for a model, which also counts what is to be reported
    about them before training starts. `turns`: which of the assistant's are learned, last or
    all."""

    def __init__(self, task: Task, model: Model | Described, turns: str = "last") -> None:
        self._task, self._model, self._tokenizer = task, model, model.tokenizer
        self._turns = turns
        added = self._tokenizer.fast.get_added_tokens_decoder()
        self._special = {token for token, entry in added.items() if entry.special} | set(
            self._tokenizer.eos_ids
        )
        ends = [self._tokenizer.fast.id_to_token(end) for end in self._tokenizer.eos_ids]
        names = {token_text(self._tokenizer.settings.get("eos_token")), *ends}
        self._end_names = sorted(name for name in names if name)
        self._spelled, self._inside = 0, list[str]()
        """The answers that spell their end, and special tokens that others have inside."""
        self._shows_tools = False
        self._begins: list[int] | None = None
        self._written_calls = set[tuple[int, ...]]()
        self._ends_behind = dict[bool, int | None]()

    def samples(self, example: Example) -> list[SupervisedSample]:
        """Return what is learned of an example: one row, or one for each of the assistant's turns.
        Raises IsobitError with its place."""
        if is_text(example, self._task):
            return [self._text(example)]
        return self._after(example, *_answer(example, self._task), self._turns)

    def lesson(self, example: Example, loss: str) -> list[SupervisedSample]:
        """Return what a `loss` learns of an example. Raises IsobitError with its place."""
        if loss in PAIR_LOSSES:
            return self.pair(example)
        return [self.labelled(example)] if loss == "kto" else self.samples(example)

    def labelled(self, example: Example) -> SupervisedSample:
        """Return the answer, and whether it is desirable: the column `completion` where there is
        one, also of a task that has right answers. Raises IsobitError with its place."""
        label = example.columns.get("label")
        if not isinstance(label, bool):
            actual = "there is none" if label is None else f"got {brief(repr(label))}"
            raise IsobitError(f"{example.place}: column 'label': expected true or false, {actual}")
        if example.answer is None and "completion" in example.columns:
            answer = _answer_in(example, "completion", gold=False)
        else:
            answer = _answer(example, self._task)
        return replace(self._one(example, *answer), reward=1.0 if label else -1.0)

    def pair(self, example: Example) -> list[SupervisedSample]:
        """Return the answer that is preferred, and the one that is not. Raises IsobitError with its
        place."""
        return [
            self._one(example, *_answer_in(example, name, gold=False))
            for name in ("chosen", "rejected")
        ]

    def sample(self, example: Example) -> SupervisedSample:
        """Return the tokens of the last answer. Raises IsobitError with its place."""
        return self._one(example, *_answer(example, self._task))

    def _text(self, example: Example) -> SupervisedSample:
        assert isinstance(example.prompt, str)
        text = self._without_end({"role": "assistant", "content": example.prompt})["content"]
        ids = encode_prompt(replace(example, prompt=text), self._model)
        end = end_of_text(self._tokenizer)
        whole = ids if end is None or ids[-1:] == [end] else [*ids, end]
        if len(whole) < 2:
            raise IsobitError(f"{example.place}: the text is one token: there is nothing to learn")
        return SupervisedSample(tuple(whole[:1]), tuple(whole[1:]))

    def _one(self, example: Example, answer: list[Message], goes_on: bool) -> SupervisedSample:
        """Return the one sample of an answer. Raises IsobitError for several."""
        samples = self._after(example, answer, goes_on, "last")
        if len(samples) > 1:
            raise IsobitError(
                f"{example.place}: the chat template writes an answer's earlier messages otherwise "
                "than its last one, so that the answer is no row of its own; give answers of one "
                "message, or with model.chat_template a template that writes all alike"
            )
        return samples[0]

    def _after(
        self, example: Example, answer: list[Message], goes_on: bool, turns: str
    ) -> list[SupervisedSample]:
        """Return what is learned of a conversation that ends with an answer: of `turns` last the
        answer's messages, of all every one of the assistant's, but those that say of themselves that
        they are not. `goes_on`: the answer is the rest of the prompt's last message."""
        prompt = example.prompt
        answer = [self._without_end(message) for message in answer]
        try:
            if isinstance(prompt, str):
                if any(message.get("tool_calls") for message in answer):
                    raise IsobitError(
                        "the answer calls a tool, which a chat template writes, and the prompt is "
                        "text; set task.chat: true"
                    )
                whole = self._tokenizer.encode_text(prompt + answer_text(answer))
                return [self._cut(encode_prompt(example, self._model), whole, None)]
            self._check_tools(prompt)
            chat = [*prompt, *answer]
            if goes_on:
                last = {**prompt[-1], **answer[0]}
                last["content"] = prompt[-1]["content"] + answer[0]["content"]
                chat = [*prompt[:-1], last, *answer[1:]]
            first = len(prompt) - goes_on
            self._check_calls(chat)
            wanted = [
                index
                for index, message in enumerate(chat)
                if message["role"] == "assistant"
                and (index >= first or (turns == "all" and index > 0))
                and _learned(message, index)
            ]
            if not wanted:
                raise IsobitError(
                    "the answer's weight is 0: there is nothing to learn; leave the row out, or "
                    "learn earlier turns with turns: all"
                )
            samples = [
                self._turn(prompt if goes_on and index == first else chat[:index], chat, index)
                for index in wanted
            ]
        except IsobitError as error:
            prefix = f"{example.place}: "
            raise IsobitError(f"{prefix}{str(error).removeprefix(prefix)}") from None
        merged = _merged(samples)
        return samples if merged is None else [merged]

    def _turn(
        self, prompt: Sequence[Message], chat: Sequence[Message], index: int
    ) -> SupervisedSample:
        """Return what is learned of the assistant's message at this place of a chat."""
        goes_on = len(prompt) > index
        prompt_ids = self._tokenizer.encode_chat(prompt, continues=goes_on)
        whole = self._tokenizer.encode_chat(chat[: index + 1], add_generation_prompt=False)
        return self._cut(prompt_ids, whole, (prompt, chat[: index + 1], goes_on))

    def _cut(
        self,
        prompt_ids: list[int],
        whole: list[int],
        chats: tuple[Sequence[Message], Sequence[Message], bool] | None,
    ) -> SupervisedSample:
        """Return the tokens of prompt and answer together, cut where the prompt ends. `chats`: the
        conversations of both, and whether the prompt's last message goes on; None: texts."""
        whole = checked_ids(
            "the prompt with its answer", whole, self._tokenizer, self._model.config.vocab_size
        )
        common = _common(prompt_ids, whole)
        joined = common < len(prompt_ids)
        if joined and chats is not None:
            prompt, _, goes_on = chats
            header = 0
            if prompt[-1]["role"] == "assistant" and not goes_on:
                # that answer may be written otherwise where it is the last; the conversation counts
                header = self._behind_last_header(whole)
            if header:
                common, joined = header, False
            else:
                _refuse_other_beginning(*chats, self._tokenizer)
        cut = max(common, 1)  # nothing predicts the first token
        if chats is not None and not joined:
            cut += self._header(whole[cut:])
        learned = self._ended(whole[cut:], None if chats is None else chats[1][-1])
        return SupervisedSample(tuple(whole[:cut]), tuple(learned), joined=joined)

    def _header(self, ids: Sequence[int]) -> int:
        """Return how many of these tokens begin a turn of the assistant anew, as the template does
        behind a user's message. Some write it in a conversation, and not before what is sampled."""
        begins = self._generation_prompt()
        return len(begins) if list(ids[: len(begins)]) == begins else 0

    def _behind_last_header(self, whole: Sequence[int]) -> int:
        """Return the position behind the last beginning of an assistant's turn; 0 without one."""
        begins = self._generation_prompt()
        ends = range(len(whole), len(begins), -1) if begins else ()
        return next((end for end in ends if list(whole[end - len(begins) : end]) == begins), 0)

    def _generation_prompt(self) -> list[int]:
        """Return the tokens that the template writes behind a user's message before the answer; []
        for a template that takes no such conversation."""
        if self._begins is None:
            self._begins, question = [], [{"role": "user", "content": "?"}]
            with suppress(IsobitError):
                alone = self._tokenizer.encode_chat(question, add_generation_prompt=False)
                begun = self._tokenizer.encode_chat(question)
                self._begins = begun[len(alone) :] if begun[: len(alone)] == alone else []
        return self._begins

    def _check_tools(self, prompt: Sequence[Message]) -> None:
        """Raise IsobitError for a row's tools that the template does not write."""
        tools = prompt[0].get(TEMPLATE_KWARGS, {}).get(TOOLS)
        if not tools or self._shows_tools:
            return
        if not writes_tools(self._tokenizer, prompt, {TOOLS: tools}):
            raise IsobitError(
                f"column {TOOLS!r}: the model's chat template writes none, so that calls of tools "
                "would be learned which the model does not see; name one that does with "
                "model.chat_template, or leave the column out"
            )
        self._shows_tools = True

    def _check_calls(self, chat: Sequence[Message]) -> None:
        """Raise IsobitError for a call that the template does not write."""
        counts = tuple(len(message.get("tool_calls") or ()) for message in chat)
        if any(counts) and counts not in self._written_calls:
            check_calls(self._tokenizer, chat)
            self._written_calls.add(counts)

    def _without_end(self, message: Message) -> Message:
        """Return an answer's message without the end that its text spells: the template, or this
        module, writes it."""
        text = str(message["content"])
        if self._tokenizer.special_tokens_in_content == "refuse" or message["role"] != "assistant":
            return message
        while end := next((e for e in self._end_names if text.rstrip().endswith(e)), None):
            text = text.rstrip().removesuffix(end)
        self._inside += self._tokenizer.special_tokens_in(text)
        if text == message["content"]:
            return message
        self._spelled += 1
        return {**message, "content": text}

    def _ended(self, ids: list[int], message: Message | None) -> list[int]:
        """Return the tokens up to the one that ends the answer, which is added where there is none;
        `message`: what the template wrote, None for a text."""
        start = len(ids)
        while start and (ids[start - 1] in self._special or not self._name(ids[start - 1]).strip()):
            start -= 1
        if message is not None and not start:
            raise IsobitError(
                "the chat template writes nothing of the answer; expected one that writes text "
                "contents"
            )
        stops = [i for i in range(start, len(ids)) if ids[i] in self._tokenizer.eos_ids]
        if stops:
            return ids[: stops[0] + 1]
        end = None if message is None else self._end_behind(bool(message.get("tool_calls")))
        written = [i for i in range(start, len(ids)) if ids[i] in self._special]
        if end is None and message is not None and written:
            return ids[: written[-1] + 1]
        end = end_of_text(self._tokenizer) if end is None else end
        return ids if end is None else [*ids, end]

    def _end_behind(self, calls: bool) -> int | None:
        """Return the token with which the template begins the message behind an answer, or behind one
        that `calls` a tool, if generation stops there."""
        if calls not in self._ends_behind:
            function = {"name": "f", "arguments": {}}
            call = {"id": "call00000", "type": "function", "function": function}
            conversation: list[Message] = [{"role": "user", "content": "a"}]
            conversation += [
                {"role": "assistant", "content": "b"} | ({"tool_calls": [call]} if calls else {})
            ]
            result = {"role": "tool", "name": "f", "tool_call_id": "call00000", "content": "c"}
            more = [*conversation, result if calls else conversation[0]]
            try:
                ids, longer = (
                    self._tokenizer.encode_chat(chat, False) for chat in (conversation, more)
                )
            except TookTooMuch:
                raise
            except IsobitError:
                ids, longer = [], []
            begun = longer[len(ids)] if longer[: len(ids)] == ids != longer else None
            self._ends_behind[calls] = begun if begun in self._tokenizer.eos_ids else None
        return self._ends_behind[calls]

    def _name(self, token: int) -> str:
        return self._tokenizer.decode([token], special=True)

    def say(self, taught: Sequence[tuple[Example, SupervisedSample]]) -> None:
        """Print on stderr where generation will not stop, where sampling does not begin as what is
        learned does, and how many answers spelled their end."""
        if self._spelled:
            print(
                f"{self._spelled:,} answers spell {' or '.join(self._end_names)} at their end: "
                "taken for the end, which is learned once",
                file=sys.stderr,
            )
        say_spelled("answers", self._inside, self._tokenizer)
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


def _common(first: Sequence[object], second: Sequence[object]) -> int:
    """Count the tokens that both begin with."""
    return next(
        (i for i, (a, b) in enumerate(zip(first, second)) if a != b), min(len(first), len(second))
    )


def is_text(example: Example, task: Task) -> bool:
    """Return whether an example is a text to learn whole: it has a column `text`, and no answer."""
    has_text = isinstance(example.prompt, str) and "text" in example.columns
    return has_text and task.gold is None and "completion" not in example.columns


def _learned(message: Message, index: int) -> bool:
    """Return whether a message of the assistant is learned. Raises IsobitError."""
    try:
        return is_learned(message)
    except ValueError as error:
        raise IsobitError(f"messages[{index}]: {error}") from None


def _merged(turns: Sequence[SupervisedSample]) -> SupervisedSample | None:
    """Return a single row of which the turns' tokens are learned; None where the last turn does not
    begin with all of the others."""
    first, last = turns[0], turns[-1]
    whole, start = (*last.prompt_ids, *last.completion_ids), len(first.prompt_ids)
    learned = [False] * (len(whole) - start)
    for turn in turns:
        end = len(turn.prompt_ids) + len(turn.completion_ids)
        if whole[:end] != (*turn.prompt_ids, *turn.completion_ids):
            return None
        for index in range(len(turn.prompt_ids), end):
            learned[index - start] = True
    joined = any(turn.joined for turn in turns)
    return SupervisedSample(whole[:start], whole[start:], tuple(learned), joined)


def _answer(example: Example, task: Task) -> tuple[list[Message], bool]:
    """Return the answer as messages of the assistant, and whether it goes on with the prompt's last
    message."""
    if example.answer is not None:
        return [example.answer], False
    return _answer_in(example, task.gold or "completion", gold=task.gold is not None)


def _answer_in(example: Example, column: str, gold: bool) -> tuple[list[Message], bool]:
    """Return the messages in a column, and whether they go on with the prompt's last message, as
    text does; `gold`: it may hold a number."""
    if column not in example.columns:
        raise IsobitError(
            f"{example.place}: no column {column!r} to learn from; name yours with "
            f"task.columns: {{{column}: ...}}"
        )
    value, prompt = example.columns[column], example.prompt
    begun = not isinstance(prompt, str) and prompt[-1]["role"] == "assistant"
    try:
        if gold and not isinstance(value, list):
            value = gold_text(value)
        messages = answer_messages(value, learned=True)
    except NoAnswer as error:
        wanted = GOLD if gold else ANSWER
        raise IsobitError(
            f"{example.place}: column {brief(column)!r}: expected {wanted}, got {error.found}"
        ) from None
    if not any(m["content"].strip() or m.get("tool_calls") for m in messages):
        raise IsobitError(
            f"{example.place}: column {brief(column)!r} is empty: there is nothing to learn"
        )
    return list(messages), begun and isinstance(value, str)


def _refuse_other_beginning(
    prompt: Sequence[Message], chat: Sequence[Message], goes_on: bool, tokenizer: Tokenizer
) -> None:
    """Raise IsobitError unless the conversation begins with all that the template writes before an
    answer."""
    alone = tokenizer.render_chat(prompt, continues=goes_on)
    whole = tokenizer.render_chat(chat, add_generation_prompt=False)
    if whole.startswith(alone):
        return
    start = max(0, _common(alone, whole) - _SHOWN // 2)
    expected, actual = alone[start:][-_SHOWN:], whole[start:][:_SHOWN]
    raise IsobitError(
        f"the chat template writes {expected!r} before an answer that is sampled, but {actual!r} in a "
        "conversation: what is learned would not follow what is sampled; give answers the "
        "thoughts that it begins, or with model.chat_template a template that writes both alike"
    )


def end_of_text(tokenizer: Tokenizer) -> int | None:
    """Return the token that ends a text: the tokenizer's own where generation stops at it, else the
    first at which it does."""
    eos_id = tokenizer.fast.token_to_id(token_text(tokenizer.settings.get("eos_token")))
    return eos_id if eos_id in tokenizer.eos_ids else next(iter(tokenizer.eos_ids), None)
