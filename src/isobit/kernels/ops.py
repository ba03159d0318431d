"""The operators' signatures (`Ops`), and heads, which some of them take.

Rollout and learner call the same operators. Left out: rows in sequences (`layout.py`), operands of
products (`matrices.py`), what is stored of earlier rows (`stores.py`), and the arithmetic
(`reference`, `native`, `triton`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

import torch
from torch import Tensor

from isobit.kernels.layout import Layout
from isobit.kernels.matrices import Gradients, Operand, Prepared, Stacked
from isobit.kernels.stores import KVStore, StateStore
from isobit.precision import ErrorSums, Format, Precision, QTensor, QuantSpec

if TYPE_CHECKING:
    from isobit.kernels.low_rank.definition import Factors

Temperature = float | Tensor
"""One for all rows, or float32 for each [T]."""
Activation = Literal["silu", "gelu_pytorch_tanh", "swiglu_clamped", "sigmoid"]
"""That of a gated MLP, by its name in transformers: x / (1 + exp(-k)), k = x or 2·√(2/π)·(x +
0.044715·x³); or gpt-oss's, k = 1.702·x of a gate of at most 7, beside up + 1 of an up that is at
most 7 from 0; or 1 / (1 + exp(-x)), which gates what attention gives."""


@dataclass(frozen=True, eq=False)
class Heads:
    """The normalization and rotation of the query and key heads of a projection.

    `norms` [D]: the weights of the RMS norms of queries and keys, if any, with `eps`; then rotation
    by the cosines and sines `tables`, each [positions, D / 2] float32.
    """

    norms: tuple[Tensor, Tensor] | None
    eps: float
    tables: tuple[Tensor, Tensor]


@dataclass(frozen=True, eq=False)
class DeltaHeads:
    """The heads of linear attention by the gated delta rule: each of `key_heads` queries and keys
    of `key_dim` serves value_heads / key_heads consecutive values of `value_dim`. `decay` and
    `step_bias` [value_heads] float32 are A_log and dt_bias: a state fades by exp(-exp(decay) ·
    softplus(a + step_bias)) a token. With a `skip` [value_heads] float32, Mamba-2's D, it is that
    model's recurrence: values are written whatever the state says already, at a strength of the
    softplus, which is at least `least_step`, and skip times the value is added to what is read."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    decay: Tensor
    step_bias: Tensor
    skip: Tensor | None = None
    least_step: float = 0.0

    @property
    def corrects(self) -> bool:
        """Whether a token writes what the state does not say already, as the delta rule does."""
        return self.skip is None

    @property
    def gates(self) -> int:
        """Numbers of a token that say how strongly it writes, and how much is forgotten."""
        return 2 * self.value_heads if self.corrects else self.value_heads


class Ops(Protocol):
    """The operators of one backend. No autograd: forwards and explicit backwards.

    The bits of a row depend on that row, the weights and the position. *Rounded once* means from
    float64, in `triton` from float32, to the type of the result in one rounding, to nearest even;
    PyTorch's own cast to bfloat16 goes through float32, which makes two (`reference/rounding.py`).
    T rows, S sequences, H query heads, KV heads of keys, D head dimension, C channels, V
    vocabulary.
    """

    backend: str
    consistency: str
    order: str
    """The definition of its products' sums: where it differs, bits do."""
    why: str
    device: torch.device
    fused_head: bool
    """Whether `head_logprobs` and `head_sample` work without holding logits."""

    def check_precision(self, precision: Precision) -> None:
        """Raise IsobitError for a precision flow that this backend does not compute."""

    def raise_faults(self) -> None:
        """Raise NonFiniteError if an operator has met NaN or infinity since the last call and could
        not raise then, because on a GPU operators do not wait for results. Call it where results
        are read."""

    def quantize(self, x: Tensor, spec: QuantSpec, name: str = "tensor") -> QTensor:
        """Return `isobit.precision.quantize`, bit for bit."""

    def error_sums(self, x: Operand, quantized: QTensor) -> ErrorSums:
        """Return `isobit.precision.error_sums` of x [R, C] and its quantization; sums of squares to
        some last places."""

    def prepare(self, weight: Operand, into: Prepared | None = None) -> Prepared:
        """Return a weight that is multiplied often, with this backend's packs of it, if any;
        products have the same bits as with the weight itself. `into`: the same weight, prepared
        before it was overwritten; its packs are overwritten in place."""

    def product(
        self, a: Operand, b: Prepared, bias: Tensor | None = None, out: torch.dtype = torch.bfloat16
    ) -> Tensor:
        """Return a [M, K] · b [N, K]ᵀ + bias [N], rounded once to `out`: [M, N]. Blocks of K as in
        docs/numerics.md."""

    def rounds_last(self, a: Operand, b: Prepared) -> bool:
        """Return whether the product of these to bfloat16 is known to have the bits of the one to
        float32, rounded; False says nothing."""

    def quantize_along_tokens(self, x: Operand, spec: QuantSpec, name: str) -> QTensor:
        """Return xᵀ [C, T] of x [T, C], quantized along the tokens; `spec` describes x, or a
        gradient, along its columns."""

    def quantize_both_ways(self, x: Tensor, spec: QuantSpec, name: str) -> tuple[QTensor, QTensor]:
        """Return (`quantize`, `quantize_along_tokens`) of x [T, C], bit for bit."""

    def gradient_product(
        self, a: Operand, b: Operand, out: torch.dtype, into: Tensor | None = None
    ) -> Tensor:
        """Return `product` for a backward: the same inputs give the same bits, but a row may depend
        on its batch. With `into` [M, N] float32, contiguous, the float32 product is added to it,
        with the bits of `into += product`."""

    def by_expert(self, chosen: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Choices [T, k] int64 among `count` experts, sorted by expert, then by row: each sorted
        row's token [T k], the sorted rows of each token [T, k], and where every expert's rows
        begin, with their number at the end [count + 1]; int64 all."""

    def grouped_product(
        self,
        a: Operand,
        weights: Stacked,
        offsets: Tensor,
        out: torch.dtype,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Return `product` of every row of a [R, K] with the weights [N, K] of its expert, and its
        bias if the experts have any: [R, N]. Rows offsets[e] to offsets[e + 1] are those of expert
        e; offsets [E + 1] int64, offsets[E] = R. With `rows` [R] int64, row r is a's at rows[r].
        Rows do not share scales."""

    def prepare_factors(
        self, parts: Sequence[tuple[Tensor, Tensor, int, int]], scale: float
    ) -> "Factors":
        """Return one adapter's factors of a weight: for rows lo to hi of it a [r, K], b [hi - lo,
        r], lo and hi. They are packed as `prepare` packs a weight."""

    def adapted_product(
        self,
        x: Operand,
        weight: Prepared,
        bias: Tensor | None,
        adapters: "Sequence[Factors] | Tensor",
        rows: Tensor,
        offsets: Tensor,
        dtype: torch.dtype,
    ) -> Tensor:
        """Return `product` to float32, plus what adapters make of x [T, K] in `dtype`, each of its
        own rows (`low_rank/definition.py`), rounded to `dtype`: [T, N]. The rows of adapter i are
        rows[offsets[i]] to rows[offsets[i + 1]]; rows [R] int64 on the operators' device, none
        twice; offsets int64 on the CPU. Where the product `rounds_last` to bfloat16, `adapters` may
        be their addresses [G] int64, 0 for none: all is then read when it is computed."""

    def add_low_rank(
        self,
        total: Tensor,
        x: Operand,
        adapters: "Sequence[Factors]",
        rows: Tensor,
        offsets: Tensor,
        dtype: torch.dtype,
    ) -> Tensor:
        """Return `adapted_product` of a product that is there: `total` [T, N] float32, contiguous,
        which is overwritten."""

    def grouped_weight_gradient(
        self,
        dy: Tensor,
        x: Operand,
        offsets: Tensor,
        gradient: QuantSpec | None,
        name: str,
        into: Gradients = (),
    ) -> list[Tensor | None]:
        """For every expert dyᵀ · x of its rows, [N, K] float32, or None where it has none; dy [R,
        N], x [R, K]. With `gradient` both are quantized along the tokens, in blocks that begin anew
        at an expert's first row; x is then quantized. What stands in `into` for an expert, as of
        `gradient_product`, is its result after the addition. For the learner only: it may wait for
        a GPU, to know which experts have rows."""

    def grouped_bias_gradient(self, dy: Tensor, offsets: Tensor) -> list[Tensor | None]:
        """For every expert the sum of its rows of dy [R, N], [N] float32, or None where it has
        none; it repeats. It may wait for a GPU, as `grouped_weight_gradient`."""

    def sum_of_rows(self, x: Tensor, place: Tensor, gates: Tensor | None) -> Tensor:
        """Row t is Σ_j gates[t, j] · x[place[t, j]], each product rounded to float32 and added in
        the order of j, the sum rounded once to x's dtype: [T, C]. x [R, C], place [T, k] int64,
        gates [T, k] float32, by default 1."""

    def sum_of_rows_backward(
        self, dy: Tensor, x: Tensor, place: Tensor, gates: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return (gradient of x [R, C], of the gates [T, k] float32); a row of x has one place."""

    def route(
        self, logits: Tensor, count: int, normalize: bool, given: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return (p = softmax over the experts of logits [T, E] float32, rounded to float32; the
        `count` most probable experts [T, count] int64, in descending order, ties to the lower;
        gates [T, count] float32). Gates are p of the experts `given` [T, count] int64, by default
        of those chosen; with `normalize` divided by their sum, which is added in float32 in their
        order."""

    def rms_norm(
        self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return (y, summed, rstd): summed = x + residual rounded, y = summed · rstd · weight
        rounded once; x [R, C], rstd [R]."""

    def rms_norm_quantized(
        self,
        x: Tensor,
        weight: Tensor,
        eps: float,
        residual: Tensor | None,
        spec: QuantSpec,
        name: str,
    ) -> tuple[QTensor, Tensor, Tensor]:
        """Return `rms_norm` with its y quantized: the bits of the two operators in turn."""

    def rms_norm_backward(
        self, dy: Tensor, summed: Tensor, weight: Tensor, rstd: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return (gradient of summed [R, C], gradient of weight [C] float32)."""

    def rms_norm_backward_added(
        self, dy: Tensor, summed: Tensor, weight: Tensor, rstd: Tensor, added: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return `rms_norm_backward`, its first result plus `added` [R, C], bit for bit."""

    def rotary(
        self, x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, inverse: bool = False
    ) -> Tensor:
        """Rotate x [T, heads, D] by the tables' rows [P, D/2] at `positions`; half-split pairs;
        `inverse` rotates back."""

    def attention_inputs(
        self, qkv: Tensor, heads: Heads, store: KVStore, layout: Layout
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return (q [T, H, D], k, v [T, KV, D]) of qkv [T, H + 2 KV, D]: q and k normed and rotated
        to the layout's positions; k and v stored. The bits of `rms_norm`, `rotary` and `kv_write`
        in turn."""

    def attention_inputs_backward(
        self, gradients: tuple[Tensor, Tensor, Tensor], qkv: Tensor, heads: Heads, positions: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return (gradient of qkv, of the two norms' weights [D] float32), of those of q, k and v;
        straight through the store."""

    def kv_write(self, store: KVStore, k: Tensor, v: Tensor, layout: Layout) -> None:
        """Store k, v [T, KV, D] at the layout's slots: cast, quantized per token and head, or under
        calibrated scales, whose clamping is counted. Raises NonFiniteError for NaN and infinity; on
        a GPU `raise_faults` does."""

    def attention(
        self,
        q: Tensor,
        store: KVStore,
        layout: Layout,
        scale: float,
        window: int | None = None,
        sinks: Tensor | None = None,
        probabilities: Format | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return (out [T, H, D] in q's dtype, lse [T, H] float32): a row at position p attends to
        keys 0 to p of its sequence; with a `window` (at least 1) to the last `window` of them,
        itself included. Keys that it does not see add nothing, and may be skipped: what is summed
        in which order depends on positions alone. `sinks` [H] float32 are one score more for each
        head, of a key whose value is 0, added to the others' sum last; lse has them.
        `probabilities`: E4M3 where the weights exp(score - peak), once they are summed, are rounded
        to it before they meet the values (`kernels/attention/probabilities.py`)."""

    def attention_quantized(
        self, q: Tensor, store: KVStore, layout: Layout, scale: float, window: int | None,
        sinks: Tensor | None, probabilities: Format | None, spec: QuantSpec, name: str, keep: bool,
    ) -> tuple[Tensor | None, QTensor, Tensor]:  # fmt: skip
        """Return (out, out as a matrix [T, H D] quantized, lse) of `attention`: the bits of the two
        operators in turn. Without `keep` out is None."""

    def attention_backward(
        self,
        dout: Tensor,
        q: Tensor,
        out: Tensor,
        lse: Tensor,
        store: KVStore,
        layout: Layout,
        scale: float,
        window: int | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return (dq [T, H, D], dk, dv [K, KV, D]) for packed layouts, whose keys are their rows,
        or of the layout's `keys`; straight through all quantization, of probabilities too. Of sinks
        these know by lse and out alone."""

    def sinks_backward(self, dout: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
        """Return the gradient [H] float32 of the sinks of `attention`; the same bits in every
        call."""

    def short_convolution(
        self,
        x: Tensor,
        weight: Tensor,
        store: StateStore | None,
        layout: Layout,
        bias: Tensor | None = None,
    ) -> Tensor:
        """Compute a depthwise causal convolution and SiLU: y[t, c] = silu(bias[c] + Σ_j weight[c,
        j] · x[t - W + 1 + j, c]), rounded once; x [T, C], weight [C, W] and bias [C] float32.
        Inputs of earlier rows are in the `store`, which receives the last ones; None where
        sequences are whole and are not continued."""

    def short_convolution_backward(
        self, dy: Tensor, x: Tensor, weight: Tensor, layout: Layout, bias: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """Return (gradient of x [T, C], of the weight [C, W] float32, then the bias's [C] if there
        is a bias) of whole sequences; the same bits in every call."""

    def delta_rule(
        self,
        qkv: Tensor,
        gates: Tensor,
        heads: DeltaHeads,
        store: StateStore | None,
        layout: Layout,
    ) -> Tensor:
        """Gated delta rule, out [T, Hv, Dv] in qkv's dtype; (q, k, v) [T, 2 Hk Dk + Hv Dv], gates
        (b, a) [T, 2 Hv] float32; or with a `skip` Mamba-2's recurrence of (v, k, q), which are its
        x, B and C, and gates a [T, Hv], its dt. Token by token, in float32
        (`kernels/delta/definition.py`), from the states in the `store` of earlier rows, which
        receives the new ones; None as in `short_convolution`."""

    def delta_rule_backward(
        self, dout: Tensor, qkv: Tensor, gates: Tensor, heads: DeltaHeads, layout: Layout
    ) -> tuple[Tensor, ...]:
        """Return (gradient of qkv, of gates, of decay, of step_bias and, if there is one, of skip
        [Hv] float32) of whole sequences; it repeats."""

    def gate_mul(self, activation: Activation, gate_up: Tensor) -> Tensor:
        """Return activation(gate) · up, rounded once: [T, 2I] to [T, I] (`Activation`)."""

    def gate_mul_quantized(
        self, activation: Activation, gate_up: Tensor, spec: QuantSpec, name: str
    ) -> QTensor:
        """Return `gate_mul`, quantized: the bits of the two operators in turn."""

    def gate_mul_backward(self, activation: Activation, dh: Tensor, gate_up: Tensor) -> Tensor:
        """Return the gradient of gate_up [T, 2I], in its type."""

    def gate_mul_backward_quantized(
        self, activation: Activation, dh: Tensor, gate_up: Tensor, spec: QuantSpec, name: str
    ) -> tuple[QTensor, QTensor]:
        """Return `gate_mul_backward`, by `quantize_both_ways`, bit for bit."""

    def embedding(self, tokens: Tensor, table: Tensor) -> Tensor:
        """Return rows of the table [V, C] for tokens [T] int64: [T, C]."""

    def embedding_backward(self, dy: Tensor, tokens: Tensor, count: int) -> Tensor:
        """Return the gradient [count, C] float32 of a table whose rows `tokens` [T] have gradients
        dy [T, C]; the same bits in every call."""

    def square_sums(self, x: Tensor) -> Tensor:
        """Return for each row of x [R, C] float32 the sum of its squares, [R] float64. On a CPU the
        second half of a row is added to the first, until one number is left."""

    def round_stochastically(self, x: Tensor, seed: int, step: int, first: int) -> Tensor:
        """Return x [n] float32, elements number `first` (a multiple of 8) and on of a tensor, in
        bfloat16: of the two neighbours the farther from 0 with a probability that is the distance
        to the other, so the mean is x (`kernels/optim/definition.py`). The same bits in every
        backend: random numbers are a function of `seed` (64 bits), `step` and an element's
        number."""

    def token_logprobs(
        self, logits: Tensor, tokens: Tensor, temperature: Temperature
    ) -> tuple[Tensor, Tensor]:
        """Return (log-probability of `tokens`, entropy) [T] float32 of softmax(logits /
        temperature); logits [T, V] float32."""

    def cap_logits(self, logits: Tensor, cap: float) -> Tensor:
        """Return logits [T, V] float32, contiguous, overwritten by cap · tanh(logits / cap),
        float64 inside and rounded once; elementwise. What samples and what learns hold such logits:
        operators of the head know of no cap."""

    def sample(self, logits: Tensor, keys: Tensor, temperature: Temperature) -> Tensor:
        """Draw tokens [B] int64 from softmax(logits / temperature); keys [B, 4] int64: seed,
        prompt, sample, position."""

    def head_logprobs(
        self, hidden: Tensor, weight: Prepared, tokens: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """Return `token_logprobs` of the output head's logits hidden [T, C] · weight [V, C]ᵀ."""

    def head_backward(
        self,
        dlogprobs: Tensor,
        hidden: Tensor,
        weight: Prepared,
        tokens: Tensor,
        temperature: float,
        dentropy: Tensor | None = None,
        into: Tensor | None = None,
        trained: bool = True,
    ) -> tuple[Tensor, Tensor | None]:
        """Return (gradient of hidden [T, C], of the weight [V, C] float32) of that of the
        log-probabilities [T] and, where there is one, that of the entropies [T] float32. With
        `into` the weight's is added to it, as in `gradient_product`; one that is not `trained` has
        none."""

    def head_backward_kept(
        self,
        dlogprobs: Tensor,
        logits: Sequence[Tensor],
        hidden: Tensor,
        weight: Prepared,
        tokens: Tensor,
        temperature: float,
        dentropy: Tensor | None = None,
        into: Tensor | None = None,
        from_zero: bool = False,
        trained: bool = True,
    ) -> tuple[Tensor, Tensor | None]:
        """Return `head_backward` of rows whose logits, [rows, V] float32 each, were kept in chunks,
        and are overwritten: the bits of `head_backward` of each chunk in turn, which adds to the
        weight's gradient of those before. That is added to `into`, or with `from_zero` to 0, as to
        an `into` of zeros."""

    def head_sample(
        self,
        hidden: Tensor,
        weight: Prepared,
        keys: Tensor,
        temperature: Temperature,
        source: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return (tokens [B] int64, their log-probabilities [B] float32, which are
        `head_logprobs`'): key b [B, 4] draws from row `source[b]` of hidden, by default row b.
        Tokens as by `sample`."""
