"""Conversations in the words of a template: arguments, thoughts and roles; what it leaves out."""

import json
from typing import Any

import pytest

from isobit.errors import IsobitError
from isobit.model import Tokenizer
from isobit.model.text.template_tools import check_calls
from tests.training.test_taught import tokenizer_of

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}CALLS<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
KNOWN = (  # of four roles, as Qwen's: another is not written
    "{% for m in messages %}{% if m.role in ('user', 'system', 'assistant', 'NAME') %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LOOP = "{% for c in m.tool_calls or [] %}[{{ c.function.name }}]WRITTEN{% endfor %}"
ARGUMENTS = {
    "tojson": "{{ c.function.arguments | tojson }}",  # Llama 3.1, gpt-oss
    "joined": "{{ '' + c.function.arguments }}",  # DeepSeek
    "printed": "{{ c.function.arguments }}",
    "either": (
        "{% if c.function.arguments is string %}{{ c.function.arguments }}{% else %}"
        "{{ c.function.arguments | tojson }}{% endif %}"
    ),  # Qwen3
    "text alone": "{% if c.function.arguments is string %}{{ c.function.arguments }}{% endif %}",
    "items": "{% for k, v in c.function.arguments | items %}{{ k }}={{ v }};{% endfor %}",
}


def with_calls(form: str) -> Tokenizer:
    template = CHATML.replace("CALLS", LOOP.replace("WRITTEN", ARGUMENTS[form]))
    return tokenizer_of(template, "<|im_end|>")


def history(arguments: Any) -> list[dict[str, Any]]:
    function = {"name": "add", "arguments": arguments}
    return [
        {"role": "user", "content": "q"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "c", "type": "function", "function": function}],
        },
        {"role": "tool", "name": "add", "tool_call_id": "c", "content": "7"},
    ]


@pytest.mark.parametrize("form", ARGUMENTS)
@pytest.mark.parametrize("arguments", [{"a": 3}, '{"a": 3}', '{ "a":3 }'])
def test_arguments_have_the_form_that_the_template_reads(form: str, arguments: Any) -> None:
    text = with_calls(form).render_chat(history(arguments))
    assert ("[add]a=3;" if form == "items" else '[add]{"a": 3}<') in text


@pytest.mark.parametrize("form", ARGUMENTS)
@pytest.mark.parametrize("arguments", ["", " ", None, {}, "{}"])
def test_no_arguments_are_an_empty_object(form: str, arguments: Any) -> None:
    text = with_calls(form).render_chat(history(arguments))
    assert ("[add]<" if form == "items" else "[add]{}<") in text


def test_arguments_that_are_no_object_stay_text() -> None:
    for form in ("joined", "printed", "either", "text alone"):
        assert '[add]{"a": <' in with_calls(form).render_chat(history('{"a": '))
    assert json.dumps('{"a": ') in with_calls("tojson").render_chat(history('{"a": '))
    with pytest.raises(IsobitError, match="refused a conversation"):
        with_calls("items").render_chat(history('{"a": '))


def roles(template: str, *names: str) -> str:
    tokenizer = tokenizer_of(template, "<|im_end|>")
    chat = [{"role": name, "content": f"by {name}"} for name in names]
    return tokenizer.decode(tokenizer.encode_chat(chat), special=True)


def test_a_role_has_the_name_that_the_template_writes_or_is_refused() -> None:
    known = KNOWN.replace("NAME", "observation")
    assert "<|im_start|>system\nby developer<" in roles(known, "developer", "user")
    assert "<|im_start|>observation\nby tool<" in roles(known, "user", "assistant", "tool")
    developer = KNOWN.replace("'system'", "'developer'")
    assert "<|im_start|>developer\nby system<" in roles(developer, "system", "user")
    for names in (("critic", "user"), ("user", "critic"), ("user", "assistant", "ipython")):
        with pytest.raises(
            IsobitError, match=r"leaves out what a message of role (critic|ipython)"
        ):
            roles(known, *names)
    plain = CHATML.replace("CALLS", "")  # the control: one that writes any role
    assert "<|im_start|>developer\nby developer<" in roles(plain, "developer", "user")
    assert "<|im_start|>critic\nby critic<" in roles(plain, "critic", "user")


def test_a_role_that_is_written_in_one_place_alone_is_refused_in_another() -> None:
    first = (
        "{% for m in messages %}{% if m.role != 'system' or loop.first %}{{ m.content }};"
        "{% endif %}{% endfor %}"
    )
    assert "by system;by user;" in roles(first, "system", "user")
    with pytest.raises(IsobitError, match=r"role system says \(messages\[1\]\)"):
        roles(first, "user", "system")


def test_thoughts_have_the_key_that_the_template_reads() -> None:
    for key in ("thinking", "reasoning", "reasoning_content"):
        for given in ("thinking", "reasoning", "reasoning_content"):
            template = CHATML.replace("CALLS", f"{{{{ m.{key} or '' }}}}")
            said = {"role": "assistant", "content": "So.", given: "THOUGHT"}
            chat = [{"role": "user", "content": "q"}, said, {"role": "user", "content": "r"}]
            assert "So.THOUGHT" in tokenizer_of(template).render_chat(chat)


HARMONY = (  # gpt-oss, of what it writes of calls: one of text and thoughts
    "{% for m in messages %}{% if m.tool_calls %}{% if m.content and m.thinking %}"
    "{{ raise_exception('Cannot pass both content and thinking') }}{% endif %}"
    "<|start|>assistant<|channel|>analysis<|message|>{{ m.content or m.thinking }}<|end|>"
    "<|start|>assistant to=functions.{{ m.tool_calls[0].function.name }}<|message|>"
    "{{ m.tool_calls[0].function.arguments | tojson }}<|call|>"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("key", ["thinking", "reasoning", "reasoning_content"])
def test_thoughts_next_to_a_text_and_a_call_are_written(key: str) -> None:
    """The controls: either of them alone, and a template that has a place for both."""
    tokenizer, both = tokenizer_of(HARMONY, "<|call|>"), with_calls("tojson")
    chat = history({"a": 3})
    chat[1] |= {"content": "Let me look.", key: "It asks for a sum."}
    analysis = "<|channel|>analysis<|message|>"
    written = tokenizer.render_chat(chat, add_generation_prompt=False)
    assert f"{analysis}It asks for a sum.\nLet me look.<|end|>" in written
    assert 'functions.add<|message|>{"a": 3}<|call|>' in written
    assert "Let me look.[add]" in both.render_chat(chat)
    del chat[1][key]
    assert f"{analysis}Let me look.<|end|>" in tokenizer.render_chat(
        chat, add_generation_prompt=False
    )
    chat[1] |= {"content": "", key: "It asks for a sum."}
    assert f"{analysis}It asks for a sum.<|end|>" in tokenizer.render_chat(
        chat, add_generation_prompt=False
    )


def test_a_history_that_ends_with_a_call_is_not_cut() -> None:
    tokenizer = with_calls("either")
    for text in ("", "Let me look."):
        chat = history({})[:2]
        chat[1]["content"] = text
        with pytest.raises(IsobitError, match="ends with a call of a tool, which nothing answers"):
            tokenizer.encode_chat(chat)
    assert tokenizer.encode_chat(history({}))
    chat[1].pop("tool_calls")  # the control: text is continued
    assert tokenizer.render_chat(chat).endswith("Let me look.")


def test_a_call_that_the_template_leaves_out_is_found() -> None:
    check_calls(with_calls("either"), history({}))
    with pytest.raises(IsobitError, match="leaves out call 0 of a message"):
        check_calls(tokenizer_of(CHATML.replace("CALLS", ""), "<|im_end|>"), history({}))
    first = LOOP.replace("or []", "and m.tool_calls[:1] or []").replace("WRITTEN", "")
    chat = history({})
    chat[1]["tool_calls"] *= 2
    with pytest.raises(IsobitError, match="leaves out call 1 of a message"):
        check_calls(tokenizer_of(CHATML.replace("CALLS", first), "<|im_end|>"), chat)
