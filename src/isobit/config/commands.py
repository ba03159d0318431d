"""The keys of `isobit generate` and `isobit serve`, and which keys of a training run `isobit eval`
reads: the names are those of a training run."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, TypeVar

from isobit.config.load import parse_config
from isobit.config.messages import keys_of
from isobit.config.reading import read_source
from isobit.config.schema import Config
from isobit.config.sections import (
    BackendOption,
    ChatTemplate,
    ConsistencyOption,
    PrecisionOption,
    SamplingConfig,
    TemplateVariables,
)
from isobit.data.dataset import check_variables
from isobit.engine.types import EngineSize
from isobit.errors import IsobitError, brief
from isobit.options.declare import FileName, at_least, at_most, below
from isobit.tasks.environments.settings import EnvironmentConfig

READ_BY_EVAL = (
    *("model.chat_template", "model.chat_template_kwargs", "task", "rewards", "environment"),
    *(f"sampling.{name}" for name in ("max_new_tokens", "stop", "ignore_eos", "temperature")),
    *(f"sampling.{name}" for name in ("top_k", "top_p", "min_p", "repetition_penalty")),
    *(f"evaluation.{name}" for name in ("samples", "num_samples", "pass_at", "temperature")),
    *(f"evaluation.{name}" for name in ("top_k", "top_p", "tag", "answer_pattern")),
    *("engine", "precision", "consistency", "backend", "seed"),
)
"""Keys and sections of a training run that an evaluation depends on."""

_Command = TypeVar("_Command", "GenerateConfig", "ServerConfig")


@dataclass(frozen=True)
class NamedModel:
    """The model that the command line names."""

    path: Annotated[str, FileName(), "a Hugging Face directory, or a run: the first argument"]
    chat_template: ChatTemplate = None
    chat_template_kwargs: TemplateVariables = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_variables("chat_template_kwargs", self.chat_template_kwargs)


@dataclass(frozen=True)
class GenerateSampling(SamplingConfig):
    """The settings by which completions are sampled."""

    group_size: Annotated[int, at_least(1), "completions per prompt"] = 1
    temperature: Annotated[float, at_least(0), "how varied completions are; 0: greedy"] = 1.0


@dataclass(frozen=True)
class GenerateConfig:
    """The settings on which completions depend, besides their prompts."""

    model: NamedModel
    sampling: GenerateSampling = GenerateSampling()
    environment: EnvironmentConfig = EnvironmentConfig()
    engine: EngineSize = EngineSize()
    precision: PrecisionOption = "fp8"
    consistency: ConsistencyOption = "bitwise"
    backend: BackendOption = "auto"
    seed: Annotated[int, at_least(0), below(2**63), "decides the samples"] = 0

    def __post_init__(self) -> None:
        if not self.environment.used and self.environment != EnvironmentConfig():
            raise IsobitError(
                "environment: there is nothing between the turns: give environment.tools or mcp, or "
                "leave its other keys out"
            )
        if self.environment.factory is not None:
            raise IsobitError(
                "environment.factory makes environments for the rows of a task, and a prompt is "
                "none; give environment.tools, or use isobit eval"
            )


@dataclass(frozen=True)
class ServedTools:
    """The format in which the served model calls tools."""

    parser: Annotated[
        str,
        "how the model writes calls of tools: auto, hermes, qwen3_coder, llama3_json, mistral, "
        "harmony, pythonic, glm45, minimax_m2, gemma4, deepseek_v3 or json",
    ] = "auto"


@dataclass(frozen=True)
class ServerSettings:
    """The address of the server, and its end."""

    port: Annotated[int, at_least(0), at_most(65535), "where it listens; 0: any that is free"] = (
        8000
    )
    host: Annotated[str, "address to listen on; others than this machine's need --token"] = (
        "127.0.0.1"
    )
    name: Annotated[
        str | None,
        "what clients call the model; default: the name of its folder, or of the run's",
    ] = None
    state_every: Annotated[
        int,
        at_least(1),
        "optimizer steps between two saved states of a run; if the server is killed, the steps "
        "after the last one are computed again",
    ] = 10
    grace: Annotated[
        float, at_least(0), at_most(86400), "seconds that open requests have to end after SIGTERM"
    ] = 30.0

    def __post_init__(self) -> None:
        if self.name is not None and not self.name.strip():
            raise IsobitError(f"name {self.name!r}: expected a name that is not empty")


@dataclass(frozen=True)
class ServerSize(EngineSize):
    """The server's memory and batch."""

    kv_pages: Annotated[
        int | None, at_least(1), "pages of the KV cache; default: up to 2 GiB of them"
    ] = None
    max_sequences: Annotated[int, at_least(1), "answers that are sampled at the same time"] = 64


@dataclass(frozen=True)
class ServerConfig:
    """The settings on which a server depends, besides its files."""

    model: NamedModel
    serve: ServerSettings = ServerSettings()
    engine: ServerSize = ServerSize()
    environment: ServedTools = ServedTools()
    precision: PrecisionOption = "fp8"
    consistency: ConsistencyOption = "bitwise"
    backend: BackendOption = "auto"


def command_config(
    schema: type[_Command], model: object, overrides: Sequence[str], command: str
) -> _Command:
    """Return the keys of a command for a model. Raises IsobitError for overrides that are wrong."""
    values, _ = read_source({"model": {"path": str(model)}}, overrides)
    return parse_config(schema, values, command)


def is_read_by_eval(key: str) -> bool:
    """Return whether an evaluation depends on a key, or on a part of it."""
    return any(
        key == read or key.startswith(f"{read}.") or read.startswith(f"{key}.")
        for read in READ_BY_EVAL
    )


def check_read_by_eval(overrides: Sequence[str]) -> None:
    """Raise IsobitError for an override of a key that no evaluation depends on."""
    known = set(keys_of(Config))
    for override in overrides:
        key = override.partition("=")[0]
        if key in known and not is_read_by_eval(key):
            raise IsobitError(
                f"override {brief(override)!r}: an evaluation does not depend on {key}; it depends "
                f"on {', '.join(READ_BY_EVAL[:-1])} and {READ_BY_EVAL[-1]}"
            )
