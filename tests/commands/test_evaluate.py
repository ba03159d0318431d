"""`isobit eval`: what is asked, of whom, and what is printed and written; against counting by
hand."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from isobit.cli.evaluation import _data, _task
from isobit.config import load_config
from isobit.training.commands.evaluate import _limit, evaluation_config
from isobit.training.train import train
from tests.conftest import RunIsobit
from tests.models import tiny_model
from tests.runs import write_config

Eval = Callable[..., str]
TAGGED = [
    {"prompt": f"{i}+{i}=", "answer": str(2 * i), "level": "easy" if i < 3 else "hard"}
    for i in range(8)
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A file of eight prompts with a tag, and a reward that a random model earns now and then."""
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in TAGGED))
    (tmp_path / "threes.py").write_text(
        "def threes(prompts, completions, **k):\n    return [float('3' in c) for c in "
        "completions]\n"
    )
    return tmp_path


@pytest.fixture
def evaluate(folder: Path, monkeypatch: pytest.MonkeyPatch, run_isobit: RunIsobit) -> Eval:
    """Run `isobit eval` in the folder, with short completions; returns what it prints."""
    monkeypatch.chdir(folder)

    def call(*words: object) -> str:
        code, out, err = run_isobit("eval", *words)
        assert not code, err
        return out

    return call


def asked(*words: object) -> tuple[object, ...]:
    return ("--data", "rows.jsonl", "--reward", "threes.py:threes", "--max-new-tokens", 4, *words)


def line(text: str, name: str) -> list[str]:
    return next(row.split() for row in text.splitlines() if row.startswith(name + " "))


def test_a_template_for_a_model_that_lacks_one(
    base_model: Path, evaluate: Eval, folder: Path
) -> None:
    """Rendered to the text of the prompt and to another one: the same answers, and others."""
    (folder / "same.jinja").write_text("{{ messages[0].content }}")
    (folder / "other.jinja").write_text("{{ messages[0].content }}1+1=")
    answers = {}
    for name in ("", "same", "other"):
        words = ("--chat", f"model.chat_template={name}.jinja") if name else ()
        evaluate(base_model, *asked("-n", 4, "--out", "result.json", *words))
        rows = json.loads((folder / "result.json").read_text())["prompts"]
        answers[name] = [sample["completion"] for row in rows for sample in row["samples"]]
    assert answers[""] == answers["same"] != answers["other"]


def test_one_model_is_measured_and_written(base_model: Path, evaluate: Eval, folder: Path) -> None:
    printed = evaluate(
        base_model, *asked("-n", 4, "--pass-at", "1,2,4", "--tag", "level", "--out", "result.json")
    )
    result = json.loads((folder / "result.json").read_text())
    greedy = [row["greedy"]["reward"] for row in result["prompts"]]
    right = [sum("3" in s["completion"] for s in row["samples"]) for row in result["prompts"]]
    assert len(greedy) == 8
    assert 0 < sum(right) < 32
    summary = result["summary"]["(all)"]
    assert summary["accuracy"]["value"] == sum(greedy) / 8
    assert summary["pass@1"]["value"] == pytest.approx(sum(right) / 32)
    assert summary["mean@4"]["value"] == pytest.approx(sum(right) / 32)
    assert summary["pass@4"]["value"] == sum(count > 0 for count in right) / 8
    assert line(printed, "pass@1")[1] == f"{sum(right) / 32:.4f}"
    assert line(printed, "greedy accuracy")[2] == f"{sum(greedy) / 8:.4f}"
    assert line(printed, "easy")[1] == "3"
    assert line(printed, "hard")[1] == "5"
    assert line(printed, "(all)")[1] == "8"
    assert {"maj@2", "maj@4", "tokens", "truncated"} <= set(summary)
    assert "maj@1" not in summary
    assert all(row["greedy"]["tokens"] <= 4 for row in result["prompts"])
    assert evaluate("result.json") == printed


def test_samples_are_drawn_as_asked(base_model: Path, evaluate: Eval, folder: Path) -> None:
    """Of the likeliest token alone they are the greedy completion; the control draws from all. A
    penalty acts on greedy completions too, and no truncation does."""
    found = {}
    for words in (
        (),
        ("evaluation.top_k", 1),
        ("evaluation.top_p", 0.01),
        ("sampling.min_p", 1.0),
        ("sampling.repetition_penalty", 50),
    ):
        evaluate(
            base_model,
            *asked("-n", 2, "--out", "result.json", *("=".join(map(str, words)),) * bool(words)),
        )
        result = json.loads((folder / "result.json").read_text())
        texts = [
            [row["greedy"]["completion"], *(s["completion"] for s in row["samples"])]
            for row in result["prompts"]
        ]
        name = str(words[0] if words else "").partition(".")[2]
        found[name] = texts
        assert not words or result["settings"][name] == words[1]
    greedy = [row[0] for row in found[""]]
    assert found[""] != [[text] * 3 for text in greedy]
    for name in ("top_k", "top_p", "min_p"):
        assert found[name] == [[text] * 3 for text in greedy]
    assert [row[0] for row in found["repetition_penalty"]] != greedy


def test_two_models_are_compared_and_so_are_their_saved_results(
    base_model: Path, evaluate: Eval, folder: Path, tmp_path: Path
) -> None:
    tiny_model(seed=5).save(tmp_path / "other")
    options = asked("-n", 2)
    printed = evaluate(base_model, "--against", "other", *options, "--out", "both.json")
    assert printed.startswith(f"A: {base_model}\nB: other\n")
    evaluate(base_model, *options, "--out", "a.json")
    evaluate("other", *options, "--out", "b.json")
    assert evaluate("a.json", "--against", "b.json") == printed
    assert evaluate(base_model, "--against", "b.json", *options) == printed
    content = json.loads((folder / "both.json").read_text())
    single = json.loads((folder / "b.json").read_text())
    assert content["against"] == single
    pairs = [
        (a["greedy"]["reward"], b["greedy"]["reward"])
        for a, b in zip(content["prompts"], single["prompts"])
    ]
    found = content["comparison"]["accuracy"]
    assert (found["only_first"], found["only_second"]) == (pairs.count((1, 0)), pairs.count((0, 1)))
    assert found["difference"]["value"] == pytest.approx(sum(a - b for a, b in pairs) / 8)


def test_a_model_against_itself_shows_no_difference(base_model: Path, evaluate: Eval) -> None:
    printed = evaluate(base_model, "--against", base_model, *asked("-n", 2))
    assert printed.endswith("No difference is shown: the two score the same on every prompt.\n")
    assert line(printed, "pass@2")[3:] == ["+0.0000", "+0.0000", "to", "+0.0000", "1"]


def test_a_run_is_asked_what_training_asked_it(
    base_model: Path, evaluate: Eval, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same numbers as the last evaluation logged, greedy and sampled; with --best those of the
    best."""
    evaluation = {"every": 2, "num_samples": 3, "samples": 6, "best_by": "reward/held_out"}
    run = train(load_config(write_config(folder, base_model, evaluation=evaluation))).run_dir
    rows = [json.loads(row) for row in (run / "metrics.jsonl").read_text().splitlines()]
    logged = {row["step"]: row for row in rows if "reward/held_out" in row}
    printed = evaluate(run)
    assert printed.startswith(f"{run}/checkpoints/step-000004\n")
    assert line(printed, "greedy reward")[2] == f"{logged[4]['reward/held_out']:.4f}"
    assert line(printed, "pass@3")[1] == f"{logged[4]['accuracy/pass_at_3']:.4f}"
    assert line(printed, "pass@3")[-1] == "6"
    best = json.loads((run / "best" / "best.json").read_text())
    printed = evaluate(run, "--best")
    assert line(printed, "greedy reward")[2] == f"{best['value']:.4f}"
    assert best["value"] == max(row["reward/held_out"] for row in logged.values())
    evaluate(run, "--against", base_model, "--samples", 4, "-n", 2, "--out", "result.json")
    result = json.loads((folder / "result.json").read_text())
    assert (len(result["prompts"]), result["ks"]) == (4, [1, 2])


def test_a_live_runs_half_written_checkpoint_is_left_alone(
    base_model: Path, evaluate: Eval, folder: Path
) -> None:
    run = train(load_config(write_config(folder, base_model), ["steps=1"])).run_dir
    half = run / "checkpoints" / ".writing-000007"
    half.mkdir()
    evaluate(run)
    assert half.is_dir()


def test_what_is_given_stands_in_the_place_of_the_runs(folder: Path, base_model: Path) -> None:
    run = folder / "run"
    run.mkdir()
    write_config(folder, base_model, evaluation={"num_samples": 8, "pass_at": [8]}).rename(
        run / "config.yaml"
    )
    (run / "format.txt").write_text("2\n")
    assert evaluation_config(run, ()).evaluation.pass_at == (8,)
    config = evaluation_config(run, ["evaluation.num_samples=4", "seed=3", *_data("x")])
    assert (config.evaluation.num_samples, config.evaluation.pass_at, config.seed) == (4, (), 3)
    assert (config.task.name, config.task.path, config.task.held_out_size) == (
        "arithmetic",
        "x",
        None,
    )
    config = evaluation_config(run, _task("countdown"))
    assert (config.task.name, config.task.options) == ("countdown", {})
    assert evaluation_config(None, ["evaluation.pass_at=[2]"]).evaluation.num_samples == 8


@pytest.mark.parametrize("key", ["path", "files", "held_out_path", "name"])
def test_other_data_than_the_runs_are_evaluated_whole(
    folder: Path, base_model: Path, key: str
) -> None:
    """The control is another key of the task: the run's own number of prompts."""
    config = load_config(write_config(folder, base_model, evaluation={"samples": 6}))
    assert _limit(config, True, [f"task.{key}=x"]) is None
    assert _limit(config, True, ["task.seed=1"]) == 6
    assert _limit(config, True, [f"task.{key}=x", "evaluation.samples=6"]) == 6


@pytest.mark.parametrize("key", ["path", "files"])
def test_other_data_do_not_bring_the_runs_held_out_file(folder: Path, key: str) -> None:
    """The controls: other words leave the run's file, and a file that is given stays."""
    run = folder / "run"
    run.mkdir()
    task = {"name": "file", "path": "a.jsonl", "held_out_path": "old.jsonl", "options": {}}
    write_config(folder, folder, task=task).rename(run / "config.yaml")
    (run / "format.txt").write_text("2\n")
    other = [f"task.{key}={'[{path: b.jsonl}]' if key == 'files' else 'b.jsonl'}"]
    other += ["task.path=null"] * (key == "files")
    assert evaluation_config(run, other).task.held_out_path is None
    assert str(evaluation_config(run, ["seed=3"]).task.held_out_path).endswith("old.jsonl")
    given = [*other, "task.held_out_path=c.jsonl"]
    assert evaluation_config(run, given).task.held_out_path == "c.jsonl"


def test_given_completions_are_scored(evaluate: Eval) -> None:
    printed = evaluate(
        *asked()[:2],
        "--reward",
        "isobit.tasks.builtin.arithmetic:reward",
        "--completions",
        "answer",
    )
    assert line(printed, "accuracy")[1] == "1.0000"
    assert "tokens" not in printed


def test_unscored_completions_are_counted_with_the_first_reason(
    evaluate: Eval, folder: Path
) -> None:
    (folder / "some.py").write_text(
        "def f(prompts, completions, **k):\n    return [1 / (int(c) - 4) for c in completions]\n"
    )
    printed = evaluate(*asked()[:2], "--reward", "some.py:f", "--completions", "answer")
    assert (
        "unscored completions, wrong and in no mean reward: 1; the first: reward function "
        "some.py:f, "
    ) in printed
    assert "ZeroDivisionError" in printed
    assert line(printed, "reward")[-1] == "7"


def test_the_answer_pattern_decides_the_vote(
    base_model: Path, evaluate: Eval, folder: Path
) -> None:
    def answers(*words: Any) -> set[str | None]:
        evaluate(base_model, *asked("-n", 6, "--out", "result.json", *words))
        rows = json.loads((folder / "result.json").read_text())["prompts"]
        return {sample["answer"] for row in rows for sample in row["samples"]}

    assert answers("evaluation.answer_pattern='[0-9]'") <= {*"0123456789", None}
    assert max(len(answer or "") for answer in answers()) > 1
