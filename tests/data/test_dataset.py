"""What of a row becomes an example, the order of examples, and the held-out split."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isobit.data.dataset import Dataset, Example, Shaping, permutation, read_examples, split
from isobit.data.readers import Source
from isobit.errors import IsobitError


def write(path: Path, *rows: Any) -> Path:
    path.write_text(
        "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    )
    return path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "data.jsonl"


def read(path: Path, **shaping: Any) -> list[Example]:
    return read_examples(Source(path), Shaping(**shaping))


def numbered(count: int) -> list[Example]:
    return [Example(i, f"prompt {i}", {"answer": i}) for i in range(count)]


def test_every_column_but_the_prompt_is_passed_through(file: Path) -> None:
    write(
        file,
        {"prompt": "one", "answer": 1, "tags": ["a"], "completion": "x"},
        "",
        {"completion": "é", "tags": {}, "answer": None, "prompt": "two"},
    )
    assert read(file) == [
        Example(0, "one", {"answer": 1, "tags": ["a"], "completion": "x"}),
        Example(1, "two", {"answer": None, "tags": {}, "completion": "é"}),
    ]


def test_another_prompt_column_stays_a_column(file: Path) -> None:
    write(file, {"question": "1+1?", "solution": "2"})
    (example,) = read(
        file, columns={"prompt": "question", "answer": "solution"}, template="Q: {prompt} {x}"
    )
    assert example.prompt == "Q: 1+1? {x}"
    assert example.columns == {"question": "1+1?", "solution": "2", "answer": "2"}


def test_chat_prompts_are_kept_and_text_can_become_one(file: Path) -> None:
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    write(file, {"prompt": chat})
    assert read(file)[0].prompt == chat
    assert read(file, text_template="unused {prompt}")[0].prompt == chat
    write(file, {"prompt": "Hi"})
    assert read(file, chat=True, system="Be brief.")[0].prompt == chat
    assert read(file, text_template="<{prompt}>")[0].prompt == "<Hi>"
    assert read(file, template="[{prompt}]", text_template="<{prompt}>")[0].prompt == "[Hi]"


def test_a_system_message_goes_before_every_chat(file: Path) -> None:
    user = {"role": "user", "content": "Hi"}
    write(file, {"prompt": [user]})
    assert read(file, system="S")[0].prompt == [{"role": "system", "content": "S"}, user]
    assert read(file, chat=True)[0].prompt == [user]
    write(file, {"prompt": [{"role": "system", "content": "own"}, user]})
    with pytest.raises(
        IsobitError, match=r":1: the chat has a system message of its own: no task\.system for it"
    ):
        read(file, system="S")


def test_messages_are_the_prompt_where_there_is_none(file: Path) -> None:
    """The assistant's last message is what supervised training learns; rewards get it as
    `completion`."""
    user, gold = {"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}
    rest = [gold, {"role": "user", "content": "sure?"}]
    write(
        file, {"messages": [user, gold], "level": 1}, {"messages": [user, *rest, gold], "level": 2}
    )
    first, second = read(file)
    assert (first.prompt, second.prompt) == ([user], [user, *rest])
    assert first.columns == {"messages": [user, gold], "level": 1, "completion": "2"}
    write(file, {"messages": [user, *rest], "completion": "own"})
    assert read(file)[0] == Example(
        0, [user, *rest], {"messages": [user, *rest], "completion": "own"}
    )
    write(file, {"messages": [user, gold], "completion": "own"})
    assert read(file)[0].columns["completion"] == "own"
    write(file, {"prompt": "p", "messages": [user, gold]})
    assert read(file)[0] == Example(0, "p", {"messages": [user, gold]})
    write(file, {"prompt": "p", "conversation": [user, gold]})
    found = read(file, columns={"messages": "conversation"})[0]
    assert (found.prompt, found.columns["completion"], found.columns["prompt"]) == (
        [user],
        "2",
        "p",
    )


def test_a_chat_prompt_keeps_its_last_message_and_loses_null_keys(file: Path) -> None:
    prompt = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
    write(file, {"prompt": [{**message, "name": None, "tool_calls": None} for message in prompt]})
    assert read(file)[0] == Example(0, prompt, {})


def test_columns_are_renamed(file: Path) -> None:
    write(file, {"question": "q", "answer": "long", "final": "7", "completions": "c"})
    columns = {
        "prompt": "question",
        "answer": "final",
        "solution": "answer",
        "earlier": "completions",
    }
    assert read(file, columns=columns)[0] == Example(
        0, "q", {"question": "q", "answer": "7", "final": "7", "solution": "long", "earlier": "c"}
    )


def test_the_answer_of_verl_rows_is_found(file: Path) -> None:
    verl = {
        "prompt": "p",
        "data_source": "s",
        "reward_model": {"style": "rule", "ground_truth": "42"},
    }
    write(file, verl)
    assert read(file)[0].columns["answer"] == "42"
    write(
        file, {**verl, "answer": "a long solution\n#### 42"}
    )  # as `datasets` keeps it where a row is mapped
    assert read(file)[0].columns["answer"] == "42"
    assert (
        read(file, columns={"answer": "answer"})[0].columns["answer"] == "a long solution\n#### 42"
    )
    write(file, {**verl, "answer": "own", "reward_model": {"style": "model", "ground_truth": None}})
    assert read(file)[0].columns["answer"] == "own"


def test_a_byte_order_mark_and_windows_line_ends_are_read(file: Path) -> None:
    file.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n{"prompt": "b\\u2028"}\r\n')
    assert [example.prompt for example in read(file)] == ["a", "b\u2028"]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], ": no examples in it: expected a row for each prompt"),
        (["", "  "], ": no examples"),
        ([{"prompt": "a"}, "{oops"], ":2: malformed JSON: Expecting property name"),
        (["[" * 100_000], ": malformed JSON: nested too deeply"),
        (['{"prompt": ' + "[" * 100_000], ":1: malformed JSON: nested too deeply"),
        (['{"prompt": ' + "9" * 5000 + "}"], ":1: malformed JSON"),
        (["[1]"], ": row 1: expected a JSON object of columns, got a number"),
        ([{"prompt": "a"}, "[1]"], ":2: expected a JSON object of columns, got a list"),
        (["null"], ":1: expected a JSON object of columns, got null"),
        (
            [{"promt": "a"}],
            ":1: no column 'prompt' and none named with task.columns: {prompt: ...}; did you "
            "mean 'promt'?",
        ),
        ([{"prompt": ""}], ":1: 'prompt' is empty"),
        ([{"prompt": "a"}, {"prompt": " \n"}], ":2: 'prompt' is empty"),
        ([{"prompt": []}], ":1: 'prompt' is an empty list of messages"),
        ([{"prompt": None}], ":1: 'prompt' must be text or a list of chat messages, got null"),
        ([{"prompt": 3}], ":1: 'prompt' must be text or a list of chat messages, got a number"),
        ([{"prompt": {"role": "user"}}], "got an object"),
        ([{"prompt": [{"role": "user"}]}], ":1: message 0 of 'prompt' must be"),
        ([{"prompt": [{"role": "user", "content": ["x"]}]}], ":1: message 0 of 'prompt' must be"),
        (
            [{"prompt": "a"}, {"prompt": [{"role": "user", "content": "x"}]}],
            ":2: 'prompt' is text in one row and chat",
        ),
        (
            [{"prompt": "a", "x": 1}, "", {"prompt": "b", "y": 1}],
            "data.jsonl:1: lacks 'x'; adds 'y'",
        ),
        ([{"prompt": "a", "x": 1}, {"x": 1}], "data.jsonl:1: lacks 'prompt'"),
        ([{"messages": "a"}], ":1: 'messages' must be a list of chat messages, got text"),
        (
            [{"messages": [{"role": "assistant", "content": "a"}]}],
            ":1: 'messages' has the assistant's message only",
        ),
        (
            [
                {"messages": [{"role": "user", "content": "a"}, {"role": role, "content": "b"}]}
                for role in ("assistant", "user")
            ],
            ":2: 'messages' ends with the assistant's message in one row and not in another",
        ),
        (
            [{"prompt": "a", "completions": 1}],
            ":1: column 'completions' has a name that reward functions get",
        ),
    ],
)
def test_bad_rows_are_named_with_file_and_line(file: Path, rows: list[Any], message: str) -> None:
    write(file, *rows)
    with pytest.raises(IsobitError) as caught:
        read(file)
    assert f"{file}{message}" in str(caught.value) or message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_files_that_cannot_be_read_are_named(tmp_path: Path, file: Path) -> None:
    with pytest.raises(IsobitError, match=r"cannot read data file .*none\.jsonl: No such file"):
        read(tmp_path / "none.jsonl")
    file.write_bytes(b'{"prompt": "a"}\n{"prompt": "\xff"}\n')
    with pytest.raises(IsobitError, match=":2: not UTF-8 text"):
        read(file)
    write(file, {"prompt": "a", "anser": 1})
    with pytest.raises(
        IsobitError, match=r"no column 'answr' \(task.columns.answer\); did you mean 'anser'"
    ):
        read(file, columns={"answer": "answr"})
    write(file, {"prompt": [{"role": "user", "content": "x"}]})
    with pytest.raises(IsobitError, match=":1: the prompt is a chat already"):
        read(file, template="{prompt}!")


def test_the_order_is_a_function_of_seed_and_epoch_alone() -> None:
    data = Dataset(numbered(10), seed=3)
    first = [data.at(cursor).index for cursor in range(30)]
    again = Dataset(numbered(10), seed=3)
    assert [again.at(cursor).index for cursor in reversed(range(30))] == first[::-1]
    epochs = [first[:10], first[10:20], first[20:]]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert [Dataset(numbered(10), seed=4).at(cursor).index for cursor in range(30)] != first
    assert [Dataset(numbered(10), shuffle=False).at(cursor).index for cursor in range(12)] == [
        *range(10),
        0,
        1,
    ]
    assert first[10:20] == list(data.order(1))


def test_the_order_of_epochs_stays_what_it_was() -> None:
    """Recorded: a run that resumes under another version of numpy must see the same prompts."""
    assert permutation(8, 0, 0) == RECORDED[0]
    assert permutation(8, 2**63 - 1, 5) == RECORDED[1]


RECORDED = ((0, 2, 1, 5, 4, 3, 6, 7), (5, 3, 6, 1, 7, 0, 2, 4))


def test_an_empty_dataset_says_so() -> None:
    with pytest.raises(IsobitError, match="no examples"):
        Dataset([]).at(0)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 8), min_size=2, max_size=30), st.integers(0, 6), st.integers(0, 5))
def test_what_is_held_out_is_never_trained_on(prompts: list[int], size: int, seed: int) -> None:
    rows = [Example(i, f"prompt {p}", {}) for i, p in enumerate(prompts)]
    if size >= len(set(prompts)):
        with pytest.raises(IsobitError, match=r"cannot hold out .* rows of \d+ different prompts"):
            split(rows, size, seed, "f")
        return
    train, held_out = split(rows, size, seed, "f")
    held = {str(example.prompt) for example in held_out}
    assert len(held) == len(held_out) == size
    assert held.isdisjoint(str(example.prompt) for example in train)
    assert held | {str(example.prompt) for example in train} == {
        str(example.prompt) for example in rows
    }
    assert [example.index for example in train] == sorted(example.index for example in train)
