"""Every Triton kernel that a model runs, compiled for sm_90 without a GPU: nothing spills, and
products run on the matrix instructions that they are written for.

In a separate process, since this one interprets Triton.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.page import KERNELS, PAGE, filled
from isobit.kernels.gpu import ARCHITECTURES

from .compiler import python

_PROGRAM = """
import json
from benchmarks.kernel_table import compiled
print(json.dumps(compiled(["Qwen3-30B-A3B"], ["fp8"], variants=1)))
"""
_INT8 = """
import json, torch
from benchmarks import kernel_table
from benchmarks.gpu.shapes import SHAPES

found = {}
for _, launch in kernel_table.launches(SHAPES["Qwen3-30B-A3B"], "bf16[kv_cache=int8]"):
    if any(isinstance(x, torch.Tensor) and x.dtype == torch.int8 for x in launch.arguments):
        found[kernel_table.signature(launch)] = launch
print(json.dumps([kernel_table._row(kernel_table.compile_launch(launch)) for launch in found.values()]))
"""
_GPT_OSS = """
import json
from benchmarks import kernel_table
from benchmarks.gpu.shapes import GPT_OSS

own = ("attention.forward.attend", "attention.forward.join_splits", "norms.gate.gate_mul",
       "norms.gate.backward", "experts.plain_product", "experts.block_product")
found = {}
for preset in ("bf16", "fp8"):
    for _, launch in kernel_table.launches(GPT_OSS, preset):
        if kernel_table.kernel_name(launch) in own:
            found[kernel_table.signature(launch)] = launch
print(json.dumps([kernel_table._row(kernel_table.compile_launch(launch)) for launch in found.values()]))
"""
_WIDE = """
import json
from dataclasses import replace
from benchmarks import kernel_table
from benchmarks.gpu.shapes import SHAPES

config = replace(SHAPES["Qwen3-0.6B"], num_heads=32, num_kv_heads=4, head_dim=512, vocab_size=4096)
own = ("attention.forward.attend", "attention.backward.dq", "attention.backward.dkv")
found = {}
for preset in ("bf16", "fp8"):
    for _, launch in kernel_table.launches(config, preset):
        if kernel_table.kernel_name(launch) in own:
            found[kernel_table.signature(launch)] = launch
print(json.dumps([kernel_table._row(kernel_table.compile_launch(launch)) for launch in found.values()]))
"""
_WIDE_BY_CARD = """
import json, torch
from benchmarks import kernel_table
from isobit.kernels.attention.triton import backward, forward
from isobit.kernels.gpu import ARCHITECTURES
from isobit.kernels.layout import Layout
from isobit.kernels.stores import KVStore
from isobit.kernels.triton.launch import compile_for, record_launches
from isobit.precision import BF16, E4M3, QuantSpec

rows = []
for (major, minor) in ((8, 0), (8, 9), (12, 0)):
    compile_for(ARCHITECTURES[major, minor])
    for count in (1, 64):
        for codes in (None, *([QuantSpec(E4M3, "row")] if (major, minor) == (8, 9) else [])):
            layout = Layout.packed([count])
            store = KVStore.allocate(layout.num_slots, 1, 512, codes, BF16, None, "meta")
            q = torch.empty(count, 8, 512, dtype=torch.bfloat16, device="meta")
            with record_launches() as found:
                forward.attend(q, store, layout, 1.0)
                if count > 1 and codes is None:
                    lse = torch.empty(count, 8, device="meta")
                    backward.attention_backward(q, q, q, lse, store, layout, 1.0)
            own = [each for each in found if each.kernel.__name__ in ("_attend", "_dq", "_dkv")]
            made = [kernel_table.compile_launch(each, 10 * major + minor) for each in own]
            rows += [[major, minor, each.kernel, each.shared_bytes] for each in made]
print(json.dumps(rows))
"""
_NIBBLES = """
import json, torch
from benchmarks import kernel_table
from isobit.kernels.gpu import ARCHITECTURES
from isobit.kernels.triton.launch import compile_for, record_launches
from isobit.kernels.product.triton.product import product
from isobit.precision import PackedFP4

rows = []
for (major, minor), architecture in ARCHITECTURES.items():
    compile_for(architecture)
    for columns, inner in ((6144, 4096), (256, 8208)) if architecture.fp8 else ():
        parts = [torch.empty(columns, inner // each, dtype=torch.uint8, device="meta") for each in (2, 16)]
        weight = PackedFP4(*parts, torch.empty(1, device="meta"))
        with record_launches() as found:
            for count in (1, 64, 2048):
                product(torch.empty(count, inner, dtype=torch.bfloat16, device="meta"), weight)
        rows += [kernel_table._row(kernel_table.compile_launch(each, 10 * major + minor)) for each in found]
print(json.dumps(rows))
"""
_GATE_BACKWARD = """
import json, torch
from benchmarks.cross_compile import compile_launch
from isobit.kernels.gpu import ARCHITECTURES
from isobit.kernels.norms.triton.gate import gate_mul_backward_quantized
from isobit.kernels.triton.launch import compile_for, record_launches
from isobit.precision import E4M3, QuantSpec

rows = []
for (major, minor), architecture in ARCHITECTURES.items():
    compile_for(architecture)
    for dtype in (torch.bfloat16, torch.float32) if architecture.fp8 else ():
        dh, gate_up = (torch.empty(8192, n, dtype=dtype, device="meta") for n in (3072, 6144))
        flag = torch.empty(1, dtype=torch.int32, device="meta")
        for activation in ("silu", "gelu_pytorch_tanh", "swiglu_clamped", "sigmoid"):
            for scale in ("ue8m0", "fp32"):
                spec = QuantSpec(E4M3, "1x128", scale)
                with record_launches() as found:
                    gate_mul_backward_quantized(activation, dh, gate_up, spec, flag)
                [made] = [compile_launch(each, 10 * major + minor) for each in found]
                rows.append([made.kernel, made.spilled_bytes + made.stack_bytes])
print(json.dumps(rows))
"""
_STOCHASTIC = """
import json, torch
from benchmarks.cross_compile import compile_launch
from isobit.kernels.gpu import ARCHITECTURES
from isobit.kernels.triton.launch import record_launches
from isobit.kernels.optim.triton import round_stochastically

with record_launches() as found:
    for seed, step, first in ((-5, 3, 8), (2**63 - 1, 2**31, 2**34)):
        round_stochastically(torch.empty(5003, device="meta"), seed, step, first)
made = [compile_launch(launch, 10 * major + minor) for launch in found for major, minor in ARCHITECTURES]
print(json.dumps([each.spilled_bytes + each.stack_bytes for each in made]))
"""
_DELTA = """
import json, torch
from benchmarks import kernel_table
from isobit.kernels import DeltaHeads, Layout, StateStore
from isobit.kernels.gpu import ARCHITECTURES
from isobit.kernels.delta.definition import Parts
from isobit.kernels.delta.triton import convolution, forward as delta, backward as delta_backward
from isobit.kernels.triton.launch import record_launches
from isobit.precision import BF16

def empty(*shape, dtype=torch.float32):
    return torch.empty(*shape, dtype=dtype, device="meta")

heads, channels = DeltaHeads(16, 32, 128, 128, empty(32), empty(32)), 2 * 16 * 128 + 32 * 128
packed = Layout.packed([2048] * 4)
table = torch.arange(64 * 256, dtype=torch.int32).view(64, 256)
decoding = Layout.build([1] * 64, [4000] * 64, table, 16)
with record_launches() as found:
    for layout, keeps in ((packed, False), (packed, True), (decoding, True)):
        rows, pages = len(layout.positions), layout.num_slots // 16
        x, store = empty(rows, channels, dtype=torch.bfloat16), None
        if keeps:
            store = StateStore.allocate(pages, (3, channels), (32, 128, 128), BF16, "meta")
        convolution.short_convolution(x, empty(channels, 4), store, layout)
        delta.delta_rule(x, empty(rows, 64), heads, store, layout)
    x = empty(8192, channels, dtype=torch.bfloat16)
    convolution.short_convolution_backward(x, x, empty(channels, 4), packed)
    delta_backward.delta_rule_backward(empty(8192, 32, 128), x, empty(8192, 64), heads, packed)
own = {kernel_table.signature(launch): launch for launch in found}.values()
print(json.dumps([kernel_table._row(kernel_table.compile_launch(launch, 10 * major + minor)) for launch in own
                  for major, minor in ARCHITECTURES]))
"""
_HEAD = """
import json
import torch
from benchmarks.cross_compile import matrix_layouts
from isobit.kernels.head import triton as head
from isobit.kernels.triton.launch import record_launches
weight = torch.empty(151936, 1024, dtype=torch.bfloat16, device="meta")
with record_launches() as found:
    for rows in (1, 8192, 1):
        hidden = torch.empty(rows, 1024, dtype=torch.bfloat16, device="meta")
        head.head_logprobs(hidden, weight, torch.empty(rows, dtype=torch.int64, device="meta"), 1.0)
        if rows == 8192:
            head.VOCABULARY_TILE = {torch.bfloat16: 64}
            head._tile = lambda rows, dtype: (128, 64, 8, 4)
print(json.dumps([layout for launch in found[::2] for layout in matrix_layouts(launch)]))
"""
_SPILLING = """
import torch, triton, triton.language as tl
from benchmarks.cross_compile import compile_launch
from isobit.kernels.triton.launch import launch, record_launches

@triton.jit
def too_large(x_ptr, y_ptr, SIZE: tl.constexpr):
    row, column = tl.arange(0, SIZE), tl.arange(0, SIZE)
    x = tl.load(x_ptr + row[:, None] * SIZE + column[None, :])
    tl.store(y_ptr + row[:, None] * SIZE + column[None, :], tl.dot(x, x) + tl.cumsum(x.to(tl.float32), 1))

x = torch.empty(256, 256, dtype=torch.bfloat16, device="meta")
with record_launches() as found:
    launch(too_large, (1,), x, x, num_warps=8, SIZE=256)
made = compile_launch(found[0])
print(made.spilled_bytes, made.instruction_class)
"""


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Rows of the table for a mixture of experts in FP8: sync, decoding, prefill and learning; of
    each kernel the variant with the largest tiles, which spills first."""
    return json.loads(python(_PROGRAM, tmp_path_factory.mktemp("kernels")))


@pytest.mark.slow
def test_nothing_spills(kernels: list[dict[str, Any]]) -> None:
    assert len({row["kernel"] for row in kernels}) > 20
    assert [row for row in kernels if row["spilled_bytes"] or row["stack_bytes"]] == []


@pytest.mark.slow
def test_kernels_of_an_int8_cache_compile_too(tmp_path: Path) -> None:
    """Those that read or write its codes: nothing spills, and attention's products run on the
    warpgroups'."""
    rows = json.loads(python(_INT8, tmp_path))
    kernels = {row["kernel"] for row in rows}
    assert kernels == {
        "heads.forward.attention_inputs",
        "attention.forward.attend",
        "attention.backward.gather",
    }
    assert all(row["spilled_bytes"] == row["stack_bytes"] == 0 for row in rows)
    assert {
        row["instruction_class"] for row in rows if row["kernel"] == "attention.forward.attend"
    } == {"HGMMA"}


@pytest.mark.slow
def test_sinks_clamped_gates_and_experts_biases_compile_too(tmp_path: Path) -> None:
    """Those of a gpt-oss-20b: nothing spills, and products run on the warpgroups'."""
    rows = json.loads(python(_GPT_OSS, tmp_path))
    classes = {row["kernel"]: row["instruction_class"] for row in rows}
    assert classes == {
        "attention.forward.attend": "HGMMA",
        "attention.forward.join_splits": "none",
        "norms.gate.gate_mul": "none",
        "norms.gate.backward": "none",
        "experts.plain_product": "HGMMA",
        "experts.block_product": "QGMMA",
    }
    assert all(row["spilled_bytes"] == row["stack_bytes"] == 0 for row in rows)


@pytest.mark.slow
def test_heads_of_512_fit_into_the_shared_memory_of_a_hopper(tmp_path: Path) -> None:
    """As Gemma 4's layers without a window have them. Tiles of many rows spill, and so do the
    backward's; those of a decode step do not."""
    rows = json.loads(python(_WIDE, tmp_path))
    assert {row["kernel"] for row in rows} == {
        "attention.forward.attend",
        "attention.backward.dq",
        "attention.backward.dkv",
    }
    limit = 1024 * ARCHITECTURES[9, 0].shared_kib
    assert all(0 < row["shared_bytes"] <= limit for row in rows)
    assert {row["instruction_class"] for row in rows} == {"HGMMA"}
    forward = [row for row in rows if row["kernel"].endswith("attend")]
    assert any(row["spilled_bytes"] == 0 for row in forward)


@pytest.mark.slow
def test_heads_of_512_fit_into_the_shared_memory_of_every_card(tmp_path: Path) -> None:
    """Of those with less than a Hopper tiles are smaller, in BF16 and over codes. The control: a
    Hopper's tiles take more than an RTX 4090 has."""
    rows = json.loads(python(_WIDE_BY_CARD, tmp_path))
    assert len(rows) == 3 * 4 + 2
    for major, minor, kernel, taken in rows:
        assert 0 < taken <= 1024 * ARCHITECTURES[major, minor].shared_kib, (major, minor, kernel)
    large = _WIDE_BY_CARD.replace("ARCHITECTURES[major, minor])", "ARCHITECTURES[9, 0])")
    large = large.replace("((8, 0), (8, 9), (12, 0))", "[(8, 9)]").replace("(1, 64)", "[64]")
    most = max(taken for _, _, _, taken in json.loads(python(large, tmp_path)))
    assert most > 1024 * ARCHITECTURES[8, 9].shared_kib


@pytest.mark.slow
def test_weights_of_two_codes_to_a_byte_compile_too(tmp_path: Path) -> None:
    """Of a frozen base in NVFP4, for every architecture with FP8: nothing spills, and values that
    are BF16 numbers are multiplied by matrix instructions."""
    rows = [
        row
        for row in json.loads(python(_NIBBLES, tmp_path))
        if row["kernel"] == "product.nibble_product"
    ]
    assert len(rows) == 6 * sum(architecture.fp8 for architecture in ARCHITECTURES.values())
    assert {row["constants"]["PARTIAL"] for row in rows} == {"False", "True"}
    assert all(row["spilled_bytes"] == row["stack_bytes"] == 0 for row in rows)
    classes = [row["instruction_class"] for row in rows]
    assert set(classes) == {"HMMA", "HGMMA", "none"}
    assert classes.count("none") == 6  # of sm_100, whose matrix instructions have no name here


@pytest.mark.slow
def test_the_gates_backward_spills_under_no_scale_gate_or_type(tmp_path: Path) -> None:
    """On every architecture with FP8. Scales that are no power of two divide by them, which once
    spilled. The control: `test_the_compiler_reports_spills_and_fallbacks`."""
    rows = json.loads(python(_GATE_BACKWARD, tmp_path))
    assert len(rows) == 16 * sum(architecture.fp8 for architecture in ARCHITECTURES.values())
    assert {tuple(row) for row in rows} == {("norms.gate.backward_quantized", 0)}


@pytest.mark.slow
def test_the_rounding_of_masters_compiles_for_every_architecture(tmp_path: Path) -> None:
    """No forward runs it, so no table lists it. Small and large integers are two variants."""
    assert json.loads(python(_STOCHASTIC, tmp_path)) == [0] * 2 * len(ARCHITECTURES)


@pytest.mark.slow
def test_linear_attention_compiles_for_every_architecture(tmp_path: Path) -> None:
    """At the sizes of a Qwen3.5-9B: nothing spills. The delta rule is two kernels, one that keeps
    states and one that does not, so a decoded token has the instructions of a chunk."""
    rows = json.loads(python(_DELTA, tmp_path))
    convolutions = ["delta.convolution.backward", *["delta.convolution.convolve"] * 3]
    rules = ["delta.forward.delta_rule", "delta.forward.delta_rule"]
    every = len(ARCHITECTURES)
    found = sorted(row["kernel"] for row in rows[::every])
    assert found == ["delta.backward.delta_backward", *convolutions, *rules]
    assert [row for row in rows if row["spilled_bytes"] or row["stack_bytes"]] == []


@pytest.mark.slow
def test_the_heads_tiles_lie_alike_along_the_vocabulary(tmp_path: Path) -> None:
    """One row and 8,192: the same instruction, on as many warps along the vocabulary, so one tree
    over it; the larger tile has the other warps along the rows. The control: a tile of 64 tokens
    has fewer warps there."""
    few, many, other = json.loads(python(_HEAD, tmp_path))
    shape = r"warpsPerCTA = \[(\d+), (\d+)\], instrShape = \[16, 64, 16\]"
    found = [re.search(shape, layout) for layout in (few, many, other)]
    assert [match and match.groups() for match in found] == [("8", "1"), ("8", "2"), ("4", "2")]


@pytest.mark.slow
def test_products_run_on_the_warpgroups_instructions(kernels: list[dict[str, Any]]) -> None:
    """FP8 tiles as QGMMA, BF16 tiles as HGMMA; never HMMA, the fallback of tiles that are too
    low."""
    classes = {row["kernel"]: row["instruction_class"] for row in kernels}
    for kernel in ("product", "experts"):
        assert classes[f"{kernel}.block_product"] == "QGMMA"
    assert classes["experts.block_weight_gradient"] == "QGMMA"
    for kernel in (
        "attention.forward.attend",
        "attention.backward.dq",
        "attention.backward.dkv",
        "head.head_tiles",
    ):
        assert classes[kernel] == "HGMMA"
    assert not any("HMMA" in row["instruction_class"] for row in kernels)


@pytest.mark.slow
def test_shared_memory_fits_a_multiprocessor(kernels: list[dict[str, Any]]) -> None:
    assert max(row["shared_bytes"] for row in kernels) <= 227 * 1024


@pytest.mark.slow
def test_the_compiler_reports_spills_and_fallbacks(tmp_path: Path) -> None:
    """The control: a kernel with too large a tile spills."""
    spilled, kind = python(_SPILLING, tmp_path).split()
    assert int(spilled) > 0
    assert kind == "HGMMA"


def test_the_kept_table_is_clean() -> None:
    """All models and presets, as docs/gpu.md shows them."""
    kept = json.loads(KERNELS.read_text(encoding="utf-8"))
    assert kept["target"] == "sm_90"
    assert all(row["spilled_bytes"] == row["stack_bytes"] == 0 for row in kept["kernels"])
    used = {use.split()[0] for row in kept["kernels"] for use in row["uses"]}
    assert used == {"Qwen3-0.6B", "Qwen3-8B", "Qwen3-30B-A3B"}


def test_tokens_first_takes_fewer_instructions_and_spills_nothing() -> None:
    """Of a whole tile, as docs/gpu.md shows them."""
    for row in json.loads((KERNELS.parent / "orientation.json").read_text(encoding="utf-8")):
        before, now = (row[side] for side in ("weights first", "tokens first"))
        assert before["spilled_bytes"] == now["spilled_bytes"] == 0
        assert now["registers"] <= 255
        tile = [each["warps"] * each["instructions"] for each in (before, now)]
        # those of experts have fewer with weights first too, since scales are loaded ahead
        assert 0 < tile[1] < (0.75 if row["product"] == "experts" else 0.7) * tile[0], row


_COUNTED = """
import json
from benchmarks import attention_loop, layer_bytes, orientation
print(json.dumps([orientation.counted(), attention_loop.counted(), layer_bytes.counted()]))
"""


@pytest.mark.slow
def test_the_kept_counts_are_those_of_the_code(tmp_path: Path) -> None:
    """Instructions of products and attention, and bytes between them. Before, more bytes were
    moved."""
    orientation, attention, layer_bytes = (
        json.loads((KERNELS.parent / f"{name}.json").read_text(encoding="utf-8"))
        for name in ("orientation", "attention_loop", "layer_bytes")
    )
    found = json.loads(python(_COUNTED, tmp_path))
    assert found == [orientation, attention["now"], layer_bytes["now"]]
    fewer = [
        sum(layer_bytes[when]["Qwen3-8B fp8 backward"]["between"].values())
        for when in ("now", "before")
    ]
    assert fewer[0] < 0.9 * fewer[1]


def test_the_kept_table_of_architectures_has_all_and_no_failure() -> None:
    kept = json.loads((KERNELS.parent / "architectures.json").read_text(encoding="utf-8"))
    assert [row["architecture"] for row in kept] == [
        f"sm_{major}{minor}" for major, minor in ARCHITECTURES
    ]
    for row in kept:
        assert row["failures"] == []
        assert row["variants"] >= 80
        assert row["most_shared_kib"] <= row["shared_limit_kib"]
        plain = ["bf16", "bf16[kv_cache=int8]"]
        low = ["fp8", "fp8[kv_cache=e4m3]", "fp8-unified", "bf16"]
        assert row["presets"] == (plain if row["architecture"] in ("sm_80", "sm_86") else low)


@pytest.mark.slow
def test_the_page_has_the_tables_that_the_code_makes() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert filled(page) == page
