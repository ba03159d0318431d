"""Every format gives the same examples, and whatever cannot be read is named in one line."""

import bz2
import datetime
import decimal
import gzip
import json
import lzma
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from isobit.data import arrow_rows
from isobit.data.arrow_rows import parquet_rows
from isobit.data.dataset import Example, read_examples
from isobit.data.readers import Source, read_rows
from isobit.errors import IsobitError
from isobit.tasks.builtin import TaskSettings, load_task

from .test_dataset import read

Rows = Sequence[dict[str, Any]]
Writer = Callable[[Path, Rows], Path]
ROWS = [{"prompt": f"question {i}", "answer": str(i)} for i in range(5)]


def jsonl(folder: Path, rows: Rows) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def csv_file(folder: Path, rows: Rows, delimiter: str = ",") -> Path:
    import csv

    path = folder / ("rows.csv" if delimiter == "," else "rows.tsv")
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), delimiter=delimiter)
        writer.writeheader()
        writer.writerows(rows)
    return path


def tsv_file(folder: Path, rows: Rows) -> Path:
    return csv_file(folder, rows, "\t")


def json_array(folder: Path, rows: Rows) -> Path:
    path = folder / "rows.json"
    path.write_text("\ufeff \n" + json.dumps(list(rows), indent=1), encoding="utf-8")
    return path


def packed(write: Writer) -> Writer:
    """The same file, packed by gzip."""

    def writer(folder: Path, rows: Rows) -> Path:
        plain = write(folder, rows)
        path = plain.with_name(f"{plain.name}.gz")
        path.write_bytes(gzip.compress(plain.read_bytes()))
        return path

    writer.__name__ = f"packed_{write.__name__}"
    return writer


def packed_splits(folder: Path, rows: Rows) -> Path:
    place = folder / "packed"
    place.mkdir(exist_ok=True)
    for name, part in (("train", rows), ("test", rows[:1])):
        lines = "".join(json.dumps(row) + "\n" for row in part)
        (place / f"{name}.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    return place


def parquet(folder: Path, rows: Rows, name: str = "rows.parquet") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(list(rows)), folder / name)
    return folder / name


def shards(folder: Path, rows: Rows) -> Path:
    half = (len(rows) + 1) // 2
    place = folder / "shards"
    for file in place.glob("*"):
        file.unlink()
    for i, part in enumerate((rows[:half], rows[half:])):
        if part:
            parquet(place, part, f"part-{i}.parquet")
    return place


def saved(folder: Path, rows: Rows) -> Path:
    datasets.disable_progress_bars()
    place = folder / "saved"
    datasets.Dataset.from_list(list(rows)).save_to_disk(place)
    return place


def saved_splits(folder: Path, rows: Rows) -> Path:
    datasets.disable_progress_bars()
    place, data = folder / "splits", datasets.Dataset.from_list(list(rows))
    datasets.DatasetDict({"train": data, "test": data.select([0])}).save_to_disk(place)
    return place


WRITERS: list[Writer] = [
    jsonl,
    json_array,
    csv_file,
    tsv_file,
    parquet,
    shards,
    saved,
    saved_splits,
    packed_splits,
]
WRITERS += [packed(write) for write in (jsonl, json_array, csv_file, tsv_file)]
TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20)
PROMPT = TEXT.filter(lambda text: bool(text.strip()))


@st.composite
def text_rows(draw: st.DrawFn) -> Rows:
    names = draw(st.lists(st.text("abcdefgh", min_size=1, max_size=5), max_size=3, unique=True))
    row = st.fixed_dictionaries({"prompt": PROMPT, **dict.fromkeys(names, TEXT)})
    return draw(st.lists(row, min_size=1, max_size=5))


@pytest.mark.slow
@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(rows=text_rows())
def test_every_format_gives_the_same_examples(tmp_path: Path, rows: Rows) -> None:
    wanted = [
        Example(i, row["prompt"], {k: v for k, v in row.items() if k != "prompt"})
        for i, row in enumerate(rows)
    ]
    for write in WRITERS:
        assert read(write(tmp_path, rows)) == wanted, write.__name__


MESSAGE = st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant"]), "content": TEXT})
NESTED = st.fixed_dictionaries(
    {
        "prompt": st.lists(MESSAGE, min_size=1, max_size=3),
        "level": st.integers(-(2**53), 2**53),
        "score": st.floats(allow_nan=False, width=64),
        "seen": st.booleans(),
        "tags": st.lists(TEXT, max_size=3),
        "info": st.fixed_dictionaries({"index": st.integers(0, 99), "note": st.none() | TEXT}),
    }
)


@pytest.mark.slow
@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(rows=st.lists(NESTED, min_size=1, max_size=4))
def test_nested_columns_and_chats_are_the_same_in_every_format_that_has_them(
    tmp_path: Path, rows: Rows
) -> None:
    first = read(jsonl(tmp_path, rows))
    assert [example.prompt for example in first] == [row["prompt"] for row in rows]
    for write in (parquet, saved, saved_splits, json_array, packed(jsonl)):
        assert read(write(tmp_path, rows)) == first, write.__name__


@pytest.mark.parametrize("write", WRITERS, ids=lambda write: write.__name__)
def test_a_row_has_its_place(tmp_path: Path, write: Writer) -> None:
    path = write(tmp_path, ROWS)
    second = read(path)[1].where
    files = {"shards": "part-0.parquet", "saved_splits": "train", "packed_splits": "train.jsonl.gz"}
    file = path / files.get(write.__name__, "")
    lines = {"jsonl": ":2", "csv_file": ":3", "tsv_file": ":3", "splits": ":2"}
    line = lines.get(write.__name__.removeprefix("packed_"), ": row 2")
    assert second == f"{file}{line}"
    with pytest.raises(IsobitError, match="did you mean 'prompt'") as caught:
        read(path, columns={"prompt": "promt"})
    assert str(caught.value).startswith(read(path)[0].where)


def test_a_place_in_csv_is_where_the_record_begins(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes(b'\xef\xbb\xbfprompt,answer\r\n\r\n"two\r\nlines",1\r\nb,2\r\n')
    assert [(e.prompt, e.where) for e in read(path)] == [
        ("two\r\nlines", f"{path}:3"),
        ("b", f"{path}:5"),
    ]


def test_a_long_field_of_csv_is_read_and_the_limit_left_as_it_was(tmp_path: Path) -> None:
    import csv

    before = csv.field_size_limit()
    assert read(csv_file(tmp_path, [{"prompt": "x" * 300_000}]))[0].prompt == "x" * 300_000
    assert csv.field_size_limit() == before


def test_what_json_has_no_word_for_becomes_plain(tmp_path: Path) -> None:
    table = pa.table(
        {
            "prompt": ["a"],
            "when": pa.array([datetime.datetime(2024, 5, 6, 7, 8, 9)]),
            "exactly": pa.array([1_700_000_000_000_000_001], pa.timestamp("ns", "UTC")),
            "day": [datetime.date(2024, 5, 6)],
            "lasted": [datetime.timedelta(seconds=90)],
            "price": [decimal.Decimal("2.10")],
            "half": pa.array(np.array([0.5], np.float16)),
            "small": pa.array(np.array([7], np.int8)),
            "raw": [b"text"],
            "nothing": pa.nulls(1),
            "map": pa.array([[("k", [1, 2])]], pa.map_(pa.string(), pa.list_(pa.int32()))),
            "numbered": pa.array([[(3, "c")]], pa.map_(pa.int32(), pa.string())),
            "vector": pa.FixedSizeListArray.from_arrays(pa.array([1.0, 2.0], pa.float32()), 2),
            "category": pa.array(["x"]).dictionary_encode(),
        }
    )
    pq.write_table(table, tmp_path / "rows.parquet")
    (example,) = read(tmp_path / "rows.parquet")
    assert json.loads(json.dumps(example.columns)) == example.columns
    assert example.columns == {
        "when": "2024-05-06T07:08:09",
        "exactly": "2023-11-14T22:13:20.000000001+00:00",
        "day": "2024-05-06",
        "lasted": 90.0,
        "price": "2.10",
        "half": 0.5,
        "small": 7,
        "raw": "text",
        "nothing": None,
        "map": {"k": [1, 2]},
        "numbered": {"3": "c"},
        "vector": [1.0, 2.0],
        "category": "x",
    }


def test_arrays_of_datasets_are_lists(tmp_path: Path) -> None:
    features = datasets.Features(
        {"prompt": datasets.Value("string"), "grid": datasets.Array2D((2, 2), "int32")}
    )
    data = datasets.Dataset.from_dict(
        {"prompt": ["a", "b"], "grid": [[[1, 2], [3, 4]]] * 2}, features=features
    )
    data.with_format("numpy").select([1, 0]).save_to_disk(tmp_path / "d")
    found = read(tmp_path / "d")
    assert [(e.prompt, e.columns) for e in found] == [
        ("b", {"grid": [[1, 2], [3, 4]]}),
        ("a", {"grid": [[1, 2], [3, 4]]}),
    ]


@pytest.mark.parametrize(
    ("files", "splits"),
    [
        (["train.jsonl", "test.jsonl"], {"train", "test"}),
        (["data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet"], {"train"}),
        (
            ["data/train_sft-00000-of-00001.parquet", "data/test_sft-00000-of-00001.parquet"],
            {"train_sft", "test_sft"},
        ),
        (["gsm8k-train.csv", "gsm8k-validation.csv"], {"train", "validation"}),
        (["train/0.parquet", "train/1.parquet", "dev/0.parquet"], {"train", "validation"}),
        (["0000.parquet", "0001.parquet"], {"train"}),
        (["data-00000-of-00002.jsonl", "data-00001-of-00002.jsonl"], {"train"}),
        (["train.jsonl", "more.jsonl"], {"train", "more"}),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_splits_of_a_downloaded_folder(tmp_path: Path, files: list[str], splits: set[str]) -> None:
    folder = tmp_path / "set"
    for name in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        written = {".jsonl": jsonl, ".csv": csv_file, ".parquet": parquet}[Path(name).suffix](
            tmp_path, [{"prompt": name}]
        )
        written.rename(folder / name)
    (folder / "README.md").write_text("a card")
    (folder / "dataset_infos.json").write_text("{}")
    (folder / ".gitattributes").write_text("")
    found: list[str] = []
    for split in sorted(splits):
        found += [row["prompt"] for _, row in read_rows(Source(folder, split=split))]
    assert sorted(found) == sorted(files)
    with pytest.raises(IsobitError) as caught:
        list(read_rows(Source(folder, split="trian")))
    assert f"task.split: {folder} has no split 'trian'; known: " in str(caught.value)
    assert all(split in str(caught.value) for split in splits)


def test_training_and_held_out_data_are_splits_of_one_directory(tmp_path: Path) -> None:
    path = str(saved_splits(tmp_path, ROWS))
    task = load_task(TaskSettings(path=path, held_out_split="test"))
    assert (len(task.train), len(task.held_out)) == (5, 1)
    assert len(load_task(TaskSettings(path=path, held_out_path=path)).held_out) == 1
    assert len(load_task(TaskSettings(path=path, split="test", held_out_size=0)).train) == 1
    assert len(load_task(TaskSettings(path=path, held_out_size=2)).train) == 3


def test_a_format_is_known_by_content_or_forced(tmp_path: Path) -> None:
    for write in (jsonl, parquet):
        assert len(read(write(tmp_path, ROWS).rename(tmp_path / "rows"))) == 5
    table = csv_file(tmp_path, ROWS).rename(tmp_path / "rows.txt")
    assert len(read_examples(Source(table, "csv"))) == 5
    with pytest.raises(
        IsobitError,
        match=r"cannot tell its format .* set task\.format to one of jsonl, csv, parquet",
    ):
        read(table)
    csv_file(tmp_path, ROWS)
    jsonl(tmp_path, ROWS[:2])
    (tmp_path / "rows").unlink()
    assert len(read_examples(Source(tmp_path, "jsonl"))) == 2
    with pytest.raises(IsobitError, match=r"has csv and jsonl files; choose with task\.format"):
        read(tmp_path)


def truncated(folder: Path) -> Path:
    path = parquet(folder, ROWS)
    path.write_bytes(path.read_bytes()[:-30])
    return path


def damaged(folder: Path) -> Path:
    path = parquet(folder, ROWS)
    data = path.read_bytes()
    path.write_bytes(data[:4] + bytes(40) + data[44:])
    return path


def text_file(content: bytes, name: str = "rows.csv") -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        (folder / name).write_bytes(content)
        return folder / name

    return write


def not_utf8(folder: Path) -> Path:
    column = pa.array([b"good", b"\xff"]).view(pa.string())
    pq.write_table(pa.table({"prompt": column}), folder / "rows.parquet")
    return folder / "rows.parquet"


def columns_called(*names: str) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        pq.write_table(
            pa.table([pa.array(["a"])] * len(names), names=list(names)), folder / "rows.parquet"
        )
        return folder / "rows.parquet"

    return write


def an_image(folder: Path) -> Path:
    return parquet(folder, [{"prompt": "a", "image": b"\x89PNG\xff"}])


def an_empty_table(folder: Path) -> Path:
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), folder / "rows.parquet")
    return folder / "rows.parquet"


def different_shards(folder: Path) -> Path:
    parquet(folder / "set", [{"prompt": "a", "answer": "1"}], "0.parquet")
    parquet(folder / "set", [{"prompt": "b", "solution": "1"}], "1.parquet")
    return folder / "set"


def no_data(folder: Path) -> Path:
    for name in ("main", "socratic"):
        parquet(folder / "set" / name, ROWS, "train-00000-of-00001.parquet")
    return folder / "set"


def a_document(folder: Path) -> Path:
    (folder / "folder").mkdir()
    (folder / "folder" / "data.json").write_text('[{"prompt": "a"}]')
    return folder / "folder"


def an_empty_directory(folder: Path) -> Path:
    (folder / "set").mkdir()
    return folder / "set"


def no_train(folder: Path) -> Path:
    for name in ("easy", "hard"):
        parquet(folder / "set", ROWS, f"{name}-00000-of-00001.parquet")
    return folder / "set"


def half_saved(folder: Path) -> Path:
    path = saved(folder, ROWS)
    next(path.glob("*.arrow")).unlink()
    return path


def described_as(description: Any) -> Callable[[Path], Path]:
    """A saved dataset with another dataset_info.json."""

    def write(folder: Path) -> Path:
        path = saved(folder, ROWS)
        (path / "dataset_info.json").write_text(json.dumps(description))
        return path

    return write


def broken_splits(folder: Path) -> Path:
    path = saved_splits(folder, ROWS)
    (path / "dataset_dict.json").write_text("{}")
    return path


def splits_without_names(folder: Path) -> Path:
    path = saved_splits(folder, ROWS)
    (path / "dataset_dict.json").write_text('{"splits": ["train", null]}')
    return path


BAD: list[tuple[Callable[[Path], Path], str]] = [
    (truncated, "rows.parquet: truncated or corrupt Parquet: "),
    (damaged, "rows.parquet: truncated or corrupt Parquet: "),
    (text_file(b"", "rows.parquet"), "rows.parquet: truncated or corrupt Parquet: "),
    (an_empty_table, "rows.parquet: no examples in it"),
    (not_utf8, "rows.parquet: row 2: not UTF-8 text"),
    (columns_called("prompt", "a", "a"), "rows.parquet: two columns are called 'a'; rename one"),
    (
        columns_called("question"),
        "row 1: no column 'prompt' and none named with task.columns: {prompt: ...}; known: "
        "question",
    ),
    (
        columns_called("prompt", "log_extra"),
        "row 1: column 'log_extra' has a name that reward functions get from isobit",
    ),
    (an_image, "row 1: column 'image' holds bytes, which is not text, numbers or lists"),
    (different_shards, "1.parquet: row 1: its columns are not those of"),
    (
        no_data,
        "or what save_to_disk writes; it has the folders main, socratic: name one",
    ),
    (an_empty_directory, "no data in this directory"),
    (
        a_document,
        "folder: no data in this directory: expected Parquet, JSONL or CSV files, or what "
        "save_to_disk writes; it has data.json: name the file itself, if its rows are there",
    ),
    (no_train, "has several splits; say which with task.split; known: easy, hard"),
    (half_saved, "saved: not a whole dataset of save_to_disk: "),
    (described_as({"features": "text"}), "saved: not a whole dataset of save_to_disk: "),
    (described_as({"features": {"prompt": "text"}}), "saved: not a whole dataset of save_to"),
    (described_as([]), "saved: not a whole dataset of save_to_disk: "),
    (described_as(json.loads("[" * 80 + "]" * 80)), "saved: not a whole dataset of save_to_disk: "),
    (broken_splits, "dataset_dict.json: does not list the splits"),
    (splits_without_names, "dataset_dict.json: does not list the splits"),
    (text_file(b""), "rows.csv: no examples in it"),
    (text_file(b"prompt,answer\n"), "rows.csv: no examples in it"),
    (
        text_file(b"prompt,answer\na,1\n\nb\n"),
        "rows.csv:4: 1 field, but the header names 2; a comma or a line end inside",
    ),
    (text_file(b"prompt,answer\na,1,2\n"), "rows.csv:2: 3 fields, but the header names 2"),
    (text_file(b"prompt,,x\na,1,2\n"), "rows.csv:1: the header has an empty name at column 2"),
    (text_file(b"prompt,prompt\na,1\n"), "rows.csv:1: two columns are called 'prompt'"),
    (text_file(b'prompt\na\n"b\n'), "rows.csv:3: malformed CSV: unexpected end of data"),
    (text_file(b"prompt\na\n\xff\n"), "rows.csv:3: not UTF-8 text"),
    (text_file(b"prompt,answer\na,1\n,2\n"), "rows.csv:3: 'prompt' is empty"),
    (
        text_file(b'{"prompt": "a"}\n{"prompt": 3}\n', "rows.jsonl"),
        "rows.jsonl:2: 'prompt' must be text or a list of chat",
    ),
    (
        text_file(b"\x1f\x8b\x08\0", "rows.gz"),
        "rows.gz: malformed gzip: the file is cut off or damaged",
    ),
    (
        text_file(gzip.compress(b"hello"), "rows.gz"),
        "rows.gz: cannot tell its format from name or content",
    ),
    (text_file(bz2.compress(b"hello"), "rows.jsonl.bz2"), "rows.jsonl.bz2: packed by bzip2, which"),
    (
        text_file(lzma.compress(b"hello"), "rows"),
        "rows: packed by xz, which is not read; unpack it",
    ),
    (text_file(b"PK\x03\x04....", "rows.xlsx"), "rows.xlsx: packed by zip, which is not read"),
    (text_file(b"\x28\xb5\x2f\xfd....", "rows.jsonl.zst"), "rows.jsonl.zst: packed by zstd, which"),
    (
        text_file(b'{"prompt": "a"}\n{"prompt": "b", "x": {"y": 1, "y": 2}}\n', "rows.jsonl"),
        "rows.jsonl:2: malformed JSON: key 'y' comes twice in one object",
    ),
    (
        text_file(b'[{"prompt": "a", "prompt": "b"}]', "rows.json"),
        "rows.json: malformed JSON: key 'prompt' comes twice in one object",
    ),
    (
        text_file(gzip.compress(b'{"prompt": 1}'), "rows.jsonl.gz"),
        "rows.jsonl.gz:1: 'prompt' must be text",
    ),
    (text_file(gzip.compress(b"x" * 4000)[:-9], "rows.jsonl.gz"), "rows.jsonl.gz: malformed gzip"),
    (
        text_file(b'[{"prompt": "a"}, 3]', "rows.json"),
        "rows.json: row 2: expected a JSON object of columns, got a number",
    ),
    (text_file(b'[{"prompt": "a"},\n {"prompt" 3}]', "rows.json"), "rows.json:2: malformed JSON"),
    (text_file(b'[{"prompt": "\xff"}]', "rows.json"), "rows.json:1: not UTF-8 text"),
    (text_file(b"[]", "rows.json"), "rows.json: no examples in it"),
    (
        text_file(b'{\n "data": [{"prompt": "a"}]\n}', "rows.json"),
        "rows.json: one JSON object; expected an array of rows, [{...}, {...}], or one object a "
        "line",
    ),
    (lambda folder: folder / "gone.parquet", "cannot read data file"),
]


@pytest.mark.parametrize(("make", "message"), BAD, ids=[message[:40] for _, message in BAD])
def test_what_cannot_be_read_is_named_in_one_line(
    tmp_path: Path, make: Callable[[Path], Path], message: str
) -> None:
    with pytest.raises(IsobitError) as caught:
        read(make(tmp_path))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_settings_that_do_not_fit_the_data(tmp_path: Path) -> None:
    file, folder = str(jsonl(tmp_path, ROWS)), str(saved(tmp_path, ROWS))
    for changes, message in [
        (
            {"path": file, "split": "train"},
            r"task\.split: .*rows\.jsonl is a file, which has no splits",
        ),
        (
            {"path": folder, "split": "train"},
            r"task\.split: .*saved is one saved dataset, which has no splits",
        ),
        (
            {"path": file, "format": "dataset"},
            r"task\.format: dataset is a directory, and .* is a file",
        ),
        (
            {"path": file, "held_out_split": "test"},
            r"task\.held_out_split: .* is a file, which has no splits",
        ),
        ({"path": file, "format": "parquet"}, "truncated or corrupt Parquet"),
        ({"path": folder, "format": "csv"}, "expected csv files"),
        (
            {"path": file, "columns": {"completions": "answer"}},
            r"task\.columns: 'completions' is a name that reward",
        ),
        (
            {"path": file, "columns": {"gold": "anser"}},
            r"rows\.jsonl:1: no column 'anser' \(task\.columns\.gold\)",
        ),
        (
            {"name": "arithmetic", "columns": {"a": "b"}},
            r"task\.columns: task arithmetic makes its own data",
        ),
        ({"name": "countdown", "chat": True}, r"task\.chat: task countdown makes its own data"),
        (
            {"name": "arithmetic", "format": "csv"},
            r"task\.format: task arithmetic makes its own data",
        ),
    ]:
        with pytest.raises(IsobitError, match=message):
            load_task(TaskSettings(**changes))  # type: ignore[arg-type]


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    return lambda name: monkeypatch.setitem(sys.modules, name, None)  # type: ignore[arg-type]


def test_what_needs_an_extra_says_how_to_install_it(
    tmp_path: Path, without: Callable[[str], None]
) -> None:
    file, folder = parquet(tmp_path, ROWS), saved(tmp_path, ROWS)
    without("datasets")
    assert len(read(file)) == 5, "pyarrow is enough for Parquet"
    with pytest.raises(
        IsobitError,
        match=r"saved: .* needs datasets; install it with: pip install datasets$",
    ):
        read(folder)
    without("pyarrow")
    with pytest.raises(
        IsobitError, match=r"Parquet needs pyarrow; install it with: pip install pyarrow$"
    ):
        read(file)


LONG = "a word " * 20_000
REPEATED = pa.DictionaryArray.from_arrays(pa.array([0] * 5_000, pa.int32()), pa.array([LONG]))
BOMBS: dict[str, Any] = {
    "a text of all rows": pa.table({"prompt": REPEATED}),
    "a text of a list": pa.table(
        {
            "prompt": pa.array(["a"]),
            "found": pa.ListArray.from_arrays(pa.array([0, 5_000], pa.int32()), REPEATED),
        }
    ),
    "a text in objects": pa.table(
        {"prompt": pa.StructArray.from_arrays([REPEATED], names=["content"])}
    ),
    "nothing, often": pa.table({"prompt": pa.nulls(10_000_000, pa.string())}),
    "one long text": pa.table({"prompt": pa.array(["\0" * (1 << 27)])}),
}


@pytest.mark.parametrize("name", BOMBS)
def test_what_a_parquet_file_unpacks_to_is_bounded(name: str, tmp_path: Path) -> None:
    """As of gzip, and before rows are made. The control: the same text in as many rows as a file of
    this size may have."""
    path = tmp_path / "rows.parquet"
    table = BOMBS[name]
    if name == "a text of a list":  # which cannot be written as a dictionary
        table = table.set_column(1, "found", table["found"].cast(pa.list_(pa.string())))
    pq.write_table(table, path, compression="zstd")
    assert path.stat().st_size < 1 << 17
    with pytest.raises(
        IsobitError, match=r"rows\.parquet: unpacks to more than 400 times its size"
    ):
        next(parquet_rows(path))


def test_what_many_rows_have_is_read(tmp_path: Path) -> None:
    """A system prompt in each of some rows, in a column and in messages; equal to what was written."""
    rows = [
        {
            "messages": [
                {"role": "system", "content": LONG},
                {"role": "user", "content": f"{i}+1="},
            ],
            "prompt": f"{i}",
            "system": LONG if i % 2 else None,
        }
        for i in range(50)
    ]
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=20)
    assert [row for _, row in parquet_rows(path)] == rows


def test_a_saved_dataset_is_bounded_too(tmp_path: Path) -> None:
    """Of a dictionary in its Arrow file; the control has few rows."""
    small = pa.table({"prompt": REPEATED.slice(0, 3)})
    for table, name in ((pa.table({"prompt": REPEATED}), "large"), (small, "small")):
        batches = [(f"{name}", table.column_names, table.to_batches(), 1 << 26)]
        for where, names, parts, most in batches:
            rows = arrow_rows._table_rows(Path(where), names, parts, most)
            if name == "small":
                assert [row for _, row in rows] == [{"prompt": LONG}] * 3
            else:
                with pytest.raises(IsobitError, match="unpacks to more than"):
                    next(rows)
