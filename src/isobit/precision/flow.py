"""`Precision`: one frozen value that says which tensor is stored and multiplied in which format.

A `Flow` describes one use of a model (rollout or learner). A `Precision` joins the two with the backward's formats and
the layers that are excepted. The presets are the rows of `docs/numerics.md`; a mapping composes any other flow.
Left out: the arithmetic itself (`isobit.kernels`) and the weights (`isobit.model`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches

from isobit.errors import IsobitError
from isobit.precision.formats import BF16, E4M3, FORMATS, FP32, Format
from isobit.precision.quantize import GRANULARITIES, SCALE_FORMATS, QuantSpec


@dataclass(frozen=True)
class Flow:
    """Formats of one use of a model. `None` means: stays in `compute`.

    `compute` is the format of activations between operators, embedding, norms and output head. `weight` and
    `activation` quantize the two operands of each linear layer, `kv` the keys and values (granularity `row`: per
    token and head).
    """

    compute: Format = BF16
    weight: QuantSpec | None = None
    activation: QuantSpec | None = None
    kv: QuantSpec | None = None


@dataclass(frozen=True)
class Precision:
    """The whole precision flow of a run.

    `gradient` quantizes output gradients; `dgrad` and `wgrad` say whether those products run in `fp8` or in `bf16`
    (over the dequantized operands of the forward). `correction` is what the objective applies by default.
    """

    name: str
    rollout: Flow = field(default_factory=Flow)
    learner: Flow = field(default_factory=Flow)
    gradient: QuantSpec | None = None
    dgrad: str = "bf16"
    wgrad: str = "bf16"
    bf16_first_layers: int = 0
    bf16_last_layers: int = 0
    correction: str = "none"

    @property
    def unified(self) -> bool:
        """Whether rollout and learner are one flow, and so compute the same bits."""
        return self.rollout == self.learner

    @property
    def fprop(self) -> str:
        return "fp8" if self.learner.activation is not None else "bf16"

    def flow(self, use: str, layer: int | None = None, num_layers: int = 0) -> Flow:
        """The formats of `use` ("rollout" or "learner") in one layer; `None` is everything outside the layers."""
        flow = self.rollout if use == "rollout" else self.learner
        if layer is None or self._excepted(layer, num_layers):
            return Flow(flow.compute)
        return flow

    def backward(self, layer: int, num_layers: int) -> tuple[str, str]:
        """How (DGrad, WGrad) of a layer's products run: "fp8" or "bf16"."""
        if self._excepted(layer, num_layers) or self.gradient is None:
            return "bf16", "bf16"
        return self.dgrad, self.wgrad

    def _excepted(self, layer: int, num_layers: int) -> bool:
        return layer < self.bf16_first_layers or layer >= num_layers - self.bf16_last_layers

    def varies_with_batch(self) -> str | None:
        """Why the bits of a row would depend on its batch, or None if they do not."""
        for use, flow in (("rollout", self.rollout), ("learner", self.learner)):
            spec = flow.activation
            if spec is not None and spec.granularity in ("tensor", "column", "128x128", "128x1"):
                return f"the {use}'s activation scale is shared by the rows of a batch (granularity {spec.granularity})"
        return None

    def table(self, num_layers: int | None = None) -> str:
        """A table, in plain text, of which tensor is in which format in the rollout and in the learner."""
        rows = [("tensor", "rollout", "learner")]
        for label, role in (("weights", "weight"), ("activations", "activation"), ("keys and values", "kv")):
            rows.append((label, _cell(self.rollout, role), _cell(self.learner, role)))
        compute = (str(self.rollout.compute), str(self.learner.compute))
        rows.append(("embedding, norms, head", *compute))
        rows.append(("residual stream", *compute))
        gradient = str(self.gradient) if self.gradient is not None else str(self.learner.compute)
        rows.append(("output gradients", "", gradient))
        for product in ("fprop", "dgrad", "wgrad"):
            value = getattr(self, product)
            rows.append((product, "", str(self.learner.compute) if value == "bf16" else value))
        rows.append(("master weights, optimizer", "", "fp32"))
        if self.bf16_first_layers or self.bf16_last_layers:
            of = "" if num_layers is None else f" of {num_layers}"
            exception = f"first {self.bf16_first_layers}, last {self.bf16_last_layers}{of}: {self.learner.compute}"
            rows.append(("excepted layers", exception, exception))
        widths = [max(len(row[i]) for row in rows) for i in range(3)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
        return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def _cell(flow: Flow, role: str) -> str:
    spec = getattr(flow, role)
    if spec is None:
        return str(flow.compute)
    return f"{spec.format} per token and head {spec.scale}" if role == "kv" else str(spec)


def _fp8_flow(scale: str, kv: bool = False) -> Flow:
    cache = QuantSpec(E4M3, "row", scale) if kv else None
    return Flow(BF16, QuantSpec(E4M3, "128x128", scale), QuantSpec(E4M3, "1x128", scale), cache)


def _unified(name: str, scale: str, kv: bool = False) -> Precision:
    flow = _fp8_flow(scale, kv)
    return Precision(name, flow, flow, QuantSpec(E4M3, "1x128", scale), "fp8", "fp8")


PRESETS: dict[str, Precision] = {
    preset.name: preset
    for preset in (
        Precision("float32", Flow(FP32), Flow(FP32)),
        Precision("bf16"),
        Precision("fp8-rollout", _fp8_flow("fp32"), Flow(BF16), correction="token_tis"),
        _unified("fp8-unified", "fp32"),
        _unified("fp8", "ue8m0", kv=True),
    )
}
"""The named flows: see `docs/numerics.md` for whose they are."""

_CHOICES: dict[str, tuple[str, ...]] = {
    "dgrad": ("fp8", "bf16"),
    "wgrad": ("fp8", "bf16"),
    "kv_cache": ("bf16", "e4m3"),
    "weight_scale": SCALE_FORMATS,
    "activation_scale": SCALE_FORMATS,
    "gradient_scale": SCALE_FORMATS,
    "activation_granularity": tuple(name for name in GRANULARITIES if name != "column"),
    "gradient_format": ("e4m3", "e5m2"),
}
_COUNTS = ("bf16_first_layers", "bf16_last_layers")


def precision_from(value: "str | Mapping[str, object] | Precision") -> Precision:
    """A preset by name, or a mapping `{preset: NAME, option: value, ...}` that changes one.

    Options: `dgrad`, `wgrad` (fp8 | bf16), `kv_cache` (bf16 | e4m3), `weight_scale`, `activation_scale`,
    `gradient_scale` (fp32 | ue8m0), `activation_granularity` (1x128 | row | tensor ...), `gradient_format` (e4m3 |
    e5m2), `bf16_first_layers`, `bf16_last_layers`. Raises IsobitError for an unknown name or a combination that cannot
    work.
    """
    if isinstance(value, Precision):
        return value
    options = {"preset": value} if isinstance(value, str) else dict(value)
    precision = _preset(options.pop("preset", "fp8"))
    for key, option in options.items():
        _check_option(key, option)
    if not options:
        return precision
    precision = _apply(precision, options)
    changes = ", ".join(f"{key}={option}" for key, option in sorted(options.items()))
    return replace(precision, name=f"{precision.name}[{changes}]")


def _preset(name: object) -> Precision:
    if isinstance(name, str) and name in PRESETS:
        return PRESETS[name]
    raise IsobitError(f"unknown precision preset {name!r}{_nearest(name, PRESETS)}: choose from {', '.join(PRESETS)}")


def _nearest(name: object, choices: "Mapping[str, object] | list[str]") -> str:
    close = get_close_matches(str(name), list(choices), 1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def _check_option(key: str, option: object) -> None:
    known = [*_CHOICES, *_COUNTS]
    if key not in known:
        raise IsobitError(
            f"precision.{key}: unknown option{_nearest(key, known)}; choose from preset, {', '.join(known)}"
        )
    if key in _COUNTS:
        if not isinstance(option, int) or isinstance(option, bool) or option < 0:
            raise IsobitError(f"precision.{key}: expected a whole number of layers, at least 0, got {option!r}")
    elif option not in _CHOICES[key]:
        raise IsobitError(f"precision.{key}: expected one of {', '.join(_CHOICES[key])}, got {option!r}")


def _apply(precision: Precision, options: Mapping[str, object]) -> Precision:
    flows = [_change_flow(flow, options, precision.name) for flow in (precision.rollout, precision.learner)]
    changed = replace(precision, rollout=flows[0], learner=flows[1])
    gradient = changed.gradient
    backward = ("dgrad", "wgrad", "gradient_scale", "gradient_format")
    if gradient is None:
        refused = [key for key in backward if key in options and options[key] != "bf16"]
        if refused:
            raise IsobitError(
                f"precision.{refused[0]}: preset {precision.name!r} has a {precision.learner.compute} learner, "
                "whose backward is not quantized; start from fp8 or fp8-unified"
            )
    else:
        gradient = replace(
            gradient,
            scale=str(options.get("gradient_scale", gradient.scale)),
            format=FORMATS[str(options.get("gradient_format", gradient.format.name))],
        )
    return replace(
        changed,
        gradient=gradient,
        dgrad=str(options.get("dgrad", changed.dgrad)),
        wgrad=str(options.get("wgrad", changed.wgrad)),
        bf16_first_layers=_count(options, "bf16_first_layers", changed.bf16_first_layers),
        bf16_last_layers=_count(options, "bf16_last_layers", changed.bf16_last_layers),
    )


def _count(options: Mapping[str, object], key: str, default: int) -> int:
    value = options.get(key, default)
    assert isinstance(value, int)
    return value


def _change_flow(flow: Flow, options: Mapping[str, object], preset: str) -> Flow:
    weight, activation, kv = flow.weight, flow.activation, flow.kv
    touched = [key for key in ("weight_scale", "activation_scale", "activation_granularity") if key in options]
    if touched and all(f.weight is None for f in (PRESETS[preset].rollout, PRESETS[preset].learner)):
        raise IsobitError(
            f"precision.{touched[0]}: preset {preset!r} quantizes no linear layer; start from an fp8 preset"
        )
    if weight is not None:
        weight = replace(weight, scale=str(options.get("weight_scale", weight.scale)))
    if activation is not None:
        activation = replace(
            activation,
            scale=str(options.get("activation_scale", activation.scale)),
            granularity=str(options.get("activation_granularity", activation.granularity)),
        )
    if options.get("kv_cache") == "bf16":
        kv = None
    elif options.get("kv_cache") == "e4m3" and kv is None:
        kv = QuantSpec(E4M3, "row", activation.scale if activation is not None else "ue8m0")
    return Flow(flow.compute, weight, activation, kv)
