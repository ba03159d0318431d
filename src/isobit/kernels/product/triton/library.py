"""Products of many rows by cuBLAS or DeepGEMM, at the sizes at which every byte is the kernels'
own.

With many rows such a library is up to 2.5 times as fast as Triton on an H100 (16,640 x 5,120 x
8,192 in blocks: cuBLAS 1,009 TFLOP/s, a Triton kernel 399; pytorch/ao issue 2784). It may compute
the same bits: DeepGEMM's kernel for Hopper is written as `product` defines a sum
(`sm90_fp8_gemm_1d2d.cuh`: a block of 128 along K from zero, times its scales, added in ascending
order), and a chain of BF16 instructions over ascending K is the obvious one. But no library
promises it, and cuBLAS chooses its kernel by size. So each size is tried when it first comes: on
the operands themselves, and on random ones whose largest terms cancel, so that another order of
sums shows also in a result that is rounded to BF16, the library must return every byte of Triton's
product. Of those that do, and Triton, the fastest is taken from then on. That moves no bit, so it
may depend on a clock, and ranks need not agree on it. A library that fails is not asked again.

A learner's packs have any number of rows, and as a row's bits do not depend on the others, a
library gets a multiple of `LIBRARY_ROWS` of them, and Triton the rest: a weight has a size for each
multiple, and no more. Fewer rows are tried where a captured step may have so many
(`engine.graphs.ladder`). A trial is a dozen products, and waits for the GPU; so none is made while
a graph is captured, which takes what was chosen in the same step before it. Not tried, and left to
Triton: long K that is summed in chunks (`product_plan`), and operands that are not aligned or not
contiguous. Left out: experts' products.
"""

import importlib
import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from isobit.kernels.matrices import (
    LIBRARY_ROWS,
    Operand,
    Packed,
    Prepared,
    rows_of,
    tensors_of,
    weight_of,
)
from isobit.kernels.product.triton import cublas
from isobit.kernels.product.triton.plan import splits_of
from isobit.kernels.product.triton.product import product
from isobit.precision import BLOCK, PackedFP4, QTensor

FEWEST, ROUND = 128, 16
"""Rows of a smaller product that is tried: not fewer, since weights are read for most of the time
there, and Triton is as fast (64 rows of Qwen3-8B on an H200, benchmarks/results/gpu); and a
multiple of this."""
_ALIGNED = 256
"""Bytes, on a GPU: cuBLAS's choice of a kernel may depend on alignments up to this one
(`cublasLtMatmulPreference`)."""
_LARGE = 2.0**16
"""Of a block that is cancelled, beside others: float32 has 24 bits, and BF16 shows 8 of what it
leaves."""
_TIMED = 3
_HEAD_START = 6_000_000
"""Cycles that a GPU waits before calls are timed, some three milliseconds: Python launches all of
them meanwhile. Without it, a library whose call costs more on the host than on the GPU loses for
that (on an H200 cuBLAS's FP8 product of 512 rows: 43 µs, launched in 170), and neither a replayed
graph nor a learner, which is far ahead of the GPU, waits for the host."""

Call = Callable[[Operand, Operand, Tensor | None, torch.dtype], Tensor | None]
"""a, b, bias, type of the result; None where a library has no such product."""
Size = tuple[object, ...]
Trial = tuple[Operand, Operand, Tensor | None, torch.dtype, Tensor]
"""Operands, and Triton's product of them."""


class LibraryProducts:
    """`product`, by whatever returns its bytes the soonest. `chosen`: a library's name by size, or
    "triton"; `refused`: by library, why it is not asked."""

    def __init__(
        self,
        libraries: Mapping[str, Call] | None = None,
        seconds: Callable[[Callable[[], object]], float] | None = None,
        step: int = LIBRARY_ROWS,
    ) -> None:
        self._libraries = dict(_installed() if libraries is None else libraries)
        self._seconds, self._step = seconds or _seconds, step
        self.chosen: dict[Size, str] = {}
        self.refused: dict[str, str] = {}

    def product(self, a: Operand, b: Prepared, bias: Tensor | None, out: torch.dtype) -> Tensor:
        """Return a [M, K] · b [N, K]ᵀ + bias [N], rounded once to `out`: [M, N]."""
        if isinstance(b, PackedFP4) or not self._may_be_tried(a, b):
            return product(a, b, bias, out)
        weight = weight_of(b)
        size = (
            self._most(a),
            a.shape[1],
            weight.shape[0],
            _kind(a),
            _kind(weight),
            _kind(bias),
            out,
        )
        if size not in self.chosen:
            if _capturing(a):
                return product(a, b, bias, out)
            self.chosen[size] = self._fastest(a, b, bias, out)
        return self._by(self._libraries.get(self.chosen[size], product), a, b, bias, out)

    def _most(self, a: Operand) -> int:
        """Return the number of rows that a library may take."""
        rows = a.shape[0]
        return rows if rows < self._step else rows // self._step * self._step

    def _by(
        self, call: Call, a: Operand, b: Operand | Packed, bias: Tensor | None, out: torch.dtype
    ) -> Tensor:
        """By a library, the last rows by Triton; or all by Triton."""
        rows, most = a.shape[0], self._most(a)
        if call is product:
            return product(a, b, bias, out)
        result = call(a if rows == most else rows_of(a, 0, most), weight_of(b), bias, out)
        assert result is not None, "a product that was there when it was tried"
        if result.shape[0] == rows:
            return result
        return torch.cat([result, product(rows_of(a, most, rows), b, bias, out)])

    def _may_be_tried(self, a: Operand, b: Operand | Packed) -> bool:
        rows, inner = a.shape
        few = rows < self._step and (rows < FEWEST or rows % ROUND > 0)
        if not self._libraries or few:
            return False
        matrices = (tensors_of(a)[0], tensors_of(weight_of(b))[0])
        kind, right_kind = (m.dtype for m in matrices)
        if kind != right_kind or kind == torch.float32:
            return False
        if isinstance(a, QTensor) and a.scale.shape != (rows, -(-inner // BLOCK)):
            return False
        plain = all(
            m.is_contiguous() and not (m.is_cuda and m.data_ptr() % _ALIGNED) for m in matrices
        )
        return (
            plain
            and splits_of(b.shape[0], inner, torch.uint8 if isinstance(a, QTensor) else kind)[0]
            == 1
        )

    def _fastest(
        self, a: Operand, b: Operand | Packed, bias: Tensor | None, out: torch.dtype
    ) -> str:
        """Return the name of what returns Triton's bytes the soonest, Triton among them, for
        operands of these sizes."""
        calls: dict[str, Call] = {"triton": product}
        try:
            most, weight = rows_of(a, 0, self._most(a)), weight_of(b)
            left, right = revealing(most, weight)
            like_b = replace(b, weight=right) if isinstance(b, Packed) else right
            trials = [
                (most, weight, bias, out, product(most, b, bias, out)),
                (left, right, bias, out, product(left, like_b, bias, out)),
            ]
            calls |= {
                name: call for name, call in self._libraries.items() if self._agrees(name, trials)
            }
            operands = (a, b, bias, out)
            times = {
                n: self._seconds(partial(self._by, call, *operands))
                for n, call in calls.items()
                if len(calls) > 1
            }
        except torch.OutOfMemoryError:  # a run goes on where there is no room for a trial
            return "triton"
        self._libraries = {
            name: call for name, call in self._libraries.items() if name not in self.refused
        }
        return min(times, key=times.__getitem__, default="triton")

    def _agrees(self, name: str, trials: Sequence[Trial]) -> bool:
        try:
            results = (self._libraries[name](a, b, bias, out) for a, b, bias, out, _ in trials)
            return all(
                y is not None and torch.equal(_bytes(y), _bytes(ours))
                for y, (*_, ours) in zip(results, trials)
            )
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # of a library, anything; Triton remains
            self.refused[name] = f"{type(error).__name__}: {error}"
            return False


def _installed() -> Iterator[tuple[str, Call]]:
    yield "cublas", _by_cublas
    if importlib.util.find_spec("deep_gemm") is not None:
        yield "deep_gemm", _by_deep_gemm


def _by_cublas(a: Operand, b: Operand, bias: Tensor | None, out: torch.dtype) -> Tensor | None:
    return cublas.cublas_product(a, b, bias, out) if cublas.takes(a, b, out) else None


def _by_deep_gemm(a: Operand, b: Operand, bias: Tensor | None, out: torch.dtype) -> Tensor | None:
    """Return `deep_gemm.fp8_gemm_nt` (DeepGEMM's README), whose kernel for Hopper has BF16 results,
    weights in blocks of 128 x 128, and N in multiples of 8."""
    if isinstance(a, Tensor) or isinstance(b, Tensor) or bias is not None or out != torch.bfloat16:
        return None
    if (a.block, b.block) != ((1, BLOCK), (BLOCK, BLOCK)) or b.shape[0] % 8:
        return None
    deep_gemm = importlib.import_module(
        "deep_gemm"
    )  # not a package that could be required: it is built from source
    y = torch.empty((a.shape[0], b.shape[0]), dtype=out, device=a.data.device)
    deep_gemm.fp8_gemm_nt((a.data, a.scale), (b.data, b.scale), y)
    return y


def _kind(x: Operand | None) -> object:
    return None if x is None else x.spec if isinstance(x, QTensor) else x.dtype


def _capturing(a: Operand) -> bool:
    return tensors_of(a)[0].is_cuda and torch.cuda.is_current_stream_capturing()


def revealing(a: Operand, b: Operand) -> tuple[Operand, Operand]:
    """Return random operands in the form of a [M, K] and b [N, K], whose product reveals the order
    of its sums.

    All blocks of 128 columns of b are the same. In each row of a two blocks, at its own places,
    are large and cancel each other: what remains in an element is what rounding left of the other
    blocks, and that depends on which of them came before, between and after those two. The user's
    generators stay as they are.
    """
    device, (rows, inner) = tensors_of(a)[0].device, a.shape
    generator = torch.Generator(device).manual_seed(0)
    left, right = (_random(x, generator) for x in (a, b))
    blocks = inner // BLOCK
    if blocks < 3:  # of two there is one order
        return left, right
    row = torch.arange(rows, device=device)
    first, second = (
        torch.rand(rows, blocks, device=device, generator=generator).topk(2).indices.unbind(1)
    )
    _matrix(right).copy_(_matrix(right)[:, :BLOCK].repeat(1, blocks + 1)[:, :inner])
    left_blocks = _matrix(left)[:, : blocks * BLOCK].view(rows, blocks, BLOCK)
    if isinstance(left, QTensor) and isinstance(right, QTensor):
        right.scale.copy_(right.scale[:, :1].expand_as(right.scale))
        left.scale[row, first] *= _LARGE
        left.scale[row, second] = left.scale[row, first]
        left_blocks[row, second] = left_blocks[row, first] ^ 0x80  # the sign
    else:
        left_blocks[row, first] *= _LARGE
        left_blocks[row, second] = -left_blocks[row, first]
    return left, right


def _matrix(x: Operand) -> Tensor:
    return x if isinstance(x, Tensor) else x.data.view(torch.uint8)


def _random(x: Operand, generator: torch.Generator) -> Operand:
    """Return random numbers of widely varying magnitudes: BF16, or any finite code with scales of
    2^-4 to 2^4, times a fraction where scales need no powers of two."""
    if isinstance(x, Tensor):
        y, exponents = (torch.empty_like(x).normal_(generator=generator) for _ in range(2))
        return y.mul_(exponents.mul_(2).exp_())
    codes = torch.randint(
        0, 254, x.shape, dtype=torch.uint8, device=x.data.device, generator=generator
    )
    codes += codes >= 127  # 0x7f and, beyond the last one, 0xff are NaN
    scale = (
        torch.randint(-4, 5, x.scale.shape, device=x.data.device, generator=generator)
        .float()
        .exp2_()
    )
    if x.spec.scale != "ue8m0":
        scale *= 1 + torch.rand(scale.shape, device=scale.device, generator=generator)
    laid_out = torch.empty_strided(x.scale.shape, x.scale.stride(), device=scale.device).copy_(
        scale
    )
    return QTensor(codes.view(x.data.dtype), laid_out, x.spec)


def _bytes(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


def _seconds(call: Callable[[], object]) -> float:
    """Return the seconds of one call on the GPU, after one that is not counted, and with nothing
    between the calls."""
    call()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(_HEAD_START)
    start.record()
    for _ in range(_TIMED):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1000 / _TIMED
