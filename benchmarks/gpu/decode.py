"""Decode steps: tokens a second over batch and context, by preset, and the share of the floor that
they reach.

A step is the whole forward and the sampler, replayed from a CUDA graph as the engine does; keys and
values stand in distinct pages, filled with random codes, so that nothing is read from the cache
that a rollout would read from memory. No master is kept, since nothing is trained: so 512 sequences
of 1,024 tokens fit an H100 beside Qwen3-8B under `fp8`.
"""

from collections.abc import Callable
from functools import partial

import torch

from benchmarks.gpu.common import GIB, Bench, presets, random_model, shapes, that_fits
from benchmarks.gpu.timing import Rotation
from benchmarks.work import decode, floor
from isobit import Model
from isobit.kernels import KVStore, Layout
from isobit.model import ModelConfig
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
    """Every model, preset and case that the time allows, the telling ones first."""
    first = [(2, 20)] if bench.rehearsal else _FIRST
    for cases in (
        (first,) if bench.rehearsal else (first[:3], first, [c for c in _CASES if c not in first])
    ):
        for name, config in shapes(bench).items():
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
            step = Rotation([decode_step(model, batch, context)], calls=1)
            for contestant, timing in case.time({preset: step}).items():
                rates = bench.rates
                least = (
                    None
                    if rates is None
                    else floor(decode(config, FLOWS[preset], batch, context), rates)
                )
                case.row(contestant, timing, least, tokens_per_s=batch / timing.seconds)
                case.rows[-1]["case"] = what
            del step


def decode_step(model: Model, batch: int, context: int) -> Callable[[], object]:
    """A call computes the next token of `batch` sequences that have `context` keys each, at static
    addresses."""
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
        for data in (store.k, store.v):
            data.normal_() if data.is_floating_point() else data.random_(0, 0x70)
    tokens = torch.arange(batch, device=ops.device) % config.vocab_size
    keys = torch.arange(4 * batch, device=ops.device).view(batch, 4)
    head = transformer.head_weight("rollout")

    @torch.no_grad()
    def step() -> object:
        hidden = transformer.hidden(tokens, layout, stores, use="rollout")
        return ops.head_sample(hidden, head, keys, 1.0)

    return step


def _kv_bytes(model: Model) -> float:
    config, kv = model.config, model.precision.rollout.kv
    each = 2 if kv is None else 1 + 4 / config.head_dim
    return config.num_layers * 2 * config.num_kv_heads * config.head_dim * each
