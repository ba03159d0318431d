"""What computes a run, as its machine.json says."""

from isobit.kernels import computed_by
from isobit.model import Model
from isobit.options.consistency import default_order
from isobit.rl import Objective
from isobit.rl.algorithm.functions import digests


def machine_facts(model: Model, objective: Objective) -> dict[str, object]:
    """Plain values by name."""
    ops = model.ops
    facts: dict[str, object] = {
        "why": ops.why,
        **computed_by(ops),
        "formats": model.precision.formats(),
    }
    facts["date"] = model.tokenizer.now.isoformat()  # which prompts may have in them
    facts["bitwise"] = (
        default_order()
    )  # what a config means here that names no order, such as model.sft's
    if functions := digests(objective):
        facts["functions"] = functions
    return facts
