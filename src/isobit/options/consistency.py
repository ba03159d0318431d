"""The levels of `consistency`, and the two orders in which `bitwise` adds products on a CPU.

`exact`, `bitwise` and `fast` are levels. `bitwise` has two orders of sums, each the arithmetic of
an instruction that multiplies BF16 numbers (`kernels/product/ordered.py`), and every processor
computes either; by default it is the one for which this processor has the instruction.
`bitwise-tdp32` and `bitwise-vdp32` name one. Left out: the sums.
"""

from functools import cache
from pathlib import Path
from typing import Literal, get_args

TDP32, VDP32 = "tdp32", "vdp32"
Consistency = Literal["exact", "bitwise", "bitwise-tdp32", "bitwise-vdp32", "fast"]
CONSISTENCIES: tuple[str, ...] = get_args(Consistency)
_FOR_VDP32 = {"avx512_bf16", "avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512vbmi"}
"""What `kernels/product/ordered_bf16.cpp` needs, in the words of /proc/cpuinfo."""


def resolved(consistency: str) -> str:
    """Return a consistency with the order of this processor, where it names none."""
    return f"bitwise-{default_order()}" if consistency == "bitwise" else consistency


def level(consistency: str) -> str:
    """Return the level of a consistency: `exact`, `bitwise` or `fast`."""
    return consistency.partition("-")[0]


def order(consistency: str) -> str | None:
    """Return the order of a resolved consistency; None of a level that has none."""
    return consistency.partition("-")[2] or None


@cache
def default_order() -> str:
    """Return `vdp32` where the processor has VDPBF16PS and not TDPBF16PS (AMD from Zen 4 on), else
    `tdp32`."""
    features = processor_features()
    return VDP32 if features >= _FOR_VDP32 and "amx_bf16" not in features else TDP32


def processor_features() -> frozenset[str]:
    """Return the flags that /proc/cpuinfo lists of an x86 processor; an empty set on others."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    flags = [line.partition(":")[2].split() for line in lines if line.split("\t")[0] == "flags"]
    return frozenset(flags[0]) if flags else frozenset()
