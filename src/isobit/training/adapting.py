"""The model that a run trains: all of it, or an adapter beside it."""

from pathlib import Path

from isobit.config import Config, SftConfig
from isobit.distributed import ALONE, Ranks
from isobit.errors import IsobitError
from isobit.model import Model
from isobit.model.adapters.targets import NewAdapter, beyond_use, targeted
from isobit.model.described import Described


def load_trained(config: Config | SftConfig, base: Path, checkpoint: Path | None = None, ranks: Ranks = ALONE) -> Model:
    """The model at `base`, or the state of a `checkpoint`, which holds the adapter alone where there is one. Raises
    IsobitError where an adapter is not what the config says."""
    flow = config.precision, config.backend, config.consistency, ranks
    given, masters = config.adapter, config.optimizer.masters
    if given is None:
        model = Model.load(checkpoint or base, *flow, masters=masters)
        if model.transformer.adapter is not None:
            raise IsobitError(f"model.path: {base} is an adapter; give its model, and the adapter as adapter.init")
        return model
    new = NewAdapter(given.rank, given.alpha, given.targets, config.seed)
    model = Model.load(base, *flow, adapter=checkpoint or given.init or new, masters=masters)
    found, wanted = model.transformer.adapter, targeted(model.config, given.targets)
    assert found is not None
    if (found.rank, found.alpha, found.projections) != (given.rank, given.alpha, wanted):
        raise IsobitError(f"adapter.init: {given.init} is an {found}; set rank, alpha and targets to these")
    return model


def rank_warning(config: Config | SftConfig, model: Model | Described) -> str | None:
    """A warning where an adapter's rank is above what its matrices can use, or None."""
    given = config.adapter
    line = None if given is None else beyond_use(model.config, given.rank, given.targets)
    return None if line is None else f"warning: {line}"
