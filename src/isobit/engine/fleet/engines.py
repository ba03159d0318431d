"""One engine of a fleet as the run sees it: an actor of Ray, what it was asked, and what it holds.

Ray starts the process of an engine again when it dies, a few times; until it answers, calls fail.
Left out: which engine gets which group (`fleet.py`).
"""

import time
from dataclasses import dataclass, field
from typing import Any

from isobit.engine.fleet import wire
from isobit.engine.fleet.worker import Worker

_RESTARTS = 3
_RETRY_S = 0.2


@dataclass(eq=False)
class EngineActor:
    """An engine in another process, as the fleet sees it. `version`: of the weights that it has,
    None before any. `open`: the groups of the present batch that it samples, the oldest first.
    `calls`: what Ray has yet to answer, to the kind of call. `replies`: how often it has
    answered."""

    ray: Any
    number: int
    actor: Any
    host: str = ""
    version: int | None = None
    open: list[int] = field(default_factory=list)
    calls: dict[Any, str] = field(default_factory=dict)
    opened: bool = False
    again: float = 0.0
    replies: int = 0

    @staticmethod
    def start(ray: Any, number: int, description: bytes, cpus: float, gpus: float) -> "EngineActor":
        """Start an engine's process; returns at once."""
        kind = ray.remote(
            num_cpus=cpus,
            num_gpus=gpus,
            max_restarts=_RESTARTS,
            max_task_retries=0,
            concurrency_groups={"weights": 1},
        )(Worker)
        return EngineActor(ray, number, kind.remote(description))

    def __str__(self) -> str:
        return f"engine {self.number}" + (f" on {self.host}" if self.host else "")

    def go_on(self, weights: wire.Weights) -> None:
        """Ask for the next thing that it needs before it can sample: to be opened, or the
        weights."""
        kinds = self.calls.values()
        if not self.opened:
            if "open" not in kinds and time.monotonic() >= self.again:
                self._call("open")
        elif self.version != weights.version and "receive" not in kinds:
            self._call("receive", weights.manifest(), dict(weights.references))

    def ready(self, weights: wire.Weights) -> bool:
        """Return whether the engine can be given groups now."""
        return self.opened and self.version == weights.version and not self.calls

    def advance(
        self, batch: int, version: int, drop: list[int], groups: list[dict[str, Any]]
    ) -> None:
        """Send the engine its new groups and those to drop, and let it go on sampling."""
        work = {"batch": batch, "version": version, "drop": drop, "groups": groups}
        self._call("advance", wire.to_bytes(work))

    def restarting(self) -> None:
        """Reset the state after the process died; Ray starts another, without weights."""
        self.opened, self.version, self.open, self.calls = False, None, [], {}
        self.again = time.monotonic() + _RETRY_S

    def kill(self) -> None:
        """End the engine's process for good."""
        self.ray.kill(self.actor)

    def _call(self, kind: str, *arguments: Any) -> None:
        method = getattr(self.actor, kind)
        if kind == "receive":  # beside the sampling of an older version
            method = method.options(concurrency_group="weights")
        self.calls[method.remote(*arguments)] = kind
