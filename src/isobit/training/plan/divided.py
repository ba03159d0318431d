"""How many ranks of a planned job hold each model together (`divided`)."""

from collections.abc import Iterator

from isobit.errors import IsobitError
from isobit.model import ModelConfig
from isobit.model.divided.by_rows import layout_of
from isobit.precision import Precision
from isobit.training.plan.job import Job
from isobit.training.plan.memory import USABLE, plan


def resolved(job: Job) -> Job:
    """Return the job with `divided` as a run resolves it. Raises IsobitError as `together`."""
    return job.together(together(job))


def more_together(job: Job) -> Iterator[Job]:
    """Yield the job with more of its ranks that hold each model together, as far as they can; the
    fewest first."""
    for size in _divisors(job):
        if size > job.divided and _problem(job, size) is None:
            yield job.together(size)


def together(job: Job) -> int:
    """Return how many of a job's ranks hold each model together: the config's number, or with
    `auto` the fewest with which the job fits into 90 % of the memory, or those with which it takes
    the least. Raises IsobitError for a number that does not divide the ranks, or that cannot hold
    the models."""
    size, count = job.config.divided, job.ranks
    divisors = _divisors(job)
    if size != "auto":
        if size not in divisors:
            *some, last = map(str, divisors)
            right = f"choose {', '.join(some)} or {last}" if some else f"give ranks={size}, or 1"
            raise IsobitError(
                f"divided: {size} is no divisor of {count} rank{'s' * (count > 1)}: {right}"
            )
        _check(job, size)
        return size
    budget, whole = USABLE * job.machine.memory, job.together(1)
    if job.machine.host:
        return 1
    totals = dict[int, int]()
    for one in (whole, *more_together(whole)):
        totals[one.divided] = plan(one).total
        if totals[one.divided] <= budget:
            return one.divided
    return min(totals, key=lambda size: totals[size])


def _divisors(job: Job) -> list[int]:
    return [number for number in range(1, job.ranks + 1) if job.ranks % number == 0]


def _problem(job: Job, size: int) -> IsobitError | None:
    try:
        _check(job, size)
    except IsobitError as error:
        return error
    return None


def _check(job: Job, size: int) -> None:
    """Raise IsobitError where `size` ranks cannot hold the models of a job together."""
    if size == 1:
        return
    if job.sampled is not None and job.sampled.fleet.engines:
        raise IsobitError(
            "divided: engines of a fleet hold the whole model each; set divided: 1, or "
            "fleet.engines: 0"
        )
    for whose, config, precision in _models(job):
        try:
            layout_of(config, size).check(precision)
        except IsobitError as error:
            raise IsobitError(f"divided: {whose}{error}") from None


def _models(job: Job) -> Iterator[tuple[str, ModelConfig, Precision]]:
    """Yield the models of a job, each with what a message calls it."""
    yield "", job.model, job.precision
    if job.reference is not None and not job.shares_reference:
        yield "the reference: ", *job.reference
    named = () if job.sampled is None else job.sampled.rewards.models
    for reward, model in zip(named, job.rewards, strict=True):
        yield f"reward model {reward.name}: ", *model
