"""An engine in a separate process, as Ray calls it: takes weights, samples groups, gives plain
bytes back.

The working weights are those of one version; those of the next arrive while groups of the present
one are still sampled, and are taken when a batch of theirs begins. An error of isobit's is a value
of the reply, so that the run can name the engine; any other ends the call. Left out: which groups
it gets (`fleet.py`).
"""

import os
import platform
import time
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from isobit.engine.engine import Engine
from isobit.engine.fleet import wire
from isobit.engine.fleet.cluster import import_ray
from isobit.engine.fleet.weight_bytes import take_weights
from isobit.engine.groups import OpenGroups
from isobit.errors import IsobitError, RunFailed

_SLICE_S = 0.5  # after so long a call returns without a finished group, to hear what has changed


class Worker:
    """The process of an engine. `open` first; then `receive` a version before groups of it are
    given to `advance`."""

    def __init__(self, description: bytes) -> None:
        self._description = description
        self._engine: Engine
        self._arrived: dict[int, tuple[Mapping[str, Tensor], Any]] = {}
        self._batch = -1
        self._open: OpenGroups

    def open(self) -> bytes:
        """Make the engine. Return by what it is computed, and where it runs."""
        self._engine = wire.described_engine(self._description)
        self._open = OpenGroups(self._engine)
        return wire.to_bytes(
            {"facts": wire.facts(self._engine.model), "host": platform.node(), "pid": os.getpid()}
        )

    def receive(self, manifest: bytes, references: Mapping[str, Any]) -> bytes:
        """Fetch the weights of a version, and compare each buffer with its digest; nothing is
        overwritten yet."""
        ray = import_ray()
        message = wire.from_bytes(manifest)
        version, buffers = message["version"], dict[str, Tensor]()
        try:
            for name, reference in references.items():
                array = ray.get(reference)
                wire.check_digest(name, array, message["digests"][name], version)
                with (
                    warnings.catch_warnings()
                ):  # the object store's memory is read-only, and is only read
                    warnings.simplefilter("ignore", UserWarning)
                    buffers[name] = torch.from_numpy(array)
        except IsobitError as error:
            return wire.to_bytes({"error": str(error)})
        self._arrived = {version: (buffers, message["scales"])}
        return wire.to_bytes({"version": version})

    def advance(self, work: bytes) -> bytes:
        """Take what is new, drop what others have sampled, and sample until a group is finished:
        `done` are the groups by index, each a list of completions as their fields. `error`: this
        engine is broken; `refused`: any would refuse."""
        message = wire.from_bytes(work)
        try:
            self._begin(message["batch"], message["version"])
            self._open.drop(set(message["drop"]))
            for new in message["groups"]:
                request = self._engine.submit(
                    new["prompt"],
                    wire.sampling_of(new["sampling"]),
                    new["prompt_id"],
                    new["sample_index"],
                )
                self._open.add(new["index"], request)
            earlier = self._counts()
            done = self._run()
            if done:
                self._engine.model.transformer.checksums.compare()
        except IsobitError as error:
            return wire.to_bytes(
                {"error" if isinstance(error, RunFailed) else "refused": str(error)}
            )
        counts = {name: count - earlier[name] for name, count in self._counts().items()}
        return wire.to_bytes({"batch": self._batch, "done": done, "counts": counts})

    def _begin(self, batch: int, version: int) -> None:
        """Begin work on a batch: drop the groups of older ones, and load the weights of
        `version`."""
        if batch == self._batch:
            return
        self._open.drop(list(self._open.places))
        self._batch = batch
        transformer = self._engine.model.transformer
        if version in self._arrived:
            buffers, scales = self._arrived.pop(version)
            take_weights(transformer, buffers, version)
            transformer.calibrate(wire.scales_from_plain(scales, version))
        assert transformer.weights_version == version

    def _counts(self) -> dict[str, int]:
        """Return the counts that `Fleet.stats` adds up."""
        stats, (clamped, written) = self._engine.stats, self._engine.clamped
        names = (
            "preemptions",
            "cached_tokens",
            "num_drafts",
            "num_draft_tokens",
            "num_accepted_tokens",
        )
        counted = {name: getattr(stats, name) for name in names}
        return counted | {"kv_clamped": clamped, "kv_written": written}

    def _run(self) -> dict[int, list[dict[str, Any]]]:
        """Compute steps until a group is finished, no group is open, or the time slice is over."""
        end, done = time.monotonic() + _SLICE_S, dict[int, list[dict[str, Any]]]()
        while self._open and not done and time.monotonic() < end:
            done = {
                index: [vars(completion) for completion in group]
                for index, group in self._open.step()
            }
        return done
