"""Whole GRPO steps: sync, rollout by the engine, advantages of a random reward, one optimizer step;
and whether any bit of the rollout's log-probabilities differs from the learner's.

By preset, and `bitwise` beside `fast`. Peak memory by phase; the largest number of sequences whose
keys and values would fit beside the weights and the optimizer. That no token differs proves nothing
where nothing was computed: so log-probabilities must be some, and others after the update.
"""

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

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
from isobit import Completion, Engine, Model, Sampling
from isobit.model import ModelConfig
from isobit.precision import PRESETS as FLOWS
from isobit.rl import OBJECTIVES, ResolvedObjective, for_precision
from isobit.rl.learner.learner import Learner
from isobit.rl.optim.schedule import OptimizerSettings
from isobit.rl.optim.sharded import ShardedOptimizer
from isobit.training.rollouts.sources import sample_of

_LARGE = 120 << 30  # bytes: more than an H100 has, and less than an H200


@dataclass(frozen=True)
class Size:
    """Of a step: `prompts` of `prompt_tokens`, each completed `group` times by `new_tokens`."""

    prompts: int
    group: int = 8
    prompt_tokens: int = 512
    new_tokens: int = 512

    def __str__(self) -> str:
        return f"{self.prompts} x {self.group} completions of {self.new_tokens}"


_SMALL = Size(16, 8, 512, 256)
_SMALL_MODEL = "Qwen3-1.7B"
_SMALL_SIDES = (("fp8", "bitwise"), ("bf16", "bitwise"), ("fp8", "fast"))


def run(
    bench: Bench,
    prompts: int | None = None,
    group: int = 8,
    new_tokens: int = 512,
    small: bool = False,
) -> None:
    """One counted step after one that warms up: small ones of one model, for seven of the targets;
    and unless only those are wanted, each preset of every model that the time allows.

    There all completions decode at once, so that `bf16` is not measured short of memory: 64 prompts
    on an H200, 32 on an H100, whose 80 GB would not hold the keys and values of 512 completions
    beside the smallest model's activations."""
    models = shapes(bench)
    if bench.rehearsal:
        size = few = Size(1, 2, 3, 2)
        # the bits' engine has rehearsed a dense layer too
        models = {name: _sparse(config) for name, config in models.items()}
    else:
        memory = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        size = Size(prompts or (64 if memory > _LARGE else 32), group, 512, new_tokens)
        few = _SMALL
    name = next(iter(models)) if bench.rehearsal else _SMALL_MODEL
    for preset, consistency in _SMALL_SIDES:
        if consistency in consistencies(preset, bench):
            _case(name, models[name], preset, consistency, few, bench)
    if small:
        return
    for name, config in reversed(models.items()):
        for preset in reversed(PRESETS):
            for consistency in consistencies(preset, bench):
                _case(name, config, preset, consistency, size, bench)


def _sparse(config: ModelConfig) -> ModelConfig:
    assert config.experts is not None
    return replace(config, num_layers=1, experts=replace(config.experts, dense_layers=()))


def _case(
    name: str, config: ModelConfig, preset: str, consistency: str, size: Size, bench: Bench
) -> None:
    name, config = that_fits(name, config, bench, 20)
    what = f"{name}, {size}"
    if bench.wants(f"{what}, {preset}, {consistency}"):
        with bench.case(f"{what}, {preset}, {consistency}") as case:
            model = random_model(config, preset, consistency)
            _measure(case, what, model, size, bench)
            del model


def _measure(case: Case, what: str, model: Model, size: Size, bench: Bench) -> None:
    choose = random.Random(0)
    tokens = [
        [choose.randrange(model.config.vocab_size) for _ in range(size.prompt_tokens)]
        for _ in range(size.prompts)
    ]
    sequences, length = size.prompts * size.group, size.prompt_tokens + size.new_tokens
    sampling = Sampling(size.group, size.new_tokens, seed=0, ignore_eos=True)
    pages = min(sequences, 512) * -(-(length + 1) // 16) + 64
    engine = Engine(model, kv_pages=pages, page_size=16, max_batch_tokens=8192, max_sequences=512)
    learner = _learner(model, size, bench)
    times: dict[str, float] = {}
    peaks: dict[str, int] = {}
    metrics: dict[str, float] = {}
    groups: list[list[Completion]] = []
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
        sizes = (size.prompts, size.group, size.prompt_tokens, size.new_tokens, min(sequences, 512))
        least = sum(grpo_step(model.config, FLOWS[model.precision.name], *sizes, rates).values())
    free = 0 if bench.rehearsal else torch.cuda.mem_get_info()[0] + engine.kv_bytes
    found = {
        "rollout_s": times["rollout"],
        "learn_s": times["learn"],
        "rollout_tokens_per_s": sequences * size.new_tokens / times["rollout"],
        "peak_bytes": peaks,
        "kv_bytes": engine.kv_bytes,
        "parameter_bytes": 4 * sum(p.numel() for p in model.parameters()),
        "working_bytes": sum(model.transformer.working_bytes()),
        "kv_bytes_per_token": engine.kv_bytes_per_token,
        "largest_batch": int(free // (engine.kv_bytes_per_token * length)),
        "differing_tokens": metrics.get("mismatch/differing_tokens"),
        "kl_k3": metrics.get("mismatch/kl_k3"),
    }
    found["sound"] = _prove(case, model, groups, found["differing_tokens"])
    case.row(
        f"{model.precision.name}, {model.ops.consistency}", sum(times.values()), least, **found
    )
    case.rows[-1]["case"] = what


def _learner(model: Model, size: Size, bench: Bench) -> Learner:
    objective = for_precision(
        ResolvedObjective.of(OBJECTIVES["grpo"], max_new_tokens=size.new_tokens), model.precision
    )
    optimizer = ShardedOptimizer.of(model, OptimizerSettings())
    micro = 64 if bench.rehearsal else 16384
    return Learner(model, optimizer, objective, micro_batch_tokens=micro)


def _prove(
    case: Case, model: Model, groups: Sequence[Sequence[Completion]], differing: object
) -> bool:
    """Rows that hold or do not: no token differs, where that is promised, of log-probabilities that
    a model has computed; the control: under the updated weights the learner's are others. Whether
    these prove anything."""
    recorded = torch.cat([torch.tensor(c.logprobs) for group in groups for c in group])
    sound = bool(torch.isfinite(recorded).all() and (recorded < 0).any() and recorded.std() > 0)
    promised = model.ops.consistency == "bitwise" and model.precision.unified
    holds = sound and (differing == 0 or not promised)
    case.row("log-probabilities", recorded=recorded.numel(), sound=sound, holds=holds)
    model.sync()
    first = groups[0]
    found = model.logprobs([c.prompt_token_ids + c.token_ids for c in first])
    now = torch.cat([f[len(c.prompt_token_ids) - 1 :] for f, c in zip(found, first)])
    before = torch.cat([torch.tensor(c.logprobs) for c in first])
    other = int((now.cpu() != before).sum())
    case.row("control: after the update", differing=other, compared=len(before), holds=other > 0)
    return sound and other > 0


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
