"""Answers as a majority vote counts them."""

import pytest

from isobit.errors import IsobitError
from isobit.evaluation.answers import answer_extractor


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("It is 1,000.\n#### 1,000", "1000"),
        ("so 1000.0", "1000"),
        ("#### 10", "10"),
        ("-2.50 dollars", "-2.5"),
        ("-0.0", "0"),
        ("no number", None),
    ],
)
def test_gsm8k_takes_the_final_number_by_value(text: str, answer: str | None) -> None:
    assert answer_extractor("gsm8k")(text) == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"\boxed{1} then \boxed{\frac{1}{2}} done", r"\frac{1}{2}"),
        (r"\boxed{1} then \boxed{never closed", None),
        ("first\n#### 12 \nand more", "12"),
        ("####\n7", "7"),
        ("  42 \n", "42"),
        (" \n", None),
        (r"\boxed{ }", None),
    ],
)
def test_other_tasks_take_what_is_marked_else_the_text(text: str, answer: str | None) -> None:
    assert answer_extractor("file")(text) == answer


def test_a_pattern_takes_its_last_match_and_first_group() -> None:
    assert answer_extractor("gsm8k", r"answer: (\w+)")("answer: a, no, answer: b!") == "b"
    assert answer_extractor("file", r"[A-D]")("A or C") == "C"
    assert answer_extractor("file", r"x(y)?")("x") is None
    assert answer_extractor("file", r"\d+")("none") is None
    with pytest.raises(
        IsobitError, match=r"answer pattern '\(': not a regular expression: missing \)"
    ):
        answer_extractor("file", "(")
