"""Text to tokens and back, through `tokenizers`; chat templates (`chat.py`).

Reads `tokenizer.json`, the tokens that are added to it (`added_tokens.py`), the chat templates, and
the end-of-sequence ids of `generation_config.json` or `config.json`. In addition to these the
tokenizer's own end of sequence ends a completion: fine-tuning often changes one of them alone.
`Tokenizer.characters` makes a tokenizer from an alphabet, for models made from scratch. Left out:
slow tokenizers, and tokenizers that bring their own code.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer

from isobit.data.dataset import TEMPLATE_KWARGS
from isobit.data.foreign import exists, read_bytes, reason_of
from isobit.errors import IsobitError, brief
from isobit.model.hub.checkpoint import read_json, read_text, write_json
from isobit.model.hub.token_ids import token_ids
from isobit.model.text import chat
from isobit.model.text.added_tokens import add_tokens, named_tokens, read_settings, token_text
from isobit.model.text.conversation import Conversations, LeftOut
from isobit.model.text.escape_special import ContentEncoder, Rule, encoding
from isobit.model.text.turns import turn_tokens

_MOST_TEMPLATE_BYTES = 1 << 24
_BYTE = re.compile("<0x[0-9A-Fa-f]{2}>")
_SPECIALS = ("<pad>", "<s>", "</s>")
_ID_LIMIT = 1 << 32  # what `tokenizers` takes for an id
_TEMPLATES = "additional_chat_templates"
_SHORT = 1 << 14  # characters, or tokens, that take no time worth speaking of
_PROBED = 16  # characters of a text for each token that it may have, by which its length is judged
Check = Callable[[str], None]
"""A function that raises for a text that is not to be encoded."""


@dataclass(frozen=True)
class TextRules:
    """The rules by which text from outside becomes tokens. `special_tokens_in_content`: what
    special tokens that the text spells become (`escape_special.py`). `now`: the time that a
    template's `strftime_now` writes, None: when the tokenizer is read; a run keeps it, so that its
    prompts are the same on another day. `chat_template`: a file, in place of the model's own
    template; `chat_template_kwargs`: variables of the template, for conversations that do not have
    their own."""

    special_tokens_in_content: Rule = "escape"
    now: datetime | None = None
    chat_template: str | Path | None = None
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)


DEFAULT_RULES = TextRules()


class Tokenizer:
    """A fast tokenizer with its special tokens and chat template."""

    def __init__(
        self,
        fast: FastTokenizer,
        settings: Mapping[str, Any],
        eos_ids: Sequence[int],
        template: str | None,
        rules: TextRules = DEFAULT_RULES,
    ) -> None:
        self.fast = fast
        self.settings = dict(settings)
        self.eos_ids = tuple(eos_ids)
        self.chat_template = template
        self.other_templates: dict[str, str] = {}
        """Templates by name that are saved next to the one that is used, such as `tool_use`."""
        self.ends: str | None = None
        """What ends a completion, in words, where files of the model do not agree."""
        self.special_tokens_in_content: Rule = rules.special_tokens_in_content
        self.template_kwargs = dict(rules.chat_template_kwargs)
        self.now = rules.now or datetime.now()
        fast.no_truncation()
        fast.no_padding()
        self._contents: tuple[str | None, ContentEncoder] | None = None
        self._conversations: tuple[str, Conversations] | None = None
        self._special = {
            i: token.content
            for i, token in fast.get_added_tokens_decoder().items()
            if token.special
        }
        if rules.chat_template is not None:
            self._use_template(rules.chat_template)

    @staticmethod
    def load(directory: str | Path, rules: TextRules = DEFAULT_RULES) -> "Tokenizer":
        """Read a tokenizer from a Hugging Face directory. Raises IsobitError if a file, or a
        template of the `rules`, is missing or malformed."""
        directory = Path(directory)
        path = directory / "tokenizer.json"
        if not exists(path):
            raise IsobitError(
                f"{directory}: tokenizer.json is missing; save the model with a fast tokenizer"
            )
        text = read_text(path)
        with _of_tokenizers(f"{path}: not a tokenizer that can be read"):
            fast = FastTokenizer.from_str(text)
            vocabulary = fast.get_vocab(with_added_tokens=True)
            if not vocabulary:
                raise IsobitError(
                    f"{path}: not a tokenizer that can be read: its vocabulary is empty"
                )
            _check_ids(vocabulary, path)
        settings = read_settings(directory)
        with _of_tokenizers(f"{directory}: its added tokens cannot be read"):
            add_tokens(fast, settings, directory)
        eos, ends = _eos_ids(directory, fast, settings)
        templates = _templates(directory, settings)
        default = next((name for name in ("default", *templates) if name in templates), None)
        template = None if default is None else templates.pop(default)
        tokenizer = Tokenizer(fast, settings, eos, template, rules)
        tokenizer.ends, tokenizer.other_templates = ends, templates
        return tokenizer

    @staticmethod
    def characters(alphabet: str, rules: TextRules = DEFAULT_RULES) -> "Tokenizer":
        """Make a tokenizer with one token per character of `alphabet`, after <pad>, <s> and </s>;
        it adds nothing to a text."""
        symbols = sorted(set(alphabet))
        vocabulary = {symbol: i for i, symbol in enumerate([*_SPECIALS, *symbols])}
        fast = FastTokenizer(
            models.WordLevel(vocabulary, unk_token="<unk>")
        )  # which is none: see `encode`
        fast.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        fast.decoder = decoders.Fuse()
        fast.add_special_tokens(
            [AddedToken(token, special=True, normalized=False) for token in _SPECIALS]
        )
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "pad_token": "<pad>",
            "bos_token": "<s>",
            "eos_token": "</s>",
            "clean_up_tokenization_spaces": False,
        }
        return Tokenizer(fast, settings, [vocabulary["</s>"]], None, rules)

    @property
    def vocab_size(self) -> int:
        """The largest token id plus one."""
        return max(self.fast.get_vocab(with_added_tokens=True).values()) + 1

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """Return the token ids of a text; with `add_special`, the post-processor adds its tokens
        (such as a start token).

        Raises IsobitError for text that the vocabulary cannot write.
        """
        with _of_tokenizers(f"the tokenizer cannot encode {text[:80]!r}"):
            return encoding(self.fast, text, add_special).ids

    def encode_text(
        self, text: str, add_special: bool = True, check: Check = lambda text: None
    ) -> list[int]:
        """Encode text from outside, as `encode` does: special tokens that it spells are text,
        unless `special_tokens_in_content` says otherwise (`escape_special.py`). `check` is called
        with the text before it is encoded, and what it raises is raised."""
        check(text)
        with _of_tokenizers(f"the tokenizer cannot encode {text[:80]!r}"):
            return self._content().text(text, self.special_tokens_in_content, add_special)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
        check: Check = lambda text: None,
        continues: bool = True,
    ) -> list[int]:
        """Return the token ids of the text of `render_chat`, in which the special tokens are the
        template's, as in `encode_text`; `check` is called with the rendered text before it is
        encoded. Raises IsobitError as that does, and LeftOut for what the template leaves out."""
        messages, left_out = self._written(messages, add_generation_prompt, variables)
        if left_out is not None:
            raise LeftOut(left_out)

        def render(values: Sequence[Mapping[str, Any]]) -> str:
            chat_args = values, None
            if variables is not None:
                chat_args = values[0]["messages"], values[0]["variables"]
            text = self._rendered(chat_args[0], add_generation_prompt, chat_args[1], continues)
            check(text)
            return text

        # what others wrote is in both
        written = (
            messages if variables is None else [{"messages": messages, "variables": variables}]
        )
        with _of_tokenizers("the tokenizer cannot encode a chat"):
            return self._content().chat(written, self.special_tokens_in_content, render)

    def surely_longer(self, text: str, count: int) -> bool:
        """Return whether a text has more than `count` tokens, as far as its length and its
        beginning alone show: the part that is encoded for this is bounded by `count`."""
        beginning = text[: _PROBED * count]
        if len(text) <= max(len(beginning), _SHORT):
            return False
        if len(text) > self._longest_token * count:
            return True
        with _of_tokenizers(f"the tokenizer cannot encode {text[:80]!r}"):
            return len(encoding(self.fast, beginning)) > 2 * count

    @cached_property
    def _longest_token(self) -> int:
        return max(map(len, self.fast.get_vocab(with_added_tokens=True)))

    def _content(self) -> ContentEncoder:
        """Return the encoder of text from outside under the present template."""
        if self._contents is None or self._contents[0] != self.chat_template:
            added = self.fast.get_added_tokens_decoder().values()
            turns = () if self.chat_template is None else turn_tokens(added, self._render)
            self._contents = self.chat_template, ContentEncoder(self.fast, turns)
        return self._contents[1]

    def special_tokens_in(self, prompt: str | Sequence[Any]) -> list[str]:
        """Return the special tokens that a text or the messages of a chat spell."""
        return self._content().spelled(prompt)

    def is_byte(self, token: int) -> bool:
        """Return whether a token is named as a byte (`<0xE2>`): such tokens next to one another are
        decoded together."""
        return _BYTE.fullmatch(self.fast.id_to_token(token) or "") is not None

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """Return the text of token ids without special tokens, or with them where `special` is
        true."""
        with _of_tokenizers("the tokenizer cannot decode its tokens"):
            if len(ids) <= _SHORT:
                return self.fast.decode(list(ids), skip_special_tokens=not special)
            # which lets other threads run meanwhile
            (text,) = self.fast.decode_batch([list(ids)], skip_special_tokens=not special)
            return text

    def decode_completion(
        self, prompt: Sequence[int], completion: Sequence[int], *, special: bool = False
    ) -> str:
        """Return the text that `completion` adds to `prompt`: decoders may treat the first token of
        a text differently."""
        whole = self.decode([*prompt, *completion], special=special)
        prompt_text = self.decode(prompt, special=special)
        return (
            whole[len(prompt_text) :]
            if whole.startswith(prompt_text)
            else self.decode(completion, special=special)
        )

    def is_special(self, token: int) -> bool:
        """Return whether a token is left out of the text that `decode` writes."""
        return token in self._special

    def spells_special(self, text: str) -> bool:
        """Return whether a text contains the name of a token that `decode` leaves out."""
        return any(name in text for name in self._special.values())

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
        continues: bool = True,
    ) -> str:
        """Return the conversation as the template writes it, with the start of the assistant's turn
        if `add_generation_prompt`. Where the last message is the assistant's and `continues`, it is
        the start of the turn: the text ends with it, to be continued. `variables` are given to the
        template in addition to its own, such as `tools`; the first message may have some as well,
        under `chat_template_kwargs`. Raises IsobitError without a template, and for what the
        template refuses."""
        messages, _ = self._written(messages, add_generation_prompt, variables)
        return self._rendered(messages, add_generation_prompt, variables, continues)

    def _written(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        variables: Mapping[str, Any] | None,
    ) -> tuple[Sequence[Mapping[str, Any]], str | None]:
        conversations = self.conversations
        if conversations is None or not messages:
            return messages, None
        return conversations.written(messages, add_generation_prompt, variables or {})

    @property
    def conversations(self) -> Conversations | None:
        """The writer of conversations for the present template; None without one."""
        template = self.chat_template
        if template is not None and (self._conversations or ("",))[0] != template:
            self._conversations = template, Conversations(self._render, template)
        return self._conversations[1] if template is not None and self._conversations else None

    def _rendered(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        variables: Mapping[str, Any] | None,
        continues: bool,
    ) -> str:
        last = messages[-1] if messages else {}
        if add_generation_prompt and continues and last.get("role") == "assistant":
            return chat.continued(
                messages, lambda conversation: self._render(conversation, False, variables)
            )
        return self._render(messages, add_generation_prompt, variables)

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        more: Mapping[str, Any] | None = None,
    ) -> str:
        if self.chat_template is None:
            raise IsobitError(
                "the prompt is a chat, but the model has no chat template; give text prompts, or a "
                "template with model.chat_template (--chat-template)"
            )
        own_kwargs = messages[0].get(TEMPLATE_KWARGS, {}) if messages else {}
        if own_kwargs:
            first = {key: value for key, value in messages[0].items() if key != TEMPLATE_KWARGS}
            messages = [first, *messages[1:]]
        variables = {
            "tools": None,
            "documents": None,
            **self.template_kwargs,
            **own_kwargs,
            **(more or {}),
            "messages": list(messages),
            "add_generation_prompt": add_generation_prompt,
        }
        return chat.render(self.chat_template, variables | named_tokens(self.settings), self.now)

    def _use_template(self, path: str | Path) -> None:
        """Use the chat template of a file; `save` writes it. Raises IsobitError if it cannot be
        read or parsed."""
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
        """Return the component in which another tokenizer would write or end texts differently;
        None if both agree."""
        if self.fast.to_str() != other.fast.to_str():
            return "tokenizer"
        if set(self.eos_ids) != set(other.eos_ids):
            return "end-of-sequence ids"
        return "chat template" if self.chat_template != other.chat_template else None

    def save(self, directory: str | Path) -> None:
        """Write tokenizer.json, tokenizer_config.json and the chat templates."""
        directory = Path(directory)
        # not `save`, whose error on a full disk is not an OSError
        (directory / "tokenizer.json").write_text(self.fast.to_str(pretty=True), encoding="utf-8")
        template, settings = self.chat_template, dict(self.settings)
        if self.other_templates or template != settings.get(
            "chat_template"
        ):  # else it stays where it was
            settings.pop("chat_template", None)
            if template is not None:
                (directory / "chat_template.jinja").write_text(template, encoding="utf-8")
        write_json(directory / "tokenizer_config.json", settings)
        for name, text in self.other_templates.items():
            (directory / _TEMPLATES).mkdir(exist_ok=True)
            (directory / _TEMPLATES / f"{name}.jinja").write_text(text, encoding="utf-8")


@contextmanager
def _of_tokenizers(what: str) -> Iterator[None]:
    """Turn what the library raises into an IsobitError: an Exception, or, where its Rust code
    panics, an exception that is not an Exception."""
    try:
        yield
    except IsobitError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise IsobitError(f"{what}: {' '.join(str(error).split())[:200]}") from None


def _check_ids(vocabulary: Mapping[str, int], path: Path) -> None:
    """Raise IsobitError where two tokens have one id: only one of them could be written again."""
    if len(set(vocabulary.values())) == len(vocabulary):
        return
    seen = dict[int, str]()
    for token, number in sorted(vocabulary.items()):
        if number in seen:
            raise IsobitError(
                f"{path}: tokens {brief(seen[number])!r} and {brief(token)!r} both have the id "
                f"{number}; each needs one of its own"
            )
        seen[number] = token


def _eos_ids(
    directory: Path, fast: FastTokenizer, settings: Mapping[str, Any]
) -> tuple[tuple[int, ...], str | None]:
    """Return the end-of-sequence ids, those of the model first; and a text that says what they are,
    where the tokenizer's is another."""
    ids: tuple[int, ...] = ()
    path = directory
    for name in ("generation_config.json", "config.json"):
        path = directory / name
        try:
            ids = token_ids(read_json(path).get("eos_token_id") if exists(path) else None)
            if outside := [token for token in ids if not 0 <= token < _ID_LIMIT]:
                raise ValueError(f"{outside[0]} is not a token id")
        except ValueError as error:
            raise IsobitError(f"{path}: eos_token_id: {error}") from None
        if ids:
            break
    token = fast.token_to_id(token_text(settings.get("eos_token")))
    if token is None or token in ids:
        return ids, None
    if not ids:
        return (token,), None
    ours, theirs = (" or ".join(_said(fast, t) for t in ids), _said(fast, token))
    return (
        (*ids, token),
        f"{directory}: a completion ends with {ours} of {path.name}, or {theirs} of the tokenizer",
    )


def _said(fast: FastTokenizer, token: int) -> str:
    return f"{fast.id_to_token(token)} (id {token})"


def _is_named(entry: Any) -> bool:
    return (
        isinstance(entry, dict)
        and isinstance(entry.get("name"), str)
        and isinstance(entry.get("template"), str)
    )


def _templates(directory: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the chat templates by name. Those in files take the place of those in
    tokenizer_config.json."""
    path, folder = directory / "chat_template.jinja", directory / _TEMPLATES
    templates = {"default": read_text(path)} if exists(path) else {}
    for file in sorted(folder.glob("*.jinja")) if folder.is_dir() else ():
        templates[file.stem] = read_text(file)
    if templates:
        return templates
    setting = settings.get("chat_template")
    if isinstance(setting, str):
        return {"default": setting}
    entries = [entry for entry in setting if _is_named(entry)] if isinstance(setting, list) else []
    if setting and not entries:
        raise IsobitError(
            f"{directory / 'tokenizer_config.json'}: chat_template: expected text, or a list of "
            '{"name": text, "template": text}'
        )
    return {entry["name"]: entry["template"] for entry in entries if _is_file_name(entry["name"])}


def _is_file_name(name: str) -> bool:
    return Path(name).name == name and "\0" not in name and len(name.encode()) < 200
