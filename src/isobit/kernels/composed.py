"""Operators composed of other operators: a fused kernel must return the same bits.

A backend inherits these and overrides the ones that it computes in a single kernel. Left out: the arithmetic itself.
"""

from itertools import pairwise, zip_longest

import torch
from torch import Tensor

from isobit.kernels.matrices import Gradients, Kept, Operand, Prepared, Stacked, picked, plain, values
from isobit.kernels.ops import Activation, Heads, Layout, Ops, Temperature
from isobit.kernels.stores import KVStore
from isobit.precision import ErrorSums, Nibbles, Precision, QTensor, QuantSpec, along_rows, error_sums
from isobit.precision.nibbles import panels

_ROWS = 128  # that are in float64 at a time
_SINK_ROWS = 1024  # likewise, of all heads


class Composed(Ops):
    """The part of `isobit.kernels.ops.Ops` that follows from the rest, for backends that raise errors at once."""

    device = torch.device("cpu")
    fused_head = False

    def check_precision(self, precision: Precision) -> None:
        """Every flow can be computed."""

    def raise_faults(self) -> None:
        """Nothing to do: operators raise at once when they meet NaN or infinity."""

    def error_sums(self, x: Operand, quantized: QTensor) -> ErrorSums:
        return error_sums(values(x), quantized)

    def prepare(self, weight: Operand, into: Prepared | None = None) -> Prepared:
        return weight

    def quantize_along_tokens(self, x: Operand, spec: QuantSpec, name: str) -> QTensor:
        return self.quantize(values(x), along_rows(spec), name).transpose()

    def gradient_product(self, a: Operand, b: Operand, out: torch.dtype, into: Tensor | None = None) -> Tensor:
        found = self.product(a, b, None, out)
        return found if into is None else into.add_(found)

    def by_expert(self, chosen: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
        return by_expert(chosen, count)

    def grouped_product(
        self, a: Operand, weights: Stacked, offsets: Tensor, out: torch.dtype, rows: Tensor | None = None
    ) -> Tensor:
        a = a if rows is None else picked(a, rows)
        parts = [
            self.product(rows_of(a, start, stop), weight, bias, out)
            for weight, bias, (start, stop) in zip(*weights.each, pairwise(offsets.tolist()))
            if stop > start
        ]
        return torch.cat(parts) if parts else torch.empty((0, weights.shape[1]), dtype=out, device=offsets.device)

    def grouped_weight_gradient(
        self,
        dy: Tensor,
        x: Operand,
        offsets: Tensor,
        gradient: QuantSpec | None,
        name: str,
        into: Gradients = (),
    ) -> list[Tensor | None]:
        found: list[Tensor | None] = []
        for (start, stop), before in zip_longest(pairwise(offsets.tolist()), into):
            rows, own = dy[start:stop], rows_of(x, start, stop)
            if stop == start:
                found.append(None)
            elif gradient is not None and isinstance(own, QTensor):
                left = self.quantize_along_tokens(rows, gradient, f"output gradient of {name}")
                right = self.quantize_along_tokens(own, own.spec, name)
                found.append(self.gradient_product(left, right, torch.float32, before))
            else:
                found.append(self.gradient_product(rows.t(), plain(own, dy.dtype).t(), torch.float32, before))
        return found

    def grouped_bias_gradient(self, dy: Tensor, offsets: Tensor) -> list[Tensor | None]:
        return bias_gradients(dy, offsets)

    def sum_of_rows(self, x: Tensor, place: Tensor, gates: Tensor | None) -> Tensor:
        total: Tensor | None = None
        for slot in range(place.shape[1]):
            row = x.index_select(0, place[:, slot]).float()
            row = row if gates is None else gates[:, slot : slot + 1] * row
            total = row if total is None else total + row
        assert total is not None
        return total.to(x.dtype)

    def sum_of_rows_backward(self, dy: Tensor, x: Tensor, place: Tensor, gates: Tensor) -> tuple[Tensor, Tensor]:
        dx, dgates, wide = torch.empty_like(x), torch.empty_like(gates), dy.float()
        for slot in range(place.shape[1]):
            dx.index_copy_(0, place[:, slot], (wide * gates[:, slot : slot + 1]).to(x.dtype))
            dgates[:, slot] = (wide * x.index_select(0, place[:, slot]).float()).sum(1)
        return dx, dgates

    def rms_norm_quantized(
        self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None, spec: QuantSpec, name: str
    ) -> tuple[QTensor, Tensor, Tensor]:
        y, summed, rstd = self.rms_norm(x, weight, eps, residual)
        return self.quantize(y, spec, name), summed, rstd

    def gate_mul_quantized(self, activation: Activation, gate_up: Tensor, spec: QuantSpec, name: str) -> QTensor:
        return self.quantize(self.gate_mul(activation, gate_up), spec, name)

    def attention_inputs(
        self, qkv: Tensor, heads: Heads, store: KVStore, layout: Layout
    ) -> tuple[Tensor, Tensor, Tensor]:
        kv_heads, dim = store.k.shape[1:]
        q, k, v = qkv.split((qkv.shape[1] - 2 * kv_heads, kv_heads, kv_heads), dim=1)
        if heads.norms is not None:
            pairs = zip((q, k), heads.norms)
            q, k = (self.rms_norm(x.reshape(-1, dim), w, heads.eps)[0].view(x.shape) for x, w in pairs)
        q, k = (self.rotary(x, *heads.tables, layout.positions) for x in (q, k))
        self.kv_write(store, k, v, layout)
        return q, k, v

    def attention_inputs_backward(
        self, gradients: tuple[Tensor, Tensor, Tensor], qkv: Tensor, heads: Heads, positions: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        dq, dk, dv = gradients
        dq, dk = (self.rotary(dx.contiguous(), *heads.tables, positions, inverse=True) for dx in (dq, dk))
        if heads.norms is None:
            return torch.cat((dq, dk, dv), dim=1), None, None
        found = []
        for dx, x, weight in zip((dq, dk), qkv.split((dq.shape[1], dk.shape[1], dv.shape[1]), dim=1), heads.norms):
            rows = x.reshape(-1, x.shape[-1])
            _, summed, rstd = self.rms_norm(rows, weight, heads.eps)
            dx, dweight = self.rms_norm_backward(dx.reshape(rows.shape), summed, weight, rstd)
            found.append((dx.view(x.shape), dweight))
        (dq, dq_norm), (dk, dk_norm) = found
        return torch.cat((dq, dk, dv), dim=1), dq_norm, dk_norm

    def sinks_backward(self, dout: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
        return sink_gradients(dout, out, lse, sinks)

    def embedding_backward(self, dy: Tensor, tokens: Tensor, count: int) -> Tensor:
        return torch.zeros(count, dy.shape[1], device=dy.device).index_add_(0, tokens, dy.float())

    def square_sums(self, x: Tensor) -> Tensor:
        return torch.cat([_halved(rows.double().square_()) for rows in x.split(_ROWS)])

    def head_logprobs(
        self, hidden: Tensor, weight: Prepared, tokens: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        return self.token_logprobs(self.product(hidden, weight, None, torch.float32), tokens, temperature)

    def head_backward(
        self, dlogprobs: Tensor, hidden: Tensor, weight: Prepared, tokens: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        logits = self.product(hidden, weight, None, torch.float32)
        return head_gradients(self, dlogprobs, logits, hidden, weight, tokens, temperature)

    def head_sample(
        self, hidden: Tensor, weight: Prepared, keys: Tensor, temperature: Temperature, source: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        logits = self.product(hidden, weight, None, torch.float32)
        logits = logits if source is None else logits.index_select(0, source)
        tokens = self.sample(logits, keys, temperature)
        return tokens, self.token_logprobs(logits, tokens, temperature)[0]


def by_expert(chosen: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """`Ops.by_expert`, by a stable sort."""
    assert count < 1 << 15
    found = chosen.flatten().to(torch.int16).sort(stable=True)  # few bits to sort by: a GPU takes them in passes
    experts = torch.arange(count + 1, dtype=torch.int16, device=chosen.device)
    order, offsets = found.indices, torch.searchsorted(found.values, experts)
    place = torch.empty_like(order).scatter_(0, order, torch.arange(order.shape[0], device=order.device))
    return order // chosen.shape[1], place.view(chosen.shape), offsets


def input_gradient(ops: Ops, dy: Tensor, weight: Kept, out: torch.dtype) -> Tensor:
    """dx [T, K] = dy [T, N] · W [N, K], in `out`, over W's values in dy's type; of nibbles some columns at a time."""
    if not isinstance(weight, Nibbles):
        return ops.gradient_product(dy, plain(weight, dy.dtype).t(), out)
    columns = panels(weight.shape[1], weight.shape[0])
    parts = (plain(weight.part(columns=some), dy.dtype) for some in columns)
    return torch.cat([ops.gradient_product(dy, part.t(), out) for part in parts], 1)


def grouped_input_gradient(ops: Ops, dy: Tensor, weights: Stacked, offsets: Tensor) -> Tensor:
    """The same of every row's expert, in dy's type."""
    if weights.common is None:
        whole = weights if weights.spec is None else weights.map(lambda one: plain(one, dy.dtype))
        return ops.grouped_product(dy, whole.transpose(), offsets, dy.dtype)
    count, rows, inner = weights.shape
    parts = (Stacked(weights.values(columns=some).to(dy.dtype)) for some in panels(inner, count * rows))
    return torch.cat([ops.grouped_product(dy, part.transpose(), offsets, dy.dtype) for part in parts], 1)


def bias_gradients(dy: Tensor, offsets: Tensor) -> list[Tensor | None]:
    """`Ops.grouped_bias_gradient`, in float64."""
    bounds = pairwise(offsets.tolist())
    return [dy[start:stop].double().sum(0).float() if stop > start else None for start, stop in bounds]


def sink_gradients(dout: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """`Ops.sinks_backward`: the value of a sink is 0, so that of dS = P · (dO·V - Σ dO·O) the second term is left."""
    rows = zip(dout.split(_SINK_ROWS), out.split(_SINK_ROWS))
    inner = torch.cat([(gradient.double() * values.double()).sum(-1) for gradient, values in rows])
    return -(torch.exp(sinks.double() - lse.double()) * inner).sum(0).float()


def head_gradients(
    ops: Ops,
    dlogprobs: Tensor,
    logits: Tensor,
    hidden: Tensor,
    weight: Prepared,
    tokens: Tensor,
    temperature: float,
    slope: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`Ops.head_backward` where the logits [T, V] float32 are given; one of -inf has no gradient. `slope` [T, V]: their
    derivatives by those of the head."""
    # d log p(token) / d logits = (onehot - softmax) / temperature
    dlogits = torch.softmax(logits / temperature, -1).neg_()
    dlogits[torch.arange(dlogits.shape[0], device=tokens.device), tokens] += 1.0
    dlogits *= (dlogprobs / temperature).unsqueeze(-1)
    dlogits = (dlogits if slope is None else dlogits * slope).to(hidden.dtype)
    dhidden = ops.gradient_product(dlogits, values(weight).t(), hidden.dtype)
    return dhidden, ops.gradient_product(dlogits.t().contiguous(), hidden.t().contiguous(), torch.float32)


def rows_of(operand: Operand, start: int, stop: int) -> Operand:
    """Rows [start, stop) of an operand whose scales, if it has any, each belong to one row."""
    if isinstance(operand, Tensor):
        return operand[start:stop]
    assert operand.block[0] == 1, "rows share scales"
    return QTensor(operand.data[start:stop], operand.scale[start:stop], operand.spec)


def _halved(x: Tensor) -> Tensor:
    """The sum of each row of x [R, C], whose second half is added to the first until one column is left."""
    while (width := x.shape[1]) > 1:
        half = (width + 1) // 2
        x, second = x[:, :half], x[:, half:]
        x[:, : width - half] += second
    return x.squeeze(1)
