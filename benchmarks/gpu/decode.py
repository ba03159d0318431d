"""Decode steps: tokens a second over batch and context, by preset, and the share of the floor that
they reach.

A step is the whole forward and the sampler, replayed from a CUDA graph as the engine does; keys and
values stand in distinct pages, filled with random numbers or codes, so that nothing is read from
the cache that a rollout would read from memory. Both are about zero: codes of one sign would give
every token the same large vector, and a router the same few experts. A mixture's row says how many
experts a layer touched. No master is kept, since nothing is trained: so 512 sequences
of 1,024 tokens fit an H100 beside Qwen3-8B under `fp8`.
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu.common import (
    GIB,
    Bench,
    fill_cache,
    largest_first,
    presets,
    random_model,
    that_fits,
)
from benchmarks.gpu.timing import Rotation
from benchmarks.work import decode, floor
from isobit import Model
from isobit.kernels import KVStore, Layout
from isobit.model import ModelConfig
from isobit.model.forward.moe import RouteTape
from isobit.precision import PRESETS as FLOWS

_CASES = [
    (b, c)
    for c in (1024, 8192, 32768)
    for b in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
    if b * c <= 512 * 1024
]
_FIRST = [(512, 1024), (64, 8192), (16, 32768), (1, 1024), (64, 1024)]
_PAGE = 16
_BYTES = 2.5  # of a parameter, beside keys and values: BF16, and the master that it is made of


def run(bench: Bench) -> None:
    """Every model, preset and case that the time allows, the telling ones and the largest models
    first."""
    first = [(2, 20)] if bench.rehearsal else _FIRST
    for cases in (
        (first,) if bench.rehearsal else (first[:3], first, [c for c in _CASES if c not in first])
    ):
        for name, config in largest_first(bench).items():
            name, config = that_fits(name, config, bench, _BYTES)
            for preset in presets(bench):
                _measure_model(name, config, preset, cases, bench)


def _measure_model(
    name: str, config: ModelConfig, preset: str, cases: list[tuple[int, int]], bench: Bench
) -> None:
    sizes = {
        f"{name}, batch {batch}, context {context}": (batch, context) for batch, context in cases
    }
    left = {
        case: size
        for case, size in sizes.items()
        if not bench.results.settled(bench.name, f"{case}, {preset}")
    }
    if not left:
        return
    model = bench.built(
        f"{name}, {preset}: the model", partial(random_model, config, preset, trained=False)
    )
    if model is None:
        return
    for what, (batch, context) in left.items():
        needed = batch * (context + _PAGE) * _kv_bytes(model) + 2 * GIB
        if not bench.wants(f"{what}, {preset}", needed):
            continue
        with bench.case(f"{what}, {preset}") as case:
            call = decode_step(model, batch, context)
            touched = call.touched() if config.routed else None
            step = Rotation([call], calls=1)
            for contestant, timing in case.time({preset: step}).items():
                rates = bench.rates
                least = (
                    None
                    if rates is None
                    else floor(decode(config, FLOWS[preset], batch, context), rates)
                )
                rate = batch / timing.seconds
                case.row(contestant, timing, least, tokens_per_s=rate, experts=touched)
                case.rows[-1]["case"] = what
            del call, step


@dataclass(frozen=True)
class DecodeStep:
    """A call computes the next token of `batch` sequences that have `context` keys each, at static
    addresses."""

    model: Model
    tokens: Tensor
    layout: Layout
    stores: list[KVStore]
    keys: Tensor

    @torch.no_grad()
    def __call__(self) -> object:
        hidden = self._hidden()
        head = self.model.transformer.head_weight("rollout")
        return self.model.transformer.ops["rollout"].head_sample(hidden, head, self.keys, 1.0)

    def _hidden(self, tape: RouteTape | None = None) -> Tensor:
        """Return the last hidden states of the sequences; `tape` records the routers' choices."""
        transformer = self.model.transformer
        return transformer.hidden(self.tokens, self.layout, self.stores, "rollout", tape)

    @torch.no_grad()
    def touched(self) -> list[int]:
        """Count the experts that at least one sequence chooses, by layer; the weights of the others
        are not read."""
        tape = RouteTape()
        self._hidden(tape)
        return [len(choices.unique()) for choices in tape.chosen]


def decode_step(model: Model, batch: int, context: int) -> DecodeStep:
    """Build the decode step of `batch` sequences with `context` random keys each."""
    config, transformer = model.config, model.transformer
    ops, flow = transformer.ops["rollout"], model.precision.rollout
    pages = -(-(context + 1) // _PAGE)
    table = torch.arange(batch * pages, dtype=torch.int32).view(batch, pages)
    layout = Layout.build([1] * batch, [context] * batch, table, _PAGE).to(ops.device)
    shape = (batch * pages * _PAGE, config.num_kv_heads, config.head_dim)
    stores = [
        KVStore.allocate(*shape, flow.kv, flow.compute, None, ops.device)
        for _ in range(config.num_layers)
    ]
    for store in stores:
        fill_cache(store)
    tokens = torch.arange(batch, device=ops.device) % config.vocab_size
    keys = torch.arange(4 * batch, device=ops.device).view(batch, 4)
    return DecodeStep(model, tokens, layout, stores, keys)


def _kv_bytes(model: Model) -> float:
    config, kv = model.config, model.precision.rollout.kv
    each = 2 if kv is None else 1 + 4 / config.head_dim
    return config.num_layers * 2 * config.num_kv_heads * config.head_dim * each
