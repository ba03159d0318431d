"""Chains of Hopper's matrix instruction in what Triton's compiler made of a kernel.

In PTX an operand is a descriptor, an address in shared memory: a base, plus a constant that says
how far along K an instruction begins. In machine code (SASS) registers say which sum an instruction
goes on with: `R24, gdesc[UR16], RZ, !UPT` begins one from nothing, `R24, gdesc[UR16], R24` goes on.
Left out: operands in registers, whose order values show (`test_attention.py`).
"""

import re
from dataclasses import dataclass, replace
from itertools import groupby, pairwise

_DESCRIPTOR = re.compile(r"(?:add\.s64|or\.b64)\s+(%rd\d+), (%rd\d+), (-?\d+);")
_PTX = re.compile(
    r"wgmma\.mma_async\.sync\.aligned\.m\d+n\d+k(\d+)\.f32\.(\w+)\.\w+ "
    r"\{([^}]*)\}, (\{[^}]*\}|%rd\d+), (%rd\d+), (\S+),"
)
_SASS = re.compile(
    r"\b([QH])GMMA\.64x(\d+)x(\d+)\.\S+ (R\d+), (?:R\d+, )?gdesc\[UR\d+\]\S*?, (RZ|R\d+)(, !UPT)?"
)
_LOCAL_MEMORY = re.compile(r"\b(LDL|STL)\b")


@dataclass(frozen=True)
class Chain:
    """Instructions that add to one sum: their number, columns and depth, and whether the first
    begins it from nothing."""

    kind: str
    columns: int
    inner: int
    length: int
    fresh: bool


def chains(sass: str) -> list[Chain]:
    """Of a kernel's machine code, in the order in which they begin: an instruction that begins from
    nothing begins one, and others go on with what was added to their register last."""
    found: list[Chain] = []
    last: dict[str, int] = {}
    for one in _SASS.finditer(sass):
        kind, columns, inner, register, before, unused = one.groups()
        fresh = before == "RZ" and unused is not None
        if fresh or register not in last:
            last[register] = len(found)
            found.append(Chain(f"{kind}GMMA", int(columns), int(inner), 0, fresh))
        at = last[register]
        found[at] = replace(found[at], length=found[at].length + 1)
    return found


def places(ptx: str) -> list[list[tuple[int, ...]]]:
    """Of every product in PTX, how far along K each of its instructions begins, in the units of
    descriptors: a number for each operand in shared memory."""
    defined = {name: (base, int(offset)) for name, base, offset in _DESCRIPTOR.findall(ptx)}
    found: list[list[tuple[int, ...]]] = []
    for group in re.split(r"wgmma\.fence\.sync\.aligned;", ptx)[1:]:
        steps: list[tuple[tuple[str, str], tuple[int, ...]]] = []
        for one in _PTX.finditer(group):
            operands = [defined[x] for x in (one[4], one[5]) if x in defined]
            assert operands, f"no descriptor is known of: {one[0]}"
            steps.append(
                (
                    one[3],
                    tuple(base for base, _ in operands),
                    tuple(offset for _, offset in operands),
                )
            )
        for _, own in groupby(steps, key=lambda step: step[:2]):
            found.append([offsets for *_, offsets in own])
    return found


def ascending(steps: list[tuple[int, ...]]) -> bool:
    """Whether each instruction begins further along K than the one before, in both operands."""
    return all(all(x < y for x, y in zip(one, other)) for one, other in pairwise(steps))


def uses_local_memory(sass: str) -> bool:
    """Whether registers are kept in memory anywhere."""
    return _LOCAL_MEMORY.search(sass) is not None
