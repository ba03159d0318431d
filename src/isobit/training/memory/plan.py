"""The memory plan: what a run holds, what each part of a step takes besides, and which keys would lower the sum.

What is held all the time is counted from tensors. What learning takes is measured on a few tokens, forward and
backward, and grows with tokens in straight lines: from two lengths comes a line for each moment of a pass (`measure`),
since few tokens may take most where a weight is unpacked, and many where activations are. In a mixture of experts the
tokens are shared out, so that each expert has some. The parts of a step follow each other, so the total is what is held
and the largest of them. `benchmarks/memory_plan.py` compares it with the measured peak. Left out: what an allocator
keeps of freed memory, and processes of reward functions.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from isobit.config import Config
from isobit.errors import IsobitError
from isobit.kernels import Layout
from isobit.kernels.sampling.filtering import LOGITS_AT_ONCE, WORKING_BYTES
from isobit.model import Model, ModelConfig
from isobit.model.forward.moe import RouteTape
from isobit.model.forward.recompute import Recompute
from isobit.rl.learner.packing import MOST_KEYS
from isobit.rl.optim import muon
from isobit.rl.optim.eight_bit import quantizable
from isobit.rl.optim.masters import AT_ONCE
from isobit.rl.optim.schedule import OptimizerSettings
from isobit.training.memory.host import memory_limit
from isobit.training.memory.live_bytes import LiveTrace
from isobit.training.parts import Parts
from isobit.training.sampled_ahead import keeps_weights

_MIB = 1024 * 1024
_SHORT = 8  # tokens of the first of the two passes that are measured; more, where experts are many
_LONGER = 3  # times as many in the second
_FEW, _MORE = 4, 12  # rows of logits at a time in these: never all, as in a long pass
_STEP = 128  # tokens; `auto` gives a multiple
_USABLE = 0.9  # of the memory: allocators, libraries and other processes have the rest
PYTHON = "Python and its libraries"
_PROCESS = 512 * _MIB  # that `auto` leaves for Python and PyTorch: a figure that no two starts differ in


@dataclass(frozen=True)
class LinearBytes:
    """Bytes for a number of tokens: fixed + slope · tokens."""

    fixed: float
    slope: float

    def at(self, tokens: int) -> int:
        return int(self.fixed + self.slope * tokens)


@dataclass(frozen=True)
class Phase:
    """Bytes at each moment of a part of a pass; the largest counts. None is below another at any number of tokens."""

    lines: tuple[LinearBytes, ...]

    def at(self, tokens: int) -> int:
        return max(line.at(tokens) for line in self.lines)

    @property
    def slope(self) -> float:
        """Bytes of a token, where there are many."""
        return max(line.slope for line in self.lines)


@dataclass(frozen=True)
class LearningMemory:
    """What one micro-batch takes besides its gradients. `phases`: the forward, the output head, and the layers'
    backward; `head_row`: bytes of a row of logits, of which at most `head_rows` are there at a time."""

    phases: tuple[Phase, ...]
    head_row: float
    head_rows: int

    def at(self, tokens: int) -> int:
        forward, head, layers = (phase.at(tokens) for phase in self.phases)
        rows = min(tokens, self.head_rows) - _FEW
        return max(forward, head + int(self.head_row * rows), layers)


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes by what they are for. `held` all the time; of `parts` one at a time."""

    held: tuple[tuple[str, int], ...]
    parts: tuple[tuple[str, int], ...]

    @property
    def total(self) -> int:
        return sum(size for _, size in self.held) + max(size for _, size in self.parts)

    def table(self) -> str:
        """Plain text, in MiB."""
        largest = max(self.parts, key=lambda part: part[1])[0]
        rows = [*self.held, *self.parts, (f"total, {largest.partition(':')[0]}", self.total)]
        width = max(len(label) for label, _ in rows)
        return "\n".join(f"{label:<{width}} {size / _MIB:10.1f} MiB" for label, size in rows)


def measure(model: Model, recompute: Recompute = False) -> LearningMemory:
    """Forward and backward of a few tokens, with gradients dropped as they come."""
    experts = model.config.routed
    least = _SHORT if experts is None else max(_SHORT, -(-experts.count // experts.per_token))
    short, long = (min(tokens, model.config.max_positions) for tokens in (least, _LONGER * least))
    _pass(model, short, _FEW, recompute)  # what is made at first use, such as rotary tables, is no part of a pass
    first, second = (_pass(model, tokens, _FEW, recompute) for tokens in (short, long))
    phases = tuple(_phase(a, b, short, max(long - short, 1)) for a, b in zip(first, second))
    wide = _pass(model, long, _MORE, recompute)
    row = max(max(wide[1]) - max(second[1]), 0) / (_MORE - _FEW)
    return LearningMemory(phases, row, model.transformer.head_rows)


def measure_parts(parts: Parts, recompute: Recompute | None = None) -> LearningMemory:
    """`measure` of the policy, with scales where its KV cache is calibrated; `recompute`: by default as configured."""
    if parts.calibrator.active:
        parts.calibrator.calibrate([parts.task.train.examples[0].prompt])
    return measure(parts.model, parts.learner.recompute if recompute is None else recompute)


def _phase(first: list[int], second: list[int], tokens: int, span: int) -> Phase:
    """Of the moments of two passes; where one has more of them, as a head over more rows has, of their peaks."""
    if len(first) != len(second):
        first, second = [max(first)], [max(second)]
    lines = {_line(a, b, tokens, span) for a, b in zip(first, second)}
    kept: list[LinearBytes] = []
    for line in sorted(lines, key=lambda line: (line.fixed, line.slope), reverse=True):
        if not kept or line.slope > kept[-1].slope:
            kept.append(line)
    return Phase(tuple(kept))


def _line(first: int, second: int, tokens: int, span: int) -> LinearBytes:
    slope = max(second - first, 0) / span
    return LinearBytes(max(first - slope * tokens, 0), slope)


def _pass(model: Model, tokens: int, chunk: int, recompute: Recompute) -> list[list[int]]:
    """Bytes at the moments of the three phases of one sequence."""
    transformer, device = model.transformer, model.ops.device
    found: list[list[int]] = []
    hooks = [p.register_post_accumulate_grad_hook(_drop) for p in transformer.masters.leaves.values()]
    ids = torch.arange(tokens, dtype=torch.int64) % model.config.vocab_size
    tape = RouteTape(_shared_out(model.config, tokens))

    def take() -> None:
        found.append(meter.moments)
        meter.take()

    try:
        with torch.enable_grad(), LiveTrace() as meter:
            hidden = transformer.hidden(ids, Layout.packed([tokens]), use="learner", tape=tape, recompute=recompute)
            take()
            hidden.register_hook(lambda _: take())
            logprobs = transformer.head_logprobs(hidden, ids.to(device), chunk=chunk)[0]
            logprobs.sum().backward()
            take()
            del hidden, logprobs
        return found
    finally:
        for hook in hooks:
            hook.remove()


def _shared_out(config: ModelConfig, tokens: int) -> torch.Tensor | None:
    """Experts for each token and layer in turn: [T, layers, k]."""
    if config.routed is None:
        return None
    count, slots = config.routed.count, config.routed.per_token
    turns = torch.arange(tokens * slots).view(tokens, 1, slots) % count
    return turns.expand(tokens, config.num_layers, slots)


def _drop(parameter: torch.Tensor) -> None:
    parameter.grad = None


@dataclass(frozen=True)
class Holding:
    """What a run holds, in bytes: counted from tensors (`holding`), or from shapes before there are any
    (`forecast.py`); and what decides how much the parts of a step take besides. `others`: reference, reward models,
    Python; `itemsize`: of the learner's numbers; `host`: on a CPU; `shares`: completions share their prompt's rows."""

    config: Config
    model: ModelConfig
    masters: int
    moments: int
    gradients: int
    rollout: int
    learner: int
    packs: int
    cache: int
    others: tuple[tuple[str, int], ...]
    update: int
    longest: int
    itemsize: int
    host: bool
    shares: bool


class Learning(Protocol):
    """Bytes that a micro-batch of so many tokens takes besides its gradients."""

    def at(self, tokens: int) -> int: ...


def holding(parts: Parts, process: int) -> Holding:
    """Counted from tensors; `process`: bytes of Python and its libraries before any model."""
    model = parts.model
    sizes, host = model.memory(), model.ops.device.type == "cpu"
    others = [("reference, working weights only", parts.reference_bytes)] if parts.reference_bytes else []
    others += [(f"{m.name}, working weights only", m.model.nbytes()) for m in parts.scorer.models]
    return Holding(
        parts.config,
        model.config,
        sizes["masters"],
        parts.optimizer.nbytes,
        parts.optimizer.gradient_bytes,
        sizes["rollout"],
        sizes["learner"],
        model.transformer.packed_bytes(),
        parts.kv_bytes,
        (*others, *((PYTHON, process) for _ in range(host))),
        update_bytes({name: tuple(p.shape) for name, p in model.named_parameters().items()}, parts.config.optimizer),
        longest_sequence(parts),
        model.precision.learner.compute.itemsize,
        host,
        parts.learner.share_prompts,
    )


def plan(parts: Parts, learning: Learning, process: int, tokens: int) -> MemoryPlan:
    """For micro-batches of `tokens` tokens; `process`: bytes of Python and its libraries before any model."""
    return laid_out(holding(parts, process), learning, tokens)


def laid_out(run: Holding, learning: Learning, tokens: int) -> MemoryPlan:
    """For micro-batches of `tokens` tokens."""
    config, longest, gradients = run.config, run.longest, run.gradients
    trained = f"{config.optimizer.masters.upper()} masters"
    held = [
        (trained if config.adapter is None else f"{trained}, of the adapter", run.masters),
        (config.optimizer.what_is_kept, run.moments),
        ("working weights, rollout", run.rollout),
        ("working weights, learner", run.learner),
        ("working weights, packed by the backend", run.packs),
        ("keys and values", run.cache),
        *run.others,
    ]
    if run.host and keeps_weights(config):
        held.append(("working weights that sampled, kept to compare", run.learner or run.rollout))
    batch = config.prompts_per_step * config.sampling.group_size * longest
    rows = min(max(tokens, longest), max(batch, longest))
    taken = learning.at(rows)
    if config.sampling.filtered:
        taken += WORKING_BYTES * min(rows * run.model.vocab_size, LOGITS_AT_ONCE)
    several = tokens < batch or config.algorithm.updates_per_batch > 1
    if run.shares and config.sampling.group_size > 1:  # keys, values and their gradients, for each that sees them
        copies = min((MOST_KEYS - 1) * rows, max(batch - rows, 0))
        taken += 4 * copies * run.model.num_kv_heads * run.model.head_dim * run.itemsize
    label = f"learning: gradients, and saved activations of {max(tokens, longest)} tokens"
    during = [
        (label, gradients + taken if several else max(taken, gradients + learning.at(0))),
        ("updating: gradients, their norm, the moments' values", gradients + run.update),
    ]
    if run.host:  # on a GPU checkpoints are copied to the host
        during.append(("saving: a copy of masters or moments", max(run.masters, run.moments)))
    return MemoryPlan(tuple(held), tuple(during))


def longest_sequence(parts: Parts) -> int:
    """Tokens of the longest prompt and the longest completion."""
    return parts.engine.longest_prompt + parts.config.sampling.max_new_tokens


def update_bytes(shapes: Mapping[str, tuple[int, ...]], settings: OptimizerSettings) -> int:
    """Of parameters of these names and shapes: sums of the gradients' rows in float64, or moments of a part of a
    parameter out of their 8 bits, four in float32; BF16 masters of a part, in float32 and as they are rounded; whole
    matrices that Muon orthogonalizes."""
    each = 0 if settings.masters == "fp32" else 6
    low = [shape for name, shape in shapes.items() if settings.state == "8bit" and quantizable(name, shape)]
    if low:
        return max((32 + each) * min(math.prod(shape), AT_ONCE) for shape in low)
    masters = each * min(sum(map(math.prod, shapes.values())), AT_ONCE)
    whole = muon.working_bytes([math.prod(s) for name, s in shapes.items() if muon.Muon.takes(name, s, settings)])
    return max(masters + whole, sum(8 * shape[0] for shape in shapes.values()))


def advice(parts: Parts, learning: LearningMemory, process: int) -> str:
    """Whether the plan fits, and if not, the keys that lower it, with the total that each would give."""
    limit, where = memory_limit(parts.model.ops.device)
    now = plan(parts, learning, process, parts.micro_batch_tokens).total
    return advised(now, limit, where, lambda: _alternatives(parts, learning, process))


def advised(now: int, limit: int, where: str, alternatives: Callable[[], Sequence[tuple[str, int]]]) -> str:
    """Whether a total fits, and if not, what lowers it: keys with the total that each gives by itself."""
    if now <= limit:
        return f"fits: {gib(now)} of {gib(limit)} ({where})"
    lines = [f"does not fit: {gib(now)} of {gib(limit)} ({where}). Keys that lower it, each by itself:"]
    for key, total in alternatives():
        if total < now:
            lines.append(f"  {key:<42} {gib(total)}{'' if total > limit else ', fits'}")
    return "\n".join(lines)


def _alternatives(parts: Parts, learning: LearningMemory, process: int) -> list[tuple[str, int]]:
    config, model = parts.config, parts.model
    tokens, longest = parts.micro_batch_tokens, longest_sequence(parts)
    now = plan(parts, learning, process, tokens)
    found = [(f"optimizer.micro_batch_tokens={longest}", plan(parts, learning, process, longest).total)]
    levels: tuple[Recompute, ...] = ("mlp", True)
    for level in levels if not config.optimizer.activation_checkpointing else ():
        again = measure_parts(parts, recompute=level)
        key = f"optimizer.activation_checkpointing={str(level).lower()}"
        found.append((key, plan(parts, again, process, tokens).total))
    if config.optimizer.state == "fp32" and config.optimizer.name == "adamw":
        low = [p.numel() for name, p in model.named_parameters().items() if quantizable(name, p.shape)]
        saved = sum(8 * count - 2 * (count + count // 64) for count in low)
        found.append(("optimizer.state=8bit", now.total - saved))
    if config.optimizer.masters == "fp32":
        found.append(("optimizer.masters=bf16", now.total - parts.optimizer.gradient_bytes // 2))
    if config.prompts_per_step > 1:
        cache = parts.engine.kv_bytes * (config.prompts_per_step - 1) // config.prompts_per_step
        found.append(("prompts_per_step=1", now.total - cache))
    return found


def fitting_tokens(parts: Parts) -> int:
    """`optimizer.micro_batch_tokens: auto`: the most, in steps of 128, that fit into 90 % of the memory, up to the
    whole batch; the same for the same config on the same machine. Raises IsobitError if the longest sequence does not
    fit."""
    limit, where = memory_limit(parts.model.ops.device)
    learning, longest = measure_parts(parts), longest_sequence(parts)
    budget = int(_USABLE * limit)
    whole = parts.config.prompts_per_step * parts.sampling.n * longest

    def fits(tokens: int) -> bool:
        return plan(parts, learning, _PROCESS, tokens).total <= budget

    if not fits(longest):
        least = plan(parts, learning, _PROCESS, longest).total
        raise IsobitError(
            f"optimizer.micro_batch_tokens: auto: one sequence of {longest} tokens needs {gib(least)}, more than 90 % "
            f"of {gib(limit)} ({where}); isobit train --dry-run with a number names the keys that lower it"
        )
    return _largest(fits, -(-longest // _STEP), -(-whole // _STEP), longest)


def _largest(fits: Callable[[int], bool], low: int, high: int, least: int) -> int:
    """The largest number of steps that fits, in tokens; `least` if not even the lowest does."""
    if not fits(low * _STEP):
        return least
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle * _STEP) else (low, middle - 1)
    return low * _STEP


def gib(size: float) -> str:
    """Bytes as text."""
    return f"{size / 2**30:.1f} GiB"
