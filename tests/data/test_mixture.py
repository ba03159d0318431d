"""Several files as one set: their shares of an epoch, the order of each, and what is refused."""

import json
from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isobit.config import load_config, load_sft_config
from isobit.data import dataset
from isobit.data.dataset import Dataset, Example, permutation
from isobit.data.mixture import shared_out
from isobit.errors import IsobitError
from isobit.tasks.builtin import TaskSettings, load_task
from isobit.tasks.builtin.task import DataFile
from isobit.training.train import resume, train_supervised
from tests.runs import fingerprint
from tests.training.test_sft_run import written


def files(folder: Path, *sizes: int, **columns: str) -> list[Path]:
    """Files of so many rows, `prompt` NAME-NUMBER."""
    made = []
    for number, size in enumerate(sizes):
        path = folder / f"{'abc'[number]}.jsonl"
        rows = [{"prompt": f"{path.stem}-{i}", "answer": str(i)} for i in range(size)]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        made.append(path)
    return made


def loaded(*given: Any, **settings: Any) -> Dataset:
    made = tuple(DataFile(**each) if isinstance(each, dict) else DataFile(each) for each in given)
    return load_task(TaskSettings(files=made, held_out_size=0, **settings)).train


def mixed(folder: Path, sizes: tuple[int, ...], weights: tuple[float, ...], **more: Any) -> Dataset:
    paths = files(folder, *sizes)
    return loaded(*({"path": str(p), "weight": w} for p, w in zip(paths, weights)), **more)


def test_without_weights_they_are_one_file(tmp_path: Path) -> None:
    """In the same order as one that has all rows; the control has weights."""
    paths = files(tmp_path, 5, 3)
    whole = tmp_path / "whole.jsonl"
    whole.write_text("".join(path.read_text() for path in paths))
    several = loaded(*map(str, paths), seed=3)
    one = load_task(TaskSettings(path=str(whole), held_out_size=0, seed=3)).train
    assert [several.at(i).prompt for i in range(20)] == [one.at(i).prompt for i in range(20)]
    assert [each.index for each in several.examples] == list(range(8))
    other = mixed(tmp_path, (5, 3), (1.0, 1.0), seed=3)
    assert [other.at(i).prompt for i in range(20)] != [one.at(i).prompt for i in range(20)]


@pytest.mark.parametrize("shuffle", [True, False])
def test_each_epoch_has_their_shares_and_each_file_epochs_of_its_own(
    shuffle: bool, tmp_path: Path
) -> None:
    data = mixed(tmp_path, (10, 2, 4), (3.0, 1.0, 4.0), shuffle=shuffle)
    names = [str(data.at(cursor).prompt) for cursor in range(5 * 16)]
    for epoch in range(5):
        drawn = Counter(name[0] for name in names[16 * epoch : 16 * (epoch + 1)])
        assert drawn == {"a": 6, "b": 2, "c": 8}
        seen = Counter(names[: 16 * (epoch + 1)])
        for letter, size in zip("abc", (10, 2, 4)):
            often = [seen[f"{letter}-{i}"] for i in range(size)]
            assert max(often) - min(often) <= 1, "each row as often as the others of its file"
    if not shuffle:
        assert names[:8] == [*(f"a-{i}" for i in range(6)), "b-0", "b-1"]
    again = [str(data.at(cursor).prompt) for cursor in reversed(range(5 * 16))]
    assert again[::-1] == names, "an example is a function of the cursor"
    if shuffle:
        assert names[:16] != names[16:32]
        other = mixed(tmp_path, (10, 2, 4), (3.0, 1.0, 4.0), seed=1)
        assert [str(other.at(cursor).prompt) for cursor in range(16)] != names[:16]


@given(
    st.integers(1, 10_000),
    st.lists(st.floats(1e-6, 1e6, allow_nan=False), min_size=1, max_size=9),
)
def test_shares_are_exact_but_for_rounding(total: int, weights: list[float]) -> None:
    found = shared_out(total, weights)
    assert sum(found) == total
    whole = sum(map(Fraction, weights))
    for count, weight in zip(found, weights):
        assert abs(count - total * Fraction(weight) / whole) < 1


@pytest.mark.parametrize("weights", [(1.0,) * 12, (40.0, 3.0, *[1.0] * 10)])
def test_each_order_of_each_file_is_made_once(
    weights: tuple[float, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of twelve files in three epochs, also of one that is seen many times in each; asked twice, as
    a curriculum does. The prompts are by definition those of `permutation`."""
    rows = [Example(i, str(i), {}, source=i % 12) for i in range(12 * 50)]
    made = Counter[int]()

    def counted(seed: int, stream: int, count: int) -> Any:
        made[stream] += 1
        return dataset_words(seed, stream, count)

    dataset_words = dataset.random_words
    monkeypatch.setattr(dataset, "random_words", counted)
    mixed = Dataset(rows, 7, weights=weights)
    found = [mixed.at(cursor).index for cursor in range(3 * len(rows)) if mixed.at(cursor)]
    epochs = 3 + sum(-(-3 * n // 50) for n in shared_out(len(rows), weights))
    assert set(made.values()) == {1}
    assert len(made) == epochs
    shares = shared_out(len(rows), weights)
    for cursor in range(0, 3 * len(rows), 97):
        epoch, position = divmod(cursor, len(rows))
        place, number = permutation(len(rows), 7, epoch)[position], 0
        while place >= shares[number]:
            place, number = place - shares[number], number + 1
        own, row = divmod(epoch * shares[number] + place, 50)
        assert found[cursor] == permutation(50, 7, ((number + 1) << 40) + own)[row] * 12 + number


def test_columns_are_each_files_own(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"question": "1+1?", "gold": "2"}\n')
    (tmp_path / "b.jsonl").write_text('{"question": "1+2?", "solution": "3"}\n')
    answers = [{"answer": "gold"}, {"answer": "solution"}]
    given_files = [
        {"path": str(tmp_path / name), "columns": columns}
        for name, columns in zip(("a.jsonl", "b.jsonl"), answers)
    ]
    with pytest.raises(IsobitError, match="column 'gold' is not in both"):
        loaded(*given_files, columns={"prompt": "question"})
    (tmp_path / "b.jsonl").write_text('{"question": "1+2?", "gold": "3"}\n')
    data = loaded(
        str(tmp_path / "a.jsonl"),
        str(tmp_path / "b.jsonl"),
        columns={"prompt": "question", "answer": "gold"},
    )
    assert [example.columns["answer"] for example in data.examples] == ["2", "3"]


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ({"files": ["{a}", "{b}"], "path": "{a}"}, "files and path do not go together"),
        ({"files": ["{a}", "{b}"], "held_out_split": "test"}, "name what is held out with"),
        ({"files": [{"path": "{a}", "weight": 1}, "{b}"]}, "files.1: give all files a weight"),
        ({"files": [{"path": "{a}", "weight": 0}]}, "files.0.weight: expected above 0, got 0"),
        ({"name": "arithmetic", "files": ["{a}"]}, "task.files: task arithmetic makes its own"),
        (
            {"files": [{"path": "{a}", "weight": 1}, {"path": "{b}", "weight": 1e-9}]},
            "task.files.1.weight: 1e-09 of 1 is no prompt in an epoch of 8",
        ),
        ({"files": ["{a}", "{chat}"]}, "task.files: the prompt is text in .* and a chat in"),
        ({"files": ["{a}", "nowhere.jsonl"]}, "cannot read data file nowhere.jsonl"),
    ],
)
def test_what_makes_no_sense_is_refused(task: dict[str, Any], message: str, tmp_path: Path) -> None:
    names = {path.stem: str(path) for path in files(tmp_path, 5, 3)}
    chat = tmp_path / "chat.jsonl"
    chat.write_text('{"prompt": [{"role": "user", "content": "Hi"}], "answer": "1"}\n')
    text = json.dumps({"model": {"path": "m"}, "task": {"held_out_size": 0, **task}})
    for name, path in {**names, "chat": str(chat)}.items():
        text = text.replace(f"{{{name}}}", path)
    with pytest.raises(IsobitError, match=message):
        load_task(load_config(json.loads(text)).task)


def test_a_file_of_which_nothing_is_left_is_named(tmp_path: Path) -> None:
    paths = files(tmp_path, 5, 3)
    given_files = tuple(DataFile(str(path), 1.0) for path in paths)
    settings = TaskSettings(files=given_files, held_out_size=0)
    train = load_task(settings).train
    kept = Dataset(train.examples[:5], 0, True, train.weights)
    with pytest.raises(IsobitError, match=r"task\.files\.1: none of its rows is left"):
        kept.at(0)


def test_a_supervised_run_on_two_files_goes_on_and_knows_when_one_has_changed(
    tmp_path: Path, base_model: Path
) -> None:
    for name, sums in (("easy", [(1, 1), (1, 2), (2, 1)]), ("hard", [(8, 9), (7, 9), (9, 9)])):
        rows = [{"prompt": f"{a}+{b}=", "completion": str(a + b)} for a, b in sums]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / f"{name}.jsonl").write_text(text)
    both = [
        {"path": str(tmp_path / f"{name}.jsonl"), "weight": weight}
        for name, weight in (("easy", 1.0), ("hard", 2.0))
    ]
    task = {"files": both, "held_out_size": 0}
    given_task = {"task": task, "evaluation": {}, "steps": 4, "batch_size": 2}
    whole = train_supervised(
        load_sft_config(written(tmp_path / "a", base_model, **given_task)), quiet=True
    )
    parts = written(tmp_path / "b", base_model, **given_task)
    train_supervised(load_sft_config(parts, ["steps=1"]), quiet=True)
    resume(tmp_path / "b" / "run", ["steps=4"], quiet=True)
    assert fingerprint(tmp_path / "b" / "run") == fingerprint(whole.run_dir)
    (tmp_path / "hard.jsonl").write_text('{"prompt": "1+1=", "completion": "2"}\n')
    with pytest.raises(IsobitError, match=r"changed since the run began: task\.files\.1"):
        resume(tmp_path / "b" / "run", ["steps=5"], quiet=True)
