"""`isobit generate`: text, several completions, JSON, prompts from standard input."""

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from isobit.data.turns import Call
from isobit.engine.engine import Engine
from isobit.engine.types import Sampling
from isobit.model import Model
from isobit.model.text.tool_formats.base import Reply, ToolFormat
from isobit.model.text.tool_formats.table import FORMATS
from tests.conftest import RunIsobit
from tests.models import ALPHABET, tiny_model

Generate = Callable[..., str]


@pytest.fixture
def generate(base_model: Path, monkeypatch: pytest.MonkeyPatch, run_isobit: RunIsobit) -> Generate:
    def call(*words: object, stdin: str = "") -> str:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode())))
        code, out, err = run_isobit("generate", base_model, *words)
        assert not code, err
        return out

    return call


def test_the_text_is_the_engines(generate: Generate, base_model: Path) -> None:
    sampling = Sampling(2, 6, 0.7, seed=5)
    expected = Engine(Model.load(base_model)).generate(["1+2=", "3"], sampling)
    options = ("-n", 2, "--max-new-tokens", 6, "--temperature", 0.7, "--seed", 5)
    found = generate("--prompt", "1+2=", "--prompt", "3", *options)
    lines = [
        f"[{i}.{j}] {p}{expected[i][j].text}" for i, p in enumerate(["1+2=", "3"]) for j in range(2)
    ]
    assert found.splitlines() == lines
    assert generate(*options, stdin="1+2=\n3\n") == found


def test_json_holds_tokens_and_their_logprobs(generate: Generate) -> None:
    rows = [
        json.loads(line)
        for line in generate(
            "--prompt", "1+", "--json", "-n", 3, "--max-new-tokens", 5
        ).splitlines()
    ]
    assert [row["sample_index"] for row in rows] == [0, 1, 2]
    for row in rows:
        assert len(row["token_ids"]) == len(row["logprobs"]) <= 5
        assert all(value <= 0 for value in row["logprobs"])
        assert row["finish_reason"] in ("stop", "length")


def test_greedy_ignores_the_seed_and_stop_strings_end_the_text(generate: Generate) -> None:
    greedy = ("--prompt", "12", "--temperature", 0, "--max-new-tokens", 8)
    text = generate(*greedy, "--seed", 1)
    assert text == generate(*greedy, "--seed", 2)
    stop = text.strip()[4]
    assert generate(*greedy, "--stop", stop).strip() == text.strip()[: text.strip().index(stop, 2)]


def test_a_chat_by_a_template_of_ones_own(generate: Generate, tmp_path: Path) -> None:
    (tmp_path / "mine.jinja").write_text("{{ messages[0].content }}=")
    words = ("--temperature", 0, "--max-new-tokens", 6)
    plain = generate("--prompt", "1+2=", *words)
    assert (
        "1+2="
        + generate("--prompt", "1+2", "--chat", "--chat-template", tmp_path / "mine.jinja", *words)
        == plain
    )


TOOL = '''
def shout(text: str) -> str:
    """Say it loudly.

    Args:
        text: What to say.
    """
    print("heard")
    return text + "!"
'''


def test_with_tools_a_conversation_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_isobit: RunIsobit
) -> None:
    """The parser is one for which every answer is a call; what runs it is a process of its own. The
    last turn's call is not carried out."""
    tiny_model(alphabet=ALPHABET, max_positions=128).save(tmp_path / "model")
    (tmp_path / "loud.py").write_text(TOOL)
    (tmp_path / "chat.jinja").write_text(
        "{% for m in messages %}{{ m.role[0] }}{{ m.content }}{% if m.role == 'assistant' %}"
        "{{ eos_token }}{% endif %}{% endfor %}{% if add_generation_prompt %}a{% endif %}"
    )
    calls = ToolFormat((), lambda pieces, tools: Reply("", (Call("shout", '{"text": "hi"}'),)))
    monkeypatch.setitem(FORMATS, "json", calls)  # type: ignore[misc]
    asked = (
        "generate",
        tmp_path / "model",
        "--prompt",
        "12",
        "--max-new-tokens",
        4,
        "--max-turns",
        2,
        "environment.parser=json",
    )
    files = ("--tools", f"{tmp_path / 'loud.py'}:shout", "--chat-template", tmp_path / "chat.jinja")
    call, answer = 'shout({"text": "hi"})', "[tool shout] hi!"
    code, text, error = run_isobit(*asked, *files)
    assert not code, error
    assert text.splitlines() == [call, answer, call]
    (row,) = map(json.loads, run_isobit(*asked, *files, "--json")[1].splitlines())
    assert row["episode"]["turns"] == 2
    assert len(row["completion_mask"]) == len(row["token_ids"])
    given = row["completion_mask"].count(False)
    assert 0 < given < len(row["token_ids"])


def test_tools_that_cannot_be_used_are_one_line(
    base_model: Path, run_isobit: RunIsobit, tmp_path: Path
) -> None:
    (tmp_path / "loud.py").write_text(TOOL)
    tool = ("--tools", f"{tmp_path / 'loud.py'}:shout")
    for words, message in (
        (tool, "the model has no chat template, so it has no turns"),
        (("--tools", f"{tmp_path / 'loud.py'}:whisper"), "no function 'whisper'"),
    ):
        code, _, error = run_isobit("generate", base_model, "--prompt", "1", *words)
        assert code
        assert message in error
        assert len(error.splitlines()) == 1
