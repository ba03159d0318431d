"""Which matrices of a model an adapter has factors for, and a new adapter's values.

A begins as PEFT begins it, uniform in ±1 / sqrt(inputs) (Kaiming's bound with a = sqrt(5)), and B =
0, so that a new adapter changes nothing. Left out: the arithmetic (`low_rank.py`), and folders
(`peft.py`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from isobit.errors import IsobitError
from isobit.model.adapters.low_rank import Adapter, Projection, factor_shapes
from isobit.model.families import FAMILIES
from isobit.model.families.family import Packing
from isobit.model.hub.config import ModelConfig
from isobit.model.hub.mamba import Mamba
from isobit.model.hub.names import layer_and_role, parts
from isobit.model.hub.wrapped import classes_of
from isobit.options.projections import ALL_LINEAR, JOINED
from isobit.precision.flow import LINEAR_LAYERS


@dataclass(frozen=True)
class NewAdapter:
    """The settings of a new adapter; `targets`: names of `PROJECTIONS`, or all-linear; `rslora` as
    in `Adapter`."""

    rank: int
    alpha: float
    targets: Sequence[str] = (ALL_LINEAR,)
    seed: int = 0
    rslora: bool = False


def projections(config: ModelConfig) -> list[Projection]:
    """Return the matrices of attention, MLPs and experts that may have adapters in PEFT."""
    known = []
    for weight, tensors in parts(config):
        if weight.rpartition(".")[2] not in LINEAR_LAYERS or _is_beside_peft(weight, config):
            continue
        lo = 0
        for name, (rows, inputs) in tensors:
            module = name.removesuffix(".weight")
            short = f"{weight.rpartition('.')[0]}.{module.rpartition('.')[2]}"
            known.append(Projection(short, module, weight, lo, lo + rows, inputs))
            lo += rows
    return known


def _is_beside_peft(weight: str, config: ModelConfig) -> bool:
    """Return whether PEFT refuses adapters of a matrix, or has no folder for them: the last
    projection of Mamba-2, and experts without a gate."""
    layer, role = layer_and_role(weight)
    mamba = isinstance(config.linear, Mamba) and config.is_linear(layer)
    return (mamba and role == "o") or (role.startswith("experts ") and not config.gated)


def held_together(config: ModelConfig) -> Packing | None:
    """Return how PEFT holds the factors of a layer's experts in one tensor, or None."""
    mixtures = FAMILIES[config.family].mixtures
    if mixtures is None or config.experts is None:
        return None
    together = mixtures.renamed and (config.wrapped or config.experts.dense_layers)
    return mixtures.adapters or ("rows" if together else None)


def is_renamed(config: ModelConfig) -> bool:
    """Return whether PEFT takes the MLPs outside the experts for the experts', by their names."""
    mixtures = FAMILIES[config.family].mixtures
    return mixtures is not None and mixtures.renamed and not config.wrapped


def targeted(config: ModelConfig, targets: Sequence[str]) -> tuple[Projection, ...]:
    """Return the matrices that `targets` name. Raises IsobitError where a name is another family's,
    or where only one of two matrices of experts is named that PEFT adapts together."""
    known = projections(config)
    if ALL_LINEAR in targets:
        return tuple(known)
    chosen = tuple(proj for proj in known if proj.name.rpartition(".")[2] in targets)
    missing = [
        name for name in targets if not any(proj.name.endswith(f".{name}") for proj in chosen)
    ]
    if missing:
        raise IsobitError(
            f"adapter.targets: {missing[0]} is no matrix of a {config.family} model; targets may be "
            f"{', '.join(_names(known))}"
        )
    experts = {proj.name.rpartition(".")[2] for proj in chosen if proj.expert is not None}
    for pair in JOINED:
        if len(alone := experts & {*pair}) == 1:
            raise IsobitError(
                f"adapter.targets: {min(alone)} without {min({*pair} - alone)}: of experts both have "
                "adapters, or neither: PEFT adapts them together"
            )
    return chosen


def new_adapter(config: ModelConfig, settings: NewAdapter, base: str = "") -> Adapter:
    """Make an adapter with a random A and B = 0. The same `settings.seed` gives the same values.
    Raises IsobitError as `targeted` does."""
    chosen = targeted(config, settings.targets)
    generator = torch.Generator().manual_seed(settings.seed)
    tensors = {}
    for name, shape in factor_shapes(chosen, settings.rank).items():
        if name.endswith("lora_B"):
            tensors[name] = torch.zeros(shape)
        else:
            tensors[name] = (torch.rand(shape, generator=generator) * 2 - 1) / math.sqrt(shape[1])
    return Adapter(
        settings.rank,
        float(settings.alpha),
        chosen,
        tensors,
        base,
        settings.rslora,
        held_together(config),
        classes_of(config.wrapped, FAMILIES[config.family]),
        is_renamed(config),
    )


def beyond_use(config: ModelConfig, rank: int, targets: Sequence[str]) -> str | None:
    """Return a warning where factors have a larger rank than the matrices that they change can
    have, or None. Such a rank is not refused: with matrices of several sizes a rank is often chosen
    by the large ones, and PEFT and its folders have no limit."""
    smaller: dict[str, tuple[int, int]] = {}
    for proj in targeted(config, targets):
        shape = proj.hi - proj.lo, proj.inputs
        if min(shape) < rank:
            smaller.setdefault(proj.name.rpartition(".")[2], shape)
    if not smaller:
        return None
    listed = ", ".join(f"{name} [{rows}, {inputs}]" for name, (rows, inputs) in smaller.items())
    enough = max(map(min, smaller.values()))
    return (
        f"adapter.rank {rank} is above the smaller side of {listed}: no change of these has a "
        "rank above that, and what "
        f"the factors have beyond takes memory and time; {enough} is enough for them"
    )


def _names(known: Sequence[Projection]) -> list[str]:
    return list(dict.fromkeys(proj.name.rpartition(".")[2] for proj in known))
