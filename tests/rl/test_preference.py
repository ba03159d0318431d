"""Losses of pairs: TRL's, in value and gradient, however the pairs are cut into micro-batches; and a
margin of exactly 0 where the policy is the reference."""

import math
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from isobit.model import Model
from isobit.rl import Sample
from isobit.rl.algorithm.functions import weighted_sum
from isobit.rl.algorithm.given import GIVEN_LOSSES, PAIR_LOSSES, supervised_objective
from isobit.rl.algorithm.loss import LossOutputs, token_weights
from isobit.rl.learner.learner import Learner
from isobit.rl.learner.schedule import Cutting
from isobit.rl.optim.schedule import OptimizerSettings
from isobit.rl.optim.sharded import ShardedOptimizer
from tests.models import tiny_model
from tests.rl.helpers import distance, loss_inputs
from tests.rl.trl_loss import needs_trl

LENGTHS = (3, 5, 4, 1, 2, 6)
"""Of the answers of three pairs, the preferred first."""
BETA = 0.3


def case() -> tuple[Tensor, Tensor]:
    """Policy, with a gradient, and reference log-probabilities of all tokens."""
    generator = torch.Generator().manual_seed(3)
    reference = -3 * torch.rand(sum(LENGTHS), generator=generator, dtype=torch.float64) - 0.1
    moved = 0.4 * torch.randn(sum(LENGTHS), generator=generator, dtype=torch.float64)
    return (reference + moved).requires_grad_(), reference


def ours(kind: str, policy: Tensor, reference: Tensor) -> tuple[Tensor, LossOutputs]:
    objective = supervised_objective(kind, BETA)
    lengths = torch.tensor(LENGTHS)
    weights = token_weights(LENGTHS, objective.loss_aggregation, 10)
    inputs = loss_inputs(
        policy,
        reference,
        torch.ones_like(reference),
        objective,
        reference_logprobs=reference,
        token_weights=torch.tensor(weights, dtype=torch.float64).repeat_interleave(lengths),
        sequence=torch.arange(len(LENGTHS)).repeat_interleave(lengths),
    )
    outputs = GIVEN_LOSSES[kind](inputs)
    return weighted_sum(outputs, inputs), outputs


def restated(kind: str, policy: Tensor, reference: Tensor) -> Tensor:
    """The formulas, pair by pair."""
    rows = zip(policy.split(LENGTHS), reference.split(LENGTHS))
    ratios = [(mine - other).sum() for mine, other in rows]
    losses = []
    for k in range(0, len(LENGTHS), 2):
        if kind == "dpo":
            losses.append(torch.log1p(torch.exp(-BETA * (ratios[k] - ratios[k + 1]))))
        else:
            delta = ratios[k] / LENGTHS[k] - ratios[k + 1] / LENGTHS[k + 1]
            losses.append((delta - 1 / (2 * BETA)) ** 2)
    return torch.stack(losses).mean()


def of_trl(kind: str, policy: Tensor, reference: Tensor) -> tuple[Tensor, dict[str, float]]:
    """`_compute_loss` of TRL 1.16's DPOTrainer, given log-probabilities in place of models; its
    batch has all preferred answers first, after a token of prompt."""
    from trl.trainer.dpo_trainer import DPOTrainer

    order = [*range(0, len(LENGTHS), 2), *range(1, len(LENGTHS), 2)]
    width = max(LENGTHS)

    def rows(values: Tensor) -> Tensor:
        parts = values.split(LENGTHS)
        filled = [torch.cat([parts[i], parts[i].new_zeros(width - LENGTHS[i])]) for i in order]
        return torch.stack(filled)

    mask = torch.tensor([[0] + [1] * LENGTHS[i] + [0] * (width - LENGTHS[i]) for i in order])

    def model(values: Tensor) -> Any:
        found = rows(values)
        zeros = torch.zeros_like(found)
        outputs = SimpleNamespace(
            log_probs=found, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool()
        )

        def forward(**given: Any) -> Any:
            return outputs

        return forward

    metrics: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    trainer = SimpleNamespace(
        accelerator=SimpleNamespace(
            device="cpu", gather=lambda x: x, gather_for_metrics=lambda x: x
        ),
        model=SimpleNamespace(training=True),
        ref_model=model(reference),
        args=SimpleNamespace(gradient_checkpointing_kwargs=None),
        aux_loss_enabled=False,
        ld_alpha=None,
        precompute_ref_logps=False,
        f_divergence_type="reverse_kl",
        loss_types=["sigmoid" if kind == "dpo" else kind],
        loss_weights=[1.0],
        beta=BETA,
        use_weighting=False,
        _metrics=metrics,
        _total_train_tokens=0,
        _tp_size=1,
    )
    inputs = {"input_ids": mask, "attention_mask": mask, "completion_mask": mask}
    with pytest.MonkeyPatch.context() as patch:
        for name in ("is_peft_model", "disable_gradient_checkpointing"):
            found = {
                "is_peft_model": lambda model: False,
                "disable_gradient_checkpointing": lambda *given: torch.no_grad(),
            }[name]
            patch.setattr(f"trl.trainer.dpo_trainer.{name}", found)
        total = DPOTrainer._compute_loss(trainer, model(policy), inputs, False)
    return total, {name: values[-1] for name, values in metrics["train"].items() if "/" in name}


@pytest.mark.parametrize("kind", PAIR_LOSSES)
def test_the_loss_is_the_formula_in_value_and_gradient(kind: str) -> None:
    policy, reference = case()
    found, wanted = ours(kind, policy, reference)[0], restated(kind, policy, reference)
    (gradient,) = torch.autograd.grad(found, policy)
    (theirs,) = torch.autograd.grad(wanted, policy)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=0)
    torch.testing.assert_close(gradient, theirs, rtol=1e-12, atol=1e-15)
    other = restated("ipo" if kind == "dpo" else "dpo", policy, reference)  # the control
    assert float((found - other).detach().abs()) > 0.1


@needs_trl
@pytest.mark.parametrize("kind", PAIR_LOSSES)
def test_the_loss_and_its_metrics_are_those_of_trls_own_code(kind: str) -> None:
    policy, reference = case()
    found, outputs = ours(kind, policy, reference)
    wanted, metrics = of_trl(kind, policy, reference)
    (gradient,) = torch.autograd.grad(found, policy)
    (theirs,) = torch.autograd.grad(wanted, policy)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=0)
    torch.testing.assert_close(gradient, theirs, rtol=1e-12, atol=1e-15)
    names = {
        "chosen_reward": "rewards/chosen",
        "rejected_reward": "rewards/rejected",
        "margin": "rewards/margins",
        "accuracy": "rewards/accuracies",
    }
    for name, other in names.items():
        mean = float(outputs.metrics[name].sum()) / len(LENGTHS)  # shared out over both answers
        assert mean == pytest.approx(metrics[other], rel=1e-6)


def samples(model: Model, answers: tuple[tuple[str, str, str], ...]) -> list[Sample]:
    """Pairs of a prompt, the preferred answer, and the other."""
    encode = model.tokenizer.encode
    found = []
    for cursor, (prompt, *both) in enumerate(answers):
        for number, answer in enumerate(both):
            ids = (*encode(answer, add_special=False), *model.tokenizer.eos_ids)
            found.append(
                Sample(cursor, number, tuple(encode(prompt)), ids, (0.0,) * len(ids), "", False, -1)
            )
    return found


ANSWERS = (("1+1=", "2", "34"), ("2+3=", "5", "1"), ("4+4=", "8", "12345"), ("7+1=", "88", "9"))


def learner(model: Model, reference: Model, kind: str = "dpo", tokens: int = 1000) -> Learner:
    settings = OptimizerSettings(learning_rate=1e-2, max_grad_norm=1e9)
    optimizer = ShardedOptimizer(model.named_parameters(), settings)
    objective = supervised_objective(kind, BETA)
    return Learner(
        model,
        optimizer,
        objective,
        reference=reference,
        micro_batch_tokens=tokens,
        expects_equal_bits=False,
    )


@pytest.mark.parametrize("kind", PAIR_LOSSES)
@pytest.mark.parametrize("tokens", [1000, 30, 1])
def test_the_margin_is_exactly_0_before_anything_is_learned(kind: str, tokens: int) -> None:
    """Under FP8, in any micro-batches: reference and policy are one forward. The controls: a
    reference of another precision, and the second step."""
    model = tiny_model("fp8", scale=4)
    trained = learner(model, model.under("fp8"), kind, tokens)
    given = samples(model, ANSWERS)
    first = trained.learn(given, [1.0] * len(given), 0).metrics
    assert first["loss/margin"] == first["loss/chosen_reward"] == 0.0
    assert first["loss/policy"] == pytest.approx(
        math.log(2) if kind == "dpo" else (1 / (2 * BETA)) ** 2, rel=1e-6
    )
    model.sync()
    assert trained.learn(given, [1.0] * len(given), 1).metrics["loss/margin"] > 0.01
    other = tiny_model("fp8", scale=4)
    mixed = learner(other, other.under("bf16"), kind, tokens)
    assert mixed.learn(given, [1.0] * len(given), 0).metrics["loss/margin"] != 0.0


def gradient(model: Model, given: list[Sample], tokens: int) -> dict[str, Tensor]:
    """Of all pairs, against a reference that is another model."""
    trained, found = learner(model, tiny_model("float32", scale=7), tokens=tokens), {}
    parameters = trained.optimizer.parameters

    def step(rate: float, norm: float) -> None:
        found.update({n: p.grad.clone() for n, p in parameters.items() if p.grad is not None})

    trained.optimizer.step = step  # type: ignore[method-assign]
    trained.learn(given, [1.0] * len(given), 0)
    return found


def test_the_gradient_does_not_depend_on_how_pairs_are_cut() -> None:
    """And both answers of a pair are never cut apart; the control cuts between them."""
    model = tiny_model("float32", scale=8)
    given = samples(model, ANSWERS)
    found = [gradient(model, given, tokens) for tokens in (1000, 25, 1)]
    assert distance(found[1], found[0]) < 1e-5
    assert distance(found[2], found[0]) < 1e-5
    for budget in (1, 14, 25, 40):
        whole = Cutting(budget, together=2).whole(given)
        assert [i for part in whole for i in part] == list(range(len(given)))
        assert all(part[0] % 2 == 0 and len(part) % 2 == 0 for part in whole)
    assert any(len(part) % 2 for part in Cutting(1).whole(given))
