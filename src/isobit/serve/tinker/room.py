"""Bounds on what the tenants of a server may take: requests that wait, and adapters that train. As
far as its own share reaches, a tenant is not refused because of what another one has taken."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from isobit.engine.memory import memory_limit
from isobit.model import Model
from isobit.serve.gateway import Refused
from isobit.serve.requests import Limits

_MEMORY_PART = 2  # one part in this many of the memory is for adapters that train


class Waiting:
    """Counts of the bytes, unpacked, of requests to runs that are not done. The requests wait on
    the disk; in memory is only what one of them takes in its turn."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._bytes = Counter[str]()  # of each tenant

    def check(self, tenant: str, size: int) -> None:
        """Raise Refused (429) where `size` more bytes of a tenant would be more than may wait of
        one tenant, or of all together."""
        most, most_of_all = self._limits.waiting_bytes, self._limits.all_waiting_bytes
        if self._bytes[tenant] + size > most:
            raise Refused(
                429,
                f"requests to your runs that wait have {self._bytes[tenant]:,} bytes, and {most:,} "
                "may be; ask again when some are done",
            )
        if self._bytes.total() + size > most_of_all:
            raise Refused(
                429,
                f"requests to the runs of all tenants that wait have {self._bytes.total():,} bytes, "
                f"and {most_of_all:,} may be; ask again when some are done",
            )

    @contextmanager
    def of(self, tenant: str, size: int) -> Iterator[None]:
        """Count `size` more bytes of a tenant as waiting, while the context is open."""
        self._bytes[tenant] += size
        try:
            yield
        finally:
            self._bytes[tenant] -= size
            self._bytes += Counter[str]()  # forgets tenants without bytes


def training_bytes(limits: Limits, model: Model, tenants: int) -> int:
    """Return how many bytes the adapters that one of `tenants` tenants trains may take: an equal
    share of what the limits and the machine's memory allow for all tenants."""
    memory, _ = memory_limit(model.ops.device)
    return min(limits.adapter_bytes, memory // _MEMORY_PART) // tenants
