"""Experts' factors as PEFT's `target_parameters` hold them (0.17 and later), read as those of each
expert's own matrices.

transformers 5 has one tensor for a layer's gates and ups and one for its downs. For such a tensor
of E experts PEFT has A [E · r, K], an expert's r rows after the other's, and B [N, r · E], whose
columns are the experts' in turn. Where it adapts both tensors of a module it wraps it twice: what
is inside, `base_layer`, is of gates and ups. One A is that of an expert's gate and of its up, so
here both have a copy of it, which computes the same; they are written apart. Left out: writing this
form, which programs that serve adapters do not read.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from torch import Tensor

from isobit.errors import IsobitError, brief
from isobit.model.adapters.low_rank import Projection
from isobit.model.hub.checkpoint import Shapes, Weights

_ROLES = ("gate_up_proj", "down_proj")
Read = Callable[[str], Tensor]


def roles_of(values: Mapping[str, Any], path: Path) -> list[str]:
    """Which of `gate_up_proj` and `down_proj` an adapter_config.json adapts by target_parameters.
    Raises IsobitError for other parameters."""
    given = values.get("target_parameters") or []
    found = {str(name).rpartition(".")[2] for name in given} if isinstance(given, list) else {""}
    if others := found - {*_ROLES}:
        raise IsobitError(
            f"{path}: target_parameters: {brief(repr(min(others)))} cannot be read; experts' "
            f"{' and '.join(_ROLES)} can"
        )
    return [role for role in _ROLES if role in found]


def apart(
    weights: Weights,
    experts: Mapping[Projection, tuple[str, str]],
    rank: int,
    roles: Sequence[str],
    prefix: str,
) -> tuple[Shapes, Read]:
    """(the shapes of all factors, how they are read by their names) of `weights`, whose experts'
    factors are together, as if each of the `experts` had its own, by the names of A and B here.
    Raises IsobitError for factors that are missing or do not fit."""
    shapes, places = dict(weights.shapes), dict[str, Callable[[], Tensor]]()
    read = lru_cache(2)(weights.rows)
    counts = Counter(one.expert[0] for one in experts if one.expert is not None)
    rows = Counter[str]()
    for one in experts:
        rows[one.weight] += one.hi - one.lo
    for one, names in experts.items():
        role = f"{one.weight.rpartition('.')[2]}_proj"
        if role not in roles or one.expert is None:
            continue
        (group, number), inside = one.expert, "" if role == roles[-1] else ".base_layer"
        layer, count = group.split(".")[1], counts[group]
        module = f"{prefix}model.layers.{layer}.mlp.experts{inside}"
        a, b = (f"{module}.lora_{factor}.weight" for factor in "AB")
        for key, shape in ((a, (count * rank, one.inputs)), (b, (rows[one.weight], rank * count))):
            if weights.shapes.get(key) != shape:
                found = "is missing" if key not in weights.shapes else f"is {weights.shapes[key]}"
                raise IsobitError(f"target_parameters: {key} {found}: expected {shape}")
            shapes.pop(key, None)
        places[names[0]] = partial(_of_a, read, a, rank, number)
        places[names[1]] = partial(_of_b, read, b, rank, number, (one.lo, one.hi))
        shapes |= {names[0]: (rank, one.inputs), names[1]: (one.hi - one.lo, rank)}
    return shapes, lambda name: places[name]() if name in places else weights.rows(name)


def _of_a(read: Read, name: str, rank: int, expert: int) -> Tensor:
    """An expert's A [r, K]."""
    return read(name)[expert * rank : (expert + 1) * rank].clone()


def _of_b(read: Read, name: str, rank: int, expert: int, rows: tuple[int, int]) -> Tensor:
    """Some rows of an expert's B [N, r]."""
    whole = read(name)[slice(*rows)]
    return whole.view(whole.shape[0], rank, -1)[:, :, expert].clone()
