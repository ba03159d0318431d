"""The families of `config.json` that are supported: what each is when keys are left out, and keys read strictly.

Defaults are those of the configuration classes of transformers 5 (`configuration_llama.py` and its siblings), which
differ by family: a Mixtral without `rope_theta` has 1,000,000 and a Llama 10,000. Values of a wrong type are refused,
never converted: `"false"` is no boolean and 48.0 no size.
`tests/model/test_config_table.py` compares what is accepted with `transformers`, and what is left out.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from isobit.errors import IsobitError


@dataclass(frozen=True)
class Family:
    """One `model_type`: the class of its checkpoints, what its layers have, and what stands for a key that config.json
    leaves out.

    `kv_heads` None is one for each query head; `head_dim` None is hidden_size / heads. `nullable` are keys of which
    null means the same as None here. `attention_bias` and `mlp_bias`: whether config.json says if there are any;
    `qkv_bias`: there always are. `window`: when a layer has a sliding one: never, with the flag use_sliding_window (of
    some layers, as layer_types or max_window_layers say, or of all), or wherever sliding_window is a number.
    `expert_names`: of an expert's tensors, as `names.py` lists them.
    """

    architecture: str
    qkv_bias: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    window: Literal["never", "flag", "flag by layer", "number"] = "never"
    whole_heads: bool = False  # hidden_size must be a multiple of the heads, also where head_dim is given
    yarn_needs_head_dim: bool = False
    max_positions: int = 32768
    rope_theta: float = 10000.0
    rms_eps: float = 1e-6
    kv_heads: int | None = 32
    head_dim: int | None = None
    nullable: tuple[str, ...] = ("num_key_value_heads",)
    experts: int = 0
    experts_per_token: int = 0
    expert_names: Literal["", "qwen", "mixtral"] = ""

    @property
    def variants(self) -> list[tuple[bool, bool, bool, bool]]:
        """The (qkv_bias, o_bias, mlp_bias, qk_norm) that a config.json of the family can express."""
        attention = (False, True) if self.attention_bias else (False,)
        mlp = (False, True) if self.mlp_bias else (False,)
        return [(bias or self.qkv_bias, bias, more, self.qk_norm) for bias in attention for more in mlp]


FAMILIES = {
    "llama": Family(
        "LlamaForCausalLM",
        attention_bias=True,
        mlp_bias=True,
        whole_heads=True,
        max_positions=2048,
        kv_heads=None,
        nullable=("num_key_value_heads", "head_dim"),
    ),
    "qwen2": Family("Qwen2ForCausalLM", qkv_bias=True, window="flag by layer"),
    "qwen3": Family("Qwen3ForCausalLM", attention_bias=True, qk_norm=True, window="flag by layer", head_dim=128),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        attention_bias=True,
        qk_norm=True,
        window="flag",
        kv_heads=4,
        nullable=(),
        experts=128,
        experts_per_token=8,
        expert_names="qwen",
    ),
    "mixtral": Family(
        "MixtralForCausalLM",
        window="number",
        yarn_needs_head_dim=True,
        max_positions=131072,
        rope_theta=1e6,
        rms_eps=1e-5,
        kv_heads=8,
        nullable=("head_dim",),
        experts=8,
        experts_per_token=2,
        expert_names="mixtral",
    ),
}
_WINDOW, _WINDOW_FROM_LAYER = 4096, 28  # of Qwen's, where use_sliding_window is true


MOST = 2**31 - 1
"""No size in a config.json is larger; sizes that the tensors decide are compared with them (`names.check_shapes`)."""
MOST_LAYERS = 65536


def whole(
    values: Mapping[str, Any], key: str, where: str, default: int | None = None, least: int = 1, most: int = MOST
) -> int:
    """An integer from `least` to `most`; IsobitError that names key and file for anything else, or if it is missing."""
    if key not in values and default is None:
        raise IsobitError(f"{where}: key {key!r} is missing")
    value = values.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool):
        raise IsobitError(f"{where}: {key} has the wrong type: expected an integer, got {value!r:.80}")
    if value < least:
        raise IsobitError(f"{where}: {key} must be at least {least}, got {value}")
    if value > most:
        raise IsobitError(f"{where}: {key} must be at most {most:,}, got {value!r:.80}")
    return value


def optional_whole(values: Mapping[str, Any], key: str, where: str, family: Family, default: int | None) -> int | None:
    """`whole`; or None where the key and its default are missing, or where it is null and the family allows that."""
    if values.get(key, default) is None and (key not in values or key in family.nullable):
        return None
    return whole(values, key, where, default)


def real(values: Mapping[str, Any], key: str, where: str, default: float) -> float:
    """A number with a decimal point, finite and not negative; IsobitError for anything else."""
    value = values.get(key, default)
    if not isinstance(value, float) or not 0 <= value < float("inf"):
        raise IsobitError(f"{where}: {key} has the wrong type: expected a number such as {default}, got {value!r:.80}")
    return value


def flag(values: Mapping[str, Any], key: str, where: str, default: bool = False) -> bool:
    """true or false; IsobitError for anything else."""
    value = values.get(key, default)
    if not isinstance(value, bool):
        raise IsobitError(f"{where}: {key} has the wrong type: expected true or false, got {value!r:.80}")
    return value


def refuse_windows(values: Mapping[str, Any], where: str, family: Family, layers: int, max_positions: int) -> None:
    """IsobitError if a layer does not see all earlier positions.

    A window of `max_positions` or more hides none: position q sees those above q - window.
    """
    kinds = _layer_kinds(values, where, layers)
    if "sliding_attention" in kinds and not _may_slide(values, where, family):
        raise IsobitError(f"{where}: layer_types has sliding_attention, but no window is in use; take full_attention")
    window = _window(values, where, family, layers, "sliding_attention" in kinds if kinds else None)
    if window is not None and window < max_positions:
        raise IsobitError(
            f"{where}: sliding-window attention is not supported: sliding_window {window} is below "
            f"max_position_embeddings {max_positions}, and every layer must see all positions"
        )


def _layer_kinds(values: Mapping[str, Any], where: str, layers: int) -> list[str]:
    """`layer_types`, or nothing where it is left out."""
    kinds = values.get("layer_types")
    if kinds is None:
        return []
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise IsobitError(f"{where}: layer_types must name the attention of each of {layers} layers")
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            raise IsobitError(
                f"{where}: layer_types: {kind!r:.80} is not supported; every layer must be full_attention"
            )
    return kinds


def _may_slide(values: Mapping[str, Any], where: str, family: Family) -> bool:
    if family.window.startswith("flag"):
        return flag(values, "use_sliding_window", where)
    return family.window == "number" and values.get("sliding_window") is not None


def _window(values: Mapping[str, Any], where: str, family: Family, layers: int, listed: bool | None) -> int | None:
    """The window that some layer has, in tokens. `listed`: whether layer_types has a sliding layer, if it is given."""
    if not _may_slide(values, where, family):
        return None
    if values.get("sliding_window", _WINDOW) is None:
        return None
    window = whole(values, "sliding_window", where, _WINDOW)
    if family.window == "flag by layer":
        first = whole(values, "max_window_layers", where, _WINDOW_FROM_LAYER, least=0)
        slides = first < layers if listed is None else listed
        return window if slides else None
    return window
