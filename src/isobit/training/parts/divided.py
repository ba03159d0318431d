"""How many ranks hold a run's models together, each some rows of every weight (`divided`)."""

from collections.abc import Callable, Iterator

from isobit.config import Config, SftConfig
from isobit.distributed import Ranks
from isobit.errors import IsobitError
from isobit.model import Model, ModelConfig
from isobit.model.divided.by_rows import layout_of
from isobit.precision import Precision
from isobit.training.plan.job import Job
from isobit.training.plan.memory import plan


def holding_together(config: Config | SftConfig, ranks: Ranks, job: Callable[[], Job]) -> int:
    """Return how many neighbours among the ranks hold each model together, as `together` says; the
    same on every rank. Where this process is alone, as in a dry run, that is checked and it has
    them whole."""
    if config.divided == 1 or (config.divided == "auto" and ranks.size == 1):
        return 1
    sizes = ranks.all_gather_json(ranks.run_on_all(lambda: together(job())))
    return 1 if ranks.size == 1 else int(max(sizes))  # of ranks with unlike memories


def together(job: Job) -> int:
    """Return how many of a job's ranks hold each model together: the config's number, or with
    `auto` the fewest with which the job fits. Raises IsobitError for a number that does not divide
    the ranks, and for models that so many cannot hold."""
    size, count = job.config.divided, job.ranks
    divisors = [number for number in range(1, count + 1) if count % number == 0]
    if size != "auto":
        if size not in divisors:
            *some, last = map(str, divisors)
            right = f"choose {', '.join(some)} or {last}" if some else f"give ranks={size}, or 1"
            raise IsobitError(
                f"divided: {size} is no divisor of {count} rank{'s' * (count > 1)}: {right}"
            )
        _check(job, size)
        return size
    size = 1
    for candidate in divisors if not job.machine.host else ():
        try:
            _check(job, candidate)
        except IsobitError:  # fewer may hold it
            continue
        size = candidate
        if plan(job.together(size)).total <= job.machine.memory:
            break
    return size


def held_by(model: Model) -> str:
    """Return the end of a line about how a run computes: empty where each rank has models whole."""
    size = model.transformer.group.size
    return f"; {size} ranks hold each model together" if size > 1 else ""


def _check(job: Job, size: int) -> None:
    """Raise IsobitError where so many ranks cannot hold the models of a job together."""
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
