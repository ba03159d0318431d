"""Tokens a second of 16 requests by 16 adapters, one each, beside the same requests by the base
alone, in one process.

`fp8`, rank 8 on every matrix, 16 rows a step. Beside them half of the requests by adapters and half
by the base, and without a claim all requests by one adapter. Quickstart-like size (hidden 256, 4
layers), and hidden 768 with 8 layers.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.common import Claim, Result, race
from benchmarks.models import save_model
from isobit.engine.engine import Engine
from isobit.engine.types import Sampling
from isobit.model import Model
from isobit.model.adapters.targets import NewAdapter, new_adapter

ROWS, PROMPT, RANK = 16, 24, 8
_PROMPTS = [[3 + (7 * row + place) % 40 for place in range(PROMPT)] for row in range(ROWS)]
_SIZES = {(256, 4): 64, (768, 8): 16}
"""Tokens of an answer, by hidden size and layers."""
_AIM = 0.7


def run(rounds: int) -> Result:
    result = Result("adapters")
    for (hidden, layers), tokens in _SIZES.items():
        case = f"hidden {hidden}, {layers} layers"
        with tempfile.TemporaryDirectory() as name:
            path = save_model(Path(name) / "model", hidden, layers, 4096, 512)
            base = Model.load(path, "fp8", adapter=NewAdapter(1, 1.0, ()))
            contestants = _contestants(base, tokens)
            amount = float(ROWS * tokens)
            result.rows += race(case, contestants, rounds, amount=amount, unit="tokens")
        for kind in ("16 adapters", "8 adapters and the base"):
            ratio = result.median("base", case) / result.median(kind, case)
            what = f"tokens a second, {kind} over the base, {case}"
            result.claims.append(Claim(what, ratio, ">=", _AIM))
    return result


def _contestants(base: Model, tokens: int) -> dict[str, Callable[[], object]]:
    """Engines over one base, which sample the same prompts by other adapters."""
    serving, names = base.serving({}), [f"a{number}" for number in range(ROWS)]
    random = torch.Generator().manual_seed(0)
    for number, name in enumerate(names):
        made = new_adapter(base.config, NewAdapter(RANK, 16.0, seed=number))
        for factors in made.tensors.values():
            factors.copy_(0.05 * torch.randn(factors.shape, generator=random))
        serving.transformer.add_adapter(name, made)
    sampling = Sampling(max_new_tokens=tokens, seed=1, ignore_eos=True)
    alone, together = (
        Engine(model, kv_pages=2000, max_sequences=ROWS) for model in (base, serving)
    )

    def sampled(given: list[str | None]) -> Callable[[], object]:
        return lambda: together.generate(_PROMPTS, sampling, [0] * ROWS, adapters=given)

    half = ROWS // 2
    return {
        "base": lambda: alone.generate(_PROMPTS, sampling, [0] * ROWS),
        "16 adapters": sampled(list(names)),
        "one adapter": sampled([names[0]] * ROWS),
        "8 adapters and the base": sampled([*names[:half], *[None] * half]),
    }
