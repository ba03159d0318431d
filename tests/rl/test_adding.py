"""A product that adds to a gradient gives it the bits that autograd's addition does, with every
kind of weight."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from isobit.kernels import Layout
from isobit.model import Model
from isobit.model.forward import accumulate_grad as adding
from isobit.model.forward.recompute import Recompute
from isobit.rl import OptimizerSettings, ResolvedObjective, for_precision
from isobit.rl.learner import gradient
from isobit.rl.learner.learner import Learner
from isobit.rl.optim.sharded import ShardedOptimizer
from tests.models import tiny_model
from tests.rl.helpers import alternating, gradients, roll_out, same_bits


@contextmanager
def nowhere(*_: object) -> Iterator[None]:
    yield


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many elements products added to gradients, one number for each product."""
    found: list[int] = []
    added_to = adding.added_to

    def spy(master: Tensor) -> Tensor | None:
        before = added_to(master)
        found.extend([] if before is None else [before.numel()])
        return before

    for module in ("linear_backward", "experts"):
        monkeypatch.setattr(f"isobit.model.forward.{module}.added_to", spy)
    return found


@pytest.fixture
def learned(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Tensor]]:
    """The gradient of an optimizer batch of several micro-batches; by autograd's additions, or by
    those of products."""

    def learn(
        model: Model,
        in_place: bool,
        recompute: Recompute = False,
        gradient_sum_group: int = 1,
        micro_batch_tokens: int = 40,
        **options: Any,
    ) -> dict[str, Tensor]:
        samples = roll_out(model)
        objective = for_precision(ResolvedObjective(max_new_tokens=5), model.precision)
        settings = OptimizerSettings(gradient_sum_group=gradient_sum_group, share_prompts=False)
        optimizer = ShardedOptimizer.of(model, settings)
        options |= {"micro_batch_tokens": micro_batch_tokens, "recompute": recompute}
        learner = Learner(model, optimizer, objective, **options)
        with monkeypatch.context() as patch:
            if not in_place:
                patch.setattr("isobit.rl.learner.gradient.adding_in_place", nowhere)
            return gradients(learner, samples, alternating(samples))

    return learn


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "gpt_oss", "qwen3_5_text"])
@pytest.mark.parametrize("precision", ["fp8", "bf16", "fp8-e2e"])
def test_gradients_have_the_bits_that_autograd_adds(
    precision: str, family: str, held: list[int], learned: Callable[..., dict[str, Tensor]]
) -> None:
    model = tiny_model(precision, family, scale=4)
    wanted = learned(model, False)
    assert not held
    assert same_bits(learned(model, True), wanted)
    matrices = {
        name: p
        for name, p in model.named_parameters().items()
        if p.ndim == 2 and name.startswith("layers.")
    }
    assert sum(held) > sum(p.numel() for name, p in matrices.items() if ".experts." not in name)
    assert not any(hasattr(p, adding._MARK) for p in model.named_parameters().values())


@pytest.mark.parametrize("recompute", [True, "mlp"])
def test_recomputed_layers_too(
    recompute: Recompute, held: list[int], learned: Callable[..., dict[str, Tensor]]
) -> None:
    model = tiny_model("fp8", "qwen3_moe", scale=4)
    wanted = learned(model, False)
    assert same_bits(learned(model, True, recompute), wanted)
    assert held


@pytest.mark.parametrize("masters", ["fp32", "bf16"])
@pytest.mark.parametrize("micro_batch_tokens", [40, 80, 1000])
@pytest.mark.parametrize("tied", [True, False])
def test_head_and_embedding_too(
    tied: bool,
    micro_batch_tokens: int,
    masters: str,
    monkeypatch: pytest.MonkeyPatch,
    learned: Callable[..., dict[str, Tensor]],
) -> None:
    """With logits that are kept and that are computed again, in several micro-batches and in one.
    Most tokens come several times. The controls: a tied head and an embedding that are added one
    after the other, where there is something before them; and a first sum with negative zeros."""
    model = tiny_model("fp8", scale=4, masters=masters, tie_embeddings=tied)
    options = {"micro_batch_tokens": micro_batch_tokens}
    wanted = learned(model, False, **options)
    assert set(wanted) == set(model.named_parameters())
    whole = _rows_of_embeddings(monkeypatch, model)
    assert same_bits(learned(model, True, **options), wanted)
    vocabulary = model.config.vocab_size
    assert (vocabulary in whole) == (not tied), "a tied embedding has no whole gradient"
    if tied and micro_batch_tokens < 1000:
        monkeypatch.setattr(adding.TiedGradient, "_put_aside", lambda self: None)
        assert not same_bits(learned(model, True, **options), wanted)


def _rows_of_embeddings(monkeypatch: pytest.MonkeyPatch, model: Model) -> list[int]:
    """How many rows gradients of embeddings have, one number for each from now on."""
    ops, found = type(model.ops), list[int]()
    backward = model.ops.embedding_backward

    def counted(dy: Tensor, tokens: Tensor, count: int) -> Tensor:
        found.append(count)
        return backward(dy, tokens, count)

    monkeypatch.setattr(ops, "embedding_backward", staticmethod(counted))
    return found


def test_a_gradient_that_is_checked_is_autograds(
    learned: Callable[..., dict[str, Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hooks see each gradient of the first micro-batch, twice, a tied embedding's too."""
    model, seen = tiny_model("bf16", scale=4), list[set[str]]()
    compare = gradient._compare
    monkeypatch.setattr(
        gradient, "_compare", lambda a, b: (seen.append({*a, *b}), compare(a, b))[-1]
    )
    wanted = learned(model, True)
    assert same_bits(learned(model, True, check_gradients_every=1), wanted)
    assert seen == [set(wanted)]


def test_sums_of_groups_are_autograds(
    held: list[int], learned: Callable[..., dict[str, Tensor]]
) -> None:
    model = tiny_model("fp8", scale=4)
    assert same_bits(
        learned(model, True, gradient_sum_group=2), learned(model, False, gradient_sum_group=2)
    )
    assert not held
    assert not same_bits(learned(model, True), learned(model, True, gradient_sum_group=2)), (
        "the control: another order"
    )


def test_a_gradient_that_is_asked_for_is_returned() -> None:
    """Nothing is added where nobody said so, beside gradients that masters have."""
    model = tiny_model("bf16", scale=4)
    masters = model.named_parameters()
    hidden = model.transformer.hidden(torch.tensor([3, 4, 5]), Layout.packed([3]))
    for master in masters.values():
        master.grad = torch.zeros(master.shape)
    asked = torch.autograd.grad(hidden.float().sum(), list(masters.values()), allow_unused=True)
    assert sum(gradient is not None for gradient in asked) > 10
    assert not any(
        bool(master.grad.any()) for master in masters.values() if master.grad is not None
    )


def test_negative_control_a_sum_that_begins_at_the_gradient() -> None:
    """A product whose sum starts from the gradient, and not from zero, has other bits: it rounds
    elsewhere."""
    random = torch.Generator().manual_seed(0)
    a, b, before = (
        torch.randn(shape, generator=random) for shape in ((64, 300), (300, 48), (64, 48))
    )
    carried, product = before.clone(), torch.zeros(64, 48)
    for k in range(300):
        product += a[:, k : k + 1] * b[k]
        carried += a[:, k : k + 1] * b[k]
    assert not torch.equal(before + product, carried)
