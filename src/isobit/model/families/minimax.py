"""MiniMax-M2: Mixtral's layers, whose queries and keys are normed over all heads, a part of each head
rotated, and experts chosen by scores as DeepSeek-V3's are, in one group.

Left out: the layers that predict further tokens (MTP), whose tensors are not read, and the linear
attention of earlier MiniMax models.
"""

from collections.abc import Mapping
from typing import Any

from isobit.errors import IsobitError
from isobit.model.families.family import AFTER_THE_LAST, Family, Mixtures
from isobit.model.families.mistral import FAMILIES as MISTRAL
from isobit.model.families.reading import whole
from isobit.model.families.rope import Rope
from isobit.model.families.ropes import RopeKinds

_THETA = 5e6
_HEAD_DIM = 128
_PARTIAL = "partial_rotary_factor"
_FIXED = {"use_qk_norm": True, "use_routing_bias": True, "scoring_func": "sigmoid"}


def _rope(values: Mapping[str, Any], where: str, max_positions: int) -> tuple[Rope, Rope]:
    """Read the rotary embedding, whose part of a head published models count as `rotary_dim`."""
    if values.get("rotary_dim") is not None:
        width = whole(values, "head_dim", where, _HEAD_DIM)
        rotated = whole(values, "rotary_dim", where, most=width)
        values = {_PARTIAL: rotated / width, **values}
    rope = Rope.from_hf(values, where, theta=_THETA, max_positions=max_positions, partial=1.0)
    return rope, rope


def _check_attention(values: Mapping[str, Any], where: str) -> None:
    """Refuse layers with linear attention, as MiniMax-Text-01 has them."""
    kinds = values.get("attn_type_list") or []
    if not isinstance(kinds, list) or any(kind != 1 for kind in kinds):
        raise IsobitError(
            f"{where}: attn_type_list {kinds!r:.80}: of minimax_m2, models whose layers all have "
            "softmax attention (1) are read"
        )


def _more_keys(values: dict[str, Any]) -> dict[str, Any]:
    part = values.get("rope_scaling", {}).get(_PARTIAL, 1.0)
    return {"rotary_dim": round(values["head_dim"] * part), **_FIXED}


FAMILIES = {
    "minimax_m2": Family(
        "MiniMaxM2ForCausalLM",
        MISTRAL["mixtral"].modules | {"balance": ("block_sparse_moe.e_score_correction_bias",)},
        qk_norm=True,
        norms_all_heads=True,
        off=("shared_intermediate_size",),
        fixed={**_FIXED, "qk_norm_type": "per_layer"},
        checks=(_check_attention,),
        more_keys=_more_keys,
        partial_rotary=0.5,
        ropes=RopeKinds(_rope, lambda rope, _: rope.to_hf(partial=1.0)),
        max_positions=196608,
        rope_theta=_THETA,
        kv_heads=8,
        head_dim=_HEAD_DIM,
        nullable=(),
        predicts_more=AFTER_THE_LAST,
        mixtures=Mixtures(256, 8, own_keys=False, scoring=(1, 1, 1.0)),
    ),
}
