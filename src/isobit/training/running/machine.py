"""What computes a run, as its machine.json says."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from isobit.distributed import ALONE, Ranks
from isobit.kernels import computed_by
from isobit.model import Model
from isobit.options.consistency import default_order
from isobit.rl import Objective
from isobit.rl.algorithm.functions import digests
from isobit.run.surroundings import number_in
from isobit.training.plan.host import cores


def machine_facts(model: Model, objective: Objective) -> dict[str, object]:
    """Return facts about the machine and the model as plain values by name."""
    ops = model.ops
    facts: dict[str, object] = {
        "why": ops.why,
        **computed_by(ops),
        "formats": model.precision.formats(),
    }
    facts["date"] = model.tokenizer.now.isoformat()  # which prompts may have in them
    if model.beyond:
        facts["vocabulary"] = model.config.vocab_size
    facts["bitwise"] = (
        default_order()
    )  # what a config means here that names no order, such as model.sft's
    if functions := digests(objective):
        facts["functions"] = functions
    return facts


def date_of(began: Mapping[str, Any], ranks: Ranks = ALONE) -> datetime:
    """Return the date that chat templates name, to all ranks: of a run with these facts, that of
    its beginning, so that its prompts stay the same; else now."""

    def said() -> str:
        try:
            return datetime.fromisoformat(began["date"]).isoformat()
        except (KeyError, TypeError, ValueError):  # of a run before dates were recorded, or damaged
            return datetime.now().isoformat()

    return datetime.fromisoformat(ranks.broadcast_result(said))


def ranks_caution(ranks: int) -> str | None:
    """Return a warning where this machine's ranks, which compute on its cores or move what its GPUs
    compute, are more than these; or None."""
    here = number_in("LOCAL_WORLD_SIZE") or ranks
    if here <= (there := cores()):
        return None
    return (
        f"warning: ranks {here} on {there} CPU cores: ranks wait for each other; the bits are those "
        "of any number of them"
    )
