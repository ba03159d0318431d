"""Presets, composition, exceptions by layer, and the messages for what cannot work."""

import dataclasses
import re
from collections.abc import Callable

import pytest

from isobit.errors import IsobitError
from isobit.options.declare import choices, options_of
from isobit.options.precisions import PrecisionChanges
from isobit.options.reading import OptionError, read
from isobit.precision import (
    BF16,
    E2M1,
    E4M3,
    E5M2,
    INT8,
    PRESETS,
    Precision,
    QuantSpec,
    precision_from,
)
from isobit.precision.flow import LINEAR_LAYERS, Flow
from isobit.precision.quantize import GRANULARITIES


def test_presets_are_what_the_design_says() -> None:
    calibrated = ["fp8-rollout-kv", "fp8-rollout-kv-verl", "fp8-rollout-attention"]
    rollouts = ["fp8-rollout", *calibrated]
    designed = ["float32", "bf16", *rollouts, "fp8-e2e", "fp8-unified", "fp8"]
    assert list(PRESETS) == [*designed, "mxfp8-rollout", "nvfp4-rollout", "mxfp8", "nvfp4"]
    two_engines = [*rollouts, "fp8-e2e", "mxfp8-rollout", "nvfp4-rollout"]
    assert [name for name, preset in PRESETS.items() if not preset.shared] == two_engines
    assert [name for name, preset in PRESETS.items() if preset.calibrated] == calibrated
    for name, preset in PRESETS.items():
        wanted = "token_tis" if name in two_engines else "none"
        assert preset.default_correction == ("token_is" if name == "fp8-e2e" else wanted)
    assert (
        PRESETS["fp8-e2e"].rollout == PRESETS["fp8-e2e"].learner == PRESETS["fp8-unified"].learner
    )
    assert not PRESETS["fp8-e2e"].unified
    assert PRESETS["fp8"].unified
    assert PRESETS["fp8-unified"].unified
    assert not PRESETS["fp8-rollout"].unified
    fp8 = PRESETS["fp8"].rollout
    assert {spec.scale for spec in (fp8.weight, fp8.activation) if spec} == {"ue8m0"}
    assert fp8.kv == PRESETS["mxfp8"].rollout.kv == QuantSpec(INT8, "row", "fp32")
    assert PRESETS["fp8-unified"].rollout.kv is None


def test_every_option_is_described() -> None:
    """And each value that is offered can be read; the control is one that is not offered."""
    for name, option in options_of(PrecisionChanges).items():
        assert option.text
        for value in choices(option.kind):
            given = [value] if name == "bf16_layers" else value
            read(PrecisionChanges, {name: given})
            with pytest.raises(OptionError, match=rf"{name}\S*: expected .*got '{value}2'"):
                read(PrecisionChanges, {name: f"{value}2"})


def test_an_option_that_is_null_is_not_given() -> None:
    assert precision_from({"preset": "fp8", "wgrad": None}) == PRESETS["fp8"]


def test_a_precision_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        PRESETS["fp8"].dgrad = "bf16"  # type: ignore[misc]


def test_excepted_layers_stay_in_bf16_on_both_sides() -> None:
    precision = precision_from({"preset": "fp8", "bf16_first_layers": 1, "bf16_last_layers": 2})
    quantized = [precision.flow("rollout", layer, 6).weight is not None for layer in range(6)]
    assert quantized == [False, True, True, True, False, False]
    assert [
        precision.flow("learner", layer, 6) == precision.flow("rollout", layer, 6)
        for layer in range(6)
    ]
    assert precision.backward(0, 6) == ("bf16", "bf16")
    assert precision.backward(1, 6) == ("fp8", "fp8")


@pytest.mark.parametrize("given", [["down", "o"], ("o", "down"), ["o", "down", "o"]])
def test_named_linear_layers_stay_in_bf16_on_both_sides(given: object) -> None:
    precision = precision_from({"preset": "fp8", "bf16_layers": given})
    assert precision.bf16_layers == ("o", "down")
    assert precision.unified
    for name in LINEAR_LAYERS:
        flow = precision.linear_flow(precision.rollout, name)
        assert (flow.weight is None) == (flow.activation is None) == (name in ("o", "down"))
        assert flow.kv == precision.rollout.kv
    assert "o, down" in precision.table()
    assert precision_from(precision.name) == precision
    assert precision_from("fp8[bf16_layers=o]").bf16_layers == ("o",)


def test_options_change_one_thing() -> None:
    precision = precision_from(
        {"preset": "fp8", "wgrad": "bf16", "kv_cache": "bf16", "activation_scale": "fp32"}
    )
    assert precision.wgrad == "bf16"
    assert precision.dgrad == "fp8"
    assert precision.rollout.kv is None
    assert precision.rollout.activation is not None
    assert precision.rollout.activation.scale == "fp32"
    assert precision.rollout.weight == PRESETS["fp8"].rollout.weight
    assert precision.unified
    assert "wgrad=bf16" in precision.name


def test_the_name_of_a_changed_preset_is_accepted_in_its_place() -> None:
    given = {
        "preset": "fp8",
        "wgrad": "bf16",
        "kv_margin": 1.5,
        "rollout": {"kv_cache": "e4m3-calibrated"},
    }
    precision = precision_from(given)
    assert precision.name == "fp8[kv_margin=1.5, rollout={kv_cache=e4m3-calibrated}, wgrad=bf16]"
    assert precision_from(precision.name) == precision


def test_options_of_one_side_change_that_side_only() -> None:
    precision = precision_from({"preset": "fp8", "rollout": {"activation_scale": "fp32"}})
    assert precision.learner == PRESETS["fp8"].learner
    assert precision.rollout.activation is not None
    assert precision.rollout.activation.scale == "fp32"
    assert not precision.unified


def test_first_and_last_layers_of_the_rollout_alone_may_stay_in_bf16() -> None:
    """As NeMo RL's `num_first_layers_in_bf16`, which is of the generation. The control: said of
    both sides, both have it, and it is one flow still."""
    one = precision_from({"preset": "fp8-e2e", "rollout": {"bf16_first_layers": 1}})
    assert [one.flow(use, 0, 3).weight is None for use in ("rollout", "learner")] == [True, False]
    assert one.flow("rollout", 1, 3) == one.flow("learner", 1, 3) == one.flow("learner", 0, 3)
    assert one.backward(0, 3) == ("fp8", "fp8")
    assert re.search(
        r"excepted layers +first 1, last 0 of 3: bf16 +first 0, last 0 of 3", one.table(3)
    )
    assert one.formats()["rollout.bf16_first_layers"] == "1"
    assert one.formats()["learner.bf16_first_layers"] == "0"
    both = precision_from("fp8[bf16_first_layers=1]")
    assert both.unified
    assert not precision_from("fp8[rollout={bf16_first_layers: 1}]").unified
    assert precision_from("fp8[bf16_last_layers=2, learner={bf16_last_layers: 1}]").backward(
        1, 3
    ) == ("fp8", "fp8")


def test_a_rollout_in_bf16_of_a_learner_in_fp8() -> None:
    """NeMo RL's fourth recipe. The control: the learner's operands cannot be in BF16 where its
    gradients are quantized."""
    precision = precision_from("fp8-e2e[rollout={weight: bf16, activation: bf16}]")
    preset = PRESETS["fp8-e2e"]
    assert precision.rollout == Flow(BF16)
    assert dataclasses.replace(precision, name=preset.name, rollout=preset.rollout) == preset
    assert precision_from(precision.name) == precision
    assert precision_from("fp8-e2e[rollout={activation: bf16}]").rollout.weight is not None
    for given, message in (
        ("fp8-e2e[weight=bf16, activation=bf16]", "for the rollout alone: rollout: {weight: bf16"),
        ("fp8[learner={weight: bf16, activation: bf16}]", "fp8 quantizes gradients"),
        ("fp8-e2e[rollout={weight: bf16}]", "weight: bf16 needs activations in bf16"),
        (
            "fp8-rollout[weight=bf16, activation=bf16, weight_scale=ue8m0]",
            "precision.weight_scale: weights stay in bf16, by precision.weight; leave one out",
        ),
        ("bf16[weight=bf16]", "no linear layer"),
    ):
        with pytest.raises(IsobitError, match=re.escape(message)):
            precision_from(given)


@pytest.mark.parametrize(
    "preset",
    ["fp8-rollout", "fp8-rollout-kv", "fp8-e2e", "mxfp8-rollout", "bf16[engines=separate]"],
)
@pytest.mark.parametrize(
    ("option", "value", "field"),
    [
        ("kv_cache", "int8", "kv"),
        ("kv_cache", "e4m3", "kv"),
        ("query", "e4m3-calibrated", "query"),
        ("probabilities", "e4m3", "probabilities"),
    ],
)
def test_options_of_attention_change_the_rollout_alone_where_its_learner_has_none(
    preset: str, option: str, value: str, field: str
) -> None:
    """Where the rollout has its own engine, and the table shows it. The controls: one engine, a
    learner that is named, and a learner with a quantized cache of its own."""
    before, after = precision_from(preset), precision_from({"preset": preset, option: value})
    assert getattr(after.rollout, field) not in (None, getattr(before.rollout, field))
    assert after.learner == before.learner
    row = {"kv": "keys and values", "query": "queries"}.get(field, field)
    label = "not rounded" if field == "probabilities" else "bf16"
    assert re.search(rf"^{row} +(e4m3|int8) .* {label}$", after.table(), re.MULTILINE)
    named = precision_from({"preset": preset, "learner": {option: value}})
    assert named.rollout == before.rollout
    assert getattr(named.learner, field) is not None
    one = precision_from({"preset": "fp8-unified", option: value})
    assert one.unified
    assert getattr(one.learner, field) is not None
    own = precision_from({"preset": "fp8", "engines": "separate", option: value})
    assert own.rollout == own.learner


def test_a_calibrated_scale_is_a_float32() -> None:
    """Whatever the scales of the preset's activations are; the control is a scale by token."""
    for preset in ("bf16", "bf16[engines=separate]", "fp8", "nvfp4", "mxfp8-rollout"):
        kv = precision_from({"preset": preset, "kv_cache": "e4m3-calibrated"}).rollout.kv
        assert kv == QuantSpec(E4M3, "tensor", "fp32")
    by_token = precision_from("fp8[kv_cache=e4m3, kv_scale=ue8m0]").rollout.kv
    assert by_token == QuantSpec(E4M3, "row", "ue8m0")
    with pytest.raises(IsobitError, match="kv_scale: a calibrated scale is a float32, not ue8m0"):
        precision_from("fp8[kv_cache=e4m3-calibrated, kv_scale=ue8m0]")
    precision_from("fp8[kv_cache=e4m3-calibrated, kv_scale=fp32]")


@pytest.mark.parametrize(
    "option", ["kv_margin=2", "kv_calibration_data=prompts", "kv_percentile=50"]
)
def test_what_a_scale_of_1_would_not_heed_is_refused(option: str) -> None:
    """The controls: never alone, also of a preset with margins of its own, and the option alone."""
    key = option.partition("=")[0]
    with pytest.raises(IsobitError, match=f"precision.{key}: under kv_calibration: never"):
        precision_from(f"fp8-rollout-kv[{option}, kv_calibration=never]")
    precision_from("fp8-rollout-kv-verl[kv_calibration=never]")
    precision_from(f"fp8-rollout-kv[{option}, kv_calibration=once]")


def test_a_margin_is_one_number_or_one_for_each_tensor() -> None:
    one = precision_from("fp8-rollout-kv[kv_margin=2]")
    assert one.calibration.margins == (2.0, 2.0, 2.0)
    three = precision_from("fp8-rollout-kv[kv_margin={key: 2.24, value: 4.48}]")
    assert three.calibration.margins == (2.24, 4.48, 1.05)
    assert precision_from(three.name) == three
    assert PRESETS["fp8-rollout-kv"].calibration.margins == (1.05, 1.05, 1.05)
    assert str(three.calibration) != str(one.calibration), "a resume compares these"
    for bad, message in (
        ("{key: 0}", "kv_margin.key: expected above 0"),
        ("{keys: 2}", "kv_margin.keys: unknown"),
        ("0", "kv_margin: expected above 0"),
        ("wide", "kv_margin: expected a number or a section"),
    ):
        with pytest.raises(IsobitError, match=message):
            precision_from(f"fp8-rollout-kv[kv_margin={bad}]")


def test_activations_may_stay_in_bf16() -> None:
    """On both sides or on one; weights and cache are the preset's."""
    precision = precision_from("nvfp4[activation=bf16, kv_cache=int8]")
    preset = PRESETS["nvfp4"].rollout
    wanted = dataclasses.replace(preset, activation=None, kv=QuantSpec(INT8, "row", "fp32"))
    assert precision.rollout == precision.learner == wanted
    assert precision.unified
    assert precision.fprop == "bf16"
    assert precision_from(precision.name) == precision
    assert PRESETS["nvfp4"].fprop == "fp8"  # the control
    one = precision_from("nvfp4[rollout={activation: bf16}]")
    assert (one.rollout.activation, one.learner) == (None, PRESETS["nvfp4"].learner)


def test_a_cache_beside_nvfp4_has_scales_of_its_own() -> None:
    kv = precision_from("nvfp4[kv_cache=e4m3]").rollout.kv
    assert kv is not None
    assert (kv.granularity, kv.scale) == ("row", "ue8m0")


def test_a_cache_may_have_float32_scales() -> None:
    changed = precision_from("fp8[kv_cache=e4m3, kv_scale=fp32]")
    assert {flow.kv for flow in (changed.rollout, changed.learner)} == {
        QuantSpec(E4M3, "row", "fp32")
    }
    assert changed.unified
    with pytest.raises(
        IsobitError,
        match=r"precision.kv_scale: preset 'fp8-unified' caches keys and values in bf16",
    ):
        precision_from("fp8-unified[kv_scale=fp32]")


@pytest.mark.parametrize("preset", ["fp8", "fp8-unified", "bf16", "float32", "mxfp8", "nvfp4"])
def test_a_cache_may_be_int8(preset: str) -> None:
    """With float32 scales, whatever those of the preset are."""
    precision = precision_from(f"{preset}[kv_cache=int8]")
    wanted = dataclasses.replace(PRESETS[preset].rollout, kv=QuantSpec(INT8, "row", "fp32"))
    assert precision.rollout == precision.learner == wanted
    assert precision.unified
    assert precision_from(precision.name) == precision
    assert re.search(
        r"keys and values +int8 per token and head fp32 +int8 per token", precision.table()
    )


def test_an_int8_cache_of_one_side_and_with_powers_of_two() -> None:
    given = {"preset": "fp8-rollout", "rollout": {"kv_cache": "int8", "kv_scale": "ue8m0"}}
    precision = precision_from(given)
    assert precision.name == "fp8-rollout[rollout={kv_cache=int8, kv_scale=ue8m0}]"
    assert precision_from(precision.name) == precision
    assert (precision.rollout.kv, precision.learner.kv) == (QuantSpec(INT8, "row", "ue8m0"), None)


def test_int8_is_for_keys_and_values_alone() -> None:
    spec = QuantSpec(INT8, "row", "fp32")
    for role in ("weight", "activation", "query"):
        with pytest.raises(
            IsobitError, match=f"{role}: int8 is a format of the KV cache alone; use e4m3"
        ):
            Flow(BF16, **{role: spec})
    with pytest.raises(IsobitError, match="gradient: int8 is a format of the KV cache alone"):
        Precision("mine", Flow(), Flow(), gradient=spec)
    with pytest.raises(
        IsobitError,
        match=r"kv: int8 has one scale per token and head \(granularity row\), not tensor",
    ):
        Flow(BF16, kv=QuantSpec(INT8, "tensor", "fp32"))


def test_tensorwise_scaling_of_all_three_operands() -> None:
    sides = ("weight", "activation", "gradient")
    precision = precision_from(
        {"preset": "fp8-e2e", **{f"{side}_granularity": "tensor" for side in sides}}
    )
    flow = precision.learner
    assert flow.weight is not None
    assert flow.activation is not None
    assert precision.gradient is not None
    assert {
        flow.weight.granularity,
        flow.activation.granularity,
        precision.gradient.granularity,
    } == {"tensor"}


def test_the_table_names_every_format() -> None:
    table = precision_from({"preset": "fp8", "bf16_first_layers": 1}).table(4)
    for text in (
        "e4m3 128x128 ue8m0",
        "e4m3 1x128 ue8m0",
        "per token and head",
        "first 1, last 0 of 4",
        "wgrad",
    ):
        assert text in table


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("fp9", "did you mean 'fp8'"),
        ({"preset": "fp8", "wgard": "bf16"}, "did you mean 'wgrad'"),
        ({"preset": "fp8", "wgrad": "int8"}, "precision.wgrad: expected fp8 or bf16, got 'int8'"),
        ({"preset": "fp8", "bf16_first_layers": -1}, "at least 0"),
        ({"preset": "fp8", "bf16_first_layers": True}, "whole number"),
        ({"preset": "bf16", "wgrad": "fp8"}, "not quantized"),
        (
            {"preset": "fp8", "bf16_layers": ["out"]},
            r"precision.bf16_layers.0: expected qkv, qkv_a, q_b, kv_b, o, gate_up, down, "
            "experts_in or experts_out, got 'out'",
        ),
        ({"preset": "fp8", "bf16_layers": []}, "expected some of qkv"),
        (
            {"preset": "fp8", "bf16_layers": 2},
            "expected qkv, qkv_a, q_b, kv_b, o, gate_up, down, experts_in or experts_out, got 2",
        ),
        ({"preset": "bf16", "bf16_layers": "o"}, "no linear layer"),
        ({"preset": "bf16", "weight_scale": "fp32"}, "no linear layer"),
        ({"preset": "nvfp4", "weight_scale": "fp32"}, "NVFP4 has its own blocks"),
        (
            {"preset": "fp8", "activation": "bf16"},
            "flows whose backward is not quantized, such as nvfp4",
        ),
        ({"preset": "bf16", "activation": "bf16"}, "no linear layer"),
        (
            {"preset": "nvfp4", "activation": "fp8"},
            "precision.activation: expected bf16, got 'fp8'",
        ),
        (
            {"preset": "fp8-rollout", "activation": "bf16", "activation_scale": "ue8m0"},
            "leave one out",
        ),
        ({"preset": "fp8", "kv_margin": 1.1}, "no calibrated KV cache"),
        (
            {"preset": "fp8-rollout-kv", "kv_percentile": 101},
            "precision.kv_percentile: expected at most 100",
        ),
        (
            {"preset": "fp8", "rollout": "bf16"},
            "precision.rollout: expected a section of keys, such as {kv_cache: ",
        ),
        (
            {"preset": "fp8", "rollout": {"wgrad": "bf16"}},
            "precision.rollout.wgrad: unknown, known: kv_cache, ",
        ),
        ({"preset": "fp8", "engines": "two"}, "precision.engines: expected shared or separate"),
        ("fp8[wgrad: {]", "expected PRESET"),
        ("fp8[wgrad=bf16", "no ] at its end; expected PRESET"),
        ("fp8[x]", "'x' has no value; expected PRESET"),
        ("fp8[wgrad=]", "'wgrad' has no value; expected PRESET"),
        ({"preset": "fp8", "wgard": None}, "wgard"),
    ],
)
def test_what_cannot_work_is_refused(value: object, message: str) -> None:
    with pytest.raises(IsobitError, match=message):
        precision_from(value)  # type: ignore[arg-type]


def test_a_scale_over_the_batch_is_recognized() -> None:
    assert PRESETS["fp8"].varies_with_batch() is None
    tensorwise = precision_from({"preset": "fp8", "activation_granularity": "tensor"})
    assert "rollout" in (tensorwise.varies_with_batch() or "")


@pytest.mark.parametrize("name", PRESETS)
def test_the_constructor_with_a_name_alone_is_the_preset(name: str) -> None:
    assert Precision(name) == precision_from(name)
    assert Precision("fp8") != Precision("bf16")  # the control: it was BF16 under every name


def test_flows_of_your_own_may_have_any_name() -> None:
    assert Precision("mine", Flow(), Flow()) == dataclasses.replace(PRESETS["bf16"], name="mine")
    assert Precision("mine", rollout=PRESETS["fp8"].rollout).learner == Flow()
    assert dataclasses.replace(PRESETS["fp8"], name="mine").rollout == PRESETS["fp8"].rollout


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: Precision("nonsense"),
            "unknown precision preset 'nonsense': choose from float32, bf16",
        ),
        (lambda: Precision("fp9"), "did you mean 'fp8'"),
        (
            lambda: Precision("fp8", wgrad="fp8"),
            "a preset is changed with a mapping, such as {'preset': 'fp8'",
        ),
        (
            lambda: Precision("mine", Flow(), Flow(), dgrad="int8"),
            "dgrad: expected one of fp8, bf16, got 'int8'",
        ),
        (
            lambda: Precision("mine", Flow(), Flow(), engines="two"),
            "engines: expected one of shared, separate",
        ),
        (lambda: Precision("mine", "fp8", "fp8"), "rollout: expected a Flow, got 'fp8'"),
        (
            lambda: Precision(3),
            "precision: expected a preset's name, a mapping or a Precision, got 3",
        ),
        (
            lambda: Precision("fp8[wgrad=bf16]"),
            "unknown precision preset 'fp8[wgrad=bf16]' (did you mean 'fp8'?)",
        ),
        (lambda: precision_from(3), "precision: expected a preset's name"),
    ],
)
def test_a_constructor_that_means_nothing_gives_one_line(
    make: Callable[[], Precision], message: str
) -> None:
    with pytest.raises(IsobitError) as caught:
        make()
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("use", ["rollout", "learner"])
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_blocks_of_several_rows_vary_with_the_batch_and_blocks_within_a_row_do_not(
    granularity: str, use: str
) -> None:
    preset = PRESETS["fp8"]
    spec = QuantSpec(E4M3, granularity, "fp32")
    precision = dataclasses.replace(
        preset, **{use: dataclasses.replace(preset.rollout, activation=spec)}
    )
    why = precision.varies_with_batch()
    assert (why is None) == (spec.block((1000, 1000))[0] == 1)
    assert why is None or why.startswith(
        f"the {use}'s activation scale is shared by the rows of a batch"
    )


@pytest.mark.parametrize("use", ["rollout", "learner"])
def test_a_number_of_the_whole_tensor_varies_with_the_batch_and_one_of_a_row_does_not(
    use: str,
) -> None:
    preset = PRESETS["nvfp4"]
    spec = QuantSpec(E2M1, "1x16", "nvfp4")
    precision = dataclasses.replace(
        preset, **{use: dataclasses.replace(preset.rollout, activation=spec)}
    )
    assert (precision.varies_with_batch() or "").startswith(
        f"the {use}'s activation scales share a number"
    )
    assert preset.varies_with_batch() is None


def test_probabilities_are_rounded_where_that_is_asked_for() -> None:
    """On both sides or on one; not in excepted layers. Of the presets one rollout has it, and the
    tables of the others name it not."""
    having = [
        (name, use)
        for name, preset in PRESETS.items()
        for use in ("rollout", "learner")
        if getattr(preset, use).probabilities is not None
    ]
    assert having == [("fp8-rollout-attention", "rollout")]
    plain = precision_from("fp8")
    both = precision_from("fp8[probabilities=e4m3, bf16_first_layers=1]")
    one = precision_from("bf16[rollout={probabilities: e4m3}]")
    assert (both.rollout.probabilities, both.learner.probabilities) == (E4M3, E4M3)
    assert (one.rollout.probabilities, one.learner.probabilities) == (E4M3, None)
    assert both.unified
    assert not one.unified
    assert both.flow("rollout", 0, 2).probabilities is None
    assert both.flow("rollout", 1, 2).probabilities is E4M3
    assert precision_from({"preset": "fp8", "probabilities": "bf16"}).rollout == plain.rollout
    assert re.search(r"probabilities +e4m3 of 2\^8 times each +not rounded\n", one.table())
    assert "probabilities" not in plain.table()
    assert one.formats()["rollout.probabilities"] == "e4m3 of 2^8 times each"
    assert (
        plain.formats()["rollout.probabilities"]
        == one.formats()["learner.probabilities"]
        == "not rounded"
    )
    with pytest.raises(
        IsobitError, match="probabilities: expected E4M3, or None to leave them, got int8"
    ):
        Flow(probabilities=INT8)


def test_the_table_says_every_role_of_both_sides() -> None:
    given = {
        "preset": "fp8",
        "bf16_first_layers": 1,
        "bf16_last_layers": 2,
        "bf16_layers": ["o"],
        "wgrad": "bf16",
    }
    lines = precision_from(given).table(6, "bf16, 8bit").splitlines()
    assert [tuple(re.split(r" {2,}", line)) for line in lines] == [
        ("tensor", "rollout", "learner"),
        tuple("-" * width for width in (22, 28, 28)),
        ("weights", "e4m3 128x128 ue8m0", "e4m3 128x128 ue8m0"),
        ("activations", "e4m3 1x128 ue8m0", "e4m3 1x128 ue8m0"),
        ("keys and values", "int8 per token and head fp32", "int8 per token and head fp32"),
        ("queries", "bf16", "bf16"),
        ("embedding, norms, head", "bf16", "bf16"),
        ("residual stream", "bf16", "bf16"),
        ("output gradients", "e4m3 1x128 ue8m0"),
        ("fprop", "fp8"),
        ("dgrad", "fp8"),
        ("wgrad", "bf16"),
        ("masters, moments", "bf16, 8bit"),
        ("engine", "one", "the same"),
        ("excepted layers", "first 1, last 2 of 6: bf16", "first 1, last 2 of 6: bf16"),
        ("o", "bf16", "bf16"),
    ]
    formats = [
        re.search("e4m3|int8", line) for line in lines if line.startswith(("weights", "keys"))
    ]
    assert [found and found.start() for found in formats] == [24, 24]
    calibrated = precision_from("fp8-rollout-kv").table()
    assert "masters" not in calibrated, "no flow knows of them"
    assert re.search(r"keys and values +e4m3 per layer, calibrated, fp32 +bf16", calibrated)
    assert re.search(r"engine +its own +its own", calibrated)
    for flow, words in (
        ("fp8-rollout-kv", "every_step, batch, margin 1.05"),
        ("fp8-rollout-kv-verl", "every_step, prompts, margin K 2.24, V 4.48, Q 2.24"),
        ("fp8-rollout-kv[kv_calibration=once]", "once, batch, margin 1.05"),
        ("fp8-rollout-kv[kv_calibration=never]", "never: every scale is 1"),
    ):
        assert f"calibration             {words}\n" in precision_from(flow).table()
    assert "calibration" not in precision_from("fp8").table()


_FP8: dict[str, object] = {"preset": "fp8"}
_CALIBRATED: dict[str, object] = {"preset": "fp8", "kv_cache": "e4m3-calibrated"}


@pytest.mark.parametrize(
    ("start", "key", "value", "place"),
    [
        (_FP8, "dgrad", "bf16", ("dgrad",)),
        (_FP8, "wgrad", "bf16", ("wgrad",)),
        (_FP8, "wgrad_activation", "own-copy", ("wgrad_activation",)),
        (_FP8, "gradient_scale", "fp32", ("gradient", "scale")),
        (_FP8, "gradient_granularity", "row", ("gradient", "granularity")),
        (_FP8, "gradient_format", "e5m2", ("gradient", "format")),
        (_FP8, "bf16_layers", ["o"], ("bf16_layers",)),
        (_CALIBRATED, "kv_calibration", "once", ("calibration", "schedule")),
        (_CALIBRATED, "kv_calibration_data", "prompts", ("calibration", "data")),
        (_CALIBRATED, "kv_percentile", 90.0, ("calibration", "percentile")),
        (_CALIBRATED, "kv_margin", 1.25, ("calibration", "margin")),
        (_CALIBRATED, "kv_calibration_prompts", 3, ("calibration", "prompts")),
    ],
    ids=lambda part: part if isinstance(part, str) else "",
)
def test_an_option_changes_its_own_field_and_no_other(
    start: dict[str, object], key: str, value: object, place: tuple[str, ...]
) -> None:
    before, after = precision_from(start), precision_from({**start, key: value})
    wanted = {"bf16_layers": ("o",), "gradient_format": E5M2}.get(key, value)
    if len(place) == 2:
        wanted = dataclasses.replace(getattr(before, place[0]), **{place[1]: wanted})
    expected = dataclasses.replace(before, name=after.name, **{place[0]: wanted})
    assert after == expected
    assert getattr(after, place[0]) != getattr(before, place[0])
    # and what a run records of its flow
    then, now = before.formats(), after.formats()
    assert {name for name in now if now[name] != then[name]} == {place[0]}


def test_no_layers_in_bf16_may_be_asked_for() -> None:
    assert (
        precision_from({"preset": "fp8", "bf16_first_layers": 0}).rollout == PRESETS["fp8"].rollout
    )
