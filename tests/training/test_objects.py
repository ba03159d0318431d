"""Runs that are given reward functions, rows and callbacks as objects of Python, and the lines for
what is none."""

import asyncio
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from isobit import IsobitError, resume, train
from isobit.errors import RunFailed
from isobit.rl import Sample
from isobit.rl.algorithm.advantages import Advantage
from isobit.run.checkpoints import all_checkpoints
from isobit.run.completions import COMPLETIONS, read
from isobit.training.objects import NO_OBJECTS, Given
from tests.runs import digit_reward_file, fingerprint

ROWS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(7) for b in range(7)]


def digits(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    """As `tests.runs.digit_reward_file` has it in a file."""
    return [sum(c in "56789" for c in text) / 3 for text in completions]


async def short(completions: list[str], **columns: Any) -> list[float]:
    await asyncio.sleep(0)
    return [float(len(text) < 3) for text in completions]


def settings(folder: Path, model: Path, name: str = "run", **changes: Any) -> dict[str, Any]:
    return {
        "model": {"path": model},
        "run": {"dir": folder / name, "checkpoint_every": 2, "report": False},
        "sampling": {"group_size": 4, "max_new_tokens": 3},
        "prompts_per_step": 4,
        "optimizer.learning_rate": 1e-3,
        "steps": 4,
        **changes,
    }


@pytest.fixture(scope="module")
def began(tmp_path_factory: pytest.TempPathFactory, base_model: Path) -> Path:
    """A finished run of two steps that was given a weighted function and rows."""
    folder = tmp_path_factory.mktemp("objects")
    return train(settings(folder, base_model, steps=2), rewards=[(digits, 0.5)], data=ROWS).run_dir


def test_objects_and_files_make_the_same_run(tmp_path: Path, base_model: Path) -> None:
    """Bit for bit: weights, metrics, completions. The control: another weight gives another run."""
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    in_files = settings(
        tmp_path, base_model, "files", task=data, rewards=f"{digit_reward_file(tmp_path)}:digits"
    )
    of_files = fingerprint(train(in_files).run_dir)
    objects = train(settings(tmp_path, base_model, "objects"), rewards=digits, data=ROWS)
    assert fingerprint(objects.run_dir) == of_files
    short_too = train(
        settings(tmp_path, base_model, "other"), rewards=[digits, (short, 0.5)], data=ROWS
    )
    assert fingerprint(short_too.run_dir) != of_files


def test_weights_async_functions_and_workers_add_up(tmp_path: Path, base_model: Path) -> None:
    seen: list[tuple[int, Mapping[str, float]]] = []
    rewards = [digits, (short, 0.5), f"{digit_reward_file(tmp_path)}:digits"]
    with pytest.raises(IsobitError, match="two reward functions are called 'digits'"):
        train(settings(tmp_path, base_model, "twice", steps=1), rewards=rewards, data=ROWS)
    result = train(
        settings(tmp_path, base_model, steps=2, evaluation={"every": 1, "samples": 4}),
        rewards=[digits, (short, 0.5), ("exact_match", 2)],
        data=ROWS[8:],
        held_out=ROWS[:8],
        callbacks=[lambda step, metrics: seen.append((step, metrics))],
    )
    for row in read(result.run_dir / COMPLETIONS):
        parts = row["rewards"]
        assert row["reward"] == pytest.approx(
            parts["digits"] + 0.5 * parts["short"] + 2 * parts["exact_match"]
        )
        assert parts["digits"] == digits([], [row["completion"]])[0]
    assert [step for step, _ in seen] == [1, 2]
    written = {row["step"]: row for row in result.metrics}
    assert all(metrics["reward/mean"] == written[step]["reward/mean"] for step, metrics in seen)
    assert "accuracy/held_out" in written[0]


def test_an_async_function_works_where_a_loop_runs(tmp_path: Path, base_model: Path) -> None:
    """As in a notebook, whose cells run in a loop."""

    async def cell() -> int:
        return train(settings(tmp_path, base_model, steps=1), rewards=short, data=ROWS).exit_code

    assert asyncio.run(cell()) == 0


def test_a_function_cannot_change_the_data(tmp_path: Path, base_model: Path) -> None:
    before = json.dumps(ROWS)

    def spoil(
        prompts: list[str], completions: list[str], answer: list[list[str]], **columns: Any
    ) -> list[float]:
        assert all(len(each) == 1 for each in answer)
        answer[0].append("spoiled")
        prompts.clear()
        return digits([], completions)

    rows = [{**row, "answer": [row["answer"]]} for row in ROWS[:4]]  # of which both steps see all
    train(
        settings(tmp_path, base_model, steps=2, **{"sampling.group_size": 2}) | {},
        rewards=spoil,
        data=rows,
    )
    assert json.dumps(ROWS) == before
    assert all(len(row["answer"]) == 1 for row in rows)


def test_going_on_takes_the_objects_again(tmp_path: Path, base_model: Path) -> None:
    """Two steps, then two more, as four at once; weights are the run's own."""
    whole = train(settings(tmp_path, base_model, "whole"), rewards=[(digits, 0.5)], data=ROWS)
    half = train(
        settings(tmp_path, base_model, "half", steps=2), rewards=[(digits, 0.5)], data=ROWS
    )
    steps: list[int] = []
    again = resume(
        half.run_dir,
        ["steps=4"],
        rewards=digits,
        data=ROWS,
        callbacks=lambda step, metrics: steps.append(step),
    )
    assert fingerprint(again.run_dir) == fingerprint(whole.run_dir)
    assert steps == [3, 4]


def test_the_shell_refuses_to_go_on_without_the_objects(
    began: Path, refused: Callable[..., str]
) -> None:
    copy = str(began.parent / "copy")
    for arguments in (
        ["--resume", str(began), "steps=3"],
        [str(began / "config.yaml"), "--out", copy],
    ):
        line = refused("train", *arguments)
        assert "which no file keeps: go on in Python, with isobit.resume(" in line
        assert "rewards=[digits], data=rows)" in line
    assert len(all_checkpoints(began / "checkpoints")) == 2  # nothing was done


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "rewards=[digits], data=rows)"),
        ({"rewards": digits}, "data=rows)"),
        ({"data": ROWS}, "rewards=[digits])"),
        ({"rewards": digits, "data": ROWS[1:]}, "data: these are not the rows that run"),
        ({"rewards": short, "data": ROWS}, "began with digits, in this order"),
        ({"rewards": [digits, short], "data": ROWS}, "began with digits, in this order"),
        ({"rewards": [(digits, 1.0)], "data": ROWS}, "began with 0.5 as the weight of"),
        ({"rewards": digits, "data": ROWS, "held_out": ROWS}, "held_out: these are not the rows"),
    ],
)
def test_other_objects_are_refused(began: Path, given: dict[str, Any], message: str) -> None:
    with pytest.raises(IsobitError) as caught:
        resume(began, ["steps=3"], **given)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_function_that_raises_stops_the_run_with_its_place(
    tmp_path: Path, base_model: Path
) -> None:
    def broken(completions: list[str], **columns: Any) -> list[float]:
        raise KeyError("no such thing")

    with pytest.raises(RunFailed, match=r"broken.*no such thing.*\(test_objects\.py, line \d+\)"):
        train(settings(tmp_path, base_model, steps=1), rewards=broken, data=ROWS)
    skipped = settings(tmp_path, base_model, "skipped", steps=1, rewards={"on_error": "skip"})
    [row] = train(skipped, rewards=[broken], data=ROWS).metrics
    assert row["reward/mean"] is None


def test_what_a_callback_raises_ends_the_run_as_it_is(tmp_path: Path, base_model: Path) -> None:
    def enough(step: int, metrics: Mapping[str, float]) -> None:
        if step == 2:
            raise StopIteration("enough")

    with pytest.raises(StopIteration, match="enough"):
        train(settings(tmp_path, base_model), rewards=digits, data=ROWS, callbacks=[enough])
    assert resume(tmp_path / "run", rewards=digits, data=ROWS).metrics[-1]["step"] == 4


def test_what_a_measure_returns_is_logged_and_learning_is_the_same(
    tmp_path: Path, base_model: Path
) -> None:
    def longest(samples: Sequence[Sample], advantages: Sequence[Advantage]) -> dict[str, float]:
        assert len(samples) == len(advantages)
        return {
            "longest": max(len(sample.completion_ids) for sample in samples),
            "count/all": len(samples),
        }

    with_measure = train(
        settings(tmp_path, base_model), rewards=digits, data=ROWS, measures=longest
    )
    without = train(settings(tmp_path, base_model, "without"), rewards=digits, data=ROWS)
    for row in with_measure.metrics:
        assert row["custom/count/all"] == 16
        assert row["custom/longest"] >= row["length/mean"]
    same = [{**fingerprint(result.run_dir), "metrics": ""} for result in (with_measure, without)]
    assert same[0] == same[1]
    assert not any(name.startswith("custom/") for row in without.metrics for name in row)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (3, "measures: measure: returned int, expected a mapping of names to numbers"),
        ({"a b": 1.0}, "metric 'a b': expected letters, digits, _, - and /"),
        ({"text": "long"}, "metric 'text' is 'long', expected a number"),
    ],
)
def test_a_measure_that_cannot_be_logged_ends_the_run_in_one_line(
    tmp_path: Path, base_model: Path, returned: Any, message: str
) -> None:
    def measure(samples: Sequence[Sample], advantages: Sequence[Advantage]) -> Any:
        return returned

    with pytest.raises(RunFailed) as caught:
        train(settings(tmp_path, base_model), rewards=digits, data=ROWS, measures=[measure])
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def mistakes() -> list[tuple[dict[str, Any], str]]:
    return [
        ({"rewards": 3}, "rewards: expected functions, reward(prompts, completions, **columns)"),
        ({"rewards": [3]}, "rewards: expected functions"),
        ({"rewards": [dict]}, "rewards: expected functions"),
        (
            {"rewards": [(digits, "1")]},
            "rewards: expected (function, weight), and the weight is '1'",
        ),
        ({"rewards": [digits, digits]}, "two functions are called 'digits'"),
        (
            {"rewards": [lambda completions: [], lambda completions: []]},
            "two functions are called 'lambda'",
        ),
        ({"rewards": [functools.partial(digits), digits]}, "two functions are called 'digits'"),
        ({"rewards": [(digits, float("nan"))]}, "finite number"),
        ({"rewards": lambda text: 1.0}, "reward function 'lambda': expected def"),
        (
            {"data": "rows.jsonl"},
            "data: expected rows, each a mapping of columns such as {'prompt': ...",
        ),
        ({"data": "rows.jsonl"}, "a file is named with task.path in the settings"),
        ({"data": {"prompt": ["a"]}}, "data: expected rows"),
        ({"data": 3}, "data: expected rows"),
        ({"data": [3]}, "data, row 1: expected rows"),
        ({"data": [{"prompt": object()}]}, "data, row 1: column 'prompt' holds object"),
        (
            {"data": [{"prompt": "1", None: "2"}]},
            "data, row 1: the name of a column must be text, got None",
        ),
        (
            {"data": [{"prompt": "1", "info": {None: 2}}]},
            "column 'info' has an object with null as a key",
        ),
        ({"data": [{"question": "1"}]}, "data, row 1: no column 'prompt'"),
        (
            {"data": [{"prompt": "1"}, {"prompt": "2", "x": 1}]},
            "data, row 2: its columns are not those of data, row 1",
        ),
        ({"data": []}, "data: no examples in it"),
        ({"held_out": [{"prompt": "1"}]}, "held_out, row 1"),
        ({"callbacks": [3]}, "callbacks: expected functions on_step(step, metrics), got 3"),
        (
            {"measures": [3]},
            "measures: expected functions measure(samples, advantages) -> numbers by name, got 3",
        ),
    ]


@pytest.mark.parametrize(("given", "message"), mistakes(), ids=range(len(mistakes())))
def test_what_is_no_object_of_a_run_gives_one_line(
    tmp_path: Path, base_model: Path, given: dict[str, Any], message: str
) -> None:
    with pytest.raises(IsobitError) as caught:
        train(settings(tmp_path, base_model), **{"rewards": digits, "data": ROWS, **given})
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_one_place_for_each_thing(tmp_path: Path, base_model: Path) -> None:
    both: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        (
            {"rewards": "exact_match"},
            {"rewards": digits},
            "the settings have rewards.functions already",
        ),
        ({"task": "rows.jsonl"}, {"data": ROWS}, "the settings have task.path already"),
        (
            {"task.held_out_path": "rows.jsonl"},
            {"held_out": ROWS},
            "the settings have task.held_out_path already",
        ),
        ({"task": "arithmetic"}, {"data": ROWS}, "task arithmetic makes its own data"),
    ]
    for changes, given, message in both:
        with pytest.raises(IsobitError, match=message):
            train(settings(tmp_path, base_model, **changes), **given)


def test_names_of_callables() -> None:
    class Judge:
        def __call__(self, completions: list[str], **columns: Any) -> list[float]:
            return [0.0] * len(completions)

    named: list[tuple[Callable[..., Any], str]] = [
        (Judge(), "Judge"),
        (functools.partial(digits, columns={}), "digits"),
        (lambda completions: [], "lambda"),
    ]
    from isobit import load_config

    for function, name in named:
        config, objects = Given(rewards=function).into(load_config({"model": "base"}))
        assert [each.function for each in config.rewards.functions] == [f"<python>:{name}"]
        assert objects.functions == {f"<python>:{name}": function}
    NO_OBJECTS.require(load_config({"model": "base"}))  # nothing was given, and nothing is wanted
