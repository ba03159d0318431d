"""Text to tokens and back, through `tokenizers`; chat templates in jinja2's sandbox.

Reads `tokenizer.json`, `tokenizer_config.json`, `chat_template.jinja` and the end-of-sequence ids of
`generation_config.json` and `config.json`. `Tokenizer.characters` makes one from an alphabet, for models made from
scratch. Left out: slow tokenizers and tokenizers with code of their own.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer

from isobit.errors import IsobitError
from isobit.model.checkpoint import read_json, read_text, write_json
from isobit.model.config import token_ids

_SPECIALS = ("<pad>", "<s>", "</s>")
_TOKEN_SETTINGS = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))


class Tokenizer:
    """A fast tokenizer with its special tokens and chat template."""

    def __init__(self, fast: FastTokenizer, settings: Mapping[str, Any], eos_ids: Sequence[int], template: str | None):
        self.fast = fast
        self.settings = dict(settings)
        self.eos_ids = tuple(eos_ids)
        self.chat_template = template
        fast.no_truncation()
        fast.no_padding()

    @staticmethod
    def load(directory: str | Path) -> "Tokenizer":
        """From a Hugging Face directory; IsobitError if a file is missing or malformed."""
        directory = Path(directory)
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise IsobitError(f"{directory}: tokenizer.json is missing; save the model with a fast tokenizer")
        try:
            fast = FastTokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises plain Exception
            raise IsobitError(f"{path}: not a tokenizer that can be read ({error})") from None
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
        try:
            return self.fast.encode(text, add_special_tokens=add_special).ids
        except Exception as error:  # tokenizers raises plain Exception
            raise IsobitError(f"the tokenizer cannot encode {text[:80]!r}: {error}") from None

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """Text without special tokens, or with them where `special` is true."""
        return self.fast.decode(list(ids), skip_special_tokens=not special)

    def decode_completion(self, prompt: Sequence[int], completion: Sequence[int]) -> str:
        """The text that `completion` adds to `prompt`: decoders may treat the first token of a text differently."""
        whole, before = self.decode([*prompt, *completion]), self.decode(prompt)
        return whole[len(before) :] if whole.startswith(before) else self.decode(completion)

    def render_chat(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> str:
        """The conversation, with the start of the assistant's turn unless it is whole, as the template writes it.
        Raises IsobitError without a template, and for what the template refuses."""
        if self._compiled is None:
            raise IsobitError(
                "the prompt is a chat, but the model has no chat template; give text prompts, or a template with "
                "model.chat_template (--chat-template)"
            )
        tokens = {name: _token_text(self.settings.get(name)) for name in _TOKEN_SETTINGS if self.settings.get(name)}
        try:
            return self._compiled.render(
                messages=list(messages),
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **tokens,
            )
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError) as error:
            reason = " ".join(str(error).split())
            raise IsobitError(f"the model's chat template refused a conversation: {reason}") from None

    def use_template(self, path: str | Path) -> None:
        """Take the chat template of a file from now on; `save` writes it. Raises IsobitError if it cannot be read or
        parsed."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
            raise IsobitError(f"cannot read chat template {path}: {reason}") from None
        self.chat_template = text
        self.settings.pop("chat_template", None)
        self.__dict__.pop("_compiled", None)
        try:
            assert self._compiled is not None
        except IsobitError as error:
            raise IsobitError(f"{path}: {error}") from None

    @cached_property
    def _compiled(self) -> jinja2.Template | None:
        if self.chat_template is None:
            return None
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationBlock]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_template_error
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            return environment.from_string(self.chat_template)
        except jinja2.TemplateSyntaxError as error:
            raise IsobitError(
                f"the model's chat template cannot be parsed: {error.message} (line {error.lineno})"
            ) from None

    def save(self, directory: str | Path) -> None:
        """Write tokenizer.json, tokenizer_config.json and the chat template."""
        directory = Path(directory)
        # not `save`, whose error on a full disk is no OSError
        (directory / "tokenizer.json").write_text(self.fast.to_str(pretty=True), encoding="utf-8")
        write_json(directory / "tokenizer_config.json", self.settings)
        if self.chat_template is not None and self.chat_template != self.settings.get("chat_template"):
            (directory / "chat_template.jinja").write_text(self.chat_template, encoding="utf-8")


class _GenerationBlock(Extension):
    """`{% generation %}...{% endgeneration %}`, with which some templates mark the assistant's text: rendered as is."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_template_error(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The filter that chat templates expect: unlike jinja2's own, it does not escape for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _token_text(token: Any) -> str:
    return str(token.get("content", "")) if isinstance(token, Mapping) else str(token or "")


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


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


def _template(directory: Path, settings: Mapping[str, Any]) -> str | None:
    path = directory / "chat_template.jinja"
    if path.is_file():
        return read_text(path)
    template = settings.get("chat_template")
    if isinstance(template, list):  # several named templates: the default one
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default") or next(iter(named.values()), None)
    return template if isinstance(template, str) else None
