"""The reward `math`: where an answer is marked, how it is written, and which answers are equal."""

import itertools
from typing import Any

import pytest

from isobit.evaluation.answers import marked_answer
from isobit.tasks.rewards.named import build
from isobit.tasks.rewards.named.marks import marked

pytest.importorskip("math_verify")


def rate(text: str, answer: Any, **options: Any) -> Any:
    reward = build("math", options)
    reward.prepare()
    reward.check({"answer": answer})
    return reward.score(text, {"answer": answer}, None)


PIECEWISE = r"\left\{\begin{array}{l}x=1\\y=2\end{array}\right."
MARKS = [
    (r"a \boxed{1} b \boxed{\frac{1}{2}} c", r"\frac{1}{2}"),
    ("x #### 5 \nmore", "5"),
    ("x ####", ""),
    ("#### 42 eggs", "42"),
    ("#### 3x + 5", "3x + 5"),
    ("no mark", None),
    # escaped braces are characters
    (rf"First \boxed{{7}}. Then \boxed{{{PIECEWISE}}} end", PIECEWISE),
    (r"\boxed{7} then \boxed{1\}}", r"1\}"),
    (r"\boxed{\left\{x\right.} }", r"\left\{x\right."),
    (r"\boxed{a\\{b}}", r"a\\{b}"),
    (r"\boxed{\left. f \right\}}", r"\left. f \right\}"),
    # cut off: the last box has no answer, and an earlier one is not the last
    (r"\boxed{7} no, \boxed{8", ""),
    (r"\boxed{7} no, \boxed{\frac{1}{2", ""),
    (r"\boxed{\frac{1}{}", ""),
    (r"\boxed{7} no, \boxed{\{8}", r"\{8"),
    (r"#### 5 \boxed{6", ""),
    (r"\boxed{7 or rather \boxed{8}", "8"),
    # other boxes
    (r"\boxed{7} and \fbox{8}", "8"),
    (r"\fbox {8}", "8"),
    (r"$\boxed 7$.", "7"),
    (r"it is $\boxed 12x$ indeed", "12x"),
    (r"it is \boxed 12, indeed", "12"),
    (r"it is \boxed 12 and $x$ is not", "12"),
    (r"$\boxed\frac12$", r"\frac12"),
    (r"\boxed{\boxed{7}}", "7"),
    (r"\boxed{x = \fbox{3} + \boxed{4}}", "x = {3} + {4}"),
    # no boxes
    (r"\boxed{7}, as asked in \boxed{}", "7"),
    (r"\boxed{7}, written with \boxed and braces", "7"),
    (r"\boxedx{7}", None),
    (r"\boxed{ }", ""),
]


@pytest.mark.parametrize(("text", "answer"), MARKS)
def test_where_an_answer_is_marked(text: str, answer: str | None) -> None:
    assert marked(text) == answer
    if answer is not None:
        assert marked_answer(text) == (answer or None)


def test_very_many_boxes_take_no_time_that_grows_with_their_square() -> None:
    assert marked(r"\boxed{" * 100_000) == ""
    assert marked(r"\boxed{" * 100_000 + "7" + "}" * 100_000) == "7"


EQUAL = [
    # GSM8K: currencies, thousands, percent
    *[(r"\boxed{\$18}", "18"), (r"$\boxed{\$18}$ a day", r"\$18"), (r"\boxed{$18}", "18")],
    *[("#### $18", "18"), ("#### \\$3.50", "3.5"), (r"\boxed{-\$18}", "-18")],
    *[(r"\boxed{\$-18}", "-18"), (r"\boxed{\text{\$}18}", "18"), (r"\boxed{€18}", "18")],
    *[(r"\boxed{18 dollars}", "18"), (r"\boxed{18\text{ dollars}}", "18")],
    *[(r"It is \boxed{\$10,000}.", "10,000"), (r"\boxed{10,000}", "10000")],
    *[(r"\boxed{10{,}000}", "10,000"), (r"\boxed{10\,000}", "10000")],
    *[(r"\boxed{10,\!000}", "10000"), (r"\boxed{10 000}", "10000")],
    *[(r"\boxed{1\,234\,567.89}", "1,234,567.89"), (r"\boxed{10~000}", "10000")],
    *[(r"\boxed{10\text{,}000}", "10000"), (r"\boxed{50\%}", "50"), (r"\boxed{50}", r"50\%")],
    *[(r"\boxed{0.5}", "50%"), (r"\boxed{12.5\%}", "12.5"), (r"\boxed{\frac{25}{2}\%}", "12.5")],
    *[(r"\boxed{50 percent}", "50"), ("It is 50%.", "50"), ("#### 42 eggs", "42")],
    *[("The answer is \\$18.", "18"), ("He has $5 and then $18 left", "18")],
    ("the answer is 42", "42"),
    # MATH
    *[(r"\boxed{\frac12}", "0.5"), (r"\boxed{\dfrac{9}{7}}", r"\frac97")],
    *[(r"\boxed{11\sqrt2}", r"11\sqrt{2}"), ("\\boxed{Evelyn}", r"\text{Evelyn}")],
    *[(r"\boxed{(C)}", r"\text{(C)}"), (r"\boxed{\text{C}}", r"\text{(C)}")],
    *[(r"\boxed{90^\circ}", "90"), (r"\boxed{90°}", "90"), (r"\boxed{[-2,7]}", r"x \in [-2,7]")],
    (r"\boxed{(3, \frac{\pi}{2})}", r"\left( 3, \frac{\pi}{2} \right)"),
    (r"\boxed{6-5i}", "6 - 5i"),
    (r"\boxed{(-\infty,0)\cup(0,\infty)}", r"(-\infty, 0) \cup (0, \infty)"),
    (r"\boxed{.35}", "0.35"),
    (r"\boxed{\begin{pmatrix} 1 \\ 2 \end{pmatrix}}", r"\begin{pmatrix}1\\2\end{pmatrix}"),
    *[(r"\boxed{x=5}", "5"), (r"\boxed{4\frac12}", "4.5"), (r"\boxed{2^{10}}", "1,024")],
    *[(r"\boxed{1.5\times10^3}", "1500"), (r"\boxed{3.5 × 2}", "7"), (r"\boxed{−5}", "-5")],
    *[(r"\boxed{42.}", "42"), (r"\boxed{\textbf{42}}", "42"), (r"\boxed{\mbox{No}}", r"\text{No}")],
    *[(r"\boxed{5x^2}", "5x^2"), (r"\boxed{\text{June 20}}", r"\text{June 20}")],
    (rf"\boxed{{{PIECEWISE}}}", PIECEWISE),
    *[(rf"\boxed{{ {PIECEWISE} }}", PIECEWISE.replace("=", " = ")), (r"\boxed 7", "7")],
    *[(r"\fbox{7}", "7"), (r"\boxed{\boxed{12}^2}", "144"), (r"\boxed{2**3}", "8")],
    *[(r"\boxed{0.00001}", "1e-05"), ("#### 1.5e3", "1500"), (r"\boxed{$1$ and $2$}", "1,2")],
    *[(r"\boxed{\(1\) and \(2\)}", "1,2"), (r"\boxed{$$7$$}", "7")],
    *[(r"\boxed{\langle 1,2\rangle}", "(1,2)"), (r"\[ \boxed{42} \]", "42")],
    (r"\boxed{\(42\)}", "$42$"),
]
OTHER = [
    *[(r"\boxed{\$18}", "17"), (r"\boxed{0.5\%}", r"50\%"), (r"\boxed{5\%}", "50")],
    *[(r"\boxed{10,000}", "10"), (rf"First \boxed{{7}}. Then \boxed{{{PIECEWISE}}}", "7")],
    *[(rf"\boxed{{{PIECEWISE}}}", "2"), (r"\boxed{\begin{cases}x=1\\y=2\end{cases}}", "2")],
    *[(r"\boxed{7} no, \boxed{8", "7"), (r"\boxed{8", "8"), (r"\boxed{\langle 1,2\rangle}", "1.2")],
    *[(r"\boxed{-1}", "1"), (r"\boxed{\text{odd}}", r"\text{even}"), ("#### ", "5")],
    *[(r"\boxed{9:30}", "30"), (r"\boxed{\text{June 20}}", "20"), (r"\boxed{12.5\%}", "13.5")],
    *[(r"\boxed{1,234}", "1"), (r"\boxed{\}}", "1"), (r"\boxed{$}", "1")],
]


@pytest.mark.parametrize(("text", "answer"), EQUAL)
def test_answers_as_models_and_data_write_them(text: str, answer: str) -> None:
    assert rate(text, answer) == 1


@pytest.mark.parametrize(("text", "answer"), OTHER)
def test_negative_control_other_answers(text: str, answer: str) -> None:
    assert rate(text, answer) == 0


SETS = [r"\{1,2\}", r"\{2,1\}", r"\left\{1,2\right\}", r"\lbrace 1,2\rbrace", r"x\in\{1,2\}"]
PAIRS = ["(1,2)", r"\left(1,2\right)", r"\langle 1,2\rangle"]
INTERVALS = ["[1,2]", "[1,2)", "(1,2]"]
LISTS = ["1,2", r"1\text{ and }2"]
OF_THREE = [[r"\{1,2,3\}"], ["(1,2,3)", "[1,2,3]"]]


def both(one: str, other: str, **options: Any) -> set[float]:
    return {rate(rf"\boxed{{{a}}}", b, **options) for a, b in ((one, other), (other, one))}


@pytest.mark.parametrize(
    ("ones", "others"),
    [
        *[(SETS, PAIRS), (SETS, INTERVALS), (SETS, ["1<x<2", r"x\in(1,2)"]), OF_THREE],
        *[(LISTS, INTERVALS), (PAIRS, INTERVALS), (LISTS, ["1<x<2", r"x\in(1,2)", "(2,1)"])],
        (["(1,2)"], ["(2,1)"]),
        ([r"\{(1,2),(3,4)\}"], [r"\{\{1,2\},\{3,4\}\}", "((1,2),(3,4))"]),
        *[(["((1,2),3)"], [r"(\{1,2\},3)", r"\{\{1,2\},3\}"]), (["[1,2]"], ["[1,2)", "(1,2]"])],
        *[(["[1,2)"], ["(1,2]"]), (["(x,y)=(1,2)"], [*SETS[:2], "1<x<2"])],
    ],
)
def test_strictly_sets_are_no_tuples_and_no_intervals(ones: list[str], others: list[str]) -> None:
    for one, other in itertools.product(ones, others):
        assert both(one, other) == {0}, (one, other)


@pytest.mark.parametrize(
    ("ones", "others"),
    [
        *[(SETS[:4], SETS), (PAIRS, PAIRS), (LISTS, SETS), (LISTS, PAIRS), (LISTS, LISTS)],
        *[(["2,1"], ["1,2", "(2,1)"]), (["(1,2),(3,4)"], [r"\{(1,2),(3,4)\}"])],
        *[(["x=1,y=2"], ["(1,2)"]), (["x=1,x=2"], SETS[:3])],
        *[(["(1,2)"], [r"x\in(1,2)", "(x,y)=(1,2)"]), (["(1,2,3)"], ["[1,2,3]", "1,2,3"])],
        ([r"\{1\}"], ["1"]),
    ],
)
def test_what_is_written_alike_or_as_a_list_is_equal(ones: list[str], others: list[str]) -> None:
    for one, other in itertools.product(ones, others):
        assert both(one, other) == {1}, (one, other)


def test_without_strict_sets_equal_tuples_and_variables_have_any_name() -> None:
    assert both(r"\{1,2\}", "(1,2)", strict=False) == {1}
    assert both("x+1", "y+1", strict=False) == {1}
    assert both("x+1", "y+1") == {0}


@pytest.mark.parametrize("answer", ["", "####", r"\boxed{7", "$$", r"\$", None, {}, []])
def test_a_gold_that_cannot_be_read_is_found_without_a_completion(answer: Any) -> None:
    with pytest.raises(
        ValueError, match=r"column 'answer': (no mathematical answer in|expected text or a number)"
    ):
        build("math", {}).check({"answer": answer})
