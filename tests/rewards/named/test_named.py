"""Rewards by name: what they give, their options, and every mistake in them."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isobit.config import load_config
from isobit.errors import IsobitError, RunFailed
from isobit.options.reading import OptionError
from isobit.tasks.rewards.by_name import Unscored
from isobit.tasks.rewards.named import NAMES, build, markdown
from isobit.tasks.rewards.pool import RewardPool
from isobit.tasks.rewards.spec import RewardSpec, reward_section
from tests.runs import write_config

ROOT = Path(__file__).parents[3]


def rate(name: str, text: str, options: dict[str, Any] | None = None, **row: Any) -> Any:
    """The reward of one completion, in this process."""
    reward = build(name, options or {})
    reward.prepare()
    return reward.score(text, row, row.pop("token_ids", None))


@pytest.mark.parametrize(
    ("options", "text", "answer", "reward"),
    [
        ({}, "42", "42", 1),
        ({}, " 42\n", "42", 1),
        ({}, "42", 42, 1),
        ({}, "43", "42", 0),
        ({}, "b", ["a", "b"], 1),
        ({"ignore_space": False}, " 42", "42", 0),
        ({}, "Paris", "paris", 0),
        ({"ignore_case": True}, "Paris", "paris", 1),
        ({}, "Paris.", "Paris", 0),
        ({"ignore_punctuation": True}, "Paris.", "Paris", 1),
        ({"extract": r"answer: (\w+)"}, "answer: 1, no, answer: 2 (sure)", "2", 1),
        ({"extract": r"answer: (\w+)"}, "answer: 1, no, answer: 2 (sure)", "1", 0),
        ({"extract": r"\d+"}, "a 12 b", "12", 1),
        ({"extract": r"answer: (\w+)"}, "2", "2", 0),
        ({"extract": r"x(y)?"}, "x", "", 1),
        ({"answer": "gold"}, "1", "2", 1),
    ],
)
def test_exact_match(options: dict[str, Any], text: str, answer: Any, reward: float) -> None:
    assert rate("exact_match", text, options, answer=answer, gold="1") == reward


def test_an_answer_that_is_none_of_text_and_number_is_an_error() -> None:
    for answer in (
        None,
        {},
        [],
        [None],
        True,
        float("nan"),
        [["x"]],
        [{"role": "user", "content": "x"}],
    ):
        for name in ("exact_match", "math"):
            with pytest.raises(
                ValueError,
                match="column 'answer': expected text or a number, or a list of them, got ",
            ):
                rate(name, "x", answer=answer)
    said = [{"role": "assistant", "content": "x"}]
    assert [rate("exact_match", "x", answer=answer) for answer in (said, ["y", said], "y")] == [
        1,
        1,
        0,
    ]


def test_fuzzy_match() -> None:
    assert rate("fuzzy_match", "kitten", answer="sitting") == pytest.approx(1 - 3 / 7)
    assert rate("fuzzy_match", "kitten", answer=["sitting", "kitten"]) == 1
    assert rate("fuzzy_match", "kitten", {"threshold": 0.9}, answer="sitting") == 0
    assert rate("fuzzy_match", "", answer="") == 1
    assert rate("fuzzy_match", "no number", {"extract": r"\d+"}, answer="7") == 0


@given(st.text(max_size=12), st.text(max_size=12))
def test_fuzzy_match_is_the_edit_distance(a: str, b: str) -> None:
    row = list(range(len(b) + 1))
    for i, x in enumerate(a):
        new = [i + 1]
        for j, y in enumerate(b):
            new.append(min(row[j + 1] + 1, new[j] + 1, row[j] + (x != y)))
        row = new
    expected = 1 - row[-1] / max(len(a), len(b), 1)
    assert rate("fuzzy_match", a, {"ignore_space": False}, answer=b) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("options", "text", "reward"),
    [
        ({"pattern": "<think>.*</think>.*"}, "<think>a\nb</think> 4", 1),
        ({"pattern": "<think>.*</think>.*"}, "so <think>a</think> 4", 0),
        ({"pattern": "<think>", "match": "search"}, "so <think>", 1),
        ({"pattern": "a.b", "flags": ""}, "a\nb", 0),
        ({"pattern": "A", "flags": "i"}, "a", 1),
        ({"pattern": "a  # one letter", "flags": "x"}, "a", 1),
    ],
)
def test_format(options: dict[str, Any], text: str, reward: float) -> None:
    assert rate("format", text, options) == reward


@pytest.mark.parametrize(
    ("length", "linear", "cosine"),
    [
        (0, 0, 0),
        (10, 0, 0),
        (15, -0.25, (math.cos(math.pi / 4) - 1) / 2),
        (20, -0.5, -0.5),
        (30, -1, -1),
        (99, -1, -1),
    ],
)
def test_length_penalty(length: int, linear: float, cosine: float) -> None:
    limits = {"soft_limit": 10, "hard_limit": 30}
    assert rate("length_penalty", "x" * length, {**limits, "unit": "characters"}) == pytest.approx(
        linear
    )
    options = {**limits, "shape": "cosine"}
    assert rate("length_penalty", "x", options, token_ids=[1] * length) == pytest.approx(cosine)


def test_tokens_that_are_not_there_are_an_error() -> None:
    with pytest.raises(ValueError, match=r"no token ids; use options\.unit: characters"):
        rate("length_penalty", "x", {"soft_limit": 1, "hard_limit": 2})


@pytest.mark.parametrize(
    ("text", "answer", "reward"),
    [
        ("so it is $0.5$", "1/2", 1),
        ("the answer is 42", "42", 1),
        (r"41, then \boxed{42}", "42", 1),
        (r"\boxed{1/2}", r"\frac{1}{2}", 1),
        (r"\boxed{\frac{1}{2}}", "0.5", 1),
        (r"\boxed{41} no, \boxed{42}", "42", 1),
        (r"\boxed{42} no, \boxed{41}", "42", 0),
        (r"\boxed{1+x}", "x + 1", 1),
        (r"\boxed{(1,2)}", "(1,2)", 1),
        ("9 eggs\n#### 18", "It is 9 * 2.\n#### 18", 1),
        ("#### 1,000", "1000", 1),
        ("no idea", "42", 0),
        ("", "42", 0),
        (r"\boxed{", "42", 0),
        (r"\boxed{\frac{1}{}", "42", 0),
        ("43", ["42", "43"], 1),
    ],
)
def test_math(text: str, answer: Any, reward: float) -> None:
    pytest.importorskip("math_verify")
    assert rate("math", text, answer=answer) == reward


def test_math_out_of_time_is_unscored_and_never_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    math_verify = pytest.importorskip("math_verify")

    def slow(*arguments: object, **options: object) -> bool:
        try:
            while True:
                pass
        except Exception:  # what SymPy does in many places
            return False

    monkeypatch.setattr(math_verify, "verify", slow)
    found = rate("math", "1", {"timeout_s": 0.2}, answer="2/2")
    assert found == Unscored("math-verify took more than 0.2 s")


@pytest.mark.slow
def test_what_a_completion_does_to_a_reward_by_name_never_ends_the_run() -> None:
    """Out of its own time, or holding the interpreter until the deadline: unscored with the reason
    under `stop` too."""
    pytest.importorskip("math_verify")
    with RewardPool([RewardSpec("math", options={"timeout_s": 1})], on_error="stop") as pool:
        texts = [r"\boxed{5}", r"\boxed{9^{9^{9}}}", r"\boxed{4}"]
        rewards = pool.score(["p"] * 3, texts, [{"answer": "5"}] * 3)
    assert [r.total for r in rewards] == [1.0, None, 0.0]
    assert (
        rewards[1].error
        == "reward function math, sample 1 (prompt 'p'): math-verify took more than 1 s"
    )
    assert rewards[0].error is None
    with RewardPool(
        [RewardSpec("format", options={"pattern": "(a+)+"}, deadline_s=1)], on_error="stop"
    ) as pool:
        rewards = pool.score(["p"] * 3, ["aa", "a" * 60 + "b", "b"], [{}] * 3)
    assert [r.total for r in rewards] == [1.0, None, 0.0]
    assert re.search(
        r"reward function format, sample 1 .*no answer within 1 s, killed", rewards[1].error or ""
    )


def test_by_name_they_are_summed_with_functions_and_get_chats_and_tokens(tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text("def half(completions, **k):\n    return [0.5] * len(completions)\n")
    specs = [
        RewardSpec("exact_match", 2.0),
        RewardSpec("format", 1.0, "brackets", {"pattern": r"\[.*\]"}),
        RewardSpec("length_penalty", 4.0, options={"soft_limit": 1, "hard_limit": 3}),
        RewardSpec(f"{own}:half", 1.0),
    ]
    chat = [{"role": "user", "content": "q"}]
    with RewardPool(specs) as pool:
        rewards = pool.score(
            [chat, "p"], ["[a]", "b"], [{"answer": "[a]"}, {"answer": "b"}], [[1], [1, 2]]
        )
    assert rewards[0].by_function == {
        "exact_match": 1,
        "brackets": 1,
        "length_penalty": 0,
        "half": 0.5,
    }
    assert [r.total for r in rewards] == [3.5, 2 + 0 - 2 + 0.5]


def test_a_missing_column_and_a_bad_row_name_their_place() -> None:
    with RewardPool([RewardSpec("exact_match")]) as pool:
        with pytest.raises(
            IsobitError,
            match="reward function exact_match: the data has no column 'answer'; did you",
        ):
            pool.check_columns(["answers"])
        with pytest.raises(
            RunFailed,
            match=r"reward function exact_match, sample 1 \(prompt 'q'\): ValueError: column",
        ):
            pool.score(["p", "q"], ["x", "x"], [{"answer": "x"}, {"answer": None}])


THERE = "by name there are math, exact_match, fuzzy_match, format"
BAD: list[tuple[str, dict[str, Any], str]] = [
    ("maths", {}, f"function: unknown reward 'maths'; did you mean 'math'? {THERE}"),
    ("zzz", {}, f"function: unknown reward 'zzz'; {THERE}"),
    ("format", {"patern": "x"}, "options.patern: unknown, did you mean 'pattern'?"),
    ("format", {}, "options.pattern: required, such as"),
    ("format", {"pattern": "("}, "options.pattern: not a regular expression: missing )"),
    ("format", {"pattern": 3}, "options.pattern: expected text, got 3"),
    ("format", {"pattern": "x", "match": "any"}, "options.match: expected full or search"),
    ("format", {"pattern": "x", "flags": "q"}, "options.flags: expected letters of a, i, m"),
    ("exact_match", {"extract": "["}, "options.extract: not a regular expression"),
    ("exact_match", {"ignore_case": 1}, "options.ignore_case: expected true or false, got 1"),
    ("fuzzy_match", {"threshold": 2}, "options.threshold: expected at most 1, got 2"),
    ("math", {"timeout_s": 0}, "options.timeout_s: expected at least 0.1, got 0"),
    ("math", {"timeout_s": 40}, "options.timeout_s: must be below deadline_s, got 40 and 30"),
    ("math", {"deadline_s": 5}, "options.timeout_s: must be below deadline_s, got 5 and 5"),
    ("length_penalty", {}, "options.hard_limit: must be above soft_limit, got 0 and 0"),
    ("length_penalty", {"soft_limit": True}, "options.soft_limit: expected a whole number"),
    ("code", {"isolation": "some"}, "options.isolation: expected namespaces or none, got"),
    ("code", {"memory_mib": 1}, "options.memory_mib: expected at least 32, got 1"),
    ("code", {"column": ""}, "options.column: expected the name of a column"),
]


@pytest.mark.parametrize(("name", "options", "message"), BAD)
def test_every_mistake_is_one_line_when_the_config_is_read(
    tmp_path: Path, base_model: Path, name: str, options: dict[str, Any], message: str
) -> None:
    spec = {"function": name, **(options if "deadline_s" in options else {"options": options})}
    path = write_config(tmp_path, base_model, rewards={"functions": [{"function": "x.py:f"}, spec]})
    with pytest.raises(IsobitError) as caught:
        load_config(path)
    assert str(caught.value).startswith(f"{path}: rewards.functions.1.{message}")
    assert "\n" not in str(caught.value)


def test_a_text_names_them_with_their_options() -> None:
    assert reward_section("math") == {"function": "math"}
    assert reward_section("mine.py:f") == {"function": "mine.py:f"}
    spec = RewardSpec(**reward_section('format:{"pattern": "a:b"}'))
    assert spec == RewardSpec("format", options={"pattern": "a:b"})
    assert json.loads(spec.reference.partition(":")[2]) == {"pattern": "a:b"}
    with pytest.raises(
        IsobitError, match=r"reward 'format:\{x\}': the options are not a JSON object"
    ):
        reward_section("format:{x}")
    with pytest.raises(
        IsobitError, match=r"reward format: options\.patern: unknown, did you mean 'pattern'"
    ):
        RewardPool([RewardSpec(**reward_section('format:{"patern": "x"}'))])


@pytest.mark.parametrize(
    ("name", "module", "package"),
    [("math", "math_verify", "math-verify"), ("fuzzy_match", "rapidfuzz", "rapidfuzz")],
)
def test_a_missing_library_is_named(
    monkeypatch: pytest.MonkeyPatch, name: str, module: str, package: str
) -> None:
    monkeypatch.setitem(__import__("sys").modules, module, None)
    with pytest.raises(IsobitError, match=f"reward {name} needs {package}: pip install {package}$"):
        build(name, {}).prepare()


def test_the_table_of_the_how_to_is_that_of_the_code() -> None:
    text = (ROOT / "docs" / "how-to" / "rewards.md").read_text()
    assert markdown() in text
    assert all(f"| `{name}` |" in text for name in NAMES)
    described = (ROOT / "docs" / "config.md").read_text()
    assert all(name in described for name in NAMES)


def test_unknown_options_of_all_are_refused() -> None:
    for name in NAMES:
        with pytest.raises(OptionError, match=r"options\.nothing: unknown"):
            build(name, {"nothing": 1})
