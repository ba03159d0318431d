"""How much of a server its tenants may have: what waits of them, and what they train. What one of
them takes makes no other be refused, as far as its own share reaches."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from isobit.engine.memory import memory_limit
from isobit.model import Model
from isobit.serve.gateway import Refused
from isobit.serve.requests import Limits

_MEMORY_PART = 2  # of the memory: one part in so many is for what trains


class Waiting:
    """The bytes, unpacked, of requests to runs that are not done. They wait on the disk; in memory
    is what one of them takes in its turn."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._bytes = Counter[str]()  # of each tenant

    def check(self, tenant: str, size: int) -> None:
        """Raise Refused where so many more bytes of a tenant, or of all, may not wait."""
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
        """So many more bytes of a tenant wait."""
        self._bytes[tenant] += size
        try:
            yield
        finally:
            self._bytes[tenant] -= size
            self._bytes += Counter[str]()  # those that have none are forgotten


def training_bytes(limits: Limits, model: Model, tenants: int) -> int:
    """Return how many bytes the adapters of one tenant, which train, may take: a share of what the
    machine has for all."""
    memory, _ = memory_limit(model.ops.device)
    return min(limits.adapter_bytes, memory // _MEMORY_PART) // tenants
