"""A GPU's matrix instruction against the model of Hopper's, on which the bits of all kernels rest:
the first thing to ask a card.

`instruction.safetensors` has operands for E4M3, BF16 and FP16, four instructions of products, and
what MMA-Sim's model of Hopper's `wgmma` makes of them (Xie et al. 2025, arXiv 2511.10909); the
tests compute kernels with the same model (`tests/kernels/triton/hopper.py`, which
`tests/kernels/triton/test_instruction.py` holds against this file). A kernel of one product is run
on them: tokens on the short side of the instruction, N = 16, 32, 64 and 128, and with the operands
exchanged. Where all are equal, what the tests show under the emulated instruction is shown for the
card. Where exchanging alone differs, attention has to keep its rows on one side
(`put_rows_first`). The control is the same product with its channels in reverse, a chain of another
order. Left out: other instructions, and NaN and infinity.
"""

from collections.abc import Iterator
from pathlib import Path

import torch
import triton
import triton.language as tl
from safetensors.torch import load_file
from torch import Tensor

from isobit.kernels.triton import numbers
from isobit.kernels.triton.launch import launch, target

VECTORS = Path(__file__).with_name("instruction.safetensors")
FORMATS = ("e4m3", "bf16", "fp16")
_ROWS = 64  # on the long side
_TOKENS = (16, 32, 64, 128)


@triton.jit
def one_product(
    a_ptr, b_ptr, c_ptr, d_ptr,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, FP8: tl.constexpr, FRESH: tl.constexpr,
):  # fmt: skip
    """d [M, N] = c [M, N] + a [M, K] · b [N, K]ᵀ; with FRESH c is zero, and the chain begins
    without an accumulator."""
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    if FP8:
        a_ptr, b_ptr = numbers.e4m3_pointer(a_ptr), numbers.e4m3_pointer(b_ptr)
    a = tl.load(a_ptr + m[:, None] * K + k[None, :])
    b = tl.load(b_ptr + n[None, :] * K + k[:, None])
    at = m[:, None] * N + n[None, :]
    if FRESH:
        c = tl.zeros((M, N), tl.float32)
    else:
        c = tl.load(c_ptr + at)
    tl.store(d_ptr + at, numbers.dot(a, b, c))


def compare_instruction(
    device: torch.device, claimed: bool | None = None
) -> list[dict[str, object]]:
    """A row for every format, number of tokens and side, as `Case.row` takes it: how many elements
    were `compared` and how many are `differing`, what is `expected` and whether it `holds`; of the
    first one that differs its place, and both numbers.

    `claimed`: whether the instruction should be Hopper's; by default on a GPU of `sm_90`. Elsewhere
    rows are a record without a claim.
    """
    if claimed is None:
        claimed = device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)
    kept = load_file(VECTORS)
    formats = FORMATS if target().fp8 else FORMATS[1:]
    return [
        _compared(what, found, wanted, expected if claimed else None)
        for name in formats
        for what, found, wanted, expected in _products(name, kept, device)
    ]


def _products(
    name: str, kept: dict[str, Tensor], device: torch.device
) -> Iterator[tuple[str, Tensor, Tensor, str]]:
    """(what, a product [M, N], what the model makes of it, what is expected)."""
    a, b, c, d = (kept[f"{name}.{part}"] for part in "abcd")
    for tokens in _TOKENS:
        column = torch.arange(tokens) % len(b)
        found = _product(a, _rows(b, column), c[:, column], device)
        yield f"{name}, N = {tokens}", found, d[:, column], "equal"
    for tokens in _TOKENS[:3]:
        row = torch.arange(_ROWS) % len(b)
        found = _product(_rows(b, row), a[:tokens], c[:tokens, row].t(), device)
        yield f"{name}, N = {tokens}, operands exchanged", found, d[:tokens, row].t(), "equal"
    fresh = (c == 0).all(0).nonzero()[:, 0].repeat(len(b))[: len(b)]
    found = _product(a, _rows(b, fresh), c[:, fresh], device)
    yield f"{name}, from nothing", found, d[:, fresh], "equal"
    reverse = torch.arange(a.shape[1] - 1, -1, -1)
    left, right = (_rows(x.t(), reverse).t() for x in (a, b))
    found = _product(left, right, c, device)
    yield f"{name}, channels in reverse", found, d, "different"


def _rows(x: Tensor, at: Tensor) -> Tensor:
    """Those of codes too, which PyTorch does not index everywhere."""
    return x.view(torch.uint8)[at].view(x.dtype) if x.itemsize == 1 else x[at]


def _product(a: Tensor, b: Tensor, c: Tensor, device: torch.device) -> Tensor:
    """c [M, N] + a [M, K] · b [N, K]ᵀ in float32, by one program of four warps."""
    fp8 = a.itemsize == 1
    given = [x.contiguous().view(torch.uint8) if fp8 else x.contiguous() for x in (a, b)]
    d = torch.empty(c.shape, dtype=torch.float32, device=device)
    launch(
        one_product, (1,), *(x.to(device) for x in (*given, c.contiguous())), d, num_warps=4,
        M=len(a), N=len(b), K=a.shape[1], FP8=fp8, FRESH=not bool(c.any()),
    )  # fmt: skip
    return d.cpu()


def _compared(what: str, found: Tensor, wanted: Tensor, expected: str | None) -> dict[str, object]:
    unequal = found.view(torch.int32) != wanted.contiguous().view(torch.int32)
    count = int(unequal.sum())
    row: dict[str, object] = {
        "contestant": what,
        "compared": unequal.numel(),
        "differing": count,
    }
    if count:
        m, n = unequal.nonzero()[0].tolist()
        row |= {"first": [m, n], "found": float(found[m, n]), "wanted": float(wanted[m, n])}
    if expected is not None:
        row |= {"expected": expected, "holds": (count == 0) == (expected == "equal")}
    return row
