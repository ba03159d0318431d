"""Rows go through their experts sorted by expert: one grouped product for each of the two matrices.

A token is in the sorted rows once for every expert that serves it. Activations are quantized row by
row, so once per token; a row's bits are those of the expert's MLP over that row alone
(`tests/model/test_experts.py`). The forward never waits for a GPU. The backward waits once for each
of the two matrices, because an expert without rows gets no gradient.

Activations or gradients whose rows share scales (granularity `tensor`, and the like) are quantized
expert by expert, as separate matrices. Experts may have adapters (`kernels/low_rank/experts.py`),
or several, each on its own rows (`adapters/multi_lora.py`). Left out: which experts serve a token
(`moe.py`).
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from isobit.kernels import Operand, Ops, Stacked, grouped_input_gradient, picked, plain, unwatched
from isobit.kernels.low_rank import experts as low_rank
from isobit.kernels.low_rank.experts import ExpertFactors
from isobit.model.forward import autograd
from isobit.model.forward.accumulate_grad import added_to
from isobit.model.forward.gate import activated, activated_backward, activated_codes
from isobit.model.forward.linear_backward import ALONG_INPUTS
from isobit.model.weights.layout import Mixture, Mlp
from isobit.model.weights.stored import OfExpertRows, Weight, has_own_copy
from isobit.precision import QTensor, QuantSpec


def through_experts(
    x: Tensor, gates: Tensor, chosen: Tensor, layer: Mixture, ops: Ops, again: bool = False
) -> Tensor:
    """Return the experts `chosen` [T, k] int64 for the rows of x [T, H], times their gates [T, k]
    float32, added in float32 in the order of k and rounded once: [T, H] in x's dtype. `again`: the
    backward computes both products again; where rows share scales it does not."""
    if layer.divided is not None:
        return layer.divided.through(x, gates, chosen, layer, ops)
    first = layer.experts[0]
    if any(
        _shares_scales(spec) for weight in (first.gate_up, first.down) for spec in _specs(weight)
    ):
        return _one_by_one(x, gates, chosen, layer, ops)
    if torch.is_grad_enabled():
        ups, downs = [e.gate_up for e in layer.experts], [e.down for e in layer.experts]
        weights = ups + downs
        masters = [weight.master for weight in weights] + [weight.bias_master for weight in weights]
        masters += [*_adapter_masters(ups), *_adapter_masters(downs)]
        return _Experts.apply(x, gates, chosen, layer, ops, again, *masters)
    return _forward(x, gates, chosen, layer, ops)[0]


def _adapter_masters(weights: Sequence[Weight]) -> Iterator[Tensor]:
    """Yield each adapter's A of every expert, then its B of every expert."""
    for index in range(len(weights[0].adapters)):
        factors = [weight.adapters[index] for weight in weights]
        yield from (factor.a.master for factor in factors)
        yield from (factor.b.master for factor in factors)


def mlp(x: Tensor, layer: Mlp, ops: Ops) -> Tensor:
    """Return the MLP of one expert: x [T, H] to [T, H]."""
    return autograd.gated_linear(
        autograd.linear(x, layer.gate_up, ops), layer.activation, layer.down, ops
    )


class _Experts(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        gates: Tensor,
        chosen: Tensor,
        layer: Mixture,
        ops: Ops,
        again: bool,
        *masters: Tensor | None,
    ) -> Tensor:
        total, position, results = _forward(x, gates, chosen, layer, ops)
        ctx.layer, ctx.ops, ctx.again = layer, ops, again
        inputs = (
            (x,) if again or layer.experts[0].gate_up.keeps_inputs else ()
        )  # the router keeps it too
        saved = () if again else (results.gate_up, results.down, *results.us)
        ctx.has_inputs = bool(inputs)
        ctx.save_for_backward(gates, *position, *inputs, *saved)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dtotal: Tensor) -> tuple[Tensor | None, ...]:
        layer, ops, count = ctx.layer, ctx.ops, len(ctx.layer.experts)
        gates, rows, position, offsets, *saved = ctx.saved_tensors
        first, x = layer.experts[0], saved.pop(0) if ctx.has_inputs else None
        up, down, activation = first.gate_up, first.down, first.activation
        needed = ctx.needs_input_grad[6:]
        if ctx.again:
            assert x is not None
            results = results_of(x, rows, offsets, layer, unwatched(ops))
        else:
            results = Results(saved[0], saved[1], saved[2:])
        gate_up, bound = results.gate_up, len(layer.up_factors)
        dy, dgates = ops.sum_of_rows_backward(dtotal.contiguous(), results.down, position, gates)
        hidden = None
        if any(needed[count : 2 * count]) or layer.down_factors:
            own_copy = has_own_copy(down)
            hidden = (
                activated(activation, gate_up, ops)
                if own_copy
                else _gated(gate_up, layer, unwatched(ops))
            )
        downs = _Backward(dy, hidden, [e.down for e in layer.experts], offsets, ops)
        ddown = downs.weights(needed[count : 2 * count])
        dhidden, of_down = downs.adapted(layer.down, layer.down_factors, results.us[bound:])
        del hidden, downs
        assert dhidden is not None
        dgate_up = activated_backward(activation, dhidden, gate_up, ops)
        inputs = None
        if any(needed[:count]) or layer.up_factors:
            assert x is not None
            taken = x if has_own_copy(up) else _inputs(x, up, unwatched(ops))
            inputs = picked(taken, rows)
        ups = _Backward(dgate_up, inputs, [e.gate_up for e in layer.experts], offsets, ops)
        dup, wanted = ups.weights(needed[:count]), ctx.needs_input_grad[0]
        drows, of_up = ups.adapted(layer.gate_up, layer.up_factors, results.us[:bound], wanted)
        dbias = _bias_gradients(dgate_up, offsets, needed[2 * count : 3 * count], ops)
        dbias += _bias_gradients(dy, offsets, needed[3 * count : 4 * count], ops)
        dx = None
        if drows is not None:  # in the order of the experts
            dx = ops.sum_of_rows(drows, position.sort(1).values, None)
        return dx, dgates, None, None, None, None, *dup, *ddown, *dbias, *of_up, *of_down


class Results(NamedTuple):
    """The results of rows sorted by expert: `gate_up` [T k, 2I], without gates [T k, I], `down` [T
    k, H], and the u of every adapter's factors, those of gate_up first."""

    gate_up: Tensor
    down: Tensor
    us: Sequence[Tensor]


class _Backward(NamedTuple):
    """The backward of one grouped product: dy [R, N], the rows x [R, K] as they were multiplied, if
    anything needs them, and the experts' weights."""

    dy: Tensor
    x: Operand | None
    weights_of: Sequence[Weight]
    offsets: Tensor
    ops: Ops

    def weights(self, needed: Sequence[bool]) -> list[Tensor | None]:
        """Return dW of every expert."""
        if not any(needed):
            return [None] * len(self.weights_of)
        assert self.x is not None
        return _weight_gradients(
            self.dy, self.x, self.weights_of, self.offsets, tuple(needed), self.ops
        )

    def adapted(
        self,
        stacked: Stacked,
        factors: Sequence[ExpertFactors],
        us: Sequence[Tensor],
        wanted: bool = True,
    ) -> tuple[Tensor | None, list[Tensor | None]]:
        """Return (dx [R, K] in dy's type, if it is `wanted`; the gradients of the factors)."""
        arguments = self.dy, stacked, self.weights_of[0], self.offsets, self.ops
        if not factors:
            return _input_gradient(*arguments, self.dy.dtype) if wanted else None, []
        assert self.x is not None
        name = _name(self.weights_of[0])
        dx, gradients = low_rank.backward(
            self.ops, self.dy, self.x, us, factors, self.offsets, name, wanted
        )
        if dx is None:
            return None, gradients
        return dx.add_(_input_gradient(*arguments, torch.float32)).to(self.dy.dtype), gradients


Places = tuple[Tensor, Tensor, Tensor]
"""Of the rows sorted by expert: each row's token [T k], the rows of each token [T, k], and where
every expert's rows begin [experts + 1]."""


def _forward(
    x: Tensor, gates: Tensor, chosen: Tensor, layer: Mixture, ops: Ops
) -> tuple[Tensor, Places, Results]:
    """Return (sums [T, H], places, what the sorted rows give)."""
    rows, position, offsets = ops.by_expert(chosen, len(layer.experts))
    results = results_of(x, rows, offsets, layer, ops)
    return ops.sum_of_rows(results.down, position, gates), (rows, position, offsets), results


def results_of(x: Tensor, rows: Tensor, offsets: Tensor, layer: Mixture, ops: Ops) -> Results:
    """Compute the experts' results of the rows of x [T, H] at these sorted places."""
    first, inputs = layer.experts[0], _inputs(x, layer.experts[0].gate_up, ops)
    if first.gate_up.several is not None:
        return _of_several(picked(inputs, rows), x.dtype, rows, offsets, layer, ops)
    gate_up, us = low_rank.product(
        ops, inputs, layer.gate_up, layer.up_factors, offsets, x.dtype, rows
    )
    hidden = _gated(gate_up, layer, ops)
    down, more = low_rank.product(ops, hidden, layer.down, layer.down_factors, offsets, x.dtype)
    return Results(gate_up, down, us + more)


def _of_several(
    x: Operand, dtype: torch.dtype, rows: Tensor, offsets: Tensor, layer: Mixture, ops: Ops
) -> Results:
    """Return `results_of` where rows are of several adapters, of x [T k, H] sorted by expert."""
    arguments = rows, offsets, ops, dtype

    def product(x: Operand, weights: Sequence[Weight], stacked: Stacked) -> Tensor:
        first = cast(OfExpertRows, weights[0].several)
        return first.product_of_experts(x, weights, stacked, *arguments)

    gate_up = product(x, [e.gate_up for e in layer.experts], layer.gate_up)
    hidden = _gated(gate_up, layer, ops)
    return Results(gate_up, product(hidden, [e.down for e in layer.experts], layer.down), ())


def _inputs(x: Tensor, weight: Weight, ops: Ops) -> Operand:
    return x if weight.activation is None else ops.quantize(x, weight.activation, _name(weight))


def _gated(gate_up: Tensor, layer: Mixture, ops: Ops) -> Operand:
    first = layer.experts[0]
    down = first.down
    return activated_codes(first.activation, gate_up, down.activation, _name(down), ops)


def _input_gradient(
    dy: Tensor, stacked: Stacked, weight: Weight, offsets: Tensor, ops: Ops, out: torch.dtype
) -> Tensor:
    """Return dx [R, K] = dy [R, N] · W [N, K] of every row's expert, in `out`."""
    if weight.dgrad == "fp8" and stacked.spec is not None and weight.gradient is not None:
        quantized = ops.quantize(dy, weight.gradient, f"output gradient of {_name(weight)}")
        transposed = stacked.transpose()
        if (
            stacked.spec.granularity in ALONG_INPUTS
        ):  # scales for every row of N: quantized again, along N
            spec, name = stacked.spec, f"transposed {_name(weight)}"
            transposed = transposed.map(
                lambda w: ops.quantize(plain(w, torch.float32).contiguous(), spec, name)
            )
        return ops.grouped_product(quantized, transposed, offsets, out)
    return grouped_input_gradient(ops, dy, stacked, offsets, out)


def _weight_gradients(
    dy: Tensor,
    x: Operand,
    weights: Sequence[Weight],
    offsets: Tensor,
    needed: tuple[bool, ...],
    ops: Ops,
) -> list[Tensor | None]:
    """Return dW [N, K] float32 of every expert that has rows and needs one, of dy [R, N] and the
    rows x [R, K] as they were multiplied; before they were quantized, where WGrad has copies of its
    own. None of what was added to a gradient."""
    weight, masters = weights[0], [weight_.master for weight_ in weights]
    name, into = _name(weight), [added_to(master) for master in masters]
    if has_own_copy(weight) and isinstance(x, Tensor):
        assert weight.gradient is not None
        assert weight.activation is not None
        gradients: list[Tensor | None] = [None] * len(needed)
        for expert, (start, stop) in enumerate(pairwise(offsets.tolist())):
            if stop > start:
                copy = ops.quantize_along_tokens(x[start:stop], weight.activation, name)
                gradient = ops.quantize_along_tokens(
                    dy[start:stop], weight.gradient, f"output gradient of {name}"
                )
                gradients[expert] = ops.gradient_product(
                    gradient, copy, torch.float32, into[expert]
                )
    else:
        spec = weight.gradient if weight.wgrad == "fp8" and isinstance(x, QTensor) else None
        gradients = ops.grouped_weight_gradient(dy, x, offsets, spec, name, into)
    return [
        dw if wanted and old is None else None for dw, wanted, old in zip(gradients, needed, into)
    ]


def _bias_gradients(
    dy: Tensor, offsets: Tensor, needed: Sequence[bool], ops: Ops
) -> list[Tensor | None]:
    """[N] float32 of every expert that has rows and needs one, of dy [R, N]."""
    if not any(needed):
        return [None] * len(needed)
    return [
        db if wanted else None for db, wanted in zip(ops.grouped_bias_gradient(dy, offsets), needed)
    ]


def _one_by_one(x: Tensor, gates: Tensor, chosen: Tensor, layer: Mixture, ops: Ops) -> Tensor:
    rows, slots = chosen.shape
    token, position, offsets = ops.by_expert(chosen, len(layer.experts))
    inputs = x.index_select(0, token).split(offsets.diff().tolist())
    outputs = [
        mlp(chunk, expert, ops) for chunk, expert in zip(inputs, layer.experts) if chunk.shape[0]
    ]
    if not outputs:
        return x.new_empty(0, x.shape[1])
    results = torch.cat(outputs).index_select(0, position.flatten()).view(rows, slots, -1).float()
    total = gates[:, :1] * results[:, 0]
    for slot in range(1, slots):
        total = total + gates[:, slot : slot + 1] * results[:, slot]
    return total.to(x.dtype)


def _specs(weight: Weight) -> list[QuantSpec]:
    """Return the specs of the activation and of the output gradient, if they are quantized."""
    gradient = weight.gradient if weight.dgrad == "fp8" else None
    return [spec for spec in (weight.activation, gradient) if spec is not None]


def _shares_scales(spec: QuantSpec) -> bool:
    return spec.block((2, 1 << 20))[0] > 1 or spec.scale == "nvfp4"


def _name(weight: Weight) -> str:
    """Return the name of all experts' weights together: `layers.3.experts.down`."""
    return weight.name.replace(".experts.0.", ".experts.")
