"""Products of the Triton kernels against the reference and a float64 oracle: blocks, plain
operands, chunks, plans.

Where all sums are representable in float32 (small integers as codes, scales that are powers of two)
the result must be the reference's, bit for bit, in whatever tiles. Real data is held element by
element to a derived bound. That rows do not depend on their batch is a claim about the matrix unit,
and so is tested on a GPU; the interpreter's dot keeps it by construction
(`isobit/kernels/triton/interpreter.py`).
"""

from dataclasses import replace
from typing import overload

import pytest
import torch
from torch import Tensor

from isobit.errors import IsobitError
from isobit.kernels.gpu import ARCHITECTURES, HOPPER
from isobit.kernels.matrices import Operand
from isobit.kernels.product.definition import product as reference_product
from isobit.kernels.product.triton import plan as plans
from isobit.kernels.product.triton import product as module
from isobit.kernels.product.triton.operands import codes_along_inner, padded
from isobit.kernels.product.triton.plan import FEW_ROWS, ProductPlan, plan, splits_of
from isobit.kernels.product.triton.product import gradient_product, product
from isobit.kernels.quantize.triton import quantize_along_tokens
from isobit.kernels.triton.launch import compile_for
from isobit.precision import E4M3, E5M2, QTensor, QuantSpec, expand_scale, quantize

from ..helpers import draw, same
from .helpers import DEVICE, HAS_GPU, Matrix, there

needs_gpu = pytest.mark.skipif(not HAS_GPU, reason="needs a GPU")
ROWS, WEIGHT = QuantSpec(E4M3, "1x128", "ue8m0"), QuantSpec(E4M3, "128x128", "ue8m0")
ROWS32, WEIGHT32 = QuantSpec(E4M3, "1x128", "fp32"), QuantSpec(E4M3, "128x128", "fp32")
UNIT = 2.0**-24
OUTPUTS = (torch.float32, torch.bfloat16)


def run(
    a: Operand, b: Operand, bias: Tensor | None = None, out: torch.dtype = torch.float32
) -> Tensor:
    return product(there(a), there(b), None if bias is None else bias.to(DEVICE), out).cpu()


@overload
def whole(seed: int, rows: int, columns: int) -> Tensor: ...
@overload
def whole(seed: int, rows: int, columns: int, spec: QuantSpec) -> QTensor: ...
def whole(seed: int, rows: int, columns: int, spec: QuantSpec | None = None) -> Operand:
    """Integers of -3 to 3: plain in bfloat16, or as codes under scales of 1/2, 1 and 2. Sums are
    exact in float32."""
    random = torch.Generator().manual_seed(seed)
    codes = torch.randint(-3, 4, (rows, columns), generator=random).float()
    if spec is None:
        return codes.bfloat16()
    block = spec.block((rows, columns))
    grid = (-(-rows // block[0]), -(-columns // block[1]))
    return QTensor(codes.to(E4M3.dtype), 2.0 ** torch.randint(-1, 2, grid, generator=random), spec)


def block_error(a: QTensor, b: QTensor) -> Tensor:
    """Bound [M, N] on what the sums of the codes of all blocks of 128 may be off, times their
    scales.

    Float32 in any order: 128 units of the sum of magnitudes. Hopper aligns the 32 products of an
    instruction and its accumulator to the largest of them and keeps 13 bits behind it (DeepSeek-V3,
    section 3.3.2): each of the 33 may lose 2^-13 of that.
    """
    scale_a, scale_b = (expand_scale(x.scale, x.block, x.shape).double() for x in (a, b))
    values_a, values_b = (x.data.double() * s for x, s in ((a, scale_a), (b, scale_b)))
    error = torch.zeros(a.shape[0], b.shape[0], dtype=torch.float64)
    for start in range(0, a.shape[1], 128):
        terms = values_a[:, None, start : start + 128] * values_b[None, :, start : start + 128]
        if not HAS_GPU:
            error += 128 * UNIT * terms.abs().sum(-1)
            continue
        sums = torch.zeros_like(error)
        for part in terms.split(32, dim=-1):
            before, sums = sums, sums + part.sum(-1)
            largest = torch.stack((part.abs().amax(-1), before.abs(), sums.abs())).amax(0)
            error += 33 * 2.0**-13 * largest
    return error


def check_close(
    found: Tensor, a: Operand, b: Operand, bias: Tensor | None, sums: Tensor, additions: int
) -> None:
    """Every element within `sums`, plus a unit of the sum of magnitudes for each of `additions`,
    plus one rounding."""
    left, right = (x.dequantize() if isinstance(x, QTensor) else x for x in (a, b))
    oracle = left.double() @ right.double().t()
    magnitude = left.double().abs() @ right.double().abs().t()
    if bias is not None:
        oracle, magnitude = oracle + bias.double(), magnitude + bias.double().abs()
    bound = sums + additions * UNIT * magnitude
    bound += {torch.float32: UNIT, torch.bfloat16: 2.0**-8}[found.dtype] * (
        oracle.abs() + bound
    ) + 2.0**-126
    excess = (found.double() - oracle).abs() - bound
    assert bool((excess <= 0).all()), (
        f"{int((excess > 0).sum())} elements beyond the bound, by {float(excess.max())}"
    )


@pytest.mark.parametrize("out", OUTPUTS)
@pytest.mark.parametrize(
    ("rows", "columns", "inner"),
    [(5, 130, 256), (1, 20, 40), (17, 48, 200), (70, 64, 128), (33, 16, 32)],
)
def test_exact_blocks_are_the_references(
    rows: int, columns: int, inner: int, out: torch.dtype
) -> None:
    a, bias = whole(0, rows, inner, ROWS), whole(2, 1, columns)[0]
    for spec in (WEIGHT, ROWS):
        b = whole(1, columns, inner, spec)
        assert same(run(a, b, bias, out), reference_product(a, b, bias, out))
    scale = b.scale.clone()
    scale[-1, -1] *= 2
    assert not same(
        run(a, QTensor(b.data, scale, ROWS), bias, out), reference_product(a, b, bias, out)
    )


@pytest.mark.parametrize("out", OUTPUTS)
@pytest.mark.parametrize(
    ("rows", "columns", "inner"), [(5, 130, 128), (1, 20, 40), (70, 64, 64), (33, 16, 8)]
)
def test_exact_plain_products_are_the_references(
    rows: int, columns: int, inner: int, out: torch.dtype
) -> None:
    a, b, bias = whole(0, rows, inner), whole(1, columns, inner), whole(2, 1, columns)[0].float()
    assert same(run(a, b, bias, out), reference_product(a, b, bias, out))
    assert same(run(a.float(), b.float(), None, out), reference_product(a, b, None, out))


@pytest.mark.parametrize(
    ("spec_a", "spec_b"), [(ROWS32, WEIGHT32), (ROWS32, ROWS32), (ROWS, WEIGHT)]
)
def test_blocks_of_real_data_are_within_the_bound(spec_a: QuantSpec, spec_b: QuantSpec) -> None:
    a, b = quantize(draw(0, 9, 384, spread=1.0), spec_a), quantize(draw(1, 150, 384), spec_b)
    bias = draw(2, 150)
    for out in OUTPUTS:
        # roundings: the product of two scales, an fma for each of 3 blocks, the bias; and the
        # oracle's dequantization
        check_close(run(a, b, bias, out), a, b, bias, block_error(a, b), 1 + 3 + 1 + 2)
    wrong = QTensor(b.data, b.scale.flip(1), b.spec)
    with pytest.raises(AssertionError, match="beyond the bound"):
        check_close(run(a, wrong, bias), a, b, bias, block_error(a, b), 7)


@pytest.mark.parametrize("dtype", OUTPUTS)
def test_plain_real_data_is_within_the_bound(dtype: torch.dtype) -> None:
    """Views of any strides; a float32 sum of 160 terms in any order, on a GPU with two bits less in
    a BF16 sum."""
    a = draw(0, 160, 9, dtype=dtype).t()
    b = draw(1, 160, 2 * 50, dtype=dtype).t()[::2]
    bias = draw(2, 50)
    units = 160 * (4 if HAS_GPU and dtype == torch.bfloat16 else 1) + 1
    for out in OUTPUTS:
        check_close(run(a, b, bias, out), a, b, bias, torch.tensor(0.0), units)
        check_close(
            gradient_product(there(a), there(b), out).cpu(), a, b, None, torch.tensor(0.0), units
        )
    with pytest.raises(AssertionError, match="beyond the bound"):
        check_close(run(a, b.flip(1).flip(1).roll(1, 1)), a, b, None, torch.tensor(0.0), units)


def test_a_transposed_weight_and_a_transposed_activation() -> None:
    """DGrad reads the stored weight [N, K] as [K, N]; its codes and scales are views."""
    gradient, weight = whole(0, 6, 200, ROWS), whole(1, 200, 136, WEIGHT)
    found = gradient_product(there(gradient), there(weight).transpose(), torch.bfloat16).cpu()
    assert same(found, reference_product(gradient, weight.transpose(), None, torch.bfloat16))
    left = whole(2, 130, 40, ROWS.transpose()).transpose()
    right = whole(3, 130, 48, ROWS.transpose()).transpose()
    found = gradient_product(there(left), there(right), torch.float32).cpu()
    assert same(found, reference_product(left, right, None, torch.float32))


@pytest.mark.parametrize("rows", [7, 70])
@pytest.mark.parametrize("chunks", [False, True])
@pytest.mark.parametrize("kind", ["codes", "bf16", "fp32"])
def test_a_product_that_is_added_has_the_bits_of_an_addition(
    kind: str, chunks: bool, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one program, in chunks of one, and by the kernel that adds chunks; -0 stays where -0 is
    added to it."""
    if chunks:
        monkeypatch.setattr(
            "isobit.kernels.product.triton.plan.splits_of", lambda columns, inner, dtype: (2, 2)
        )
    a, b, before = draw(0, rows, 400), draw(1, 50, 400), draw(2, rows, 50, dtype=torch.float32)
    before[0], a[1], before[1] = 0.0, -0.0, -0.0
    left, right = (quantize(a, ROWS32), quantize(b, ROWS32)) if kind == "codes" else (a, b)
    if kind == "fp32":
        left, right = a.float(), b.float()
    alone = gradient_product(there(left), there(right), torch.float32)
    into = before.clone().to(DEVICE)
    found = gradient_product(there(left), there(right), torch.float32, into)
    assert found.data_ptr() == into.data_ptr()
    assert same(found, before.to(DEVICE) + alone)
    assert not same(found, alone)


def test_operands_along_tokens_are_padded_in_place() -> None:
    """A multiple of 16 tokens is in their memory already, with zeros behind the last token; others
    are copied."""
    flag = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    made = quantize_along_tokens(draw(0, 41, 32).to(DEVICE), ROWS, flag)
    wide = padded(codes_along_inner(made), 32, 48)
    assert wide.data_ptr() == made.data.data_ptr()
    assert same(wide[:, :41], made.data.view(torch.uint8).contiguous())
    assert not bool(wide[:, 41:].any())
    part = codes_along_inner(made)[1:]
    assert padded(part, 31, 48).data_ptr() != part.data_ptr()
    whole_rows = torch.ones(4, 32, dtype=torch.uint8)[:, :15]
    assert not bool(padded(whole_rows, 4, 16)[:, 15:].any()), "the next columns are not zeros"


def test_one_quantized_operand_counts_as_its_values() -> None:
    a, b = draw(0, 3, 96), quantize(draw(1, 20, 96), WEIGHT32)
    check_close(run(a, b, None, torch.bfloat16), a, b, None, torch.tensor(0.0), 97)
    assert not same(run(a, b), run(a, quantize(draw(1, 20, 96), WEIGHT)))


def test_other_blocks_are_refused_in_one_line() -> None:
    a, b = quantize(draw(0, 4, 256), ROWS), quantize(draw(1, 16, 256), WEIGHT)
    for wrong in (QuantSpec(E5M2, "1x128"), QuantSpec(E4M3, "1x32"), QuantSpec(E4M3, "128x1")):
        with pytest.raises(IsobitError, match="backend: triton multiplies e4m3 in blocks"):
            product(a, quantize(draw(1, 16, 256), wrong))
    with pytest.raises(IsobitError, match="128x128"):
        product(quantize(draw(0, 130, 256), WEIGHT), b)


def test_nothing_times_something() -> None:
    weight = whole(1, 20, 40, WEIGHT)
    assert run(
        QTensor(torch.empty(0, 40, dtype=E4M3.dtype), torch.empty(0, 1), ROWS), weight
    ).shape == (0, 20)
    assert torch.equal(
        run(torch.empty(3, 0).bfloat16(), torch.empty(20, 0).bfloat16()), torch.zeros(3, 20)
    )


TILES = {
    torch.uint8: [(64, 16, 4), (64, 32, 4), (64, 64, 4), (128, 64, 8), (128, 128, 8)],
    torch.float32: [(16, 16, 4), (64, 32, 4)],
}
TILES[torch.bfloat16] = TILES[torch.uint8]
TOKENS_FIRST = [(32, 64, 4), (64, 64, 4), (128, 64, 4), (128, 128, 8)]


def forced(monkeypatch: pytest.MonkeyPatch, **changes: object) -> None:
    """Let products run with a plan that differs in this."""
    monkeypatch.setattr(module, "plan", lambda *sizes: replace(plan(*sizes), **changes))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", TILES)
def test_every_tile_and_either_place_of_the_chunks_gives_the_same(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of data whose sums are exact: three blocks of K in chunks of two, poisoned outputs, edges;
    weights on the long side, and of codes tokens."""
    columns = 150 if dtype == torch.float32 else 70
    a, b = whole(0, 20, 384, ROWS), whole(1, columns, 384, WEIGHT)
    if dtype != torch.uint8:
        a, b = a.dequantize().to(dtype), b.dequantize().to(dtype)
    bias = whole(2, 1, columns)[0]
    wanted = reference_product(a, b, bias, torch.float32)
    chunks = {"splits": 2, "chunk": 256 // plan(1, 1, 1, dtype).step}
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *s, **k: empty(*s, **k).fill_(float("nan")))
    tiles = [(*tile, False) for tile in TILES[dtype]]
    if dtype == torch.uint8:
        tiles += [(*tile, True) for tile in TOKENS_FIRST]
    for tile_n, tile_m, num_warps, first in tiles:
        tile = {"tile_n": tile_n, "tile_m": tile_m, "num_warps": num_warps, "num_stages": 2}
        tile["tokens_first"] = first
        for change in (
            {"splits": 1, "apart": False},
            {**chunks, "apart": False},
            {**chunks, "apart": True},
        ):
            if tile_m == 128 and change["splits"] > 1:
                continue  # no plan has it: three sums do not fit in the registers
            forced(monkeypatch, **tile, **change)
            assert same(run(a, b, bias), wanted), (tile, change)


@pytest.mark.parametrize("dtype", TILES)
def test_chunks_apart_and_together_are_added_in_the_same_order(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bitwise, of real data in the same tiles; and the order is seen: without chunks, or backwards,
    bits differ."""
    a, b = quantize(draw(0, 16, 768, spread=1.0), ROWS32), quantize(draw(1, 64, 768), WEIGHT32)
    if dtype != torch.uint8:
        a, b = (x.dequantize().to(dtype) for x in (a, b))
    tile_n, tile_m, num_warps = TILES[dtype][0]
    steps = 768 // plan(16, 64, 768, dtype).step
    tile = {"tile_n": tile_n, "tile_m": tile_m, "num_warps": num_warps, "num_stages": 3}

    def found(a: Operand, b: Operand, splits: int, apart: bool) -> Tensor:
        forced(monkeypatch, **tile, splits=splits, chunk=steps // splits, apart=apart)
        return run(a, b)

    together = found(a, b, 3, False)
    assert same(together, found(a, b, 3, True))
    assert not same(together, found(a, b, 1, False))
    assert not same(together, found(backwards(a), backwards(b), 3, True))


def backwards(operand: Matrix) -> Matrix:
    """The operand with its three thirds of K in the opposite order."""
    if isinstance(operand, QTensor):
        data = backwards(operand.data.view(torch.uint8)).view(E4M3.dtype)
        return QTensor(data, backwards(operand.scale), operand.spec)
    return torch.cat(operand.chunk(3, dim=1)[::-1], dim=1)


def test_a_long_narrow_product_is_split_and_exact() -> None:
    """As planned, not forced: 16 columns of 640 are split for two rows and for 65; and for FP8
    where K is longer."""
    assert splits_of(16, 640, torch.float32) == (2, 3)
    assert splits_of(64, 9000, torch.uint8) == (2, 36)
    weight = whole(1, 16, 640).float()
    for rows in (2, 65):
        a = whole(0, rows, 640).float()
        assert same(
            run(a, weight, None, torch.bfloat16), reference_product(a, weight, None, torch.bfloat16)
        )


SIZES = [
    (4096, 1024),
    (1024, 2048),
    (6144, 1024),
    (1024, 3072),
    (151936, 1024),
    (6144, 4096),
    (4096, 12288),
]
SIZES += [
    (5120, 2048),
    (2048, 4096),
    (128, 2048),
    (1024, 16384),
    (20, 40),
    (1, 1),
    (0, 32),
    (64, 0),
]


@pytest.mark.parametrize("dtype", TILES)
@pytest.mark.parametrize(("columns", "inner"), SIZES)
def test_plans_split_k_by_the_weight_alone(columns: int, inner: int, dtype: torch.dtype) -> None:
    plans = {
        rows: plan(rows, columns, inner, dtype)
        for rows in (0, 1, 2, 16, 17, 33, 64, 65, 128, 1000, 8192)
    }
    first = plans[1]
    for rows, chosen in plans.items():
        assert (chosen.step, chosen.splits, chosen.chunk) == (first.step, first.splits, first.chunk)
        steps = max(-(-inner // chosen.step), 1)
        assert (chosen.splits - 1) * chosen.chunk < steps <= chosen.splits * chosen.chunk
        assert chosen.chunk * chosen.step % 128 == 0
        assert chosen.apart == (chosen.splits > 1 and rows <= FEW_ROWS)
        check_resources(chosen, dtype)


def test_tokens_stand_first_where_that_saves_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    """On Hopper, of codes, beside weights whose 128 rows share a scale, and more rows than half of
    the instruction's long side; nowhere once weights were put first, and in tiles of its own none.
    With half as many weights beside them where there are few tiles."""
    size = (4096, 4096, torch.uint8)
    some = (1, 32, 33, 64, 65, 8192)
    assert [rows for rows in some if plan(rows, *size).tokens_first] == [33, 64, 65, 8192]
    assert [plan(rows, *size).tile_n for rows in (1, 32, 33, 64)] == [64, 64, 32, 32]
    assert plan(64, 6144, 4096, torch.uint8).tile_n == 64
    assert not plan(8192, *size, True).tokens_first
    assert not plan(8192, 4096, 4096, torch.bfloat16).tokens_first
    for capability, architecture in ARCHITECTURES.items():
        compile_for(architecture)
        assert plan(8192, *size).tokens_first == (capability == (9, 0))
    compile_for(HOPPER)
    monkeypatch.setattr(plans, "_tokens_first", True)
    plans.put_weights_first()
    assert [plan(rows, *size).tokens_first for rows in (64, 65, 8192)] == [0, 0, 0]


def test_the_place_of_operands_moves_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of real data, as the interpreter multiplies; the control: a scale that is another row's."""
    a, b = quantize(draw(0, 90, 384, spread=1.0), ROWS32), quantize(draw(1, 150, 384), WEIGHT32)
    found = run(a, b)
    forced(monkeypatch, tokens_first=False)
    assert same(found, run(a, b))
    assert not same(found, run(QTensor(a.data, a.scale.roll(1, 0), a.spec), b))


@pytest.mark.parametrize("capability", ARCHITECTURES)
@pytest.mark.parametrize("dtype", TILES)
def test_plans_fit_every_architecture(dtype: torch.dtype, capability: tuple[int, int]) -> None:
    """What is on its way to one program, in its shared memory; and tiles along the rows of a alone
    may differ."""
    sizes = [(rows, *size) for rows in (1, 16, 33, 64, 65, 8192) for size in SIZES]
    hopper = [plan(*size, dtype) for size in sizes]
    compile_for(ARCHITECTURES[capability])
    try:
        found = [plan(*size, dtype) for size in sizes]
    finally:
        compile_for(HOPPER)
    for one, other in zip(found, hopper):
        assert (one.step, one.splits, one.chunk) == (other.step, other.splits, other.chunk)
        stage = (one.tile_n + one.tile_m) * one.step * dtype.itemsize
        assert one.num_stages >= 2
        assert stage * one.num_stages <= (ARCHITECTURES[capability].shared_kib - 3) * 1024
    assert (found == hopper) == (
        capability == (9, 0) or (dtype == torch.float32 and capability != (10, 0))
    )


def check_resources(chosen: ProductPlan, dtype: torch.dtype) -> None:
    """One instruction class; all warps stand along the side of 64 rows, tokens or weights; shared
    memory fits, 227 KiB on Hopper."""
    first = chosen.tokens_first
    assert (chosen.tile_n, chosen.tile_m, chosen.num_warps) in (
        TOKENS_FIRST if first else TILES[dtype]
    )
    long_side = chosen.tile_m if first else chosen.tile_n
    assert dtype == torch.float32 or chosen.num_warps == long_side // 16
    assert not (chosen.splits > 1 and chosen.tile_m == 128)
    stage = (chosen.tile_n + chosen.tile_m) * chosen.step * dtype.itemsize
    assert chosen.num_stages >= 2
    assert stage * chosen.num_stages <= 200 * 1024


def test_rows_do_not_see_a_scale_of_their_own_batch() -> None:
    """A row's bits in batches of any size, of exact data; the control: one activation scale for the
    batch."""
    x, weight = draw(0, 40, 256), whole(1, 64, 256, WEIGHT)
    x = x.sign() * 2.0 ** x.abs().log2().floor().clamp(
        -2, 2
    )  # powers of two: quantized exactly, their sums exact
    x[7] *= 1 + 2.0**-2
    x[20] *= 2.0**20

    def rows(batch: Tensor, spec: QuantSpec) -> Tensor:
        return run(quantize(batch, spec), weight)

    assert same(rows(x, ROWS)[7:8], rows(x[7:8], ROWS))
    assert same(rows(x, ROWS)[7:24], rows(x[7:24], ROWS))
    tensor = QuantSpec(E4M3, "tensor", "ue8m0")
    assert not same(rows(x, tensor)[7:8], rows(x[7:8], tensor))


def _on_gpu(kind: str, rows: int) -> tuple[Operand, Operand]:
    x, weight = draw(0, rows, 4096, spread=1.0).to(DEVICE), draw(1, 1024, 4096).to(DEVICE)
    if kind == "fp8":
        return quantize(x, ROWS32), quantize(weight, WEIGHT32)
    if kind == "fp8 long":
        x, weight = draw(0, rows, 16384, spread=1.0).to(DEVICE), draw(1, 1024, 16384).to(DEVICE)
        return quantize(x, ROWS32), quantize(weight, WEIGHT32)
    return (x, weight) if kind == "bf16" else (x.float(), weight.float())


def _take(operand: Operand, start: int, stop: int) -> Operand:
    if isinstance(operand, Tensor):
        return operand[start:stop]
    return QTensor(operand.data[start:stop], operand.scale[start:stop], operand.spec)


@pytest.mark.parametrize("kind", ["fp8", "fp8 long", "bf16", "fp32"])
@pytest.mark.parametrize("out", OUTPUTS)
@pytest.mark.gpu
@needs_gpu
def test_a_row_alone_is_the_row_in_its_batch(kind: str, out: torch.dtype) -> None:
    """Bitwise, of real data, over all tiles that a plan has: only a GPU can show it."""
    a, b = _on_gpu(kind, 4300)
    whole_batch = product(a, b, None, out)
    for size in (1, 2, 7, 8, 16, 31, 32, 33, 63, 64, 65, 128, 257, 1024, 2200):
        for start in (0, 1, 4300 - size):
            assert same(
                whole_batch[start : start + size],
                product(_take(a, start, start + size), b, None, out),
            ), size


@pytest.mark.gpu
@needs_gpu
def test_tensor_scales_depend_on_the_batch_on_a_gpu() -> None:
    """The control of the test above: with one activation scale for the batch, it fails."""
    x = draw(0, 300, 1024, spread=1.0).to(DEVICE)
    weight = quantize(draw(1, 256, 1024).to(DEVICE), WEIGHT32)
    tensor = QuantSpec(E4M3, "tensor", "fp32")
    assert not same(
        product(quantize(x, tensor), weight)[:1], product(quantize(x[:1], tensor), weight)
    )
