"""The final number of a text, and the real answers scoring 1.0 on every row."""

import json
from dataclasses import replace
from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isobit.errors import IsobitError
from isobit.tasks.builtin import TaskSettings, load_task
from isobit.tasks.builtin.gsm8k import final_number, reward


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("#### 18", "18"),
        ("so 3 and 4\n#### 5", "5"),
        ("#### 1\n#### 2", "2"),
        ("#### 2 of 7", "2"),
        ("it is 42 ####", "42"),
        ("####", None),
        ("no number", None),
        ("", None),
        ("1,000", "1000"),
        ("1000.0", "1000"),
        ("$1,000", "1000"),
        ("$ 1,000.50", "1000.5"),
        ("The answer is 1,234,567.", "1234567"),
        ("18.", "18"),
        ("50%", "50"),
        ("#### -7", "-7"),
        ("#### \N{MINUS SIGN}7", "-7"),
        ("-$5", "-5"),
        ("$-5", "-5"),
        ("= -3", "-3"),
        ("(-3)", "-3"),
        ("16-3", "3"),
        ("16 - 3", "3"),
        ("(2+1)-3", "3"),
        ("50%-3", "3"),
        ("x-3", "3"),
        (".5", "0.5"),
        ("0.25 apples", "0.25"),
        ("a, 12, b", "12"),
        ("1,23", "23"),
        ("9" * 5000, "9" * 5000),
        ("\u0663", None),
    ],
)
def test_the_final_number(text: str, expected: str | None) -> None:
    assert final_number(text) == (None if expected is None else Decimal(expected))


numbers = st.decimals(min_value=-(10**12), max_value=10**12, places=3, allow_nan=False)


@given(
    numbers,
    st.sampled_from(
        ["{:f}", "{:,f}", "{:f}%", "{:f}.", "{:,f} dollars", " {:f}\n", "**{:f}**", "${:,f}"]
    ),
)
def test_a_number_is_read_however_it_is_written(number: Decimal, form: str) -> None:
    for text in (number, number.normalize() + 0):
        written = form.format(text)
        assert final_number(f"First 12 and 3.\n#### {written}") == number
        assert final_number(f"First 12 and 3, so {written}") == number
        assert reward(["q"], [f"so it is {written}"], [f"steps 5\n#### {number:f}"]) == [1.0]
        assert reward(["q"], [f"so it is {written}"], [f"#### {number + 1:f}"]) == [0.0]


@given(st.text(alphabet="0123456789,.-$%# \nab"))
def test_any_text_has_a_number_or_none(text: str) -> None:
    number = final_number(text)
    assert (number is None) == (not any(character.isdigit() for character in text))


def test_rewards_take_chat_completions_and_numeric_answers() -> None:
    completions = [[{"role": "assistant", "content": "#### 1,000"}], "none", "1000.0"]
    assert reward(["q"] * 3, completions, ["1000", "3", 1000], extra=[1, 2, 3]) == [1.0, 0.0, 1.0]
    with pytest.raises(ValueError, match="the answer column has no number: 'yes'"):
        reward(["q"], ["1"], ["yes"])


def test_gold_answers_score_one_on_every_row_of_the_real_file(gsm8k_test: Path) -> None:
    task = load_task(TaskSettings("gsm8k", str(gsm8k_test), str(gsm8k_test)))
    rows = task.held_out.examples
    assert len(rows) == sum(1 for line in gsm8k_test.open() if line.strip())
    gold = [row.columns["answer"] for row in rows]
    prompts = [row.prompt for row in rows]
    assert reward(prompts, gold, gold) == [1.0] * len(rows)
    others = gold[1:] + gold[:1]
    same = [final_number(a) == final_number(b) for a, b in zip(gold, others)]
    assert reward(prompts, others, gold) == [float(s) for s in same]
    assert sum(same) < len(rows) / 10


def test_the_loader_puts_the_question_into_the_template(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(
        "".join(json.dumps({"question": f"{i}?", "answer": f"#### {i}"}) + "\n" for i in range(30))
    )
    task = load_task(TaskSettings("gsm8k", str(path)))
    assert (len(task.train), len(task.held_out)) == (27, 3)
    example = task.train.examples[0]
    assert str(example.prompt).startswith(f"Question: {example.columns['question']}\n")
    assert task.gold == "answer"
    plain = load_task(TaskSettings("gsm8k", str(path), prompt_template="{prompt}"))
    assert plain.train.examples[0].prompt == example.columns["question"]


ASK = "End your answer with #### and the number."


@pytest.mark.parametrize(
    ("chat", "options", "template", "expected"),
    [
        (False, {}, None, f"Question: 2?\n{ASK}\nAnswer:"),
        (False, {"instruction": True}, None, f"Question: 2?\n{ASK}\nAnswer:"),
        (False, {"instruction": False}, None, "Question: 2?\nAnswer:"),
        (True, {}, None, "2?"),
        (True, {"instruction": False}, None, "2?"),
        (True, {"instruction": True}, None, f"2?\n{ASK}"),
        (True, {}, "Solve: {prompt}", "Solve: 2?"),
    ],
)
def test_a_chat_leaves_the_text_template_out(
    tmp_path: Path, chat: bool, options: dict[str, bool], template: str | None, expected: str
) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"question": "2?", "answer": "2"}\n')
    settings = TaskSettings(
        "gsm8k", str(path), chat=chat, options=options, prompt_template=template, held_out_size=0
    )
    prompt = load_task(settings).train.examples[0].prompt
    assert prompt == ([{"role": "user", "content": expected}] if chat else expected)


def test_the_instruction_is_refused_where_it_cannot_be_added(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"question": "2?", "answer": "2"}\n')
    asked = TaskSettings("gsm8k", str(path), options={"instruction": True}, held_out_size=0)
    with pytest.raises(
        IsobitError, match=r"task\.options\.instruction: task\.prompt_template says what is asked"
    ):
        load_task(replace(asked, prompt_template="{prompt}"))
    with pytest.raises(
        IsobitError, match=r"task\.options\.instruction: expected true or false, got 1"
    ):
        load_task(replace(asked, options={"instruction": 1}))
    with pytest.raises(
        IsobitError, match=r"task\.options\.instructions: unknown, did you mean 'instr"
    ):
        load_task(replace(asked, options={"instructions": True}))
    path.write_text('{"question": [{"role": "user", "content": "2?"}], "answer": "2"}\n')
    with pytest.raises(
        IsobitError, match=r"task\.options\.instruction: the prompts of .* are chats already"
    ):
        load_task(asked)


def test_answers_must_be_there_and_have_numbers(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"question": "a", "solution": "x"}\n{"question": "b", "solution": "2"}\n')
    with pytest.raises(
        IsobitError, match=r"no column 'answer'; name yours with task\.columns: \{answer"
    ):
        load_task(TaskSettings("gsm8k", str(path)))
    with pytest.raises(IsobitError, match=r"data\.jsonl:1: the answer has no number in it"):
        load_task(TaskSettings("gsm8k", str(path), columns={"answer": "solution"}))
    with pytest.raises(
        IsobitError, match=r"task\.path: task gsm8k needs a file or directory of data"
    ):
        load_task(TaskSettings("gsm8k"))
