"""What a flow does to a reward model's scores."""

import json
from pathlib import Path

import pytest

from isobit.cli import app
from isobit.errors import IsobitError
from isobit.evaluation.inspection.judging import compare_scores, kendall_tau
from tests.training.test_scoring import reward_model


def test_kendalls_tau() -> None:
    assert kendall_tau([1, 2, 3, 4], [10, 20, 30, 40]) == 1
    assert kendall_tau([1, 2, 3, 4], [4, 3, 2, 1]) == -1
    assert kendall_tau([1, 2, 3, 4], [1, 3, 2, 4]) == pytest.approx(4 / 6)
    assert kendall_tau([1, 1, 2], [1, 2, 3]) == pytest.approx(2 / 3)  # the tie is neither
    assert kendall_tau([1], [5]) == 1


def test_scores_worked_out_by_hand() -> None:
    found = compare_scores("p", [0.0, 1.0, 4.0, 5.0], [0.5, 1.0, 5.0, 4.0], 2, 1.5)
    assert found.relative_shift == pytest.approx((0.5 + 0 + 1 + 1) / 4 / 5)
    assert found.kendall_tau == 0.0  # one group kept, one turned around
    assert found.sign_flips == 0.5
    assert found.mib == 1.5


def test_the_command_compares_flows_on_real_completions(
    tmp_path: Path, base_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    judge = reward_model(tmp_path / "judge")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "1+1="}\n{"prompt": "23*4="}\n')
    words = [str(base_model), "--presets", "bf16,fp8,nvfp4", "--max-new-tokens", "5", "-n", "6"]
    words += ["--prompts", str(tmp_path / "prompts.jsonl"), "--reward-model", str(judge)]
    app(["inspect", *words, "--out", str(tmp_path / "out")], standalone_mode=False)
    assert "Kendall's tau" in capsys.readouterr().out
    rows = {
        r["preset"]: r
        for r in json.loads((tmp_path / "out/inspection.json").read_text())["judgements"]
    }
    assert rows["bf16"]["relative_shift"] == rows["bf16"]["sign_flips"] == 0
    assert 0 < rows["fp8"]["relative_shift"] < rows["nvfp4"]["relative_shift"]
    assert rows["fp8"]["mib"] < rows["bf16"]["mib"]
    assert "Scores of the reward model" in (tmp_path / "out/inspection.html").read_text()


def test_a_reward_model_needs_text(tmp_path: Path, base_model: Path) -> None:
    judge = reward_model(tmp_path / "judge")
    with pytest.raises(IsobitError, match="give --prompts FILE"):
        app(
            ["inspect", str(base_model), "--presets", "fp8", "--reward-model", str(judge)],
            standalone_mode=False,
        )
