"""`isobit eval` against counting by hand."""

import json
import sys
from pathlib import Path

import pytest

from isobit import cli
from isobit.engine import Engine, Sampling
from isobit.evaluate import evaluate_greedy, evaluate_samples, score_completions
from isobit.intervals import pass_at_k
from isobit.model import Model
from isobit.tasks import RewardSpec, TaskSettings, load_task
from isobit.tasks.rewards import RewardPool
from tests.runs import digit_reward_file

SETTINGS = TaskSettings("arithmetic", held_out_size=12, options={"digits": 1})


@pytest.fixture
def threes(tmp_path: Path) -> RewardSpec:
    """A reward that a random model earns now and then."""
    path = tmp_path / "threes.py"
    path.write_text("def f(prompts, completions, **k):\n    return [float('3' in c) for c in completions]\n")
    return RewardSpec(f"{path}:f")


def test_greedy_accuracy_is_the_fraction_of_greedy_completions(base_model: Path, threes: RewardSpec) -> None:
    model, examples = Model.load(base_model), list(load_task(SETTINGS).held_out.examples)
    engine = Engine(model)
    texts = [g[0].text for g in engine.generate([e.prompt for e in examples], Sampling(1, 6, 0.0))]
    with RewardPool([threes]) as pool:
        found = evaluate_greedy(engine, examples, pool, Sampling(4, 6, 1.0, seed=3))
    assert [row["completion"] for row in found.rows] == texts
    assert found.accuracy.value == sum("3" in text for text in texts) / len(texts)
    assert found.mean_reward == found.accuracy.value


def test_pass_at_k_is_the_unbiased_estimate(base_model: Path, threes: RewardSpec) -> None:
    examples = list(load_task(SETTINGS).held_out.examples)
    engine, sampling = Engine(Model.load(base_model)), Sampling(6, 3, 1.0, seed=1)
    groups = engine.generate([e.prompt for e in examples], sampling)
    right = [sum("3" in c.text for c in group) for group in groups]
    assert 0 < sum(right) < 6 * len(examples)
    with RewardPool([threes]) as pool:
        passes, rows = evaluate_samples(engine, examples, pool, sampling, [1, 4])
    assert len(rows) == 6 * len(examples)
    for k in (1, 4):
        assert passes[k].value == pytest.approx(sum(pass_at_k(6, c, k) for c in right) / len(right))
        assert passes[k].low <= passes[k].value <= passes[k].high
    assert passes[1].value < passes[4].value


def test_an_unscored_completion_is_wrong_and_outside_the_mean(tmp_path: Path) -> None:
    path = tmp_path / "some.py"
    path.write_text("def f(prompts, completions, **k):\n    return [None if c == '?' else 1.0 for c in completions]\n")
    examples = list(load_task(SETTINGS).held_out.examples[:2])
    with RewardPool([RewardSpec(f"{path}:f")]) as pool:
        found = score_completions(examples, ["?", "x"], pool)
    assert (found.accuracy.value, found.mean_reward) == (0.5, 1.0)
    assert [row["reward"] for row in found.rows] == [None, 1.0]


def test_the_command_prints_and_writes(
    tmp_path: Path, base_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["eval", base_model, "--task", "arithmetic", "--option", "digits=2", "--samples", 5, "--pass-at", "1,2"]
    words += ["-n", 3, "--max-new-tokens", 3, "--reward", f"{digit_reward_file(tmp_path)}:digits"]
    words += ["--out", tmp_path / "result.json"]
    monkeypatch.setattr(sys, "argv", ["isobit", *map(str, words)])
    with pytest.raises(SystemExit) as done:
        cli.main()
    assert not done.value.code
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines] == ["greedy accuracy", "mean reward", "pass@1", "pass@2"]
    assert "5 prompts" in lines[0]
    result = json.loads((tmp_path / "result.json").read_text())
    assert len(result["rows"]) == 5 + 5 * 3
    assert set(result) == {"accuracy", "pass@1", "pass@2", "mean_reward", "rows"}
