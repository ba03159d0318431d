"""Reward functions in worker processes, with a deadline for every call.

A function that raises, hangs, dies, or returns a wrong length or NaN costs its own samples their score, and nothing
else: the call is halved until the guilty samples stand alone. They are unscored, None and never 0. What that does to
a run is `on_error`: `stop` raises `RunFailed` with the function and the sample, `skip` goes on. Results do not depend
on the number of workers. Left out: isolation from the network and the file system; the functions are the user's own.
"""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import isobit
from isobit.errors import IsobitError, RunFailed
from isobit.tasks.data import Prompt
from isobit.tasks.task import RewardSpec

_START_S = 60.0  # a worker may import large libraries
_ISOLATED_HANGS = 4  # after so many hanging samples, the rest of a hanging call is given up


@dataclass(frozen=True)
class Reward:
    """The score of one sample: the weighted sum, None if a function gave none; each function's value; what went
    wrong."""

    total: float | None
    by_function: Mapping[str, float | None] = field(default_factory=dict)
    error: str | None = None


class _Failure(Exception):
    """A call that gave no usable values, in one line."""

    def __init__(self, message: str, hung: bool = False) -> None:
        super().__init__(message)
        self.hung = hung


class _Worker:
    """One process with one function; started on first use and again after it was killed."""

    def __init__(self, spec: RewardSpec, deadline_s: float) -> None:
        self.spec, self.deadline_s = spec, deadline_s
        self.process: subprocess.Popen[bytes] | None = None
        self._buffer = b""

    def start(self) -> None:
        """Raises IsobitError, in one line, if the function cannot be loaded."""
        to_worker, requests = os.pipe()
        answers, from_worker = os.pipe()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the worker)
        path = os.pathsep.join(filter(None, [str(Path(isobit.__file__).parents[1]), os.environ.get("PYTHONPATH")]))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "isobit.tasks.worker", self.spec.function, str(to_worker), str(from_worker)],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            pass_fds=(to_worker, from_worker),
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": path},
        )
        os.close(to_worker)
        os.close(from_worker)
        self._requests, self._answers, self._buffer = requests, answers, b""
        try:
            answer = self._receive(_START_S)
        except _Failure as failure:
            self.close()
            raise IsobitError(f"reward function {self.spec.function}: {failure}") from None
        if "error" in answer:
            self.close()
            raise IsobitError(f"reward function {self.spec.function}: {answer['error']}")

    def send(self, request: Mapping[str, Any]) -> None:
        if self.process is None:
            self.start()
        self._sent = time.monotonic()
        data = memoryview(json.dumps(request).encode() + b"\n")
        with contextlib.suppress(BrokenPipeError):  # a dead worker is noticed by `receive`
            while data:
                data = data[os.write(self._requests, data) :]

    def receive(self) -> list[float | None]:
        """The values of the last request. Raises _Failure; a worker that hung or died is gone."""
        try:
            answer = self._receive(self.deadline_s - (time.monotonic() - self._sent))
        except _Failure:
            self.close()
            raise
        if "error" in answer:
            raise _Failure(answer["error"])
        return answer["values"]

    def _receive(self, timeout_s: float) -> dict[str, Any]:
        end = time.monotonic() + timeout_s
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([self._answers], [], [], max(end - time.monotonic(), 0))
            if not ready:
                raise _Failure(f"gave no answer within {self.deadline_s:g} s and was killed", hung=True)
            data = os.read(self._answers, 1 << 20)
            if not data:
                raise _Failure(f"its process ended{self._last_words()}")
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        return json.loads(line)

    def _last_words(self) -> str:
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return f", saying: {lines[-1][:200]}" if lines else ""

    def close(self) -> None:
        """Kill the process and everything that it started."""
        if self.process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.process = None
        os.close(self._requests)
        os.close(self._answers)
        self._log.close()


class RewardPool:
    """All reward functions of a run. Use as a context manager, or `close` it."""

    def __init__(
        self, specs: Sequence[RewardSpec], *, deadline_s: float = 30.0, num_workers: int = 1, on_error: str = "stop"
    ) -> None:
        labels = [spec.label for spec in specs]
        if not specs:
            raise IsobitError("no reward function: give rewards.functions, or use a task that has one of its own")
        if len(set(labels)) < len(labels):
            raise IsobitError(
                f"two reward functions are called {labels[0]!r}; tell them apart with rewards.functions.name"
            )
        self.specs = list(specs)
        self.on_error = on_error
        self._workers = {spec: [_Worker(spec, deadline_s) for _ in range(num_workers)] for spec in self.specs}

    def __enter__(self) -> "RewardPool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Load every function now, so that a mistake in one is found before a run starts."""
        for workers in self._workers.values():
            workers[0].start()

    def close(self) -> None:
        for workers in self._workers.values():
            for worker in workers:
                worker.close()

    def score(
        self, prompts: Sequence[Prompt], completions: Sequence[str], columns: Sequence[Mapping[str, Any]]
    ) -> list[Reward]:
        """Score completions; `columns[i]` is the row that completion i belongs to.

        Raises RunFailed, under `on_error: stop`, naming the function and the sample.
        """
        values: list[dict[str, float | None]] = [{} for _ in completions]
        errors: list[str | None] = [None] * len(completions)
        for spec, workers in self._workers.items():
            batch = _Batch(prompts, completions, columns)
            for index, (value, error) in enumerate(_call(workers, batch)):
                values[index][spec.label] = value
                if error is not None:
                    message = (
                        f"reward function {spec.function}, sample {index} (prompt {_excerpt(prompts[index])}): {error}"
                    )
                    if self.on_error == "stop":
                        raise RunFailed(message)
                    errors[index] = message
        return [Reward(self._total(v), v, e) for v, e in zip(values, errors)]

    def _total(self, values: Mapping[str, float | None]) -> float | None:
        total = 0.0
        for spec in self.specs:
            value = values[spec.label]
            if value is None:
                if spec.weight == 0:
                    continue
                return None
            total += spec.weight * value
        return total


_Outcome = tuple[float | None, str | None]


@dataclass(frozen=True)
class _Batch:
    prompts: Sequence[Prompt]
    completions: Sequence[str]
    columns: Sequence[Mapping[str, Any]]

    def part(self, start: int, stop: int) -> "_Batch":
        return _Batch(self.prompts[start:stop], self.completions[start:stop], self.columns[start:stop])

    def request(self) -> dict[str, Any]:
        """TRL's arguments: columns as lists; a completion of a chat prompt as a list of one message."""
        completions = [
            text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
            for prompt, text in zip(self.prompts, self.completions)
        ]
        names = self.columns[0].keys() if self.columns else ()
        columns = {name: [row[name] for row in self.columns] for name in names}
        return {"prompts": list(self.prompts), "completions": completions, "columns": columns}


def _call(workers: list[_Worker], batch: _Batch) -> list[_Outcome]:
    """Every worker gets an equal share; a share that fails is searched for the samples that make it fail."""
    count = len(batch.completions)
    bounds = [count * i // len(workers) for i in range(len(workers) + 1)]
    shares = [(w, batch.part(a, b)) for w, a, b in zip(workers, bounds, bounds[1:]) if b > a]
    for worker, share in shares:
        worker.send(share.request())
    outcomes: list[_Outcome] = []
    for worker, share in shares:
        try:
            outcomes += [(value, None) for value in worker.receive()]
        except _Failure as failure:
            outcomes += _search(worker, share, failure, [_ISOLATED_HANGS])
    return outcomes


def _search(worker: _Worker, batch: _Batch, failure: _Failure, hangs_left: list[int]) -> list[_Outcome]:
    """Halve a call that failed, until the samples that fail stand alone."""
    count = len(batch.completions)
    hangs_left[0] -= failure.hung and count == 1
    if count == 1 or (failure.hung and hangs_left[0] <= 0):
        return [(None, str(failure))] * count
    outcomes: list[_Outcome] = []
    for part in (batch.part(0, count // 2), batch.part(count // 2, count)):
        try:
            worker.send(part.request())
            outcomes += [(value, None) for value in worker.receive()]
        except _Failure as again:
            outcomes += _search(worker, part, again, hangs_left)
    return outcomes


def _excerpt(prompt: Prompt) -> str:
    text = prompt if isinstance(prompt, str) else str(prompt[-1]["content"])
    return repr(text if len(text) <= 60 else text[:57] + "...")
