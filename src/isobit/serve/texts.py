"""The token ids of clients' texts and conversations, within bounds that are checked before a text is
encoded."""

from typing import Any

from isobit.engine.prompts import encode_prompt
from isobit.model import Model
from isobit.model.text.tokenizer import Check, Tokenizer
from isobit.serve import chat, sessions
from isobit.serve.protocol import TemplateKeys, token_list, too_long
from isobit.serve.requests import BadRequest

_MOST_CHARACTERS = 1 << 20  # of a text that is encoded to count its tokens


class Encoder:
    """The encoder of prompts for a model; its methods are called at the desk, and raise BadRequest."""

    def __init__(self, model: Model) -> None:
        self.tokenizer, self.positions = model.tokenizer, model.config.max_positions
        self._vocabulary = model.config.vocab_size

    def prompts(self, value: Any, add_special: bool, most: int) -> list[list[int]]:
        """Return the prompts, at most `most`, as token ids, of a text, of token ids, or of a list
        of either."""
        several = isinstance(value, list) and bool(value) and isinstance(value[0], (str, list))
        prompts = value if several else [value]
        if len(prompts) > most:
            raise BadRequest(f"prompt: at most {most:,} at a time", "prompt")
        return [self._prompt(prompt, add_special) for prompt in prompts]

    def _prompt(self, prompt: Any, add_special: bool) -> list[int]:
        if isinstance(prompt, str):
            check = check_prompt(self.tokenizer, self.positions, "prompt")
            prompt = self.tokenizer.encode_text(prompt, add_special, check)
        elif not isinstance(prompt, list) or not all(type(token) is int for token in prompt):
            raise BadRequest("prompt: expected a text, token ids, or a list of either", "prompt")
        return encode_prompt("prompt", prompt, self.tokenizer, self._vocabulary)

    def tokens(self, key: str, given: Any) -> list[int]:
        """Return a key's token ids, checked to be in the vocabulary."""
        return encode_prompt(key, token_list(given, key), self.tokenizer, self._vocabulary)

    def conversation(
        self, keys: TemplateKeys, before: sessions.Turn | None = None, check: Check | None = None
    ) -> tuple[list[chat.Message], dict[str, Any], list[int]]:
        """Return (messages, the template's variables, the prompt) of a conversation; where it goes
        on from the turn `before`, with that turn's tokens. `check`: of its text, None: that it may
        fit the context."""
        messages, variables = chat.messages_of(keys.messages), chat.variables_of(keys)
        chat.check_continued(keys, messages)
        if before is not None and sessions.goes_on(before, messages, variables):
            prompt = sessions.spliced(self.tokenizer, before, messages, variables)
            return messages, variables, prompt
        chat.check_tools(self.tokenizer, messages, variables)
        check = check or check_prompt(self.tokenizer, self.positions, "messages")
        return messages, variables, self.tokenizer.encode_chat(messages, True, variables, check)


def check_prompt(tokenizer: Tokenizer, positions: int, key: str) -> Check:
    """Return a check that raises BadRequest, with this `key`, for a text that surely has more
    tokens than a context of `positions`."""

    def check(text: str) -> None:
        if tokenizer.surely_longer(text, positions):
            raise too_long(
                f"{key}: a text of {len(text):,} characters has more tokens than the model's maximum "
                f"context length of {positions:,}; send a shorter one",
                key,
            )

    return check


def check_counted(positions: int, key: str) -> Check:
    """Return a check that raises BadRequest for a text that is too long to count its tokens; the
    bound grows with `positions`, the model's context."""
    most = max(_MOST_CHARACTERS, 16 * positions)

    def check(text: str) -> None:
        if len(text) > most:
            raise BadRequest(
                f"{key}: at most {most:,} characters are encoded at a time, got {len(text):,}; "
                "send them in pieces",
                key,
            )

    return check
