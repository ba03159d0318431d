"""One reader says what an answer is; nothing else turns a stranger's value into text."""

import ast
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from isobit.data.answers import NoAnswer, answer_messages, answer_text, completion_text, gold_text
from isobit.data.dataset import read_examples
from isobit.data.readers import Source
from isobit.errors import IsobitError
from isobit.tasks.builtin import arithmetic, gsm8k
from isobit.tasks.rewards.functions import load_function
from isobit.tasks.rewards.named import build
from tests.conftest import RunIsobit

SOURCE = Path(__file__).resolve().parents[2] / "src" / "isobit"
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 3}}}


def said(content: Any, **more: Any) -> list[dict[str, Any]]:
    return [{"role": "assistant", "content": content, **more}]


ANSWERS: list[tuple[Any, str]] = [
    ("7", "7"),
    ("", ""),
    (said("7"), "7"),
    ([*said("7"), *said("8")], "78"),
    (
        said([{"type": "text", "text": "It is "}, {"type": "text", "text": "7", "image": None}]),
        "It is 7",
    ),
    (said("7", name=None, tool_calls=None), "7"),
    (said("I add.", tool_calls=[CALL]), "I add."),
]
ANSWERED = [{"role": "user", "content": "7"}]
ANSWERED_LAST = [*said("7"), *ANSWERED]
OTHERS: list[tuple[Any, str]] = [
    (None, "null"),
    (True, "true or false"),
    ({"role": "assistant", "content": "7"}, "an object"),
    ([], "an empty list"),
    (["7", "8"], "a list with text in it"),
    ([None], "a list with null in it"),
    ([["7"]], "a list with a list in it"),
    ([{"role": "user", "content": "7"}], "a message of role 'user'"),
    ([{"role": "tool", "content": "7"}], "a message of role 'tool'"),
    ([{"content": "7"}], "a message of role None"),
    (ANSWERED_LAST, "a message of role 'user'"),
    (said(None), "a message whose content is null"),
    (said(7), "a message whose content is a number"),
    (said([]), "a message whose content is a list"),
    (said(["7"]), "a message whose content is a list"),
    (said([{"type": "image", "url": "x"}]), "a message whose content is a list"),
    (said([{"type": "text", "text": None}]), "a message whose content is a list"),
    (said("", tool_calls=[CALL]), "a message that calls tools and says nothing"),
    (said(None, tool_calls=[CALL]), "a message that calls tools and says nothing"),
]


@pytest.mark.parametrize(("value", "text"), ANSWERS)
def test_text_and_messages_of_the_assistant_are_answers(value: Any, text: str) -> None:
    assert answer_text(value) == gold_text(value) == text
    assert "".join(message["content"] for message in answer_messages(value)) == text
    assert not any(part is None for message in answer_messages(value) for part in message.values())


@pytest.mark.parametrize(("value", "found"), OTHERS)
def test_nothing_else_is_one(value: Any, found: str) -> None:
    for read, wanted in (
        (answer_text, "text or"),
        (answer_messages, "text or"),
        (gold_text, "text, a number or"),
    ):
        with pytest.raises(NoAnswer) as caught:
            read(value)
        assert str(caught.value) == f"expected {wanted} the messages of an assistant, got {found}"


def test_a_number_is_a_right_answer_and_no_completion() -> None:
    assert [gold_text(number) for number in (42, -1.5)] == ["42", "-1.5"]
    for number in (float("nan"), float("inf")):
        with pytest.raises(NoAnswer, match=f"got {number}, which is no number"):
            gold_text(number)
    with pytest.raises(NoAnswer, match="got a number"):
        answer_text(42)


def test_of_a_conversation_rewards_read_what_was_said_last() -> None:
    called, told = said("", tool_calls=[CALL]), {"role": "tool", "content": "7"}
    for messages, text in (
        ([*called, told, *said("It is 7.")], "It is 7."),
        ([*said("6"), *ANSWERED, *said("7"), *ANSWERED], "7"),
        ([*said("6"), told, *called], ""),
    ):
        assert completion_text(messages) == text
        with pytest.raises(NoAnswer):
            answer_text(messages)


@pytest.mark.parametrize(
    ("value", "found"), [(value, found) for value, found in OTHERS if value != ANSWERED_LAST]
)
def test_a_reward_is_given_no_other_completion(value: Any, found: str, tmp_path: Path) -> None:
    (tmp_path / "verl.py").write_text("def score(solution_str, ground_truth):\n    return 1.0\n")
    verl = load_function(f"{tmp_path / 'verl.py'}:score")
    scorers: list[Callable[[], Any]] = [
        lambda: build("exact_match", {})([value], answer=["7"]),
        lambda: arithmetic.reward(["p"], [value], ["7"]),
        lambda: gsm8k.reward(["p"], [value], ["7"]),
        lambda: verl({"completions": [value], "answer": ["7"]}),
    ]
    for score in scorers:
        with pytest.raises(ValueError, match=found.replace("'", ".")):
            score()


def test_messages_in_parts_are_text(tmp_path: Path) -> None:
    """As prompt, as answer, and with what else the assistant's message has."""
    file = tmp_path / "rows.jsonl"
    user = {
        "role": "user",
        "content": [{"type": "text", "text": "3 "}, {"type": "text", "text": "+ 4?"}],
    }
    answer = said([{"type": "text", "text": "7"}], reasoning_content="Add.", name=None)[0]
    file.write_text(json.dumps({"messages": [user, answer]}) + "\n")
    (example,) = read_examples(Source(file))
    assert example.prompt == [{"role": "user", "content": "3 + 4?"}]
    assert example.columns["completion"] == "7"
    assert example.answer == {"role": "assistant", "content": "7", "reasoning_content": "Add."}
    file.write_text(json.dumps({"messages": [user, *said("7")]}) + "\n")
    assert read_examples(Source(file))[0].answer == said("7")[0]
    user["content"] = [{"type": "image", "url": "a.png"}]
    file.write_text(json.dumps({"messages": [user, answer]}) + "\n")
    with pytest.raises(IsobitError, match=r"rows\.jsonl:1: message 0 of 'messages' must be"):
        read_examples(Source(file))


def test_a_conversation_must_end_with_an_answer_that_says_something(tmp_path: Path) -> None:
    file, user = tmp_path / "rows.jsonl", {"role": "user", "content": "3 + 4?"}
    good = json.dumps({"messages": [user, *said("7")]})
    for content in (None, ""):
        file.write_text(
            f"{good}\n{json.dumps({'messages': [user, *said(content, tool_calls=[CALL])]})}\n"
        )
        with pytest.raises(
            IsobitError,
            match=r"rows\.jsonl:2: the last of 'messages': .* calls tools and says nothing",
        ):
            read_examples(Source(file))


@pytest.mark.slow
def test_given_completions_are_answers_or_refused(tmp_path: Path, run_isobit: RunIsobit) -> None:
    """A list and null were scored as the text that Python writes of them."""

    def evaluate(*values: Any) -> tuple[int, str, str]:
        rows = [{"prompt": f"q{i}", "answer": "7", "said": value} for i, value in enumerate(values)]
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        words = ("--reward", "exact_match", "--completions", "said")
        return run_isobit("eval", "--data", tmp_path / "rows.jsonl", *words)

    code, out, _ = evaluate(*(value for value, text in ANSWERS if text == "7"), "8")
    assert not code
    assert "0.7500" in out  # 3 of 4
    for value, found in [*OTHERS, (7, "a number")]:
        code, _, err = evaluate("7", value)
        assert code == 2
        assert (
            "rows.jsonl:2: column 'said': expected text or the messages of an assistant, got "
            f"{found}"
        ) in err
        assert err.count("\n") == 1


# where rows of strangers are read, scored and learned from
ROOMS = (
    "data",
    "tasks/builtin",
    "tasks/rewards",
    "evaluation",
    "training",
    "training/commands/evaluate.py",
)
KNOWN = {
    "data/answers.py": {"str(value)"},  # numbers, of a right answer
    "data/arrow_rows.py": {"str(value)"},  # a decimal number
    "data/episodes.py": {"str(name)"},  # of a function in an episode, which is text
    "tasks/rewards/built.py": {"{where}"},  # of a row, whose name is text
    "tasks/rewards/own_options.py": {"{name}"},  # of an option, which is text
    "training/commands/generate.py": {  # of an episode's messages, which are text
        "{name}",
        "{('' if name is None else f' {name}')}",
        "{message['role']}",
        "{message['content']}",
    },
    # what is searched for addresses of memory, and shown nowhere
    "training/rollouts/problems.py": {"str(episode.prompt[-1].get('content', ''))"},
    "training/running/inputs.py": {"{name}"},  # of a key of a config
    "training/running/restoring.py": {"{key}"},  # of a config
}
"""The places that may, and what is turned into text there."""


def written(source: str) -> Iterator[str]:
    """What a module turns into text of what it does not know: values of rows and of JSON, and
    arguments of any type. Messages aside, which `raise` has, and Python's own notation (`!r`)."""
    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            continue
        names = _foreign_names(function)
        raised = {
            id(node)
            for each in ast.walk(function)
            if isinstance(each, ast.Raise)
            for node in ast.walk(each)
        }
        for node in ast.walk(function):
            called = (
                node.func.id
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
                else None
            )
            if id(node) in raised:
                continue
            if called in ("str", "format") and any(_is_foreign(part, names) for part in node.args):  # type: ignore[attr-defined]
                yield ast.unparse(node)
            plain = (
                isinstance(node, ast.FormattedValue)
                and node.format_spec is None
                and node.conversion != ord("r")
            )
            if plain and _is_foreign(node.value, names):  # type: ignore[attr-defined]
                yield ast.unparse(node)


def _is_foreign(node: ast.AST, names: set[str]) -> bool:
    if isinstance(node, ast.Name):
        return node.id in names
    if isinstance(node, ast.Attribute):
        return node.attr in ("columns", "prompt") or _is_foreign(node.value, names)
    if isinstance(node, (ast.Subscript, ast.Starred, ast.FormattedValue)):
        return _is_foreign(node.value, names)
    if isinstance(node, ast.Call):
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        if name in ("get", "values", "items", "pop") and isinstance(node.func, ast.Attribute):
            return _is_foreign(node.func.value, names)
        within = name in ("zip", "enumerate", "list", "tuple") and any(
            _is_foreign(part, names) for part in node.args
        )
        return name in ("loads", "parse_json", "read_json") or within
    return any(
        _is_foreign(part, names)
        for part in ast.iter_child_nodes(node)
        if not isinstance(node, ast.Compare)
    )


def _foreign_names(function: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> set[str]:
    """Arguments of any type, and what is assigned from such values in the function."""
    given = function.args
    arguments = [
        *given.posonlyargs,
        *given.args,
        *given.kwonlyargs,
        *filter(None, (given.vararg, given.kwarg)),
    ]
    names = {
        each.arg
        for each in arguments
        if each.annotation is not None and "Any" in ast.unparse(each.annotation)
    }
    names |= {
        each.arg
        for each in arguments
        if isinstance(function, ast.Lambda) and each.arg in ("columns", "row")
    }
    before = -1
    while len(names) > before:
        before = len(names)
        for node in ast.walk(function):
            if (
                isinstance(node, (ast.Assign, ast.AnnAssign, ast.NamedExpr))
                and node.value is not None
            ):
                value, targets = node.value, getattr(node, "targets", None) or [node.target]  # type: ignore[union-attr]
            elif isinstance(node, (ast.For, ast.comprehension)):
                value, targets = node.iter, [node.target]
                counted = isinstance(value, ast.Call) and ast.unparse(value.func) == "enumerate"
                targets = (
                    node.target.elts[1:]
                    if counted and isinstance(node.target, ast.Tuple)
                    else targets
                )
            else:
                continue
            if isinstance(value, _TAKEN) and _is_foreign(value, names):
                names |= {
                    part.id
                    for target in targets
                    for part in ast.walk(target)
                    if isinstance(part, ast.Name)
                }
    return names


_TAKEN = (
    ast.Name,
    ast.Attribute,
    ast.Subscript,
    ast.Call,
    ast.BoolOp,
    ast.IfExp,
    ast.Tuple,
    ast.List,
)


def test_nothing_else_writes_a_strangers_value_as_text() -> None:
    files = [
        path
        for room in ROOMS
        for path in ([SOURCE / room] if ".py" in room else sorted((SOURCE / room).rglob("*.py")))
    ]
    found = {
        str(path.relative_to(SOURCE)): set(written(path.read_text()))
        for path in files
        if "sandbox" not in path.parts
    }
    assert {path: texts for path, texts in found.items() if texts} == KNOWN


@pytest.mark.parametrize(
    "planted",
    [
        "gold = lambda columns: str(columns['answer'])",
        "def f(example: Example) -> str:\n    return str(example.columns['completion'])",
        "def f(row: Mapping[str, Any], column: str) -> str:\n    value = row.get(column)\n    "
        "return f'{value}'",
        "def f(row: Mapping[str, Any]) -> list[str]:\n    return [str(each) for each in "
        "row['answer']]",
        "def f(columns: Sequence[Any]) -> list[str]:\n    return [format(a) for _, a in "
        "enumerate(columns)]",
        "def f(path: Path) -> str:\n    content = json.loads(path.read_text())\n    return "
        "str(content['model'])",
    ],
)
def test_negative_control_the_scan_finds_what_is_planted(planted: str) -> None:
    assert len(list(written(planted))) == 1
    for word in ("str(", "format("):
        planted = planted.replace(word, "answer_text(")
    assert not list(written(planted.replace("f'{value}'", "f'{value!r}'")))
