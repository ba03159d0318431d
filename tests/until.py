"""How tests wait for what happens elsewhere: by a condition, and never by the clock."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

MOST_SECONDS = 300.0
"""Only a fault takes as long, on a machine of any load."""


def until(condition: Callable[[], Any], seconds: float = MOST_SECONDS) -> None:
    """Wait until a condition holds that another thread or process brings about."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"{seconds:g} s have not brought it about"
        time.sleep(0.005)


async def until_here(condition: Callable[[], Any]) -> None:
    """Wait until a condition holds that other tasks of this loop bring about."""
    end = time.monotonic() + MOST_SECONDS
    while not condition():
        assert time.monotonic() < end, f"{MOST_SECONDS:g} s have not brought it about"
        await asyncio.sleep(0.001)
