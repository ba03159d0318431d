"""The named objectives, and what `auto` becomes under each precision."""

import dataclasses
from typing import get_args

import pytest

from isobit.config import AlgorithmConfig, CorrectionConfig
from isobit.config.algorithm import AdvantageName, CorrectionName, LossName
from isobit.options import choices as named
from isobit.options import options_of
from isobit.precision import PRESETS
from isobit.rl import OBJECTIVES, Objective, for_precision
from isobit.rl.correction_rule import CORRECTIONS, CorrectionRule
from isobit.rl.functions import ADVANTAGES
from isobit.rl.loss import LOSSES
from isobit.rl.objective import ADVANTAGE_KINDS, AGGREGATIONS, KL_ESTIMATORS, LOSS_KINDS, RATIOS


def test_presets_are_the_papers() -> None:
    parts = {name: (o.advantage, o.loss_aggregation, o.clip_low, o.clip_high) for name, o in OBJECTIVES.items()}
    assert parts == {
        "grpo": ("grpo", "sequence_mean", 0.2, 0.2),
        "dr_grpo": ("dr_grpo", "constant", 0.2, 0.2),
        "rloo": ("rloo", "sequence_mean", 0.2, 0.2),
        "dapo": ("grpo", "token_mean", 0.2, 0.28),
        "gspo": ("grpo", "sequence_mean", 3e-4, 4e-4),
        "cispo": ("grpo", "token_mean", 1.0, 4.0),
        "reinforce_pp": ("reinforce_pp", "token_mean", 0.2, 0.2),
        "reinforce_pp_baseline": ("reinforce_pp_baseline", "token_mean", 0.2, 0.2),
    }
    assert [name for name, objective in OBJECTIVES.items() if objective.dynamic_sampling] == ["dapo"]
    assert {name: o.ratio for name, o in OBJECTIVES.items() if o.ratio != "token"} == {
        "rloo": "sequence_sum",
        "gspo": "sequence",
    }
    assert [name for name, o in OBJECTIVES.items() if o.loss == "cispo"] == ["cispo"]
    for objective in OBJECTIVES.values():
        assert objective.advantage in ADVANTAGE_KINDS
        assert objective.loss_aggregation in AGGREGATIONS
        assert objective.kl_estimator in KL_ESTIMATORS


def test_the_config_names_every_part() -> None:
    def choices(name: str) -> set[str]:
        return set(named(options_of(AlgorithmConfig)[name].kind))

    assert choices("preset") == set(OBJECTIVES)
    assert set(get_args(AdvantageName)) == set(ADVANTAGE_KINDS) == set(ADVANTAGES)
    assert choices("ratio") == set(RATIOS)
    assert set(get_args(LossName)) == set(LOSS_KINDS) == set(LOSSES)
    assert choices("kl_estimator") == set(KL_ESTIMATORS)
    assert choices("loss_aggregation") == set(AGGREGATIONS)


def test_the_config_has_the_same_fields_and_defaults() -> None:
    given = vars(AlgorithmConfig())
    shared = {key: value for key, value in given.items() if key in Objective.__dataclass_fields__ and value is not None}
    assert {"kl_coefficient", "kl_in_reward", "updates_per_batch", "epochs"} <= shared.keys()
    defaults = {key: getattr(Objective(), key) for key in shared if key != "correction"}
    assert defaults == {key: value for key, value in shared.items() if key != "correction"}


@pytest.mark.parametrize("name", list(PRESETS))
def test_auto_recomputes_and_corrects_only_where_the_flows_differ(name: str) -> None:
    resolved = for_precision(Objective(), PRESETS[name], "auto", "auto")
    two_flows = name in ("fp8-rollout", "fp8-rollout-kv", "fp8-e2e", "mxfp8-rollout", "nvfp4-rollout")
    assert (resolved.recompute_old, resolved.correction) == (
        two_flows,
        CORRECTIONS["token_tis" if two_flows else "none"],
    )


def test_explicit_choices_win() -> None:
    split, unified = PRESETS["fp8-rollout"], PRESETS["fp8"]
    assert not for_precision(Objective(), split, "auto", "never").recompute_old
    assert not for_precision(Objective(), split, "auto", "never").correction.active  # the ratio is policy/rollout
    assert for_precision(Objective(), split, "none", "auto").correction == CORRECTIONS["none"]
    assert for_precision(Objective(), unified, "auto", "always").recompute_old
    assert for_precision(Objective(), unified, "token_tis", "always").correction == CORRECTIONS["token_tis"]
    rule = CorrectionRule("sequence", cap=3.0)
    assert for_precision(Objective(), split, rule, "auto").correction == rule


def test_the_config_names_every_rule() -> None:
    assert set(get_args(CorrectionName)) == {"auto", *CORRECTIONS}
    defaults = CorrectionConfig(veto=0.1)
    assert (defaults.weight, defaults.floor, defaults.normalize) == ("none", 0.0, False)


def test_stale_samples_are_recomputed_and_corrected_even_under_one_flow() -> None:
    resolved = for_precision(Objective(), PRESETS["fp8"], "auto", "auto", stale=True)
    assert (resolved.stale_samples, resolved.recompute_old) == (True, True)
    assert resolved.correction == CORRECTIONS["token_tis"]
    own = dataclasses.replace(PRESETS["fp8-rollout"], correction="sequence_mis")
    assert for_precision(Objective(), own, "auto", "auto", stale=True).correction == CORRECTIONS["sequence_mis"]
    assert for_precision(Objective(), PRESETS["fp8"], "none", "auto", stale=True).correction == CORRECTIONS["none"]
    assert not for_precision(Objective(), PRESETS["fp8"], "auto", "auto").stale_samples
