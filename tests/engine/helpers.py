"""Small random models, and what is compared of their completions."""

from functools import lru_cache
from pathlib import Path

import pytest
import torch

from isobit.engine.engine import Engine
from isobit.engine.types import Completion, Sampling
from isobit.errors import IsobitError
from isobit.kernels import get_ops
from isobit.model import Model
from isobit.model.config import ModelConfig
from isobit.model.tokenizer import Tokenizer

STORIES = Path(__file__).parents[3] / "shared" / "models" / "stories260K"
ALPHABET = "abcdefghijklmnopqrstuvwxyz 0123456789+-=.,!?"

# hidden sizes that are not multiples of 128, grouped heads, three layers
CONFIG = ModelConfig("llama", 64, 144, 208, 3, 4, 2, 36, max_positions=96, eos_ids=(2,))


def options(preset: object) -> tuple[tuple[str, object], ...] | str:
    return tuple(preset.items()) if isinstance(preset, dict) else str(preset)


@lru_cache(maxsize=16)
def _tiny(precision: object, backend: str, consistency: str) -> Model:
    chosen = dict(precision) if isinstance(precision, tuple) else precision
    model = Model.init(CONFIG, Tokenizer.characters(ALPHABET), chosen, 3, backend, consistency)
    with torch.no_grad():
        for name, parameter in model.named_parameters().items():
            if parameter.ndim == 2:
                parameter.mul_(8 if name == "head" else 4)  # a distribution with some shape to it
    model.sync()
    return model


def tiny(precision: object = "float32", backend: str = "reference", consistency: str = "bitwise") -> Model:
    """A random model, shared by the tests: do not change its weights."""
    require(backend)
    return _tiny(options(precision), backend, consistency)


def require(backend: str) -> None:
    if backend == "native":
        try:
            get_ops("native")
        except IsobitError as error:
            pytest.skip(f"no native backend here: {error}")


Outcome = dict[tuple[int, int], tuple[list[int], list[float], str, str]]


def outcome(groups: list[list[Completion]]) -> Outcome:
    """What must not depend on the order of work, by (prompt id, sample index)."""
    return {
        (c.prompt_id, c.sample_index): (c.token_ids, c.logprobs, c.text, c.finish_reason)
        for group in groups
        for c in group
    }


def rollout(engine: Engine, prompts: list, sampling: Sampling, prompt_ids: list[int] | None = None) -> Outcome:
    """Generate, proving after every step that the pages are in order."""
    return outcome(engine.generate(prompts, sampling, prompt_ids, lambda *_: engine.integrity()))
