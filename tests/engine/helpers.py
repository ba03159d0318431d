"""Small random models, and what is compared of their completions."""

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch

from isobit.engine.engine import Engine
from isobit.engine.types import Completion, Sampling
from isobit.model import Model
from isobit.model.hub.config import ModelConfig
from isobit.model.text.tokenizer import Tokenizer
from tests.kernels.helpers import computed
from tests.models import ALPHABET, level, require

# hidden sizes that are not multiples of 128, grouped heads, three layers
CONFIG = ModelConfig("llama", 64, 144, 208, 3, 4, 2, 36, max_positions=96, eos_ids=(2,))


def options(preset: object) -> tuple[tuple[str, object], ...] | str:
    return tuple(preset.items()) if isinstance(preset, dict) else str(preset)


def fresh(
    precision: Any,
    backend: str = "reference",
    seed: int = 5,
    consistency: str | None = None,
    **changes: int,
) -> Model:
    """A random model of the test's own."""
    config = replace(CONFIG, **changes)
    return Model.init(
        config,
        Tokenizer.characters(ALPHABET),
        precision,
        seed,
        backend,
        consistency or level(backend),
    )


def scale(model: Model, factor: float) -> None:
    """Other weights, synchronized, as after an update."""
    with torch.no_grad():
        for parameter in model.named_parameters().values():
            parameter.mul_(factor)
    model.sync()


@lru_cache(maxsize=16)
def _tiny(precision: object, backend: str, consistency: str | None) -> Model:
    chosen = dict(precision) if isinstance(precision, tuple) else precision
    model = fresh(chosen, backend, 3, consistency)
    with torch.no_grad():
        for name, parameter in model.named_parameters().items():
            if parameter.ndim == 2:
                parameter.mul_(8 if name == "head" else 4)  # a distribution with some shape to it
    model.sync()
    return model


def tiny(
    precision: object = "float32", backend: str = "reference", consistency: str | None = None
) -> Model:
    """A random model, shared by the tests: do not change its weights."""
    require(backend)
    return _tiny(options(precision), backend, consistency)


Outcome = dict[tuple[int, int], tuple[list[int], list[float], str, str]]


def outcome(groups: list[list[Completion]]) -> Outcome:
    """What must not depend on the order of work, by (prompt id, sample index)."""
    return {
        (c.prompt_id, c.sample_index): (c.token_ids, c.logprobs, c.text, c.finish_reason)
        for group in groups
        for c in group
    }


def rollout(
    engine: Engine, prompts: list, sampling: Sampling, prompt_ids: list[int] | None = None
) -> Outcome:
    """Generate, proving after every step that the pages are in order."""
    return outcome(engine.generate(prompts, sampling, prompt_ids, lambda *_: engine.integrity()))


def learner_logprobs(
    model: Model, completions: list[Completion], temperature: float
) -> list[torch.Tensor]:
    """What the learner's packed forward gives for the sampled tokens."""
    rows = model.logprobs([[*c.prompt_token_ids, *c.token_ids] for c in completions], temperature)
    return [row[len(c.prompt_token_ids) - 1 :] for row, c in zip(rows, completions)]


def differing(
    model: Model, groups: list[list[Completion]], temperature: float = 1.0
) -> tuple[int, int]:
    """(tokens whose two log-probabilities differ in any bit, tokens)."""
    completions = [completion for group in groups for completion in group]
    learner = torch.cat(learner_logprobs(model, completions, temperature))
    rolled = torch.tensor([value for completion in completions for value in completion.logprobs])
    assert learner.dtype == torch.float32
    assert learner.shape == rolled.shape
    assert computed(rolled), "there is nothing that could differ"
    return int((learner.view(torch.int32) != rolled.view(torch.int32)).sum()), rolled.numel()


class EagerGraph:
    """A `Graph` that calls the function, and is used as those of a GPU are."""

    asynchronous, most_rows = True, 1 << 30

    def __init__(self, peer: object) -> None:
        self._function: Callable[[], None] | None = None

    def capture(self, function: Callable[[], None]) -> None:
        self._function = function

    def replay(self) -> None:
        assert self._function is not None
        self._function()
