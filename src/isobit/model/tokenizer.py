"""Text to tokens and back, through `tokenizers`; chat templates (`chat.py`).

Reads `tokenizer.json`, `tokenizer_config.json`, `chat_template.jinja` and the end-of-sequence ids of
`generation_config.json` and `config.json`. `Tokenizer.characters` makes one from an alphabet, for models made from
scratch. Left out: slow tokenizers and tokenizers with code of their own.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer

from isobit.data.foreign import exists, read_bytes, reason_of
from isobit.errors import IsobitError
from isobit.model import chat
from isobit.model.checkpoint import read_json, read_text, write_json
from isobit.model.config import token_ids
from isobit.model.content import ContentEncoder, Rule

_MOST_TEMPLATE_BYTES = 1 << 24
_BYTE = re.compile("<0x[0-9A-Fa-f]{2}>")
_SPECIALS = ("<pad>", "<s>", "</s>")
_TOKEN_SETTINGS = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))


class Tokenizer:
    """A fast tokenizer with its special tokens and chat template."""

    def __init__(self, fast: FastTokenizer, settings: Mapping[str, Any], eos_ids: Sequence[int], template: str | None):
        self.fast = fast
        self.settings = dict(settings)
        self.eos_ids = tuple(eos_ids)
        self.chat_template = template
        self.special_tokens_in_content: Rule = "escape"
        fast.no_truncation()
        fast.no_padding()
        self._content = ContentEncoder(fast)

    @staticmethod
    def load(directory: str | Path) -> "Tokenizer":
        """From a Hugging Face directory; IsobitError if a file is missing or malformed."""
        directory = Path(directory)
        path = directory / "tokenizer.json"
        if not exists(path):
            raise IsobitError(f"{directory}: tokenizer.json is missing; save the model with a fast tokenizer")
        text = read_text(path)
        with _of_tokenizers(f"{path}: not a tokenizer that can be read"):
            fast = FastTokenizer.from_str(text)
            if not fast.get_vocab(with_added_tokens=True):
                raise IsobitError(f"{path}: not a tokenizer that can be read: its vocabulary is empty")
        settings = _optional_json(directory / "tokenizer_config.json")
        eos = _eos_ids(directory, fast, settings)
        return Tokenizer(fast, settings, eos, _template(directory, settings))

    @staticmethod
    def characters(alphabet: str) -> "Tokenizer":
        """One token per character of `alphabet`, after <pad>, <s> and </s>; nothing is added to a text."""
        symbols = sorted(set(alphabet))
        vocabulary = {symbol: i for i, symbol in enumerate([*_SPECIALS, *symbols])}
        fast = FastTokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))  # which is none: see `encode`
        fast.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        fast.decoder = decoders.Fuse()
        fast.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in _SPECIALS])
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "pad_token": "<pad>",
            "bos_token": "<s>",
            "eos_token": "</s>",
            "clean_up_tokenization_spaces": False,
        }
        return Tokenizer(fast, settings, [vocabulary["</s>"]], None)

    @property
    def vocab_size(self) -> int:
        """One more than the largest token id."""
        return max(self.fast.get_vocab(with_added_tokens=True).values()) + 1

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """Token ids; with `add_special`, the post-processor adds what it adds (such as a start token).

        Raises IsobitError for text that the vocabulary cannot write.
        """
        with _of_tokenizers(f"the tokenizer cannot encode {text[:80]!r}"):
            return self.fast.encode(text, add_special_tokens=add_special).ids

    def encode_text(self, text: str, add_special: bool = True) -> list[int]:
        """`encode` of text that somebody else wrote: special tokens that it spells are text, unless
        `special_tokens_in_content` says otherwise (`content.py`)."""
        with _of_tokenizers(f"the tokenizer cannot encode {text[:80]!r}"):
            return self._content.text(text, self.special_tokens_in_content, add_special)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> list[int]:
        """Token ids of `render_chat`, in which the special tokens are the template's, as in `encode_text`."""

        def render(given: Sequence[Mapping[str, Any]]) -> str:
            return self.render_chat(given, add_generation_prompt)

        with _of_tokenizers("the tokenizer cannot encode a chat"):
            return self._content.chat(messages, self.special_tokens_in_content, render)

    def special_tokens_in(self, prompt: str | Sequence[Any]) -> list[str]:
        """The special tokens that a text or the messages of a chat spell."""
        return self._content.spelled(prompt)

    def is_byte(self, token: int) -> bool:
        """Whether a token is named as a byte (`<0xE2>`): those next to one another are decoded together."""
        return _BYTE.fullmatch(self.fast.id_to_token(token) or "") is not None

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """Text without special tokens, or with them where `special` is true."""
        with _of_tokenizers("the tokenizer cannot decode its tokens"):
            return self.fast.decode(list(ids), skip_special_tokens=not special)

    def decode_completion(self, prompt: Sequence[int], completion: Sequence[int]) -> str:
        """The text that `completion` adds to `prompt`: decoders may treat the first token of a text differently."""
        whole, before = self.decode([*prompt, *completion]), self.decode(prompt)
        return whole[len(before) :] if whole.startswith(before) else self.decode(completion)

    def render_chat(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> str:
        """The conversation, with the start of the assistant's turn unless it is whole, as the template writes it.
        Raises IsobitError without a template, and for what the template refuses."""
        if self.chat_template is None:
            raise IsobitError(
                "the prompt is a chat, but the model has no chat template; give text prompts, or a template with "
                "model.chat_template (--chat-template)"
            )
        tokens = {name: _token_text(self.settings.get(name)) for name in _TOKEN_SETTINGS if self.settings.get(name)}
        variables = {
            "messages": list(messages),
            "tools": None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        return chat.render(self.chat_template, variables | tokens)

    def use_template(self, path: str | Path) -> None:
        """Take the chat template of a file from now on; `save` writes it. Raises IsobitError if it cannot be read or
        parsed."""
        try:
            text = read_bytes(Path(path), _MOST_TEMPLATE_BYTES).decode("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise IsobitError(f"cannot read chat template {path}: {reason_of(error)}") from None
        try:
            chat.check_template(text)
        except IsobitError as error:
            raise IsobitError(f"{path}: {error}") from None
        self.chat_template = text
        self.settings.pop("chat_template", None)

    def differs(self, other: "Tokenizer") -> str | None:
        """In what another one would write or end texts differently; None: in nothing."""
        if self.fast.to_str() != other.fast.to_str():
            return "tokenizer"
        if set(self.eos_ids) != set(other.eos_ids):
            return "end-of-sequence ids"
        return "chat template" if self.chat_template != other.chat_template else None

    def save(self, directory: str | Path) -> None:
        """Write tokenizer.json, tokenizer_config.json and the chat template."""
        directory = Path(directory)
        # not `save`, whose error on a full disk is no OSError
        (directory / "tokenizer.json").write_text(self.fast.to_str(pretty=True), encoding="utf-8")
        write_json(directory / "tokenizer_config.json", self.settings)
        if self.chat_template is not None and self.chat_template != self.settings.get("chat_template"):
            (directory / "chat_template.jinja").write_text(self.chat_template, encoding="utf-8")


@contextmanager
def _of_tokenizers(what: str) -> Iterator[None]:
    """Turn what the library raises into an IsobitError: a plain Exception, or, where its code in Rust panics, an
    exception that is none."""
    try:
        yield
    except IsobitError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise IsobitError(f"{what}: {' '.join(str(error).split())[:200]}") from None


def _token_text(token: Any) -> str:
    return str(token.get("content", "")) if isinstance(token, Mapping) else str(token or "")


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json(path) if exists(path) else {}


def _eos_ids(directory: Path, fast: FastTokenizer, settings: Mapping[str, Any]) -> tuple[int, ...]:
    for name in ("generation_config.json", "config.json"):
        try:
            ids = token_ids(_optional_json(directory / name).get("eos_token_id"))
        except ValueError as error:
            raise IsobitError(f"{directory / name}: eos_token_id: {error}") from None
        if ids:
            return ids
    token = fast.token_to_id(_token_text(settings.get("eos_token")))
    return () if token is None else (token,)


def _is_named(entry: Any) -> bool:
    return isinstance(entry, dict) and isinstance(entry.get("name"), str)


def _template(directory: Path, settings: Mapping[str, Any]) -> str | None:
    path = directory / "chat_template.jinja"
    if exists(path):
        return read_text(path)
    template = settings.get("chat_template")
    if isinstance(template, list):  # several named templates: the default one
        named = {entry.get("name"): entry.get("template") for entry in template if _is_named(entry)}
        template = named.get("default") or next(iter(named.values()), None)
    return template if isinstance(template, str) else None
