"""`Dialogue`: how the answers of an engine become the turns of a conversation, and the messages
between them become tokens.

A conversation's tokens are only ever appended to: an answer stays the tokens that were sampled, and
what follows it is encoded alone (`model/text/appending.py`). Or it `forks`: what the model sees of
the past is what its template writes of it, and where that does not begin with the tokens so far, a
context of its own begins. Left out: when a turn is asked for
(`episodes.py`), and what answers it (`tasks/environments/`).
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

from isobit.data.answers import ANSWERS
from isobit.data.dataset import TEMPLATE_KWARGS, Message
from isobit.data.episodes import last_answer
from isobit.data.foreign import BadJson, parse_json
from isobit.data.turns import Environments, Turn
from isobit.engine.prompts import Prompt, encode_prompt
from isobit.engine.types import Completion
from isobit.errors import IsobitError, did_you_mean
from isobit.model.text.appending import Appending, numbered
from isobit.model.text.tokenizer import Tokenizer
from isobit.model.text.tool_formats.base import ToolFormat
from isobit.model.text.tool_formats.table import FORMATS, format_by_template, format_of
from isobit.model.text.tool_formats.turn import turn_of


@dataclass(frozen=True, eq=False)
class Dialogue:
    """The rules of conversations with `environments`. `parser` reads the calls of an answer.
    `max_tokens`: those of an episode's completion, given tokens included (None: as many as the
    model's context takes); where it `forks`, those of each of its contexts. `keys` number the
    episodes."""

    environments: Environments
    tokenizer: Tokenizer
    parser: ToolFormat
    max_tokens: int | None = None
    forks: bool = False
    keys: Iterator[int] = field(default_factory=count)
    _appending: dict[tuple[str, ...], Appending] = field(default_factory=dict)

    @staticmethod
    def of(
        tokenizer: Tokenizer,
        environments: Environments,
        parser: str,
        max_tokens: int | None,
        *,
        forks: bool = False,
    ) -> "Dialogue":
        """Make a dialogue with a tokenizer's template. Raises IsobitError without a template, and
        for an unknown format of calls."""
        template = tokenizer.chat_template
        if template is None:
            raise IsobitError(
                "environment: the model has no chat template, so it has no turns; give one with "
                "model.chat_template"
            )
        if parser not in (known := ("auto", *FORMATS)):
            raise IsobitError(f"environment.parser {parser!r}: {did_you_mean(parser, known)}")
        form = format_by_template(parser, tokenizer)
        if form is None and environments.tools:
            raise IsobitError(
                "environment: the model's chat template writes calls of tools as none of "
                f"{', '.join(FORMATS)}; name a template that writes one of these with "
                "model.chat_template, or what the model writes with environment.parser"
            )
        form = format_of(parser, template) if form is None else form
        return Dialogue(environments, tokenizer, form, max_tokens, forks)

    def prompt(
        self, prompt: Prompt, tools: Sequence[Mapping[str, Any]], vocab_size: int
    ) -> list[int]:
        """Return the tokens that an episode begins with. Raises IsobitError for a prompt that is
        not a chat."""
        if tools and prompt and isinstance(prompt[0], Mapping):
            return self.tokenizer.encode_chat(prompt, variables={"tools": list(tools)})  # type: ignore[arg-type]
        return encode_prompt("the prompt", prompt, self.tokenizer, vocab_size)

    def turn(
        self, number: int, completion: Completion, begin: int, tools: Sequence[Mapping[str, Any]]
    ) -> tuple[Turn, Message]:
        """Return the last turn of a completion, its tokens from `begin` on: as an environment sees
        it, and as a message of the chat."""
        answer = replace(
            completion,
            prompt_token_ids=[*completion.prompt_token_ids, *completion.token_ids[:begin]],
            token_ids=completion.token_ids[begin:],
        )
        turn = turn_of(number, answer, self.tokenizer, self.parser, tools)
        message: Message = {"role": "assistant", "content": turn.content}
        if turn.reasoning:
            message["reasoning_content"] = turn.reasoning
        if self.forks and turn.problems and not turn.calls:  # the model sees what it wrote
            message["content"] = self.parser.of(answer, self.tokenizer, tools).said
        if turn.calls:
            message["tool_calls"] = [
                {"type": "function", "function": {"name": c.name, "arguments": _given(c.arguments)}}
                for c in turn.calls
            ]
        return turn, message

    def appended(
        self, prompt: Prompt, messages: Sequence[Message], answer: Sequence[int]
    ) -> list[int]:
        """Return the tokens of an environment's messages, followed by the beginning of the next
        answer, as they go behind the tokens of an `answer` in a conversation on this prompt. Raises
        IsobitError where the template would write the past otherwise from here on."""
        appending = self.appending(prompt)
        appending.check(*{str(message["role"]) for message in messages})
        return appending.appended(messages, answer)

    def rendered(
        self,
        prompt: Prompt,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        vocab_size: int,
    ) -> list[int]:
        """Return the tokens of a conversation, followed by the beginning of the next answer, as the
        template writes all of it. Raises IsobitError where the template refuses it."""
        return self.prompt([*prompt, *numbered(messages)], tools, vocab_size)  # type: ignore[list-item]

    def appending(self, prompt: Prompt) -> Appending:
        """Return the `Appending` of conversations whose prompts have this prompt's roles and
        template variables; a prompt of tokens counts as one user message."""
        messages = [m for m in prompt if isinstance(m, Mapping)] or [{"role": "user"}]
        variables = json.dumps(messages[0].get(TEMPLATE_KWARGS), sort_keys=True)
        roles = (variables, *(str(message["role"]) for message in messages))
        if roles not in self._appending:
            tools = list(self.environments.tools) or None
            self._appending[roles] = Appending(self.tokenizer, {"tools": tools}, messages)
        return self._appending[roles]


def _given(arguments: str) -> Any:
    """Return a call's arguments as templates and reward functions expect them: an object."""
    try:
        return parse_json(arguments)
    except BadJson:
        return arguments


def with_answers(
    columns: Sequence[Mapping[str, Any]], completions: Sequence[Completion], tokenizer: Tokenizer
) -> list[Mapping[str, Any]]:
    """Return each completion's columns with what it says without its thoughts; of an episode, its
    last turn."""
    form = format_of("auto", tokenizer.chat_template)

    def answer(completion: Completion) -> str:
        if completion.episode is None:
            return form.of(completion, tokenizer).said
        return last_answer(completion.episode.messages)

    return [{**row, ANSWERS: answer(c)} for row, c in zip(columns, completions, strict=True)]
