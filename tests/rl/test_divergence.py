"""The divergence from a teacher over the vocabulary: TRL's in value and gradient, the same bits in
any chunks and twice, and runs that come nearer to their teacher, stopped or not."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import log_softmax

from isobit.config import load_config
from isobit.errors import IsobitError
from isobit.model.forward.head_divergence import Other, head_divergence
from isobit.rl.algorithm.divergence import Divergence
from isobit.training.plan import Machine, job_of, plan
from isobit.training.train import resume, train
from tests.models import tiny_model
from tests.rl.trl_loss import needs_trl
from tests.runs import fingerprint
from tests.training.test_distillation import written

TEMPERATURE = 0.7
KINDS = [(0.0, 0), (1.0, 0), (0.3, 0), (0.0, 4), (1.0, 4), (0.3, 4)]


def case() -> tuple[Tensor, Tensor]:
    """Logits [5, 12] of policy, with a gradient, and teacher."""
    generator = torch.Generator().manual_seed(5)
    policy, teacher = (
        2 * torch.randn(5, 12, generator=generator, dtype=torch.float64) for _ in range(2)
    )
    return policy.requires_grad_(), teacher


def restated(policy: Tensor, teacher: Tensor, beta: float, top_k: int) -> Tensor:
    """The formula, token by token, of probabilities."""
    found = []
    for mine, theirs in zip(policy, teacher):
        p, q = torch.softmax(mine / TEMPERATURE, -1), torch.softmax(theirs / TEMPERATURE, -1)
        if top_k:
            chosen = p.detach().argsort(descending=True)[:top_k]
            p, q = (torch.cat([x[chosen], 1 - x[chosen].sum().view(1)]) for x in (p, q))
        m = {0.0: p, 1.0: q}.get(beta, (1 - beta) * p + beta * q)
        forward, reverse = ((x * (x / m).log()).sum() for x in (q, p))
        found.append({0.0: forward, 1.0: reverse}.get(beta, beta * forward + (1 - beta) * reverse))
    return torch.stack(found)


def of_trl(policy: Tensor, teacher: Tensor, beta: float, top_k: int) -> Tensor:
    """Of TRL 1.16: `compute_divergence` of SDPO over all or the policy's top k with the rest, for
    which its GKDTrainer's `generalized_jsd_loss` must agree where it is over all."""
    from trl.experimental.gkd.gkd_trainer import GKDTrainer
    from trl.experimental.sdpo.loss_utils import (
        compute_divergence,
        compute_topk_self_distillation_loss,
    )

    scaled = policy / TEMPERATURE, teacher / TEMPERATURE
    if top_k:
        given = {"distillation_topk": top_k, "distillation_alpha": beta}
        return compute_topk_self_distillation_loss(*scaled, **given, distillation_add_tail=True)
    found = compute_divergence(log_softmax(scaled[0], -1), log_softmax(scaled[1], -1), beta)
    whole = GKDTrainer.generalized_jsd_loss(
        policy[None], teacher[None], beta=beta, temperature=TEMPERATURE, reduction="sum"
    )
    torch.testing.assert_close(found.sum(), whole, rtol=1e-6, atol=0)
    return found


@pytest.mark.parametrize(("beta", "top_k"), KINDS)
@pytest.mark.parametrize("source", ["formula", pytest.param("trl", marks=needs_trl)])
def test_it_is_its_source_in_value_and_gradient(source: str, beta: float, top_k: int) -> None:
    """The control: the other direction."""
    policy, teacher = case()
    wanted = (restated if source == "formula" else of_trl)(policy, teacher, beta, top_k)
    found = Divergence(beta, top_k).of(policy, teacher, TEMPERATURE)
    weights = torch.arange(1.0, 6.0, dtype=torch.float64)
    (gradient,) = torch.autograd.grad((found * weights).sum(), policy)
    (theirs,) = torch.autograd.grad((wanted * weights).sum(), policy)
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(gradient, theirs, rtol=1e-9, atol=1e-10)
    other = Divergence(1 - beta, top_k).of(policy, teacher, TEMPERATURE)
    assert float((other - found).detach().abs().max()) > 0.01


def gradients(
    chunk: int, beta: float = 1.0, top_k: int = 0, flow: str = "float32"
) -> tuple[Tensor, ...]:
    """(value, that of hidden rows, that of the head) of a tiny model beside a wider teacher."""
    student, teacher = (
        tiny_model(flow, seed=seed, scale=8, hidden_size=width).transformer
        for seed, width in ((1, 32), (2, 64))
    )
    generator = torch.Generator().manual_seed(7)
    dtype = student.precision.learner.compute.dtype
    hidden = torch.randn(9, 32, generator=generator).to(dtype).requires_grad_()
    other = torch.randn(9, 64, generator=generator).to(dtype)
    head = student._working["learner"].outside.head
    given = Other(other, teacher.head_weight("learner"), teacher.ops["learner"])
    divergence = Divergence(beta, top_k)
    found = head_divergence(
        hidden,
        head,
        given,
        lambda mine, theirs: divergence.of(mine, theirs, TEMPERATURE),
        chunk,
        student.ops["learner"],
    )
    weights = torch.linspace(0.5, 2.0, 9)
    of_hidden, of_head = torch.autograd.grad((found * weights).sum(), (hidden, head.master))
    if flow == "float32":  # of float64, by autograd over all rows at once
        x = hidden.detach().double().requires_grad_()
        w = head.master.detach().double().requires_grad_()
        their_head = teacher._working["learner"].outside.head.master.detach().double()
        whole = divergence.of(x @ w.t(), other.double() @ their_head.t(), TEMPERATURE)
        wanted = torch.autograd.grad((whole * weights.double()).sum(), (x, w))
        torch.testing.assert_close(found.double(), whole, rtol=1e-4, atol=1e-6)
        for mine, theirs in zip((of_hidden, of_head), wanted):
            largest = float(theirs.abs().max())
            assert float((mine.double() - theirs).abs().max()) < 1e-5 * largest
    return found.detach(), of_hidden, of_head


@pytest.mark.parametrize(("beta", "top_k"), [(1.0, 0), (0.0, 0), (0.5, 5)])
def test_the_gradient_is_that_of_float64_in_any_chunks(beta: float, top_k: int) -> None:
    """Values have the same bits; the gradient of the head is a sum over chunks."""
    whole = gradients(100, beta, top_k)
    for chunk in (1, 4):
        found = gradients(chunk, beta, top_k)
        assert torch.equal(found[0], whole[0])
        torch.testing.assert_close(found[2], whole[2], rtol=1e-4, atol=1e-6)


def test_it_repeats_itself_in_every_bit() -> None:
    """In BF16; the control: another divergence."""
    first, second = (gradients(4, flow="bf16") for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second))
    assert not torch.equal(gradients(4, 0.5, flow="bf16")[1], first[1])


LEARNED = {
    "optimizer": {"learning_rate": 5e-3},
    "prompts_per_step": 20,
    "sampling": {"group_size": 2, "max_new_tokens": 6},
}


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("teacher") / "model"
    tiny_model("fp8", seed=9, scale=6.0).save(folder)
    return folder


def of_loss(folder: Path, model: Path, teacher: Path | None, *more: str, **changes: Any) -> Any:
    path = written(folder, model, teacher, **{**LEARNED, **changes})
    return load_config(path, ["algorithm.loss=divergence", *more])


@pytest.mark.slow
def test_a_policy_comes_nearer_and_goes_on_after_a_stop(
    tmp_path: Path, base_model: Path, teacher: Path
) -> None:
    """The control: a policy that is its teacher is at exactly 0."""
    given = ("algorithm.divergence_beta=0.5", "algorithm.divergence_top_k=6")
    whole = train(of_loss(tmp_path / "whole", base_model, teacher, *given, "steps=6"), quiet=True)
    losses = [row["loss/policy"] for row in whole.metrics]
    assert losses[-1] < 0.7 * losses[0]
    train(of_loss(tmp_path / "stopped", base_model, teacher, *given, "steps=3"), quiet=True)
    again = resume(tmp_path / "stopped" / "run", ["steps=6"], quiet=True)
    assert fingerprint(again.run_dir) == fingerprint(whole.run_dir)
    same = train(of_loss(tmp_path / "same", base_model, base_model, "steps=1"), quiet=True)
    assert same.metrics[-1]["loss/policy"] == 0.0
    assert losses[0] > 0.01
    assert math.isfinite(losses[-1])


@pytest.mark.slow
def test_a_teacher_that_is_shown_more_is_read_again_after_a_stop(
    tmp_path: Path, base_model: Path
) -> None:
    """With rollouts ahead: what it reads waits in the checkpoint. The control: shown the prompt
    alone, the model is its own teacher, at exactly 0."""
    shown = {"weights": "policy", "shown": {"success": 0.0, "template": "{shown}{prompt}"}}
    more = {"reference": shown, "rewards": {"functions": []}}

    def config(name: str, steps: int) -> Any:
        path = tmp_path / name
        found = written(path, base_model, None, **{**LEARNED, **more})
        (path / "reward.py").write_text(
            "def one(prompts, completions, **columns):\n    return [1.0] * len(completions)\n"
        )
        changes = [f"rewards.functions=[{path / 'reward.py'}:one]", "rollouts_ahead=1"]
        return load_config(found, ["algorithm.loss=divergence", *changes, f"steps={steps}"])

    whole = train(config("whole", 4), quiet=True)
    assert whole.metrics[-1]["loss/policy"] > 0.0
    train(config("stopped", 2), quiet=True)
    again = resume(tmp_path / "stopped" / "run", ["steps=4"], quiet=True)
    assert fingerprint(again.run_dir) == fingerprint(whole.run_dir)


def test_what_it_takes_is_planned(tmp_path: Path, base_model: Path, teacher: Path) -> None:
    """Two heads' logits, and the teacher's hidden rows; the control: without it there are none."""
    config = of_loss(tmp_path, base_model, teacher)
    here = Machine("this machine", 64 << 30, host=True, packs=True)
    found, without = (
        max(size for label, size in plan(job_of(each, here)).parts if "learning" in label)
        for each in (config, load_config(config, ["algorithm.loss=clip"]))
    )
    vocabulary = job_of(config, here).model.vocab_size
    assert found - without >= 8 * vocabulary


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (["algorithm.advantage=grpo"], "divergence is from a teacher"),
        (["algorithm.ratio=sequence"], "knows no ratio"),
        (["algorithm.loss=clip", "algorithm.divergence_beta=0"], "are of loss: divergence"),
        (["algorithm.divergence_beta=2"], "expected at most 1"),
    ],
)
def test_what_has_no_meaning_is_refused(
    changes: list[str], said: str, tmp_path: Path, base_model: Path, teacher: Path
) -> None:
    with pytest.raises(IsobitError, match=said):
        of_loss(tmp_path, base_model, teacher, *changes)
