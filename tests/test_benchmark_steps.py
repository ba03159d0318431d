"""The training step that the benchmarks time is one of an open run."""

from contextlib import ExitStack
from pathlib import Path

from benchmarks.steps import GROUP, PROMPTS, open_run
from isobit.run.directory import read_jsonl
from isobit.training.loop import training_step


def test_a_step_of_the_benchmarks_is_one_of_a_run(tmp_path: Path, base_model: Path) -> None:
    with ExitStack() as stack:
        session = open_run(tmp_path, base_model, "fp8", stack)
        training_step(session)
        [row] = [
            row for row in read_jsonl(session.run.directory / "metrics.jsonl") if row["step"] == 1
        ]
    assert row["prompts/consumed"] == PROMPTS
    assert row["mismatch/compared_tokens"] >= PROMPTS * GROUP
    assert row["mismatch/differing_tokens"] == 0
