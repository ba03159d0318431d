"""Capped logits, cap · tanh(logits / cap): the same function of one number in every place and
backend; and samplers and learners that hold them, bit for bit."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from isobit.engine.sampler import Draws, draw, kinds_of, top_of_draws
from isobit.engine.types import Sampling
from isobit.kernels import Layout, Ops, get_ops
from isobit.kernels.sampling.capped import cap_slope, logits_of
from isobit.kernels.sampling.filtering import Context, Filtering
from isobit.kernels.sampling.top import top_of_rows
from isobit.model import Model
from isobit.model.forward.head_divergence import Other, head_divergence
from isobit.rl.algorithm.divergence import Divergence
from tests.models import level, require, tiny_model

BACKENDS = ["reference", "native", "triton"]
CAP = 6.0


def ops_of(backend: str) -> Ops:
    require(backend)
    return get_ops(backend, level(backend))


def numbers(count: int = 4096) -> Tensor:
    """Of all magnitudes, and 0, -0 and infinities."""
    generator = torch.Generator().manual_seed(3)
    scales = torch.exp2(torch.randint(-40, 9, (count,), generator=generator).float())
    given = torch.randn(count, generator=generator) * scales
    given[:4] = torch.tensor([0.0, -0.0, torch.inf, -torch.inf])
    return given


@pytest.mark.parametrize("cap", [CAP, 30.0])
@pytest.mark.parametrize("backend", BACKENDS)
def test_it_is_tanh(backend: str, cap: float) -> None:
    """Half a unit in the last place of float32, and float64's of 1; the sign is kept. The control:
    another cap."""
    given, ops = numbers(), ops_of(backend)
    found = ops.cap_logits(given.clone().view(8, -1).to(ops.device), cap).flatten().cpu()
    wanted = cap * torch.tanh(given.double() / cap)
    allowed = wanted.abs() * 2.0**-23.9 + cap * 2.0**-50
    assert bool(((found.double() - wanted).abs() <= allowed).all())
    assert torch.equal(torch.signbit(found), torch.signbit(given))
    other = (cap + 0.01) * torch.tanh(given.double() / (cap + 0.01))
    assert bool(((found.double() - other).abs() > allowed).any())
    assert bool(
        ops.cap_logits(torch.full((1, 33), torch.nan, device=ops.device), cap).isnan().all()
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_number_is_capped_alike_in_every_place(backend: str) -> None:
    """At the beginning, the end and in the middle of rows of any width, alone and in a batch."""
    ops = ops_of(backend)
    given = numbers(1031).to(ops.device)
    whole = ops.cap_logits(given.clone().view(1, -1), CAP)[0]
    for lo, hi in ((0, 1), (1030, 1031), (5, 22), (16, 32), (3, 1000), (1, 1031)):
        part = ops.cap_logits(given[lo:hi].clone().view(1, -1), CAP)[0]
        assert torch.equal(part.view(torch.int32), whole[lo:hi].view(torch.int32))
    rows = ops.cap_logits(given[:1030].clone().view(-1, 10), CAP).flatten()
    assert torch.equal(rows.view(torch.int32), whole[:1030].view(torch.int32))


def test_cpp_has_the_bits_of_the_definition() -> None:
    """But for the last place of exp in float64, which float32 seldom sees unless a logit is tiny."""
    given = numbers(100_000).view(1, -1)
    ours, theirs = (ops_of(b).cap_logits(given.clone(), CAP) for b in ("native", "reference"))
    apart = (ours.double() - theirs.double()).abs()
    assert bool((apart <= theirs.abs() * 2.0**-22 + CAP * 2.0**-50).all())
    assert int((apart[given.abs() > 0.01] > 0).sum()) <= 1
    assert int((given.abs() > 0.01).sum()) > 20_000


def model_of(backend: str) -> Model:
    require(backend)
    return tiny_model("bf16", "gemma4_text", backend=backend, scale=8, num_layers=1)


def rows_of(model: Model, count: int = 12) -> tuple[Tensor, Tensor]:
    """Tokens [count], and hidden rows over them."""
    tokens = torch.arange(count) % 7 + 2
    with torch.no_grad():
        return tokens, model.transformer.hidden(tokens, Layout.packed([count]), use="rollout")


WAYS: dict[str, tuple[dict[str, Any], Filtering | None]] = {
    "plain": ({}, None),
    "warm": ({"temperature": 0.7}, None),
    "top_k": ({"top_k": 5}, (5, 1.0, 0.0, 1.0)),
    "top_p": ({"top_p": 0.8, "temperature": 0.7}, (0, 0.8, 0.0, 1.0)),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_drawn_has_the_learners_log_probability(backend: str, way: str) -> None:
    """In every bit, in one batch, among greedy rows, and of the likeliest; Triton's fused head is
    not asked, whose logits nothing caps. The control is a learner without the cap."""
    model = model_of(backend)
    _, hidden = rows_of(model)
    transformer, ops = model.transformer, model.ops
    sampling, filtering = Sampling(**WAYS[way][0]), WAYS[way][1]
    weight, cap = transformer.head_weight("rollout"), model.config.logit_cap
    keys = torch.stack([torch.full((12,), 7), torch.arange(12), *[torch.zeros(12).long()] * 2], 1)
    found = {}
    for name, others in (("alone", [sampling.settings]), ("mixed", [(0.0, 0.0, 1.0, 0.0)])):
        settings = np.array([[sampling.settings, *others][row % 2] for row in range(12)])
        draws = Draws(
            keys.to(ops.device), torch.from_numpy(settings).to(ops.device), kinds_of(settings)
        )
        found[name] = draw(hidden, weight, draws, ops, None, cap)
        if name == "alone":
            top = top_of_draws(hidden, weight, draws, ops, None, cap, [3] * 12)
    tokens, logprobs = found["alone"]
    learned = transformer.head_logprobs(hidden, tokens, sampling.temperature, filtering=filtering)[
        0
    ]
    assert torch.equal(learned.view(torch.int32), logprobs.view(torch.int32))
    assert torch.equal(found["mixed"][1][::2].view(torch.int32), logprobs[::2].view(torch.int32))
    pairs = [(dict(each), int(token), float(p)) for each, token, p in zip(top, tokens, logprobs)]
    assert any(token in each for each, token, _ in pairs)
    assert all(each[token] == p for each, token, p in pairs if token in each)
    transformer.config = replace(model.config, logit_cap=None)
    other = transformer.head_logprobs(hidden, tokens, sampling.temperature, filtering=filtering)[0]
    assert not torch.equal(other.view(torch.int32), logprobs.view(torch.int32))


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_likeliest_of_rows_are_capped(backend: str) -> None:
    model = model_of(backend)
    _, hidden = rows_of(model, 4)
    weight, ops, cap = model.transformer.head_weight("rollout"), model.ops, model.config.logit_cap
    assert cap is not None
    for row, found in zip(hidden.split(1), top_of_rows(hidden, weight, 5, ops, cap)):
        wanted = logits_of(ops, row, weight, cap).double().log_softmax(-1)[0]
        for token, logprob in found:
            assert logprob == pytest.approx(float(wanted[token]), abs=1e-5)
    assert top_of_rows(hidden, weight, 5, ops) != top_of_rows(hidden, weight, 5, ops, cap)


def _gradients(model: Model, filtering: Filtering | None) -> tuple[list[Tensor], list[Tensor]]:
    """Those of hidden rows and head by log-probabilities and entropies, ours and autograd's."""
    generator = torch.Generator().manual_seed(1)
    rows, hidden_size = 9, model.config.hidden_size
    targets = torch.randint(2, 9, (rows,), generator=generator)
    weights = torch.randn(2, rows, generator=generator)
    hidden = torch.randn(rows, hidden_size, generator=generator).requires_grad_()
    context = Context(torch.arange(rows) % 4 + 2, torch.zeros(rows).long(), torch.arange(rows))
    found = model.transformer.head_logprobs(
        hidden, targets, 0.7, chunk=4, filtering=filtering, context=context
    )
    (found[0] @ weights[0] + found[1] @ weights[1]).backward()
    head = model.named_parameters()["embed"]
    ours = [hidden.grad, head.grad]

    twin = [x.detach().double().requires_grad_() for x in (hidden, head)]
    logits = CAP * torch.tanh(twin[0] @ twin[1].t() / CAP)
    if filtering is not None:
        seen = context.seen(slice(None), logits.shape[1])
        penalty = filtering[3]
        logits = torch.where(
            seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits
        )
        least = logits.topk(filtering[0]).values[:, -1:]
        kept = (logits >= least).scatter(1, targets.unsqueeze(1), True)
        logits = logits.masked_fill(~kept, -torch.inf)
    logs = (logits / 0.7).log_softmax(-1)
    chosen = logs.gather(1, targets.unsqueeze(1))[:, 0]
    entropy = -(logs.exp() * logs.masked_fill(logs == -torch.inf, 0.0)).sum(-1)
    total = chosen @ weights[0].double() + entropy @ weights[1].double()
    return [x for x in ours if x is not None], list(torch.autograd.grad(total, twin))


@pytest.mark.parametrize("filtering", [None, (6, 1.0, 0.0, 1.3)])
@pytest.mark.parametrize("backend", ["reference", "native"])
def test_gradients_are_those_of_tanh(backend: str, filtering: Filtering | None) -> None:
    """Of log-probability and entropy together, of all tokens, and of the kept ones with a penalty.
    The control has the slope 1."""
    require(backend)
    model = tiny_model("float32", "gemma4_text", backend=backend, scale=20, num_layers=1)
    for mine, theirs in zip(*_gradients(model, filtering)):
        assert float((mine.double() - theirs).norm() / theirs.norm()) < 1e-5


def test_a_slope_of_one_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the test before this one."""
    monkeypatch.setattr("isobit.model.forward.head.cap_slope", lambda x, cap: torch.ones_like(x))
    model = tiny_model("float32", "gemma4_text", backend="reference", scale=20, num_layers=1)
    mine, theirs = (each[1] for each in _gradients(model, None))
    assert float((mine.double() - theirs).norm() / theirs.norm()) > 0.01


def test_the_slope_is_tanhs() -> None:
    given = torch.linspace(-20, 20, 101, dtype=torch.float64)
    capped = CAP * torch.tanh(given / CAP)
    assert torch.allclose(cap_slope(capped.clone(), CAP), 1 - torch.tanh(given / CAP) ** 2)


def test_a_divergence_is_of_capped_logits() -> None:
    """Of a policy and a teacher with caps, by autograd in float64; the control has the teacher
    uncapped."""
    model = tiny_model("float32", "gemma4_text", backend="reference", scale=20, num_layers=1)
    generator = torch.Generator().manual_seed(2)
    hidden, theirs = (torch.randn(7, 32, generator=generator) for _ in range(2))
    head, divergence = model.transformer._working["learner"].outside.head, Divergence(0.3, 0)
    hidden.requires_grad_()
    given = Other(theirs, model.transformer.head_weight(), model.ops, 3.0)
    found = head_divergence(
        hidden, head, given, lambda p, q: divergence.of(p, q, 1.0), 3, model.ops, CAP
    )
    found.sum().backward()
    wide = hidden.detach().double().requires_grad_()
    matrix = model.named_parameters()["embed"].detach().double()

    def capped(x: Tensor, cap: float) -> Tensor:
        return cap * torch.tanh(x @ matrix.t() / cap)

    wanted = divergence.of(capped(wide, CAP), capped(theirs.double(), 3.0), 1.0)
    wanted.sum().backward()
    assert hidden.grad is not None
    assert wide.grad is not None
    torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-5)
    assert float((hidden.grad.double() - wide.grad).norm() / wide.grad.norm()) < 1e-4
    other = divergence.of(capped(wide, CAP), theirs.double() @ matrix.t(), 1.0)
    assert float((other - wanted).detach().abs().max()) > 0.01


def test_a_saved_model_keeps_its_cap(tmp_path: Path) -> None:
    model = tiny_model("bf16", "gemma4_text", backend="reference")
    model.save(tmp_path)
    again = Model.load(tmp_path, "bf16", "reference", "exact")
    assert again.config.logit_cap == CAP
    assert again.config.global_heads == model.config.global_heads
