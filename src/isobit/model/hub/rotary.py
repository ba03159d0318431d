"""The rotary embeddings that a config.json asks for, by the rules of its family; what they compute
is in `families/rope.py`."""

from collections.abc import Mapping
from typing import Any

from isobit.errors import IsobitError
from isobit.model.families import FAMILIES, Family
from isobit.model.families.rope import Rope


def ropes_of(
    values: Mapping[str, Any], where: str, family: Family, max_positions: int
) -> tuple[Rope, Rope | None]:
    """Return the rotary embedding, and that of layers with a window where it may be another."""
    if not family.rotary:
        return Rope(), None
    if family.ropes is not None:
        return family.ropes.read(values, where, max_positions)
    if family.rope_section is not None and not (
        values.get("rope_scaling") or values.get("rope_parameters")
    ):
        values = {**values, "rope_scaling": family.rope_section}
    rope = Rope.from_hf(
        values,
        where,
        theta=family.rope_theta,
        max_positions=max_positions,
        partial=family.partial_rotary,
        original=family.original_positions,
        more=family.rope_more,
    )
    if rope.kind not in family.rope_kinds:
        raise IsobitError(
            f"{where}: unsupported rope scaling {rope.kind!r}: supported in this architecture is "
            f"{' and '.join(family.rope_kinds)}"
        )
    return rope, None


def check_head_dim(where: str, name: str, rope: Rope, head_dim: int | None, usual: int) -> None:
    """Raise IsobitError for a head dimension that transformers does not take in a family with the
    scaling; `usual`: the width of the model divided by its heads."""
    family = FAMILIES[name]
    if head_dim is None and rope.kind == "yarn" and family.yarn_needs_head_dim:
        raise IsobitError(f"{where}: rope scaling yarn needs head_dim in a {name}")
    fixed = rope.kind == "longrope" and family.original_positions is not None
    if fixed and (head_dim or usual) != usual:
        raise IsobitError(
            f"{where}: rope scaling longrope needs a head_dim of hidden_size / "
            f"num_attention_heads, {usual}, in a {name}"
        )
