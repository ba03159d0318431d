"""A job's memory and seconds together, for one flow and one number of GPUs; and where it would fit."""

from dataclasses import dataclass

from isobit.plan.job import Job
from isobit.plan.memory import Memory, memory
from isobit.plan.seconds import Seconds, running, seconds


@dataclass(frozen=True)
class Estimate:
    """What a job takes."""

    job: Job
    memory: Memory
    seconds: Seconds

    @property
    def fits(self) -> bool:
        return self.memory.total <= self.job.device.memory

    @property
    def at_a_time(self) -> float:
        """Sequences that a GPU decodes together, while that many are left."""
        return running(self.job, self.memory)

    @property
    def tokens_per_gpu(self) -> float:
        """Tokens of prompts and completions in a second, on each GPU."""
        return self.job.completions * self.job.lengths.sequence / self.seconds.total / self.job.ranks


def estimate(job: Job) -> Estimate:
    """Memory and seconds of a job."""
    found = memory(job)
    return Estimate(job, found, seconds(job, found))


MOST_RANKS = 1024
"""On how many GPUs a job is tried."""


def fewest_ranks(job: Job) -> int | None:
    """The fewest GPUs, a power of two, on which it fits; None if `MOST_RANKS` are too few."""
    ranks = 1
    while ranks <= MOST_RANKS:
        if memory(job.under(job.precision, ranks)).total <= job.device.memory:
            return ranks
        ranks *= 2
    return None
