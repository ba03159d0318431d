"""Problems, their answers and the exact-match reward."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isobit.errors import IsobitError
from isobit.tasks.builtin import Task, TaskSettings, load_task
from isobit.tasks.builtin.arithmetic import ArithmeticOptions, gold_answer, mirror, operands, reward


def load(
    held_out_size: int | None = None, template: str | None = None, seed: int = 0, **options: object
) -> Task:
    return load_task(
        TaskSettings(
            "arithmetic",
            held_out_size=held_out_size,
            prompt_template=template,
            options=options,
            seed=seed,
        )
    )


def test_prompts_answers_and_alphabet() -> None:
    task = load(held_out_size=100, train_size=1000, operators="+-*", digits=2)
    assert (len(task.train), len(task.held_out)) == (1000, 100)
    seen = set()
    for example in [*task.train.examples, *task.held_out.examples]:
        prompt, answer = str(example.prompt), example.columns["answer"]
        seen.add(prompt)
        operator = next(character for character in prompt if character in "+-*")
        left, right = map(int, prompt.removesuffix("=").split(operator))
        assert 10 <= left <= 99
        assert 10 <= right <= 99
        assert int(answer) == {"+": left + right, "-": left - right, "*": left * right}[operator]
        assert set(prompt + answer) <= set(task.alphabet or "")
        assert task.gold is not None
        assert example.columns[task.gold] == answer
        assert reward([prompt], [example.columns[task.gold]], [answer]) == [1.0]
    assert len(seen) == 1100
    assert [example.index for example in task.held_out.examples] == list(range(100))


def test_neither_held_out_problems_nor_their_mirrors_are_trained_on() -> None:
    task = load(held_out_size=30, digits=1)
    held = {str(e.prompt) for e in task.held_out.examples}
    mirrors = {"+".join(reversed(prompt.removesuffix("=").split("+"))) + "=" for prompt in held}
    assert held | mirrors > held
    trained = {str(e.prompt) for e in task.train.examples}
    assert trained.isdisjoint(held | mirrors)
    assert len(trained | held | mirrors) == 100  # every sum of two digits is one or the other


def test_problems_depend_on_the_option_seed_and_the_order_on_the_run() -> None:
    a = load(train_size=50)
    b = load(train_size=50, seed=1)
    c = load_task(TaskSettings("arithmetic", options={"train_size": 50, "seed": 1}))
    assert list(a.held_out.examples) == list(b.held_out.examples)
    assert list(a.train.examples) == list(b.train.examples)
    assert [a.train.at(i) for i in range(50)] != [b.train.at(i) for i in range(50)]
    assert list(a.held_out.examples) != list(c.held_out.examples)
    assert list(load(train_size=80).train.examples)[:50] == list(a.train.examples)


@given(st.integers(0, 3 * 90**2 - 1))
def test_problem_numbers_name_operands_and_mirrors(number: int) -> None:
    options = ArithmeticOptions(digits=2, operators="+-*")
    operator, left, right = operands(number, options)
    assert operands(mirror(number, options), options) == (operator, right, left)
    assert mirror(mirror(number, options), options) == number


def test_reversed_digits_and_signs() -> None:
    assert gold_answer("-", 100, 457) == "-357"
    assert gold_answer("-", 100, 457, reverse=True) == "-753"
    assert gold_answer("*", 25, 40, reverse=True) == "0001"
    task = load(train_size=5, reverse=True, template="Work out {prompt} ")
    example = task.train.examples[0]
    question = str(example.prompt).removeprefix("Work out ").removesuffix("= ")
    assert int(example.columns["answer"][::-1]) == sum(map(int, question.split("+")))
    assert set("Work out") < set(task.alphabet or "")


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ("579", 1.0),
        (" 579\n", 1.0),
        ("0579", 0.0),
        ("579.", 0.0),
        ("579 580", 0.0),
        ("", 0.0),
        ("+579", 0.0),
        ("57", 0.0),
    ],
)
def test_the_reward_is_strict(completion: str, expected: float) -> None:
    assert reward(["123+456="], [completion], ["579"]) == [expected]
    assert reward(["123+456="], [[{"role": "assistant", "content": completion}]], ["579"]) == [
        expected
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"digts": 3}, "task.options.digts: unknown, did you mean 'digits'?"),
        ({"digits": 0}, "task.options.digits: expected at least 1, got 0"),
        ({"digits": "three"}, "task.options.digits: expected a whole number, got 'three'"),
        ({"digits": True}, "task.options.digits: expected a whole number, got true"),
        ({"min_digits": 4}, "task.options.min_digits: must not be above digits, got 4 and 3"),
        ({"min_digits": "x"}, "task.options.min_digits: expected a whole number, got 'x'"),
        ({"operators": "/"}, "task.options.operators: expected some of + - *"),
        ({"operators": "++"}, "task.options.operators"),
        ({"reverse": 1}, "task.options.reverse: expected true or false, got 1"),
        ({"train_size": 0}, "task.options.train_size: expected at least 1, got 0"),
        (
            {"digits": 1, "train_size": 1000},
            "there are 100 problems, too few for 512 held out and 1000 to train on",
        ),
    ],
)
def test_bad_options_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(IsobitError) as caught:
        load(**options)
    assert message in str(caught.value)


def test_settings_of_files_are_refused() -> None:
    with pytest.raises(IsobitError, match=r"task\.path: task arithmetic makes its own data"):
        load_task(TaskSettings("arithmetic", "x.jsonl"))
    with pytest.raises(IsobitError, match=r"task\.prompt_template .* must have \{prompt\} in it"):
        load(template="no place")
    with pytest.raises(IsobitError, match="unknown task 'arithmetik'; did you mean 'arithmetic'"):
        load_task(TaskSettings("arithmetik"))
    with pytest.raises(
        IsobitError, match=r"unknown task '.*'; .*; a file is task\.path \(isobit eval: --data\)$"
    ):
        load_task(TaskSettings(__file__))


def test_hints_show_the_answer_of_some_training_prompts() -> None:
    """Of none that is held out, and of no other problems than without them."""
    plain, hinted = load(train_size=400), load(train_size=400, hints=0.25)
    shown = [
        (one, other)
        for one, other in zip(plain.train.examples, hinted.train.examples, strict=True)
        if one != other
    ]
    assert 60 < len(shown) < 140
    assert all(other.prompt == f"{one.columns['answer']};{one.prompt}" for one, other in shown)
    assert all(one.columns == other.columns for one, other in shown)
    assert list(hinted.held_out.examples) == list(plain.held_out.examples)
    assert plain.alphabet is not None
    assert hinted.alphabet == plain.alphabet + ";"


def test_a_pair_is_the_answer_and_one_with_a_wrong_digit() -> None:
    task = load(train_size=200, pairs=True, operators="+-")
    places = set()
    for example in (*task.train.examples, *task.held_out.examples):
        right, wrong = example.columns["chosen"], example.columns["rejected"]
        assert right == example.columns["answer"]
        differing = [i for i, (a, b) in enumerate(zip(right, wrong, strict=True)) if a != b]
        assert len(differing) == 1
        assert wrong[differing[0]].isdigit()
        places.add(differing[0] - len(right))
    assert places >= {-1, -2, -3}
    assert load(train_size=5).train.examples[0].columns.keys() == {"answer"}
