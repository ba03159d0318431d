"""The learner: forward and backward of packed sequences, the optimizer's step, and prefill, by preset."""

import torch

from benchmarks.gpu.common import Bench, consistencies, presets, random_model, release, shapes, that_fits
from benchmarks.roofline import H200
from isobit import Model
from isobit.kernels import KVStore, Layout
from isobit.plan.work import floor, learn, prefill
from isobit.precision import PRESETS as FLOWS
from isobit.rl.optim import Optimizer
from isobit.rl.schedule import OptimizerSettings


def run(bench: Bench) -> None:
    """Tokens a second of learning and of prefill; peak memory of each."""
    lengths = ((3, 1),) if bench.rehearsal else ((2048, 8), (8192, 2))
    for name, config in shapes(bench).items():
        name, config = that_fits(name, config, bench, 20)
        for preset in presets(bench):
            for consistency in consistencies(preset, bench):
                if not bench.has_time(f"{name}, {preset}, {consistency}"):
                    continue
                with bench.attempt(f"{name}, {preset}, {consistency}"):
                    model = random_model(config, preset, bench, consistency)
                    for length, sequences in lengths:
                        _measure(f"{name}, {sequences} x {length} tokens", model, length, sequences, bench)
                    del model
                release()


def _measure(case: str, model: Model, length: int, sequences: int, bench: Bench) -> None:
    transformer, flow, device = model.transformer, FLOWS[model.precision.name], model.ops.device
    contestant = f"{model.precision.name}, {model.ops.consistency}"
    layout = Layout.packed([length] * sequences).to(device)
    tokens = torch.arange(length * sequences, device=device) % model.config.vocab_size
    targets = tokens.roll(-1)
    optimizer = Optimizer(model.named_parameters(), OptimizerSettings())

    def forward_backward() -> None:
        logprobs, _ = transformer.head_logprobs(transformer.hidden(tokens, layout), targets)
        logprobs.mean().backward()

    def update() -> None:
        optimizer.step(1e-6, 0.5)
        model.sync()

    shape, rollout = (layout.num_slots, model.config.num_kv_heads, model.config.head_dim), model.precision.rollout
    stores = [
        KVStore.allocate(*shape, rollout.kv, rollout.compute, None, device) for _ in range(model.config.num_layers)
    ]

    @torch.no_grad()
    def fill() -> None:
        transformer.hidden(tokens, layout, stores, use="rollout")

    if not bench.rehearsal:
        torch.cuda.reset_peak_memory_stats()
    found = bench.time(
        f"{case}, {contestant}",
        {"forward and backward": forward_backward, "update and sync": update, "prefill": fill},
        rounds=3,
    )
    peak = 0 if bench.rehearsal else torch.cuda.max_memory_allocated()
    optimizer.zero_grad()
    count = length * sequences
    least = {
        "forward and backward": floor(
            {k: w for k, w in learn(model.config, flow, count, length).items() if k != "optimizer"}, H200
        ),
        "update and sync": floor({"optimizer": learn(model.config, flow, count, length)["optimizer"]}, H200),
        "prefill": floor(prefill(model.config, flow, sequences, length), H200),
    }
    for what, seconds in found.items():
        rate = {} if what == "update and sync" else {"tokens_per_s": count / seconds}
        bench.row(f"{case}, {what}", contestant, seconds, least[what], peak_bytes=peak, **rate)
