"""What ranks send each other, and how long that takes: bytes over the links of a device.

Gradients: in a round every rank computes one micro-batch, and each owner receives its rows from all ranks, 4 P (W - 1)
/ W bytes a rank. With `optimizer.sum_group` g, groups of g ranks of a machine first add up theirs, and only the sums go
on: 1 / g of the bytes on the network. The sync gathers every owner's quantized rows on all ranks; there each piece
crosses the network once a machine. Links of a machine and the network work at the same time, piece by piece, so the
slower one counts.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from isobit.model import ModelConfig
from isobit.plan.job import Job
from isobit.plan.memory import adapter_bytes, num_parameters, weights
from isobit.plan.work import elements


@dataclass(frozen=True)
class Sent:
    """Bytes that a rank sends to ranks of its machine and to those of others, and the seconds that both take."""

    inside: float
    outside: float
    seconds: float


def _sent(job: Job, inside: float, outside: float) -> Sent:
    return Sent(inside, outside, max(inside / job.device.link, outside / job.device.network))


def exchange(job: Job) -> Sent:
    """The gradients of one round."""
    size, ranks = 4.0 * num_parameters(job.model, job.config.adapter), job.ranks
    inner, group = min(ranks, job.per_node), job.sum_group
    if group == 1:
        return _sent(job, size * (inner - 1) / ranks, size * (ranks - inner) / ranks)
    # first to the ranks of the group, then sums to those of other groups, in the machine and outside
    between = size * (inner - group) / (ranks * group)
    return _sent(job, size * (group - 1) / group + between, size * (ranks - inner) / (ranks * group))


def gather(job: Job) -> Sent:
    """The sync: codes, scales and what stays unquantized, of every owner; with an adapter its factors."""
    size, ranks = synced_bytes(job), job.ranks
    inner = min(ranks, job.per_node)
    machines = ranks / inner
    outside = size * (machines - 1) / machines / inner
    return _sent(job, size * (ranks - 1) / ranks - outside, outside)


def synced_bytes(job: Job) -> float:
    """What a sync makes anew."""
    if job.config.adapter is None:
        return weights(job.model, job.precision).total
    return adapter_bytes(job.model, job.precision, job.config.adapter)


def buckets(config: ModelConfig) -> list[tuple[float, float]]:
    """(share of the gradients' bytes, of the backward's time before it is complete), in the order of the backward: the
    head, the layers from the last, the embedding, as `isobit.distributed.exchange.buckets`. A tied head's gradient is
    complete with the embedding's."""
    outside = config.vocab_size * config.hidden_size
    layer = (num_parameters(config) - outside * (1 if config.tie_embeddings else 2)) / config.num_layers
    active = elements(config, 1)[0]
    head = [] if config.tie_embeddings else [(float(outside), float(outside))]
    layers = [(layer, active / config.num_layers)] * config.num_layers
    found = [*head, *layers, (float(outside), float(outside) if config.tie_embeddings else 0.0)]
    size, work = (sum(parts) for parts in zip(*found))
    return [(each / size, own / work) for each, own in found]


def exposed(seconds: float, backward: float, parts: Sequence[tuple[float, float]]) -> float:
    """Of an exchange of so many seconds, what is left when the backward has ended. A bucket leaves when it is complete
    and the one before it has left; the last one is always left."""
    ready = left = 0.0
    for size, work in parts:
        ready += work * backward
        left = max(left, ready) + size * seconds
    return left - backward
