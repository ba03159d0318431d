"""What `precision` may be: the presets' names, and the options that change one.

Without torch, which the presets themselves need (`isobit.precision.PRESETS`): they are declared
here so that reading a config, a tab key and the reference of keys need none. Left out: what the
options do, and which combinations cannot work (`precision/changes.py`).
"""

from dataclasses import dataclass
from typing import Annotated, Literal

from isobit.options.declare import OneOf, above, at_least, at_most
from isobit.options.reading import OptionError

PRECISIONS = (
    "float32", "bf16", "fp8-rollout", "fp8-rollout-kv", "fp8-e2e", "fp8-unified", "fp8", "mxfp8-rollout",
    "nvfp4-rollout", "mxfp8", "nvfp4",
)  # fmt: skip
"""In the order of `PRESETS` (tests/test_completion.py)."""
LINEAR_LAYERS = ("qkv", "o", "gate_up", "down")
"""The matrices of a layer, or of its experts, by name: those that a flow may quantize."""

Scale = Literal["fp32", "ue8m0"]
Product = Literal["fp8", "bf16"]


@dataclass(frozen=True)
class FlowChanges:
    """What may differ from a preset in the rollout, in the learner, or in both. None: nothing."""

    kv_cache: Annotated[
        Literal["bf16", "e4m3", "e4m3-calibrated", "int8"] | None,
        "keys and values in the cache; e4m3 and int8 with a scale per token and head, e4m3-calibrated with one per "
        "layer for K and one for V",
    ] = None
    kv_scale: Annotated[Scale | None, "their scales: any float32, or powers of two"] = None
    query: Annotated[
        Literal["bf16", "e4m3", "e4m3-calibrated"] | None,
        "queries, before they meet the keys; e4m3 with a scale per token and head, e4m3-calibrated per layer",
    ] = None
    probabilities: Annotated[
        Literal["bf16", "e4m3"] | None,
        "of attention, before they meet the values; bf16 leaves them as they are computed",
    ] = None
    weight_scale: Annotated[Scale | None, "scales of the weights of linear layers"] = None
    weight_granularity: Annotated[
        Literal["128x128", "1x32", "row", "tensor"] | None, "what of a weight has one scale: a block, a row, all of it"
    ] = None
    activation_scale: Annotated[Scale | None, "scales of what linear layers multiply their weights by"] = None
    activation_granularity: Annotated[
        Literal["1x128", "1x32", "row", "tensor", "128x128"] | None, "what of an activation has one scale"
    ] = None
    activation: Annotated[
        Literal["bf16"] | None, "bf16 leaves activations unquantized; where the backward is not quantized"
    ] = None


@dataclass(frozen=True)
class PrecisionChanges(FlowChanges):
    """What may differ from a preset: `precision: {preset: fp8, kv_cache: bf16}`, or
    `fp8[kv_cache=bf16]`. What is not given is the preset's. A combination that cannot work is
    refused with the reason."""

    preset: Annotated[str, "the preset that is changed"] = "fp8"
    rollout: Annotated[FlowChanges, "the options down to `activation`, for the rollout alone"] = FlowChanges()
    learner: Annotated[FlowChanges, "the same for the learner"] = FlowChanges()
    dgrad: Annotated[Product | None, "the product that gives the gradient of an activation"] = None
    wgrad: Annotated[Product | None, "the product that gives the gradient of a weight"] = None
    wgrad_activation: Annotated[
        Literal["requantized", "own-copy"] | None,
        "what FP8 WGrad reads: the forward's codes, requantized along the tokens, or a copy of the activation, "
        "quantized so in the forward",
    ] = None
    gradient_scale: Annotated[Scale | None, "scales of output gradients"] = None
    gradient_granularity: Annotated[
        Literal["1x128", "1x32", "row", "tensor"] | None, "what of an output gradient has one scale"
    ] = None
    gradient_format: Annotated[Literal["e4m3", "e5m2"] | None, "output gradients"] = None
    engines: Annotated[
        Literal["shared", "separate"] | None,
        "one storage and one set of operators for both sides, or a rollout with a separate engine",
    ] = None
    bf16_first_layers: Annotated[
        int | None, at_least(0), "so many layers stay in BF16 on both sides, from the first"
    ] = None
    bf16_last_layers: Annotated[int | None, at_least(0), "so many, up to the last"] = None
    bf16_layers: Annotated[
        tuple[Annotated[str, OneOf(LINEAR_LAYERS)], ...] | None,
        "these linear layers stay in BF16 on both sides, in every layer",
    ] = None
    kv_calibration: Annotated[
        Literal["rollout", "learner"] | None, "whose forward the scales of e4m3-calibrated come from"
    ] = None
    kv_percentile: Annotated[
        float | None, above(0), at_most(100), "of the largest magnitudes of several forwards, the one that is taken"
    ] = None
    kv_margin: Annotated[float | None, above(0), "a calibrated scale is so much larger than it needs to be"] = None
    kv_calibration_prompts: Annotated[
        int | None, at_least(1), "prompts of a step that the rollout's calibration reads"
    ] = None

    def __post_init__(self) -> None:
        if self.bf16_layers == ():
            raise OptionError(("bf16_layers",), f"expected some of {', '.join(LINEAR_LAYERS)}, such as [o, down]")
