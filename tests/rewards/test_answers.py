"""What reward functions are given of a completion with thoughts: all of it, and by the name
`completion_answers` what it says behind them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from isobit.data.answers import ANSWERS, after_thoughts
from isobit.data.dataset import RESERVED_COLUMNS, Example
from isobit.data.episodes import EpisodeRecord
from isobit.engine.dialogue import with_answers
from isobit.engine.types import Completion, Sampling
from isobit.evaluation import measure
from isobit.model import Tokenizer
from isobit.tasks.rewards.pool import RewardPool
from isobit.tasks.rewards.spec import RewardSpec
from isobit.training.scoring import RewardScorer
from tests.training.test_taught import tokenizer_of

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
)
THOUGHT = "<think>7 or 8? 8.</think>\n\n8"
FUNCTIONS = """
def whole(completions, **columns):
    return [float(c.count("8")) for c in completions]

def answers(completions, completion_answers, **columns):
    return [float(a.count("8")) for a in completion_answers]

def without(completions, **columns):
    assert "completion_answers" not in columns
    return [0.0 for _ in completions]
"""


def completion(tokenizer: Tokenizer, text: str, prompt: str = "q", **more: Any) -> Completion:
    ids, asked = (tokenizer.fast.encode(t, add_special_tokens=False).ids for t in (text, prompt))
    logprobs = [0.0] * len(ids)
    return Completion(0, 0, asked, ids, tokenizer.decode(ids), logprobs, "stop", 0, **more)


def rewards(folder: Path, given: Completion, tokenizer: Tokenizer, *specs: RewardSpec) -> list[Any]:
    """The rewards of one completion by these functions, as a run scores it."""
    example = Example(0, "q", {"answer": "8"})
    with RewardPool(list(specs)) as pool:
        scorer = RewardScorer(pool, [], stop_on_error=True, tokenizer=tokenizer)
        scoring = scorer.begin([example], 1, {"global_step": 0, "max_steps": 1, "epoch": 0})
        scoring.add(0, [given])
        (reward,) = scoring.collect()
    return [reward.by_function[spec.label] for spec in specs]


@pytest.mark.parametrize("special", [(), ("<think>", "</think>")])
def test_the_answer_is_given_by_name(tmp_path: Path, special: tuple[str, ...]) -> None:
    """Where the marks are special tokens, no text has them. The controls: a function that does not
    ask gets all that it got, and built-in matches compare the answer, as of a completion without
    thoughts."""
    (tmp_path / "own.py").write_text(FUNCTIONS)
    tokenizer = tokenizer_of(TEMPLATE, "<|im_end|>", special=special)
    own = [RewardSpec(f"{tmp_path / 'own.py'}:{n}") for n in ("whole", "answers", "without")]
    specs = [*own, RewardSpec("exact_match")]
    thought = completion(tokenizer, THOUGHT)
    assert rewards(tmp_path, thought, tokenizer, *specs) == [3.0, 1.0, 0.0, 1.0]
    assert rewards(tmp_path, completion(tokenizer, "8"), tokenizer, *specs) == [1, 1, 0, 1]
    begun = completion(tokenizer, THOUGHT.removeprefix("<think>"), "q<think>\n")
    assert rewards(tmp_path, begun, tokenizer, *specs) == [3.0, 1.0, 0.0, 1.0]
    endless = completion(tokenizer, "<think>8")
    assert rewards(tmp_path, endless, tokenizer, *specs) == [1.0, 0.0, 0.0, 0.0]


def test_the_answer_of_an_episode_is_its_last_turn() -> None:
    tokenizer = tokenizer_of(TEMPLATE, "<|im_end|>")
    messages = (
        {"role": "assistant", "content": "", "tool_calls": [{}], "reasoning_content": "Hm."},
        {"role": "tool", "content": "8"},
        {"role": "assistant", "content": "It is 8.", "reasoning_content": "So."},
    )
    given = completion(tokenizer, "It is 8.", episode=EpisodeRecord(2, messages))
    called = replace(given, episode=EpisodeRecord(1, messages[:1]))
    (row, other) = with_answers([{"a": 1}, {}], [given, called], tokenizer)
    assert (row, other) == ({"a": 1, ANSWERS: "It is 8."}, {ANSWERS: ""})


@pytest.mark.parametrize(("name", "reads"), [("whole", False), ("answers", True)])
def test_an_evaluation_reads_answers_only_for_a_function_that_takes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, reads: bool
) -> None:
    """Of a pool whose workers have not started, too; the control is such a function."""
    (tmp_path / "own.py").write_text(FUNCTIONS)
    tokenizer = tokenizer_of(TEMPLATE, "<|im_end|>")
    calls = list[object]()

    def reading(*arguments: Any) -> list[Any]:
        calls.append(arguments)
        return with_answers(*arguments)

    monkeypatch.setattr(measure, "with_answers", reading)
    examples, answers = [Example(0, "q", {})], [completion(tokenizer, THOUGHT)]
    plan = measure.EvaluationPlan(Sampling())
    with RewardPool([RewardSpec(f"{tmp_path / 'own.py'}:{name}")]) as pool:
        (graded,) = measure._grade(examples, answers, pool, plan, tokenizer)
    assert graded.reward == (1.0 if reads else 3.0)
    assert bool(calls) == reads


def test_texts_of_a_column_and_the_name() -> None:
    assert after_thoughts(THOUGHT) == "8"
    assert after_thoughts("8") == "8"
    assert ANSWERS in RESERVED_COLUMNS
