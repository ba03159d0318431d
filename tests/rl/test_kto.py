"""KTO: TRL's loss, in value and gradient; mismatched pairs as TRL makes them; and a KL of exactly 0
where the policy is the reference, however answers are cut into micro-batches."""

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from isobit.model import Model
from isobit.rl import Sample
from isobit.rl.algorithm.functions import weighted_sum
from isobit.rl.algorithm.given import kl_of_mismatched, kto, mismatched, supervised_objective
from isobit.rl.algorithm.loss import LossOutputs, token_weights
from isobit.rl.learner.learner import Learner
from isobit.rl.optim.schedule import OptimizerSettings
from isobit.rl.optim.sharded import ShardedOptimizer
from tests.models import tiny_model
from tests.rl.helpers import distance, loss_inputs
from tests.rl.trl_loss import needs_trl

LENGTHS = (3, 5, 4, 1, 2)
LABELS = (1.0, -1.0, 1.0, -1.0, -1.0)
BETA, WEIGHTS = 0.3, (1.0, 1.7)
KINDS = {"mixed": LABELS, "desirable": (1.0,) * 5, "undesirable": (-1.0,) * 5}


def case(seed: int = 3) -> tuple[Tensor, Tensor]:
    """Policy, with a gradient, and reference log-probabilities of all tokens."""
    generator = torch.Generator().manual_seed(seed)
    reference = -3 * torch.rand(sum(LENGTHS), generator=generator, dtype=torch.float64) - 0.1
    moved = 0.6 * torch.randn(sum(LENGTHS), generator=generator, dtype=torch.float64)
    return (reference + moved).requires_grad_(), reference


def sums(values: Tensor) -> Tensor:
    return torch.stack([row.sum() for row in values.split(LENGTHS)])


def kl_of(mismatch: tuple[Tensor, Tensor]) -> float:
    mine, other = (each.detach().split(LENGTHS) for each in mismatch)
    return kl_of_mismatched(mine, other)


def ours(
    policy: Tensor, reference: Tensor, kl: float, labels: tuple[float, ...]
) -> tuple[Tensor, LossOutputs]:
    settings = supervised_objective("kto", BETA, WEIGHTS)
    settings = type(settings).of(settings, kl_baseline=kl)
    lengths = torch.tensor(LENGTHS)
    weights = token_weights(LENGTHS, settings.loss_aggregation, 10)
    inputs = loss_inputs(
        policy,
        reference,
        torch.tensor(labels, dtype=torch.float64).repeat_interleave(lengths),
        settings,
        reference_logprobs=reference,
        token_weights=torch.tensor(weights, dtype=torch.float64).repeat_interleave(lengths),
        sequence=torch.arange(len(LENGTHS)).repeat_interleave(lengths),
    )
    outputs = kto(inputs)
    return weighted_sum(outputs, inputs), outputs


def restated(policy: Tensor, reference: Tensor, kl: float, labels: tuple[float, ...]) -> Tensor:
    """The formula, answer by answer."""
    losses = []
    for ratio, label in zip(sums(policy) - sums(reference), labels):
        if label > 0:
            losses.append(WEIGHTS[0] / (1 + torch.exp(BETA * (ratio - kl))))
        else:
            losses.append(WEIGHTS[1] / (1 + torch.exp(BETA * (kl - ratio))))
    return torch.stack(losses).mean()


def of_trl(
    policy: Tensor, reference: Tensor, mismatch: tuple[Tensor, Tensor], labels: tuple[float, ...]
) -> tuple[Tensor, dict[str, float]]:
    """`_compute_loss` of TRL 1.16's KTOTrainer, given log-probabilities in place of models."""
    from trl.trainer.kto_trainer import KTOTrainer

    width = max(LENGTHS)

    def rows(values: Tensor) -> Tensor:
        parts = values.split(LENGTHS)
        return torch.stack([torch.cat([p, p.new_zeros(width - len(p))]) for p in parts])

    mask = torch.tensor([[0] + [1] * n + [0] * (width - n) for n in LENGTHS])

    def model(values: Tensor, mismatched: Tensor) -> Any:
        def forward(**given: Any) -> Any:
            found = rows(mismatched if int(given["input_ids"][0, 0]) == 7 else values)
            zeros = torch.zeros_like(found)
            return SimpleNamespace(log_probs=found, entropy=zeros, mean_logits=zeros)

        forward.training = True  # type: ignore[attr-defined]
        return forward

    metrics: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    trainer = SimpleNamespace(
        accelerator=SimpleNamespace(device="cpu", gather_for_metrics=lambda x: x),
        model=SimpleNamespace(training=True),
        ref_model=model(reference, mismatch[1]),
        args=SimpleNamespace(gradient_checkpointing_kwargs=None),
        aux_loss_enabled=False,
        precompute_ref_logps=False,
        calculate_KL=True,
        loss_type="kto",
        beta=BETA,
        desirable_weight=WEIGHTS[0],
        undesirable_weight=WEIGHTS[1],
        _metrics=metrics,
        _total_train_tokens=0,
        _tp_size=1,
    )
    trainer._compute_kl_logps = lambda *given: KTOTrainer._compute_kl_logps(trainer, *given)
    other = mask.clone()
    other[:, 0] = 7
    inputs = {
        "input_ids": mask,
        "attention_mask": mask,
        "completion_mask": mask,
        "KL_input_ids": other,
        "KL_attention_mask": mask,
        "KL_completion_mask": mask,
        "label": torch.tensor(labels) > 0,
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trl.trainer.kto_trainer.is_peft_model", lambda model: False)
        patch.setattr(
            "trl.trainer.kto_trainer.disable_gradient_checkpointing", lambda *given: torch.no_grad()
        )
        total = KTOTrainer._compute_loss(trainer, model(policy, mismatch[0]), inputs, False)
    return total, {name: values[-1] for name, values in metrics["train"].items()}


@pytest.mark.parametrize("labels", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("seed", [5, 9])
def test_the_loss_is_the_formula_in_value_and_gradient(
    labels: tuple[float, ...], seed: int
) -> None:
    """The control: other labels."""
    policy, reference = case()
    kl = kl_of(case(seed))
    found, wanted = (f(policy, reference, kl, labels) for f in (lambda *g: ours(*g)[0], restated))
    (gradient,) = torch.autograd.grad(found, policy)
    (theirs,) = torch.autograd.grad(wanted, policy)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=0)
    torch.testing.assert_close(gradient, theirs, rtol=1e-12, atol=1e-15)
    other = restated(policy, reference, kl, tuple(-label for label in labels))
    assert float((found - other).detach().abs()) > 0.01


@needs_trl
@pytest.mark.parametrize("labels", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("seed", [5, 9])
def test_the_loss_and_its_metrics_are_those_of_trls_own_code(
    labels: tuple[float, ...], seed: int
) -> None:
    policy, reference = case()
    mismatch = case(seed)
    kl = kl_of(mismatch)
    found, outputs = ours(policy, reference, kl, labels)
    wanted, metrics = of_trl(policy, reference, mismatch, labels)
    (gradient,) = torch.autograd.grad(found, policy)
    (theirs,) = torch.autograd.grad(wanted, policy)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=0)
    torch.testing.assert_close(gradient, theirs, rtol=1e-12, atol=1e-15)
    assert metrics["kl"] == pytest.approx(kl, rel=1e-12)
    desirable = sum(label > 0 for label in labels)
    for name, count in (("chosen", desirable), ("rejected", len(labels) - desirable)):
        if count:
            mean = float(outputs.metrics[f"{name}_reward"].sum()) / count
            assert mean == pytest.approx(metrics[f"rewards/{name}"], rel=1e-6)


def test_a_kl_below_0_is_0_and_both_cases_are_tried() -> None:
    """What the tests above compare: an estimate above 0, and one that is cut."""
    assert sorted(kl_of(case(seed)) > 0 for seed in (5, 9)) == [False, True]


def test_each_prompt_gets_the_answer_before_its_own() -> None:
    """TRL: `[completion_ids[-1]] + completion_ids[:-1]` of a batch. What is too long is left out."""
    found = [
        Sample(i, 0, (10 + i,) * (i + 1), (20 + i,) * 2, (0.0, 0.0), "", False, -1)
        for i in range(3)
    ]
    pairs = mismatched(found, 100)
    assert [(p.prompt_ids[0], p.completion_ids[0]) for p in pairs] == [(10, 22), (11, 20), (12, 21)]
    assert [p.prompt_ids[0] for p in mismatched(found, 4)] == [10, 11]
    assert kl_of_mismatched([], []) == 0.0


def samples(model: Model) -> list[Sample]:
    encode = model.tokenizer.encode
    rows = (("1+1=", "2", 1.0), ("2+3=", "1", -1.0), ("4+4=", "8", 1.0), ("7+1=", "889", -1.0))
    found = []
    for cursor, (prompt, answer, reward) in enumerate(rows):
        ids = (*encode(answer, add_special=False), *model.tokenizer.eos_ids)
        found.append(
            Sample(
                *(cursor, 0, tuple(encode(prompt)), ids, (0.0,) * len(ids), "", False, -1),
                reward=reward,
            )
        )
    return found


def learner(model: Model, reference: Model, tokens: int) -> Learner:
    settings = OptimizerSettings(learning_rate=1e-2, max_grad_norm=1e9)
    return Learner(
        model,
        ShardedOptimizer(model.named_parameters(), settings),
        supervised_objective("kto", BETA, WEIGHTS),
        reference=reference,
        micro_batch_tokens=tokens,
        expects_equal_bits=False,
    )


@pytest.mark.parametrize("tokens", [1000, 20, 1])
def test_the_kl_is_exactly_0_before_anything_is_learned(tokens: int) -> None:
    """Under FP8, in any micro-batches. The controls: a reference of another precision."""
    model = tiny_model("fp8", scale=4)
    trained, given = learner(model, model.under("fp8"), tokens), samples(model)
    assert trained.kl_baseline(given) == 0.0
    advantages = [sample.reward or 0.0 for sample in given]
    first = trained.learn(given, advantages, 0).metrics
    assert first["loss/kl_baseline"] == first["loss/chosen_reward"] == 0.0
    assert first["loss/policy"] == pytest.approx(sum(WEIGHTS) / 4, rel=1e-6)
    other = tiny_model("fp8", scale=4)
    mixed = learner(other, other.under("bf16"), tokens).learn(given, advantages, 0)
    assert mixed.metrics["loss/chosen_reward"] != 0.0


def test_the_gradient_does_not_depend_on_how_answers_are_cut() -> None:
    """The KL is of the whole batch, and above 0 here."""
    model = tiny_model("float32", scale=7)
    given = samples(model)
    found: list[dict[str, Tensor]] = []
    for tokens in (1000, 20, 1):
        trained = learner(model, tiny_model("float32", scale=8), tokens)
        assert trained.kl_baseline(given) > 0
        parameters, kept = trained.optimizer.parameters, dict[str, Tensor]()

        def step(rate: float, norm: float, of: Any = (parameters, kept)) -> None:
            of[1].update({n: p.grad.clone() for n, p in of[0].items() if p.grad is not None})

        trained.optimizer.step = step  # type: ignore[method-assign]
        trained.learn(given, [sample.reward or 0.0 for sample in given], 0)
        found.append(kept)
    assert distance(found[1], found[0]) < 1e-5
    assert distance(found[2], found[0]) < 1e-5
