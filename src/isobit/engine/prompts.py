"""Turn prompts (text, token ids, chat messages) into token ids, and refuse those that can never be
answered."""

from collections.abc import Mapping, Sequence

from isobit.engine.pages import PagePool, pages_needed
from isobit.engine.types import Sampling
from isobit.errors import IsobitError, brief
from isobit.model.text.tokenizer import Tokenizer

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]


def encode(prompts: Sequence[Prompt], tokenizer: Tokenizer, vocab_size: int) -> list[list[int]]:
    """Return the token ids of each prompt. Text gets the tokenizer's special tokens; a chat
    template brings its own. Special tokens that a prompt spells are text, unless the tokenizer's
    `special_tokens_in_content` says otherwise."""
    if isinstance(prompts, str):
        raise IsobitError("prompts: expected a list of prompts, got one text; write [text]")
    if not isinstance(prompts, Sequence):
        raise IsobitError(f"prompts: expected a list of prompts, got {prompts!r:.80}")
    if prompts and isinstance(prompts[0], (int, Mapping)):
        kind, write = (
            ("one of token ids", "[ids]")
            if isinstance(prompts[0], int)
            else ("one chat", "[messages]")
        )
        raise IsobitError(f"prompts: expected a list of prompts, got {kind}; write {write}")
    return [
        encode_prompt(f"prompt {i}", prompt, tokenizer, vocab_size)
        for i, prompt in enumerate(prompts)
    ]


def encode_prompt(where: str, prompt: Prompt, tokenizer: Tokenizer, vocab_size: int) -> list[int]:
    """Return the token ids of one prompt, which messages call `where`. Raises IsobitError for a
    prompt that cannot be encoded."""
    if isinstance(prompt, str):
        ids = tokenizer.encode_text(prompt)
    elif not isinstance(prompt, Sequence):
        raise IsobitError(f"{where}: expected text, token ids or chat messages, got {prompt!r:.80}")
    elif prompt and all(isinstance(item, Mapping) for item in prompt):
        ids = tokenizer.encode_chat(list(prompt))  # type: ignore[arg-type]
    else:
        ids = list(prompt)  # type: ignore[arg-type]
    for token in ids:
        if not isinstance(token, int) or isinstance(token, bool):
            raise IsobitError(
                f"{where}: expected text, token ids or chat messages, found {token!r:.80} in it"
            )
        if not 0 <= token < vocab_size:
            raise IsobitError(
                f"{where}: token id {brief(token)} is not in the model's vocabulary of {vocab_size}"
            )
    if not ids:
        raise IsobitError(f"{where} is empty: the model needs at least one token to continue from")
    return ids


def check_ids(prompt_ids: Sequence[int] | None, count: int) -> list[int]:
    """Return the ids of the prompts in the sampling keys; by default their order. Raises
    IsobitError for ids of another number or type."""
    if prompt_ids is not None and (
        isinstance(prompt_ids, str) or not isinstance(prompt_ids, Sequence)
    ):
        raise IsobitError(f"prompt_ids: expected a list of whole numbers, got {prompt_ids!r:.80}")
    ids = list(range(count)) if prompt_ids is None else list(prompt_ids)
    if len(ids) != count:
        raise IsobitError(
            f"prompt_ids: expected one for each of the {count} prompts, got {len(ids)}"
        )
    for value in ids:
        check_id("prompt_ids", value)
    return ids


def check_id(name: str, value: object) -> None:
    """Raise IsobitError for an id that does not fit into the sampling keys."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**32:
        raise IsobitError(f"{name}: expected a whole number from 0 to 2**32 - 1, got {value!r:.80}")


def check_sampling(sampling: object) -> None:
    """Raise IsobitError for a value that is not a `Sampling`."""
    if not isinstance(sampling, Sampling):
        raise IsobitError(f"sampling: expected Sampling(n=4, ...), got {sampling!r:.80}")


def check_plain(sampling: Sampling) -> None:
    """Raise IsobitError for a shaping, where settings are sent to other processes."""
    if sampling.shaping is not None:
        raise IsobitError("sampling.shaping: only an engine in this process takes one")


def new_token_limit(
    where: str, length: int, max_new_tokens: int, max_positions: int, pages: PagePool
) -> int:
    """Return how many tokens may follow a prompt of `length`, which messages call `where`. Raises
    IsobitError if it leaves no room for its answer."""
    check_context(where, length, max_positions)
    limit = min(max_new_tokens, max_positions - length)
    needed = pages_needed(length, limit, pages.page_size)
    if needed > pages.num_pages:
        raise IsobitError(
            f"{where} has {length} tokens and needs {needed} pages of {pages.page_size} tokens "
            f"with {limit} new ones, "
            f"but the engine has {pages.num_pages}: raise kv_pages or lower max_new_tokens"
        )
    return limit


def check_context(where: str, length: int, max_positions: int) -> None:
    """Raise IsobitError for a prompt that fills the model's context."""
    if length >= max_positions:
        raise IsobitError(
            f"{where} has {length} tokens, but the model's context of {max_positions} takes at "
            f"most {max_positions - 1}, to leave room for an answer"
        )
