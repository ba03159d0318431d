"""A file of the user's own as a task: its split, its options, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from isobit.errors import IsobitError
from isobit.tasks.builtin import TaskSettings, load_task


@pytest.fixture
def file(tmp_path: Path) -> str:
    return rows(tmp_path / "train.jsonl", 50)


def rows(path: Path, count: int, **more: Any) -> str:
    path.write_text(
        "".join(json.dumps({"prompt": f"p{i}", "answer": i, **more}) + "\n" for i in range(count))
    )
    return str(path)


def prompts(examples: Any) -> list[str]:
    return [example.prompt for example in examples]


def test_a_tenth_is_held_out_the_same_for_every_seed_of_a_run(file: str) -> None:
    task = load_task(TaskSettings(path=file))
    other = load_task(TaskSettings(path=file, seed=9))
    assert (task.name, len(task.train), len(task.held_out)) == ("file", 45, 5)
    assert task.rewards == ()
    assert task.gold is None
    assert prompts(task.held_out.examples) == prompts(other.held_out.examples)
    assert [task.train.at(i) for i in range(45)] != [other.train.at(i) for i in range(45)]
    moved = load_task(TaskSettings(path=file, options={"seed": 1}))
    assert prompts(task.held_out.examples) != prompts(moved.held_out.examples)


def test_sizes_and_files_of_the_held_out_split(file: str, tmp_path: Path) -> None:
    assert len(load_task(TaskSettings(path=file, held_out_size=0)).held_out) == 0
    assert len(load_task(TaskSettings(path=file, held_out_size=20)).train) == 30
    test = rows(tmp_path / "test.jsonl", 8)
    task = load_task(TaskSettings(path=file, held_out_path=test))
    assert (len(task.train), len(task.held_out)) == (50, 8)
    assert (
        len(load_task(TaskSettings(path=file, held_out_path=test, held_out_size=3)).held_out) == 3
    )


def test_prompts_become_chats_where_asked(file: str) -> None:
    task = load_task(TaskSettings(path=file, prompt_template="<{prompt}>", chat=True, system="S"))
    messages = task.train.examples[0].prompt
    assert messages == [{"role": "system", "content": "S"}, {"role": "user", "content": "<p0>"}]


def test_contradictions_are_refused(file: str, tmp_path: Path) -> None:
    test = rows(tmp_path / "test.jsonl", 8, more=1)
    for settings, message in [
        (TaskSettings(), r"task\.path: task file needs a file or directory of data"),
        (
            TaskSettings(path=file, held_out_size=50),
            "cannot hold out 50 prompts and keep some to train on",
        ),
        (TaskSettings(path=file, held_out_size=-1), r"task\.held_out_size must be at least 0"),
        (
            TaskSettings(path=file, held_out_path=test),
            r"test\.jsonl:1: column 'more' is not in both",
        ),
        (TaskSettings(path=file, held_out_path=file, held_out_size=51), "has 50 rows"),
        (TaskSettings(path=file, prompt_template="x"), r"must have \{prompt\} in it"),
        (
            TaskSettings(path=file, system="S"),
            r"train\.jsonl:1: task\.system needs a chat, .* set task\.chat: true",
        ),
        (
            TaskSettings(path=file, options={"digits": 3}),
            r"task\.options\.digits: unknown, known: seed",
        ),
    ]:
        with pytest.raises(IsobitError, match=message):
            load_task(settings)
