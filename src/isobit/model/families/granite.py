"""Granite, dense: embeddings, scores, what attention and MLP add, and logits are multiplied by
numbers from config.json. Granite 4.0's dense models are `granitemoehybrid` without experts and
Mamba-2 layers; those that have some are refused."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from isobit.errors import IsobitError
from isobit.model.families.family import LLAMA_MODULES, Family

_GRANITE = Family(
    "GraniteForCausalLM",
    attention_bias=True,
    mlp_bias=True,
    multipliers=True,
    max_positions=2048,
    kv_heads=None,
)


def _check_dense(values: Mapping[str, Any], where: str) -> None:
    kinds = values.get("layer_types", values.get("layers_block_type"))
    named = kinds if isinstance(kinds, list) else ["mamba"]  # what a model without the key has
    if others := [kind for kind in named if kind not in ("attention", "full_attention")]:
        raise IsobitError(
            f"{where}: layer_types has {others[0]!r:.40}: of granitemoehybrid, models whose layers "
            "all have attention are read; the nearest with Mamba-2 layers is nemotron_h"
        )
    if (experts := values.get("num_local_experts", 8)) not in (0, None):
        raise IsobitError(
            f"{where}: num_local_experts {experts!r:.40}: of granitemoehybrid, models without "
            "experts are read"
        )


def _unrotated(values: Mapping[str, Any], where: str, layers: int) -> tuple[int, ...]:
    kind = values.get("position_embedding_type")
    if kind not in (None, "rope"):
        raise IsobitError(
            f"{where}: position_embedding_type must be rope or null, got {kind!r:.40}"
        )
    return () if kind == "rope" else tuple(range(layers))


def _more_keys(values: dict[str, Any]) -> dict[str, Any]:
    return {
        "layer_types": ["attention"] * values["num_hidden_layers"],
        "num_local_experts": 0,
        "mamba_n_heads": 1,  # transformers wants a divisor, also where no layer has any
        "intermediate_size": values["shared_intermediate_size"],
        "position_embedding_type": "rope" if all(values.pop("no_rope_layers")) else None,
    }


FAMILIES = {
    "granite": _GRANITE,
    "granitemoehybrid": replace(
        _GRANITE,
        architecture="GraniteMoeHybridForCausalLM",
        modules=LLAMA_MODULES
        | {"gate_up": ("shared_mlp.input_linear",), "down": ("shared_mlp.output_linear",)},
        mlp_bias=False,
        inner_key="shared_intermediate_size",
        unrotated=_unrotated,
        more_keys=_more_keys,
        checks=(_check_dense,),
    ),
}
