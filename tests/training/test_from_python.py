"""What a program that trains gets: whole steps, a result that prints in a line, an error to catch,
progress."""

import json
from pathlib import Path

import pytest

import isobit
from isobit.config import load_config
from isobit.run.directory import METRICS
from tests.runs import write_config


def test_steps_are_whole_numbers(tmp_path: Path, base_model: Path) -> None:
    """In the result, in callbacks and in metrics.jsonl."""
    told: list[object] = []
    config = load_config(write_config(tmp_path, base_model), ["steps=2", "evaluation.every=1"])
    result = isobit.train(
        config, quiet=True, callbacks=[lambda step, metrics: told.append(metrics["step"])]
    )
    file = tmp_path / "run" / METRICS
    written = [json.loads(line)["step"] for line in file.read_text().splitlines()]
    for steps in ([row["step"] for row in result.metrics][1:], told, written[1:]):
        assert steps == [1, 2]
        assert {type(step) for step in steps} == {int}


def test_a_result_prints_in_a_line(tmp_path: Path, base_model: Path) -> None:
    result = isobit.train(load_config(write_config(tmp_path, base_model)), quiet=True)
    reward = result.metrics[-1]["reward/mean"]
    assert (
        repr(result)
        == f"TrainResult({str(tmp_path / 'run')!r}, step 4, reward/mean {reward:.4g}, exit_code=0)"
    )


def test_progress_is_shown_unless_quiet(
    tmp_path: Path, base_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = load_config(write_config(tmp_path, base_model))
    isobit.train(config, ["steps=2"])
    shown = capsys.readouterr()
    assert "2/2" in shown.err
    assert shown.out == ""
    isobit.resume(tmp_path / "run", ["steps=3"])
    assert "3/3" in capsys.readouterr().err
    isobit.resume(tmp_path / "run", quiet=True)
    assert capsys.readouterr().err == ""


def test_a_run_that_had_to_stop_is_caught_by_a_public_name(
    tmp_path: Path, base_model: Path
) -> None:
    def fails(completions: list[str], **columns: object) -> list[float]:
        raise ValueError("no")

    path = write_config(tmp_path, base_model, rewards={"functions": []})
    with pytest.raises(isobit.RunFailed, match="ValueError: no"):
        isobit.train(load_config(path), rewards=[fails], quiet=True)
