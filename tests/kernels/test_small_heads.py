"""Attention and its backward for every size of a head and every format of the cache, compiled for
sm_90 without a GPU.

A matrix instruction takes 16 channels of 16-bit operands at a time, and codes are read in pairs:
their even channels and their odd ones are operands of their own.
"""

import json
from pathlib import Path

import pytest

from .compiler import python

_CACHES = ("bf16", "e4m3", "int8")
_PROGRAM = """
import json, torch
from benchmarks.cross_compile import compile_launch, kernel_name, triton_ir
from isobit.kernels import KVStore, Layout
from isobit.kernels.attention.triton import forward
from isobit.kernels.attention.triton.backward import attention_backward
from isobit.kernels.triton.launch import record_launches
from isobit.precision import BF16, E4M3, INT8, QuantSpec

def empty(*shape, dtype=torch.int64):
    return torch.empty(*shape, dtype=dtype, device="meta")

def launches(dim, cache, rows):
    spec = {{"bf16": None, "e4m3": QuantSpec(E4M3, "row"), "int8": QuantSpec(INT8, "row", "fp32")}}[cache]
    store = KVStore.allocate(4096, 2, dim, spec, BF16, None, "meta")
    q, lse = empty(4 * rows, 4, dim, dtype=torch.bfloat16), empty(4 * rows, 4, dtype=torch.float32)
    table, slots = empty(4, 256, dtype=torch.int32), empty(4 * rows)
    layout = Layout(empty(5), empty(4), table, 16, slots, slots, rows, 4000, 4096)
    with record_launches() as found:
        forward.attention(q, store, layout, 0.1)
        if rows == 200:
            attention_backward(q, q, q, lse, store, layout, 0.1)
    return found

{before}
found = []
for dim in {dims}:
    for cache in {caches}:
        for rows in {rows}:
            for launch in launches(dim, cache, rows):
                case = [dim, cache, rows, kernel_name(launch)]
                try:
                    {made}
                except Exception as error:
                    while error.__cause__ is not None:
                        error = error.__cause__
                    found.append([*case, str(error).strip().splitlines()[-1], 0])
print(json.dumps(found))
"""
_IR = "triton_ir(launch); found.append([*case, '', 0])"
_WHOLE = """made = compile_launch(launch)
                    found.append([*case, '', made.spilled_bytes + made.stack_bytes])"""
_HALVED = "forward._INSTRUCTION = 8"
"""As small heads were before: of 16 channels, 8 even ones."""


def _compiled(
    tmp_path: Path,
    dims: tuple[int, ...],
    rows: tuple[int, ...],
    made: str = _IR,
    before: str = "",
    caches: tuple[str, ...] = _CACHES,
) -> list[tuple[int, str, int, str, str, int]]:
    program = _PROGRAM.format(dims=dims, rows=rows, made=made, before=before, caches=caches)
    return [tuple(each) for each in json.loads(python(program, tmp_path))]


def _failed(found: list[tuple[int, str, int, str, str, int]]) -> list[tuple[object, ...]]:
    return [each for each in found if each[4]]


@pytest.mark.slow
def test_heads_of_few_channels_are_taken(tmp_path: Path) -> None:
    """Up to Triton's own IR, where an operand that is too narrow is refused."""
    found = _compiled(tmp_path, (8, 10, 16, 24, 128), (1, 200))
    assert {each[3].rpartition(".")[2] for each in found} >= {"attend", "dq", "dkv", "join_splits"}
    assert _failed(found) == []


@pytest.mark.slow
def test_an_operand_that_is_too_narrow_is_refused(tmp_path: Path) -> None:
    """The control: half a head of 16 is 8 channels. A cache without codes, and a head of 32, are
    taken."""
    refused = _failed(_compiled(tmp_path, (16, 32), (1,), before=_HALVED))
    assert [each[:2] for each in refused] == [(16, "e4m3"), (16, "int8")]
    assert all("16" in str(each[4]) for each in refused)


@pytest.mark.slow
@pytest.mark.parametrize("cache", _CACHES)
def test_every_head_compiles(cache: str, tmp_path: Path) -> None:
    """To machine code: one row, tiles of 32 rows, and whole sequences with their backward."""
    dims = (7, 8, 12, *range(16, 129, 16), 192, 250, 256)
    found = _compiled(tmp_path, dims, (1, 10, 200), _WHOLE, caches=(cache,))
    assert _failed(found) == []
    assert len({each[0] for each in found}) == len(dims)
