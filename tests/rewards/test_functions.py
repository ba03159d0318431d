"""Finding, importing and calling reward functions, and what their answers may be."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from isobit.errors import IsobitError
from isobit.tasks.rewards.functions import MalformedResult, checked_values, load_function
from isobit.tasks.workers.loading import check_reference, last_line


@pytest.fixture(autouse=True)
def _import_state(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The loader changes the import path and the modules, as befits a worker process."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    monkeypatch.chdir(tmp_path)


def written(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def load(tmp_path: Path, text: str, name: str = "score") -> Any:
    return load_function(written(tmp_path / "my.py", text) + ":" + name)


ARGUMENTS: dict[str, Any] = {"prompts": ["p"], "completions": ["c"], "answer": ["a"]}
ARGUMENTS["completion_ids"] = [[1]]


def test_functions_get_what_their_signature_takes(tmp_path: Path) -> None:
    function = load(
        tmp_path, "def score(prompts, completions, **columns):\n    return sorted(columns)\n"
    )
    extras = ["completion_ids", "log_extra", "log_metric", "trainer_state"]
    assert function(ARGUMENTS) == ["answer", *extras]
    assert function.required == ()
    text = "def score(completions, answer, *, x=1):\n    return [completions, answer, x]\n"
    function = load_function(written(tmp_path / "other.py", text) + ":score")
    assert function(ARGUMENTS) == [["c"], ["a"], 1]
    assert function.required == ("answer",)


EXPECTED = "expected def score(prompts, completions, **columns)"
STATE = {"global_step": 3, "max_steps": 9, "epoch": 0.5}


@pytest.mark.parametrize(
    "signature",
    ["completions, completion_ids, trainer_state, log_extra, log_metric, **columns", "**kwargs"],
)
def test_the_extras_of_trl_are_given(tmp_path: Path, signature: str) -> None:
    """By name, and through `**kwargs` as TRL does."""
    text = f"""
def score({signature}):
    given = locals().get("kwargs") or locals()
    given["log_extra"]("name", ["x"]); given["log_metric"]("name", 1.0)
    state = given["trainer_state"]
    return [given["completion_ids"], state.global_step, state.max_steps, state.epoch]
"""
    function = load(tmp_path, text)
    assert function({**ARGUMENTS, "trainer_state": [STATE]}) == [[[1]], 3, 9, 0.5]
    assert function(ARGUMENTS) == [[[1]], 0, 0, 0.0]
    assert function.required == ()
    assert "completion_ids" in function.names


def test_a_function_gets_no_extra_that_it_has_no_place_for(tmp_path: Path) -> None:
    assert load(tmp_path, "def score(completions):\n    return [1]\n")(
        {**ARGUMENTS, "trainer_state": [STATE]}
    ) == [1]


def test_async_functions_and_callable_objects_work(tmp_path: Path) -> None:
    function = load(
        tmp_path,
        "import asyncio\nasync def score(completions, **k):\n    await asyncio.sleep(0)\n    "
        "return [1]\n",
    )
    assert function(ARGUMENTS) == [1]
    text = (
        "class Score:\n    def __call__(self, completions, **k):\n        return [2]\nscore "
        "= Score()\n"
    )
    assert load_function(written(tmp_path / "other.py", text) + ":score")(ARGUMENTS) == [2]


def test_compute_score_of_verl_is_called_once_a_sample(tmp_path: Path) -> None:
    text = """
def score(data_source, solution_str, ground_truth, extra_info=None):
    score = float(solution_str == ground_truth)
    return {"score": score, "more": 1} if data_source == "dict" else score
"""
    function = load(tmp_path, text)
    assert function.required == ("answer",)
    chat = [{"role": "assistant", "content": "b"}]
    columns = {"answer": ["a", "b", "c"], "data_source": ["x", "dict", "x"]}
    columns |= {"reward_model": [{}] * 3, "prompts": ["p"] * 3, "completions": ["a", chat, "d"]}
    assert function(columns) == [1.0, 1.0, 0.0]


def test_scores_of_verl_without_a_source_or_async(tmp_path: Path) -> None:
    """As in verl/utils/reward_score: no data_source in the signature; and as coroutines, awaited
    together."""
    text = """
import asyncio
def plain(solution_str, ground_truth, method="strict", score=1.0):
    return score if solution_str == ground_truth else 0.0
async def slow(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    await asyncio.sleep(0.001)
    return {"score": extra_info["index"]}
"""
    arguments = {"prompts": ["p"] * 2, "completions": ["a", "a"], "answer": ["a", "b"]}
    arguments |= {"data_source": ["x", "y"], "extra_info": [{"index": 4}, {"index": 5}]}
    arguments["trainer_state"] = [STATE] * 2
    assert load(tmp_path, text, "plain")(arguments) == [1.0, 0.0]
    assert load(tmp_path, text, "slow")(arguments) == [4, 5]


def test_modules_and_neighbours_are_found(tmp_path: Path) -> None:
    written(tmp_path / "neighbour.py", "VALUE = 7\n")
    function = load(
        tmp_path, "from neighbour import VALUE\ndef score(completions):\n    return [VALUE]\n"
    )
    assert function(ARGUMENTS) == [7]
    assert load_function("my:score")(ARGUMENTS) == [7]
    assert load_function("isobit.tasks.builtin.gsm8k:reward").required == ("answer",)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def scroe(completions): pass\n", "has no function 'score'; did you mean 'scroe'?"),
        ("", "has no function 'score'; it has: none"),
        ("score = 3\n", "'score' in "),
        ("class score: pass\n", "is not a function"),
        ("x = 1\ndef score(:\n", "SyntaxError: invalid syntax (my.py, line 2)"),
        ("\nimport nowhere\n", "ModuleNotFoundError: No module named 'nowhere' (my.py, line 2)"),
        ("def f():\n    1 / 0\nf()\n", "ZeroDivisionError: division by zero (my.py, line 2)"),
        ("raise SystemExit(3)\n", "SystemExit: 3 (my.py, line 1)"),
        ("raise RuntimeError('two\\nlines')\n", "RuntimeError: two lines (my.py, line 1)"),
        ("def score(text): return []\n", EXPECTED),
        ("def score(completions, /): return []\n", EXPECTED),
    ],
)
def test_what_cannot_be_loaded_is_said_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(IsobitError) as caught:
        load(tmp_path, text)
    assert message in str(caught.value)
    assert "my.py:score" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_references_are_checked_before_anything_is_imported(tmp_path: Path) -> None:
    wrong = r"expected path/to/file\.py:function or package\.module:function"
    wholes = ["score", "my.py", "my.py:", "my.py:a b", "my-module:score", ":score", "a/b:score"]
    for reference in wholes:
        with pytest.raises(IsobitError, match=wrong):
            check_reference(reference)
    with pytest.raises(IsobitError, match=r"reward function 'none\.py:score': no file none\.py"):
        check_reference("none.py:score")
    check_reference("nowhere.to_be_found:score")
    with pytest.raises(IsobitError, match=r"ModuleNotFoundError: No module named 'nowhere'$"):
        load_function("nowhere.to_be_found:score")


class Tensor:
    """One element that converts as a tensor does."""

    def __init__(self, *values: float) -> None:
        self.values = values

    def __float__(self) -> float:
        if len(self.values) != 1:
            raise RuntimeError("a Tensor with 2 elements cannot be converted to Scalar")
        return self.values[0]


def test_numbers_of_any_kind_are_rewards() -> None:
    result = [1, 0.5, True, None, Tensor(2.0)]
    assert checked_values(result, 5) == ([1.0, 0.5, 1.0, None, 2.0], {})
    assert checked_values(tuple(result), 5)[0] == checked_values(result, 5)[0]
    assert json.dumps(checked_values([True], 1)[0]) == "[1.0]"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (float("nan"), "returned nan, expected a finite number or None"),
        (-1e308, "returned -1e+308, expected a number within ±1e+30 or None"),
        (float("-inf"), "returned -inf, expected a finite number or None"),
        ("1", "returned str '1', expected a finite number or None"),
        (10**400, "returned int 1000000000"),
        ([1.0], "returned list, expected"),
        (Tensor(1, 2), "returned Tensor, expected"),
        (object(), "returned object, expected"),
    ],
)
def test_what_is_not_a_number_is_named_by_its_index(value: object, message: str) -> None:
    values, wrong = checked_values([1, value, None], 3)
    assert values == [1.0, None, None]
    assert list(wrong) == [1]
    assert wrong[1].startswith(message)


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ([1.0, 2.0], "returned 2 values for 3 completions"),
        ([], "returned 0 values for 3 completions"),
        (None, "returned NoneType, expected a list of 3 numbers"),
        (0.5, "returned float 0.5, expected a list of 3 numbers"),
        ("abc", "returned str 'abc', expected a list"),
        ({"a": 1, "b": 2, "c": 3}, "returned dict, expected a list"),
        ({1.0, 2.0, 3.0}, "returned set, expected a list"),  # which has no order
        ((x for x in [1, 2, 3]), "returned generator, expected a list"),
    ],
)
def test_a_result_of_the_wrong_shape_is_malformed(result: object, message: str) -> None:
    with pytest.raises(MalformedResult, match=message):
        checked_values(result, 3)


def test_the_last_line_names_the_place_in_the_users_file(tmp_path: Path) -> None:
    function = load(
        tmp_path, "import json\n\ndef score(completions):\n    return json.loads('{')\n"
    )
    with pytest.raises(ValueError) as caught:
        function(ARGUMENTS)
    assert last_line(caught.value, function.file).endswith("(char 1) (my.py, line 4)")
    with pytest.raises(ValueError) as caught:
        int("x" * 1000)
    assert len(last_line(caught.value, "elsewhere.py")) < 400


SCALED = (
    "def score(completions, answer, *, scale: float, words: 'list' = (), n: int = 1, **columns):\n"
    "    return [[scale, list(words), n, answer, sorted(columns)]]\n"
)


def with_options(folder: Path, text: str, options: dict[str, Any]) -> Any:
    return load_function(written(folder / "own.py", text) + f":score:{json.dumps(options)}")


def test_options_are_values_for_parameters(tmp_path: Path) -> None:
    """They are no columns that a row must have; a column of the same name does not come through."""
    function = with_options(tmp_path, SCALED, {"scale": 2, "words": ["a:b", "{"]})
    assert function.required == ("answer",)
    found = function({**ARGUMENTS, "scale": ["column"], "words": ["column"]})
    assert found[0][:4] == [2, ["a:b", "{"], 1, ["a"]]
    assert "scale" not in found[0][4]
    verl = (
        "def score(solution_str, ground_truth, bonus=0.0):\n    return bonus + len(solution_str)\n"
    )
    assert with_options(tmp_path, verl, {"bonus": 0.5})(ARGUMENTS) == [1.5]
    assert with_options(tmp_path, verl, {})(ARGUMENTS) == [1.0], "the control"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scal": 2.0}, "options.scal: the function has no such parameter; did you mean 'scale'"),
        ({"scale": "2"}, "options.scale: expected float, got '2'"),
        ({"scale": True}, "options.scale: expected float, got True"),
        ({"scale": 1, "n": 1.5}, "options.n: expected int, got 1.5"),
        ({"scale": 1, "words": "a"}, "options.words: expected list, got 'a'"),
        ({"completions": []}, "options.completions: is what isobit gives the function itself"),
        ({"columns": 1}, "options.columns: the function has no such parameter"),
    ],
)
def test_options_that_do_not_fit_the_signature_are_refused(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(IsobitError, match=message):
        with_options(tmp_path, SCALED, options)
