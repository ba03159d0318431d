"""Single kernels: products against the library's BF16 product, and memory-bound kernels against the
copy bandwidth.

`fp8 with its quantization` is what a layer pays: the activation's quantization and the product.
Where that is slower than the best BF16 product, FP8 loses, and the shape is named: `precision` can
keep such layers in BF16 on both sides. `in a learner`, nothing is captured, and a library
multiplies where it returns Triton's bytes (`kernels/product/triton/library.py`).
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.gpu.common import Bench, Case, fill_cache, shapes
from benchmarks.gpu.timing import Rotation, num_sets, rotation
from benchmarks.work import Rates, Work, linear_sizes
from isobit.kernels import KVStore, Layout, get_ops
from isobit.kernels.matrices import LIBRARY_ROWS
from isobit.kernels.table import triton_ops
from isobit.precision import BF16, E4M3, INT8, QuantSpec

_ROW, _BLOCK, _HEAD = QuantSpec(E4M3, "1x128"), QuantSpec(E4M3, "128x128"), QuantSpec(E4M3, "row")
_CACHES = {"int8 cache": QuantSpec(INT8, "row", "fp32"), "e4m3 cache": _HEAD, "bf16 cache": None}
_FIRST = ("Qwen3-8B", "Qwen3-0.6B")  # a lease may end before the others


def run(bench: Bench) -> None:
    """Attention, then products of every layer at several numbers of tokens, then what stands
    between them."""
    _attention(bench)
    tokens = (3,) if bench.rehearsal else (64, 128, 512, 16, 256, 8192, 1)
    models = shapes(bench)
    for name in sorted(models, key=lambda name: (name not in _FIRST, name)):
        for layer, (outputs, inputs) in linear_sizes(models[name]).items():
            for rows in tokens:
                what = f"{name} {layer}, {rows} tokens"
                if bench.wants(what):
                    with bench.case(what) as case:
                        _products(case, rows, outputs, inputs, bench)
    _between(bench)


def _products(case: Case, rows: int, outputs: int, inputs: int, bench: Bench) -> None:
    bitwise, fast = triton_ops("bitwise"), triton_ops("fast")
    nbytes = (rows + outputs) * inputs
    sets = []
    for _ in range(num_sets(nbytes)):
        x, w = (
            torch.randn(count, inputs, device=bench.device).bfloat16() for count in (rows, outputs)
        )
        sets.append((x, w, bitwise.quantize(x, _ROW), bitwise.quantize(w, _BLOCK)))
    contestants = {
        "bf16 cuBLAS": rotation(lambda s: functional.linear(s[0], s[1]), sets, 2 * nbytes),
        "bf16": rotation(lambda s: bitwise.product(s[0], s[1]), sets, 2 * nbytes),
        "fp8": rotation(lambda s: bitwise.product(s[2], s[3]), sets, nbytes),
        "fp8 with its quantization": rotation(
            lambda s: bitwise.product(bitwise.quantize(s[0], _ROW), s[3]), sets, nbytes
        ),
    }
    if not bench.rehearsal:
        contestants["fp8 cuBLAS"] = rotation(lambda s: fast.product(s[2], s[3]), sets, nbytes)
    if rows >= LIBRARY_ROWS:  # as a learner multiplies
        for name in ("bf16", "fp8"):
            contestants[f"{name} in a learner"] = replace(contestants[name], eager=True)
    operations, moved = 2 * rows * outputs * inputs, 2 * rows * outputs
    rates = bench.rates
    least = {
        "bf16": _seconds(Work(operations, 0, moved + 2 * nbytes), rates),
        "fp8": _seconds(Work(0, operations, moved + nbytes), rates),
    }
    found = case.time(contestants)
    for contestant, timing in found.items():
        case.row(
            contestant, timing, least[contestant[:4].strip()],
            operations_per_s=operations / timing.seconds,
            bytes_per_s=(moved + nbytes * (2 if contestant.startswith("bf16") else 1)) / timing.seconds,
        )  # fmt: skip
    chosen, refused = bitwise.libraries.chosen, bitwise.libraries.refused
    case.row(
        "multiplied by",
        chosen=[f"{size[3]}: {name}" for size, name in chosen.items()],
        refused=refused,
    )
    best = min(
        (timing.seconds for name, timing in found.items() if name.startswith("bf16")), default=None
    )
    low = found.get("fp8 with its quantization")
    if best is not None and low is not None and low.seconds > best:
        case.row("fp8 loses", low.seconds, best)


def _seconds(work: Work, rates: Rates | None) -> float | None:
    return None if rates is None else work.seconds(rates)


def _between(bench: Bench) -> None:
    """Bytes read and written, over the bandwidth of a copy."""
    ops = get_ops("triton")
    rows, hidden, inner = (4, 160, 96) if bench.rehearsal else (16384, 4096, 12288)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device=bench.device)

    one = 1 + 4 / 128
    weight = normal(hidden).bfloat16()

    def norm(s: tuple[Tensor, Tensor]) -> object:
        return ops.rms_norm_quantized(s[0], weight, 1e-6, s[1], _ROW, "x")

    # what is timed, what makes a set of its inputs, and bytes that move
    kernels: dict[str, tuple[Callable, Callable[[], object], float]] = {
        "rms_norm_quantized": (
            norm,
            lambda: (normal(rows, hidden).bfloat16(), normal(rows, hidden).bfloat16()),
            rows * hidden * (6 + one),
        ),
        "gate_mul_quantized": (
            lambda x: ops.gate_mul_quantized("silu", x, _ROW, "h"),
            lambda: normal(rows, 2 * inner).bfloat16(),
            rows * inner * (4 + one),
        ),
        "quantize a weight": (
            lambda x: ops.quantize(x, _BLOCK),
            lambda: normal(inner, hidden),
            inner * hidden * 5,
        ),
        "quantize_along_tokens, gradient": (
            lambda x: ops.quantize_along_tokens(x, _ROW, "dy"),
            lambda: normal(rows, hidden).bfloat16(),
            rows * hidden * 3,
        ),
        "quantize_along_tokens, codes": (
            lambda x: ops.quantize_along_tokens(x, _ROW, "x"),
            lambda: ops.quantize(normal(rows, hidden).bfloat16(), _ROW),
            rows * hidden * 2 * one,
        ),
        "gate_mul_backward": (
            lambda s: ops.gate_mul_backward("silu", *s),
            lambda: (normal(rows, inner).bfloat16(), normal(rows, 2 * inner).bfloat16()),
            rows * inner * 10,
        ),
        "gate_mul_backward_quantized": (
            lambda s: ops.gate_mul_backward_quantized("silu", s[0], s[1], _ROW, "dh"),
            lambda: (normal(rows, inner).bfloat16(), normal(rows, 2 * inner).bfloat16()),
            rows * inner * (6 + 4 * one),
        ),
        "gate_mul_backward, then quantize_both_ways": (
            lambda s: ops.quantize_both_ways(ops.gate_mul_backward("silu", *s), _ROW, "dh"),
            lambda: (normal(rows, inner).bfloat16(), normal(rows, 2 * inner).bfloat16()),
            rows * inner * (14 + 4 * one),
        ),
    }
    for name, (call, make, moved) in kernels.items():
        what = f"{name}, {rows} rows"
        if bench.wants(what):
            with bench.case(what) as case:
                sets = [make() for _ in range(num_sets(int(moved)))]
                _against_copy(case, name, rotation(call, sets, int(moved)), moved, bench.rates)


def _against_copy(
    case: Case, name: str, contestant: Rotation, moved: float, rates: Rates | None
) -> None:
    for timing in case.time({name: contestant}).values():
        least = None if rates is None else moved / rates.bandwidth
        case.row(name, timing, least, bytes_per_s=moved / timing.seconds)


def _attention(bench: Bench) -> None:
    """Decoding: bytes of keys and values over the bandwidth of a copy, by format of the cache."""
    heads, kv_heads, dim = (4, 2, 16) if bench.rehearsal else (32, 8, 128)
    cases = (
        [(2, 40)]
        if bench.rehearsal
        else [(512, 1024), (64, 8192), (64, 1024), (1, 32768), (16, 8192), (256, 2048)]
    )
    for batch, context in cases:
        for name, kv in _CACHES.items():
            what = f"attention, batch {batch}, context {context}, {name}"
            if bench.wants(what):
                with bench.case(what) as case:
                    _attend(case, name, batch, context, (heads, kv_heads, dim), kv, bench)


def _attend(
    case: Case,
    name: str,
    batch: int,
    context: int,
    heads: tuple[int, int, int],
    kv: QuantSpec | None,
    bench: Bench,
) -> None:
    ops, (num_heads, kv_heads, dim) = get_ops("triton"), heads
    pages = -(-context // 16)
    moved = batch * context * 2 * kv_heads * dim * (2 if kv is None else 1 + 4 / dim)
    sets = []
    for _ in range(num_sets(int(moved))):
        table = torch.randperm(batch * pages).int().view(batch, pages)
        layout = Layout.build([1] * batch, [context - 1] * batch, table, 16).to(ops.device)
        store = KVStore.allocate(batch * pages * 16, kv_heads, dim, kv, BF16, None, ops.device)
        fill_cache(store)
        q = torch.randn(batch, num_heads, dim, device=bench.device).bfloat16()
        sets.append(partial(ops.attention, q, store, layout, dim**-0.5))
    _against_copy(case, name, Rotation(sets, int(moved)), moved, bench.rates)
