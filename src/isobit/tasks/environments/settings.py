"""The section `environment` of a configuration: what answers the model between its turns, and
within which limits."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from isobit.errors import IsobitError
from isobit.options.declare import Example, FileName, above, at_least, at_most, text_as


@dataclass(frozen=True)
class McpServer:
    """A server of the Model Context Protocol, over its stdin and stdout. `mcp: COMMAND` is
    `mcp.command`."""

    command: Annotated[str, "a program and its arguments, as a shell would split them"]
    environment: Annotated[
        Mapping[str, str], "environment variables of the server, besides those of its worker"
    ] = field(default_factory=dict)


@dataclass(frozen=True)
class EnvironmentConfig:
    """Tools and environments between the model's turns, in worker processes. Without tools, factory
    and MCP servers, an episode is one answer."""

    tools: Annotated[
        tuple[Annotated[str, FileName(functions=True)], ...],
        "functions that the model may call: path/to/file.py:function or package.module:function",
    ] = ()
    factory: Annotated[
        Annotated[str, FileName(functions=True)]
        | Annotated[
            dict[str, Annotated[str, FileName(functions=True)]],
            Example("{maze: envs.py:Maze, shop: envs.py:Shop}"),
        ]
        | None,
        "what makes an episode's environment, as TRL's environment_factory: a class or function of "
        "a file or module, a dict there, or a mapping from the column `environment` to classes",
    ] = None
    mcp: Annotated[
        tuple[Annotated[McpServer, text_as("command")], ...],
        "MCP servers whose tools the model may call; each worker starts its own",
    ] = ()
    max_turns: Annotated[int, at_least(1), at_most(4000), "turns of the model in an episode"] = 8
    max_tokens: Annotated[
        int | None,
        at_least(1),
        "the most tokens of an episode after its prompt, those of tools included; default: "
        "twice sampling.max_new_tokens for each turn, as far as the model's context goes",
    ] = None
    turn_deadline_s: Annotated[
        float, above(0), "seconds for what an environment does between two turns"
    ] = 30.0
    on_error: Annotated[
        Literal["observe", "end", "stop"],
        "when a tool raises or takes too long. observe: the model is told. end: the episode "
        "ends. stop: the run ends",
    ] = "observe"
    history: Annotated[
        Literal["append", "fork"],
        "what the model sees of its past turns. append: the tokens that it wrote; refused "
        "where the chat template would change them. fork: what the template makes of them. "
        "Where that differs, a new context begins; all contexts of an episode share its "
        "advantage",
    ] = "append"
    parser: Annotated[
        str | None, "how the model writes calls of tools; default: found from its chat template"
    ] = None
    workers: Annotated[
        int, at_least(1), at_most(64), "worker processes; each serves many episodes at once"
    ] = 1
    variables: Annotated[
        tuple[str, ...], "environment variables passed on to workers, besides PATH and the like"
    ] = ()

    def __post_init__(self) -> None:
        if len(set(self.tools)) < len(self.tools):
            raise IsobitError("tools: one of them is there twice")
        if isinstance(self.factory, dict) and not self.factory:
            raise IsobitError("factory: a mapping without environments")

    @property
    def used(self) -> bool:
        """Whether there is anything between the turns."""
        return bool(self.tools or self.factory or self.mcp)
