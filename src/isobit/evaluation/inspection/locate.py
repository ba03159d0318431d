"""Finds where two computations of one sequence begin to differ: the first layer and operator with
other bits in a row.

A sequence is computed alone, among the sequences that it was learned with, and token by token over
a cache, as a rollout does. Only a checksum of each row of every operator's result is kept, so the
memory is small for any model. Left out: operators inside a fused one, and the rows of single
experts, which show in their sum.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from isobit.kernels import Layout, Ops, Store, Watching
from isobit.kernels.sampling.filtering import Context, Filtering
from isobit.model import Model
from isobit.model.forward.storage import new_store
from isobit.precision import QTensor

_PLACES = {
    "quantize": "",
    "product": "",
    "rms_norm": "",
    "rms_norm_quantized": "",
    "gate_mul_quantized": "",
    "gate_mul": "gate",
    "attention_inputs": "attention",
    "attention": "attention",
    "attention_quantized": "attention",
    "short_convolution": "convolution",
    "delta_rule": "delta rule",
    "sum_of_rows": "experts",
}
"""The operators that are watched, with their place in the layer if it is not that of an
argument."""
_HASHED_ROWS = 256  # at a time: elements become 8 bytes wide


@dataclass(frozen=True)
class Located:
    """`difference`: the first one in words, or None. `logprob`: of the token, computed for this
    alone."""

    difference: str | None
    logprob: float


@torch.no_grad()
def locate(
    model: Model,
    tokens: Sequence[int],
    target: int,
    batch: Sequence[Sequence[int]],
    index: int,
    temperature: float,
    filtering: Filtering | None = None,
) -> Located:
    """Find why the log-probability of `target` after `tokens` might depend on how they are
    computed.

    `batch`: all sequences of the learner's packed forward, of which number `index` begins with
    `tokens`.
    """
    last = torch.tensor([len(tokens) - 1])
    distribution = (
        temperature,
        filtering,
        Context(torch.tensor(tokens), torch.zeros_like(last), last),
    )
    alone, bits = _packed(model, [tokens], 0, len(tokens), target, distribution)
    packed, packed_bits = _packed(model, batch, index, len(tokens), target, distribution)
    difference = _first_difference(alone, packed, "in its batch", bits, packed_bits)
    if difference is None:
        stepped, stepped_bits = _token_by_token(model, tokens, target, distribution)
        difference = _first_difference(
            alone, stepped, "token by token, as in a rollout,", bits, stepped_bits
        )
    return Located(difference, bits)


_Distribution = tuple[float, Filtering | None, Context]
"""The temperature, and what top-k, top-p and min-p leave of the tokens."""

_Trace = list[tuple[str, Tensor]]
"""For every call in order: its place, and a checksum of each row of the sequence [rows] int64."""


class _Summing(Watching):
    """Keeps a checksum of every row of what a layer's operators return."""

    def __init__(
        self, ops: Ops, layer: int | None, names: dict[int, str], trace: _Trace, rows: int
    ) -> None:
        super().__init__(ops)
        self._layer, self._names, self._trace, self._rows = layer, names, trace, rows

    def __getattr__(self, name: str) -> object:
        operator = super().__getattr__(name)
        if name not in _PLACES:
            return operator

        def call(*arguments: object, **options: object) -> object:
            result = operator(*arguments, **options)  # type: ignore[operator]
            self._trace.append((self._place(name, arguments), _checksums(result, self._rows)))
            return result

        return call

    def _place(self, operator: str, arguments: Sequence[object]) -> str:
        known = [self._names[id(a)] for a in arguments if id(a) in self._names]
        if not _PLACES[operator]:
            known += [a for a in arguments if isinstance(a, str) and a.startswith("layers.")]
        tensor_name = known[0] if known else f"layers.{self._layer}.{_PLACES[operator]}".rstrip(".")
        return f"{tensor_name}, operator {operator}"


def _packed(
    model: Model,
    batch: Sequence[Sequence[int]],
    index: int,
    length: int,
    target: int,
    distribution: _Distribution,
) -> tuple[_Trace, float]:
    """Compute as the learner does: the first `length` rows of sequence `index`, and the
    log-probability after them."""
    lengths = [len(sequence) for sequence in batch]
    start = sum(lengths[:index])
    rows = slice(start, start + length)
    ids = torch.tensor([token for sequence in batch for token in sequence], dtype=torch.int64)
    trace, hidden = _watched(model, "learner", ids, Layout.packed(lengths), None)
    return [(label, sums[rows]) for label, sums in trace], _logprob(
        model, hidden[rows][-1:], target, distribution
    )


def _token_by_token(
    model: Model, tokens: Sequence[int], target: int, distribution: _Distribution
) -> tuple[_Trace, float]:
    """Compute as a rollout does: each row alone, over the stored keys and values of the rows before
    it."""
    transformer, config, size = model.transformer, model.config, 16
    flows = [
        model.precision.flow("rollout", layer, config.num_layers)
        for layer in range(config.num_stores)
    ]
    pages, device = -(-len(tokens) // size), transformer.ops["rollout"].device
    scales = [
        transformer.layer_scales(layer) if flow.calibrated else None
        for layer, flow in enumerate(flows)
    ]
    stores = [
        new_store(config, layer, flow, pages, size, device, flow.kv, scales[layer])
        for layer, flow in enumerate(flows)
    ]
    table = torch.arange(pages, dtype=torch.int32).unsqueeze(0)
    whole: list[list[Tensor]] = []
    for position, token in enumerate(tokens):
        layout = Layout.build([1], [position], table, size)
        trace, hidden = _watched(
            model, "rollout", torch.tensor([token], dtype=torch.int64), layout, stores
        )
        whole.append([sums for _, sums in trace])
    joined = [(label, torch.cat(sums)) for (label, _), sums in zip(trace, zip(*whole))]
    return joined, _logprob(model, hidden, target, distribution, "rollout")


def _watched(
    model: Model, use: str, ids: Tensor, layout: Layout, stores: Sequence[Store] | None
) -> tuple[_Trace, Tensor]:
    transformer, trace = model.transformer, _Trace()
    names = transformer.working_names(use)
    with transformer.watched(
        lambda ops, layer: _Summing(ops, layer, names, trace, layout.num_rows), use
    ):
        hidden = transformer.hidden(ids, layout, stores, use=use)
    transformer.ops[use].raise_faults()
    return trace, hidden


def _logprob(
    model: Model, hidden: Tensor, target: int, distribution: _Distribution, use: str = "learner"
) -> float:
    wanted = torch.tensor([target], dtype=torch.int64, device=hidden.device)
    temperature, filtering, context = distribution
    head = model.transformer.head_logprobs
    return float(head(hidden, wanted, temperature, use, filtering=filtering, context=context)[0])


def _first_difference(
    alone: _Trace, other: _Trace, how: str, bits: float, other_bits: float
) -> str | None:
    for (label, sums), (_, other_sums) in zip(alone, other, strict=True):
        rows = (sums != other_sums).nonzero().flatten()
        if len(rows):
            return f"{label}: row {int(rows[0])} of the sequence has other bits {how} than alone"
    return (
        None if bits == other_bits else f"the output head: the row has other bits {how} than alone"
    )


def _checksums(result: object, rows: int) -> Tensor:
    """Return [rows] int64 on the CPU: a checksum of each row, over all results with that number of
    rows."""
    total = torch.zeros(rows, dtype=torch.int64)
    for index, tensor in enumerate(_tensors(result)):
        if not tensor.numel() or tensor.shape[0] % rows:
            continue
        flat = tensor.detach().reshape(rows, -1).contiguous()
        words = flat.view(
            {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()]
        )
        generator = torch.Generator().manual_seed(index)
        factors = torch.randint(
            -(1 << 63), (1 << 63) - 1, (words.shape[1],), generator=generator
        ).to(words.device)
        sums = [(chunk.to(torch.int64) * factors).sum(1) for chunk in words.split(_HASHED_ROWS)]
        total += torch.cat(sums).cpu()
    return total


def _tensors(result: object) -> list[Tensor]:
    if isinstance(result, QTensor):
        return [result.data, result.scale]
    if isinstance(result, Tensor):
        return [result]
    return (
        [tensor for item in result for tensor in _tensors(item)]
        if isinstance(result, tuple)
        else []
    )
