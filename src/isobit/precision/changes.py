"""`precision_from`: a precision flow from a preset's name, or from a mapping that changes one.

The options are declared in `options/precisions.py`; here is what they do, and the reason
where a combination of them cannot work. Left out: the flows themselves.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import yaml

from isobit.data import strict_yaml
from isobit.errors import IsobitError, brief
from isobit.options.declare import options_of
from isobit.options.precisions import FlowChanges, PrecisionChanges
from isobit.options.reading import read, renamed
from isobit.precision.flow import LINEAR_LAYERS, Calibration, Flow, Precision, preset_named
from isobit.precision.formats import E2M1, E4M3, FORMATS, INT8
from isobit.precision.quantize import QuantSpec

_KV = {"e4m3": (E4M3, "row"), "e4m3-calibrated": (E4M3, "tensor"), "int8": (INT8, "row")}
# of a query per row a power of two: the value of a code is then exact in BF16
_QUERY = {
    "e4m3": QuantSpec(E4M3, "row", "ue8m0"),
    "e4m3-calibrated": QuantSpec(E4M3, "tensor", "fp32"),
}


def precision_from(value: "str | Mapping[str, object] | Precision") -> Precision:
    """Return a preset by name, or a mapping `{preset: NAME, option: value, ...}` that changes one.

    The options are those of `PrecisionChanges`. The name of the result, such as `fp8[wgrad=bf16]`,
    is accepted in place of the mapping.

    Raises IsobitError for an unknown name or option and for a combination that cannot work.
    """
    if isinstance(value, Precision):
        return value
    if not isinstance(value, (str, Mapping)):
        raise IsobitError(
            "precision: expected a preset's name, such as 'fp8', a mapping or a Precision, got "
            f"{value!r:.80}"
        )
    known = options_of(PrecisionChanges)  # of another `read` says that it is unknown, null too
    options = {
        k: option for k, option in _given(value).items() if option is not None or k not in known
    }
    options = dict(renamed(options, known, ("precision",)))
    changes = read(PrecisionChanges, options, ("precision",))
    precision = preset_named(changes.preset)
    options.pop("preset", None)
    if not options:
        return precision
    words = ", ".join(f"{key}={_text(option)}" for key, option in sorted(options.items()))
    return replace(_changed(precision, changes), name=f"{precision.name}[{words}]")


def _given(value: str | Mapping[str, object]) -> dict[str, object]:
    """Return the options of a name, or of a mapping, whose preset may be one that is changed:
    `fp8[wgrad=bf16]`."""
    if isinstance(value, str):
        return _parse_name(value)
    preset = value.get("preset")
    if not isinstance(preset, str):
        return dict(value)
    return _parse_name(preset) | {key: option for key, option in value.items() if key != "preset"}


def _parse_name(name: str) -> dict[str, object]:
    """Return `preset[key=value, key=value]` as a mapping; a plain name is its preset."""
    preset, bracket, rest = name.partition("[")
    if not bracket:
        return {"preset": name}
    if not rest.endswith("]"):
        raise IsobitError(
            f"precision {brief(name)!r}: no ] at its end; expected PRESET[option=value, "
            "option=value]"
        )
    try:
        options = strict_yaml.load("{" + rest[:-1].replace("=", ": ") + "}")
    except strict_yaml.DuplicateKey as error:
        raise IsobitError(
            f"precision {brief(name)!r}: option {brief(error.key)!r} comes twice; leave one"
        ) from None
    except yaml.YAMLError:
        raise IsobitError(
            f"precision {brief(name)!r}: expected PRESET[option=value, option=value]"
        ) from None
    for key, option in options.items():
        if option is None:
            raise IsobitError(
                f"precision {brief(name)!r}: {brief(key)!r} has no value; expected "
                "PRESET[option=value, option=value]"
            )
    return {"preset": preset, **options}


def _text(option: object) -> str:
    if isinstance(option, Mapping):
        return (
            "{" + ", ".join(f"{key}={_text(value)}" for key, value in sorted(option.items())) + "}"
        )
    if isinstance(option, (list, tuple)):
        return f"[{', '.join(map(str, option))}]"
    return str(option)


def _changed(precision: Precision, changes: PrecisionChanges) -> Precision:
    linear = precision.rollout.weight is not None or precision.learner.weight is not None
    if changes.bf16_layers is not None and not linear:
        raise IsobitError(
            f"precision.bf16_layers: preset {precision.name!r} quantizes no linear layer; start "
            "from an fp8 preset"
        )
    of_rollout = _of_rollout(precision, changes)
    flows: dict[str, Any] = {}
    for use in ("rollout", "learner"):
        options = _over(changes, getattr(changes, use), () if use == "rollout" else of_rollout)
        if use == "learner" and (options.activation or options.weight):
            _check_plain(precision)
        flows[use] = _change_flow(getattr(precision, use), options, precision.name, linear)
    names = ("dgrad", "wgrad", "wgrad_activation", "engines")
    plain: dict[str, Any] = {
        name: getattr(changes, name) for name in names if getattr(changes, name) is not None
    }
    layers = tuple(name for name in LINEAR_LAYERS if name in (changes.bf16_layers or ()))
    changed = replace(precision, **flows, **plain, bf16_layers=layers)
    changed = replace(changed, gradient=_gradient(changed, changes))
    if changes.wgrad_activation == "own-copy" and changed.wgrad != "fp8":
        raise IsobitError(
            "precision.wgrad_activation: own-copy is for a WGrad in FP8; set wgrad: fp8"
        )
    return replace(changed, calibration=_calibration(changed, changes))


def _of_rollout(precision: Precision, changes: PrecisionChanges) -> tuple[str, ...]:
    """Return the options that, said of both sides, change the rollout alone: of attention, where
    the rollout has its own engine and the preset's learner quantizes nothing in attention."""
    learner = precision.learner
    plain = learner.kv is None and learner.query is None and learner.probabilities is None
    if plain and (changes.engines or precision.engines) == "separate":
        return "kv_cache", "kv_scale", "query", "probabilities"
    return ()


def _over(both: FlowChanges, side: FlowChanges, without: Sequence[str]) -> FlowChanges:
    """Return the changes of a side: its own, then those of both sides, except `without`."""
    values = {option.name: getattr(side, option.name) for option in fields(FlowChanges)}
    for name, value in values.items():
        if value is None and name not in without:
            values[name] = getattr(both, name)
    return FlowChanges(**values)


def _asked(changes: FlowChanges, *prefixes: str) -> list[str]:
    """Return the options that are set and whose names begin with one of these prefixes."""
    names = [field.name for field in fields(changes) if field.name.startswith(prefixes)]
    return [name for name in names if getattr(changes, name) is not None]


def _check_plain(precision: Precision) -> None:
    """Raise IsobitError where a learner's operands cannot stay in the compute format."""
    if precision.gradient is not None:
        raise IsobitError(
            "precision.activation, precision.weight: bf16 is for flows whose backward is not "
            f"quantized, such as nvfp4; {precision.name} quantizes gradients; for the rollout "
            "alone: rollout: {weight: bf16, activation: bf16}"
        )


def _gradient(precision: Precision, changes: PrecisionChanges) -> QuantSpec | None:
    spec = precision.gradient
    if spec is None:
        options = _asked(changes, "dgrad", "wgrad", "gradient_")
        if refused := [name for name in options if getattr(changes, name) != "bf16"]:
            raise IsobitError(
                f"precision.{refused[0]}: preset {precision.name!r} has a "
                f"{precision.learner.compute} learner, "
                "whose backward is not quantized; start from fp8, fp8-unified or fp8-e2e"
            )
        return None
    return QuantSpec(
        FORMATS[changes.gradient_format or spec.format.name],
        changes.gradient_granularity or spec.granularity,
        changes.gradient_scale or spec.scale,
    )


def _calibration(precision: Precision, changes: PrecisionChanges) -> Calibration:
    names = {
        "schedule": "kv_calibration",
        "data": "kv_calibration_data",
        "percentile": "kv_percentile",
        "margin": "kv_margin",
        "prompts": "kv_calibration_prompts",
    }
    options: dict[str, Any] = {field: getattr(changes, name) for field, name in names.items()}
    options = {field: value for field, value in options.items() if value is not None}
    if options and not precision.calibrated:
        raise IsobitError(
            f"precision.{names[next(iter(options))]}: there is no calibrated KV cache; set kv_cache: "
            "e4m3-calibrated, or start from fp8-rollout-kv"
        )
    if options.get("schedule") == "never" and len(options) > 1:
        raise IsobitError(
            f"precision.{names[list(options)[1]]}: under kv_calibration: never every scale is 1; "
            "leave it out"
        )
    return replace(precision.calibration, **options)


def _change_flow(flow: Flow, changes: FlowChanges, preset: str, linear: bool) -> Flow:
    """Return a flow with quantized operands as the options say; a plain operand stays plain."""
    if (options := _asked(changes, "weight", "activation")) and not linear:
        raise IsobitError(
            f"precision.{options[0]}: preset {preset!r} quantizes no linear layer; start from an "
            "fp8 preset"
        )
    weight = _change_spec(flow.weight, changes, "weight")
    activation = _change_spec(flow.activation, changes, "activation")
    if activation is not None and changes.weight is not None:
        raise IsobitError(
            "precision.weight: bf16 needs activations in bf16: give activation: bf16 beside it"
        )
    kv = flow.kv if changes.kv_cache is None else _kv_spec(changes.kv_cache, flow.kv, activation)
    if changes.kv_scale is not None:
        if kv is None:
            raise IsobitError(
                f"precision.kv_scale: preset {preset!r} caches keys and values in {flow.compute}"
            )
        if kv.granularity == "tensor" and changes.kv_scale != "fp32":
            raise IsobitError(
                f"precision.kv_scale: a calibrated scale is a float32, not {changes.kv_scale}: "
                "leave it out, or take kv_cache: e4m3"
            )
        kv = replace(kv, scale=changes.kv_scale)
    query = flow.query if changes.query is None else _QUERY.get(changes.query)
    probabilities = flow.probabilities
    if changes.probabilities is not None:
        probabilities = {"e4m3": E4M3}.get(changes.probabilities)
    first, last = changes.bf16_first_layers, changes.bf16_last_layers
    return Flow(
        flow.compute,
        weight,
        activation,
        kv,
        query,
        probabilities,
        flow.bf16_first_layers if first is None else first,
        flow.bf16_last_layers if last is None else last,
    )


def _kv_spec(name: str, before: QuantSpec | None, activation: QuantSpec | None) -> QuantSpec | None:
    """Return the format of a KV cache under the options.

    Scales of E4M3 by token are those of an E4M3 cache before, else those of activations. A
    calibrated scale is a float32, and so is INT8's: its numbers have no exponent, so a power of two
    would leave up to half of them unused.
    """
    if name == "bf16":
        return None
    number, granularity = _KV[name]
    if number is INT8 or granularity == "tensor":
        return QuantSpec(number, granularity, "fp32")
    scale = (
        activation.scale
        if activation is not None and activation.scale in ("fp32", "ue8m0")
        else "ue8m0"
    )
    scale = before.scale if before is not None and before.format is E4M3 else scale
    return QuantSpec(number, granularity, scale)


def _change_spec(spec: QuantSpec | None, changes: FlowChanges, role: str) -> QuantSpec | None:
    scale, granularity = f"{role}_scale", f"{role}_granularity"
    if getattr(changes, role) is not None:  # bf16
        if beside := _asked(changes, scale, granularity):
            raise IsobitError(
                f"precision.{beside[0]}: {role}s stay in bf16, by precision.{role}; leave one out"
            )
        return None
    if spec is None:
        return None
    if spec.format is E2M1 and (options := _asked(changes, scale, granularity)):
        raise IsobitError(
            f"precision.{options[0]}: NVFP4 has its own blocks and scales; start from an fp8 preset"
        )
    return replace(
        spec,
        scale=getattr(changes, scale) or spec.scale,
        granularity=getattr(changes, granularity) or spec.granularity,
    )
