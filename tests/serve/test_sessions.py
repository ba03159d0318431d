"""Turns of a conversation: what is kept, what goes on from it, and where a template makes that
impossible."""

from typing import Any

import pytest

from isobit.errors import IsobitError
from isobit.model.text.tokenizer import Tokenizer
from isobit.serve import sessions
from isobit.serve.chat import messages_of
from isobit.serve.sessions import Sessions, Turn, goes_on, spliced

from .helpers import ALPHABET, TEMPLATE

ASKED = messages_of([{"role": "user", "content": "go"}])
ANSWER = messages_of([{"role": "assistant", "content": "gone"}])
MORE = messages_of([{"role": "user", "content": "more"}])


def tokenizer(template: str = TEMPLATE) -> Tokenizer:
    found = Tokenizer.characters(ALPHABET)
    found.chat_template = template
    return found


def turn(answer: str = "gone</s>", message: Any = ANSWER[0]) -> Turn:
    known = tokenizer()
    prompt = known.encode_chat(ASKED, True, {})
    return Turn(tuple(ASKED), {}, tuple(prompt), tuple(known.encode(answer)), message)


@pytest.mark.parametrize("answer", ["gone</s>", "gone"])
def test_the_rest_is_what_the_template_writes_behind_the_answer(answer: str) -> None:
    """An answer without its end gets one. The control has been sampled otherwise than its text is
    encoded."""
    known, messages = tokenizer(), [*ASKED, *ANSWER, *MORE]
    whole = known.encode_chat(messages, True, {})
    assert spliced(known, turn(answer), messages, {}) == whole
    other = spliced(known, turn("g<pad>one</s>"), messages, {})
    assert other != whole
    assert known.decode(other) == known.decode(whole)


def test_a_template_that_writes_earlier_answers_otherwise_keeps_the_tokens() -> None:
    """As one that leaves out thoughts; the rest is the same."""
    shortened = TEMPLATE.replace(
        "{{ m.content }}", "{{ m.content if loop.last else m.content[-2:] }}"
    )
    known, messages = tokenizer(shortened), [*ASKED, *ANSWER, *MORE]
    found = spliced(known, turn(), messages, {})
    assert known.decode(found, special=True).endswith(
        "assistant\ngone</s>\n<s>user\nmore</s>\n<s>assistant\n"
    )
    assert found != known.encode_chat(messages, True, {})


def test_a_template_without_ends_is_said() -> None:
    with pytest.raises(
        IsobitError, match=r"does not end an answer with .*\(</s>\).*leave X-Session-ID out"
    ):
        spliced(tokenizer(TEMPLATE.replace("</s>", ".")), turn(), [*ASKED, *ANSWER, *MORE], {})


def test_what_goes_on() -> None:
    assert goes_on(turn(), [*ASKED, *ANSWER, *MORE], {})
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    called = messages_of([{"role": "assistant", "content": None, "tool_calls": calls}])
    again = messages_of(
        [
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{**calls[0], "id": "2"}],
                "refusal": None,
            }
        ]
    )
    assert goes_on(turn("x", called[0]), [*ASKED, *again, *MORE], {})
    for messages, variables in (
        ([*ASKED, *ANSWER], {}),
        ([*MORE, *ANSWER, *MORE], {}),
        ([*ASKED, *MORE, *MORE], {}),
        ([*ASKED, *called, *MORE], {}),
        ([*ASKED, *ANSWER, *MORE], {"tools": []}),
    ):
        assert not goes_on(turn(), messages, variables)
    assert not goes_on(None, [*ASKED, *ANSWER, *MORE], {})


def test_sessions_that_were_not_used_for_long_are_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept, one = Sessions(), turn()
    monkeypatch.setattr(sessions, "MOST_SESSIONS", 3)
    for name in ("a", "b", "c", "a", "d"):
        kept.keep("t", name, one)
    assert [kept.find("t", name) is not None for name in "abcd"] == [True, False, True, True]
    assert kept.find("u", "a") is None
    monkeypatch.setattr(sessions, "MOST_TOKENS", 2 * one.num_tokens)
    kept.keep("t", "e", one)
    assert [kept.find("t", name) is not None for name in "acde"] == [False, False, True, True]
