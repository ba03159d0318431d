"""Operators with gradients: against float64 autograd over the operands that were really
multiplied."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from isobit.kernels import Composed, Heads, KVStore, Layout, Ops, get_ops
from isobit.kernels.sampling.filtering import Context, Filtering
from isobit.model.forward import autograd
from isobit.model.forward.attend import Attended, attend
from isobit.model.forward.autograd import Vector, Weight
from isobit.model.forward.head import head_logprobs
from isobit.precision import BF16, E4M3, FP32, INT8, PRESETS, QTensor, QuantSpec, quantize
from tests.models import tensor

_ROWS, _IN, _OUT = 150, 300, 260
_BLOCKS, _ROW_BLOCKS = QuantSpec(E4M3, "128x128"), QuantSpec(E4M3, "1x128")
_BF16_ROUNDING = 2.0**-8


def _random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _weight(dgrad: str = "fp8", wgrad: str = "fp8", **changes: object) -> Weight:
    master = torch.nn.Parameter(_random(_OUT, _IN, seed=1, dtype=torch.float32) * 0.1)
    bias = torch.nn.Parameter(_random(_OUT, seed=2, dtype=torch.float32))
    working, rounded = quantize(master.detach(), _BLOCKS), bias.detach().bfloat16()
    weight = Weight("w", master, working, bias, rounded, _ROW_BLOCKS, _ROW_BLOCKS, dgrad, wgrad)
    return replace(weight, **changes)


def _plain_weight(dtype: torch.dtype) -> Weight:
    weight = _weight()
    working, bias = weight.master.detach().to(dtype), tensor(weight.bias_master).detach().to(dtype)
    return Weight("w", weight.master, working, weight.bias_master, bias)


def _run(weight: Weight, x: Tensor, dy: Tensor, ops: Ops) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(y, dx, dW, db)."""
    x = x.clone().requires_grad_()
    y = autograd.linear(x, weight, ops)
    y.backward(dy)
    return y.detach(), x.grad, weight.master.grad, tensor(weight.bias_master).grad


def _close(given: Tensor, wanted: Tensor, relative: float) -> None:
    """Rounded once: within half a unit of each element, plus what float64 sums in another order may
    differ."""
    error = (given.double() - wanted.double()).abs()
    assert bool((error <= relative * wanted.abs() + 1e-9 * wanted.abs().max()).all()), error.max()


@pytest.mark.parametrize("dgrad", ["fp8", "bf16"])
@pytest.mark.parametrize("wgrad", ["fp8", "bf16"])
def test_fp8_linear(ops: Ops, dgrad: str, wgrad: str) -> None:
    weight = _weight(dgrad, wgrad)
    x = _random(_ROWS, _IN, seed=3)
    dy = _random(_ROWS, _OUT, seed=4) * 1e-4
    y, dx, dw, db = _run(weight, x, dy, ops)
    values, w = quantize(x, _ROW_BLOCKS).dequantize().double(), weight.working.dequantize().double()
    _close(y, values @ w.T + tensor(weight.bias).double(), _BF16_ROUNDING)
    along_outputs = (
        quantize(dy, _ROW_BLOCKS).dequantize().double() if dgrad == "fp8" else dy.double()
    )
    _close(dx, along_outputs @ w, _BF16_ROUNDING)
    # with power-of-two scales the saved activation is the same along the tokens, or rounded to BF16
    along_tokens = (
        quantize(dy, QuantSpec(E4M3, "128x1")).dequantize().double()
        if wgrad == "fp8"
        else dy.double()
    )
    _close(dw, along_tokens.T @ values, 2.0**-23)
    assert dw.dtype == db.dtype == torch.float32
    _close(db, dy.double().sum(0), 2.0**-23)


def test_mxfp8_linear_quantizes_the_weight_again_for_dgrad(ops: Ops) -> None:
    """Blocks of 32 lie along one dimension; with powers of two the other direction's codes add no
    error."""
    spec = QuantSpec(E4M3, "1x32", "ue8m0")
    weight = _weight()
    working = quantize(weight.master.detach(), spec)
    weight = replace(weight, prepared=working, activation=spec, gradient=spec)
    x, dy = _random(_ROWS, _IN, seed=3), _random(_ROWS, _OUT, seed=4) * 1e-4
    y, dx, dw, _ = _run(weight, x, dy, ops)
    values, w = quantize(x, spec).dequantize().double(), working.dequantize().double()
    _close(y, values @ w.T + tensor(weight.bias).double(), _BF16_ROUNDING)
    _close(dx, quantize(dy, spec).dequantize().double() @ w, _BF16_ROUNDING)
    along = QuantSpec(E4M3, "32x1")
    again = quantize(values.float(), along).dequantize().double()
    assert (
        float((again - values).abs().max()) < 1e-2 * 2.0**-9
    )  # the smallest codes only: they underflow
    _close(dw, quantize(dy, along).dequantize().double().T @ again, 2.0**-23)


def test_a_weight_with_a_scale_per_row_is_quantized_again_for_dgrad(ops: Ops) -> None:
    spec = QuantSpec(E4M3, "row", "ue8m0")
    weight = replace(_weight(), prepared=quantize(_weight().master.detach(), spec))
    _, dx, _, _ = _run(weight, _random(_ROWS, _IN, seed=3), dy := _random(_ROWS, _OUT, seed=4), ops)
    again = quantize(weight.working.dequantize().t().contiguous(), spec).dequantize().double()
    _close(dx, quantize(dy, _ROW_BLOCKS).dequantize().double() @ again.T, _BF16_ROUNDING)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_plain_linear(ops: Ops, dtype: torch.dtype) -> None:
    weight, relative = _plain_weight(dtype), _BF16_ROUNDING if dtype is torch.bfloat16 else 2.0**-23
    x, dy = _random(_ROWS, _IN, seed=3, dtype=dtype), _random(_ROWS, _OUT, seed=4, dtype=dtype)
    y, dx, dw, db = _run(weight, x, dy, ops)
    w = tensor(weight.working).double()
    assert y.dtype == dx.dtype == dtype
    _close(y, x.double() @ w.T + tensor(weight.bias).double(), relative)
    _close(dx, dy.double() @ w, relative)
    _close(dw, dy.double().T @ x.double(), 2.0**-23)
    _close(db, dy.double().sum(0), 2.0**-23)


@pytest.mark.parametrize("scale", ["ue8m0", "fp32"])
def test_requantizing_the_saved_activation_is_exact_with_power_of_two_scales_only(
    scale: str,
) -> None:
    """FP32 scales are the negative control: there, one copy for both directions adds an error."""
    saved = quantize(_random(_ROWS, _IN, seed=3), QuantSpec(E4M3, "1x128", scale))
    again = quantize(saved.dequantize(), QuantSpec(E4M3, "128x1", scale)).dequantize()
    assert torch.equal(again, saved.dequantize()) == (scale == "ue8m0")


def _saved_bytes(run: Callable[[], Tensor], own: list[Tensor]) -> int:
    """Bytes of the tensors that a forward keeps for backward, weights aside."""
    seen: dict[int, int] = {}

    def count(tensor: Tensor) -> Tensor:
        seen[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        run()
    return sum(size for pointer, size in seen.items() if pointer not in {t.data_ptr() for t in own})


@pytest.mark.parametrize("columns", [64, 300, 1024])
def test_fp8_linear_saves_about_half_of_bf16(columns: int) -> None:
    ops, x = get_ops("reference", "exact"), _random(_ROWS, columns).requires_grad_()
    master = torch.nn.Parameter(torch.randn(_OUT, columns))
    fp8 = Weight(
        "w",
        master,
        quantize(master.detach(), _BLOCKS),
        None,
        None,
        _ROW_BLOCKS,
        _ROW_BLOCKS,
        "fp8",
        "fp8",
    )
    bf16 = Weight("w", master, master.detach().bfloat16(), None, None)
    small, large = (
        _saved_bytes(lambda w=w: autograd.linear(x, w, ops), [master]) for w in (fp8, bf16)
    )
    assert large == 2 * _ROWS * columns
    assert small == _ROWS * (columns + 4 * -(-columns // 128))
    assert small <= 0.55 * large


def test_rms_norm_and_residual(ops: Ops) -> None:
    weight = Vector(
        "norm",
        torch.nn.Parameter(_random(_IN, dtype=torch.float32)),
        _random(_IN, dtype=torch.float32),
    )
    x, residual = (
        _random(_ROWS, _IN, seed=s, dtype=torch.float32).requires_grad_() for s in (1, 2)
    )
    dy, ds = (_random(_ROWS, _IN, seed=s, dtype=torch.float32) for s in (3, 4))
    normed, summed = autograd.rms_norm(x, residual, weight, 1e-5, ops)
    torch.autograd.backward((normed, summed), (dy, ds))
    total = (x.detach() + residual.detach()).double().requires_grad_()
    scale = weight.working.double().requires_grad_()
    wanted = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + 1e-5) * scale
    torch.autograd.backward((wanted, total), (dy.double(), ds.double()))
    torch.testing.assert_close(normed.double(), wanted, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(tensor(x.grad).double(), total.grad, rtol=1e-5, atol=1e-5)
    assert torch.equal(x.grad, residual.grad)
    torch.testing.assert_close(
        tensor(weight.master.grad).double(), scale.grad, rtol=1e-5, atol=1e-4
    )


def _attended(q: Tensor, k: Tensor, v: Tensor, lengths: list[int], scale: float) -> Tensor:
    """Causal grouped-query attention over packed sequences, in the inputs' type."""
    groups, outputs = q.shape[1] // k.shape[1], []
    for rows in torch.arange(q.shape[0]).split(lengths):
        keys, values = (t[rows].repeat_interleave(groups, 1) for t in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[rows], keys) * scale
        mask = torch.ones(len(rows), len(rows), dtype=torch.bool).triu(1)
        outputs.append(
            torch.einsum("hqk,khd->qhd", scores.masked_fill(mask, -torch.inf).softmax(-1), values)
        )
    return torch.cat(outputs)


def _head_rows(
    qkv: Tensor, norms: list[Tensor], tables: tuple[Tensor, Tensor], positions: Tensor
) -> list[Tensor]:
    """Queries (4 heads) and keys (2) of qkv, normed if `norms`, rotated; and values."""
    q, k, v = qkv.split((4, 2, 2), 1)
    if norms:
        q, k = (
            x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * w
            for x, w in zip((q, k), norms)
        )
    cos, sin = (t[positions].repeat(1, 2).unsqueeze(1) for t in tables)
    turned = [
        x * cos + torch.cat((-x.chunk(2, -1)[1], x.chunk(2, -1)[0]), -1) * sin for x in (q, k)
    ]
    return [*turned, v]


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(
    "kv", [None, QuantSpec(E4M3, "row"), QuantSpec(INT8, "row", "fp32")], ids=str
)
def test_attention_is_of_normed_rotated_and_stored_heads(
    ops: Ops, normed: bool, kv: QuantSpec | None
) -> None:
    """Straight through the quantization of keys and values; the backward makes its own of them,
    elsewhere."""
    lengths, dim = [19, 1, 33], 24
    layout, total = Layout.packed(lengths, 16), sum(lengths)
    qkv = _random(total, 8, dim, dtype=torch.float32).requires_grad_()
    angles = torch.rand(40, dim // 2) * 6
    tables = (angles.cos(), angles.sin())
    weights = [_random(dim, seed=s, dtype=torch.float32) for s in (1, 2)]
    vectors = [Vector("norm", torch.nn.Parameter(w.clone()), w) for w in weights]
    stores = [KVStore.allocate(layout.num_slots, 2, dim, kv, FP32) for _ in range(2)]
    heads = Heads((weights[0], weights[1]) if normed else None, 1e-5, tables)
    masters = (vectors[0].master, vectors[1].master) if normed else None
    given = Attended(heads, lambda: stores[0], lambda: stores[1], layout, dim**-0.5)
    out = attend(qkv, masters, given, ops)
    assert not stores[1].k.any()
    dout = _random(total, 4, dim, seed=4, dtype=torch.float32)
    out.backward(dout)
    assert all(
        torch.equal(a, b)
        for a, b in zip(stores[0].gather(layout.slots), stores[1].gather(layout.slots))
    )
    exact = qkv.detach().double().requires_grad_()
    scale = [w.double().requires_grad_() for w in weights]
    wide = (tables[0].double(), tables[1].double())
    q, *made = _head_rows(exact, scale if normed else [], wide, layout.positions)
    read = [value.double() for value in stores[0].gather(layout.slots)]
    assert torch.allclose(read[0], made[0], rtol=1e-5, atol=1e-5) == (kv is None)
    k, v = (x + (value - x).detach() for x, value in zip(made, read))
    wanted = _attended(q, k, v, lengths, dim**-0.5)
    wanted.backward(dout.double())
    torch.testing.assert_close(out.double(), wanted, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(tensor(qkv.grad).double(), exact.grad, rtol=1e-5, atol=1e-5)
    for vector, w in zip(vectors, scale):
        assert (vector.master.grad is not None) == normed
        if normed:
            torch.testing.assert_close(
                tensor(vector.master.grad).double(), w.grad, rtol=1e-5, atol=1e-4
            )


@pytest.mark.parametrize("fp8", [True, False])
def test_what_is_fused_is_its_parts_in_turn(ops: Ops, fp8: bool) -> None:
    """Bit for bit, forward and backward: a norm, or a gate, and the linear layer after it."""
    weight = _weight() if fp8 else _plain_weight(torch.bfloat16)
    vector = Vector(
        "norm", torch.nn.Parameter(1 + _random(_IN, dtype=torch.float32)), _random(_IN).add(1)
    )
    dy, results = _random(_ROWS, _OUT, seed=4), []
    for fused in (True, False):
        x, residual = (_random(_ROWS, _IN, seed=s).requires_grad_() for s in (1, 2))
        gate_up = _random(_ROWS, 2 * _IN, seed=3).requires_grad_()
        vector.master.grad = weight.master.grad = tensor(weight.bias_master).grad = None
        if fused:
            y, summed = autograd.norm_linear(x, residual, vector, 1e-5, weight, ops)
            z = autograd.gated_linear(gate_up, "silu", weight, ops)
        else:
            normed, summed = autograd.rms_norm(x, residual, vector, 1e-5, ops)
            gated = ops.gate_mul("silu", gate_up.detach()).requires_grad_()
            y, z = autograd.linear(normed, weight, ops), autograd.linear(gated, weight, ops)
        torch.autograd.backward((y, summed, z), (dy, x.detach(), dy))
        gate_gradient = (
            gate_up.grad if fused else ops.gate_mul_backward("silu", gated.grad, gate_up.detach())
        )
        masters = (vector.master.grad, weight.master.grad, tensor(weight.bias_master).grad)
        results.append((y, z, summed, x.grad, residual.grad, gate_gradient, *masters))
    assert all(torch.equal(a, b) for a, b in zip(*results))


def test_silu_mul_and_embedding(ops: Ops) -> None:
    gate_up, dh = _random(7, 26, dtype=torch.float32), _random(7, 13, seed=1, dtype=torch.float32)
    exact = gate_up.double().requires_grad_()
    gate, up = exact.chunk(2, -1)
    (torch.nn.functional.silu(gate) * up).backward(dh.double())
    torch.testing.assert_close(
        ops.gate_mul_backward("silu", dh, gate_up).double(), exact.grad, rtol=1e-5, atol=1e-6
    )

    master = torch.nn.Parameter(_random(11, 5, dtype=torch.float32))
    table = Vector("embed", master, master.detach().bfloat16())
    tokens = torch.tensor([3, 0, 3, 10, 3])
    gradient = torch.arange(25.0).view(5, 5).bfloat16()
    wanted = torch.zeros(11, 5).index_add(0, tokens, gradient.float())
    for scale, factor in ((None, 1.0), (1152**0.5, 34.0)):  # 33.94, rounded to BF16
        master.grad = None
        rows = autograd.embedding(tokens, table, scale, ops)
        assert torch.equal(rows, (table.working[tokens].float() * factor).bfloat16())
        rows.backward(gradient)
        assert torch.equal(master.grad, wanted * factor)


class _Spy:
    """Ops that note how many rows a product to float32 has."""

    head_logprobs, head_backward = Composed.head_logprobs, Composed.head_backward

    def __init__(self, ops: Ops) -> None:
        self._ops, self.rows = ops, []

    def product(
        self, a: Tensor, b: Tensor, bias: Tensor | None = None, out: torch.dtype = torch.bfloat16
    ) -> Tensor:
        result = self._ops.product(a, b, bias, out)
        self.rows += [result.shape[0]] if result.shape[1] == 97 else []
        return result

    def __getattr__(self, name: str) -> object:
        return getattr(self._ops, name)


def _head(
    hidden: Tensor,
    dtype: torch.dtype,
    chunk: int,
    ops: Ops,
    gradient: Tensor | None,
    filtering: Filtering | None = None,
    of_entropy: Tensor | None = None,
) -> tuple:
    master = torch.nn.Parameter(_random(97, hidden.shape[1], seed=7, dtype=torch.float32) * 0.3)
    head = Weight("head", master, master.detach().to(dtype), None, None)
    targets = torch.arange(hidden.shape[0]) * 5 % 97
    hidden = hidden.clone().requires_grad_(gradient is not None)
    with torch.set_grad_enabled(gradient is not None):
        every = torch.arange(len(targets))
        context = Context(targets, torch.where(every < 10, 0, 10), every)  # two sequences
        logprobs, entropy = head_logprobs(
            hidden, head, targets, 0.7, chunk, ops, filtering, context
        )
    if of_entropy is not None:
        ((logprobs * gradient).sum() + (entropy * of_entropy).sum()).backward()
    elif gradient is not None:
        logprobs.backward(gradient)
    return logprobs.detach(), entropy.detach(), hidden.grad, master.grad, head.working, targets


def test_head_logprobs_against_autograd_and_in_chunks(ops: Ops) -> None:
    hidden = _random(29, 40, dtype=torch.float32)
    gradient = _random(29, seed=8, dtype=torch.float32)
    spy = _Spy(ops)
    logprobs, entropy, dhidden, dweight, weight, targets = _head(
        hidden, torch.float32, 8, spy, gradient
    )
    assert max(spy.rows) == 8
    exact, exact_weight = hidden.double().requires_grad_(), weight.double().requires_grad_()
    distribution = ((exact @ exact_weight.T) / 0.7).log_softmax(-1)
    distribution[torch.arange(29), targets].backward(gradient.double())
    torch.testing.assert_close(
        logprobs.double(), distribution[torch.arange(29), targets], rtol=1e-6, atol=1e-6
    )
    torch.testing.assert_close(
        entropy.double(), -(distribution.exp() * distribution).sum(-1), rtol=1e-6, atol=1e-6
    )
    torch.testing.assert_close(dhidden.double(), exact.grad, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(dweight.double(), exact_weight.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("filtering", [None, (20, 0.9, 0.01, 1.3)], ids=str)
def test_the_entropys_gradient_against_autograd(ops: Ops, filtering: Filtering | None) -> None:
    """In float64, beside that of the log-probabilities. The control is without the entropy's."""
    hidden, every = _random(29, 40, dtype=torch.float32), torch.arange(29)
    gradient, of_entropy = (_random(29, seed=n, dtype=torch.float32) for n in (8, 9))
    _, entropy, dhidden, dweight, weight, targets = _head(
        hidden, torch.float32, 8, ops, gradient, filtering, of_entropy
    )
    exact, exact_weight = hidden.double().requires_grad_(), weight.double().requires_grad_()
    z, kept = exact @ exact_weight.T, torch.ones(29, 97, dtype=torch.bool)
    if filtering is not None:
        factor = torch.ones(29, 97, dtype=torch.float64)
        for row in range(29):
            seen = targets[(0 if row < 10 else 10) : row + 1]
            up = z[row, seen] > 0
            factor[row, seen] = torch.where(up, 1 / filtering[3], filtering[3]).double()
        z = z * factor
        kept = _kept((z / 0.7).detach(), filtering)
        kept[every, targets] = True
    distribution = (z / 0.7).masked_fill(~kept, -torch.inf).log_softmax(-1)
    exact_entropy = -(distribution.exp() * distribution.masked_fill(~kept, 0.0)).sum(-1)
    chosen = distribution[every, targets]
    total = (chosen * gradient.double()).sum() + (exact_entropy * of_entropy.double()).sum()
    total.backward()
    close = torch.testing.assert_close
    close(entropy.double(), exact_entropy.detach(), rtol=1e-6, atol=1e-6)
    close(dhidden.double(), exact.grad, rtol=1e-5, atol=2e-6)
    close(dweight.double(), exact_weight.grad, rtol=1e-5, atol=1e-5)
    without = _head(hidden, torch.float32, 8, ops, gradient, filtering)
    assert float((without[2] - exact.grad).norm() / tensor(exact.grad).norm()) > 0.1


def test_head_logprobs_do_not_depend_on_the_chunk(ops: Ops) -> None:
    hidden = _random(29, 40)
    whole = _head(hidden, torch.bfloat16, 100, ops, None)
    for chunk in (1, 7, 29):
        for part, wanted in zip(_head(hidden, torch.bfloat16, chunk, ops, None)[:2], whole):
            assert torch.equal(part, wanted)


@pytest.mark.parametrize(
    "filtering",
    [
        (20, 1.0, 0.0, 1.0),
        (0, 0.9, 0.0, 1.0),
        (0, 1.0, 0.05, 1.0),
        (20, 0.9, 0.01, 1.3),
        (0, 1.0, 0.0, 1.8),
    ],
    ids=str,
)
def test_truncated_logprobs_against_autograd_of_the_masked_softmax(
    ops: Ops, filtering: Filtering
) -> None:
    """In float64, over the support written out; some targets are outside it. The control is the
    whole softmax."""
    hidden = _random(29, 40, dtype=torch.float32)
    gradient, every = _random(29, seed=8, dtype=torch.float32), torch.arange(29)
    spy = _Spy(ops)
    logprobs, entropy, dhidden, dweight, weight, targets = _head(
        hidden, torch.float32, 8, spy, gradient, filtering
    )
    assert max(spy.rows) == 8, "of logits at a time"
    exact, exact_weight = hidden.double().requires_grad_(), weight.double().requires_grad_()
    z = exact @ exact_weight.T
    for row in range(29):
        seen = targets[(0 if row < 10 else 10) : row + 1]
        factor = torch.ones(29, 97, dtype=torch.float64)
        factor[row, seen] = torch.where(z[row, seen] > 0, 1 / filtering[3], filtering[3]).double()
        z = z * factor
    z = z / 0.7
    kept = _kept(z.detach(), filtering)
    outside = ~kept[every, targets]
    assert (0 < int(outside.sum()) < 29) == (filtering[:3] != (0, 1, 0))
    kept[every, targets] = True
    distribution = z.masked_fill(~kept, -torch.inf).log_softmax(-1)
    distribution[every, targets].backward(gradient.double())
    close = torch.testing.assert_close
    close(logprobs.double(), distribution[every, targets], rtol=1e-6, atol=1e-6)
    terms = torch.where(kept, distribution.exp() * distribution, 0.0)
    close(entropy.double(), -terms.sum(-1), rtol=1e-6, atol=1e-6)
    close(dhidden.double(), exact.grad, rtol=1e-5, atol=1e-6)
    close(dweight.double(), exact_weight.grad, rtol=1e-5, atol=1e-5)
    whole = _head(hidden, torch.float32, 8, ops, gradient)
    assert float((whole[2] - exact.grad).norm() / tensor(exact.grad).norm()) > 0.02
    assert float((whole[3] - exact_weight.grad).norm() / exact_weight.grad.norm()) > 0.02


def _kept(z: Tensor, filtering: Filtering) -> Tensor:
    """Mask of the support of scaled logits without ties, by ranks and probabilities: top-k, top-p,
    min-p."""
    top_k, top_p, min_p, _ = filtering
    order = z.argsort(-1, descending=True)
    rank = order.argsort(-1)
    kept = rank < top_k if top_k else torch.ones_like(z, dtype=torch.bool)
    p = torch.where(kept, z.exp(), 0.0)
    p = p / p.sum(-1, keepdim=True)
    ordered = p.gather(-1, order)
    before = (ordered.cumsum(-1) - ordered).gather(-1, rank)
    kept &= before < top_p
    return kept & (p >= min_p * p.amax(-1, keepdim=True))


def test_truncated_logprobs_do_not_depend_on_the_chunk(ops: Ops) -> None:
    hidden, filtering = _random(29, 40), (20, 0.9, 0.01, 1.3)
    whole = _head(hidden, torch.bfloat16, 100, ops, None, filtering)
    for chunk in (1, 7, 29):
        for part, wanted in zip(
            _head(hidden, torch.bfloat16, chunk, ops, None, filtering)[:2], whole
        ):
            assert torch.equal(part, wanted)


def test_a_weight_can_be_without_gradient(ops: Ops) -> None:
    """For a frozen reference: nothing is computed for masters that do not ask for it."""
    weight = _weight()
    weight.master.requires_grad_(False)
    x = _random(4, _IN).requires_grad_()
    autograd.linear(x, weight, ops).sum().backward()
    assert weight.master.grad is None
    assert x.grad is not None


def test_presets_have_the_specs_that_this_module_is_written_for() -> None:
    for preset in PRESETS.values():
        for flow in (preset.rollout, preset.learner):
            assert flow.compute in (BF16, FP32)
            assert flow.activation is None or flow.activation.granularity in (
                "1x128",
                "1x32",
                "1x16",
            )
    assert isinstance(quantize(torch.ones(2, 2), _BLOCKS).transpose(), QTensor)
