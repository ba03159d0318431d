"""What `precision` may be: the presets' names, and the options that change one.

Without torch, which the presets themselves need (`isobit.precision.PRESETS`): they are declared
here so that reading a config, a tab key and the reference of keys need none. Left out: what the
options do, and which combinations cannot work (`precision/changes.py`).
"""

from dataclasses import dataclass
from typing import Annotated, Literal

from isobit.options.declare import Formerly, OneOf, above, at_least, at_most
from isobit.options.reading import OptionError

PRECISIONS = (
    "float32", "bf16", "fp8-rollout", "fp8-rollout-kv", "fp8-rollout-kv-verl",
    "fp8-rollout-attention", "fp8-e2e", "fp8-unified", "fp8",
    "mxfp8-rollout", "nvfp4-rollout", "mxfp8", "nvfp4",
)  # fmt: skip
"""In the order of `PRESETS` (tests/test_completion.py)."""
LINEAR_LAYERS = (
    *("qkv", "qkv_a", "q_b", "kv_b", "o", "gate_up", "down"),
    *("experts_in", "experts_out"),  # of a latent that experts work in
)
"""The matrices of a layer, or of its experts, by name: those that a flow may quantize."""

Scale = Literal["fp32", "ue8m0"]
Product = Literal["fp8", "bf16"]


@dataclass(frozen=True)
class KVMargins:
    """The factor by which a calibrated scale exceeds amax / 448, for each tensor."""

    key: Annotated[float, above(0), "of the keys"] = 1.05
    value: Annotated[float, above(0), "of the values"] = 1.05
    query: Annotated[float, above(0), "of the queries"] = 1.05


@dataclass(frozen=True)
class FlowChanges:
    """The options that change a preset in the rollout, in the learner, or in both. None: as the
    preset has it.

    The first four are of the rollout alone where it has its own engine and the preset's learner
    quantizes nothing in attention: no learner of the field has such a cache.
    """

    kv_cache: Annotated[
        Literal["bf16", "e4m3", "e4m3-calibrated", "int8"] | None,
        "format of keys and values in the cache. e4m3 and int8 have a scale for each token and "
        "head; e4m3-calibrated has two scales for each layer, one for K and one for V",
    ] = None
    kv_scale: Annotated[
        Scale | None, "scales of the cache: any float32, or powers of two (ue8m0)"
    ] = None
    query: Annotated[
        Literal["bf16", "e4m3", "e4m3-calibrated"] | None,
        "format of queries when they are multiplied with keys. e4m3 has a scale for each token and "
        "head, e4m3-calibrated one for each layer",
    ] = None
    probabilities: Annotated[
        Literal["bf16", "e4m3"] | None,
        "format of attention's probabilities when they are multiplied with values; bf16 leaves "
        "them as they are computed",
    ] = None
    weight: Annotated[
        Literal["bf16"] | None, "bf16 leaves weights unquantized; activations then are in bf16 too"
    ] = None
    weight_scale: Annotated[Scale | None, "scales of the weights of linear layers"] = None
    weight_granularity: Annotated[
        Literal["128x128", "1x32", "row", "tensor"] | None,
        "the part of a weight that has one scale: a block, a row, or all of it",
    ] = None
    activation_scale: Annotated[
        Scale | None, "scales of activations, which linear layers multiply with their weights"
    ] = None
    activation_granularity: Annotated[
        Literal["1x128", "1x32", "row", "tensor", "128x128"] | None,
        "the part of an activation that has one scale",
    ] = None
    activation: Annotated[
        Literal["bf16"] | None,
        "bf16 leaves activations unquantized; in the learner only if its backward is not quantized",
    ] = None
    bf16_first_layers: Annotated[
        int | None, at_least(0), "how many layers stay in BF16, counted from the first"
    ] = None
    bf16_last_layers: Annotated[
        int | None, at_least(0), "how many layers stay in BF16, counted from the last"
    ] = None


@dataclass(frozen=True)
class PrecisionChanges(FlowChanges):
    """The options that change a preset: `precision: {preset: fp8, kv_cache: bf16}`, or
    `fp8[kv_cache=bf16]`. An option that is left out is the preset's. A combination that cannot work
    is refused with the reason."""

    preset: Annotated[str, "the preset that is changed"] = "fp8"
    rollout: Annotated[
        FlowChanges, "the options from `kv_cache` to `bf16_last_layers`, for the rollout alone"
    ] = FlowChanges()
    learner: Annotated[FlowChanges, "the same options, for the learner alone"] = FlowChanges()
    dgrad: Annotated[
        Product | None, "format of the product that gives the gradient of an activation"
    ] = None
    wgrad: Annotated[
        Product | None, "format of the product that gives the gradient of a weight"
    ] = None
    wgrad_activation: Annotated[
        Literal["requantized", "own-copy"] | None,
        "what WGrad in FP8 reads. requantized: the codes of the forward, requantized along the "
        "tokens. own-copy: a "
        "second copy of the activation, which the forward quantizes along the tokens",
    ] = None
    gradient_scale: Annotated[Scale | None, "scales of output gradients"] = None
    gradient_granularity: Annotated[
        Literal["1x128", "1x32", "row", "tensor"] | None,
        "the part of an output gradient that has one scale",
    ] = None
    gradient_format: Annotated[Literal["e4m3", "e5m2"] | None, "format of output gradients"] = None
    engines: Annotated[
        Literal["shared", "separate"] | None,
        "shared: one storage and one set of operators for rollout and learner. separate: the "
        "rollout has another engine",
    ] = None
    bf16_layers: Annotated[
        tuple[Annotated[str, OneOf(LINEAR_LAYERS)], ...] | None,
        "linear layers that stay in BF16 on both sides, in every layer",
    ] = None
    kv_calibration: Annotated[
        Literal["every_step", "once", "never"] | None,
        "when the scales of e4m3-calibrated are found. once: from the first data of their kind, "
        "and kept; never: all are 1.0",
    ] = None
    kv_calibration_data: Annotated[
        Literal["prompts", "batch"] | None,
        Formerly("kv_calibration", (("rollout", "prompts"), ("learner", "batch"))),
        "what they are found on. prompts: some prompts of the step that comes, by the rollout's "
        "flow; batch: prompts and completions that were learned from last, by the learner's flow, "
        "and before the first batch the prompts",
    ] = None
    kv_percentile: Annotated[
        float | None,
        above(0),
        at_most(100),
        "which of the largest magnitudes of several forwards gives a calibrated scale",
    ] = None
    kv_margin: Annotated[
        float | KVMargins | None,
        above(0),
        "the factor by which a calibrated scale exceeds amax / 448: a number, or one for each of "
        "key, value and query. vLLM's amax/200 is 2.24, its amax/100 4.48",
    ] = None
    kv_calibration_prompts: Annotated[
        int | None, at_least(1), "how many prompts of a step are calibrated on"
    ] = None

    def __post_init__(self) -> None:
        if self.bf16_layers == ():
            raise OptionError(
                ("bf16_layers",), f"expected some of {', '.join(LINEAR_LAYERS)}, such as [o, down]"
            )
