"""Experts' factors as PEFT's `target_parameters` hold them (0.17 and later): all of a layer's
together, read and written.

transformers 5 has one tensor for a layer's gates and ups and one for its downs. For such a tensor
of E experts PEFT has A [E · R, K], an expert's rows after the other's, and B [N, R · E], whose
columns are the experts' in turn. Where it adapts both tensors of a module it wraps it twice: what
is inside, `base_layer`, is of gates and ups. In gpt-oss gates and ups are rows of B in turn
(`columns`, as of `hub/packed_experts.py`).

Here gates and ups have separate factors, of rank r each. They are written as PEFT joins them
itself: R = 2 r, the A of both, and the B of both on a diagonal of blocks, which `rank_pattern` and
`alpha_pattern` say. Without such a pattern one A of rank r is that of an expert's gate and
of its up, and both get a copy of it, which computes the same.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache, partial
from math import sqrt
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from isobit.distributed import Shards
from isobit.distributed.files import Part
from isobit.errors import IsobitError, brief
from isobit.model.adapters.low_rank import Adapter, Projection
from isobit.model.families.family import Packing
from isobit.model.hub.checkpoint import Shapes, Weights
from isobit.model.hub.names import whole_masters

_ROLES = ("gate_up_proj", "down_proj")
_PATTERN = r".*\.gate_up_proj"
Read = Callable[[str], Tensor]


class Form(NamedTuple):
    """The form of experts' factors in a folder: `roles`, the matrices whose factors are together,
    gates and ups first; `wide`, whether those of gates and ups have R = 2 r."""

    roles: Sequence[str]
    wide: bool = False


def form_of(values: Mapping[str, Any], path: Path) -> Form:
    """Return the form of an adapter_config.json. Raises IsobitError for parameters that are not
    experts', and for ranks and alphas that differ otherwise."""
    parameters = values.get("target_parameters") or []
    parameters = parameters if isinstance(parameters, list) else [""]
    # of a linear layer named by its weight the factors are the layer's
    targets = {str(n).rpartition(".")[2] for n in parameters if not str(n).endswith("_proj.weight")}
    if foreign := targets - {*_ROLES}:
        raise IsobitError(
            f"{path}: target_parameters: {brief(repr(min(foreign)))} cannot be read; experts' "
            f"{' and '.join(_ROLES)} can"
        )
    roles = [role for role in _ROLES if role in targets]
    alpha = sqrt(2) if values.get("use_rslora") else 2
    both = bool(values.get("rank_pattern")) == bool(values.get("alpha_pattern"))
    for key, meaning, number, factor in (
        ("rank_pattern", "ranks", "r", 2),
        ("alpha_pattern", "alphas", "lora_alpha", alpha),
    ):
        parameters = values.get(key)
        wide = both and _ROLES[0] in roles and _all_are(parameters, values.get(number), factor)
        if parameters and not wide:
            raise IsobitError(
                f"{path}: {key}: {meaning} that differ cannot be read, but for experts' gates and ups "
                "twice the others', where PEFT has joined them"
            )
    return Form(roles, bool(values.get("rank_pattern")))


def _all_are(pattern: Any, number: Any, factor: float) -> bool:
    """Return whether a pattern names gates and ups alone, each with `factor` times `number`."""
    if not isinstance(pattern, dict) or not isinstance(number, (int, float)):
        return False
    return all(
        name.endswith("gate_up_proj")
        and isinstance(value, (int, float))
        and abs(value - factor * number) < 1e-6
        for name, value in pattern.items()
    )


def config_of(adapter: Adapter, beside: Sequence[Projection] = ()) -> dict[str, Any]:
    """Return the keys of adapter_config.json that describe experts' factors held together;
    `beside`: the other projections whose matrices are named as parameters."""
    roles = _roles_of(adapter)
    modules = dict.fromkeys(
        _module(proj) for proj in adapter.projections if proj.expert is not None
    )
    names = [f"{module}.{role}" for role in roles for module in modules]
    names += [f"{proj.module}.weight" for proj in beside]
    if not names:
        return {}
    inside = dict.fromkeys(name.split(".", 3)[3] for name in names)  # behind model.layers.0
    keys: dict[str, Any] = {"target_parameters": list(inside)}
    if _ROLES[0] in roles:
        alpha = adapter.alpha * (sqrt(2) if adapter.rslora else 2)
        keys |= {
            "rank_pattern": {_PATTERN: 2 * adapter.rank},
            "alpha_pattern": {_PATTERN: int(alpha) if alpha == int(alpha) else alpha},
        }
    return keys


def _roles_of(adapter: Adapter) -> list[str]:
    roles = {_role(proj) for proj in adapter.projections if proj.expert is not None}
    return [role for role in _ROLES if role in roles]


def _role(projection: Projection) -> str:
    return f"{projection.weight.rpartition('.')[2]}_proj"


def _module(projection: Projection) -> str:
    """Return the name in transformers of the module of a layer's experts, from one of their
    matrices: Mixtral's has another name in files."""
    layer = projection.module.partition(".experts.")[0].replace(".block_sparse_moe", ".mlp")
    return f"{layer}.experts"


class _Group(NamedTuple):
    """The factors of one tensor: `members`, its experts' matrices in the order of the experts,
    `matrices` for each; `a` and `b`, the names of A [E · R, K] and B [N, R · E]."""

    members: list[Projection]
    matrices: int
    a: str
    b: str

    @property
    def experts(self) -> int:
        return len(self.members) // self.matrices

    @property
    def rows(self) -> int:
        return max(member.hi for member in self.members[: self.matrices])

    def rows_of(self, projection: Projection, half: int, packing: Packing | None) -> slice:
        """Return the rows of B that are those of a member, the `half` of its expert's stacked
        matrices."""
        if self.matrices > 1 and packing == "columns":
            return slice(half, None, self.matrices)
        return slice(projection.lo, projection.hi)


def _groups(experts: Iterable[Projection], roles: Sequence[str], prefix: str) -> list[_Group]:
    groups_: dict[tuple[str, str], list[Projection]] = {}
    for proj in experts:
        if _role(proj) in roles:
            groups_.setdefault((proj.name.split(".")[1], _role(proj)), []).append(proj)
    groups = []
    for (_, role), members in groups_.items():
        inside = "" if role == roles[-1] else ".base_layer"
        module = f"{prefix}{_module(members[0])}{inside}"
        count = sum(proj.weight == members[0].weight for proj in members)
        groups.append(_Group(members, count, f"{module}.lora_A.weight", f"{module}.lora_B.weight"))
    return groups


def apart(
    weights: Weights,
    experts: Mapping[Projection, tuple[str, str]],
    rank: int,
    form: Form,
    packing: Packing | None,
    prefix: str,
) -> tuple[Shapes, Read]:
    """Return (the shapes of all factors, a function that reads a factor by its name) of `weights`,
    whose experts' factors are together, as if each of the `experts` had its own, by the names of A
    and B here. Raises IsobitError for factors that are missing or do not fit."""
    shapes, readers = dict(weights.shapes), dict[str, Callable[[], Tensor]]()
    read = lru_cache(2)(weights.rows)
    for group in _groups(experts, form.roles, prefix):
        wide = form.wide and group.matrices > 1
        ranks = rank * group.matrices if wide else rank
        inputs, count = group.members[0].inputs, group.experts
        for key, shape in (
            (group.a, (count * ranks, inputs)),
            (group.b, (group.rows, ranks * count)),
        ):
            if weights.shapes.get(key) != shape:
                problem = f"is {weights.shapes[key]}" if key in weights.shapes else "is missing"
                raise IsobitError(f"target_parameters: {key} {problem}: expected {shape}")
            del shapes[key]
        for index, member in enumerate(group.members):
            expert, half = divmod(index, group.matrices)
            mine = slice(half * rank, (half + 1) * rank) if wide else slice(None)
            rows, (a, b) = group.rows_of(member, half, packing), experts[member]
            readers[a] = partial(_of_a, read, group.a, expert, ranks, mine)
            readers[b] = partial(_of_b, read, group.b, expert, ranks, mine, rows)
            shapes |= {a: (rank, member.inputs), b: (member.hi - member.lo, rank)}
    return shapes, lambda name: readers[name]() if name in readers else weights.rows(name)


def _of_a(read: Read, name: str, expert: int, ranks: int, mine: slice) -> Tensor:
    """Return the A [r, K] of one expert's matrix, read from the A of all experts."""
    return read(name)[expert * ranks : (expert + 1) * ranks][mine].clone()


def _of_b(read: Read, name: str, expert: int, ranks: int, mine: slice, rows: slice) -> Tensor:
    """Return some rows of an expert's B [N, r]. Raises IsobitError where the other columns are not
    0."""
    factors = read(name)[rows].reshape(-1, ranks, read(name).shape[1] // ranks)[:, :, expert]
    result = factors[:, mine].clone()
    if int(torch.count_nonzero(factors)) != int(torch.count_nonzero(result)):
        raise IsobitError(
            f"target_parameters: {name}: gates and ups share factors of twice the rank, and here "
            "each has its own"
        )
    return result


def joined(
    adapter: Adapter, masters: Mapping[str, Tensor], shards: Shards, prefix: str
) -> dict[str, Part]:
    """Return the tensors of a file that hold experts' factors together. On one rank, each is made
    when it is written; of several ranks the first makes and writes them, from the rows that all
    have sent."""
    experts = [proj for proj in adapter.projections if proj.expert is not None]
    parts_by_name: dict[str, Part] = {}
    for group in _groups(experts, _roles_of(adapter), prefix):
        ranks, count = adapter.rank * group.matrices, group.experts
        names = [[proj.masters[index] for proj in group.members] for index in (0, 1)]
        shapes = (count * ranks, group.members[0].inputs), (group.rows, ranks * count)
        for key, shape, wanted, make in zip(
            (group.a, group.b), shapes, names, (_joined_a, _joined_b)
        ):
            whole = whole_masters(masters, wanted, torch.float32, shards)
            made = partial(make, [whole[name] for name in wanted], group, adapter, shape)
            mine = made if shards.ranks.size == 1 else made() if shards.ranks.first else None
            parts_by_name[key] = Part(torch.float32, shape, mine)
    return parts_by_name


def _joined_a(
    factors: Sequence[Tensor], group: _Group, adapter: Adapter, shape: tuple[int, int]
) -> Tensor:
    return torch.cat([tensor.detach().float().cpu() for tensor in factors]).view(shape)


def _joined_b(
    factors: Sequence[Tensor], group: _Group, adapter: Adapter, shape: tuple[int, int]
) -> Tensor:
    rank = adapter.rank
    out = torch.zeros(shape[0], rank * group.matrices, group.experts)
    for index, (member, values) in enumerate(zip(group.members, factors)):
        expert, half = divmod(index, group.matrices)
        rows = group.rows_of(member, half, adapter.together)
        out[rows, half * rank : (half + 1) * rank, expert] = values.detach().float().cpu()
    return out.view(shape)
