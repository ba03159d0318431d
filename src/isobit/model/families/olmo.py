"""OLMo 2 and 3: norms follow attention and MLP, x + norm(attention(x)), and queries and keys are normed over all heads.

Three of four layers of an OLMo 3 have a window, and a rotary embedding of their own, which is never scaled.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from isobit.errors import IsobitError
from isobit.model.families.family import LLAMA_MODULES, Family, RopeKinds
from isobit.model.families.windows import Windows
from isobit.model.rope import Rope

_THETA = 500000.0
_KINDS = ("full_attention", "sliding_attention")

_MODULES = {name: modules for name, modules in LLAMA_MODULES.items() if name not in ("input_norm", "post_norm")} | {
    "attention_out_norm": ("post_attention_layernorm",),
    "mlp_out_norm": ("post_feedforward_layernorm",),
}


def _three_of_four(values: Mapping[str, Any], where: str, layers: int) -> list[bool]:
    return [(layer + 1) % 4 != 0 for layer in range(layers)]


def _ropes(values: Mapping[str, Any], where: str, max_positions: int) -> tuple[Rope, Rope]:
    """(that of layers without a window, that of layers with one): one section each in rope_parameters, or
    rope_scaling for the former alone."""
    sections, rest = values.get("rope_parameters"), {k: v for k, v in values.items() if not k.startswith("rope_")}
    if not sections:
        if values.get("rope_theta", _THETA) != _THETA:  # of which transformers 5 tells the first kind of layer alone
            raise IsobitError(f"{where}: rope_theta other than {_THETA}: give rope_parameters of each layer type")
        full = Rope.from_hf(values, where, theta=_THETA, max_positions=max_positions)
        return full, Rope(_THETA)
    if not isinstance(sections, dict) or not all(isinstance(sections.get(kind), dict) for kind in _KINDS):
        raise IsobitError(f"{where}: rope_parameters must have the sections {' and '.join(_KINDS)}")
    if values.get("rope_scaling") or "rope_theta" in values:
        raise IsobitError(f"{where}: rope_scaling or rope_theta stand beside rope_parameters; keep the latter")
    given = ({**rest, "rope_parameters": sections[kind]} for kind in _KINDS)
    full, sliding = (Rope.from_hf(one, where, theta=_THETA, max_positions=max_positions) for one in given)
    return full, sliding


def _ropes_to_hf(full: Rope, sliding: Rope) -> dict[str, Any]:
    if sliding == Rope(_THETA) and full.theta == _THETA:  # in keys that transformers 4 knows too
        return full.to_hf()
    return {"rope_parameters": {kind: rope.section() for kind, rope in zip(_KINDS, (full, sliding))}}


_OLMO2 = Family(
    "Olmo2ForCausalLM",
    _MODULES,
    norms=("attention_out_norm", "mlp_out_norm"),
    attention_bias=True,
    qk_norm=True,
    norms_all_heads=True,
    max_positions=2048,
    rms_eps=1e-5,
    kv_heads=None,
)

FAMILIES = {
    "olmo2": _OLMO2,
    "olmo3": replace(
        _OLMO2,
        architecture="Olmo3ForCausalLM",
        windows=Windows(4096, slides=_three_of_four, nullable=False),
        ropes=RopeKinds(_ropes, _ropes_to_hf),
    ),
}
