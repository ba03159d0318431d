"""The expression parser against Python's own arithmetic, and problems that have solutions."""

import ast
import re
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from isobit.errors import IsobitError
from isobit.tasks.builtin import TaskSettings, load_task
from isobit.tasks.builtin.countdown import ExpressionError, evaluate, reward, solves

leaves = st.integers(0, 200).map(str)
expressions = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from("+-*/"), inner).map("".join),
        st.tuples(inner, st.sampled_from([" + ", "- ", " *", " / "]), inner).map(
            lambda parts: f"({''.join(parts)})"
        ),
    ),
    max_leaves=12,
)


def exact(node: ast.AST) -> Fraction:
    """Python's own reading of the expression, in fractions."""
    if isinstance(node, ast.Expression):
        return exact(node.body)
    if isinstance(node, ast.Constant):
        return Fraction(node.value)
    assert isinstance(node, ast.BinOp)
    left, right = exact(node.left), exact(node.right)
    return {
        ast.Add: left.__add__,
        ast.Sub: left.__sub__,
        ast.Mult: left.__mul__,
        ast.Div: left.__truediv__,
    }[type(node.op)](right)


@given(expressions)
@example("8-3-2")
@example("8/4/2")
@example("2+3*4-(5-6)*7")
def test_values_are_those_of_python(text: str) -> None:
    try:
        expected = exact(ast.parse(text, mode="eval"))
    except ZeroDivisionError:
        with pytest.raises(ExpressionError, match="division by zero"):
            evaluate(text)
        return
    value, used = evaluate(text)
    assert value == expected
    assert used == [int(number) for number in re.findall("[0-9]+", text)]


@given(st.text(alphabet="0123456789+-*/() ^a.,=\n\u0665", max_size=40))
def test_any_text_is_an_expression_or_an_expression_error(text: str) -> None:
    try:
        value, used = evaluate(text)
    except ExpressionError:
        return
    assert value == exact(ast.parse(" ".join(strip_zeros(text).split()), mode="eval"))
    assert used


def strip_zeros(text: str) -> str:
    """Python refuses leading zeros; the game does not."""
    return re.sub(r"\b0+(?=\d)", "", text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "ends too early"),
        ("1+", "ends too early"),
        ("(1+2", "ends too early"),
        ("1 2", "unexpected '2'"),
        ("1+2)", "unexpected '\\)'"),
        ("-1", "unexpected '-'"),
        ("2**3", "unexpected '\\*'"),
        ("2^3", "unexpected '\\^'"),
        ("__import__('os')", "unexpected '_'"),
        ("1.5", "unexpected '\\.'"),
        ("\u0661", "unexpected"),
        ("1/(2-2)", "division by zero"),
        ("(" * 33 + "1" + ")" * 33, "more than 32 open parentheses"),
        ("(" * 10_000, "longer than 256 characters"),
        ("9" * 10, "more than 9 digits"),
        ("1+" * 200 + "1", "longer than 256"),
    ],
)
def test_what_is_refused(text: str, message: str) -> None:
    with pytest.raises(ExpressionError, match=message):
        evaluate(text)


def test_the_largest_expression_within_the_limits_is_small_work() -> None:
    value, used = evaluate("*".join(["999999999"] * 25))
    assert value == 999999999**25
    assert len(used) == 25
    assert evaluate("(" * 32 + "1" + ")" * 32)[0] == 1


@pytest.mark.parametrize(
    ("text", "use_all", "expected"),
    [
        ("(3+5)*7", True, True),
        (" 7 × (5 + 3) ", True, True),
        ("56", True, False),
        ("7*8", False, False),
        ("7*(3+5)+0", False, False),
        ("7*(3+5)*(3-3+1)", False, False),
        ("7*5+3*7", True, False),
        ("7*(3+5", True, False),
        ("(3+5)*7=56", True, False),
    ],
)
def test_numbers_are_used_as_they_must(text: str, use_all: bool, expected: bool) -> None:
    assert solves(text, [3, 5, 7], 56, use_all) is expected


def test_at_most_once_leaves_numbers_over() -> None:
    assert solves("7*8", [3, 7, 8], 56, use_all=False)
    assert not solves("7*8", [3, 7, 8], 56, use_all=True)
    assert solves("8/(3-8/3)", [3, 3, 8, 8], 24)  # through fractions
    assert reward(["p"] * 2, ["7*8"] * 2, [[3, 7, 8]] * 2, [56] * 2, use_all=[False, True]) == [
        1.0,
        0.0,
    ]
    assert reward(["p"], ["7*8"], [[7, 8]], [56]) == [1.0]


def load(held_out_size: int = 40, template: str | None = None, **options: Any) -> Any:
    return load_task(
        TaskSettings(
            "countdown", None, None, held_out_size, prompt_template=template, options=options
        )
    )


@pytest.mark.parametrize("seed", [0, 1])
def test_every_problem_is_solved_by_its_gold_completion(seed: int) -> None:
    task = load(train_size=300, max_numbers=5, seed=seed)
    assert (len(task.train), len(task.held_out)) == (300, 40)
    keys = set()
    for problem in [*task.held_out.examples, *task.train.examples]:
        numbers, target = problem.columns["numbers"], problem.columns["target"]
        gold = problem.columns[task.gold]
        assert reward([problem.prompt], [gold], [numbers], [target], use_all=[True]) == [1.0]
        assert reward([problem.prompt], [gold], [numbers], [target + 1], use_all=[True]) == [0.0]
        assert 3 <= len(numbers) <= 5
        assert all(1 <= number <= 50 for number in numbers)
        assert 1 <= target <= 100
        assert set(str(problem.prompt) + gold) <= set(task.alphabet)
        keys.add((*sorted(numbers), -target))
    assert len(keys) == 340


def test_prompts_follow_the_template() -> None:
    example = load(train_size=5).train.examples[0]
    listed = " ".join(map(str, example.columns["numbers"]))
    assert example.prompt == f"{listed} -> {example.columns['target']}: "
    worded = load(train_size=5, template="Make {target} of {numbers}!").train.examples[0]
    assert worded.prompt == f"Make {example.columns['target']} of {listed}!"
    assert load(train_size=5).train.examples[:3] == load(train_size=9).train.examples[:3]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"numbers": 3}, "task.options.numbers: unknown, did you mean"),
        (
            {"min_numbers": 5},
            "task.options.min_numbers: must not be above max_numbers, got 5 and 4",
        ),
        ({"max_target": 2, "max_number": 2, "max_numbers": 3}, "these options give only about"),
        ({"use_all": "yes"}, "task.options.use_all: expected true or false, got 'yes'"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(IsobitError) as caught:
        load(**options)
    assert message in str(caught.value)
