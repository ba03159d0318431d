"""Cards by name, and the memory that a program finds on each.

Bytes are about what PyTorch reports of such a card, which is less than it is sold with. The only
other entry is whether it multiplies FP8: how fast a card is was measured for one alone
(docs/gpu.md).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from isobit.errors import IsobitError, did_you_mean

GIB, MIB = 2**30, 2**20
_UNITS = {"gib": GIB, "mib": MIB, "gb": 10**9, "mb": 10**6}
_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?(gib|mib|gb|mb)", re.IGNORECASE)


@dataclass(frozen=True)
class Machine:
    """The machine of a rank: its `memory` in bytes. `host`: it computes on a CPU, where `packs`:
    weights are packed for products, as the C++ backend does. `fp8`: a GPU that multiplies FP8."""

    name: str
    memory: int
    host: bool = False
    packs: bool = False
    fp8: bool = True


CARDS: Mapping[str, Machine] = {
    name: Machine(name, int(size * GIB), fp8=not name.startswith("a100"))
    for name, size in {
        "rtx4090": 23.5,
        "rtx5090": 31.4,
        "a100-40": 39.4,
        "l40s": 44.4,
        "a100-80": 79.1,
        "h100": 79.1,
        "h200": 139.8,
        "b200": 178.3,
    }.items()
}
"""From the smallest to the largest."""


def card_named(name: str) -> Machine:
    """Return the card of this name. Raises IsobitError for another name, with those that are
    known."""
    if name.lower() not in CARDS:
        hint = did_you_mean(name.lower(), list(CARDS))
        known = "" if hint.startswith("known") else f"; known: {', '.join(CARDS)}"
        raise IsobitError(f"--device {name!r}: unknown card; {hint}{known}; or give --memory 24GiB")
    return CARDS[name.lower()]


def card_of(memory: str) -> Machine:
    """Return a card with this much memory, such as 24GiB or 48 GB. Raises IsobitError for what is
    no such size."""
    match = _SIZE.fullmatch(memory.strip())
    size = 0.0 if match is None else float(match[1]) * _UNITS[match[2].lower()]
    if not MIB <= size <= 1 << 50:
        raise IsobitError(
            f"--memory {memory!r}: expected a size with its unit, such as 24GiB or 80GB"
        )
    return Machine(f"{memory.strip()} card", int(size))


def gib(size: float) -> str:
    """Return a size in GiB as text."""
    return f"{size / GIB:.1f} GiB"
