"""Whether a plan fits, what to beware of, and which keys lower its total: each is planned again
with that key set."""

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from isobit.errors import IsobitError
from isobit.kernels.backends.formats import refused
from isobit.model.adapters.targets import beyond_use
from isobit.options.projections import ALL_LINEAR
from isobit.training.plan.cards import gib
from isobit.training.plan.divided import more_together, resolved
from isobit.training.plan.job import Job
from isobit.training.plan.memory import MemoryPlan, least, plan, weights_alone

HEAD_ROOM = 0.1
"""Of the memory: what allocators keep of freed memory, the driver's and collectives' buffers are
not in the plan."""
_MOST_RANKS = 64
_TELLING = 0.99  # of the total: a key that saves less is not named
_ATTENTION = "[q_proj, k_proj, v_proj, o_proj]"


@dataclass(frozen=True)
class Change:
    """Keys of the config, as they are typed, with the total that a plan with them has."""

    keys: tuple[str, ...]
    total: int

    @property
    def typed(self) -> str:
        return " ".join(map(shlex.quote, self.keys))


def verdict(job: Job, memory: MemoryPlan) -> str:
    """Return whether a job's planned memory fits the machine, and how many bytes are free or
    missing."""
    limit = job.machine.memory
    free = limit - memory.total
    of = f"{gib(memory.total)} of {gib(limit)} ({job.machine.name})"
    return (
        f"fits: {of}, {gib(free)} free"
        if free >= 0
        else f"does not fit: {of}, {gib(-free)} too much"
    )


def fits_well(job: Job, memory: MemoryPlan) -> bool:
    """Return whether at least `HEAD_ROOM` of the machine's memory stays free."""
    return memory.total <= (1 - HEAD_ROOM) * job.machine.memory


def changes(job: Job) -> list[Change]:
    """Return the keys that lower the total, each by itself; first those that change least of the
    run."""
    now = plan(job).total
    candidates = []
    for key in _keys(job):
        try:
            total = plan(resolved(job.changed(key))).total
        except IsobitError:  # it goes with nothing else that the config has
            continue
        if total < _TELLING * now:
            candidates.append(Change((key,), total))
    return candidates


def together(job: Job, single: Sequence[Change]) -> Change | None:
    """Return as few of these changes, from the first on, as fit together with a tenth left; else
    all that go together. None where there are fewer than two."""
    keys: dict[str, str] = {}
    best = None
    for change in single:
        (key,) = change.keys
        keys[key.partition("=")[0]] = key
        try:
            planned = plan(resolved(job.changed(*keys.values())))
        except IsobitError:
            del keys[key.partition("=")[0]]
            continue
        if best is None or planned.total < best.total:
            best = Change(tuple(keys.values()), planned.total)
        if fits_well(job, planned):
            break
    return best if best is not None and len(best.keys) > 1 else None


def advice(job: Job, memory: MemoryPlan) -> str:
    """Return the verdict, and where little or nothing is left, the keys that lower the total."""
    lines = [verdict(job, memory)]
    if fits_well(job, memory):
        return lines[0]
    single = changes(job)
    if not single:
        return f"{lines[0]}. No key that is known lowers it"
    lines[0] += ". Keys that lower it, each by itself:"
    both = together(job, single)
    for change in (*single, *([] if both is None else [both])):
        if change is both:
            lines.append("together:")
        lines.append(f"  {change.typed:<46} {gib(change.total)}{_fitting(job, change)}")
    return "\n".join(lines)


def _fitting(job: Job, change: Change) -> str:
    return ", fits" if change.total <= job.machine.memory else ""


def _keys(job: Job) -> Iterator[str]:
    config, optimizer = job.config, job.config.optimizer
    if optimizer.micro_batch_tokens == "auto" or optimizer.micro_batch_tokens > job.longest:
        yield f"optimizer.micro_batch_tokens={job.longest}"
    if (sampled := job.sampled) is not None:
        if sampled.serve.port is not None and sampled.serve.max_sequences > 1:
            yield f"serve.max_sequences={sampled.serve.max_sequences // 2}"
        if sampled.engine.sleep != "always":
            yield "engine.sleep=always"
    if optimizer.activation_checkpointing is False:
        yield "optimizer.activation_checkpointing=mlp"
    if optimizer.activation_checkpointing is not True:
        yield "optimizer.activation_checkpointing=true"
    if sampled is not None and job.precision.rollout.kv is None:
        name = job.precision.name
        yield (
            f"precision={name[:-1]}, kv_cache=e4m3]"
            if name.endswith("]")
            else f"precision={name}[kv_cache=e4m3]"
        )
    if optimizer.state == "fp32" and optimizer.name == "adamw":
        yield "optimizer.state=8bit"
    if optimizer.masters == "fp32":
        yield "optimizer.masters=bf16"
    if not job.machine.host and job.ranks < _MOST_RANKS:
        yield f"ranks={max(fewest_ranks(job) or 0, 2 * job.ranks)}"
    if (together := _fitting_together(job)) is not None:
        yield f"divided={together}"
    if config.adapter is None:
        targets = ALL_LINEAR if job.model.experts is None else _ATTENTION
        yield (
            "adapter.rank=32"
            if targets == ALL_LINEAR
            else f"adapter={{rank: 32, targets: {targets}}}"
        )
    if sampled is not None and job.completion > 1:
        yield f"sampling.max_new_tokens={job.completion // 2}"


def _fitting_together(job: Job) -> int | None:
    """Return how many more ranks should hold each model together: the fewest with which it fits,
    or the most that can; None if no more can."""
    most = None
    for more in more_together(job):
        most = more.divided
        if plan(more).total <= job.machine.memory:
            break
    return most


def fewest_ranks(job: Job) -> int | None:
    """Return the fewest ranks on which a job fits, as `_counts` has them; None if 64 are too
    few."""
    return next((ranks for ranks in _counts(job) if _fits_on(job, ranks)), None)


def _counts(job: Job) -> list[int]:
    """Return the powers of two up to 64, times the ranks that hold a model together by the
    config."""
    fewest = 1 if job.config.divided == "auto" else job.config.divided
    return [fewest << power for power in range(7) if fewest << power <= max(_MOST_RANKS, fewest)]


def _fits_on(job: Job, ranks: int) -> bool:
    return plan(resolved(job.on(ranks))).total <= job.machine.memory


def does_not_fit(job: Job, memory: MemoryPlan) -> str:
    """Return why a job cannot run on its ranks, and on how many ranks it would."""
    fewest = fewest_ranks(job)
    more = f"it fits on {fewest}"
    if fewest is None:
        most = _counts(job)[-1]
        on_many = plan(resolved(job.on(most)))
        label, size = max((*on_many.held, *on_many.parts), key=lambda item: item[1])
        more = f"not on {most} either: {label}: {gib(size)} on each"
    return (
        f"{job.precision.name} on {job.ranks} x {job.machine.name}: {verdict(job, memory)}; {more}"
    )


def cannot_fit(job: Job) -> str | None:
    """Return a line where no micro-batch is small enough."""
    if (needed := least(job)) <= job.machine.memory:
        return None
    larger = (more for more in more_together(job) if least(more) <= job.machine.memory)
    more = next(larger, None)
    right = "" if more is None else f"set divided={more.divided}, which divides the weights, or "
    return (
        f"warning: weights, gradients and moments alone are {gib(needed)}, of "
        f"{gib(job.machine.memory)} ({job.machine.name}): this run will not fit; {right}"
        f"{job.command} --dry-run names the keys that lower it"
    )


def not_loaded(job: Job) -> str | None:
    """Return a line where the weights alone need more memory than there is, so that they cannot be
    read here."""
    if (needed := weights_alone(job)) <= job.machine.memory:
        return None
    return (
        f"the weights, as masters and as they are multiplied, are {gib(needed)}, of "
        f"{gib(job.machine.memory)} ({job.machine.name})"
    )


def warnings(job: Job, memory: MemoryPlan) -> list[str]:
    """Return the warnings of one plan, a line each, with what would be right."""
    config, lines = job.config, list[str]()
    micro_batches = -(
        -job.completions * job.longest // (job.algorithm.updates_per_batch * memory.micro_batch)
    )
    if micro_batches < job.ranks:
        some = f"{micro_batches} micro-batch{'es' * (micro_batches > 1)}"
        lines.append(
            f"{some} in an optimizer step for {job.ranks} ranks: {job.ranks - micro_batches} wait "
            "while the others learn; raise prompts_per_step, or lower optimizer.micro_batch_tokens"
        )
    if job.sampled is not None and job.prompts < job.ranks:
        lines.append(
            f"{job.prompts} prompts in a step for {job.ranks} ranks: a group is "
            f"sampled on one, so {job.ranks - job.prompts} have nothing to roll out; "
            "raise prompts_per_step"
        )
    if not job.machine.host:
        line = refused(job.precision, job.machine.fp8)
        lines += [] if line is None else [line]
    adapter = config.adapter
    line = None if adapter is None else beyond_use(job.model, adapter.rank, adapter.targets)
    return [*lines, *([] if line is None else [line]), *_cache_warnings(job, memory)]


def _cache_warnings(job: Job, memory: MemoryPlan) -> Iterator[str]:
    if job.sampled is None:
        return
    limit, group = job.sampled.sampling.max_new_tokens, job.group
    longest = job.pages_of_a_sequence * job.page_size
    if job.completion < limit:
        yield (
            f"prompts of {job.prompt:,} tokens leave {job.completion:,} of the model's context, "
            f"fewer than sampling.max_new_tokens, {limit:,}"
        )
    if memory.cache_tokens < longest:
        yield (
            f"the KV cache holds {memory.cache_tokens:,} tokens, and the longest sequence has "
            f"{longest:,}: raise engine.kv_pages, or lower sampling.max_new_tokens"
        )
    elif memory.cache_tokens < group * longest:
        yield (
            f"the KV cache holds {memory.cache_tokens / longest:,.1f} of the longest sequences, and "
            f"a group has {group}: they are preempted and computed again; take more ranks, an FP8 "
            "cache, a shorter context or a smaller group"
        )
