"""The native operators' times: products at each level of `consistency`, beside PyTorch's own (oneDNN).

Products are those of a gate and up projection and of a down projection at hidden 512 and 1024, from one row to a
micro-batch; the other shapes are those of decoding at hidden 512.
"""

from collections.abc import Callable
from functools import partial
from itertools import product

import torch

from benchmarks.common import Contestants, Result, Row, race
from isobit.kernels import KVStore, Layout, get_ops
from isobit.precision import BF16, E4M3, INT8, QuantSpec

ACTIVATION, WEIGHT, KEYS = QuantSpec(E4M3, "1x128"), QuantSpec(E4M3, "128x128"), QuantSpec(INT8, "row", "fp32")
MATRICES = ((3072, 512), (512, 1536), (6144, 1024), (1024, 3072))  # N, K
ROWS = (1, 16, 32, 256, 2048)
SEQUENCES, HEADS, DIM, CONTEXT, PAGE = 32, 8, 64, 160, 16

NATIVE, EXACT, FAST = (get_ops("native", level) for level in ("bitwise", "exact", "fast"))
REFERENCE = get_ops("reference", "exact")


def run(rounds: int) -> Result:
    rounds = 2 * rounds + 1  # these are short
    return Result("kernels_cpu", [*products(rounds), *rows_of_32(rounds), *attention(rounds)])


def products(rounds: int) -> list[Row]:
    rows: list[Row] = []
    for (n, k), m in product(MATRICES, ROWS):
        x, w = torch.randn(m, k).bfloat16(), torch.randn(n, k).bfloat16()
        codes_x, codes_w = NATIVE.quantize(x, ACTIVATION), NATIVE.quantize(w, WEIGHT)
        contestants: Contestants = {}
        for level, ops in (("bitwise", NATIVE), ("exact", EXACT)):
            contestants[f"fp8 {level}"] = partial(ops.product, codes_x, ops.prepare(codes_w))
            contestants[f"bf16 {level}"] = partial(ops.product, x, ops.prepare(w))
        contestants["bf16 oneDNN (fast)"] = partial(FAST.product, x, FAST.prepare(w))
        rows += race(f"product {m}x{n}x{k}", contestants, rounds, amount=2e-9 * m * n * k, unit="GFLOP")
    return rows


def rows_of_32(rounds: int) -> list[Row]:
    x, weight = torch.randn(SEQUENCES, 512).bfloat16(), torch.randn(512).bfloat16()
    gate_up = torch.randn(SEQUENCES, 3072).bfloat16()
    logits = torch.randn(SEQUENCES, 4096) * 3
    keys, tokens = torch.randint(0, 1 << 30, (SEQUENCES, 4)), torch.randint(0, 4096, (SEQUENCES,))
    cases: dict[str, Callable[..., object]] = {
        "quantize 32x512": lambda ops: ops.quantize(x, ACTIVATION),
        "rms_norm 32x512 + residual": lambda ops: ops.rms_norm(x, weight, 1e-5, x),
        "rms_norm 32x512 + residual, quantized": lambda ops: ops.rms_norm_quantized(
            x, weight, 1e-5, x, ACTIVATION, "x"
        ),
        "gate_mul 32x1536": lambda ops: ops.gate_mul("silu", gate_up),
        "gate_mul 32x1536, quantized": lambda ops: ops.gate_mul_quantized("silu", gate_up, ACTIVATION, ""),
        "sample 32x4096": lambda ops: ops.sample(logits, keys, 1.0),
        "token_logprobs 32x4096": lambda ops: ops.token_logprobs(logits, tokens, 1.0),
    }
    rows: list[Row] = []
    for name, case in cases.items():
        contestants = {
            "native": partial(case, NATIVE),
            "native exact": partial(case, EXACT),
            "reference": partial(case, REFERENCE),
        }
        rows += race(name, contestants, rounds)
    return rows


def attention(rounds: int) -> list[Row]:
    rows: list[Row] = []
    for name, kv in (("bf16", None), ("int8", KEYS)):
        pages = CONTEXT // PAGE
        table = torch.randperm(SEQUENCES * pages).view(SEQUENCES, pages).int()
        store = KVStore.allocate(SEQUENCES * CONTEXT, HEADS, DIM, kv, BF16)
        q, k, v = (torch.randn(SEQUENCES * CONTEXT, HEADS, DIM).bfloat16() for _ in range(3))
        prompt = Layout.build([CONTEXT] * SEQUENCES, [0] * SEQUENCES, table, PAGE)
        step = Layout.build([1] * SEQUENCES, [CONTEXT - 1] * SEQUENCES, table, PAGE)
        NATIVE.kv_write(store, k, v, prompt)
        one, dout = q[:SEQUENCES].contiguous(), torch.randn(q.shape).bfloat16()
        out, lse = NATIVE.attention(q, store, prompt, 0.125)
        backward = (dout, q, out, lse, store, prompt, 0.125)
        cases: dict[str, Contestants] = {
            f"attention decode, {name} cache": {
                "native": partial(NATIVE.attention, one, store, step, 0.125),
                "native exact": partial(EXACT.attention, one, store, step, 0.125),
                "reference": partial(REFERENCE.attention, one, store, step, 0.125),
            },
            f"attention prefill, {name} cache": {
                "native": partial(NATIVE.attention, q, store, prompt, 0.125),
                "native exact": partial(EXACT.attention, q, store, prompt, 0.125),
                "reference": partial(REFERENCE.attention, q, store, prompt, 0.125),
            },
            f"attention backward, {name} cache": {
                "native": partial(NATIVE.attention_backward, *backward),
                "native exact": partial(EXACT.attention_backward, *backward),
                "reference": partial(REFERENCE.attention_backward, *backward),
            },
        }
        for case, contestants in cases.items():
            rows += race(case, contestants, max(3, rounds // 3))
    return rows
