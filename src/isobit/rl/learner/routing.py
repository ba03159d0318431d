"""The routers of a mixture of experts in a learner's step: the load-balancing loss of an optimizer
batch, their load, and choices that differ from the rollout's.

The loss is E · Σ_e f_e · P_e (Fedus et al. 2022, arXiv 2101.03961, eq. 4, with k choices a token),
f_e the choices of expert e per row and P_e its mean probability, both over all layers and all rows
of the batch: transformers' `load_balancing_loss_func` of the whole batch
(tests/rl/test_router_loss.py). f carries no gradient, so that given f of the whole batch the loss
is a sum over micro-batches.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor

from isobit.distributed import ALONE, Ranks
from isobit.model import Model
from isobit.model.forward.moe import RouteTape, decode_routes
from isobit.rl.algorithm.samples import Sample
from isobit.rl.learner.packing import pack
from isobit.rl.learner.rounds import in_rounds


@dataclass(frozen=True, eq=False)
class BatchLoad:
    """Choices of each expert [E] int64 over layers and rows, and how many rows times layers there
    were."""

    choices: Tensor
    rows: int

    def __add__(self, other: "BatchLoad") -> "BatchLoad":
        return BatchLoad(self.choices + other.choices, self.rows + other.rows)

    def loss(self, probabilities: Tensor) -> Tensor:
        """Return the part in the load-balancing loss of a forward whose `probabilities` [E] are
        sums over its rows and layers; on the CPU."""
        fractions = self.choices.float() / max(self.rows, 1)
        return len(fractions) * (fractions * probabilities.cpu()).sum() / max(self.rows, 1)


def load_of(tape: RouteTape, num_experts: int) -> BatchLoad:
    """Return the load of one forward: the choices that its routers would make themselves."""
    chosen = tape.routes().cpu()
    return BatchLoad(
        torch.bincount(chosen.flatten(), minlength=num_experts), chosen.shape[0] * chosen.shape[1]
    )


def summed(tape: RouteTape) -> Tensor:
    """Return probabilities of each expert [E] over the rows and layers of a forward."""
    return torch.stack(tape.probabilities).sum(0)


@dataclass(eq=False)
class RoutingTotals:
    """Sums over the forwards of one step: choices of each expert by layer, probabilities of the
    experts, and choices that differ from the rollout's, of those that were compared."""

    load: Tensor | None = None
    probabilities: Tensor = field(default_factory=lambda: torch.zeros(()))
    differing: int = 0
    compared: int = 0

    def see(self, tape: RouteTape, num_experts: int, recorded: Tensor | None = None) -> None:
        """Take a forward into account; `recorded` [T, layers, k] are the rollout's choices for the
        same weights."""
        chosen = tape.routes().cpu()
        counts = torch.stack(
            [torch.bincount(layer.flatten(), minlength=num_experts) for layer in chosen.unbind(1)]
        )
        self.load = counts if self.load is None else self.load + counts
        self.probabilities = self.probabilities + summed(tape).detach().cpu()
        if recorded is not None:
            same = (chosen.sort(-1).values == recorded.sort(-1).values).all(-1)
            self.differing += int((~same).sum())
            self.compared += same.numel()

    def merge(self, other: "RoutingTotals") -> None:
        """Add what another saw later."""
        if other.load is not None:
            self.load = other.load if self.load is None else self.load + other.load
            self.probabilities = self.probabilities + other.probabilities
        self.differing += other.differing
        self.compared += other.compared

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the routing; {} for a dense model."""
        if self.load is None:
            return {}
        load = self.load.double()
        rows = round(
            float(self.probabilities.sum())
        )  # of all layers: a row's probabilities sum to 1
        metrics = {
            "router/load_max_over_mean": float((load.amax(1) / load.mean(1)).mean()),
            "router/idle_fraction": float((load == 0).double().mean()),
            "router/auxiliary_loss": float(
                BatchLoad(self.load.sum(0), rows).loss(self.probabilities)
            ),
        }
        if self.compared:
            metrics["router/differing_choices"] = self.differing / self.compared
        return metrics


def served_experts(
    model: Model, samples: Sequence[Sample], replay: bool, seen: Sequence[RoutingTotals]
) -> set[str]:
    """Return the experts that served some rows, as `layers.3.experts.0`: those that the rollout
    chose for the samples, where they are repeated, else those `seen` in the forwards."""
    config = model.config
    assert config.routed is not None
    layers = [layer for layer in range(config.num_layers) if config.is_mixture(layer)]
    if replay:
        chosen = tape_of(model, samples, replay=True)[0].given
        assert chosen is not None
        loads = [
            torch.bincount(rows.flatten(), minlength=config.routed.count)
            for rows in chosen.cpu().unbind(1)
        ]
    else:
        loads = list(
            torch.stack([totals.load for totals in seen if totals.load is not None]).sum(0)
        )
    return {
        f"layers.{layer}.experts.{expert}"
        for layer, load in zip(layers, loads, strict=True)
        for expert in load.nonzero().flatten().tolist()
    }


@torch.no_grad()
def batch_load(
    model: Model, micro_batches: Sequence[Sequence[Sample]], replay: bool, ranks: Ranks = ALONE
) -> BatchLoad | None:
    """Return the experts' load over all micro-batches of an optimizer batch, by a separate pass, in
    which every rank takes some; None for one micro-batch, whose own forward has it."""
    experts = model.config.routed
    assert experts is not None
    if len(micro_batches) < 2:
        return None
    mine = load = BatchLoad(torch.zeros(experts.count, dtype=torch.int64), 0)

    def compute(number: int) -> None:
        nonlocal mine
        samples = micro_batches[number]
        tape = tape_of(model, samples, replay)[0]
        packed = pack(samples, images=model.transformer.images)
        model.transformer.hidden(packed.tokens, packed.layout, use="learner", tape=tape)
        mine = mine + load_of(tape, experts.count)

    divided = model.transformer.divided
    following = nullcontext if divided is None else divided.following
    in_rounds(following, len(micro_batches), ranks, compute)
    for choices, rows in ranks.all_gather_json([mine.choices.tolist(), mine.rows]):
        load = load + BatchLoad(torch.tensor(choices), rows)
    return load


def tape_of(
    model: Model, samples: Sequence[Sample], replay: bool
) -> tuple[RouteTape, Tensor | None]:
    """Return (a tape for a forward over the samples, the choices that the rollout recorded for all
    of its rows or None)."""
    config, recorded = model.config, None
    assert config.routed is not None
    if all(s.routes is not None for s in samples):
        layers, per_token = config.num_mixtures, config.routed.per_token
        recorded = torch.cat([decode_routes(s.routes or "", layers, per_token) for s in samples])
    assert recorded is not None or not replay, "the rollout did not record its routes"
    return RouteTape(
        recorded.to(model.ops.device) if recorded is not None and replay else None
    ), recorded
