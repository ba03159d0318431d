"""Phi-3 and Phi-4: query, key and value are one matrix, and so are gate and up. The longer ones
(Phi-4-mini, Phi-3's 128k) have longrope (`rope.py`), and Phi-4-mini rotates a part of each head."""

from isobit.model.families.family import LLAMA_MODULES, Family
from isobit.model.families.windows import Windows

FAMILIES = {
    "phi3": Family(
        "Phi3ForCausalLM",
        LLAMA_MODULES | {"qkv": ("self_attn.qkv_proj",), "gate_up": ("mlp.gate_up_proj",)},
        windows=Windows(layer_types=False),
        rope_kinds=("default", "longrope"),
        original_positions=4096,
        partial_rotary=1.0,
        max_positions=4096,
        rms_eps=1e-5,
        kv_heads=None,
    )
}
