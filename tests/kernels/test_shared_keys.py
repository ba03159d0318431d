"""Gradients of attention where sequences share rows: those of whole sequences, for each sequence
its keys' own."""

import pytest
import torch
from torch import Tensor

from isobit.errors import IsobitError
from isobit.kernels import KVStore, Layout, Ops, get_ops
from isobit.precision import BF16, E4M3, FP32, INT8, QuantSpec
from isobit.rl import Sample
from isobit.rl.learner.packing import PackedBatch, pack

from .helpers import draw, same

CACHES = {"bf16": (BF16, None), "fp32": (FP32, None),
    "int8": (BF16, QuantSpec(INT8, "row", "fp32")),
          "e4m3": (BF16, QuantSpec(E4M3, "row", "fp32"))}  # fmt: skip
LENGTHS = ((70, (5, 40, 1)), (3, (90,)), (33, (2, 64)))
"""Rows of prompts, and of what follows them."""
LEVELS = [("reference", "exact"), ("native", "exact"), ("native", "bitwise")]


def batches() -> tuple[PackedBatch, PackedBatch]:
    """(whole sequences, sequences that share prompts)."""
    samples = [
        Sample(0, 0, (number,) * prompt, (0,) * (rows + 1), (-1.0,) * (rows + 1), "", False, 0)
        for number, (prompt, completions) in enumerate(LENGTHS)
        for rows in completions
    ]
    return pack(samples), pack(samples, share_prompts=True)


class Case:
    """Operands of rows that sequences share, and of whole ones, in which only a row's first copy
    has a gradient."""

    def __init__(self, cache: str, shape: tuple[int, int, int] = (4, 2, 40)) -> None:
        self.whole, self.shared = batches()
        heads, kv_heads, dim = shape
        compute, self.kv = CACHES[cache]
        rows = len(self.shared.tokens)
        counts = (heads, kv_heads, kv_heads, heads)
        drawn = [
            draw(i, rows, count, dim, dtype=compute.dtype, spread=0.3)
            for i, count in enumerate(counts)
        ]
        self.q, self.k, self.v, self.dout = drawn
        self.compute, self.shape = compute, (kv_heads, dim)
        keys = self.shared.layout.keys
        assert keys is not None
        self.copies = keys.copies
        places = torch.zeros(len(self.whole.tokens), dtype=torch.int64)
        places[self.shared.whole] = torch.arange(rows)
        start = self.whole.layout.row_start
        for s, n in enumerate((start[1:] - start[:-1]).tolist()):
            places[start[s] : start[s] + n] = self.copies.index[keys.start[s] : keys.start[s] + n]
        self.places = places

    def store(self, ops: Ops, layout: Layout, rows: Tensor) -> KVStore:
        found = KVStore.allocate(layout.num_slots, *self.shape, self.kv, self.compute)
        ops.kv_write(found, self.k[rows], self.v[rows], layout)
        return found

    def run(
        self, ops: Ops, layout: Layout, rows: Tensor, dout: Tensor, window: int | None
    ) -> list[Tensor]:
        """out, lse, dq, dk and dv."""
        store, q = self.store(ops, layout, rows), self.q[rows]
        out, lse = ops.attention(q, store, layout, 0.3, window)
        return [out, lse, *ops.attention_backward(dout, q, out, lse, store, layout, 0.3, window)]

    def sharing(self, ops: Ops, window: int | None, layout: Layout | None = None) -> list[Tensor]:
        rows = torch.arange(len(self.q))
        return self.run(ops, layout or self.shared.layout, rows, self.dout, window)

    def apart(self, ops: Ops, window: int | None) -> list[Tensor]:
        dout = torch.zeros_like(self.dout)[self.places]
        dout[self.shared.whole] = self.dout
        return self.run(ops, self.whole.layout, self.places, dout, window)


def operators(backend: str, consistency: str) -> Ops:
    try:
        return get_ops(backend, consistency)
    except IsobitError as error:
        pytest.skip(f"no native backend here: {error}")


@pytest.mark.parametrize("window", [None, 20, 75])
@pytest.mark.parametrize("cache", sorted(CACHES))
@pytest.mark.parametrize(("backend", "consistency"), LEVELS)
def test_results_are_those_of_whole_sequences(
    backend: str, consistency: str, cache: str, window: int | None
) -> None:
    """Of a row in every bit. Of a key's gradient up to the order of its rows, which its own
    sequence alone decides."""
    ops, case = operators(backend, consistency), Case(cache)
    found, wanted = case.sharing(ops, window), case.apart(ops, window)
    for ours, theirs in zip(found[:3], wanted[:3]):
        assert same(ours, theirs[case.shared.whole])
    near = 2.0**-7 if case.q.dtype == torch.bfloat16 else 2.0**-18
    for ours, theirs in zip(found[3:], wanted[3:]):
        assert (ours.double() - theirs.double()).norm() <= near * theirs.double().norm()


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("cache", ["bf16", "int8"])
def test_cpp_is_the_definition_bit_for_bit(cache: str, window: int | None) -> None:
    native, reference = operators("native", "bitwise"), get_ops("reference", "bitwise")
    case = Case(cache, (2, 1, 16))
    for ours, theirs in zip(case.sharing(native, window), case.sharing(reference, window)):
        assert same(ours, theirs)


@pytest.mark.parametrize(("backend", "consistency"), LEVELS)
def test_keys_of_another_prompt_have_other_gradients(backend: str, consistency: str) -> None:
    """The control: a sequence that follows a prompt of the same length, but not its own."""
    ops, case = operators(backend, consistency), Case("bf16")
    layout = case.shared.layout
    other = Layout(**{**vars(layout), "page_table": layout.page_table.roll(1, 1)})
    found, wanted = case.sharing(ops, None, other), case.sharing(ops, None)
    for ours, theirs in zip(found, wanted):
        assert (ours.double() - theirs.double()).norm() > 2.0**-7 * theirs.double().norm()
