"""The named objectives, and what `auto` becomes under each precision."""

import dataclasses
from typing import Any

import pytest

from isobit.config import load_config
from isobit.precision import PRESETS, Precision, precision_from
from isobit.rl import OBJECTIVES, Objective, for_precision
from isobit.rl.algorithm.correction_rule import CORRECTIONS, CorrectionRule
from isobit.rl.algorithm.functions import ADVANTAGES
from isobit.rl.algorithm.loss import LOSSES
from isobit.rl.algorithm.objective import ADVANTAGE_KINDS, AGGREGATIONS, KL_ESTIMATORS, LOSS_KINDS


def test_presets_are_the_papers() -> None:
    parts = {
        name: (o.advantage, o.loss_aggregation, o.clip_low, o.clip_high)
        for name, o in OBJECTIVES.items()
    }
    assert parts == {
        "grpo": ("grpo", "sequence_mean", 0.2, 0.2),
        "dr_grpo": ("dr_grpo", "constant", 0.2, 0.2),
        "rloo": ("rloo", "sequence_mean", 0.2, 0.2),
        "dapo": ("grpo", "token_mean", 0.2, 0.28),
        "gspo": ("grpo", "sequence_mean", 3e-4, 4e-4),
        "luspo": ("grpo", "sequence_sum", 2e-3, 2.5e-3),
        "cispo": ("grpo", "token_mean", 1.0, 4.0),
        "sapo": ("grpo", "sequence_mean", 0.2, 0.2),
        "gmpo": ("grpo", "sequence_mean", 0.4, 0.4),
        "dppo_tv": ("dr_grpo", "constant", 0.15, 0.15),
        "dppo_kl": ("dr_grpo", "constant", 0.05, 0.05),
        "vespo": ("grpo", "token_mean", 0.2, 0.2),
        "reinforce_pp": ("reinforce_pp", "token_mean", 0.2, 0.2),
        "reinforce_pp_baseline": ("reinforce_pp_baseline", "token_mean", 0.2, 0.2),
    }
    assert [name for name, objective in OBJECTIVES.items() if objective.dynamic_sampling] == [
        "dapo"
    ]
    assert {name: o.ratio for name, o in OBJECTIVES.items() if o.ratio != "token"} == {
        "rloo": "sequence_sum",
        "gspo": "sequence",
        "luspo": "sequence",
    }
    assert {name: o.loss for name, o in OBJECTIVES.items() if o.loss != "clip"} == {
        "cispo": "cispo",
        "sapo": "sapo",
        "gmpo": "gmpo",
        "dppo_tv": "dppo_tv",
        "dppo_kl": "dppo_kl",
        "vespo": "vespo",
    }
    assert [n for n, o in OBJECTIVES.items() if o.recompute_old_logprobs == "never"] == [
        "dppo_tv",
        "dppo_kl",
        "vespo",
    ]
    for objective in OBJECTIVES.values():
        assert objective.advantage in ADVANTAGE_KINDS
        assert objective.loss_aggregation in AGGREGATIONS
        assert objective.estimator in KL_ESTIMATORS


def test_every_part_that_can_be_named_is_there() -> None:
    assert set(ADVANTAGE_KINDS) == set(ADVANTAGES)
    assert set(LOSS_KINDS) == set(LOSSES)


def algorithm(*overrides: str, **given: Any) -> Objective:
    return load_config({"model": "base", "algorithm": given}, overrides).algorithm


@pytest.mark.parametrize("name", list(OBJECTIVES))
def test_a_config_has_the_parts_of_its_preset_under_what_it_gives(name: str) -> None:
    assert algorithm(preset=name) == OBJECTIVES[name]
    changed = algorithm(preset=name, clip_high=0.5, ratio="token")
    assert (
        changed
        == dataclasses.replace(OBJECTIVES[name], clip_high=0.5, ratio="token")
        != OBJECTIVES[name]
    )
    nothing = dict.fromkeys(
        ("advantage", "loss", "ratio", "clip_low", "clip_high", "dynamic_sampling")
    )
    assert algorithm(preset=name, **nothing) == OBJECTIVES[name]


def test_a_kl_in_the_reward_is_k1_unless_another_is_given() -> None:
    assert algorithm().estimator == "k3"
    for yes in (True, "true"):
        assert algorithm(kl_in_reward=yes, kl_coefficient=0.1).estimator == "k1"
    assert algorithm(kl_in_reward=True, kl_coefficient=0.1, kl_estimator="k2").estimator == "k2"
    kept = load_config({"model": "base"})
    charged = load_config(kept, ["algorithm.kl_in_reward=true", "algorithm.kl_coefficient=0.1"])
    assert charged.algorithm.estimator == "k1"
    assert load_config(charged, ["algorithm.kl_in_reward=false"]).algorithm.estimator == "k3"


def test_another_preset_over_the_config_of_a_run_sets_its_parts() -> None:
    """A run's config.yaml has every part; an override with another preset counts all the same, and
    what differed from the first preset stays."""
    kept = load_config({"model": "base", "algorithm": {"preset": "gspo", "clip_high": 0.5}})
    assert load_config(kept) == kept
    other = load_config(kept, ["algorithm.preset=dapo"]).algorithm
    assert other == dataclasses.replace(OBJECTIVES["dapo"], clip_high=0.5)


def test_a_part_that_is_given_stays_whatever_preset_comes_before_or_after_it() -> None:
    wanted = dataclasses.replace(OBJECTIVES["dapo"], clip_high=0.2)
    assert algorithm("algorithm.clip_high=0.2", "algorithm.preset=dapo") == wanted
    assert algorithm("algorithm.preset=dapo", "algorithm.clip_high=0.2") == wanted
    assert algorithm("algorithm.preset=dapo", clip_high=0.2, preset="grpo") == wanted


@pytest.mark.parametrize("name", list(PRESETS))
def test_auto_recomputes_and_corrects_only_where_the_flows_differ(name: str) -> None:
    resolved = for_precision(Objective(), PRESETS[name])
    two_flows = "rollout" in name or name == "fp8-e2e"
    correction = "token_is" if name == "fp8-e2e" else "token_tis"
    assert (resolved.recompute_old, resolved.rule) == (
        two_flows,
        CORRECTIONS[correction if two_flows else "none"],
    )


@pytest.mark.parametrize(
    ("flow", "correction"),
    [
        ("bf16[engines=separate]", "token_tis"),
        ("bf16[engines=separate, kv_cache=e4m3-calibrated]", "token_tis"),
        ("float32[engines=separate]", "token_tis"),
        ("fp8[engines=separate]", "token_tis"),
        ("nvfp4[rollout={activation: bf16}]", "token_tis"),
        ("fp8-e2e[kv_cache=e4m3-calibrated]", "token_is"),
        ("fp8-e2e[engines=shared, wgrad_activation=requantized]", "none"),
        ("bf16[kv_cache=int8]", "none"),
        ("fp8[kv_cache=e4m3-calibrated]", "none"),
    ],
)
def test_what_auto_corrects_follows_from_the_flows_and_not_from_a_name(
    flow: str, correction: str
) -> None:
    """One engine and one flow, the controls, have nothing to correct."""
    precision = precision_from(flow)
    assert for_precision(Objective(), precision).rule == CORRECTIONS[correction]
    assert precision.unified == (correction == "none")


def test_a_precision_of_your_own_may_ask_for_no_correction() -> None:
    flow = PRESETS["bf16"].rollout
    own = Precision("mine", flow, flow, engines="separate", correction="none")
    assert for_precision(Objective(), own).rule == CORRECTIONS["none"]
    assert for_precision(Objective(), dataclasses.replace(own, correction="auto")).rule.active


def test_explicit_choices_win() -> None:
    split, unified = PRESETS["fp8-rollout"], PRESETS["fp8"]
    never = for_precision(Objective(recompute_old_logprobs="never"), split)
    assert not never.recompute_old
    assert not never.rule.active  # the ratio is policy/rollout
    assert for_precision(Objective(correction="none"), split).rule == CORRECTIONS["none"]
    assert for_precision(Objective(recompute_old_logprobs="always"), unified).recompute_old
    given = Objective(correction="token_tis", recompute_old_logprobs="always")
    assert for_precision(given, unified).rule == CORRECTIONS["token_tis"]
    rule = CorrectionRule("sequence", cap=3.0)
    assert for_precision(Objective(correction=rule), split).rule == rule


def test_the_config_names_every_rule() -> None:
    for name in CORRECTIONS:
        given = algorithm(correction=name)
        assert for_precision(given, PRESETS["fp8-rollout"]).rule == CORRECTIONS[name]


def test_stale_samples_are_recomputed_and_corrected_even_under_one_flow() -> None:
    resolved = for_precision(Objective(), PRESETS["fp8"], stale=True)
    assert (resolved.stale_samples, resolved.recompute_old) == (True, True)
    assert resolved.rule == CORRECTIONS["token_tis"]
    own = dataclasses.replace(PRESETS["fp8-rollout"], correction="sequence_mis")
    assert for_precision(Objective(), own, stale=True).rule == CORRECTIONS["sequence_mis"]
    assert (
        for_precision(Objective(correction="none"), PRESETS["fp8"], stale=True).rule
        == CORRECTIONS["none"]
    )
    assert not for_precision(Objective(), PRESETS["fp8"]).stale_samples
