"""Codes unpacked two at a time: every code in the interpreter, and what a GPU runs instead, carried
out by the word."""

import re

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from isobit.kernels.triton import numbers
from isobit.kernels.triton.launch import launch

from .helpers import DEVICE

CODES = np.arange(256, dtype=np.uint8)


@triton.jit
def _unpack(codes_ptr, first_ptr, second_ptr, COUNT: tl.constexpr):
    at = tl.arange(0, COUNT)
    first, second = numbers.pairs(
        tl.load(numbers.pair_pointer(codes_ptr) + at), first_ptr.dtype.element_ty
    )
    tl.store(first_ptr + at, first)
    tl.store(second_ptr + at, second)


def _values(form: str) -> torch.Tensor:
    codes = torch.from_numpy(CODES)
    return (
        codes.view(torch.int8).float()
        if form == "int8"
        else codes.view(torch.float8_e4m3fn).float()
    )


@pytest.mark.parametrize("like", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("form", ["int8", "e4m3"])
def test_every_code_is_its_value_in_both_places(form: str, like: torch.dtype) -> None:
    values = _values(form)
    codes = torch.from_numpy(np.stack([CODES, CODES[::-1]], 1).copy()).flatten()
    first, second = (torch.empty(256, dtype=like, device=DEVICE) for _ in range(2))
    given = codes.view(torch.int8) if form == "int8" else codes
    launch(_unpack, (1,), given.to(DEVICE), first, second, num_warps=4, COUNT=256)
    assert torch.equal(values.to(like).float().nan_to_num(9999.0), values.nan_to_num(9999.0)), (
        "no code is rounded"
    )
    assert torch.equal(first.cpu().float().nan_to_num(9999.0), values.nan_to_num(9999.0))
    assert torch.equal(second.cpu().float().nan_to_num(9999.0), values.flip(0).nan_to_num(9999.0))


def _carried_out(program: str, words: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What a program of PTX leaves in $0 and $1: the few instructions that ours have, on arrays of
    words."""
    found: dict[str, np.ndarray] = {"$2": words}

    def value(name: str) -> np.ndarray:
        return found[name] if name in found else np.full_like(words, int(name, 0))

    def halves(name: str, like: str) -> torch.Tensor:
        bits = torch.from_numpy(value(name).view(np.int16).copy())
        return bits.view(torch.float16 if like == "f16x2" else torch.bfloat16)

    for name, operands in re.findall(r"^(\w[\w.]*) (.*);$", program, re.MULTILINE):
        to, *given = [one.strip() for one in re.sub(r"[{}]", "", operands).split(",")]
        kind = name.split(".")[-1]
        if name == "mov.b32" and len(given) == 2:  # {low, high}, word
            found[to], found[given[0]] = value(given[1]) & 0xFFFF, value(given[1]) >> 16
        elif name == "mov.b32":
            found[to] = value(given[0])
        elif name == "shr.u32":
            found[to] = value(given[0]) >> value(given[1])
        elif name == "lop3.b32":
            a, b, c = (value(one) for one in given[:3])
            found[to] = {0x6A: (a & b) ^ c, 0xEA: (a & b) | c}[int(given[3], 0)]
        elif name == "prmt.b32":
            assert given[1:] == ["0", "0x3120"]
            found[to] = (
                value(given[0])
                .view(np.uint8)
                .reshape(-1, 4)[:, [0, 2, 1, 3]]
                .copy()
                .view(np.uint32)[:, 0]
            )
        elif name == "sub.f16x2":
            found[to] = (
                (halves(given[0], kind) - halves(given[1], kind))
                .view(torch.int16)
                .numpy()
                .view(np.uint32)
            )
        elif name == "fma.rn.bf16x2":
            a, b, c = (halves(one, kind).double() for one in given)
            found[to] = (a * b + c).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint32)
        else:
            assert name == "cvt.rn.f16x2.e4m3x2", name
            codes = value(given[0]).astype(np.uint16).view(np.uint8)
            wide = torch.from_numpy(codes.copy()).view(torch.float8_e4m3fn).to(torch.float16)
            found[to] = wide.view(torch.int16).numpy().view(np.uint32)
    return found["$0"], found["$1"]


@pytest.mark.parametrize(
    ("program", "form", "like"),
    [
        (numbers.INT8_TO_FP16, "int8", torch.float16),
        (numbers.INT8_TO_BF16, "int8", torch.bfloat16),
        (numbers.E4M3_TO_FP16, "e4m3", torch.float16),
    ],
)
def test_the_words_of_a_gpu_have_the_same_values(
    program: tl.constexpr, form: str, like: torch.dtype
) -> None:
    """Every code at each of the four bytes of a word, beside others. The control: another
    constant."""
    values = _values(form).nan_to_num(9999.0)
    at = np.stack([CODES, np.roll(CODES, 1), np.roll(CODES, 77), CODES[::-1]], 1).copy()

    def differing(text: str) -> int:
        parts = _carried_out(text, at.view(np.uint32)[:, 0])
        found = [
            torch.from_numpy(part.view(np.int16).copy()).view(like).float().view(256, 2)
            for part in parts
        ]
        wanted = values[torch.from_numpy(at.astype(np.int64))]
        both = torch.stack([found[0][:, 0], found[1][:, 0], found[0][:, 1], found[1][:, 1]], 1)
        return int((both.nan_to_num(9999.0) != wanted).sum())

    assert differing(program.value) == 0
    others = {
        "0x64806480": "0x64806481",
        "0x00800080": "0x00400040",
        "cvt.rn.f16x2.e4m3x2 $1, high": "cvt.rn.f16x2.e4m3x2 $1, low",
    }
    assert [
        differing(program.value.replace(*other)) > 0
        for other in others.items()
        if other[0] in program.value
    ] == [True]
