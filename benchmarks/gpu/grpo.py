"""Whole GRPO steps: sync, rollout by the engine, advantages of a random reward, one optimizer step;
and whether any bit of the rollout's log-probabilities differs from the learner's.

By preset, and `bitwise` beside `fast`. Peak memory by phase; the largest number of sequences whose
keys and values would fit beside the weights and the optimizer.
"""

import random
import time
from dataclasses import replace

import torch

from benchmarks.gpu.common import (
    PRESETS,
    Bench,
    Case,
    consistencies,
    random_model,
    shapes,
    that_fits,
)
from benchmarks.roofline import grpo_step
from isobit import Engine, Model, Sampling
from isobit.precision import PRESETS as FLOWS
from isobit.rl import OBJECTIVES, ResolvedObjective, for_precision
from isobit.rl.learner.learner import Learner
from isobit.rl.optim.schedule import OptimizerSettings
from isobit.rl.optim.sharded import ShardedOptimizer
from isobit.training.rollouts.sources import sample_of

_LARGE = 120 << 30  # bytes: more than an H100 has, and less than an H200


def run(
    bench: Bench,
    prompts: int | None = None,
    group: int = 8,
    prompt_tokens: int = 512,
    new_tokens: int = 512,
) -> None:
    """One counted step of each preset after one that warms up, for every model that the time
    allows.

    All completions decode at once, so that `bf16` is not measured short of memory: 64 prompts on an
    H200, 32 on an H100, whose 80 GB would not hold the keys and values of 512 completions beside
    the smallest model's activations."""
    if bench.rehearsal:
        prompts, group, prompt_tokens, new_tokens = 1, 2, 3, 2
    elif prompts is None:
        memory = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        prompts = 64 if memory > _LARGE else 32
    for name, config in shapes(bench).items():
        if (
            bench.rehearsal and config.experts is not None
        ):  # the bits' engine has rehearsed a dense layer too
            config = replace(config, num_layers=1, experts=replace(config.experts, dense_layers=()))
        name, config = that_fits(name, config, bench, 20)
        for preset in PRESETS:
            for consistency in consistencies(preset, bench):
                what = f"{name}, {prompts} x {group} completions of {new_tokens}"
                if not bench.wants(f"{what}, {preset}, {consistency}"):
                    continue
                with bench.case(f"{what}, {preset}, {consistency}") as case:
                    model = random_model(config, preset, consistency)
                    _measure(case, what, model, prompts, group, prompt_tokens, new_tokens, bench)
                    del model


def _measure(
    case: Case,
    what: str,
    model: Model,
    prompts: int,
    group: int,
    prompt_tokens: int,
    new_tokens: int,
    bench: Bench,
) -> None:
    choose = random.Random(0)
    tokens = [
        [choose.randrange(model.config.vocab_size) for _ in range(prompt_tokens)]
        for _ in range(prompts)
    ]
    sequences = prompts * group
    sampling = Sampling(group, new_tokens, seed=0, ignore_eos=True)
    pages = min(sequences, 512) * -(-(prompt_tokens + new_tokens + 1) // 16) + 64
    engine = Engine(model, kv_pages=pages, page_size=16, max_batch_tokens=8192, max_sequences=512)
    objective = for_precision(
        ResolvedObjective.of(OBJECTIVES["grpo"], max_new_tokens=new_tokens), model.precision
    )
    optimizer = ShardedOptimizer(model.named_parameters(), OptimizerSettings())
    learner = Learner(
        model, optimizer, objective, micro_batch_tokens=64 if bench.rehearsal else 16384
    )
    times: dict[str, float] = {}
    peaks: dict[str, int] = {}
    metrics: dict[str, float] = {}
    for step in range(1 if bench.rehearsal else 2):  # the first one compiles and captures
        model.sync()
        groups = _phase("rollout", lambda: engine.generate(tokens, sampling), bench, times, peaks)
        samples = [replace(sample_of(c), reward=choose.random()) for found in groups for c in found]
        advantages = [choose.uniform(-1, 1) for _ in samples]
        learned = _phase(
            "learn",
            lambda s=samples, a=advantages, n=step: learner.learn(s, a, n),
            bench,
            times,
            peaks,
        )
        metrics = dict(learned.metrics)
    rates, least = bench.rates, None
    if rates is not None:
        sizes = (prompts, group, prompt_tokens, new_tokens, min(sequences, 512))
        least = sum(grpo_step(model.config, FLOWS[model.precision.name], *sizes, rates).values())
    free = 0 if bench.rehearsal else torch.cuda.mem_get_info()[0] + engine.kv_bytes
    found = {
        "rollout_s": times["rollout"],
        "learn_s": times["learn"],
        "rollout_tokens_per_s": sequences * new_tokens / times["rollout"],
        "peak_bytes": peaks,
        "kv_bytes": engine.kv_bytes,
        "parameter_bytes": 4 * sum(p.numel() for p in model.parameters()),
        "working_bytes": sum(model.transformer.working_bytes()),
        "kv_bytes_per_token": engine.kv_bytes_per_token,
        "largest_batch": int(free // (engine.kv_bytes_per_token * (prompt_tokens + new_tokens))),
        "differing_tokens": metrics.get("mismatch/differing_tokens"),
        "kl_k3": metrics.get("mismatch/kl_k3"),
    }
    case.row(
        f"{model.precision.name}, {model.ops.consistency}", sum(times.values()), least, **found
    )
    case.rows[-1]["case"] = what


def _phase(name: str, call, bench: Bench, times: dict[str, float], peaks: dict[str, int]):  # type: ignore[no-untyped-def]
    """Run, and keep seconds and the peak of allocated memory."""
    if not bench.rehearsal:
        torch.cuda.reset_peak_memory_stats()
    _wait(bench)
    start = time.perf_counter()
    result = call()
    _wait(bench)
    times[name] = time.perf_counter() - start
    peaks[name] = 0 if bench.rehearsal else torch.cuda.max_memory_allocated()
    return result


def _wait(bench: Bench) -> None:
    if not bench.rehearsal:
        torch.cuda.synchronize()
