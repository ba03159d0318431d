"""`precision_from`: a precision flow from a preset's name, or from a mapping that changes one.

Every option is checked here; combinations that cannot work are refused with the reason. Left out: the flows themselves.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import yaml

from isobit.data import strict_yaml
from isobit.errors import IsobitError, brief
from isobit.precision.flow import LINEAR_LAYERS, Calibration, Flow, Precision, nearest, preset_named
from isobit.precision.formats import E2M1, E4M3, FORMATS, INT8
from isobit.precision.quantize import QuantSpec

_USES = ("rollout", "learner")
_KV = {"bf16": None, "e4m3": (E4M3, "row"), "e4m3-calibrated": (E4M3, "tensor"), "int8": (INT8, "row")}
_ACTIVATIONS = ("1x128", "1x32", "row", "tensor", "128x128")
_SCALES = ("fp32", "ue8m0")
_FLOW_CHOICES: dict[str, tuple[str, ...]] = {
    "kv_cache": tuple(_KV),
    "kv_scale": _SCALES,
    "query": ("bf16", "e4m3", "e4m3-calibrated"),
    "probabilities": ("bf16", "e4m3"),
    "weight_scale": _SCALES,
    "weight_granularity": ("128x128", "1x32", "row", "tensor"),
    "activation_scale": _SCALES,
    "activation_granularity": _ACTIVATIONS,
    "activation": ("bf16",),  # of all choices that which leaves them unquantized
}
_CHOICES: dict[str, tuple[str, ...]] = _FLOW_CHOICES | {
    "dgrad": ("fp8", "bf16"),
    "wgrad": ("fp8", "bf16"),
    "wgrad_activation": ("requantized", "own-copy"),
    "gradient_scale": _SCALES,
    "gradient_granularity": ("1x128", "1x32", "row", "tensor"),
    "gradient_format": ("e4m3", "e5m2"),
    "engines": ("shared", "separate"),
    "kv_calibration": ("rollout", "learner"),
}
_PLAIN = "activation"
_COUNTS = ("bf16_first_layers", "bf16_last_layers")
_NAMES = "bf16_layers"
_NUMBERS: dict[str, tuple[Callable[[float], bool], str]] = {
    "kv_percentile": (lambda value: 0 < value <= 100, "a percentage above 0, at most 100"),
    "kv_margin": (lambda value: value > 0, "a factor above 0, such as 1.05"),
    "kv_calibration_prompts": (lambda value: value >= 1 and value == int(value), "a whole number, at least 1"),
}
OPTIONS = (*_CHOICES, *_COUNTS, _NAMES, *_NUMBERS, *_USES)
"""What a mapping may hold besides `preset`."""
_TEXTS = {
    "kv_cache": "keys and values in the cache; e4m3 and int8 with a scale per token and head, e4m3-calibrated with one "
    "per layer for K and one for V",
    "kv_scale": "their scales: any float32, or powers of two",
    "query": "queries, before they meet the keys; e4m3 with a scale per token and head, e4m3-calibrated per layer",
    "probabilities": "of attention, before they meet the values; bf16 leaves them as they are computed",
    "weight_scale": "scales of the weights of linear layers",
    "weight_granularity": "what of a weight has one scale: a block, a row, all of it",
    "activation_scale": "scales of what linear layers multiply their weights by",
    "activation_granularity": "what of an activation has one scale",
    "activation": "bf16 leaves activations unquantized; where the backward is not quantized",
    "dgrad": "the product that gives the gradient of an activation",
    "wgrad": "the product that gives the gradient of a weight",
    "wgrad_activation": "what FP8 WGrad reads: the forward's codes, requantized along the tokens, or a copy of the "
    "activation, quantized so in the forward",
    "gradient_scale": "scales of output gradients",
    "gradient_granularity": "what of an output gradient has one scale",
    "gradient_format": "output gradients",
    "engines": "one storage and one set of operators for both sides, or a rollout with an engine of its own",
    "kv_calibration": "whose forward the scales of e4m3-calibrated come from",
    "bf16_first_layers": "so many layers stay in BF16 on both sides, from the first",
    "bf16_last_layers": "so many, up to the last",
    "bf16_layers": "these linear layers stay in BF16 on both sides, in every layer",
    "kv_percentile": "of the largest magnitudes of several forwards, the one that is taken",
    "kv_margin": "a calibrated scale is so much larger than it needs to be",
    "kv_calibration_prompts": "prompts of a step that the rollout's calibration reads",
    "rollout": "the options down to `activation`, for the rollout alone",
    "learner": "the same for the learner",
}


def described() -> list[tuple[str, str, str]]:
    """Each option, what it may be, and what it is for, in words."""
    values = {name: " | ".join(choices) for name, choices in _CHOICES.items()}
    values |= {name: wanted for name, (_, wanted) in _NUMBERS.items()}
    values |= dict.fromkeys(_COUNTS, "a number of layers") | dict.fromkeys(_USES, "a mapping")
    values[_NAMES] = f"some of {', '.join(LINEAR_LAYERS)}"
    return [(name, values[name], text) for name, text in _TEXTS.items()]


def precision_from(value: "str | Mapping[str, object] | Precision") -> Precision:
    """A preset by name, or a mapping `{preset: NAME, option: value, ...}` that changes one.

    The options and their values are in docs/config.md, from `described`; most may also stand under `rollout` or
    `learner`, for one side alone. The name of the result, such as `fp8[wgrad=bf16]`, is accepted in place of the
    mapping.

    Raises IsobitError for an unknown name or a combination that cannot work.
    """
    if isinstance(value, Precision):
        return value
    if not isinstance(value, (str, Mapping)):
        raise IsobitError(
            f"precision: expected a preset's name, such as 'fp8', a mapping or a Precision, got {value!r:.80}"
        )
    options = _given(value)
    precision = preset_named(options.pop("preset", "fp8"))
    for key, option in options.items():
        _check_option(key, option)
    if not options:
        return precision
    precision = _apply(precision, options)
    changes = ", ".join(f"{key}={_text(option)}" for key, option in sorted(options.items()))
    return replace(precision, name=f"{precision.name}[{changes}]")


def _given(value: str | Mapping[str, object]) -> dict[str, object]:
    """The options of a name, or of a mapping, whose preset may be one that is changed: `fp8[wgrad=bf16]`."""
    if isinstance(value, str):
        return _parse_name(value)
    preset = value.get("preset")
    if not isinstance(preset, str):
        return dict(value)
    return _parse_name(preset) | {key: option for key, option in value.items() if key != "preset"}


def _parse_name(name: str) -> dict[str, object]:
    """`preset[key=value, key=value]` as a mapping; a plain name is its preset."""
    preset, bracket, rest = name.partition("[")
    if not bracket:
        return {"preset": name}
    if not rest.endswith("]"):
        raise IsobitError(f"precision {brief(name)!r}: no ] at its end; expected PRESET[option=value, option=value]")
    try:
        options = strict_yaml.load("{" + rest[:-1].replace("=", ": ") + "}")
    except strict_yaml.DuplicateKey as error:
        raise IsobitError(f"precision {brief(name)!r}: option {brief(error.key)!r} comes twice; leave one") from None
    except yaml.YAMLError:
        raise IsobitError(f"precision {brief(name)!r}: expected PRESET[option=value, option=value]") from None
    return {"preset": preset, **options}


def _text(option: object) -> str:
    if isinstance(option, Mapping):
        return "{" + ", ".join(f"{key}={_text(value)}" for key, value in sorted(option.items())) + "}"
    if isinstance(option, (list, tuple)):
        return f"[{', '.join(map(str, option))}]"
    return str(option)


def _check_option(key: str, option: object, within: str = "") -> None:
    known = list(_FLOW_CHOICES) if within else [*OPTIONS]
    where = f"precision.{within}{brief(key)}"
    if key not in known:
        also = "" if within else "preset, "
        raise IsobitError(f"{where}: unknown option{nearest(key, known)}; choose from {also}{', '.join(known)}")
    if key in _USES:
        if not isinstance(option, Mapping):
            raise IsobitError(f"{where}: expected a mapping of options, such as {{kv_cache: e4m3}}, got {option!r:.80}")
        for inner, value in option.items():
            _check_option(inner, value, f"{key}.")
    elif key in _COUNTS:
        if not isinstance(option, int) or isinstance(option, bool) or option < 0:
            raise IsobitError(f"{where}: expected a whole number of layers, at least 0, got {option!r:.80}")
    elif key == _NAMES:
        names = _names(option)
        if not names or not set(names) <= set(LINEAR_LAYERS):
            raise IsobitError(
                f"{where}: expected some of {', '.join(LINEAR_LAYERS)}, such as [o, down], got {option!r:.80}"
            )
    elif key in _NUMBERS:
        fits, wanted = _NUMBERS[key]
        if not isinstance(option, (int, float)) or isinstance(option, bool) or not fits(option):
            raise IsobitError(f"{where}: expected {wanted}, got {option!r:.80}")
    elif option not in _CHOICES[key]:
        raise IsobitError(f"{where}: expected one of {', '.join(_CHOICES[key])}, got {option!r:.80}")


def _names(option: object) -> tuple[str, ...]:
    """Linear layers named by one name or several, in their order; none if any of these is unknown."""
    given = [option] if isinstance(option, str) else list(option) if isinstance(option, (list, tuple)) else []
    return tuple(name for name in LINEAR_LAYERS if name in given) if set(given) <= set(LINEAR_LAYERS) else ()


def _apply(precision: Precision, options: Mapping[str, Any]) -> Precision:
    flows = {use: getattr(precision, use) for use in _USES}
    linear = any(flow.weight is not None for flow in flows.values())
    if _NAMES in options and not linear:
        raise IsobitError(
            f"precision.{_NAMES}: preset {precision.name!r} quantizes no linear layer; start from an fp8 preset"
        )
    for use in _USES:
        own = {**options, **options.get(use, {})}
        if _PLAIN in own:
            _check_plain(precision, own)
        flows[use] = _change_flow(flows[use], own, precision.name, linear)
    changed = replace(precision, **flows)
    changed = replace(
        changed,
        gradient=_gradient(changed, options),
        dgrad=options.get("dgrad", changed.dgrad),
        wgrad=options.get("wgrad", changed.wgrad),
        wgrad_activation=options.get("wgrad_activation", changed.wgrad_activation),
        engines=options.get("engines", changed.engines),
        bf16_first_layers=options.get("bf16_first_layers", changed.bf16_first_layers),
        bf16_last_layers=options.get("bf16_last_layers", changed.bf16_last_layers),
        bf16_layers=_names(options.get(_NAMES, ())),
    )
    if options.get("wgrad_activation") == "own-copy" and changed.wgrad != "fp8":
        raise IsobitError("precision.wgrad_activation: own-copy is for a WGrad in FP8; set wgrad: fp8")
    return replace(changed, calibration=_calibration(changed, options))


def _check_plain(precision: Precision, options: Mapping[str, Any]) -> None:
    """Raise IsobitError where activations cannot stay in the compute format."""
    if precision.gradient is not None:
        raise IsobitError(
            f"precision.{_PLAIN}: bf16 is for flows whose backward is not quantized, such as nvfp4; "
            f"{precision.name} quantizes gradients"
        )
    if beside := [key for key in options if key.startswith("activation_")]:
        raise IsobitError(f"precision.{beside[0]}: activations stay in bf16, by precision.{_PLAIN}; leave one out")


def _gradient(precision: Precision, options: Mapping[str, Any]) -> QuantSpec | None:
    given = precision.gradient
    if given is None:
        backward = ("dgrad", "wgrad", "wgrad_activation", "gradient_scale", "gradient_granularity", "gradient_format")
        refused = [key for key in backward if key in options and options[key] != "bf16"]
        if refused:
            raise IsobitError(
                f"precision.{refused[0]}: preset {precision.name!r} has a {precision.learner.compute} learner, "
                "whose backward is not quantized; start from fp8, fp8-unified or fp8-e2e"
            )
        return None
    return replace(
        given,
        scale=options.get("gradient_scale", given.scale),
        granularity=options.get("gradient_granularity", given.granularity),
        format=FORMATS[options.get("gradient_format", given.format.name)],
    )


def _calibration(precision: Precision, options: Mapping[str, Any]) -> Calibration:
    given = [key for key in ("kv_calibration", *_NUMBERS) if key in options]
    if given and not precision.calibrated:
        raise IsobitError(
            f"precision.{given[0]}: there is no calibrated KV cache; set kv_cache: e4m3-calibrated, or start from "
            "fp8-rollout-kv"
        )
    default = precision.calibration
    return Calibration(
        options.get("kv_calibration", default.side),
        float(options.get("kv_percentile", default.percentile)),
        float(options.get("kv_margin", default.margin)),
        int(options.get("kv_calibration_prompts", default.prompts)),
    )


def _change_flow(flow: Flow, options: Mapping[str, Any], preset: str, linear: bool) -> Flow:
    """Quantized operands as the options say; a plain operand stays plain."""
    touched = [key for key in options if key.startswith(("weight_", "activation"))]
    if touched and not linear:
        raise IsobitError(
            f"precision.{touched[0]}: preset {preset!r} quantizes no linear layer; start from an fp8 preset"
        )
    weight, activation = (
        None if spec is None else _change_spec(spec, options, role)
        for spec, role in ((flow.weight, "weight"), (flow.activation, "activation"))
    )
    activation = None if _PLAIN in options else activation
    kv, query = flow.kv, flow.query
    if "kv_cache" in options:
        kv = _kv_spec(options["kv_cache"], kv, activation)
    if "kv_scale" in options:
        if kv is None:
            raise IsobitError(f"precision.kv_scale: preset {preset!r} caches keys and values in {flow.compute}")
        kv = replace(kv, scale=options["kv_scale"])
    if "query" in options:  # per row a power of two: the value of a code is then exact in BF16
        kinds = {"e4m3": QuantSpec(E4M3, "row", "ue8m0"), "e4m3-calibrated": QuantSpec(E4M3, "tensor", "fp32")}
        query = kinds.get(options["query"])
    probabilities = flow.probabilities
    if "probabilities" in options:
        probabilities = {"e4m3": E4M3}.get(options["probabilities"])
    return Flow(flow.compute, weight, activation, kv, query, probabilities)


def _kv_spec(name: str, before: QuantSpec | None, activation: QuantSpec | None) -> QuantSpec | None:
    """Scales of E4M3 are those of an E4M3 cache before, else those of activations. INT8 has float32 ones: its numbers
    have no exponent, so a power of two would leave up to half of them unused."""
    if (chosen := _KV[name]) is None:
        return None
    scale = activation.scale if activation is not None and activation.scale in _SCALES else "ue8m0"
    scale = before.scale if before is not None and before.format is E4M3 else scale
    return QuantSpec(*chosen, "fp32" if chosen[0] is INT8 else scale)


def _change_spec(spec: QuantSpec, options: Mapping[str, Any], role: str) -> QuantSpec:
    if spec.format is E2M1 and (given := [key for key in options if key.startswith(f"{role}_")]):
        raise IsobitError(f"precision.{given[0]}: NVFP4 has its own blocks and scales; start from an fp8 preset")
    return replace(
        spec,
        scale=options.get(f"{role}_scale", spec.scale),
        granularity=options.get(f"{role}_granularity", spec.granularity),
    )
