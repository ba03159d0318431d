"""The optimal token baseline against verl's formulas, restated here on padded batches; the norms that
it weighs by, against autograd; and runs with it."""

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from isobit.config import load_config
from isobit.errors import IsobitError
from isobit.rl import Objective, ResolvedObjective, Sample, for_precision
from isobit.rl.algorithm.advantages import AdvantageInputs
from isobit.rl.algorithm.correction import correct
from isobit.rl.algorithm.credit import assign_credit
from isobit.rl.algorithm.token_advantages import otb, squared_norms
from isobit.rl.learner.batch import rollout_logprobs
from isobit.rl.learner.packing import pack
from isobit.training.train import replay, resume, train
from tests.models import tiny_model
from tests.rl.helpers import alternating, make_learner, roll_out
from tests.rl.test_reference_kl import count_passes
from tests.runs import fingerprint, write_config
from tests.training import test_turns

OTB = Objective(advantage="otb")
GROUPS = [
    [[1, 1, 1], [1, 1, 1, 1, 1, 1, 1], [1, 0, 0, 1, 1]],
    [[1, 1, 1, 1], [1, 1, 1, 1], [1]],
    [[1, 1]],
]
"""Of each completion which tokens are trained: the longest alone, two of one length, one alone."""
FLAT = [mask for group in GROUPS for mask in group]
INDEX = [number for number, group in enumerate(GROUPS) for _ in group]
WIDTH = max(map(len, FLAT))
Case = dict[str, Tensor]


def case(seed: int, several_turns: bool, kl: float = 0.3, weighed: bool = False) -> Case:
    """Made-up tokens, [completions, longest]: rewards of tokens, log-probabilities, sums of squared
    probabilities, weights of a correction, and the mask."""
    generator = torch.Generator().manual_seed(seed)

    def random() -> Tensor:
        return torch.rand(len(FLAT), WIDTH, generator=generator, dtype=torch.float64)

    logprobs, more = -2 * random(), random()
    chosen = [mask if several_turns else [1] * len(mask) for mask in FLAT]
    mask = torch.tensor([row + [0] * (WIDTH - len(row)) for row in chosen], dtype=torch.float64)
    paid = kl * (random() - 0.5) * mask
    for row, outcome in enumerate(random()[:, 0].tolist()):
        paid[row, int(mask[row].nonzero().max())] += round(outcome, 1)
    squared = logprobs.exp() ** 2 + more * (1 - logprobs.exp()) ** 2
    weights = 0.5 + random() if weighed else torch.ones_like(mask)
    return {"paid": paid, "logprobs": logprobs, "squared": squared, "rho": weights, "mask": mask}


def verl(given: Case, *, zero_tail: bool = True, cumulative: bool = True) -> Tensor:
    """verl/trainer/ppo/core_algos.py, `compute_optimal_token_baseline_advantage`, and of masks with
    gaps `compute_multi_turn_optimal_token_baseline_advantage`, which moves the tokens that are
    trained together first; without the options that are off by default."""
    mask, lengths = given["mask"], given["mask"].sum(-1).long().tolist()
    returns = (given["paid"] * mask).flip(-1).cumsum(-1).flip(-1)
    energy = (1 - 2 * given["logprobs"].exp() + given["squared"]) * given["rho"] ** 2 * mask
    energy = energy.cumsum(-1) if cumulative else energy
    together, weights = torch.zeros_like(mask), torch.zeros_like(mask)
    for row, length in enumerate(lengths):
        together[row, :length] = returns[row, mask[row].bool()]
        weights[row, :length] = energy[row, mask[row].bool()]
    baselines = torch.zeros_like(mask)
    for number in range(len(GROUPS)):
        rows = [row for row, own in enumerate(INDEX) if own == number]
        if len(rows) == 1:
            continue
        total = weights[rows].sum(0) + 1e-8
        baselines[rows] = (together[rows] * weights[rows]).sum(0) / total
        ordered = sorted((lengths[row], row) for row in rows)
        if zero_tail and ordered[-1][0] > ordered[-2][0]:
            baselines[ordered[-1][1], ordered[-2][0] :] = 0.0
    found = torch.zeros_like(mask)
    for row, length in enumerate(lengths):
        found[row, mask[row].bool()] = (together - baselines)[row, :length]
    return found


def ours(given: Case) -> list[list[tuple[float, ...]]]:
    """`otb` of the same tokens: a reward at the last one, and what each is charged."""
    norms = (1 - 2 * given["logprobs"].exp() + given["squared"]) * given["rho"] ** 2
    rewards, penalties, weights = [], [], []
    for row, trained in enumerate(given["mask"].bool()):
        rewards.append(1.5)  # of which the last token's penalty gives back what is too much
        taken = (-given["paid"][row, trained]).tolist()
        penalties.append((*taken[:-1], taken[-1] + 1.5))
        weights.append(norms[row, trained].tolist())

    def grouped(values: list[Any]) -> list[list[Any]]:
        each = iter(values)
        return [[next(each) for _ in group] for group in GROUPS]

    inputs = (grouped(values) for values in (rewards, penalties))
    return otb(AdvantageInputs(*inputs, [], ResolvedObjective(), grouped(weights)))  # type: ignore


def flat(rows: list[list[tuple[float, ...]]]) -> list[float]:
    return [value for group in rows for row in group for value in row]


def close(found: list[float], theirs: Tensor, given: Case) -> bool:
    return found == pytest.approx(theirs[given["mask"].bool()].tolist(), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("weighed", [False, True], ids=["plain", "corrected"])
@pytest.mark.parametrize("several_turns", [False, True], ids=["one turn", "several turns"])
@pytest.mark.parametrize("seed", [0, 1])
def test_advantages_are_verls(seed: int, several_turns: bool, weighed: bool) -> None:
    """The controls: a baseline for the tail too, the energy of each token alone, and the mean."""
    given = case(seed, several_turns, weighed=weighed)
    found = flat(ours(given))
    assert close(found, verl(given), given)
    assert not close(found, verl(given, zero_tail=False), given)
    assert not close(found, verl(given, cumulative=False), given)
    alike = {**given, "squared": 2 * given["logprobs"].exp()}
    assert not close(found, verl(alike), given)


def test_the_baseline_is_the_one_of_least_energy_weighted_variance() -> None:
    """At each place Σ W·(G - B)² is least: its slope by B, Σ W·(G - B), is 0. The control: the
    mean's is not."""
    given = case(3, several_turns=False)
    rows = ours(given)[0]
    norms = (1 - 2 * given["logprobs"].exp() + given["squared"]).cumsum(-1)
    for place in range(3):
        weights = [float(norms[row, place]) for row in range(3)]
        own = [row[place] for row in rows]
        slope = sum(w * a for w, a in zip(weights, own, strict=True))
        assert abs(slope) < 1e-6
        mean = sum(own) / 3
        assert abs(sum(w * (a - mean) for w, a in zip(weights, own, strict=True))) > 1e-3


def test_equal_returns_have_exactly_no_advantage_where_several_go_on() -> None:
    """0.1 weighed and divided is not 0.1. The longest alone has no baseline behind the others, as
    in verl, and an unscored completion is outside."""
    norms = [[0.3, 0.7, 0.2], [0.1, 0.9, 0.4, 0.5], [0.8]]
    taken = [[0.0] * len(row) for row in norms]

    def found(*rewards: float | None) -> Any:
        inputs = AdvantageInputs([rewards], [taken], [], ResolvedObjective(), [norms])
        return otb(inputs)[0]

    assert found(0.1, 0.1, 0.1) == [(0.0,) * 3, (0.0, 0.0, 0.0, 0.1), (0.0,)]
    assert found(0.0, 0.0, 0.0) == [(0.0,) * 3, (0.0,) * 4, (0.0,)]
    assert found(None, 0.1, None) == [None, (0.1,) * 4, None]
    gaps = found(1.0, None, 0.0)
    assert gaps[0] == pytest.approx((1 - 0.3 / 1.1, 1.0, 1.0), rel=1e-6)
    assert gaps[1:] == [None, pytest.approx((-0.3 / 1.1,), rel=1e-6)]


@pytest.mark.parametrize("scale", [0.1, 1.0, 20.0])
def test_a_norm_is_that_of_the_gradient_by_the_logits(scale: float) -> None:
    """By autograd, and as verl's `calculate_sum_pi_squared_from_logits` sums the squares; also
    where a token is nearly certain. The control: probabilities at the temperature alone."""
    generator = torch.Generator().manual_seed(4)
    logits = scale * torch.randn(9, 17, generator=generator, dtype=torch.float64)
    tokens = torch.arange(9)
    leaf = logits.clone().requires_grad_()
    rows = torch.arange(9), tokens
    logprobs = torch.log_softmax(leaf, -1)[rows]
    (slope,) = torch.autograd.grad(logprobs.sum(), leaf)
    wanted = (slope**2).sum(-1)
    first, halved = logprobs.detach(), torch.log_softmax(2 * logits, -1)[rows]
    torch.testing.assert_close(squared_norms(first, halved), wanted, rtol=1e-9, atol=1e-12)
    summed = torch.exp(torch.logsumexp(2 * logits, -1) - 2 * torch.logsumexp(logits, -1))
    torch.testing.assert_close((2 * first - halved).exp(), summed, rtol=1e-12, atol=0)
    assert not torch.allclose(squared_norms(first, first), wanted, rtol=1e-3)


@pytest.mark.parametrize("backend", ["reference", "native"])
@pytest.mark.parametrize("preset", ["fp8", "bf16"])
def test_norms_are_of_the_whole_vocabulary_in_any_micro_batches(preset: str, backend: str) -> None:
    """Of a model's own logits, at the sampling's temperature, with the same bits however samples are
    cut. The control: another temperature."""
    model = tiny_model(preset, scale=8, backend=backend)
    samples = [replace(s, completion_mask=None) for s in roll_out(model, temperature=0.7)]
    objective = ResolvedObjective.of(for_precision(OTB, model.precision), temperature=0.7)
    found = make_learner(model, objective).logit_norms(samples)
    packed, transformer = pack(samples), model.transformer
    with torch.no_grad():
        hidden = transformer.hidden(packed.tokens, packed.layout, use="learner")[packed.rows]
        head = transformer.head_weight("learner")
        logits = model.ops.product(hidden, head, None, torch.float32)
    residue = torch.softmax(logits.double() / 0.7, -1)
    residue[torch.arange(len(residue)), packed.targets] -= 1
    wanted = (residue**2).sum(-1)
    whole = torch.tensor([value for row in found for value in row], dtype=torch.float64)
    torch.testing.assert_close(whole, wanted, rtol=2e-5, atol=2e-6)
    warmer = make_learner(model, replace(objective, temperature=1.0)).logit_norms(samples)
    other = torch.tensor([value for row in warmer for value in row], dtype=torch.float64)
    assert not torch.allclose(other, wanted, rtol=1e-2)
    for tokens in (1, 20):
        cut = make_learner(model, objective, micro_batch_tokens=tokens)
        assert cut.logit_norms(samples) == found


def test_a_correction_weighs_norms_by_the_square_and_old_logprobs_are_computed_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With two engines: rollout and learner differ. What is learned is that of a learner that
    computes the old log-probabilities itself. The control: no correction."""
    model = tiny_model("fp8-rollout", scale=8)
    samples = roll_out(model)
    objective = for_precision(OTB, model.precision)
    assert objective.rule.active
    learner = make_learner(model, objective)
    found = learner.logit_norms(samples)
    bare = replace(objective, correction="none", rule=type(objective.rule)())
    plain = make_learner(model, bare).logit_norms(samples)
    old, rollout = learner.logprobs(samples), rollout_logprobs(samples)
    lengths = [len(row) for row in old]
    weights = correct(objective.rule, torch.cat(old), torch.cat(rollout), lengths).weights
    flat_of = [value for row in plain for value in row]
    wanted = [float(w.double() ** 2) * n for w, n in zip(weights, flat_of, strict=True)]
    assert [value for row in found for value in row] == wanted
    assert found != plain
    passes = count_passes(learner, monkeypatch)
    result = learner.learn(samples, alternating(samples), 0).metrics
    assert [count for count in passes if count] == []
    again = tiny_model("fp8-rollout", scale=8)
    assert make_learner(again, objective).learn(samples, alternating(samples), 0).metrics == result


def test_credit_is_by_trained_token_and_decoupled_rewards_add_up() -> None:
    """Of several turns too: a token that is given has no advantage. Two functions apart are their
    sum: at given norms the baseline is linear in what is paid."""

    def sample(number: int, reward: float, mask: tuple[bool, ...]) -> Sample:
        ids = tuple(range(len(mask)))
        return Sample(
            *(0, number, (1,), ids, (0.0,) * len(ids), "", False, 0),
            reward=reward,
            rewards={"a": reward - 0.25, "b": 0.25 * number},
            completion_mask=mask,
        )

    group = [
        sample(0, 1.0, (True, False, True, True)),
        sample(1, 0.0, (True, True, True)),
        sample(2, 0.4, (True, False, False, True)),
    ]
    group = [replace(s, reward=sum(v or 0.0 for v in s.rewards.values())) for s in group]
    norms = [(0.2, 0.5, 0.1), (0.9, 0.3, 0.3), (0.6, 0.4)]
    objective = ResolvedObjective(advantage="otb", reward_weights=(("a", 1.0), ("b", 1.0)))
    whole = assign_credit([group], objective, lambda samples: norms)[1]
    assert [len(row) for row in whole] == [3, 3, 2]  # type: ignore[arg-type]
    apart = replace(objective, decoupled_rewards=True)
    for one, other in zip(whole, assign_credit([group], apart, lambda samples: norms)[1]):
        assert one == pytest.approx(other, abs=1e-6)


VARIANTS = {
    "fp8": [],
    "two engines": ["precision=fp8-rollout"],
    "ahead, with replay": [
        "rollouts_ahead=1",
        "replay={capacity: 8, groups_per_step: 1, max_staleness: 3}",
    ],
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_run_is_resumed_and_repeated_bit_for_bit(
    tmp_path: Path, base_model: Path, variant: str
) -> None:
    """The control: the mean as baseline is another run."""

    def run(name: str, *more: str) -> Any:
        (tmp_path / name).mkdir()
        path = write_config(tmp_path / name, base_model, sampling={"max_new_tokens": 6})
        return train(load_config(path, ["algorithm.advantage=otb", *VARIANTS[variant], *more]))

    whole, parts = run("whole"), run("parts", "steps=2")
    if variant == "fp8":
        assert all(row["mismatch/differing_tokens"] == 0 for row in whole.metrics)
        assert all(row["mismatch/compared_tokens"] > 0 for row in whole.metrics)
        again = replay(whole.run_dir, tmp_path / "again")
        name = "model.safetensors"
        assert fingerprint(again.run_dir)[name] == fingerprint(whole.run_dir)[name]
        other = run("other", "algorithm.advantage=dr_grpo")
        assert fingerprint(other.run_dir)[name] != fingerprint(whole.run_dir)[name]
    resume(parts.run_dir, ["steps=4"])
    assert fingerprint(parts.run_dir) == fingerprint(whole.run_dir)


@pytest.mark.slow
@pytest.mark.parametrize("history", ["append", "fork"])
def test_a_run_of_several_turns(tmp_path: Path, history: str) -> None:
    """What the environment said is no place; a run that goes on has the same bits."""
    model = test_turns.save_chat_model(tmp_path / "chat")

    def run(name: str, *more: str) -> Any:
        own = test_turns.history_of(tmp_path / name, history)
        return test_turns.run(tmp_path / name, model, "algorithm.advantage=otb", *own, *more)

    (tmp_path / "whole").mkdir()
    (tmp_path / "parts").mkdir()
    whole, parts = run("whole", "steps=3"), run("parts", "steps=2")
    assert all(row["mismatch/differing_tokens"] == 0 for row in whole.metrics)
    assert all(row["advantage/nonzero_fraction"] > 0 for row in whole.metrics)
    resume(parts.run_dir, ["steps=3"])
    assert fingerprint(parts.run_dir) == fingerprint(whole.run_dir)


def test_what_it_does_not_combine_with_is_refused(tmp_path: Path, base_model: Path) -> None:
    path = write_config(tmp_path, base_model)
    for change in ("sampling.top_p=0.9", "sampling.top_k=5", "partial.tokens_per_round=2"):
        load_config(path, [change])
        with pytest.raises(IsobitError, match=r"algorithm\.advantage: otb") as caught:
            load_config(path, [change, "algorithm.advantage=otb"])
        assert "\n" not in str(caught.value)
    assert list(itertools.chain(*ours(case(0, False)))), "the cases are not empty"
