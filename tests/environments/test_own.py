"""An `Environment` of one's own, which answers turns itself."""

from pathlib import Path

import pytest

from isobit.data.turns import Step, Turn
from isobit.errors import RunFailed
from isobit.tasks.environments.pool import EnvironmentPool
from isobit.tasks.environments.settings import EnvironmentConfig
from tests.environments.helpers import PROMPT, begun, call, calling, finished, replies, written

GUESSING = '''
from isobit.data.turns import Step

class Guessing:
    """Guess a number; each guess nearer to it than the last is worth something."""

    def reset(self, number, **columns):
        self.number = number
        if columns.get("examples"):
            return [{"role": "assistant", "content": "Yes?"}, {"role": "user", "content": "Guess."}]
        return " Guess a number."

    async def step(self, turn):
        if turn.text == "raise":
            raise ValueError("not a number")
        if turn.text == "nan":
            return Step(reward=float("nan"))
        if turn.calls or turn.problems or turn.truncated:
            said = f"{turn.calls[0].name} {turn.problems[0]} {turn.truncated} {turn.content}"
            return Step(({"role": "user", "content": said},))
        guess = int(turn.text)
        if guess == self.number:
            return Step(reward=1.0, done=True)
        hint = "higher" if guess < self.number else "lower"
        return Step(({"role": "user", "content": hint},), reward=0.1)
'''


@pytest.fixture(scope="module")
def factory(tmp_path_factory: pytest.TempPathFactory) -> str:
    return written(tmp_path_factory.mktemp("own"), "guessing.py", GUESSING) + ":Guessing"


def test_a_game_with_rewards_on_the_way(factory: str) -> None:
    with EnvironmentPool(EnvironmentConfig(factory=factory)) as pool:
        assert pool.reward_weights == {"Guessing": 1.0}
        assert pool.tools == ()
        assert begun(pool, 0, "Hello.", number=5).prompt == "Hello. Guess a number."
        assert begun(pool, 1, number=5, examples=True).prompt == [
            *PROMPT,
            {"role": "assistant", "content": "Yes?"},
            {"role": "user", "content": "Guess."},
        ]
        pool.turn(0, Turn(0, "3", "3"))
        higher = Step(({"role": "user", "content": "higher"},), 0.1)
        assert replies(pool, 1)[0].step == higher
        pool.turn(0, Turn(1, "5", "5"))
        assert replies(pool, 1)[0].step == Step((), 1.0, True)
        assert finished(pool, 0).rewards == {"Guessing": 1.0}
        assert finished(pool, 1).rewards == {}  # it never said one


def test_it_sees_the_whole_turn(factory: str) -> None:
    with EnvironmentPool(EnvironmentConfig(factory=factory)) as pool:
        begun(pool, 0, number=5)
        pool.turn(0, Turn(0, "all", "some", (call("a", {}),), ("why",), True))
        assert replies(pool, 1)[0].step.messages[0]["content"] == "a why True some"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("raise", "step: ValueError: not a number (guessing.py, line 15)"),
        ("nan", "step: its reward returned nan, expected a finite number or None"),
    ],
)
def test_a_step_that_fails_is_told_to_the_model_or_ends(
    factory: str, text: str, problem: str
) -> None:
    for on_error in ("observe", "end", "stop"):
        config = EnvironmentConfig(factory=factory, on_error=on_error)  # type: ignore[arg-type]
        with EnvironmentPool(config) as pool:
            begun(pool, 0, number=5)
            pool.turn(0, Turn(0, text, text))
            if on_error == "stop":
                with pytest.raises(RunFailed) as caught:
                    replies(pool, 1)
                assert str(caught.value) == f"environment: {problem}"
                continue
            reply = replies(pool, 1)[0]
            assert reply.problem == problem
            assert reply.step.done == (on_error == "end")
            told = () if on_error == "end" else (str({"error": problem}),)
            assert tuple(each["content"] for each in reply.step.messages) == told


def test_calls_that_its_step_answers_are_counted_by_name(tmp_path: Path) -> None:
    """An equal part of the step's seconds each; the control has no calls."""
    code = """
import asyncio
from isobit.data.turns import Step

class Shop:
    tools = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in "ab"]

    def reset(self, **columns):
        pass

    async def step(self, turn):
        await asyncio.sleep(0.04)
        if turn.text == "raise":
            raise ValueError("closed")
        return Step()
"""
    given = written(tmp_path, "shop.py", code) + ":Shop"
    with EnvironmentPool(EnvironmentConfig(factory=given)) as pool:
        begun(pool, 0)
        for text, names in (("", "ab"), ("", "q"), ("raise", "b"), ("", "")):
            pool.turn(0, Turn(0, text, "", tuple(call(name, {}) for name in names)))
            uses = replies(pool, 1)[0].uses
            assert [use.name for use in uses] == [n if n in "ab" else "unknown" for n in names]
            assert sum(use.seconds for use in uses) >= 0.039 * bool(names)
            assert len({use.seconds for use in uses}) <= 1
            errors = {use.error for use in uses}
            assert errors <= (
                {None} if text == "" else {"step: ValueError: closed (shop.py, line 14)"}
            )


def test_the_last_turn_is_answered_too(factory: str) -> None:
    config = EnvironmentConfig(factory=factory, max_turns=1)
    with EnvironmentPool(config) as pool:
        begun(pool, 0, number=5)
        pool.turn(0, Turn(0, "5", "5"))
        assert replies(pool, 1)[0].step.reward == 1.0


def test_it_is_loaded_without_torch(factory: str, tmp_path: Path) -> None:
    code = """
import sys
def seen() -> str:
    \"\"\"What is imported.\"\"\"
    return str({"torch", "numpy", "transformers", "pydantic"} & set(sys.modules))
"""
    path = written(tmp_path, "seen.py", code)
    with EnvironmentPool(EnvironmentConfig(tools=(f"{path}:seen",))) as pool:
        begun(pool, 0)
        pool.turn(0, calling(0, call("seen")))
        assert replies(pool, 1)[0].step.messages[0]["content"] == "set()"
