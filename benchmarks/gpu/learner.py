"""The learner: forward and backward of packed sequences, the optimizer's step, and prefill, by
preset."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch

from benchmarks.gpu.common import (
    Bench,
    Case,
    consistencies,
    largest_first,
    presets,
    random_model,
    that_fits,
)
from benchmarks.gpu.timing import Rotation
from benchmarks.work import floor, learn, prefill
from isobit import Model
from isobit.kernels import KVStore, Layout
from isobit.model import ModelConfig
from isobit.precision import PRESETS as FLOWS
from isobit.rl.optim.schedule import OptimizerSettings
from isobit.rl.optim.sharded import ShardedOptimizer

_FEW = 4
"""Layers of the second depth of a model."""


def run(bench: Bench) -> None:
    """Tokens a second of learning and of prefill; peak memory of each.

    The largest models and the sides of the target come first. Of a model whose layers do not all
    fit, few layers too: from two depths follows what the head takes, which weighs more in a model
    of few layers, and so the time of the whole.
    """
    lengths = ((3, 1),) if bench.rehearsal else ((2048, 8), (8192, 2))
    models: dict[str, ModelConfig] = {}
    for name, config in largest_first(bench).items():
        whole, fitting = that_fits(name, config, bench, 20)
        models[whole] = fitting
        if fitting.num_layers < config.num_layers:
            few = f"{name}, {_FEW} of its {config.num_layers} layers"
            models[few] = replace(fitting, num_layers=_FEW)
    sides = [
        (preset, consistency)
        for preset in presets(bench)
        for consistency in consistencies(preset, bench)
    ]
    first = [side for side in sides if side in (("fp8", "bitwise"), ("bf16", "bitwise"))]
    for flows in (first, [side for side in sides if side not in first]):
        for name, config in models.items():
            for preset, consistency in flows:
                _model(name, config, preset, consistency, lengths, bench)


def _model(
    name: str,
    config: ModelConfig,
    preset: str,
    consistency: str,
    lengths: Sequence[tuple[int, int]],
    bench: Bench,
) -> None:
    """Measure a model under a preset at each (length, number of sequences) that is left."""
    side = f"{preset}, {consistency}"
    sizes = {f"{name}, {count} x {length} tokens": (length, count) for length, count in lengths}
    left = {
        case: size
        for case, size in sizes.items()
        if not bench.results.settled(bench.name, f"{case}, {side}")
    }
    model = left and bench.built(
        f"{name}, {side}: the model", partial(random_model, config, preset, consistency)
    )
    if not model:
        return
    for what, (length, sequences) in left.items():
        if bench.wants(f"{what}, {side}"):
            with bench.case(f"{what}, {side}") as case:
                _measure(case, what, model, length, sequences, bench)


def _measure(
    case: Case, what: str, model: Model, length: int, sequences: int, bench: Bench
) -> None:
    transformer, flow, device = model.transformer, FLOWS[model.precision.name], model.ops.device
    layout = Layout.packed([length] * sequences).to(device)
    tokens = torch.arange(length * sequences, device=device) % model.config.vocab_size
    optimizer = ShardedOptimizer.of(model, OptimizerSettings())

    def update() -> None:
        optimizer.step(1e-6, 0.5)
        model.sync()

    shape = (layout.num_slots, model.config.num_kv_heads, model.config.head_dim)
    rollout = model.precision.rollout
    stores = [
        KVStore.allocate(*shape, rollout.kv, rollout.compute, None, device)
        for _ in range(model.config.num_layers)
    ]

    @torch.no_grad()
    def fill() -> torch.Tensor:
        return transformer.hidden(tokens, layout, stores, use="rollout")

    count, rates = length * sequences, bench.rates
    least: dict[str, float] = {}
    if rates is not None:
        work = learn(model.config, flow, count, length)
        least = {
            "forward and backward": floor(
                {kind: w for kind, w in work.items() if kind != "optimizer"}, rates
            ),
            "update and sync": floor({"optimizer": work["optimizer"]}, rates),
            "prefill": floor(prefill(model.config, flow, sequences, length), rates),
        }
    for part, call in (
        ("forward and backward", forward_backward(model, layout)),
        ("update and sync", update),
        ("prefill", fill),
    ):
        if not bench.rehearsal:
            torch.cuda.reset_peak_memory_stats()
        for timing in case.time({part: Rotation([call], eager=True, calls=1)}, samples=3).values():
            more: dict[str, object] = (
                {} if part == "update and sync" else {"tokens_per_s": count / timing.seconds}
            )
            peak = 0 if bench.rehearsal else torch.cuda.max_memory_allocated()
            case.row(
                f"{model.precision.name}, {model.ops.consistency}",
                timing,
                least.get(part),
                peak_bytes=peak,
                **more,
            )
            case.rows[-1]["case"] = f"{what}, {part}"
    optimizer.zero_grad()


def forward_backward(model: Model, layout: Layout) -> Callable[[], torch.Tensor]:
    """A call runs the learner's forward over packed sequences, and the backward of their mean
    log-probability; returns the log-probabilities."""
    transformer, device = model.transformer, model.ops.device
    there = layout.to(device)
    tokens = torch.arange(layout.num_rows, device=device) % model.config.vocab_size
    targets = tokens.roll(-1)

    def call() -> torch.Tensor:
        logprobs, _ = transformer.head_logprobs(transformer.hidden(tokens, there), targets)
        logprobs.mean().backward()
        return logprobs.detach()

    return call
