"""The learner: forward and backward of packed sequences, the optimizer's step, and prefill, by
preset."""

from collections.abc import Callable
from functools import partial

import torch

from benchmarks.gpu.common import (
    Bench,
    Case,
    consistencies,
    presets,
    random_model,
    shapes,
    that_fits,
)
from benchmarks.gpu.timing import Rotation
from benchmarks.work import floor, learn, prefill
from isobit import Model
from isobit.kernels import KVStore, Layout
from isobit.precision import PRESETS as FLOWS
from isobit.rl.optim.schedule import OptimizerSettings
from isobit.rl.optim.sharded import ShardedOptimizer


def run(bench: Bench) -> None:
    """Tokens a second of learning and of prefill; peak memory of each."""
    lengths = ((3, 1),) if bench.rehearsal else ((2048, 8), (8192, 2))
    for name, config in shapes(bench).items():
        name, config = that_fits(name, config, bench, 20)
        for preset in presets(bench):
            for consistency in consistencies(preset, bench):
                who = f"{preset}, {consistency}"
                sizes = {
                    f"{name}, {count} x {length} tokens": (length, count)
                    for length, count in lengths
                }
                left = {
                    c: s
                    for c, s in sizes.items()
                    if not bench.results.settled(bench.name, f"{c}, {who}")
                }
                model = left and bench.built(
                    f"{name}, {who}: the model", partial(random_model, config, preset, consistency)
                )
                if not model:
                    continue
                for what, (length, sequences) in left.items():
                    if bench.wants(f"{what}, {who}"):
                        with bench.case(f"{what}, {who}") as case:
                            _measure(case, what, model, length, sequences, bench)
                del model


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
