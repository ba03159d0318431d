"""Tables and conclusions of results that are written down here."""

import dataclasses

import numpy as np
import pytest

from isobit.data.dataset import Example
from isobit.evaluation.comparison import compare, comparison_table
from isobit.evaluation.measure import tags_of
from isobit.evaluation.result import Graded, Question, Result
from isobit.evaluation.summary import ALL, summarize, summary_table, values_per_prompt
from isobit.monitor.report.intervals import proportion


def graded(reward: float | None, answer: str = "a", tokens: int = 3) -> Graded:
    return Graded(answer, reward, answer, tokens, tokens == 4)


def result(
    greedy: list[float], samples: list[list[float]] | None = None, tags: str | None = None
) -> Result:
    questions = [
        Question(
            f"p{i}",
            None if tags is None else tags[i],
            graded(reward),
            tuple(map(graded, (samples or [[]] * 99)[i])),
        )
        for i, reward in enumerate(greedy)
    ]
    return Result("m", tuple(questions), (1, 2) if samples else (), ("f",), {"tag": "level"})


def test_every_measure_of_a_prompt() -> None:
    samples = (graded(1, "a", 4), graded(1, "b", 2), graded(0.5, "c"), graded(None, "c"))
    question = Question("p", None, graded(0.25, "x", 4), samples)
    values = {name: column[0] for name, column in values_per_prompt([question], [1, 2, 4]).items()}
    assert values["accuracy"] == 0
    assert values["reward"] == 0.25
    assert values["mean@4"] == pytest.approx(2.5 / 3)  # the unscored one is in no mean
    assert values["pass@1"] == 0.5
    assert values["pass@2"] == pytest.approx(5 / 6)
    assert values["maj@4"] == 0  # c has two of four votes
    assert values["maj@2"] == pytest.approx((1 + 4 * 0.5) / 6)  # ab; ac, ac, bc, bc half; cc not
    assert values["tokens"] == pytest.approx((4 + 4 + 2 + 3 + 3) / 5)
    assert values["truncated"] == pytest.approx(2 / 5)
    assert "maj@1" not in values


def test_tags_are_written_as_json_writes_them() -> None:
    values = ["easy", 1, 0.5, True, None]
    examples = [Example(i, "q", {"tag": value}) for i, value in enumerate(values)]
    assert tags_of(examples, "tag") == ["easy", "1", "0.5", "true", "null"]


def test_a_row_for_each_value_of_the_tag_and_one_for_all() -> None:
    found = summarize(result([1, 0, 1, 1], tags="hlhh"))
    assert list(found) == ["h", "l", ALL]
    assert found["h"]["accuracy"] == proportion(3, 3)
    assert found["l"]["accuracy"] == proportion(0, 1)
    assert found[ALL]["accuracy"] == proportion(3, 4)
    table = summary_table(result([1, 0, 1, 1], tags="hlhh"))
    assert "\nlevel  prompts " in table
    assert "\nh            3  1.000 [0.439, 1.000]  1.000 [1.000, 1.000]\n" in table


def test_a_measure_without_values_is_left_out() -> None:
    nothing = Result("m", (Question("p", None, graded(None)),))
    assert "reward" not in summarize(nothing)[ALL]
    assert summary_table(nothing).endswith("unscored completions, wrong and in no mean reward: 1")


def test_a_difference_is_named_with_its_direction() -> None:
    better, worse = result([1] * 10 + [0] * 2), result([0] * 8 + [1] * 2 + [0] * 2)
    assert compare(better, worse)["accuracy"].p == 2 / 2**8
    table = comparison_table(better, dataclasses.replace(worse, model="other"))
    assert "A: m\nB: other\n" in table
    assert "of 12 prompts A alone answers 8 correctly, B alone 0, both 2" in table
    assert table.splitlines()[-1].startswith(
        "A is better than B in accuracy: A - B is +0.6667 (95 % interval +0.4167 to "
    )
    assert (
        comparison_table(worse, better)
        .splitlines()[-1]
        .startswith("B is better than A in accuracy: A - B is -0.6667")
    )


def test_where_accuracy_is_the_same_the_next_measure_decides() -> None:
    low, high = result([0.1, 0.2, 0.3, 0.2] * 5), result([0.2, 0.4, 0.3, 0.5] * 5)
    last = comparison_table(high, low).splitlines()[-1]
    assert last.startswith("A is better than B in reward: A - B is +0.1500")
    assert comparison_table(low, low).endswith(
        "No difference is shown: the two score the same on every prompt."
    )
    few = comparison_table(result([1, 0, 0] * 2), result([0] * 6)).splitlines()[-1]
    assert few.startswith("No difference is shown in accuracy: A - B is +0.3333")
    assert few.endswith("p = 0.5; a difference inside the interval is not ruled out.")


def test_shorter_is_neither_better_nor_worse() -> None:
    long, short = (
        Result(
            "m",
            tuple(Question(f"p{i}", None, graded(0, tokens=tokens + i % 2)) for i in range(20)),
            rewards=("f",),
        )
        for tokens in (9, 2)
    )
    assert compare(long, short)["tokens"].p < 0.001
    assert comparison_table(long, short).endswith(
        "No difference is shown: the two score the same on every prompt."
    )


def test_pairs_without_a_value_on_one_side_are_left_out() -> None:
    first, second = result([1, 0.5, 0]), result([0, 0.25, 0])
    broken = dataclasses.replace(second.questions[0], greedy=graded(None))
    found = compare(first, dataclasses.replace(second, questions=(broken, *second.questions[1:])))
    assert found["reward"].difference.prompts == 2
    assert found["accuracy"].difference.prompts == 3


def test_the_order_of_measures_is_that_of_the_table() -> None:
    generator = np.random.default_rng(0)
    samples = generator.integers(0, 2, (5, 4)).astype(float).tolist()
    assert list(summarize(result([1] * 5, samples))[ALL]) == [
        "accuracy",
        "reward",
        "mean@4",
        "pass@1",
        "pass@2",
        "maj@2",
        "tokens",
        "truncated",
    ]


@pytest.mark.parametrize("count", [1, 2, 5, 6, 20])
def test_too_few_prompts_to_tell_are_said(count: int) -> None:
    """Below six no test can fall under its level; the control is six, where it can."""
    better, same = result([1.0] * count), result([1.0] * count)
    worse = result([0.0] * count)
    said = [comparison_table(better, other).splitlines()[-1] for other in (worse, same)]
    smallest = compare(better, worse)["accuracy"].p
    assert smallest == 2 * 0.5**count
    if count < 6:
        line = (
            f"Too few prompts to tell: of {count}, p is {smallest:.2g} even if A is better "
            "on every one; below 6 "
        )
        assert all(text.startswith(line) for text in said)
    else:
        assert smallest < 0.05
        assert said[0].startswith("A is better than B in accuracy")
        assert said[1].startswith("No difference is shown")
