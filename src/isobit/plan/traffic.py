"""What ranks send each other, and how long that takes: bytes over the links of a device.

Gradients: in a round every rank computes one micro-batch, and each owner receives its rows from all ranks, 4 P (W - 1)
/ W bytes a rank. With `sum_group` g the ranks of a machine first add up theirs, and only the sums of machines travel
between them: 1 / g of the bytes on the network. The sync gathers every owner's quantized rows on all ranks; there each
piece crosses the network once a machine. Links of a machine and the network work at the same time, piece by piece, so
the slower one counts.
"""

from dataclasses import dataclass

from isobit.plan.job import Job
from isobit.plan.memory import num_parameters, weights


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
    size, ranks = 4.0 * num_parameters(job.model), job.ranks
    inner = min(ranks, job.per_node)
    if job.sum_group == 1:
        return _sent(job, size * (inner - 1) / ranks, size * (ranks - inner) / ranks)
    return _sent(job, size * (inner - 1) / inner, size * (ranks - inner) / (ranks * inner))


def gather(job: Job) -> Sent:
    """The sync: codes, scales and what stays unquantized, of every owner."""
    size, ranks = weights(job.model, job.precision).total, job.ranks
    inner = min(ranks, job.per_node)
    machines = ranks / inner
    outside = size * (machines - 1) / machines / inner
    return _sent(job, size * (ranks - 1) / ranks - outside, outside)


def exposed(seconds: float, backward: float, buckets: int) -> float:
    """Of an exchange that starts bucket by bucket in the backward: what is left after it. The last bucket always is."""
    return max(0.0, seconds * (1 - 1 / buckets) - backward * (1 - 1 / buckets)) + seconds / buckets
