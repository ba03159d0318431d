"""`isobit generate`: text, several completions, JSON, prompts from standard input."""

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from isobit.engine.engine import Engine
from isobit.engine.types import Sampling
from isobit.model import Model
from tests.conftest import RunIsobit

Generate = Callable[..., str]


@pytest.fixture
def generate(base_model: Path, monkeypatch: pytest.MonkeyPatch, run_isobit: RunIsobit) -> Generate:
    def call(*words: object, stdin: str = "") -> str:
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
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
