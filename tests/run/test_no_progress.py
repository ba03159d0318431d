"""Runs that learn nothing say so: while they work, at their end, in what watches them and in the
report."""

import math
from functools import reduce
from pathlib import Path

import pytest

from isobit.config import load_config
from isobit.monitor.report import write_report
from isobit.monitor.screen.screen import screen
from isobit.monitor.screen.watch import Watched
from isobit.run.directory import read_jsonl
from isobit.run.no_progress import PATIENCE, CutOff, NoProgress
from isobit.training.train import resume, train
from tests.runs import write_config
from tests.view.test_screen import drawn

Row = dict[str, float | None]


def row(taught: bool, mean: float | None = 0.0, std: float | None = 0.0) -> Row:
    nonzero = 0.5 if taught else 0.0
    return {
        "step": 1.0,
        "groups/zero_spread_fraction": 1.0 - nonzero,
        "advantage/nonzero_fraction": nonzero,
        "reward/mean": mean,
        "reward/std": std,
    }


def after(*rows: Row) -> NoProgress:
    return reduce(NoProgress.after, rows, NoProgress())


def test_it_is_said_from_twenty_steps_on_and_taken_back() -> None:
    """The control: one step that taught something."""
    nothing = [row(False)] * PATIENCE
    assert after(*nothing[1:]).line is None
    assert (
        after(*nothing).line
        == "no group had a spread for 20 steps (every reward was 0): nothing is learned"
    )
    assert after(*nothing, row(True)).line is None
    assert after(*nothing, row(True), *nothing[1:]).line is None
    assert after(row(True), *nothing).verdict == (
        "no group had a spread in the last 20 steps (every reward was 0): nothing was learned"
    )


def test_a_short_run_that_never_learned_is_told_from_one_that_paused() -> None:
    assert (
        after(row(False)).verdict
        == "no group had a spread in any step (every reward was 0): nothing was learned"
    )
    assert after(row(True), row(False)).verdict is None
    assert after(row(True)).verdict is None
    assert after().verdict is None


@pytest.mark.parametrize(
    ("rows", "line"),
    [
        ([row(False, 1.0)], "no group had a spread in any step (every reward was 1)"),
        ([row(False, 1.0), row(False, 0.5)], "no group had a spread in any step:"),
        ([row(False, 0.5, 0.4)], "no group had a spread in any step:"),
        ([row(False, None, None)], "no completion could be scored in any step:"),
        ([row(False, math.nan, math.nan)], "no completion could be scored in any step:"),
        (
            [{**row(False), "advantage/nonzero_fraction": math.nan}],
            "no group had a spread in any step (every",
        ),
        (
            [{**row(False), "advantage/nonzero_fraction": None}],
            "no group had a spread in any step (every",
        ),
        (
            [{"groups/zero_spread_fraction": 1.0, "reward/mean": 0.0}],
            "no group had a spread in any step (every",
        ),
        (
            [{"step": 0.0, "accuracy/held_out": 0.1}, row(False)],
            "no group had a spread in any step (every",
        ),
    ],
)
def test_why(rows: list[Row], line: str) -> None:
    assert str(after(*rows).verdict).startswith(line)


REWARDS = {
    "none": "[None] * len(completions)",
    "zero": "[0.0] * len(completions)",
    "learns": "[float(len(c)) for c in completions]",
}


@pytest.mark.parametrize("reward", REWARDS)
@pytest.mark.parametrize("preset", ["grpo", "dapo", "reinforce_pp"])
def test_a_run_says_it_at_its_end(
    tmp_path: Path, base_model: Path, capsys: pytest.CaptureFixture[str], reward: str, preset: str
) -> None:
    """Also one that is shorter, and one that goes on; the control is a reward that tells
    completions apart."""
    (tmp_path / "constant.py").write_text(
        f"def constant(completions, **k):\n    return {REWARDS[reward]}\n"
    )
    functions = [{"function": f"{tmp_path}/constant.py:constant"}]
    config = write_config(
        tmp_path, base_model, rewards={"functions": functions}, algorithm={"preset": preset}
    )
    run = train(load_config(config, ["steps=3", "run.report=true"]), quiet=False).run_dir
    what = {
        "none": "no completion could be scored in any step",
        "zero": "no group had a spread in any step",
    }
    said, page = capsys.readouterr().err, (run / "report.html").read_text()
    nonzero = [line["advantage/nonzero_fraction"] for line in read_jsonl(run / "metrics.jsonl")]
    if reward == "learns":
        assert "nothing was learned" not in said + page
        assert any(nonzero)
        return
    assert (
        f"{what[reward]} (every reward was 0)" in said if reward == "zero" else what[reward] in said
    )
    assert what[reward] in page
    assert not any(nonzero)


@pytest.mark.slow
def test_it_goes_on_over_a_resume_and_is_seen_from_outside(
    tmp_path: Path, base_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "constant.py").write_text(
        "def constant(completions, **k):\n    return [0.0] * len(completions)\n"
    )
    functions = [{"function": f"{tmp_path}/constant.py:constant"}]
    config = write_config(
        tmp_path, base_model, rewards={"functions": functions}, prompts_per_step=1
    )
    run = train(load_config(config, ["steps=12"]), quiet=False).run_dir
    resume(run, [f"steps={PATIENCE - 1}"], quiet=False)
    line = "no group had a spread for 20 steps (every reward was 0): nothing is learned"
    assert line not in capsys.readouterr().err
    resume(run, [f"steps={PATIENCE + 1}"], quiet=False)
    assert f"step 20: {line}" in capsys.readouterr().err
    watched = Watched(run)
    watched.look()
    shown = drawn(watched.history)
    assert line.replace("20", "21") in shown
    assert len(drawn(watched.history, height=len(shown) - 1)) < len(shown)
    assert "nothing was learned" in write_report([run], tmp_path / "page.html").read_text()
    assert screen(watched.history, 100, 40) is not None


def cut(*fractions: float | None) -> CutOff:
    return reduce(
        CutOff.after, [{"length/truncated_fraction": each} for each in fractions], CutOff()
    )


def test_completions_that_are_all_cut_off_are_said() -> None:
    """The control: one that ended."""
    assert cut(*[1.0] * (PATIENCE - 1)).line is None
    assert "every completion for 20 steps ran to sampling.max_new_tokens" in str(
        cut(*[1.0] * PATIENCE).line
    )
    assert cut(*[1.0] * PATIENCE, 0.9).line is None
    assert "every completion in every step ran to" in str(cut(1.0).verdict)
    assert cut(0.5, 1.0).verdict is None
    assert "in the last 20 steps" in str(cut(0.5, *[1.0] * PATIENCE).verdict)
    assert cut(None, math.nan).verdict is None
    assert cut(1.0, None).steps == 1  # a row of an evaluation


@pytest.mark.parametrize(("more", "told"), [([], True), (["sampling.ignore_eos=true"], False)])
def test_a_run_whose_completions_were_all_cut_off_says_it(
    tmp_path: Path,
    base_model: Path,
    capsys: pytest.CaptureFixture[str],
    more: list[str],
    told: bool,
) -> None:
    """Not where it is wanted. Under top_k: 1 no completion of this model ends."""
    config = load_config(write_config(tmp_path, base_model), ["sampling.top_k=1", "steps=1", *more])
    run = train(config, quiet=False).run_dir
    (row,) = (each for each in read_jsonl(run / "metrics.jsonl") if each["step"])
    assert row["length/truncated_fraction"] == 1
    said = "every completion in every step ran to sampling.max_new_tokens and was cut off"
    assert (said in capsys.readouterr().err) == told
