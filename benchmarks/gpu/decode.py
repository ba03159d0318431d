"""Decode steps: tokens a second over batch and context, by preset, and the share of the floor that they reach.

A step is the whole forward and the sampler, replayed from a CUDA graph as the engine does; keys and values stand in
distinct pages, filled with random codes, so that nothing is read from the cache that a rollout would read from memory.
"""

from collections.abc import Callable

import torch

from benchmarks.gpu.common import GIB, Bench, presets, random_model, release, shapes, that_fits
from benchmarks.roofline import H200
from isobit import Model
from isobit.kernels import KVStore, Layout
from isobit.plan.work import decode, floor
from isobit.precision import PRESETS as FLOWS

_CASES = [(b, c) for c in (1024, 8192, 32768) for b in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512) if b * c <= 512 * 1024]
_FIRST = [(512, 1024), (64, 8192), (16, 32768), (1, 1024), (64, 1024)]
_PAGE = 16


def run(bench: Bench) -> None:
    """Every model, preset and case that the budget allows, the telling ones first."""
    cases = [(2, 20)] if bench.rehearsal else _FIRST + [case for case in _CASES if case not in _FIRST]
    for index, (name, config) in enumerate(shapes(bench).items()):
        name, config = that_fits(name, config, bench, 6)
        for preset in presets(bench):
            if not bench.has_time(f"{name}, {preset}"):
                continue
            model = random_model(config, preset, bench)
            for batch, context in cases if index == 0 else cases[:3]:
                _measure(f"{name}, batch {batch}, context {context}", model, batch, context, bench)
            del model
            release()


def _measure(case: str, model: Model, batch: int, context: int, bench: Bench) -> None:
    preset = model.precision.name
    needed = batch * (context + _PAGE) * _kv_bytes(model) + 2 * GIB
    if not bench.has_time(f"{case}, {preset}") or not bench.fits(f"{case}, {preset}", needed):
        return
    step: Callable[[], object] | None = None
    with bench.attempt(f"{case}, {preset}"):
        step = graphed(decode_step(model, batch, context, bench), bench)
    if step is None:
        return
    for contestant, seconds in bench.time(case, {preset: step}, rounds=8).items():
        least = floor(decode(model.config, FLOWS[preset], batch, context), H200)
        bench.row(case, contestant, seconds, least, tokens_per_s=batch / seconds)
    del step
    release()


def decode_step(model: Model, batch: int, context: int, bench: Bench) -> Callable[[], object]:
    """A call computes the next token of `batch` sequences that have `context` keys each, at static addresses."""
    config, transformer = model.config, model.transformer
    ops, flow = transformer.ops["rollout"], model.precision.rollout
    pages = -(-(context + 1) // _PAGE)
    table = torch.arange(batch * pages, dtype=torch.int32).view(batch, pages)
    layout = Layout.build([1] * batch, [context] * batch, table, _PAGE).to(ops.device)
    shape = (batch * pages * _PAGE, config.num_kv_heads, config.head_dim)
    stores = [KVStore.allocate(*shape, flow.kv, flow.compute, None, ops.device) for _ in range(config.num_layers)]
    for store in stores:
        for data in (store.k, store.v):
            data.random_(0, 0x70) if data.dtype == torch.uint8 else data.normal_()
    tokens = torch.arange(batch, device=ops.device) % config.vocab_size
    keys = torch.arange(4 * batch, device=ops.device).view(batch, 4)
    head = transformer.head_weight("rollout")

    @torch.no_grad()
    def step() -> object:
        hidden = transformer.hidden(tokens, layout, stores, use="rollout")
        return ops.head_sample(hidden, head, keys, 1.0)

    return step


def graphed(call: Callable[[], object], bench: Bench) -> Callable[[], object]:
    """The call as a CUDA graph's replay; itself in a rehearsal."""
    if bench.rehearsal:
        return call
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def _kv_bytes(model: Model) -> float:
    config, kv = model.config, model.precision.rollout.kv
    each = 2 if kv is None else 1 + 4 / config.head_dim
    return config.num_layers * 2 * config.num_kv_heads * config.head_dim * each
