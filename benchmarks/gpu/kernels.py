"""Single kernels: products against the library's BF16 product, and memory-bound kernels against the copy bandwidth.

Weights rotate among copies that together exceed the L2 cache. `fp8 with its quantization` is what a layer pays: the
activation's quantization and the product. Where that is slower than the best BF16 product, FP8 loses, and the shape is
named: `precision` can keep such layers in BF16 on both sides.
"""

from collections.abc import Callable
from functools import partial
from itertools import cycle

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.gpu.common import Bench, copies, shapes
from benchmarks.roofline import H200
from isobit.kernels import KVStore, Layout, get_ops
from isobit.plan.work import Work, linear_sizes
from isobit.precision import BF16, E4M3, QuantSpec

_ROW, _BLOCK, _HEAD = QuantSpec(E4M3, "1x128"), QuantSpec(E4M3, "128x128"), QuantSpec(E4M3, "row")


def run(bench: Bench) -> None:
    """Products of every layer at several numbers of tokens, then what stands between them, then attention."""
    tokens = (3,) if bench.rehearsal else (1, 16, 64, 512, 8192)
    for name, config in shapes(bench).items():
        for layer, (outputs, inputs) in linear_sizes(config).items():
            for rows in tokens:
                case = f"{name} {layer}, {rows} tokens"
                if bench.has_time(case):
                    _products(case, rows, outputs, inputs, bench)
    _between(bench)
    _attention(bench)


def _products(case: str, rows: int, outputs: int, inputs: int, bench: Bench) -> None:
    bitwise, fast = get_ops("triton"), get_ops("triton", "fast")
    count = copies(outputs * inputs, bench.rehearsal)
    wide = [torch.randn(outputs, inputs, device=bench.device).bfloat16() for _ in range(count)]
    low = [bitwise.quantize(w, _BLOCK) for w in wide]
    x = torch.randn(rows, inputs, device=bench.device).bfloat16()
    codes = bitwise.quantize(x, _ROW)
    contestants = {
        "bf16 cuBLAS": _rotate(lambda w: functional.linear(x, w), wide),
        "bf16": _rotate(lambda w: bitwise.product(x, w), wide),
        "fp8": _rotate(lambda w: bitwise.product(codes, w), low),
        "fp8 with its quantization": _rotate(lambda w: bitwise.product(bitwise.quantize(x, _ROW), w), low),
    }
    if not bench.rehearsal:
        contestants["fp8 cuBLAS"] = _rotate(lambda w: fast.product(codes, w), low)
    operations, moved = 2 * rows * outputs * inputs, 2 * rows * outputs
    least = {
        "bf16": Work(operations, 0, moved + 2 * (rows + outputs) * inputs).seconds(H200),
        "fp8": Work(0, operations, moved + (rows + outputs) * inputs).seconds(H200),
    }
    found = bench.time(case, contestants)
    for contestant, seconds in found.items():
        bench.row(case, contestant, seconds, least[contestant[:4].strip()], operations_per_s=operations / seconds)
    best = min((seconds for name, seconds in found.items() if name.startswith("bf16")), default=None)
    if best is not None and found.get("fp8 with its quantization", 0) > best:
        bench.row(case, "fp8 loses", found["fp8 with its quantization"], best)


def _rotate(call: Callable[[object], object], items: list) -> Callable[[], object]:
    following = cycle(items)
    return lambda: call(next(following))


def _between(bench: Bench) -> None:
    """Bytes read and written, over the bandwidth of a copy."""
    ops = get_ops("triton")
    rows, hidden, inner = (4, 160, 96) if bench.rehearsal else (16384, 4096, 12288)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device=bench.device)

    x, residual, weight = normal(rows, hidden).bfloat16(), normal(rows, hidden).bfloat16(), normal(hidden).bfloat16()
    gate_up, master, dh = normal(rows, 2 * inner).bfloat16(), normal(inner, hidden), normal(rows, inner).bfloat16()
    codes = ops.quantize(x, _ROW)
    one = 1 + 4 / 128
    calls: dict[str, tuple[Callable[[], object], float]] = {
        "rms_norm_quantized": (
            lambda: ops.rms_norm_quantized(x, weight, 1e-6, residual, _ROW, "x"),
            rows * hidden * (6 + one),
        ),
        "silu_mul_quantized": (lambda: ops.silu_mul_quantized(gate_up, _ROW, "h"), rows * inner * (4 + one)),
        "quantize a weight": (lambda: ops.quantize(master, _BLOCK), inner * hidden * 5),
        "quantize_along_tokens, gradient": (lambda: ops.quantize_along_tokens(x, _ROW, "dy"), rows * hidden * 3),
        "quantize_along_tokens, codes": (lambda: ops.quantize_along_tokens(codes, _ROW, "x"), rows * hidden * 2 * one),
        "silu_mul_backward": (lambda: ops.silu_mul_backward(dh, gate_up), rows * inner * 10),
    }
    for name, (call, moved) in calls.items():
        for _, seconds in bench.time(name, {name: call}).items():
            bench.row(f"{rows} x {hidden}", name, seconds, moved / H200.bandwidth, bytes_per_s=moved / seconds)


def _attention(bench: Bench) -> None:
    """Decoding: bytes of keys and values over the bandwidth of a copy, by format of the cache."""
    ops = get_ops("triton")
    heads, kv_heads, dim = (4, 2, 16) if bench.rehearsal else (32, 8, 128)
    cases = [(2, 40)] if bench.rehearsal else [(1, 32768), (16, 8192), (64, 1024), (64, 8192), (256, 2048), (512, 1024)]
    for batch, context in cases:
        pages = -(-context // 16)
        table = torch.randperm(batch * pages).int().view(batch, pages)
        layout = Layout.build([1] * batch, [context - 1] * batch, table, 16).to(ops.device)
        q = torch.randn(batch, heads, dim, device=bench.device).bfloat16()
        for name, kv in (("bf16 cache", None), ("e4m3 cache", _HEAD)):
            store = KVStore.allocate(batch * pages * 16, kv_heads, dim, kv, BF16, None, ops.device)
            for data in (store.k, store.v):
                data.random_(0, 0x70) if data.dtype == torch.uint8 else data.normal_()
            moved = batch * context * 2 * kv_heads * dim * (2 if kv is None else 1 + 4 / dim)
            call = partial(ops.attention, q, store, layout, dim**-0.5)
            case = f"attention, batch {batch}, context {context}"
            for _, seconds in bench.time(case, {name: call}).items():
                bench.row(case, name, seconds, moved / H200.bandwidth, bytes_per_s=moved / seconds)
