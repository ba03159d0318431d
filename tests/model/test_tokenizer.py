"""Encoding, decoding, special tokens and chat templates; `transformers` is the oracle."""

import json
import re
from datetime import datetime
from pathlib import Path

import pytest
import transformers
from tokenizers import Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer

from isobit.errors import IsobitError
from isobit.model import TextRules, Tokenizer
from tests.models import ALPHABET

_CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Is 1 < 2 & 'a' \"b\"?"},
    {"role": "assistant", "content": "Yes é."},
    {"role": "user", "content": "Why?"},
]
_TEMPLATES = {
    "chatml": (
        "{%- for message in messages %}\n    {{- '<|im_start|>' + message.role + '\\n' + "
        "message.content }}\n"
        "{%- endfor %}\n{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    ),
    "blocks": (
        "{{ bos_token }}{% for message in messages %}\n  {% if loop.first %}\n[first]{% "
        "continue %}\n  {% endif %}\n"
        "{{ message.content | trim }}{{ eos_token }}\n{% endfor %}"
    ),
    "tojson": "{{ messages | tojson }}{{ messages[0] | tojson(indent=2) }}",
    "tools": (
        "{% if tools is not none %}TOOLS{% endif %}{% if pad_token is defined %}PAD{% endif "
        "%}{{ messages | length }}"
    ),
    "generation": (
        "{% for message in messages %}{% generation %}{{ message.content }}{% endgeneration "
        "%}|{% endfor %}"
    ),
    "date": "{{ strftime_now('%Y') }} {{ messages[0]['content'] }}",
}


@pytest.fixture
def characters(tmp_path: Path) -> tuple[Tokenizer, Path]:
    tokenizer = Tokenizer.characters(ALPHABET)
    tokenizer.save(tmp_path)
    return tokenizer, tmp_path


def test_characters_round_trip() -> None:
    tokenizer = Tokenizer.characters("0123456789+= \n")
    assert tokenizer.vocab_size == 3 + 14
    ids = tokenizer.encode("12+34= 46\n")
    assert len(ids) == 10
    assert min(ids) >= 3
    assert tokenizer.decode([*ids, *tokenizer.eos_ids]) == "12+34= 46\n"
    assert tokenizer.fast.token_to_id("<pad>") == 0


def test_characters_outside_the_alphabet_are_refused() -> None:
    with pytest.raises(IsobitError, match=r"the tokenizer cannot encode '12\*3'"):
        Tokenizer.characters("0123456789").encode("12*3")


def test_characters_load_in_transformers(characters: tuple[Tokenizer, Path]) -> None:
    tokenizer, path = characters
    theirs = transformers.AutoTokenizer.from_pretrained(path)
    text = "the 3 cats, 14+2=16?"
    assert theirs(text)["input_ids"] == tokenizer.encode(text)
    assert theirs.decode(tokenizer.encode(text)) == text
    assert (theirs.eos_token_id, theirs.bos_token_id, theirs.pad_token_id) == (2, 1, 0)
    again = Tokenizer.load(path)
    assert again.encode(text) == tokenizer.encode(text)
    assert again.eos_ids == tokenizer.eos_ids == (2,)
    assert again.vocab_size == tokenizer.vocab_size


def test_stories_encode_and_decode_as_transformers(stories: Path) -> None:
    tokenizer, theirs = Tokenizer.load(stories), transformers.AutoTokenizer.from_pretrained(stories)
    text = 'Once upon a time, there was a little girl named Lily. She said: "Hello – ü!"\nThe end.'
    ids = tokenizer.encode(text)
    assert ids == theirs(text)["input_ids"]
    assert ids[0] == 1
    assert tokenizer.encode(text, add_special=False) == ids[1:]
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode([*ids, 2]) == theirs.decode([*ids, 2], skip_special_tokens=True)
    assert tokenizer.eos_ids == (2,)


def test_stories_completion_keeps_its_leading_space(stories: Path) -> None:
    tokenizer = Tokenizer.load(stories)
    whole = tokenizer.encode("Once upon a time")
    prompt = tokenizer.encode("Once")
    assert whole[: len(prompt)] == prompt
    assert tokenizer.decode_completion(prompt, whole[len(prompt) :]) == " upon a time"


def test_eos_ids_from_each_place(characters: tuple[Tokenizer, Path]) -> None:
    _, path = characters
    assert Tokenizer.load(path).eos_ids == (2,)  # tokenizer_config.json
    (path / "config.json").write_text('{"eos_token_id": 5}')
    assert Tokenizer.load(path).eos_ids == (5, 2)
    (path / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    assert Tokenizer.load(path).eos_ids == (7, 9, 2)
    ends = (
        "a completion ends with - (id 7) or 0 (id 9) of generation_config.json, or </s> (id "
        "2) of the tokenizer"
    )
    assert Tokenizer.load(path).ends == f"{path}: {ends}"
    (path / "generation_config.json").write_text('{"eos_token_id": [7, 2]}')
    assert (Tokenizer.load(path).eos_ids, Tokenizer.load(path).ends) == ((7, 2), None)
    (path / "generation_config.json").write_text('{"eos_token_id": ["</s>"]}')
    with pytest.raises(
        IsobitError, match=r"generation_config.json: eos_token_id: '</s>' is not a token id"
    ):
        Tokenizer.load(path)


@pytest.mark.parametrize("name", _TEMPLATES)
@pytest.mark.parametrize("place", ["file", "config", "named"])
def test_chat_templates_render_as_in_transformers(
    characters: tuple[Tokenizer, Path], name: str, place: str
) -> None:
    _, path = characters
    settings = json.loads((path / "tokenizer_config.json").read_text())
    del settings["pad_token"]
    if place == "file":
        (path / "chat_template.jinja").write_text(_TEMPLATES[name])
    elif place == "config":
        settings["chat_template"] = _TEMPLATES[name]
    else:
        named = {"rag": "never", "default": _TEMPLATES[name]}
        settings["chat_template"] = [{"name": k, "template": v} for k, v in named.items()]
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    theirs = transformers.AutoTokenizer.from_pretrained(path)
    wanted = theirs.apply_chat_template(_CHAT, tokenize=False, add_generation_prompt=True)
    tokenizer = Tokenizer.load(path)
    assert tokenizer.render_chat(_CHAT) == wanted
    out = path / "again"
    out.mkdir()
    tokenizer.save(out)
    assert Tokenizer.load(out).render_chat(_CHAT) == wanted


@pytest.mark.parametrize("place", ["files", "config"])
def test_named_templates_stay(characters: tuple[Tokenizer, Path], place: str) -> None:
    """Also for transformers, also where the default one is changed, and where there is none of that
    name."""
    _, path = characters
    named = {"default": "plain", "tool_use": "tools", "rag": "found"}
    if place == "files":
        (path / "chat_template.jinja").write_text(named["default"])
        (path / "additional_chat_templates").mkdir()
        for name in ("tool_use", "rag"):
            (path / "additional_chat_templates" / f"{name}.jinja").write_text(named[name])
    else:
        settings = json.loads((path / "tokenizer_config.json").read_text())
        listed = [{"name": name, "template": text} for name, text in named.items()]
        (path / "tokenizer_config.json").write_text(
            json.dumps(settings | {"chat_template": listed})
        )
    tokenizer, (out, changed) = Tokenizer.load(path), (path / "again", path / "changed")
    assert transformers.AutoTokenizer.from_pretrained(path).chat_template == named
    out.mkdir()
    tokenizer.save(out)
    assert transformers.AutoTokenizer.from_pretrained(out).chat_template == named
    assert Tokenizer.load(out).chat_template == "plain"
    (path / "own.jinja").write_text("own")
    tokenizer = Tokenizer.load(path, TextRules(chat_template=path / "own.jinja"))
    changed.mkdir()
    tokenizer.save(changed)
    assert transformers.AutoTokenizer.from_pretrained(changed).chat_template == named | {
        "default": "own"
    }


def test_a_template_s_name_is_no_path(characters: tuple[Tokenizer, Path]) -> None:
    _, path = characters
    settings = json.loads((path / "tokenizer_config.json").read_text())
    listed = [
        {"name": "default", "template": "a"},
        {"name": "../evil", "template": "b"},
        {"name": 3},
        4,
    ]
    (path / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": listed}))
    tokenizer, out = Tokenizer.load(path), path / "inside" / "again"
    out.mkdir(parents=True)
    tokenizer.save(out)
    assert (tokenizer.chat_template, tokenizer.other_templates) == ("a", {})
    assert not [*path.rglob("evil*")]


_ENDED = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.mark.parametrize(
    "template",
    [
        _ENDED,
        _ENDED.replace("m.content", "m.content | trim"),
        _ENDED.replace("{{ eos_token }}", "{{ '.' }}"),
        "{% for m in messages %}{{ m.content.split('</think>')[-1] }}{{ eos_token }}{% endfor %}",
    ],
)
@pytest.mark.parametrize(
    "text", ["Let me think.\n<think>", "So ", "", "  both \n", "é😀", "CONTINUE_FINAL_MESSAGE_TAG "]
)
def test_a_begun_answer_is_continued_as_by_transformers(
    characters: tuple[Tokenizer, Path], template: str, text: str
) -> None:
    _, path = characters
    (path / "chat_template.jinja").write_text(template)
    chat = [*_CHAT[:2], {"role": "assistant", "content": text}]
    theirs = transformers.AutoTokenizer.from_pretrained(path)
    tokenizer = Tokenizer.load(path)
    wanted = theirs.apply_chat_template(chat, tokenize=False, continue_final_message=True)
    assert tokenizer.render_chat(chat) == wanted
    assert wanted != theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert tokenizer.render_chat(chat, False) == theirs.apply_chat_template(
        chat, tokenize=False
    )  # which is whole


@pytest.mark.parametrize(
    "blocks", [[{"type": "text", "text": "Well"}], [{"text": "a"}, {"type": "text", "text": "b"}]]
)
def test_a_begun_answer_in_blocks(
    characters: tuple[Tokenizer, Path], blocks: list[dict[str, str]]
) -> None:
    _, path = characters
    (path / "chat_template.jinja").write_text(
        "{% for m in messages %}{% for part in m.content %}{{ part.text }}{% endfor %}{{ "
        "eos_token }}{% endfor %}"
    )
    chat = [{"role": "assistant", "content": blocks}]
    theirs = transformers.AutoTokenizer.from_pretrained(path)
    wanted = theirs.apply_chat_template(chat, tokenize=False, continue_final_message=True)
    assert Tokenizer.load(path).render_chat(chat) == wanted


@pytest.mark.parametrize(
    ("template", "content", "message"),
    [
        (_ENDED.replace("m.content", "m.content[:3]"), "a long text", "does not write as it is"),
        (
            _ENDED.replace("m.content", "m.content | upper"),
            "a long text",
            "does not write as it is",
        ),
        (_ENDED, None, "without text, and so with nothing to continue"),
        (_ENDED, [], "without text, and so with nothing to continue"),
    ],
)
def test_what_cannot_be_continued_is_refused(template: str, content: object, message: str) -> None:
    tokenizer = Tokenizer.characters(ALPHABET)
    tokenizer.chat_template = template
    with pytest.raises(IsobitError, match=message):
        tokenizer.render_chat([{"role": "assistant", "content": content}])


def test_a_tokenizer_has_one_date() -> None:
    tokenizer = Tokenizer.characters(ALPHABET)
    tokenizer.chat_template = "{{ strftime_now('%d %b %Y, %H:%M:%S.%f') }}"
    assert tokenizer.render_chat(_CHAT) == tokenizer.render_chat(_CHAT)
    tokenizer.now = datetime(2024, 2, 29, 23, 59, 58, 7)
    assert tokenizer.render_chat(_CHAT) == "29 Feb 2024, 23:59:58.000007"


def test_a_changed_template_is_the_one_that_is_saved(characters: tuple[Tokenizer, Path]) -> None:
    _, path = characters
    settings = json.loads((path / "tokenizer_config.json").read_text()) | {"chat_template": "old"}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    (path / "chat_template.jinja").write_text("new")
    out = path / "again"
    out.mkdir()
    Tokenizer.load(path).save(out)
    assert Tokenizer.load(out).render_chat(_CHAT) == "new"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "the model has no chat template; give text prompts"),
        (
            "{{ raise_exception('roles must alternate') }}",
            "refused a conversation: roles must alternate",
        ),
        ("{{ messages[0].content + 1 }}", "refused a conversation"),
        ("{{ messages[9].content.x }}", "refused a conversation"),
        ("{% for %}", "cannot be parsed"),
        ("{{ messages.append(1) }}", "refused a conversation"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "refused a conversation.*unsafe"),
    ],
)
def test_refused_chats(template: str | None, message: str) -> None:
    tokenizer = Tokenizer.characters(ALPHABET)
    tokenizer.chat_template = template
    with pytest.raises(IsobitError, match=message):
        tokenizer.render_chat(_CHAT)


def test_chat_tokens_are_those_of_the_rendered_text(characters: tuple[Tokenizer, Path]) -> None:
    tokenizer, _ = characters
    tokenizer.chat_template = "<s>{{ messages[0].content }}</s>"
    rendered = tokenizer.render_chat([{"role": "user", "content": "hi"}])
    assert tokenizer.encode(rendered, add_special=False) == [1, *tokenizer.encode("hi"), 2]


@pytest.mark.parametrize("content", [None, "", "{", '{"version": "1.0"}'])
def test_missing_or_damaged_tokenizer(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(IsobitError, match=re.escape(str(tmp_path)) + ".*tokenizer") as caught:
        Tokenizer.load(tmp_path)
    assert "\n" not in str(caught.value)


def test_damaged_template_file(characters: tuple[Tokenizer, Path]) -> None:
    _, path = characters
    (path / "chat_template.jinja").write_bytes(b"\xff\xfe{{")
    with pytest.raises(IsobitError, match=r"chat_template.jinja: cannot be read"):
        Tokenizer.load(path)


def test_truncation_and_padding_of_a_saved_tokenizer_are_off(tmp_path: Path) -> None:
    fast = FastTokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    fast.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    fast.decoder = decoders.Fuse()
    fast.enable_truncation(3)
    fast.enable_padding(length=8)
    fast.save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer.load(tmp_path).encode("abababab") == [0, 1] * 4
    assert Tokenizer.load(tmp_path).eos_ids == ()
