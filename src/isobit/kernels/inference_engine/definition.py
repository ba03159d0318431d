"""The operators of a second engine: they round where common inference engines round, and trainers
do not.

The precision flow is the same; rounding and the order of sums differ. Sums are float32 in the order
of the BLAS, which depends on the batch; between them stand the roundings to BF16 that inference
kernels have (vLLM's, as they were in 2025): the normalized row before a BF16 norm's weight,
activation(gate) before it meets up, the probabilities before P·V, and the logits. FP8 products add
their scaled blocks of 128 in float32. All of it is in docs/numerics.md, in section 5.

Quantization, rotary embedding, cache writes, linear attention and sampling are the same in both
engines: the learner's operators compute them. Only the rollout uses these operators, so none has a
backward; under float32 nothing is rounded to BF16.
"""

import torch
from torch import Tensor
from torch.nn import functional

from isobit.kernels.attention.definition import attend
from isobit.kernels.backends.reference import ReferenceOps
from isobit.kernels.codes import decode
from isobit.kernels.heads import definition as head_inputs
from isobit.kernels.layout import Layout
from isobit.kernels.matrices import Operand, Prepared, by_rows, values, weight_of
from isobit.kernels.norms.definition import bounded, gated, inner
from isobit.kernels.ops import Activation, Heads, Ops, Temperature
from isobit.kernels.sampling.definition import scaled
from isobit.kernels.stores import KVStore
from isobit.precision import BF16, Format, PackedFP4, QTensor, expand_scale

_ALIKE = ("raise_faults", "quantize", "rotary", "kv_write", "sample")
"""What the learner's operators compute."""


def product(
    a: Operand, b: Prepared, bias: Tensor | None = None, out: torch.dtype = torch.bfloat16
) -> Tensor:
    """Compute `Ops.product`. A plain product is rounded to its operands' type first, also where
    `out` is float32: the output head's logits are BF16."""
    if isinstance(b, PackedFP4):
        return by_rows(product, a, b, bias, out)
    b = weight_of(b)
    if isinstance(a, QTensor) and isinstance(b, QTensor):
        # Block sums of codes in float32, times their scales, added in ascending order in
        # float32.
        size = min(a.block[1], b.block[1])
        left, right = (decode(x.data, x.spec.format.dtype, torch.float32) for x in (a, b))
        total = torch.zeros(a.shape[0], b.shape[0], device=left.device)
        for start in range(0, a.shape[1], size):
            columns = slice(start, start + size)
            dot = left[:, columns] @ right[:, columns].t()
            total += dot.mul_(_scale_of(a, start)).mul_(_scale_of(b, start).t())
        return (total if bias is None else total + bias.float()).to(out)
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return functional.linear(a, b, bias).to(out)
    total = functional.linear(
        values(a).float(), values(b).float()
    )  # one operand quantized: for inspection
    return (total if bias is None else total + bias.float()).to(out)


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    summed = x if residual is None else x + residual
    wide = summed.float()
    rstd = torch.rsqrt(wide.square().mean(-1) + eps)
    return ((wide * rstd.unsqueeze(-1)).to(weight.dtype) * weight).to(x.dtype), summed, rstd


def attention(
    q: Tensor,
    store: KVStore,
    layout: Layout,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
    probabilities: Format | None = None,
) -> tuple[Tensor, Tensor]:
    if probabilities is None and q.dtype == torch.bfloat16:
        probabilities = BF16
    out, lse = attend(q, store, layout, scale, torch.float32, probabilities, window, sinks)
    return out.to(q.dtype), lse


def gate_mul(activation: Activation, gate_up: Tensor) -> Tensor:
    gate, up = bounded(activation, gate_up)
    activated = gated(activation, gate, torch.ones_like(up), inner(activation, gate)[0]).to(
        gate_up.dtype
    )
    return (activated.float() * up).to(gate_up.dtype)


def token_logprobs(
    logits: Tensor, tokens: Tensor, temperature: Temperature
) -> tuple[Tensor, Tensor]:
    logprobs = torch.log_softmax(scaled(logits, temperature), -1)
    entropy = -torch.where(logprobs > -torch.inf, logprobs.exp() * logprobs, 0.0).sum(-1)
    return _of_tokens(logprobs, tokens), entropy


def head_sample(
    ops: Ops,
    hidden: Tensor,
    weight: Prepared,
    keys: Tensor,
    temperature: Temperature,
    source: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    logits = ops.product(hidden, weight, None, torch.float32)
    return drawn(
        ops, logits if source is None else logits.index_select(0, source), keys, temperature
    )


def drawn(
    ops: Ops, logits: Tensor, keys: Tensor, temperature: Temperature
) -> tuple[Tensor, Tensor]:
    """Draw tokens, and return them with their log-probabilities, without the entropy that
    `token_logprobs` computes in addition."""
    tokens = ops.sample(logits, keys, temperature)
    return tokens, _of_tokens(torch.log_softmax(scaled(logits, temperature), -1), tokens)


def _of_tokens(logprobs: Tensor, tokens: Tensor) -> Tensor:
    return logprobs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


def _scale_of(x: QTensor, column: int) -> Tensor:
    """Return the scale of every row for the block that `column` is in: [rows, 1]."""
    column_scale = x.scale[:, column // x.block[1]].unsqueeze(1)
    return expand_scale(column_scale, (x.block[0], 1), (x.shape[0], 1))


class InferenceEngineOps(ReferenceOps):
    """`isobit.kernels.ops.Ops` with the rounding of an inference engine."""

    backend = "separate"

    def __init__(self, alike: Ops) -> None:
        super().__init__("fast", "separate engine: float32 sums, BF16 between them")
        self.device = alike.device
        self._alike = alike
        vars(self).update({name: getattr(alike, name) for name in _ALIKE})

    def attention_inputs(
        self, qkv: Tensor, heads: Heads, store: KVStore, layout: Layout
    ) -> tuple[Tensor, Tensor, Tensor]:
        if heads.norms is None:
            return self._alike.attention_inputs(qkv, heads, store, layout)
        return head_inputs.attention_inputs(self, qkv, heads, store, layout)

    product = staticmethod(product)
    rms_norm = staticmethod(rms_norm)
    attention = staticmethod(attention)
    gate_mul = staticmethod(gate_mul)
    token_logprobs = staticmethod(token_logprobs)
    head_sample = head_sample
