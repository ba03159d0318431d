"""No kernel computes a place in memory in 32 bits that may not have room in them.

Read off Triton's IR (`benchmarks/offsets.py`) for launches of a model's real size over a million
tokens, of which none is allocated.
"""

import json
from pathlib import Path

import pytest

from .compiler import python

_BLOCKS = """
import json, torch, triton, triton.language as tl
from benchmarks.offsets import overflows
from isobit.kernels.triton.launch import launch, record_launches

@triton.jit
def narrow(x_ptr, y_ptr, start_ptr, ROWS: tl.constexpr, STRIDE: tl.constexpr):
    begin, end = tl.load(start_ptr), tl.load(start_ptr + 1)
    for step in range(0, (end - begin).to(tl.int32) // ROWS):
        row = step * ROWS + tl.arange(0, ROWS)
        x = tl.load(x_ptr + begin * STRIDE + row[:, None] * STRIDE + tl.arange(0, 128)[None, :])
        tl.store(y_ptr + row[:, None] * 128 + tl.arange(0, 128)[None, :], x)

@triton.jit
def wide(x_ptr, y_ptr, start_ptr, ROWS: tl.constexpr, STRIDE: tl.constexpr):
    begin, end = tl.load(start_ptr), tl.load(start_ptr + 1)
    for step in range(0, (end - begin).to(tl.int32) // ROWS):
        first = (begin + step * ROWS) * STRIDE
        at = tl.arange(0, ROWS)[:, None] * STRIDE + tl.arange(0, 128)[None, :]
        x = tl.load(x_ptr + first + at)
        row = step * ROWS + tl.arange(0, ROWS)
        tl.store(y_ptr + row[:, None] * 128 + tl.arange(0, 128)[None, :], x)

@triton.jit
def by_program(x_ptr, y_ptr, stride, BLOCK: tl.constexpr):
    at = tl.program_id(0) * stride + tl.arange(0, BLOCK)
    tl.store(y_ptr + at.to(tl.int64), tl.load(x_ptr + at))

starts, x = torch.empty(2, dtype=torch.int64, device="meta"), torch.empty(1, device="meta")
found = {}
for rows in (262_144, 262_144 + 128):
    for kernel in (narrow, wide):
        with record_launches() as made:
            launch(kernel, (1,), x, x, starts, num_warps=4, ROWS=128, STRIDE=64 * 128)
        found[f"{kernel.__name__} {rows}"] = overflows(made[0], rows)
for programs in (1 << 19, (1 << 19) + 1):
    with record_launches() as made:
        launch(by_program, (programs,), x, x, 4096, num_warps=4, BLOCK=4096)
    found[f"by_program {programs}"] = overflows(made[0], 0)
print(json.dumps(found))
"""
_MODEL = """
import json
from benchmarks.gpu.shapes import SHAPES
from benchmarks.kernel_table import launches, signature
from benchmarks.cross_compile import kernel_name
from benchmarks.offsets import overflows

largest = {{}}
for name, preset in {models}:
    for _, launch in launches(SHAPES[name], preset, ({tokens},)):
        key = signature(launch)
        before = largest.get(key)
        if before is None or launch.grid > before.grid:
            largest[key] = launch
found = {{}}
for launch in largest.values():
    found.setdefault(kernel_name(launch), set()).update(overflows(launch, {tokens}))
print(json.dumps({{name: sorted(each) for name, each in found.items()}}))
"""
_ATTENTION = """
import json, torch
from benchmarks.cross_compile import kernel_name
from benchmarks.offsets import overflows
from isobit.kernels import KVStore, Layout
from isobit.kernels.attention.triton import forward
from isobit.kernels.attention.triton.backward import attention_backward
from isobit.kernels.triton.launch import record_launches
from isobit.precision import BF16, E4M3, QuantSpec

def empty(*shape, dtype=torch.int64):
    return torch.empty(*shape, dtype=dtype, device="meta")

rows, found = {tokens}, {{}}
store = KVStore.allocate(rows, 8, 128, QuantSpec(E4M3, "row"), BF16, None, "meta")
q, lse = empty(rows, 64, 128, dtype=torch.bfloat16), empty(rows, 64, dtype=torch.float32)
table = empty(1, rows // 16, dtype=torch.int32)
layout = Layout(empty(2), empty(1), table, 16, empty(rows), empty(rows), rows, rows, rows)
with record_launches() as made:
    for window in (None, 4096):
        forward.attention(q, store, layout, 0.1, window)
        attention_backward(q, q, q, lse, store, layout, 0.1, window)
for launch in made:
    found.setdefault(kernel_name(launch), []).extend(overflows(launch, rows))
print(json.dumps(found))
"""
TOKENS = 1 << 20


@pytest.mark.slow
def test_a_place_that_leaves_32_bits_is_seen(tmp_path: Path) -> None:
    """The control of all others here: rows of 64 heads of 128 channels, up to the last that has
    room and one block more; by a loop over them, and by programs. In 64 bits neither is."""
    found = json.loads(python(_BLOCKS, tmp_path))
    seen = {name for name, operations in found.items() if operations}
    assert seen == {"narrow 262272", "by_program 524289"}
    named = [each for operations in found.values() for each in operations]
    assert all("arith.muli" in each or "arith.addi" in each for each in named)


@pytest.mark.slow
def test_attentions_places_have_room(tmp_path: Path) -> None:
    """The backward too, where a block's place had 32 bits."""
    found = json.loads(python(_ATTENTION.format(tokens=TOKENS), tmp_path))
    assert {name.rpartition(".")[2] for name in found} >= {"attend", "dq", "dkv", "gather"}
    assert {name: each for name, each in found.items() if each} == {}


@pytest.mark.slow
def test_the_places_of_every_kernel_of_a_model_have_room(tmp_path: Path) -> None:
    """Dense and with experts, in FP8 and BF16: sync, decoding, prefill and learning over one
    sequence of a million tokens."""
    models = [("Qwen3-8B", "fp8"), ("Qwen3-8B", "bf16"), ("Qwen3-30B-A3B", "fp8")]
    program = _MODEL.format(models=models, tokens=TOKENS)
    found = json.loads(python(program, tmp_path))
    assert len(found) > 25
    assert {name: each for name, each in found.items() if each} == {}
