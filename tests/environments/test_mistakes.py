"""Mistakes of an environment's program end the run at once, in one line that says what would be
right, whatever `on_error` is; what a model's text brings about does not."""

from pathlib import Path
from typing import Any

import pytest

from isobit.data.turns import Turn
from isobit.errors import RunFailed
from isobit.tasks.environments.pool import EnvironmentPool
from isobit.tasks.environments.returned import MOST_MESSAGES, MOST_TEXT
from isobit.tasks.environments.settings import EnvironmentConfig
from tests.environments.helpers import PROMPT, begun, call, finished, replies, turned, written

STEPS = """
import numpy_free
from isobit.data.turns import Step

class Str(str):
    def __str__(self):
        return "another"

class Game:
    def reset(self, how="", **columns):
        self.how = how

    async def step(self, turn):
        return eval(turn.text, {**globals(), "self": self})
"""
NUMPY = """
class Bool:  # as numpy's
    def __eq__(self, other):
        return other is True
"""


@pytest.fixture(scope="module")
def game(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("mistakes")
    written(folder, "numpy_free.py", NUMPY)
    return written(folder, "game.py", STEPS) + ":Game"


def stepped(pool: EnvironmentPool, key: int, returned: str) -> Any:
    """What a turn is answered whose step returns this."""
    begun(pool, key)
    pool.turn(key, Turn(0, returned, returned))
    reply = replies(pool, 1)[key]
    pool.end(key)
    return reply


SAYS = '{"role": "user", "content": "No"}'


@pytest.mark.parametrize(
    ("returned", "says"),
    [
        ("'No'", "returned str, expected a Step, such as Step(("),
        ("None", "returned NoneType, expected a Step"),
        ("('No', 0.5, False, {})", "returned tuple, expected a Step"),
        ("Step('No', reward=0.5)", "its messages are str, expected a tuple of messages"),
        (f"Step({SAYS})", "its messages are dict, expected a tuple of messages"),
        ("Step(None)", "its messages are NoneType, expected a tuple"),
        ("Step(('No',))", "its messages[0] is str, expected a message, such as"),
        (f"Step(({SAYS}, {{}}))", "its messages[1] has no role, expected tool or user"),
        ("Step(({'content': 'a'},))", "its messages[0] has no role, expected tool or user"),
        ("Step(({'role': 'usr', 'content': 'a'},))", "has the role 'usr', expected tool or user"),
        ("Step(({'role': 'assistant', 'content': 'a'},))", "the role 'assistant', expected tool"),
        ("Step(({'role': 5, 'content': 'a'},))", "has the role 5, expected tool or user"),
        ("Step(({'role': 'user'},))", "has no content, expected text"),
        ("Step(({'role': 'user', 'content': None},))", "has the content NoneType, expected text"),
        ("Step(({'role': 'user', 'content': {}},))", "has the content dict, expected text"),
        ("Step(({'role': 'user', 'content': lambda: 0},))", "the content function, expected text"),
        ("Step(({'role': 'user', 'content': 'a', 3: 4},))", "has keys that are not text"),
        ("Step(({'role': 'tool', 'content': 'a', 'name': 3},))", "has the name int, expected text"),
        ("Step(reward='x')", "its reward returned str 'x', expected a finite number"),
        ("Step(reward=[1.0])", "its reward returned list, expected a finite number"),
        ("Step(done='no')", "done is str 'no', expected True or False"),
        ("Step(done=None)", "done is NoneType None, expected True or False"),
        ("Step(terminated=True)", "unexpected keyword argument 'terminated'"),
    ],
)
def test_a_step_of_another_type_ends_the_run(game: str, returned: str, says: str) -> None:
    with (
        EnvironmentPool(EnvironmentConfig(factory=game)) as pool,
        pytest.raises(RunFailed) as caught,
    ):
        stepped(pool, 0, returned)
    assert str(caught.value).startswith("environment: step")
    assert "game.py, line" in str(caught.value)
    assert says in str(caught.value)


def test_a_step_of_these_types_is_taken_or_is_its_episodes(game: str) -> None:
    """Controls: what is unambiguous is taken, and what is too much or not finite is of the
    episode."""
    taken = [
        (f"Step([{SAYS}], 1, 1)", ("No",), 1.0, True),
        (
            "Step(({'role': 'user', 'content': Str('No')},), done=numpy_free.Bool())",
            ("No",),
            None,
            True,
        ),
        (
            "Step(({'role': 'tool', 'content': [{'type': 'text', 'text': 'a'}]},))",
            ("a",),
            None,
            False,
        ),
        ("Step((), True, False)", (), 1.0, False),
    ]
    too_much = [
        (f"Step(({SAYS},) * {MOST_MESSAGES + 1})", f"257 messages, the most are {MOST_MESSAGES}"),
        ("Step(({'role': 'user', 'content': 'a' * 30000},) * 9)", f"the most are {MOST_TEXT:,}"),
        ("Step(reward=float('inf'))", "its reward returned inf, expected a finite number"),
        ("Step(reward=10**400)", "its reward returned int"),
        ("undefined_by_the_model", "NameError: name 'undefined_by_the_model' is not defined"),
        ("1 / 0", "ZeroDivisionError"),
    ]
    with EnvironmentPool(EnvironmentConfig(factory=game, on_error="end")) as pool:
        for key, (returned, texts, reward, done) in enumerate(taken):
            step = stepped(pool, key, returned).step
            assert tuple(each["content"] for each in step.messages) == texts
            assert (step.reward, step.done) == (reward, done), returned
        for key, (returned, says) in enumerate(too_much):
            reply = stepped(pool, key, returned)
            assert says in str(reply.problem)
            assert reply.step.done
            assert not reply.mistake


CODE = '''
import os

class Needs:
    def reset(self, goal, **columns):
        self.goal = goal

class Narrow:
    def reset(self, prompt):
        pass

class Odd:
    def reset(self, prompt, what=None, **columns):
        return {"int": 3, "dict": {}, "role": [{"role": "usr", "content": "a"}],
                "parts": [{"role": "user"}], "none": None, "text": " Go.",
                "many": [{"role": "user", "content": "a"}] * 257,
                "chat": ({"role": "assistant", "content": "Yes?"},)}[what]

class Judge:
    def __init__(self):
        self.reward = 1.0

    def reset(self, prompt, what="", **columns):
        self.what = what

    def misspelled(self) -> str:
        """Read an attribute that is not there."""
        return self.rewrad

    def lost(self) -> str:
        """Call a name that is not there."""
        return jsn.dumps(3)

    def imports(self) -> str:
        """Import what is not there."""
        import no_such_module
        return ""

    def works(self, how: str) -> str:
        """Work, or not.

        Args:
            how: Whether.
        """
        return "worked" if how == "well" else nothing_there

    def evaluates(self, text: str) -> str:
        """Compute.

        Args:
            text: What.
        """
        return str(eval(text))

    def get_reward(self):
        return {"text": "good", "list": [1.0], "raise": None}.get(self.what, self.reward)

class Final(Judge):
    def get_reward(self, final):
        return 1.0
'''


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> str:
    return written(tmp_path_factory.mktemp("code"), "code.py", CODE)


@pytest.mark.parametrize(
    ("name", "columns", "says"),
    [
        (
            "Needs",
            {"target": 3},
            "reset (code.py, line 5): missing a required argument: 'goal'; it is called with "
            "prompt, target",
        ),
        (
            "Narrow",
            {"target": 3},
            "reset (code.py, line 9): got an unexpected keyword argument 'target'; it is called "
            "with prompt, target; take what it does not need as **columns",
        ),
        ("Odd", {"what": "int"}, "reset (code.py, line 13) returned int; expected text, messages"),
        ("Odd", {"what": "dict"}, "returned dict; expected text, messages or None"),
        ("Odd", {"what": "role"}, "messages[0] has the role 'usr', expected system, developer, "),
        ("Odd", {"what": "parts"}, "its messages[0] has no content, expected text"),
    ],
)
def test_a_reset_that_is_never_right_ends_the_run(
    code: str, name: str, columns: dict[str, Any], says: str
) -> None:
    with (
        EnvironmentPool(EnvironmentConfig(factory=f"{code}:{name}")) as pool,
        pytest.raises(RunFailed) as caught,
    ):
        begun(pool, 0, **columns)
    assert says in str(caught.value)


def test_a_reset_that_is_right_or_too_much(code: str) -> None:
    with EnvironmentPool(EnvironmentConfig(factory=f"{code}:Odd")) as pool:
        assert begun(pool, 0, what="none").prompt == PROMPT
        assert begun(pool, 1, what="text").prompt == [{"role": "user", "content": "Go. Go."}]
        added = {"role": "assistant", "content": "Yes?"}
        assert begun(pool, 2, what="chat").prompt == [*PROMPT, added]
        many = begun(pool, 3, what="many")
        assert "257 messages, the most are 256" in str(many.problem)
        assert not many.mistake
        missing = begun(pool, 4, what="gone")  # of the row, and not of the program
        assert "KeyError: 'gone'" in str(missing.problem)
        assert not missing.mistake


@pytest.mark.parametrize(
    ("tool", "says"),
    [
        ("misspelled", "tool misspelled: AttributeError: 'Judge' object has no attribute 'rewrad'"),
        ("lost", "tool lost: NameError: name 'jsn' is not defined"),
        ("imports", "tool imports: ModuleNotFoundError: No module named 'no_such_module'"),
    ],
)
def test_a_tool_that_lacks_a_name_ends_the_run(code: str, tool: str, says: str) -> None:
    with EnvironmentPool(EnvironmentConfig(factory=f"{code}:Judge")) as pool:
        begun(pool, 0)
        with pytest.raises(RunFailed) as caught:
            turned(pool, 0, 0, call(tool))
    assert says in str(caught.value)
    assert "(code.py, line" in str(caught.value)


def test_a_tool_that_has_worked_and_text_that_a_model_wrote_do_not(code: str) -> None:
    with EnvironmentPool(EnvironmentConfig(factory=f"{code}:Judge")) as pool:
        begun(pool, 0)
        assert turned(pool, 0, 0, call("works", {"how": "well"})).problem is None
        later = turned(pool, 0, 1, call("works", {"how": "badly"}))
        assert "name 'nothing_there' is not defined" in str(later.problem)
        for text in ("nothing", "(", "__import__('no_such')", "'a' + 1", "''.x"):
            wrote = turned(pool, 0, 2, call("evaluates", {"text": text}))
            assert wrote.problem is not None
            assert not wrote.step.done


@pytest.mark.parametrize(
    ("name", "what", "says"),
    [
        ("Judge", "text", "returned str 'good', expected a finite number or None"),
        ("Judge", "list", "returned list, expected a finite number or None"),
        (
            "Final",
            "",
            "get_reward (code.py, line 59): missing a required argument: 'final'; it is given none",
        ),
    ],
)
def test_a_reward_that_is_never_right_ends_the_run(
    code: str, name: str, what: str, says: str
) -> None:
    with EnvironmentPool(EnvironmentConfig(factory=f"{code}:{name}")) as pool:
        begun(pool, 0, what=what)
        with pytest.raises(RunFailed, match="environment: get_reward") as caught:
            finished(pool, 0)
    assert "get_reward (code.py, line" in str(caught.value)
    assert says in str(caught.value)


def test_a_variable_that_is_missing_is_named_wherever_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In what is loaded, `reset`, `step` and tools; the control is a key of a dict."""
    monkeypatch.setenv("shop_url", "here")
    text = """
import os
from isobit.data.turns import Step
class Game:
    def reset(self, where, **columns):
        if where == "reset": os.environ["shop_url"]
        if where == "dict": {}["SHOP"]
    async def step(self, turn):
        try:
            os.environ["shop_url"]
        except KeyError:
            raise RuntimeError("cannot connect")
class Loaded(Game):
    def __init__(self): os.environ["NO_SUCH_NAME"]
"""
    path = written(tmp_path, "vars.py", text)
    config = EnvironmentConfig(factory=f"{path}:Game", on_error="stop")
    passed_on = "; shop_url is set here, and passed on where it is named in environment.variables"
    for where, ends in (("reset", passed_on), ("step", passed_on), ("dict", "(vars.py, line 7)")):
        with EnvironmentPool(config) as pool:
            pool.begin(0, PROMPT, {"where": where})
            if where == "step":
                replies(pool, 1)
                pool.turn(0, Turn(0, "", ""))
            with pytest.raises(RunFailed) as caught:
                replies(pool, 1)
        assert str(caught.value).endswith(ends)
    with pytest.raises(Exception, match="NO_SUCH_NAME is not set: set it, and name it in environ"):
        EnvironmentPool(EnvironmentConfig(factory=f"{path}:Loaded")).start()
