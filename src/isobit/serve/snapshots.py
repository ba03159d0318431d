"""The adapters that a server has, by the names that its clients know.

An adapter is served as a *snapshot*: weights that never change, under a name in the model that is
used once (`math@2`). A new version of an adapter is another snapshot, so an open request computes
to its end with the weights that it began with. A snapshot that is replaced or removed leaves the
model when it has no holders any more. Where the weights of the model itself are trained, earlier
ones are not copied: a snapshot of them ends with the next change. Only the device thread changes
snapshots.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from isobit.errors import IsobitError, listed
from isobit.model import Model
from isobit.model.adapters.low_rank import Adapter


@dataclass(eq=False)
class Snapshot:
    """Weights that are served. `served`: their name in the model, None: the base's. `holders`: the
    number of open requests, plus 1 while a name means this snapshot. `bytes`, `tenant`: of a
    snapshot with a key. `weights`: of the base, the name of these weights (`Snapshots.present`)."""

    served: str | None
    version: int
    holders: int = 0
    bytes: int = 0
    tenant: str = ""
    weights: str = ""


class Snapshots:
    """The snapshots of a model that serves adapters (`Model.serving`)."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._named: dict[str, Snapshot] = {}
        self._versions: dict[str, int] = {}
        self._keyed: dict[str, Snapshot] = {}
        self.most_bytes: float = math.inf
        """The most bytes of all snapshots with a key, their factors in FP32; each of the `tenants`
        has an equal share."""
        self.tenants = 1
        self._opened = count()
        self.present = ""
        """The name of the present weights of the model itself, if they are trained: other weights
        never have it, also where these are saved and loaded again; empty: the weights as they were
        read."""

    @property
    def names(self) -> tuple[str, ...]:
        """The names that clients may ask for besides the base."""
        return tuple(self._named)

    def put(self, name: str, adapter: str | Path | Adapter) -> int:
        """Serve an adapter by a name, in the place of the adapter that had the name; return its
        version, from 0. Raises IsobitError as `Model.add_adapter`; the name then means what it
        meant."""
        version = self._versions.get(name, -1) + 1
        made = Snapshot(f"{name}@{version}", version, holders=1)
        self._model.add_adapter(f"{name}@{version}", adapter)
        self._versions[name] = version
        replaced = self._named.get(name)
        self._named[name] = made
        if replaced is not None:
            self.release(replaced)
        return version

    def open(
        self, key: str, adapter: Callable[[], str | Path | Adapter], tenant: str = ""
    ) -> Snapshot:
        """Hold weights for which clients of a tenant do not ask by a name, until they are released:
        those of this `key`, which never means others. They are read once for all holders at the
        same time. Raises IsobitError as `put`, and where no more fit."""
        snapshot = self._keyed.get(key)
        if snapshot is None:
            read = self._model.read_adapter(adapter())
            size = 4 * sum(map(math.prod, read.shapes.values()))
            held = sum(kept.bytes for kept in self._keyed.values() if kept.tenant == tenant)
            if size + held > (share := self.most_bytes / self.tenants):
                raise IsobitError(
                    f"weights that you sample from would have more than {share:,.0f} bytes together; "
                    "end sessions whose sampling clients are not needed"
                )
            snapshot = Snapshot(f"{key}@{next(self._opened)}", 0, bytes=size, tenant=tenant)
            self._model.add_adapter(snapshot.served or "", read)
            self._keyed[key] = snapshot
        snapshot.holders += 1
        return snapshot

    def remove(self, name: str) -> None:
        """Remove a name, which means nothing from now on. Raises IsobitError for an unknown one."""
        self._find(name)
        self.release(self._named.pop(name))

    def hold(self, name: str | Snapshot | None) -> Snapshot:
        """Hold the snapshot with which a request by a name (None: the base), or by a snapshot that
        has holders, computes, until it is released; return it. Raises IsobitError for an unknown
        name, a snapshot without holders, and one of weights that the model itself had before."""
        if isinstance(name, Snapshot):
            self.check(name)
            snapshot = name
        elif name is None:
            snapshot = Snapshot(None, self._model.weights_version, weights=self.present)
        else:
            snapshot = self._find(name)
        snapshot.holders += 1
        return snapshot

    def check(self, snapshot: Snapshot) -> None:
        """Raise IsobitError unless requests can compute with a snapshot."""
        if snapshot.served is not None and not snapshot.holders:
            raise IsobitError(f"the snapshot {snapshot.served!r} was dropped: nobody held it")
        if snapshot.served is None and snapshot.weights != self.present:
            raise IsobitError(
                "these weights are not in memory: this server trains all weights of the model, and "
                "only the present ones are sampled from; make a sampling client after each step, "
                "or load saved weights first"
            )

    def release(self, snapshot: Snapshot) -> None:
        """Release a snapshot for one holder; with the last one it leaves the model."""
        snapshot.holders -= 1
        if not snapshot.holders and snapshot.served is not None:
            self._model.remove_adapter(snapshot.served)
            self._keyed.pop(snapshot.served.rpartition("@")[0], None)

    def _find(self, name: str) -> Snapshot:
        if name not in self._named:
            raise IsobitError(
                f"no adapter {name!r} is served; there are {listed(self.names) or 'none'}"
            )
        return self._named[name]
