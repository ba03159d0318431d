"""Bytes that a rank of a run takes: what it holds all the time, and what each part of a step takes.

Ranks share masters, the optimizer's state and gradients by blocks of 128 rows (ZeRO-2); the
busiest counts. Working weights are whole on each, or neighbours hold them together. The parts of a
step follow each other, so the total is what is held and the largest of them. Tests hold it to a
tenth of what runs on a CPU take (`tests/plan/test_against_runs.py`, `benchmarks/memory_plan.py`).
Left out: what an allocator keeps of freed memory, the buffers of drivers and collectives, and
processes of reward functions; `advice.py` asks for a tenth of the memory for these.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import count

from isobit.config.sections import AdapterConfig
from isobit.distributed import shards
from isobit.engine.pages import CACHE_BYTES, GPU_FRACTION, cache_pages, pages_needed
from isobit.errors import IsobitError
from isobit.kernels.sampling.filtering import LOGITS_AT_ONCE, WORKING_BYTES
from isobit.model import ModelConfig
from isobit.model.adapters.low_rank import factor_shapes
from isobit.model.adapters.targets import targeted
from isobit.model.forward.head import head_rows
from isobit.model.forward.head_divergence import WORKING_BYTES as DIVERGENCE_BYTES
from isobit.model.hub.shapes import parameter_shapes
from isobit.model.weights.masters import MASTERS
from isobit.precision import Precision
from isobit.rl.learner.packing import MOST_KEYS
from isobit.rl.optim import muon
from isobit.rl.optim.eight_bit import quantizable
from isobit.rl.optim.masters import AT_ONCE
from isobit.rl.optim.schedule import OptimizerSettings
from isobit.rl.optim.sharded import bytes_of_state
from isobit.training.plan.cards import MIB, gib
from isobit.training.plan.job import Job
from isobit.training.plan.learning import Backward
from isobit.training.plan.meta import (
    Described,
    WeightBytes,
    divided_bytes,
    forward_bytes,
    learning_bytes,
    page_bytes,
    weight_bytes,
)

Item = tuple[str, int]
Shapes = Mapping[str, tuple[int, ...]]
PYTHON = "Python and its libraries"
_PYTHON_BYTES = 240 * MIB  # of a process that has imported PyTorch, before any model
_STEP = 128  # tokens; `auto` gives a multiple
USABLE = 0.9
"""Of the memory, for an `auto`: allocators, libraries and other processes have the rest."""


@dataclass(frozen=True)
class MemoryPlan:
    """The memory of the busiest rank, in bytes: all items of `held` all the time, and one item of
    `parts` at a time. `micro_batch`: the tokens of a micro-batch, as `auto` resolves them;
    `cache_tokens`: the tokens whose keys and values the rollout's cache holds."""

    held: tuple[Item, ...]
    parts: tuple[Item, ...]
    micro_batch: int
    cache_tokens: int

    @property
    def total(self) -> int:
        return sum(size for _, size in self.held) + max(size for _, size in self.parts)

    @property
    def largest(self) -> str:
        """The name of the phase with the most bytes: learning, updating or rolling out."""
        return max(self.parts, key=lambda phase: phase[1])[0].partition(":")[0]

    def table(self) -> str:
        """Return the plan as a table in plain text, in MiB."""
        rows = [*self.held, *self.parts, (f"total, {self.largest}", self.total)]
        width = max(len(label) for label, _ in rows)
        return "\n".join(f"{label:<{width}} {size / MIB:10.1f} MiB" for label, size in rows)


def plan(job: Job) -> MemoryPlan:
    """Return the memory plan of the busiest rank, with `optimizer.micro_batch_tokens: auto` as it
    would be resolved; where one sequence does not fit, with micro-batches of one sequence."""
    micro_batch = job.config.optimizer.micro_batch_tokens
    if micro_batch != "auto":
        return _planned(job, micro_batch)
    try:
        return _planned(job, fitting_tokens(job))
    except IsobitError:
        return _planned(job, job.longest)


def fitting_tokens(job: Job) -> int:
    """Return the number of tokens for `optimizer.micro_batch_tokens: auto`: the most, in steps of
    128, that fit into 90 % of the memory, up to the whole batch; the same for the same config on
    the same machine. Raises IsobitError if the longest sequence does not fit."""
    budget = int(USABLE * job.machine.memory)

    def total(steps: int) -> int:
        return _planned(job, steps * _STEP).total

    if (needed := _planned(job, job.longest).total) > budget:
        raise IsobitError(
            f"optimizer.micro_batch_tokens: auto: one sequence of {job.longest} tokens needs "
            f"{gib(needed)}, more than 90 % of {gib(job.machine.memory)} ({job.machine.name}); "
            f"{job.command} --dry-run with a number names the keys that lower it"
        )
    low, high = -(-job.longest // _STEP), -(-job.completions * job.longest // _STEP)
    if total(low) > budget:
        return job.longest
    for turn in count():
        if low == high:
            break
        rest, slope = budget - total(low), (total(high) - total(low)) / (high - low)
        # bytes grow nearly in a straight line, along which few steps lead to the end
        steps = (high - low + 1) // 2 if turn % 3 == 2 or slope <= 0 else int(rest / slope)
        middle = min(max(low + steps, low + 1), high)
        low, high = (middle, high) if total(middle) <= budget else (low, middle - 1)
    return low * _STEP


def least(job: Job) -> int:
    """Return the bytes of weights, the optimizer's state, one set of gradients and its update: what
    a run takes whatever its micro-batches."""
    return sum(size for _, size in _weights(job)) + _updating(job)[1]


def weights_alone(job: Job) -> int:
    """Return the bytes of masters and working weights, which must be read before anything else."""
    return sum(size for label, size in _weights(job) if label != job.config.optimizer.what_is_kept)


def _planned(job: Job, tokens: int) -> MemoryPlan:
    """Return the memory plan for micro-batches of `tokens` tokens."""
    model, weights = _described(job, job.model, job.precision, job.config.adapter), _weights(job)
    gradients = 4 * largest_share(job.model, job.ranks, job.config.adapter)
    page = page_bytes(model, job.page_size, job.divided)
    free = job.machine.memory - sum(size for _, size in weights) - gradients
    pages, evaluated = _caches(job, page, free)
    cache_label = "keys and values" if job.model.linear is None else "keys, values and states"
    caches = [(cache_label, pages * page), (f"{cache_label} of the evaluation", evaluated * page)]
    label, sampling = _rolling_out(job, model)
    held = [*weights]
    if _sleeps(job):
        label, sampling = f"{label}, {cache_label}", sampling + sum(size for _, size in caches)
    else:
        held += caches
    serving = _served(job, page, free - (pages + evaluated) * page)
    held.append((f"{cache_label} of the server", serving * page))
    if job.machine.host:
        held.append((PYTHON, _PYTHON_BYTES))
        if job.sampled is not None and job.sampled.keeps_weights:
            sizes = weight_bytes(model)
            held.append(
                ("working weights that sampled, kept to compare", sizes.learner or sizes.rollout)
            )
    phases = [_learning(job, model, tokens, gradients), _updating(job)]
    if sampling:
        phases.append((label, sampling))
    return MemoryPlan(
        tuple(item for item in held if item[1]), tuple(phases), tokens, pages * job.page_size
    )


def _weights(job: Job) -> list[Item]:
    """Return the items of masters, the optimizer's state and working weights, those of the policy
    and those of frozen models."""
    config, trains = job.config.optimizer, job.config.adapter
    sizes, _ = _held(job, _described(job, job.model, job.precision, trains))
    rows, count = largest_share(job.model, job.ranks, trains), num_parameters(job.model, trains)
    whose = "" if trains is None else ", of the adapter"
    return [
        (f"{config.masters.upper()} masters{whose}", MASTERS[config.masters].itemsize * rows),
        (config.what_is_kept, state_bytes(trained(job.model, trains), config) * rows // count),
        ("working weights, rollout", sizes.rollout),
        ("working weights, learner", sizes.learner),
        ("working weights, packed by the backend", sizes.packs),
        *_frozen(job),
    ]


def _held(job: Job, model: Described, frozen: bool = False) -> tuple[WeightBytes, int]:
    """Return the bytes of a model's working weights on a rank, then those that are whole there while
    the learner has them open."""
    if job.divided > 1:
        return divided_bytes(model, job.divided)
    return weight_bytes(model, frozen), 0


def _updating(job: Job) -> Item:
    rows = largest_share(job.model, job.ranks, job.config.adapter)
    more = update_bytes(trained(job.model, job.config.adapter), job.config.optimizer)
    return "updating: gradients, their norm, the moments' values", 4 * rows + more


def _described(
    job: Job, model: ModelConfig, precision: Precision, adapter: AdapterConfig | None = None
) -> Described:
    arguments = (
        None if adapter is None else replace(adapter, init=None, alpha=1.0)
    )  # which decide no size
    return Described(model, precision, arguments, job.machine.host, job.machine.packs)


def _frozen(job: Job) -> Iterator[Item]:
    """Yield the items of frozen models, which ranks hold as they hold the policy, then of a
    reference that follows it."""
    following, trains = job.config.reference.follows, job.config.adapter
    if following:  # which has masters of its own
        yield "reference, FP32 masters", 4 * largest_share(job.model, job.ranks, trains)
    if following and trains is not None:
        width = job.precision.learner.compute.itemsize
        yield "reference, working factors", width * num_parameters(job.model, trains)
    whole = not job.shares_reference and not (following and trains is not None)
    models = [("reference", job.reference)] if job.reference is not None and whole else []
    named = () if job.sampled is None else job.sampled.rewards.models
    models += [(reward.name, size) for reward, size in zip(named, job.rewards, strict=True)]
    for name, size in models:
        sizes, opened = _held(job, _described(job, *size), frozen=True)
        # a reward model multiplies by rows, and opens nothing
        yield f"{name}, working weights only", sizes.total + opened * (name == "reference")


def _caches(job: Job, page: int, free: int) -> tuple[int, int]:
    """Return the pages of the rollout's cache and those of the evaluation's cache, as their engines
    choose them; `page` and `free` in bytes."""
    engine, totals = job.engine, [0, 0]
    for i, sequences in enumerate((job.completions_of_a_rank, job.evaluated)):
        if sequences:
            limit = _most_cache_bytes(job, free - totals[0] * page)
            pages, most = job.pages_of_a_sequence, engine.max_sequences
            totals[i] = engine.kv_pages or cache_pages(pages, sequences, most, limit, page)
    return totals[0], totals[1]


def _served(job: Job, page: int, free: int) -> int:
    """Return the pages of the cache of the engine that serves the policy of a run; 0 if it does not
    serve. `page` and `free` in bytes."""
    if job.sampled is None or job.sampled.serve.port is None:
        return 0
    serve, positions = job.sampled.serve, job.model.max_positions
    pages, most = pages_needed(1, positions - 1, job.page_size), serve.max_sequences
    return cache_pages(pages, most, most, _most_cache_bytes(job, free), page)


def _most_cache_bytes(job: Job, free: int) -> int:
    return CACHE_BYTES if job.machine.host else max(free, 0) // GPU_FRACTION


def _sleeps(job: Job) -> bool:
    """Return whether the cache is freed while the learner works, as `engine.sleep` says."""
    engine = job.engine
    if job.sampled is None:
        return False
    idle = not job.machine.host and not engine.cuda_graphs
    return engine.sleep == "always" or (engine.sleep == "auto" and idle)


def _learning(job: Job, model: Described, tokens: int, gradients: int) -> Item:
    """Return the item of learning: the gradients, and the memory of a micro-batch."""
    config, algorithm = job.config, job.algorithm
    batch = job.completions * job.longest
    rows = min(max(tokens, job.longest), max(batch, job.longest))
    several = tokens < batch or algorithm.updates_per_batch > 1
    observes = algorithm.observation_coefficient > 0
    how = Backward(
        config.optimizer.activation_checkpointing,
        "sent" if job.ranks > 1 else "added" if several else "kept",
        algorithm.may_use_entropy,
        None if job.sampled is None else job.sampled.sampling.filtering,
        observes or algorithm.loss == "divergence",
    )
    taken, layers = learning_bytes(model, rows, how)
    if job.ranks > 1:  # besides a layer's gradients: the messages to their owners and from others
        layers += 2 * gradient_bucket(job.model, config.adapter)
    taken = max(taken, layers) + _held(job, model)[1]
    if algorithm.loss == "divergence" and job.reference is not None:
        teacher = forward_bytes(_described(job, *job.reference), rows)
        taken = max(taken + _divergence(job, rows), teacher)
    if observes and config.adapter is None:
        taken += 4 * job.model.vocab_size * job.model.hidden_size  # the head's second gradient
    if job.shares_prompts and job.group > 1:  # keys, values and gradients, for each that sees them
        copies = min((MOST_KEYS - 1) * rows, max(batch - rows, 0))
        width = max(job.model.heads_of(layer).width for layer in range(job.model.num_layers))
        taken += 4 * copies * width * job.precision.learner.compute.itemsize
    label = f"learning: gradients, and saved activations of {rows:,} tokens"
    return label, max(gradients, taken) if how.gradients == "kept" else gradients + taken


def _divergence(job: Job, rows: int) -> int:
    """Return the bytes that a teacher's distribution adds to the policy's: logits of both, a few
    rows at a time, and the teacher's hidden rows."""
    assert job.reference is not None
    vocabulary, (model, precision) = job.model.vocab_size, job.reference
    logits = min(rows, head_rows(vocabulary, job.machine.host)) * vocabulary
    width = precision.learner.compute.itemsize * model.hidden_size
    return DIVERGENCE_BYTES * logits + width * rows


def _rolling_out(job: Job, model: Described) -> Item:
    """Return the item of rolling out: the activations of one forward, its logits in float32, twice,
    and the memory that sorts logits where they are filtered. For a supervised run it is the item of
    answering held-out prompts, with 0 bytes where none are answered."""
    count, activity = job.completions_of_a_rank, "rolling out"
    if job.sampled is None:
        count, activity = job.evaluated, "answering held-out prompts"
    tokens = min(job.engine.max_batch_tokens, count * sum(job.sampled_lengths))
    label = f"{activity}: activations of {tokens:,} tokens, logits"
    if not count:
        return label, 0
    logits = min(job.engine.max_sequences, count) * job.model.vocab_size
    filtered = job.sampled is not None and job.sampled.sampling.filtered
    sorting = WORKING_BYTES * min(logits, LOGITS_AT_ONCE) if filtered else 0
    return label, forward_bytes(model, tokens) + 8 * logits + sorting


@lru_cache
def trained(config: ModelConfig, adapter: AdapterConfig | None = None) -> Shapes:
    """Return the names and shapes of all masters: the model's, or an adapter's."""
    if adapter is None:
        return parameter_shapes(config)
    return factor_shapes(targeted(config, adapter.targets), adapter.rank)


@lru_cache
def num_parameters(config: ModelConfig, adapter: AdapterConfig | None = None) -> int:
    """Return the number of parameters of the whole model, or of an adapter."""
    return sum(map(math.prod, trained(config, adapter).values()))


@lru_cache
def largest_share(config: ModelConfig, ranks: int, adapter: AdapterConfig | None = None) -> int:
    """Return the number of parameters whose masters the busiest of the ranks keeps."""
    return shards.largest_share(trained(config, adapter).values(), ranks)


def state_bytes(shapes: Shapes, settings: OptimizerSettings) -> int:
    """Return the bytes of the optimizer's state for parameters of these names and shapes."""
    return sum(bytes_of_state(name, shape, settings) for name, shape in shapes.items())


def update_bytes(shapes: Shapes, settings: OptimizerSettings) -> int:
    """Return the working bytes of an update: sums of the gradients' rows in float64, or 8-bit
    moments of a part of a parameter, unpacked, with four numbers in float32 for each; BF16 masters
    of a part, in float32 and rounded; whole matrices that Muon orthogonalizes."""
    width = 0 if settings.masters == "fp32" else 6
    low = [
        shape
        for name, shape in shapes.items()
        if settings.state == "8bit" and quantizable(name, shape)
    ]
    if low:
        return max((32 + width) * min(math.prod(shape), AT_ONCE) for shape in low)
    masters = width * min(sum(map(math.prod, shapes.values())), AT_ONCE)
    whole = muon.working_bytes(
        [math.prod(s) for name, s in shapes.items() if muon.Muon.takes(name, s, settings)]
    )
    return max(masters + whole, sum(8 * shape[0] for shape in shapes.values()))


@lru_cache
def gradient_bucket(config: ModelConfig, adapter: AdapterConfig | None = None) -> int:
    """Return the bytes of the FP32 gradients of the largest layer, which are exchanged together."""
    layers: Counter[str] = Counter()
    for name, shape in trained(config, adapter).items():
        if name.startswith("layers."):
            layers[name.split(".")[1]] += math.prod(shape)
    return 4 * max(layers.values())
