"""`Precision`: one frozen value that gives every tensor its format, in memory and in products.

A `Flow` describes one use of a model (rollout or learner). A `Precision` joins the two with the
backward's formats and the layers that stay unquantized. Whose flow a preset is stands in
`docs/papers.md`; `changes.py` composes any other flow. Left out: the arithmetic itself
(`isobit.kernels`) and the weights (`isobit.model`).
"""

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches

from isobit.errors import IsobitError, brief
from isobit.options.declare import choices, options_of
from isobit.options.precisions import LINEAR_LAYERS as LINEAR_LAYERS
from isobit.options.precisions import KVMargins, PrecisionChanges
from isobit.precision.formats import BF16, E2M1, E4M3, FP32, INT8, Format
from isobit.precision.quantize import QuantSpec


def _refuse_int8(role: str, spec: QuantSpec | None) -> None:
    """Raise IsobitError where a tensor other than keys and values is to be INT8, which no product
    takes."""
    if spec is not None and spec.format is INT8:
        raise IsobitError(f"{role}: int8 is a format of the KV cache alone; use e4m3")


@dataclass(frozen=True)
class Flow:
    """Formats of one use of a model. `None` means: stays in `compute`.

    `compute` is the format of activations between operators, embedding, norms and output head.
    `weight` and `activation` quantize the two operands of each linear layer, `kv` the keys and
    values (granularity `row`: one scale per token and head; `tensor`: one calibrated scale per
    layer for K and one for V), `query` the queries (the same two). `probabilities`, E4M3 or None,
    is the format of attention's unnormalized probabilities, times 2^8; None leaves them as the
    operators compute them. INT8 is for `kv` alone, by `row`. The first and last layers may stay in
    `compute`. Raises IsobitError for another use of INT8, and for other probabilities.
    """

    compute: Format = BF16
    weight: QuantSpec | None = None
    activation: QuantSpec | None = None
    kv: QuantSpec | None = None
    query: QuantSpec | None = None
    probabilities: Format | None = None
    bf16_first_layers: int = 0
    bf16_last_layers: int = 0

    def __post_init__(self) -> None:
        if self.probabilities not in (None, E4M3):
            raise IsobitError(
                f"probabilities: expected E4M3, or None to leave them, got {self.probabilities}"
            )
        for role in ("weight", "activation", "query"):
            _refuse_int8(role, getattr(self, role))
        if self.kv is not None and self.kv.format is INT8 and self.kv.granularity != "row":
            raise IsobitError(
                "kv: int8 has one scale per token and head (granularity row), not "
                f"{self.kv.granularity}"
            )

    @property
    def calibrated(self) -> bool:
        """Whether keys and values have static scales, which come from a calibration."""
        return self.kv is not None and self.kv.granularity == "tensor"

    @property
    def calibrated_queries(self) -> bool:
        """Whether queries have static scales."""
        return self.query is not None and self.query.granularity == "tensor"

    def excepts(self, layer: int, num_layers: int) -> bool:
        """Return whether a layer stays in `compute`."""
        return layer < self.bf16_first_layers or layer >= num_layers - self.bf16_last_layers


@dataclass(frozen=True)
class Calibration:
    """The rule by which static scales of keys and values are found after the weights changed.

    scale = amax · `margin` / 448, with amax the `percentile` over batches of the largest magnitude
    in each. `data`: prompts (a forward of the rollout's flow over the first `prompts` of the step)
    or batch (a forward of the learner's flow over the whole batch that was learned from last; over
    those prompts before the first). `schedule`: every_step; once (by the first such data, and
    kept); or never (every scale is 1).
    """

    schedule: str = "every_step"
    data: str = "batch"
    percentile: float = 99.9
    margin: float | KVMargins = 1.05
    prompts: int = 8

    @property
    def margins(self) -> tuple[float, float, float]:
        """The margins of K, V and Q."""
        if isinstance(self.margin, KVMargins):
            return self.margin.key, self.margin.value, self.margin.query
        return (self.margin,) * 3

    @property
    def words(self) -> str:
        """The rule in the words of the options."""
        if self.schedule == "never":
            return "never: every scale is 1"
        k, v, q = self.margins
        margin = f"{k:g}" if k == v == q else f"K {k:g}, V {v:g}, Q {q:g}"
        return f"{self.schedule}, {self.data}, margin {margin}"

    @property
    def use(self) -> str:
        """The use of the model whose flow computes the forward."""
        return "learner" if self.data == "batch" else "rollout"

    def __str__(self) -> str:
        """Return the text by which a resume compares a run's rule with its own: of each step in the
        words of the releases before there were others."""
        text = (
            f"Calibration(side={self.use!r}, percentile={self.percentile}, margin={self.margin}, "
            f"prompts={self.prompts})"
        )
        return text if self.schedule == "every_step" else f"{self.schedule}: {text}"


_NOT_GIVEN = Flow()  # compared by identity, since a given flow may equal it
_WORDS = {
    name: choices(options_of(PrecisionChanges)[name].kind) for name in ("dgrad", "wgrad", "engines")
}


@dataclass(frozen=True)
class Precision:
    """The whole precision flow of a run: a preset by its name alone, `Precision("fp8")`, or your
    own flows.

    Every argument that takes a `Precision` also takes a preset's name, with options
    (`"fp8[wgrad=bf16]"`), or a mapping (`{"preset": "fp8", "wgrad": "bf16"}`). Raises IsobitError
    for an unknown preset, if no flow is given, and for an unknown word.

    `engines`: shared (one storage of weights, one set of operators), or separate (the rollout has
    its own copy of the weights, sent at every sync, and rounds like an inference engine:
    `isobit.kernels.inference_engine.definition`). `gradient` quantizes output gradients; `dgrad`
    and `wgrad` say whether those products run in `fp8` or in `bf16` (over the dequantized operands
    of the forward). `wgrad_activation`: FP8 WGrad takes the forward's codes `requantized` along the
    tokens, or an `own-copy`, quantized along the tokens in the forward from the activation itself
    (as Transformer Engine does). The linear layers named in `bf16_layers` stay in the compute
    format on both sides, in every layer. `correction` is the objective's default where rollout and
    learner are not unified, auto: token_tis; `calibration` is for a KV cache with static scales."""

    name: str
    rollout: Flow = _NOT_GIVEN
    learner: Flow = _NOT_GIVEN
    gradient: QuantSpec | None = None
    dgrad: str = "bf16"
    wgrad: str = "bf16"
    wgrad_activation: str = "requantized"
    bf16_layers: tuple[str, ...] = ()
    correction: str = "auto"
    engines: str = "shared"
    calibration: Calibration = Calibration()

    def __post_init__(self) -> None:
        _refuse_int8("gradient", self.gradient)
        if self.rollout is _NOT_GIVEN and self.learner is _NOT_GIVEN:
            self._take_preset()
        for use in ("rollout", "learner"):
            flow = getattr(self, use)
            if not isinstance(flow, Flow):
                raise IsobitError(f"precision {self.name}: {use}: expected a Flow, got {flow!r}")
        for word, known in _WORDS.items():
            if getattr(self, word) not in known:
                raise IsobitError(
                    f"precision {self.name}: {word}: expected one of {', '.join(known)}, got "
                    f"{getattr(self, word)!r}"
                )

    def _take_preset(self) -> None:
        """Take all fields from the preset of this name; no other argument may be given."""
        preset = preset_named(self.name)
        for field in fields(self):
            if (
                field.name not in ("name", "rollout", "learner")
                and getattr(self, field.name) != field.default
            ):
                raise IsobitError(
                    f"Precision({self.name!r}, {field.name}=...): a preset is changed with a "
                    "mapping, "
                    f"such as {{'preset': {self.name!r}, 'wgrad': 'bf16'}}, or give both flows"
                )
        for field in fields(self):
            object.__setattr__(self, field.name, getattr(preset, field.name))

    @property
    def calibrated(self) -> bool:
        """Whether any flow has calibrated keys and values, or queries."""
        flows = (self.rollout, self.learner)
        return any(flow.calibrated for flow in flows) or self.calibrated_queries

    @property
    def calibrated_queries(self) -> bool:
        """Whether any flow has calibrated queries."""
        return self.rollout.calibrated_queries or self.learner.calibrated_queries

    @property
    def shared(self) -> bool:
        """Whether rollout and learner run on one engine."""
        return self.engines == "shared"

    @property
    def unified(self) -> bool:
        """Whether rollout and learner are one flow on one engine, and so compute the same bits."""
        return self.shared and self.rollout == self.learner

    @property
    def default_correction(self) -> str:
        """The correction that an objective takes which names none: none of a unified flow, which
        has nothing to correct."""
        if self.unified:
            return "none"
        return "token_tis" if self.correction == "auto" else self.correction

    @property
    def fprop(self) -> str:
        return "fp8" if self.learner.activation is not None else "bf16"

    def flow(self, use: str, layer: int | None = None, num_layers: int = 0) -> Flow:
        """Return the formats of `use` ("rollout" or "learner") in one layer; `None` is everything
        outside the layers."""
        flow = self.rollout if use == "rollout" else self.learner
        if layer is None or flow.excepts(layer, num_layers):
            return Flow(flow.compute)
        return replace(flow, bf16_first_layers=0, bf16_last_layers=0)

    def linear_flow(self, flow: Flow, name: str) -> Flow:
        """Return the formats of a linear layer, one of LINEAR_LAYERS, in a layer of this flow."""
        return replace(flow, weight=None, activation=None) if name in self.bf16_layers else flow

    def backward(self, layer: int, num_layers: int) -> tuple[str, str]:
        """Return how (DGrad, WGrad) of a layer's products run: "fp8" or "bf16"."""
        if self.learner.excepts(layer, num_layers) or self.gradient is None:
            return "bf16", "bf16"
        return self.dgrad, self.wgrad

    def varies_with_batch(self) -> str | None:
        """Return why the bits of a row would depend on its batch, or None if they do not."""
        for use, flow in (("rollout", self.rollout), ("learner", self.learner)):
            spec = flow.activation
            if spec is not None and spec.granularity in (
                "tensor",
                "column",
                "128x128",
                "128x1",
                "32x1",
                "16x1",
            ):
                return (
                    f"the {use}'s activation scale is shared by the rows of a batch "
                    f"(granularity {spec.granularity})"
                )
            if spec is not None and spec.scale == "nvfp4":
                return (
                    f"the {use}'s activation scales share a number with the rows of a batch "
                    "(scale nvfp4)"
                )
        return None

    def formats(self) -> dict[str, str]:
        """Return what the flow does to every tensor, by name: a run records it, since a preset's
        name does not say it."""
        uses = (("rollout", self.rollout), ("learner", self.learner))
        table = {
            f"{use}.{role}": str(getattr(flow, role) or flow.compute)
            for use, flow in uses
            for role in _IN_A_FLOW
        }
        table |= {f"{use}.probabilities": _probabilities(flow) for use, flow in uses}
        table |= {f"{use}.{name}": str(getattr(flow, name)) for use, flow in uses for name in _ENDS}
        table["calibration"] = str(self.calibration if self.calibrated else None)
        return table | {name: str(getattr(self, name)) for name in _OF_THE_WHOLE}

    def table(self, num_layers: int | None = None, trained: str | None = None) -> str:
        """Return a plain-text table of every tensor's format in the rollout and in the learner;
        `trained`: of masters and moments, which the optimizer's settings say and no flow does."""
        rows = [("tensor", "rollout", "learner")]
        for label, role in _ROLES:
            rows.append((label, _cell(self.rollout, role), _cell(self.learner, role)))
        if self.rollout.probabilities or self.learner.probabilities:
            rows.append(
                ("probabilities", _probabilities(self.rollout), _probabilities(self.learner))
            )
        if self.calibrated:
            rows.append(("calibration", self.calibration.words, ""))
        compute = (str(self.rollout.compute), str(self.learner.compute))
        rows.append(("embedding, norms, head", *compute))
        rows.append(("residual stream", *compute))
        gradient = str(self.gradient) if self.gradient is not None else str(self.learner.compute)
        rows.append(("output gradients", "", gradient))
        for product in ("fprop", "dgrad", "wgrad"):
            value = getattr(self, product)
            if value == "fp8" and product == "wgrad":
                value = f"fp8, activations {self.wgrad_activation}"
            rows.append((product, "", str(self.learner.compute) if value == "bf16" else value))
        if trained is not None:
            rows.append(("masters, moments", "", trained))
        rows.append(("engine", *(("one", "the same") if self.shared else ("its own", "its own"))))
        flows = self.rollout, self.learner
        if any(getattr(flow, name) for flow in flows for name in _ENDS):
            of = "" if num_layers is None else f" of {num_layers}"
            rollout, learner = (
                f"first {flow.bf16_first_layers}, last {flow.bf16_last_layers}{of}: {flow.compute}"
                for flow in flows
            )
            rows.append(("excepted layers", rollout, learner))
        if self.bf16_layers:
            rows.append((", ".join(self.bf16_layers), *compute))
        widths = [max(len(row[i]) for row in rows) for i in range(3)]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip()
            for row in rows
        ]
        return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


_ROLES = (
    ("weights", "weight"),
    ("activations", "activation"),
    ("keys and values", "kv"),
    ("queries", "query"),
)
_ENDS = ("bf16_first_layers", "bf16_last_layers")
_IN_A_FLOW = tuple(field.name for field in fields(Flow) if field.name not in _ENDS)
_OF_THE_WHOLE = tuple(
    field.name
    for field in fields(Precision)
    if field.name not in ("name", "rollout", "learner", "calibration", "correction")
)


def _cell(flow: Flow, role: str) -> str:
    spec = getattr(flow, role)
    if spec is None:
        return str(flow.compute)
    if role == "kv":
        scales = "per layer, calibrated," if flow.calibrated else "per token and head"
        return f"{spec.format} {scales} {spec.scale}"
    if role == "query" and flow.calibrated_queries:
        return f"{spec.format} per layer, calibrated, {spec.scale}"
    return str(spec)


def _probabilities(flow: Flow) -> str:
    return (
        "not rounded" if flow.probabilities is None else f"{flow.probabilities} of 2^8 times each"
    )


def _fp8_flow(scale: str, kv: QuantSpec | None = None) -> Flow:
    return Flow(BF16, QuantSpec(E4M3, "128x128", scale), QuantSpec(E4M3, "1x128", scale), kv)


def _unified(name: str, scale: str, kv: QuantSpec | None = None) -> Precision:
    flow = _fp8_flow(scale, kv)
    return Precision(name, flow, flow, QuantSpec(E4M3, "1x128", scale), "fp8", "fp8")


# The cache of isobit's own presets. E4M3 at the same bytes has 5 to 20 times its error, since a
# scale for each token and head leaves few numbers near zero, where E4M3 has most of its codes
# (docs/experiments/kv-cache.md).
_CACHE = QuantSpec(INT8, "row", "fp32")
_MXFP8 = Flow(BF16, QuantSpec(E4M3, "1x32", "ue8m0"), QuantSpec(E4M3, "1x32", "ue8m0"))
_MXFP8_OWN = replace(_MXFP8, kv=_CACHE)
_NVFP4_WEIGHT = QuantSpec(E2M1, "1x16", "nvfp4")
_NVFP4 = Flow(BF16, _NVFP4_WEIGHT, QuantSpec(E2M1, "1x16", "nvfp4-row"))

_SCALED = QuantSpec(E4M3, "tensor", "fp32")
_ROLLOUT_KV = Precision(
    "fp8-rollout-kv", _fp8_flow("fp32", _SCALED), Flow(BF16), engines="separate"
)
_VLLM = KVMargins(key=448 / 200, value=448 / 100, query=448 / 200)

PRESETS: dict[str, Precision] = {
    preset.name: preset
    for preset in (
        Precision("float32", Flow(FP32), Flow(FP32)),
        Precision("bf16", Flow(BF16), Flow(BF16)),
        Precision("fp8-rollout", _fp8_flow("fp32"), Flow(BF16), engines="separate"),
        _ROLLOUT_KV,
        replace(
            _ROLLOUT_KV,
            name="fp8-rollout-kv-verl",
            calibration=Calibration(data="prompts", margin=_VLLM),
        ),
        replace(
            _ROLLOUT_KV,
            name="fp8-rollout-attention",
            rollout=replace(_ROLLOUT_KV.rollout, query=_SCALED, probabilities=E4M3),
        ),
        replace(
            _unified("fp8-e2e", "fp32"),
            correction="token_is",
            engines="separate",
            wgrad_activation="own-copy",
        ),
        _unified("fp8-unified", "fp32"),
        _unified("fp8", "ue8m0", _CACHE),
        Precision("mxfp8-rollout", _MXFP8, Flow(BF16), engines="separate"),
        Precision("nvfp4-rollout", Flow(BF16, _NVFP4_WEIGHT), Flow(BF16), engines="separate"),
        Precision("mxfp8", _MXFP8_OWN, _MXFP8_OWN, QuantSpec(E4M3, "1x32", "ue8m0"), "fp8", "fp8"),
        Precision("nvfp4", _NVFP4, _NVFP4),
    )
}
"""The named flows. Of FP8-RL in verl (arXiv 2601.18150): fp8-rollout, fp8-rollout-kv-verl, whose
scales are those of vLLM's `calculate_kv_scales`, and fp8-rollout-attention; of NeMo RL: fp8-e2e,
fp8-rollout-kv; of Jet-RL (arXiv 2601.14243): fp8-unified (docs/papers.md)."""


def preset_named(name: object) -> Precision:
    """Return the preset. Raises IsobitError for another name."""
    if not isinstance(name, str):
        raise IsobitError(
            f"precision: expected a preset's name, a mapping or a Precision, got {name!r:.80}"
        )
    if name not in PRESETS:
        hint = nearest(name.partition("[")[0], PRESETS)
        raise IsobitError(
            f"unknown precision preset {brief(name)!r}{hint}: choose from {', '.join(PRESETS)}"
        )
    return PRESETS[name]


def nearest(name: object, choices: Iterable[str]) -> str:
    """Return a hint at the choice with the most similar spelling, or an empty string."""
    close = get_close_matches(str(name), list(choices), 1)
    return f" (did you mean {close[0]!r}?)" if close else ""
