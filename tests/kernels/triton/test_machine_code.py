"""What the emulated instruction takes for granted (`hopper.py`), read off the kernels that the
compiler makes for sm_90: which instructions add to one sum, from where, and in which order."""

import json
from typing import Any

import pytest

from ..compiler import python
from .machine_code import Chain, ascending, chains, places, uses_local_memory

_PROGRAM = """
import json
from benchmarks.cross_compile import kernel_name, triton_compile
from benchmarks.gpu.shapes import SHAPES
from benchmarks.kernel_table import launches, signature
from triton.backends.compiler import GPUTarget

own = ("product.block_product", "experts.block_product", "product.plain_product",
       "experts.plain_product", "head.head_tiles", "attention.forward.attend")
found = {}
for preset in ("fp8[kv_cache=e4m3]", "bf16"):
    for _, launch in launches(SHAPES["Qwen3-30B-A3B"], preset):
        if kernel_name(launch) in own:
            found.setdefault(signature(launch), launch)
for launch in found.values():
    made = triton_compile(launch, GPUTarget("cuda", 90, 32)).asm
    constants = {name: str(value) for name, value in launch.constants.items()}
    print(json.dumps({"kernel": kernel_name(launch), "warps": launch.num_warps,
                      "types": [str(getattr(x, "dtype", "")) for x in launch.arguments],
                      "constants": constants, "ptx": made["ptx"], "sass": made["sass"]}))
"""
_BROKEN = """
import json
import torch, triton, triton.language as tl
from benchmarks.cross_compile import triton_compile
from isobit.kernels.triton import numbers
from isobit.kernels.triton.launch import launch, record_launches
from triton.backends.compiler import GPUTarget

@triton.jit
def carried(a_ptr, b_ptr, y_ptr, steps, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    acc = tl.zeros((M, N), tl.float32)
    for step in range(steps):
        a = tl.load(numbers.e4m3_pointer(a_ptr) + step * K + m[:, None] * 4096 + k[None, :])
        b = tl.load(numbers.e4m3_pointer(b_ptr) + step * K + n[None, :] * 4096 + k[:, None])
        acc = numbers.dot(a, b, acc)
    tl.store(y_ptr + m[:, None] * N + n[None, :], acc)

codes, y = torch.empty(128, 4096, dtype=torch.uint8, device="meta"), torch.empty(128, 128, device="meta")
with record_launches() as found:
    for m, n, k, more in ((64, 16, 128, {}), (32, 16, 128, {}), (64, 16, 64, {}),
                          (128, 128, 128, {"maxnreg": 96})):
        launch(carried, (1,), codes, codes, y, 32, num_warps=4, M=m, N=n, K=k, **more)
for each in found:
    print(json.dumps(triton_compile(each, GPUTarget("cuda", 90, 32)).asm["sass"]))
"""


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """All products and attention of a mixture of experts, of every phase, in FP8 with an E4M3 cache
    and in BF16: PTX and machine code of each variant."""
    printed = python(_PROGRAM, tmp_path_factory.mktemp("kernels"))
    return [json.loads(line) for line in printed.splitlines()]


def _of(kernels: list[dict[str, Any]], *names: str) -> list[dict[str, Any]]:
    found = [one for one in kernels if one["kernel"] in names]
    assert {one["kernel"] for one in found} == set(names)
    return found


@pytest.mark.slow
def test_a_block_of_128_is_four_fp8_instructions_from_nothing(
    kernels: list[dict[str, Any]],
) -> None:
    """And no other matrix instruction is in the kernel: a block's sum begins without an
    accumulator, and what is added across blocks is added in float32. A chain for every 64 rows
    that a warpgroup has."""
    for one in _of(kernels, "product.block_product", "experts.block_product"):
        constants = one["constants"]
        sides = ["BLOCK_T" if "BLOCK_T" in constants else "BLOCK_M", "BLOCK_N"]
        short, long = sides[::-1] if constants.get("TOKENS_FIRST") == "True" else sides
        columns, rows = int(constants[short]), int(constants[long])
        found = chains(one["sass"])
        assert set(found) == {Chain("QGMMA", columns, 32, 4, fresh=True)}, constants
        assert len(found) == max(rows // (16 * one["warps"]), 1), constants


@pytest.mark.slow
def test_plain_products_are_one_chain_that_a_loop_goes_on_with(
    kernels: list[dict[str, Any]],
) -> None:
    """Of four instructions a step of 64 channels, or all steps where the compiler knows their
    number, as of the output head: then the first begins from nothing."""
    for one in _of(kernels, "product.plain_product", "experts.plain_product", "head.head_tiles"):
        found = chains(one["sass"])
        if "torch.float32" in one["types"][:2]:
            assert found == []  # the router, on no matrix unit
            continue
        assert {(chain.kind, chain.inner) for chain in found} == {("HGMMA", 16)}
        channels = int(one["constants"].get("C", 0))
        assert {(chain.length, chain.fresh) for chain in found} <= {
            (4, False),
            (channels // 16, True),
        }


@pytest.mark.slow
def test_scores_begin_from_nothing_and_values_go_on(kernels: list[dict[str, Any]]) -> None:
    """A block's scores: eight instructions over 128 channels, of codes the even channels and then
    the odd ones. Sums over values: four over 64 keys, on the sum so far."""
    for one in _of(kernels, "attention.forward.attend"):
        scores, *values = chains(one["sass"])
        assert (scores.inner, scores.length, scores.fresh) == (16, 8, True)
        assert {(c.inner, c.length, c.fresh) for c in values} == {(16, 4, False)}
        paired = one["constants"]["PAIRED"] == "True"
        assert len(values) == (2 if paired else 1) * (1 if paired or scores.columns > 32 else 2)


@pytest.mark.slow
def test_chains_ascend_along_k(kernels: list[dict[str, Any]]) -> None:
    """In every product, of every operand that is in shared memory."""
    assert len(kernels) > 20
    for one in kernels:
        found = places(one["ptx"])
        assert all(ascending(steps) for steps in found), one["kernel"]
        written, made = sum(map(len, found)), sum(chain.length for chain in chains(one["sass"]))
        assert made == written or made == written * int(one["constants"].get("STEPS", 1))


@pytest.mark.slow
def test_nothing_is_kept_in_local_memory(kernels: list[dict[str, Any]]) -> None:
    assert not any(uses_local_memory(one["sass"]) for one in kernels)


@pytest.mark.slow
def test_what_breaks_the_chains_is_seen(kernels: list[dict[str, Any]], tmp_path: Any) -> None:
    """The controls: a sum that goes on across blocks; a tile too low for the instruction; a block
    of 64; a tile with too few registers; and two instructions that change places."""
    carried, low, short, spilling = map(json.loads, python(_BROKEN, tmp_path).splitlines())
    assert chains(carried) == [Chain("QGMMA", 16, 32, 4, fresh=False)]
    assert chains(low) == []
    assert chains(short) == [Chain("QGMMA", 16, 32, 2, fresh=False)]
    assert uses_local_memory(spilling)
    ptx = _of(kernels, "product.block_product")[0]["ptx"]
    lines = [line for line in ptx.splitlines() if "wgmma.mma_async" in line]
    exchanged = ptx.replace(lines[1], "one").replace(lines[2], lines[1]).replace("one", lines[2])
    assert not all(map(ascending, places(exchanged)))
