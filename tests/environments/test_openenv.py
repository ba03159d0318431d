"""Clients of OpenEnv: stand-ins with the published interface, and the package itself where it is
installed, over a server of this machine."""

import socket
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from isobit.errors import IsobitError
from isobit.tasks.environments.pool import EnvironmentPool
from isobit.tasks.environments.settings import EnvironmentConfig
from tests.environments.helpers import PROMPT, begun, call, contents, finished, turned, written

STAND_INS = '''
import asyncio
from types import SimpleNamespace
from typing import Generic, TypeVar

A, O, S = TypeVar("A"), TypeVar("O"), TypeVar("S")


class Sync:
    """As SyncEnvClient: what is `async` there is not here."""
    def __init__(self, client):
        self._client = client
    @property
    def async_client(self):
        return self._client
    def __getattr__(self, name):
        found = getattr(self._client, name)
        if not asyncio.iscoroutinefunction(found):
            return found
        return lambda *a, **k: asyncio.run(found(*a, **k))


class EnvClient(Generic[A, O, S]):
    def sync(self):
        return Sync(self)


class Move:
    """Move along the line."""
    @staticmethod
    def model_json_schema():
        return {"type": "object", "properties": {"by": {"type": "integer"}, "metadata": {}},
                "required": ["by"]}
    def __init__(self, by):
        self.by = by


class LineEnv(EnvClient[Move, dict, dict]):
    def _step_payload(self, action): ...
    async def reset(self, start=0):
        self.at = start
        return self.result(0.0)
    async def step(self, action):
        self.at += action.by
        return self.result(1.0 if self.at == 3 else -0.1)
    def result(self, reward):
        seen = {"at": self.at, "reward": reward, "done": self.at == 3, "metadata": {"a": 1}}
        return SimpleNamespace(observation=seen, reward=reward, done=self.at == 3)


class EchoEnv(EnvClient[None, dict, dict]):
    tools = ["echo_message"]
    def _step_payload(self, action): ...
    async def reset(self):
        return SimpleNamespace(observation={"reward": None}, reward=None, done=False)
    async def list_tools(self):
        schema = {"type": "object", "properties": {"message": {"type": "string"}},
                  "required": ["message"]}
        return [SimpleNamespace(name=name, description="Echo it.", input_schema=schema)
                for name in self.tools]
    async def call_tool(self, name, **arguments):
        return arguments["message"]


class Gym(LineEnv):
    async def reset(self):
        self.at = 0
        return self.result(0.0)
    def result(self, reward):
        ends = {self.ends: self.at == 3}
        return SimpleNamespace(observation={"at": self.at}, reward=0.0, done=False, **ends)

def terminated():
    made = Gym()
    made.ends = "terminated"
    return made

def truncated():
    made = Gym()
    made.ends = "truncated"
    return made

class Shop(EchoEnv):
    """As the published MCPToolClient: what a tool says alone is returned."""
    async def reset(self):
        self.left = 2
        return SimpleNamespace(observation={}, reward=0.5, done=False)
    async def step(self, action):
        self.left -= 1
        return SimpleNamespace(observation=action, reward=0.25, done=self.left == 0)
    async def call_tool(self, name, **arguments):
        return (await self.step(arguments["message"])).observation

def shop():
    return Shop()

def shop_sync():
    return Shop().sync()

def line():
    return LineEnv()

def line_sync():
    return LineEnv().sync()

def echo():
    return EchoEnv()

def silent():
    made = EchoEnv()
    made.tools = []
    return made
'''


@pytest.fixture(scope="module")
def stand_ins(tmp_path_factory: pytest.TempPathFactory) -> str:
    return written(tmp_path_factory.mktemp("openenv"), "clients.py", STAND_INS)


def check_line(factory: str) -> None:
    with EnvironmentPool(EnvironmentConfig(factory=factory)) as pool:
        (tool,) = pool.tools
        assert tool["function"]["name"] == "step"
        assert tool["function"]["description"] == "Move along the line."
        assert list(tool["function"]["parameters"]["properties"]) == ["by"]
        assert tool["function"]["parameters"]["required"] == ["by"]
        assert pool.reward_weights == {"LineEnv": 1.0}
        for _ in range(2):  # a client serves one episode after another
            assert begun(pool, 0, start=1).prompt == [{"role": "user", "content": 'Go.{"at": 1}'}]
            going = turned(pool, 0, 0, call("step", {"by": 1}))
            assert contents(going) == ['{"at": 2}']
            assert not going.step.done
            wrong = turned(pool, 0, 1, call("step", {"bye": 1}))
            assert contents(wrong) == [str({"error": "step() missing a required argument: 'by'"})]
            assert wrong.problem is None
            assert not wrong.step.done
            over = turned(pool, 0, 2, call("step", {"by": 1}))
            assert contents(over) == ['{"at": 3}']
            assert over.step.done
            assert contents(turned(pool, 0, 3, call("step", {"by": 1}))) == [
                "{'error': 'The episode is over.'}"
            ]
            assert finished(pool, 0).rewards == {"LineEnv": 0.9}


def check_echo(factory: str) -> dict[str, float | None]:
    with EnvironmentPool(EnvironmentConfig(factory=factory)) as pool:
        assert [tool["function"]["name"] for tool in pool.tools] == ["echo_message"]
        assert begun(pool, 0).prompt == PROMPT
        assert contents(turned(pool, 0, 0, call("echo_message", {"message": "hi"}))) == ["hi"]
        return dict(finished(pool, 0).rewards)


@pytest.mark.parametrize("name", ["line", "line_sync"])
def test_a_client_with_a_step(stand_ins: str, name: str) -> None:
    check_line(f"{stand_ins}:{name}")


@pytest.mark.parametrize("name", ["terminated", "truncated"])
def test_what_gymnasium_says_ends_the_episode(stand_ins: str, name: str) -> None:
    with EnvironmentPool(EnvironmentConfig(factory=f"{stand_ins}:{name}")) as pool:
        for _ in range(2):  # and the next one begins anew
            begun(pool, 0)
            assert not turned(pool, 0, 0, call("step", {"by": 1})).step.done
            assert turned(pool, 0, 1, call("step", {"by": 2})).step.done
            assert finished(pool, 0).rewards == {"Gym": 0.0}


def test_a_client_with_tools(stand_ins: str) -> None:
    assert check_echo(f"{stand_ins}:echo") == {}  # its server gives no rewards


@pytest.mark.parametrize("name", ["shop", "shop_sync"])
def test_a_client_with_tools_whose_steps_have_rewards_and_an_end(stand_ins: str, name: str) -> None:
    with EnvironmentPool(EnvironmentConfig(factory=f"{stand_ins}:{name}")) as pool:
        for _ in range(2):
            begun(pool, 0)
            for number, over in enumerate((False, True)):
                reply = turned(pool, 0, number, call("echo_message", {"message": "hi"}))
                assert contents(reply) == ["hi"]
                assert reply.step.done == over
            assert finished(pool, 0).rewards == {"Shop": 1.0}


def test_a_server_without_tools_is_one_line(stand_ins: str) -> None:
    with pytest.raises(IsobitError, match="the server of EchoEnv has no tools"):
        EnvironmentPool(EnvironmentConfig(factory=f"{stand_ins}:silent")).start()


@pytest.fixture
def servers() -> Iterator[dict[str, int]]:
    if find_spec("openenv") is None:
        pytest.skip("the package openenv is not installed")
    program = Path(__file__).parent / "openenv_server.py"
    ports = {}
    for kind in ("game", "tools"):
        with socket.create_server(("127.0.0.1", 0)) as one:
            ports[kind] = one.getsockname()[1]
    running = [
        subprocess.Popen([sys.executable, str(program), kind, str(port)])
        for kind, port in ports.items()
    ]
    yield ports
    for each in running:
        each.kill()
        each.wait()


def test_the_published_package(servers: dict[str, int], tmp_path: Path) -> None:
    text = f"""
import socket, sys, time
sys.path.insert(0, {str(Path(__file__).parent)!r})
from openenv_server import EchoEnv, LineEnv

def reached(port):
    for _ in range(1200):
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            return f"http://127.0.0.1:{{port}}"
        except OSError:
            time.sleep(0.1)

def line():
    return LineEnv(base_url=reached({servers["game"]}))

def line_sync():
    return line().sync()

def echo():
    return EchoEnv(base_url=reached({servers["tools"]}))
"""
    path = written(tmp_path, "published.py", text)
    check_line(f"{path}:line")
    check_line(f"{path}:line_sync")
    assert check_echo(f"{path}:echo") == {"EchoEnv": 0.0}
