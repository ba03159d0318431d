"""Gemma 3, its models of text. Norms stand before and after attention and MLP and multiply by 1 +
weight in float32, gates have GELU, embeddings are multiplied by the root of their width, and the
scale of scores has a key of its own.

Five of six layers have a window, and a rotary embedding of their own. Of those that read images
(4B to 27B) the text is taken (`hub/wrapped.py`).
"""

from collections.abc import Mapping
from typing import Any

from isobit.model.families.family import LLAMA_MODULES, Family, sizes
from isobit.model.families.reading import whole
from isobit.model.families.ropes import by_layer_type
from isobit.model.families.windows import Windows


def _but_every_sixth(values: Mapping[str, Any], where: str, layers: int) -> list[bool]:
    pattern = whole(values, "sliding_window_pattern", where, 6)
    return [(layer + 1) % pattern != 0 for layer in range(layers)]


FAMILIES = {
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        LLAMA_MODULES
        | {
            "attention_out_norm": ("post_attention_layernorm",),
            "post_norm": ("pre_feedforward_layernorm",),
            "mlp_out_norm": ("post_feedforward_layernorm",),
        },
        norms=("input_norm", "attention_out_norm", "post_norm", "mlp_out_norm"),
        norm_offset=1.0,
        qk_norm=True,
        attention_bias=True,
        activation="gelu_pytorch_tanh",
        activation_key="hidden_activation",
        query_scalar=256,
        scaled_embedding=True,
        off=("final_logit_softcapping", "attn_logit_softcapping", "use_bidirectional_attention"),
        windows=Windows(4096, slides=_but_every_sixth, nullable=False),
        ropes=by_layer_type(1e6, 10000.0, "rope_local_base_freq"),
        whole_heads=True,
        max_positions=131072,
        kv_heads=4,
        head_dim=256,
        nullable=(),
        tied=True,
        wrappers=("gemma3",),
        sizes=sizes(262208, 2304, 9216, 26, 8),
    )
}
