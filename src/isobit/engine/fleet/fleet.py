"""`Fleet`: samples groups on engines in separate processes; the completions are those of one
engine, bit for bit.

A completion is a function of weights, prompt, settings and ids (`engine/engine.py`), so it does not
matter which engine samples a group, when, together with what, or twice (tests/fleet/test_fleet.py).
Engines pull: each holds some groups, and gets another when one is finished. An engine that has
nothing left samples a group that another has not finished, and the first result counts. A dead
engine's groups go back to the others. Left out: when batches are sampled
(`training/rollouts/asynchronous.py`).
"""

import time
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from threading import Lock
from typing import Any

from isobit.engine.engine import Engine, OnGroup
from isobit.engine.fleet import wire
from isobit.engine.fleet.cluster import Cluster
from isobit.engine.fleet.engines import EngineActor
from isobit.engine.fleet.settings import FleetSettings
from isobit.engine.fleet.weight_bytes import weight_bytes
from isobit.engine.prompts import Prompt, check_ids, encode
from isobit.engine.sequences import Stats
from isobit.engine.types import Completion, EngineSize, Sampling
from isobit.errors import RunFailed, listed

_WAIT_S = 0.2  # for a reply, before looking for engines that came or went
_LOOK_S = 1.0  # the most that a look at them takes


@dataclass(eq=False)
class Batch:
    """Groups on their way, by index: the `requests`, and the completions of those that are `done`.
    An engine holds at most `room` completions at a time, or one group."""

    number: int
    requests: list[dict[str, Any]]
    room: int
    done: dict[int, list[Completion]] = field(default_factory=dict)
    stats: Stats = field(default_factory=Stats)
    _free: list[int] = field(default_factory=list)  # a heap, of which some may be done by now
    _seen: int = 0
    _held: set[int] = field(default_factory=set)

    def held_now(self, held: Collection[int]) -> None:
        """Record what engines hold: new requests are free, and so are those that an engine held
        that is gone."""
        for index in (*range(self._seen, len(self.requests)), *self._held.difference(held)):
            heappush(self._free, index)
        self._seen, self._held = len(self.requests), set(held)

    def free(self) -> int | None:
        """Return the first group that is neither done nor held, or None."""
        while self._free and self._free[0] in self.done:
            heappop(self._free)
        return self._free[0] if self._free else None

    def take(self, index: int) -> int:
        """Mark the first free group as held by an engine, and return it."""
        heappop(self._free)
        self._held.add(index)
        return index

    def completions(self, indices: Iterable[int]) -> int:
        """Count the completions of these groups."""
        return sum(self.requests[index]["sampling"]["n"] for index in indices)


class Fleet:
    """A fleet of engines like `like`, the learner's. `generate` takes the arguments of the
    engine's; `stats` are of the last call. Call `send` before `generate` whenever the weights have
    changed. Only `add` and `remove` may be called while another thread generates."""

    def __init__(
        self,
        settings: FleetSettings,
        like: Engine,
        sequences: int,
        max_new_tokens: int,
        size: EngineSize,
        check_memory: bool = True,
        note: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.settings, self.model, self.note = settings, like.model, note
        self._description = wire.describe(like, sequences, max_new_tokens, size, check_memory)
        self._facts = wire.facts(like.model)
        self._most_sequences = size.max_sequences
        self._cluster = Cluster(settings, like.model.ops.device)
        self._ray = self._cluster.ray
        self._finalize = weakref.finalize(
            self, self._cluster.close
        )  # where a run fails before it begins
        self._lock = Lock()
        self._engines: list[EngineActor] = []
        self._started = 0
        self._weights: wire.Weights | None = None
        self._reason = "none was started"
        self._stopped = False
        self._last, self._silence = Batch(-1, [], 1), _Silence()
        for _ in range(settings.engines):
            self.add()

    def add(self) -> int:
        """Start one more engine, which takes part once it has opened; return its number."""
        with self._lock:
            number, self._started = self._started, self._started + 1
            engine = EngineActor.start(
                self._ray, number, self._description, self._cluster.cpus, self._cluster.gpus
            )
            self._engines.append(engine)
        return number

    def remove(self, number: int) -> None:
        """End an engine; its groups go to other engines."""
        with self._lock:
            for engine in [engine for engine in self._engines if engine.number == number]:
                self._engines.remove(engine)
                engine.kill()
                self._reason = f"engine {number} was removed"

    @property
    def numbers(self) -> list[int]:
        """The numbers of the engines that take part, or will."""
        return [engine.number for engine in self._engines]

    def send(self) -> None:
        """Put the present weights into Ray's object store, where engines fetch them when they have
        to."""
        transformer = self.model.transformer
        version = self.model.weights_version
        transformer.check_scales()
        if self._weights is not None and self._weights.version == version:
            return
        arrays = {name: buffer.numpy() for name, buffer in weight_bytes(transformer).items()}
        digests = {name: wire.digest(array) for name, array in arrays.items()}
        references = {name: self._ray.put(array) for name, array in arrays.items()}
        self._weights = wire.Weights(
            version, digests, wire.scales_to_plain(transformer.kv_scales), references
        )

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        prompt_ids: Sequence[int] | None = None,
        on_group: OnGroup | None = None,
        note: Callable[[str], None] | None = None,
    ) -> list[list[Completion]]:
        """Sample completions as `Engine.generate` does, with the weights that were sent last.
        `note` is called with a line about each engine that comes or goes. Raises RunFailed when no
        engine is left, or none has answered for `fleet.deadline_s`."""
        assert self._weights is not None, "weights are sent before"
        config = self.model.config
        token_ids = encode(prompts, self.model.tokenizer, config.vocab_size)
        named = zip(token_ids, check_ids(prompt_ids, len(token_ids)))
        requests = [
            wire.request(index, ids, prompt_id, sampling)
            for index, (ids, prompt_id) in enumerate(named)
        ]
        batch = self.begin(len(requests), sampling.n, note)
        batch.requests += requests
        batch.stats.prompt_tokens = sum(map(len, token_ids))
        while len(batch.done) < len(requests):
            for index in self.advance(batch):
                if on_group is not None:
                    on_group(index, batch.done[index])
        return [batch.done[index] for index in range(len(requests))]

    def begin(
        self, groups: int, completions: int, note: Callable[[str], None] | None = None
    ) -> Batch:
        """Begin a batch of about `groups` groups of about `completions` completions each, whose
        requests are added to it later. Only the batch that was begun last counts."""
        assert self._weights is not None, "weights are sent before"
        self.note, self._silence = note or self.note, _Silence()
        with self._lock:
            for engine in self._engines:
                engine.open = []  # what is still sampled for the second time goes with this batch
        room = self._room(groups, completions) * completions
        batch = self._last = Batch(self._last.number + 1, [], room)
        return batch

    def advance(self, batch: Batch) -> list[int]:
        """Return the groups that are finished next; none, if that takes a while. Raises as
        `generate` does."""
        with self._lock:
            engines = list(self._engines)
        self._ask(engines, batch)
        finished = self._replies(engines, batch)
        self._require_engines(self._silence.after(sum(engine.replies for engine in engines)))
        return finished

    @property
    def stats(self) -> Stats:
        """The counts of the last call, added up over engines: preemptions, tokens of prompts,
        cached ones, clamped values."""
        return self._last.stats

    def stop(self) -> None:
        """Make a call of `generate` in another thread end with an error."""
        self._stopped = True

    def close(self) -> None:
        """End all engines, and Ray if it was started here."""
        self.stop()
        with self._lock:
            for engine in self._engines:
                engine.kill()
            self._engines.clear()
        self._finalize()

    def _room(self, groups: int, completions: int) -> int:
        """Return the number of groups that an engine holds at a time: half of its share, so that
        fast engines get more of the rest, within its `engine.max_sequences`."""
        share = -(-groups // (2 * max(len(self._engines), 1)))
        return max(1, min(share, self._most_sequences // completions))

    def _ask(self, engines: Sequence[EngineActor], batch: Batch) -> None:
        """Give each engine that is ready its next work: new groups within its room, and which of
        its groups are done elsewhere."""
        assert self._weights is not None
        held = Counter(index for engine in engines for index in engine.open)
        batch.held_now(held)
        for engine in engines:
            engine.go_on(self._weights)
            if not engine.ready(self._weights):
                continue
            # another engine was faster with these
            drop = [index for index in engine.open if index in batch.done]
            remaining = [index for index in engine.open if index not in batch.done]
            new, held_here = list[int](), batch.completions(remaining)
            while (index := batch.free()) is not None:
                if held_here and held_here + batch.completions([index]) > batch.room:
                    break
                new.append(batch.take(index))
                held_here += batch.completions(new[-1:])
            # nothing is left: help with a group that one other engine has
            if not remaining and not new:
                new = [
                    index for index, count in held.items() if count == 1 and index not in batch.done
                ][:1]
            held.update(new)
            engine.open = remaining + new
            if engine.open or drop:
                engine.advance(
                    batch.number,
                    self._weights.version,
                    drop,
                    [batch.requests[index] for index in new],
                )

    def _replies(self, engines: Sequence[EngineActor], batch: Batch) -> list[int]:
        """Return the groups that are finished, once there is any reply; note the engines that come
        and go."""
        engine_of = {reference: engine for engine in engines for reference in engine.calls}
        if not engine_of:
            time.sleep(_WAIT_S)
            return []
        self._ray.wait(list(engine_of), timeout=_WAIT_S)
        ready, _ = self._ray.wait(list(engine_of), num_returns=len(engine_of), timeout=0)
        finished = list[int]()
        for reference in ready:
            engine, errors = engine_of[reference], self._ray.exceptions
            kind = engine.calls.pop(reference, None)
            try:
                reply = wire.from_bytes(self._ray.get(reference))
            except (errors.ActorUnavailableError, errors.OutOfMemoryError):
                if engine.opened:
                    self.note(f"{engine} died; its groups go to others until it is back")
                engine.restarting()
            except errors.RayError as error:
                self._lost(engine, _last_line(error))
            else:
                engine.replies += 1
                if kind is not None:
                    finished += self._take(engine, kind, reply, batch)
        return finished

    def _take(
        self, engine: EngineActor, kind: str, reply: dict[str, Any], batch: Batch
    ) -> list[int]:
        """Handle one reply of an engine, and return the groups that it finishes."""
        if "refused" in reply:
            raise RunFailed(f"{engine}: {reply['refused']}")
        if "error" in reply:
            self._lost(engine, reply["error"])
        elif kind == "open":
            engine.host = f"{reply['host']} (process {reply['pid']})"
            facts = reply["facts"]
            differing = [
                f"{name} {facts.get(name)}, not {v}"
                for name, v in self._facts.items()
                if facts.get(name) != v
            ]
            if differing:
                self._lost(
                    engine,
                    f"it might compute other bits than the learner: it has {', '.join(differing)}",
                )
            else:
                engine.opened = True
        elif kind == "receive":
            engine.version = reply["version"]
        elif reply["batch"] == batch.number:
            return self._finished(engine, reply, batch)
        return []

    def _finished(self, engine: EngineActor, reply: dict[str, Any], batch: Batch) -> list[int]:
        for name, count in reply["counts"].items():
            setattr(batch.stats, name, getattr(batch.stats, name) + count)
        groups = {int(index): group for index, group in reply["done"].items()}
        engine.open = [index for index in engine.open if index not in groups]
        new = [index for index in groups if index not in batch.done]
        for index in new:
            batch.done[index] = [wire.completion_of(values) for values in groups[index]]
        return new

    def _lost(self, engine: EngineActor, reason: str) -> None:
        """Remove an engine that is gone for good."""
        with self._lock:
            if engine in self._engines:
                self._engines.remove(engine)
                engine.kill()
                self._reason = f"{engine}: {reason}"
        engine.restarting()
        self.note(f"{engine} is lost: {reason}")

    def _require_engines(self, silence: float) -> None:
        """Raise RunFailed if the fleet is closed, has no engine, or none has answered for too
        long."""
        if self._stopped:
            raise RunFailed("the fleet is closed")
        if not self._engines:
            raise RunFailed(f"fleet: no engine is left; the last one was {self._reason}")
        if silence <= self.settings.deadline_s:
            return
        problem = (
            f"fleet: none of {len(self._engines)} engines has answered for "
            f"{self.settings.deadline_s:g} s"
        )
        silent = [str(engine) for engine in self._engines if engine.opened]
        if silent:
            raise RunFailed(f"{problem} (fleet.deadline_s): {listed(silent)}")
        free = self._ray.available_resources()
        room = ", ".join(f"{free.get(kind, 0):g} {kind}s" for kind in ("CPU", "GPU"))
        raise RunFailed(f"{problem} (fleet.deadline_s), nor begun; the cluster has {room} free")


class _Silence:
    """The seconds since engines last answered, without those in which this process itself was
    stopped."""

    def __init__(self) -> None:
        self._replies, self._seconds, self._looked = -1, 0.0, time.monotonic()

    def after(self, replies: int) -> float:
        """Return the seconds of silence; `replies`: the number of answers so far."""
        now = time.monotonic()
        self._seconds += min(now - self._looked, _LOOK_S)
        self._looked = now
        if replies != self._replies:
            self._replies, self._seconds = replies, 0.0
        return self._seconds


def _last_line(error: BaseException) -> str:
    """Return the last line of an error, without the trace of another process."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
