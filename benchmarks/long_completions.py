"""Completions of 8,192 and 32,768 tokens: the learner's log-probabilities are the rollout's bits,
on both CPU backends.

    python -m benchmarks long_completions

Two samples of one prompt, whose prefill is cut into chunks, in a cache for one and a half of them:
the younger gives its pages back and is computed again. A random model of one layer, since only
length matters here. The control is a learner whose attention sees the last half of the keys: it
differs where a token sees more, and nowhere before. `tests/engine/test_long.py` has shorter ones.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch

from benchmarks.common import Claim, Result
from benchmarks.models import tokenizer
from isobit import Completion, Engine, Model, Sampling
from isobit.model import ModelConfig
from isobit.rl.algorithm.mismatch import differing_places

LENGTHS = (8192, 32768)
PRESETS = ("fp8", "bf16")
BACKENDS = {"native": "bitwise", "reference": "exact"}
PROMPT, SAMPLES, PAGE, CHUNK = 700, 2, 64, 512


@dataclass(frozen=True)
class Compared:
    """Places [tokens] of each completion at which a bit differs from the learner's, with the whole
    context and with half of it; and what the engine has done: sequences preempted, tokens computed
    in chunks of prompts."""

    differing: torch.Tensor
    control: torch.Tensor
    preemptions: int
    prefilled: int


def run(rounds: int) -> Result:
    result = Result("long_completions")
    for backend in BACKENDS:
        for length in LENGTHS:
            for preset in PRESETS:
                _claims(
                    result,
                    f"{backend}, {preset}, {length:,} tokens",
                    compare(backend, preset, length),
                    length,
                )
    return result


def _claims(result: Result, case: str, found: Compared, length: int) -> None:
    late = found.control[:, length // 2 - PROMPT + 1 :]
    result.parts[case] = {
        "completion tokens": float(found.differing.numel()),
        "differing": float(found.differing.sum()),
        "differing from a learner that sees half": float(found.control.sum()),
        "preemptions": float(found.preemptions),
        "tokens computed in chunks": float(found.prefilled),
    }
    result.claims.append(
        Claim(f"{case}: tokens that differ", float(found.differing.sum()), "<=", 0)
    )
    result.claims.append(
        Claim(f"{case}: control, of late tokens differ", float(late.double().mean()), ">=", 0.5)
    )


def compare(backend: str, preset: str, length: int) -> Compared:
    """Completions that end at position `length`, beside the learner's packed forward."""
    model = long_model(backend, preset, length)
    pages = 3 * (length // PAGE) // 2 + 2
    engine = Engine(model, kv_pages=pages, page_size=PAGE, max_batch_tokens=CHUNK)
    prompt = [token % 10 + 3 for token in range(PROMPT)]
    sampling = Sampling(n=SAMPLES, max_new_tokens=length - PROMPT, ignore_eos=True)
    (group,) = engine.generate([prompt], sampling)
    engine.integrity()
    places = _places(model, group)
    with half_of_the_context(model, length // 2):
        control = _places(model, group)
    return Compared(places, control, engine.stats.preemptions, engine.stats.prefill_tokens)


def long_model(backend: str, preset: str, positions: int, layers: int = 1) -> Model:
    """A random Qwen3, 32 wide, with one key head of 16, and weights large enough for attention to
    look somewhere."""
    known = tokenizer()
    config = ModelConfig(
        family="qwen3",
        vocab_size=known.vocab_size,
        hidden_size=32,
        intermediate_size=48,
        num_layers=layers,
        num_heads=2,
        num_kv_heads=1,
        head_dim=16,
        qk_norm=True,
        tie_embeddings=True,
        max_positions=positions,
        eos_ids=known.eos_ids,
    )
    model = Model.init(config, known, preset, backend=backend, consistency=BACKENDS[backend])
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(3)
    model.sync()
    return model


def half_of_the_context(model: Model, keys: int) -> Any:
    """Inside, attention sees the last `keys` keys only."""
    attention: Callable[..., tuple[torch.Tensor, torch.Tensor]] = model.ops.attention
    half = partial(_of_last_keys, attention, keys)
    return mock.patch.object(model.ops, "attention", half)


def _of_last_keys(
    attention: Callable[..., tuple[torch.Tensor, torch.Tensor]], keys: int, *given: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    q, store, layout, scale, *_ = given
    return attention(q, store, layout, scale, keys)


def _places(model: Model, group: list[Completion]) -> torch.Tensor:
    """Where the learner's bits differ, [samples, tokens]."""
    rows = model.logprobs([[*c.prompt_token_ids, *c.token_ids] for c in group])
    return torch.stack(
        [
            differing_places(row[PROMPT - 1 :], torch.tensor(c.logprobs))
            for row, c in zip(rows, group)
        ]
    )
