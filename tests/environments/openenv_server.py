"""An OpenEnv server with two environments, by the package's own means, and their clients: a game
with a step (`game`), and tools (`tools`). `python openenv_server.py game PORT` serves one."""

import sys
from typing import Any

from fastmcp import FastMCP
from openenv.core.client_types import StepResult
from openenv.core.env_client import EnvClient
from openenv.core.env_server import Environment, create_app
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State
from openenv.core.mcp_client import MCPToolClient
from pydantic import Field


class Move(Action):
    """Move along the line."""

    by: int = Field(..., description="How far; negative is to the left.")


class Place(Observation):
    at: int = 0


class Line(Environment):
    """The goal is at 3; each step costs 0.1."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state = State(episode_id="it", step_count=0)
        self.at = 0

    def reset(self, start: int = 0, **kwargs: Any) -> Place:
        self.at = start
        return Place(at=start, reward=0.0, done=False)

    def step(self, action: Move, **kwargs: Any) -> Place:
        self.at += action.by
        return Place(at=self.at, reward=1.0 if self.at == 3 else -0.1, done=self.at == 3)

    @property
    def state(self) -> State:
        return self._state


class LineEnv(EnvClient[Move, Place, State]):
    def _step_payload(self, action: Move) -> dict[str, Any]:
        return action.model_dump()

    def _parse_result(self, payload: dict[str, Any]) -> StepResult[Place]:
        seen = Place(**payload["observation"])
        return StepResult(seen, payload.get("reward"), payload.get("done", False))

    def _parse_state(self, payload: dict[str, Any]) -> State:
        return State(**payload)


class Echo(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        server = FastMCP("echo")

        @server.tool
        def echo_message(message: str) -> str:
            """Echo back the provided message."""
            return message

        super().__init__(server)
        self._state = State(episode_id="it", step_count=0)

    def reset(self, **kwargs: Any) -> Observation:
        return Observation(done=False, reward=0.0)

    def _step_impl(self, action: Any, **kwargs: Any) -> Observation:
        return Observation(done=False, reward=0.0)

    @property
    def state(self) -> State:
        return self._state


class EchoEnv(MCPToolClient):
    """As OpenEnv's own."""


if __name__ == "__main__":
    import uvicorn

    kinds = {"game": (Line, Move, Place), "tools": (Echo, CallToolAction, CallToolObservation)}
    app = create_app(*kinds[sys.argv[1]], env_name="it", max_concurrent_envs=4)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[2]), log_level="warning")
