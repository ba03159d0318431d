"""What `python -m tests.faults.endurance` takes for growth: each count once, and the control that
is flat."""

from dataclasses import replace

import pytest

from .endurance import Reading, grown, growth

FLAT = [
    Reading(step, 200 + step % 3, 17 + 2 * (step % 5 == 0), 2, 2, 24, step / 100)
    for step in range(1, 1001)
]
"""Memory breathes, a file is open now and then, and the logs grow."""


def test_what_breathes_is_flat() -> None:
    assert grown(growth(FLAT)) == []


@pytest.mark.parametrize(
    ("name", "a_step"),
    [
        ("memory_mib", 0.02),
        ("descriptors", 0.01),
        ("threads", 0.01),
        ("processes", 0.01),
        ("checkpoint_files", 0.01),
    ],
)
def test_what_leaks_is_named(name: str, a_step: float) -> None:
    leaking = [replace(r, **{name: getattr(r, name) + int(a_step * r.step)}) for r in FLAT]
    assert grown(growth(leaking)) == [name]
