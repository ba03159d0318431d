"""TRL's tools and environments, as its documentation writes them, unchanged: Agent Training in
`docs/source/grpo_trainer.md` and `docs/source/openenv.md` of TRL 1.16."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from isobit.errors import IsobitError
from isobit.tasks.environments.kinds import RESERVED
from isobit.tasks.environments.pool import EnvironmentPool
from isobit.tasks.environments.settings import EnvironmentConfig
from isobit.tasks.rewards.spec import RewardSpec
from tests.environments.helpers import (
    PROMPT,
    begun,
    call,
    contents,
    finished,
    replies,
    turned,
    written,
)

TOOLS = '''
def multiply(a: int, b: int) -> int:
    """
    Multiplies two integers.

    Args:
        a: The first integer.
        b: The second integer.

    Returns:
        The product of the two integers.
    """
    return a * b

async def async_add(a: int, b: int) -> int:
    """
    Asynchronously adds two integers.

    Args:
        a: The first integer.
        b: The second integer.

    Returns:
        The sum of the two integers.
    """
    return a + b
'''
ENVIRONMENTS = '''
import random

class IncrementEnv:
    # Reserved methods
    def reset(self, **kwargs) -> str | None:  # required; called at the start of each rollout
        self.counter = 0
        self.target = random.randint(1, 6)  # self-sample the task
        return f"Increment the counter by {self.target}."  # returned string becomes the prompt

    def get_reward(self) -> float:  # optional: the environment scores itself from its own state
        return float(self.counter == self.target)

    # Public methods (exposed as tools)
    def increment(self, step: int) -> int:
        """
        Increment the internal counter.

        Args:
            step: Value to add to the counter.

        Returns:
            The updated counter value.
        """
        self.counter += step
        return self.counter


class CodingEnv:
    def reset(self, **kwargs) -> str:
        n = random.randint(1, 20)
        return f"Compute the {n}th Fibonacci number."

    def run_code(self, code: str) -> str:  # exposed as a tool only for "coding" examples
        """Run the given Python code and return its stdout.

        Args:
            code: The Python source to execute.

        Returns:
            The captured standard output.
        """
        ...

class GameEnv:
    def reset(self, **kwargs) -> str:
        return "Reach the goal tile."

    def move(self, action: str) -> str:  # exposed as a tool only for "game" examples
        """Apply an action to the game and return the new observation.

        Args:
            action: One of "up", "down", "left", "right".

        Returns:
            The observation after the move.
        """
        ...
'''
WORDLE = '''
from textarena_env import TextArenaAction, TextArenaEnv

class WordleEnv:
    def __init__(self):
        self.client = TextArenaEnv(base_url="https://openenv-wordle.hf.space")

    def reset(self, **kwargs) -> str | None:
        result = self.client.reset()
        self._last_full_feedback = result.observation.messages[0].content
        self.reward = 0.0
        self.done = False
        return self._last_full_feedback

    def guess(self, guess: str) -> str:
        """
        Make a guess in the Wordle environment.

        Args:
            guess: The guessed word, formatted as '[abcde]'

        Returns:
            The feedback message from the environment.
        """
        if self.done:
            raise ValueError("Game over.")
        result = self.client.step(TextArenaAction(message=guess))
        _full_feedback = result.observation.messages[0].content
        feedback = _full_feedback[len(self._last_full_feedback):]
        self._last_full_feedback = _full_feedback
        if "You attempted an invalid move" in feedback:
            self.reward = 0.0
        else:
            self.reward = result.reward
        self.done = result.done
        return feedback

def reward_func(environments, **kwargs) -> list[float]:
    return [env.reward for env in environments]
'''
TEXTARENA = '''
"""Stands in for the client of a server that this machine cannot reach: the word is "crane"."""
from types import SimpleNamespace


class TextArenaAction:
    def __init__(self, message):
        self.message = message


class TextArenaEnv:
    def __init__(self, base_url):
        self.base_url = base_url

    def reset(self):
        self.said = "Guess a word. "
        return self._result(0.0, False)

    def step(self, action):
        self.said += f"You said {action.message}. "
        right = action.message == "[crane]"
        return self._result(float(right), right)

    def _result(self, reward, done):
        observation = SimpleNamespace(messages=[SimpleNamespace(content=self.said)])
        return SimpleNamespace(observation=observation, reward=reward, done=done)
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trl")
    for name, text in (
        ("tools.py", TOOLS),
        ("envs.py", ENVIRONMENTS),
        ("wordle.py", WORDLE),
        ("textarena_env.py", TEXTARENA),
    ):
        written(path, name, text)
    return path


def test_tools(folder: Path) -> None:
    tools = (f"{folder}/tools.py:multiply", f"{folder}/tools.py:async_add")
    with EnvironmentPool(EnvironmentConfig(tools=tools)) as pool:
        assert [each["function"]["name"] for each in pool.tools] == ["multiply", "async_add"]
        assert begun(pool, 7).prompt == PROMPT
        calls = (call("async_add", {"a": 1, "b": 2}), call("multiply", {"a": 6, "b": 7}))
        reply = turned(pool, 7, 0, *calls)
        assert reply.step.messages == (
            {"role": "tool", "name": "async_add", "content": "3"},
            {"role": "tool", "name": "multiply", "content": "42"},
        )
        assert [(use.name, use.error) for use in reply.uses] == [
            ("async_add", None),
            ("multiply", None),
        ]
        assert not reply.step.done
        assert turned(pool, 7, 1).step.done  # an answer without calls ends it
        assert finished(pool, 7).rewards == {}


def test_an_environment_that_owns_the_task_and_the_reward(folder: Path) -> None:
    config = EnvironmentConfig(factory=f"{folder}/envs.py:IncrementEnv")
    with EnvironmentPool(config) as pool:
        assert pool.reward_weights == {"IncrementEnv": 1.0}
        for right in (True, False):
            opened = begun(pool, 0, [{"role": "user", "content": ""}])
            assert opened.prompt is not None
            text = opened.prompt[-1]["content"]
            assert text.startswith("Increment the counter by ")
            target = int(text.rstrip(".").split()[-1])
            assert contents(turned(pool, 0, 0, call("increment", {"step": target}))) == [
                str(target)
            ]
            if not right:
                turned(pool, 0, 1, call("increment", {"step": 1}))
            assert finished(pool, 0).rewards == {"IncrementEnv": float(right)}


def test_a_dict_of_factories_shows_each_row_its_own_tools(folder: Path) -> None:
    factory = {"coding": f"{folder}/envs.py:CodingEnv", "game": f"{folder}/envs.py:GameEnv"}
    config = EnvironmentConfig(factory=factory, tools=(f"{folder}/tools.py:multiply",))
    with EnvironmentPool(config) as pool:
        assert len(pool.tools) == 3
        coding = begun(pool, 0, environment="coding")
        game = begun(pool, 1, environment="game")
        shown = [[tool["function"]["name"] for tool in reply.tools] for reply in (coding, game)]
        assert shown == [["multiply", "run_code"], ["multiply", "move"]]
        assert game.prompt == [{"role": "user", "content": "Go.Reach the goal tile."}]
        assert contents(turned(pool, 0, 0, call("move", {"action": "up"}))) == [
            "{'error': 'Tool move not found.'}"
        ]
        assert contents(turned(pool, 1, 0, call("move", {"action": "up"}))) == ["None"]
        with pytest.raises(IsobitError, match="did you mean 'game'"):
            pool.begin(2, PROMPT, {"environment": "gam"})
        with pytest.raises(IsobitError, match="row 4: environment '\\[1\\]' is not in"):
            pool.check_row("row 4", {"environment": [1]})
        with pytest.raises(IsobitError, match="row 3: no column 'environment', which chooses"):
            pool.check_row("row 3", {})


def test_a_game_that_ends_by_an_exception_and_a_reward_that_asks_for_environments(
    folder: Path,
) -> None:
    config = EnvironmentConfig(factory=f"{folder}/wordle.py:WordleEnv")
    rewards = [RewardSpec(f"{folder}/wordle.py:reward_func", 0.5)]
    with EnvironmentPool(config, rewards) as pool:
        assert pool.called_here == ("reward_func",)
        assert pool.reward_weights == {"reward_func": 0.5}
        pool.begin(0, PROMPT, {})
        pool.begin(1, PROMPT, {})
        opened = replies(pool, 2)
        assert opened[0].prompt == [{"role": "user", "content": "Go.Guess a word. "}]
        assert contents(turned(pool, 0, 0, call("guess", {"guess": "[slate]"}))) == [
            "You said [slate]. "
        ]
        assert contents(turned(pool, 0, 1, call("guess", {"guess": "[crane]"}))) == [
            "You said [crane]. "
        ]
        over = turned(pool, 0, 2, call("guess", {"guess": "[crane]"}))
        assert contents(over) == ["{'error': 'Game over.'}"]
        assert over.uses[0].error == "Game over."
        assert not over.step.done
        assert finished(pool, 0).rewards == {"reward_func": 1.0}
        assert finished(pool, 1).rewards == {"reward_func": 0.0}


def test_an_environment_is_made_once_and_reset_often(folder: Path) -> None:
    text = """
class Counted:
    made = 0
    def __init__(self):
        Counted.made += 1
    def reset(self, prompt, **columns):
        return f"{Counted.made} {prompt[0]['content']} {columns}"
"""
    path = written(folder, "counted.py", text)
    with EnvironmentPool(EnvironmentConfig(factory=f"{path}:Counted")) as pool:
        for _ in range(3):
            opened = begun(pool, 0, answer=3)
            assert opened.prompt == [{"role": "user", "content": "Go.1 Go. {'answer': 3}"}]
            pool.end(0)


def test_what_is_reserved_is_what_trl_reserves() -> None:
    """Read in the code of its trainer, which is installed beside the tests."""
    found = find_spec("trl")
    assert found is not None
    assert found.origin is not None
    code = (Path(found.origin).parent / "trainer" / "grpo_trainer.py").read_text()
    assert 'member_name not in ("reset", "get_reward")' in code
    assert RESERVED == ("reset", "get_reward")
