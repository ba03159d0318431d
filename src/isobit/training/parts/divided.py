"""How many ranks hold a run's models together, each some rows of every weight (`divided`)."""

from collections.abc import Callable

from isobit.config import Config, SftConfig
from isobit.distributed import Ranks
from isobit.model import Model
from isobit.training.plan.divided import together
from isobit.training.plan.job import Job


def holding_together(config: Config | SftConfig, ranks: Ranks, job: Callable[[], Job]) -> int:
    """Return how many neighbours among the ranks hold each model together, as `together` says; the
    same on every rank. Where this process is alone, as in a dry run, that is checked and it has
    them whole."""
    if config.divided == 1 or (config.divided == "auto" and ranks.size == 1):
        return 1
    sizes = ranks.all_gather_json(ranks.run_on_all(lambda: together(job())))
    return 1 if ranks.size == 1 else int(max(sizes))  # of ranks with unlike memories


def held_by(model: Model) -> str:
    """Return the end of a line about how a run computes: empty where each rank has models whole."""
    size = model.transformer.group.size
    return f"; {size} ranks hold each model together" if size > 1 else ""
