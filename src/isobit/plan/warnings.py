"""What a plan warns of: a line each, with what would be right."""

from isobit.model.adapters.targets import beyond_use
from isobit.plan.devices import GIB
from isobit.plan.estimate import MOST_RANKS, Estimate, fewest_ranks
from isobit.plan.memory import gradient_bucket, memory, micro_batch_tokens
from isobit.precision import E2M1

HEAD_ROOM = 0.1
"""Of the memory: what allocators keep of freed memory, the driver's and collectives' buffers are not in the plan."""

SHOWN = 0.1
"""Of learning: what of an exchange may be left."""


SMALL_MESSAGE = 2**20
"""Bytes: a network's rate falls below it."""


def does_not_fit(found: Estimate) -> str:
    """Why a job cannot run, and on how many GPUs it would."""
    job = found.job
    fewest = fewest_ranks(job)
    more = f"it fits on {fewest}"
    if fewest is None:
        on_many = memory(job.under(job.precision, MOST_RANKS))
        label, size = max((*on_many.held, *on_many.parts), key=lambda item: item[1])
        more = f"no number of GPUs is enough: {label}: {gib(size)} on each"
    return (
        f"{job.precision.name} on {job.ranks} x {job.device.name}: {gib(found.memory.total)} a GPU, of "
        f"{gib(job.device.memory)}: does not fit; {more}"
    )


def warnings(found: Estimate) -> list[str]:
    """Of one job, whether it fits or not."""
    job, config = found.job, found.job.config
    free = job.device.memory - found.memory.total
    lines = []
    if free < 0:
        lines.append(does_not_fit(found))
    elif free < HEAD_ROOM * job.device.memory:
        lines.append(
            f"{gib(free)} of {gib(job.device.memory)} are free, less than {HEAD_ROOM:.0%}: an allocator keeps some of "
            f"what is freed; lower optimizer.micro_batch_tokens, {micro_batch_tokens(job):,.0f} now, or engine.kv_pages"
        )
    if job.micro_batches < job.ranks:
        batches = f"{job.micro_batches} micro-batch{'es' * (job.micro_batches > 1)}"
        lines.append(
            f"{batches} in an optimizer step for {job.ranks} GPUs: {job.ranks - job.micro_batches} wait while the "
            "others learn; raise prompts_per_step, or lower optimizer.micro_batch_tokens"
        )
    if config.prompts_per_step < job.ranks:
        lines.append(
            f"{config.prompts_per_step} prompts in a step for {job.ranks} GPUs: a group is sampled on one, so "
            f"{job.ranks - config.prompts_per_step} have nothing to roll out; raise prompts_per_step"
        )
    piece = gradient_bucket(job.model, config.adapter) / job.ranks
    if job.ranks > job.per_node and piece < SMALL_MESSAGE:
        lines.append(
            f"a layer's gradient goes to its {job.ranks} owners in messages of {piece / 1024:,.0f} KiB, too small for "
            "the full speed of a network, which the seconds count on"
        )
    left, learning = found.seconds.exposed, found.seconds.learn
    if job.ranks > job.per_node and job.sum_group == 1 and left > SHOWN * learning:
        lines.append(
            f"{left:.1f} s of the gradients' exchange are not hidden behind {learning:.1f} s of learning: sum them in "
            f"a machine first (optimizer.sum_group={job.per_node})"
        )
    return lines + _cache_warnings(found) + _low_warnings(found) + _adapter_warnings(found)


def _adapter_warnings(found: Estimate) -> list[str]:
    given = found.job.config.adapter
    line = None if given is None else beyond_use(found.job.model, given.rank, given.targets)
    return [] if line is None else [line]


def _low_warnings(found: Estimate) -> list[str]:
    flows = (found.job.precision.rollout, found.job.precision.learner)
    low = [flow for flow in flows if flow.weight is not None and flow.weight.format is E2M1]
    if any(flow.activation is not None for flow in low):
        return [
            "no kernel for a GPU multiplies FP4 activations yet: leave them in BF16 (precision=nvfp4[activation=bf16])"
        ]
    if low:
        return ["FP4 weights are multiplied in float32 on a GPU, without matrix units: the seconds count those of BF16"]
    return []


def _cache_warnings(found: Estimate) -> list[str]:
    job, taken = found.job, found.memory
    limit, group = job.config.sampling.max_new_tokens, job.config.sampling.group_size
    lines = []
    if job.lengths.longest < limit:
        lines.append(
            f"prompts of {job.lengths.prompt:,} tokens leave {job.lengths.longest:,} of the model's context, fewer "
            f"than sampling.max_new_tokens, {limit:,}"
        )
    if taken.cache_tokens < taken.longest:
        lines.append(
            f"the KV cache holds {taken.cache_tokens:,.0f} tokens, and the longest sequence has {taken.longest:,}: "
            "raise engine.kv_pages, or lower sampling.max_new_tokens"
        )
    elif taken.cache_tokens < group * taken.longest:
        lines.append(
            f"the KV cache holds {taken.cache_tokens / taken.longest:,.1f} of the longest sequences, and a group has "
            f"{group}: they are preempted and computed again; take more GPUs, an FP8 cache, a shorter context "
            "or a smaller group"
        )
    return lines


def gib(size: float) -> str:
    """As text."""
    return f"{size / GIB:.1f} GiB"
