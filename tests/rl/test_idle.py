"""Samples that teach nothing are left out: weights, moments and metrics keep every bit, at any
number of ranks."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import pytest
from torch import Tensor

from isobit.distributed import ALONE, Ranks
from isobit.engine.engine import Engine
from isobit.engine.types import Sampling
from isobit.model import Experts, Model
from isobit.rl import (
    OBJECTIVES,
    Objective,
    OptimizerSettings,
    ResolvedObjective,
    Sample,
    for_precision,
)
from isobit.rl.algorithm.correction_rule import CorrectionRule, Rejection
from isobit.rl.algorithm.loss import Loss, LossInputs, LossOutputs
from isobit.rl.learner.agreement import Disagreement
from isobit.rl.learner.forward import PolicyForward, values_of
from isobit.rl.learner.gradient import Differentiation, OptimizerBatch
from isobit.rl.learner.learner import Learner
from isobit.rl.learner.schedule import Cutting, Schedule, Update, drawn
from isobit.rl.optim.sharded import ShardedOptimizer
from tests.distributed.test_learning import learned, whole
from tests.distributed.threads import run
from tests.models import slow_where, tiny_model
from tests.rl import helpers
from tests.rl.helpers import alternating, gradients, roll_out, same_bits

MEASURED = (
    "entropy",
    "learn/skipped_share",
    "learn/shared_share",
    "mismatch/",
    "correction/",
)  # of the tokens that are computed
State = dict[str, Tensor]
GRPO = Objective()
make_learner = partial(
    helpers.make_learner, share_prompts=False
)  # so that a few tokens are a micro-batch


def credit(samples: Sequence[Sample], teaching: Sequence[int] = (0, 2)) -> list[float]:
    """Advantages of both signs in the groups of some prompts, and exactly 0 in the others."""
    return [a if s.prompt_index in teaching else 0.0 for s, a in zip(samples, alternating(samples))]


@pytest.fixture
def everything(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Call it, and from then on nothing is left out."""

    def compute_all() -> None:
        monkeypatch.setattr(
            "isobit.rl.learner.schedule.without_teaching", lambda micro, zero: frozenset()
        )

    return compute_all


def learn(
    samples: Sequence[Sample],
    precision: str,
    family: str = "qwen3",
    objective: Objective = GRPO,
    ranks: Ranks = ALONE,
    teaching: Sequence[Sequence[int]] = ((0, 2), (1,), ()),
    given: Mapping[str, Any] = {},
    **options: Any,
) -> tuple[State, list[Mapping[str, float]]]:
    """(masters and moments, metrics) after a step for each of `teaching`: the prompts whose samples
    teach."""
    model = tiny_model(precision, family, scale=4, ranks=ranks)
    shards = model.transformer.masters.shards
    settings = OptimizerSettings(
        learning_rate=1e-2, weight_decay=0.01, **{"share_prompts": False, **given}
    )
    optimizer = ShardedOptimizer(model.named_parameters(), settings, shards)
    chosen = for_precision(ResolvedObjective.of(objective, max_new_tokens=5), model.precision)
    options = {"micro_batch_tokens": 40, "seed": 7, "measured_zero_advantage": 2, **options}
    learner, found = Learner(model, optimizer, chosen, **options), []
    for step, prompts in enumerate(teaching):
        found.append(learner.learn(samples, credit(samples, prompts), step).metrics)
        model.sync()
    return whole(ranks, shards, learned(optimizer)), found


def same_metrics(left: Sequence[Mapping[str, float]], right: Sequence[Mapping[str, float]]) -> bool:
    """But for those that are measured on what is computed."""

    def kept(rows: Sequence[Mapping[str, float]]) -> str:
        return repr([{n: v for n, v in row.items() if not n.startswith(MEASURED)} for row in rows])

    return kept(left) == kept(right)


def long_groups(precision: str = "fp8", family: str = "qwen3", **given: Any) -> list[Sample]:
    return roll_out(tiny_model(precision, family, scale=4), group_size=8, **given)


@pytest.mark.parametrize(
    ("precision", "family"),
    slow_where(
        list(
            product(
                ("bf16", "fp8", "fp8-unified", "fp8-rollout", "fp8-e2e", "mxfp8"),
                ("qwen3", "qwen3_moe"),
            )
        ),
        lambda precision, family: (
            family == "qwen3_moe" and precision in ("fp8-rollout", "fp8-e2e", "mxfp8")
        ),
    ),
)
def test_no_bit_of_weights_and_moments_changes(
    precision: str, family: str, everything: Any
) -> None:
    """Over a step of which some groups teach, one of few, and one in which none does and the
    moments alone move the weights."""
    samples = long_groups(precision, family)
    state, metrics = learn(samples, precision, family)
    shares = [row["learn/skipped_share"] for row in metrics]
    assert 0.2 < shares[0] < shares[1] < shares[2] == 1
    everything()
    full, all_metrics = learn(samples, precision, family)
    assert [row["learn/skipped_share"] for row in all_metrics] == [0.0, 0.0, 0.0]
    assert same_bits(state, full)
    assert same_metrics(metrics, all_metrics)
    assert not same_bits(
        state, learn(samples, precision, family, teaching=((0, 2), (1,)))[0]
    )  # the moments do move


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_no_bit_changes_where_prompts_are_shared(family: str, everything: Any) -> None:
    samples = long_groups(family=family)
    given = {"given": {"share_prompts": True}, "micro_batch_tokens": 16}
    state, metrics = learn(samples, "fp8", family, **given)  # type: ignore[arg-type]
    assert 0.2 < metrics[0]["learn/skipped_share"] < 1
    assert metrics[0]["learn/shared_share"] > 0.1
    everything()
    full, all_metrics = learn(samples, "fp8", family, **given)  # type: ignore[arg-type]
    assert same_bits(state, full)
    assert same_metrics(metrics, all_metrics)


RANKED = list(product(["qwen3", "qwen3_moe"], [1, 2, 3]))
PRESETS = ["grpo", "rloo", "gspo", "cispo", "sapo", "gmpo", "dppo_kl", "vespo"]
AGGREGATIONS = ["token_mean", "sequence_mean", "constant"]


@pytest.mark.parametrize(
    ("preset", "aggregation"),
    slow_where(
        list(product(PRESETS, AGGREGATIONS)),
        lambda preset, how: PRESETS.index(preset) % 3 != AGGREGATIONS.index(how),
    ),
)
def test_no_bit_changes_under_any_objective(preset: str, aggregation: str, everything: Any) -> None:
    """With several updates on a batch, whose weights have moved, so that ratios are not 1 and
    tokens are clipped."""
    samples = long_groups()
    objective = replace(
        OBJECTIVES[preset],
        loss_aggregation=aggregation,
        epochs=2,
        clip_low=1e-4,
        clip_high=1e-4,
        dual_clip=None,
    )
    dual = (
        replace(objective, dual_clip=1.0001)
        if preset == "grpo"
        else replace(objective, loss="reinforce")
    )
    found = [
        learn(samples, "fp8", objective=each, teaching=((0, 2),)) for each in (objective, dual)
    ]
    everything()
    for each, (state, metrics) in zip((objective, dual), found, strict=True):
        full, all_metrics = learn(samples, "fp8", objective=each, teaching=((0, 2),))
        assert same_bits(state, full)
        assert same_metrics(metrics, all_metrics)
        assert metrics[0]["learn/skipped_share"] > 0.2
        assert each.loss in ("reinforce", "sapo", "vespo") or metrics[0]["clip_fraction"] > 0
    assert preset == "grpo" or not same_bits(found[0][0], found[1][0])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "group", "sizes"),
    [
        *slow_where(
            [(family, group, (group + 1,)) for family, group in RANKED],
            lambda family, group, _: (family, group) not in (("qwen3_moe", 1), ("qwen3", 2)),
        ),
        *(
            pytest.param(family, group, {2, 3, 4} - {group + 1}, marks=pytest.mark.slow)
            for family, group in RANKED
        ),
    ],
)
def test_any_number_of_ranks_leaves_out_the_same(
    family: str, group: int, sizes: Collection[int], everything: Any
) -> None:
    samples = long_groups(family=family)
    objective = Objective(updates_per_batch=2)
    given = {
        "given": {"gradient_sum_group": group},
        "objective": objective,
        "micro_batch_tokens": 17,
    }
    state, metrics = learn(samples, "fp8", family, **given)  # type: ignore[arg-type]
    for size in sizes:
        for found, measured in run(
            size, lambda ranks: learn(samples, "fp8", family, ranks=ranks, **given)
        ):  # type: ignore[arg-type]
            assert same_bits(found, state), size
            assert repr(measured) == repr(metrics), size
    everything()
    assert same_bits(learn(samples, "fp8", family, **given)[0], state)  # type: ignore[arg-type]
    if group > 1:
        other = {**given, "given": {"gradient_sum_group": 1}}
        assert not same_bits(learn(samples, "fp8", family, **other)[0], state)  # type: ignore[arg-type]


def test_control_a_sample_cannot_leave_a_micro_batch_that_it_shares(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its rows take part in the scales of FP8 WGrad, and in where blocks of 128 tokens begin."""
    model = tiny_model("fp8-unified", scale=4)
    samples = long_groups("fp8-unified")
    advantages = credit(samples)
    shared = gradients(make_learner(model), samples, advantages)
    plain = Cutting.schedule

    def dropping(self: Cutting, all_of: Any, zero: Sequence[bool], *given: Any) -> Schedule:
        found = plain(self, all_of, zero, *given)
        (one,) = found.updates
        fewer = [[i for i in span if not zero[i]] for span in one.micro_batches]
        return replace(found, updates=[replace(one, micro_batches=fewer)])

    monkeypatch.setattr(Cutting, "schedule", dropping)
    assert not same_bits(gradients(make_learner(model), samples, advantages), shared)


def test_the_least_advantage_teaches() -> None:
    """1e-8 is not 0; what float32 cannot tell from 0 is 0, for the loss too."""
    samples = long_groups()
    model = tiny_model(scale=4)
    found = {}
    for least in (0.0, 1e-50, 1e-8):
        advantages = [a or least for a in credit(samples)]
        learner = make_learner(model, micro_batch_tokens=40)
        found[least] = (gradients(learner, samples, advantages), _share(samples, advantages))
    assert found[1e-50][1] == found[0.0][1] > 0.2
    assert same_bits(found[1e-50][0], found[0.0][0])
    assert found[1e-8][1] == 0
    assert not same_bits(found[1e-8][0], found[0.0][0])
    of_tokens = [
        a if isinstance(a, tuple) else (a,) * s.num_trained
        for s, a in zip(samples, credit(samples))
    ]
    assert _share(samples, of_tokens) == found[0.0][1]
    last = [(*row[:-1], row[-1] or 1.0) for row in of_tokens]
    assert _share(samples, last) == 0  # one token of each sample teaches


def _share(
    samples: Sequence[Sample], advantages: Sequence[Any], objective: Objective = GRPO
) -> float:
    learner = make_learner(tiny_model(scale=4), objective, micro_batch_tokens=40)
    return float(learner.learn(samples, advantages, 0).metrics["learn/skipped_share"])


def _squared(inputs: LossInputs) -> LossOutputs:
    """A loss that does not vanish with the advantage."""
    return LossOutputs(
        -inputs.advantages * inputs.policy_logprobs + 0.1 * inputs.policy_logprobs.square()
    )


@pytest.mark.parametrize("term", ["kl", "router", "loss"])
def test_nothing_is_left_out_where_another_term_needs_it(
    term: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A KL penalty, a load-balancing loss, a user's own loss. The control leaves out what has no
    advantage all the same."""
    family = "qwen3_moe" if term == "router" else "qwen3"
    samples = long_groups(family=family)
    objective = {
        "kl": Objective(kl_coefficient=0.5),
        "router": Objective(router_aux_coefficient=0.5),
        "loss": Objective(loss="mine.py:squared"),
    }[term]
    monkeypatch.setattr("isobit.rl.learner.learner.loss_function", lambda name: Loss(_squared))
    if term != "loss":
        monkeypatch.undo()

    def found() -> tuple[State, float]:
        model, reference = (tiny_model("fp8", family, seed=seed, scale=4) for seed in (0, 1))
        given = {"reference": reference} if term == "kl" else {}
        learner = make_learner(model, objective, micro_batch_tokens=40, **given)
        share = learner.learn(samples, credit(samples), 0).metrics["learn/skipped_share"]
        return {name: p.detach().clone() for name, p in model.named_parameters().items()}, share

    state, share = found()
    assert share == 0
    monkeypatch.setattr(
        "isobit.rl.learner.batch.zero_advantage_samples",
        lambda objective, rows, *_: [not bool(r.any()) for r in rows],
    )
    other, left_out = found()
    assert left_out > 0.2
    assert not same_bits(state, other)
    assert _share(long_groups(), credit(long_groups()), Objective(kl_in_reward=True)) > 0.2


def test_an_expert_that_idle_tokens_chose_has_a_gradient_of_zeros() -> None:
    """Not none, which AdamW leaves alone; also where the learner repeats the rollout's choices. The
    control forgets whom idle tokens went to."""
    model = tiny_model("fp8", "qwen3_moe", scale=4, experts=Experts(16, 2, 24))
    samples = _recorded(model)
    teaching = [float(i == 0) for i in range(len(samples))]
    for objective in (Objective(), Objective(router_replay=True)):
        learner = make_learner(model, objective, micro_batch_tokens=1)
        found = gradients(learner, samples, teaching)
        zeros = [
            name for name, gradient in found.items() if ".experts." in name and not gradient.any()
        ]
        assert zeros
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("isobit.rl.learner.gradient.served_experts", lambda *given: set())
            forgetful = make_learner(model, objective, micro_batch_tokens=1)
            assert gradients(forgetful, samples, teaching).keys() < found.keys()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                "isobit.rl.learner.schedule.without_teaching", lambda micro, zero: frozenset()
            )
            full = gradients(
                make_learner(model, objective, micro_batch_tokens=1), samples, teaching
            )
        assert same_bits(found, full)


def _recorded(model: Model) -> list[Sample]:
    """With the experts that the rollout chose."""
    engine = Engine(model, kv_pages=64, page_size=4, record_routes=True)
    groups = engine.generate(["1+1=", "23*4="], Sampling(n=2, max_new_tokens=3))
    return [
        Sample(c.prompt_id, c.sample_index, tuple(c.prompt_token_ids), tuple(c.token_ids),
            tuple(c.logprobs), "",
               False, 0, routes=c.routes)
        for group in groups
        for c in group
    ]  # fmt: skip


def test_the_mismatch_is_measured_on_some_that_are_left_out() -> None:
    """The same ones at any time, others in another step; all of them if they are asked for, and
    none if none are."""
    samples = long_groups()
    trained = {
        n: sum(s.num_trained for s in samples if s.prompt_index in n)
        for n in ((0, 1, 2, 3, 4), (0, 2))
    }
    compared = {}
    for count in (0, 2, 1000):
        learned = _learned(samples, measured_zero_advantage=count)
        assert learned.metrics["mismatch/differing_tokens"] == 0
        compared[count] = set(learned.compared)
        tokens = sum(len(row) for row in learned.compared.values())
        assert learned.metrics["mismatch/compared_tokens"] == tokens
    assert (
        trained[0, 2]
        <= tokens_of(samples, compared[0])
        < tokens_of(samples, compared[1000])
        == sum(s.num_trained for s in samples)
    )
    assert (
        compared[0]
        < compared[2]
        < compared[1000]
        == {(s.prompt_index, s.sample_index) for s in samples}
    )
    assert len(compared[2]) == len(compared[0]) + 2
    assert set(_learned(samples, measured_zero_advantage=2).compared) == compared[2]
    assert drawn(range(9), 3, 0, 1) != drawn(range(9), 3, 0, 2)
    assert drawn(range(9), 3, 0, 1) == sorted(drawn(range(9), 3, 0, 1))
    none = make_learner(tiny_model(scale=4), micro_batch_tokens=40, measured_zero_advantage=2)
    result = none.learn(samples, [0.0] * len(samples), 0).metrics
    assert result["mismatch/compared_tokens"] > 0
    assert math.isfinite(result["entropy"])
    assert (result["loss/policy"], result["grad_norm"], result["clip_fraction"]) == (0, 0, 0)


def tokens_of(samples: Sequence[Sample], keys: set[tuple[int, int]]) -> int:
    return sum(s.num_trained for s in samples if (s.prompt_index, s.sample_index) in keys)


def _learned(samples: Sequence[Sample], precision: str = "fp8", **options: Any) -> Any:
    learner = make_learner(tiny_model(precision, scale=4), micro_batch_tokens=40, **options)
    return learner.learn(samples, credit(samples), 0)


def test_a_difference_is_found_in_what_is_left_out() -> None:
    """Where it is measured; the control measures none."""
    samples = long_groups()
    broken = [
        s
        if s.prompt_index in (0, 2)
        else replace(s, rollout_logprobs=tuple(x - 1 for x in s.rollout_logprobs))
        for s in samples
    ]
    for count, precision in ((2, "fp8"), (0, "fp8")):
        learner = make_learner(
            tiny_model(precision, scale=4),
            on_mismatch="stop",
            micro_batch_tokens=1,
            measured_zero_advantage=count,
        )
        if count:
            with pytest.raises(Disagreement):
                learner.learn(broken, credit(broken), 0)
        else:
            assert (
                learner.learn(broken, credit(broken), 0).metrics["mismatch/differing_tokens"] == 0
            )


_RULES = {
    "token_tis": (CorrectionRule("token", cap=2.0), True),
    "normalized": (CorrectionRule("token", cap=2.0, normalize=True), False),
    "rejection": (CorrectionRule("token", rejection=Rejection("ratio", "token", 0.8, 1.25)), False),
    "kept": (
        CorrectionRule(rejection=Rejection("ratio", "token", 0.8, 1.25), denominator="kept"),
        False,
    ),
}


@pytest.mark.parametrize("rule", _RULES)
def test_old_logprobs_are_computed_of_what_teaches(
    rule: str, everything: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And of what is measured; of all, where a correction decides over the batch."""
    samples = long_groups("fp8-rollout")
    correction, spared = _RULES[rule]
    objective, passed = Objective(correction=correction, loss_aggregation="token_mean"), []

    def counted(policy: PolicyForward, all_of: Any, parts: Any, ranks: Ranks, *read: Any) -> Any:
        passed.append(sum(map(len, parts)))
        return values_of(policy, all_of, parts, ranks, *read)

    monkeypatch.setattr("isobit.rl.learner.learner.values_of", counted)
    state, metrics = learn(samples, "fp8-rollout", objective=objective, teaching=((0, 2),))
    assert metrics[0]["learn/skipped_share"] > 0.2
    assert (passed[0] < 0.8 * len(samples)) == spared
    assert (passed[0] == len(samples)) != spared
    everything()
    full, all_metrics = learn(samples, "fp8-rollout", objective=objective, teaching=((0, 2),))
    assert passed[-1] == len(samples)
    assert same_bits(state, full)
    assert same_metrics(metrics, all_metrics)
    if not spared:
        assert metrics[0]["correction/mean_weight"] == all_metrics[0]["correction/mean_weight"]
        assert metrics[0]["mismatch/kl_k3"] == all_metrics[0]["mismatch/kl_k3"]


def test_stale_samples_that_teach_nothing_are_left_out(everything: Any) -> None:
    """Old log-probabilities are computed under one flow too, where samples are of older weights."""
    samples = [replace(s, weights_version=-(s.sample_index % 2)) for s in long_groups()]
    objective = replace(
        for_precision(Objective(), tiny_model().precision, stale=True),
        recompute_old_logprobs="always",
    )
    state, metrics = learn(samples, "fp8", objective=objective)
    assert 0.2 < metrics[0]["learn/skipped_share"] < 1
    everything()
    assert same_bits(learn(samples, "fp8", objective=objective)[0], state)


def test_idle_samples_apart_are_all_left_out(everything: Any) -> None:
    """What teaches is then grouped as if it were alone, which rounds gradients differently; leaving
    out the rest changes no bit of that."""
    samples = [
        s
        for pair in zip(*(long_groups()[i::2] for i in (0, 1)), strict=True)
        for s in reversed(pair)
    ]
    samples.sort(
        key=lambda s: s.sample_index
    )  # so that groups are mixed, as several updates of a batch mix them
    given: dict[str, Any] = {"teaching": ((0, 2), (1,)), "micro_batch_tokens": 60}
    state, metrics = learn(samples, "fp8", given={"separate_zero_advantage": True}, **given)
    rows = [len(s.prompt_ids) + len(s.completion_ids) for s in samples]
    idle = sum(n for n, s in zip(rows, samples) if s.prompt_index not in (0, 2))
    assert metrics[0]["learn/skipped_share"] == idle / sum(rows)
    mixed, in_order = learn(samples, "fp8", **given)
    assert in_order[0]["learn/skipped_share"] < 0.1
    assert not same_bits(state, mixed)
    everything()
    assert same_bits(
        learn(samples, "fp8", given={"separate_zero_advantage": True}, **given)[0], state
    )


def test_the_first_that_teaches_is_differentiated_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not one that is left out (`check_gradients_every`)."""
    tried: list[int] = []
    plain = Differentiation._try

    def counted(self: Differentiation, one: OptimizerBatch, index: int, *given: Any) -> Any:
        tried.append(index)
        return plain(self, one, index, *given)

    monkeypatch.setattr(Differentiation, "_try", counted)
    for family in ("qwen3", "qwen3_moe"):
        samples = long_groups(family=family)
        model = tiny_model("fp8", family, scale=4)
        learner = make_learner(model, micro_batch_tokens=20, check_gradients_every=1)
        learner.learn(samples, credit(samples, (2,)), 0)
    first, again = tried
    assert first == again > 0


def test_groups_of_sums_keep_their_places() -> None:
    """Where micro-batches are added in groups, an idle one keeps its place in a group that
    teaches."""
    one = Update(range(8), [[i] for i in range(8)], frozenset((0, 2, 3, 6)))
    assert one.dealt(1) == [1, 4, 5, 7]
    assert one.dealt(2) == [None, 1, 4, 5, None, 7]
    assert one.dealt(3) == [None, 1, None, None, 4, 5, None, 7]
