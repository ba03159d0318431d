"""Scoring: reward functions over completions, in worker processes, with every failure traced to its sample.

A batch is cut into chunks of `chunk_size` samples, the same for any number of workers; one call is one function on
one chunk, under the deadline. A reward is a number or None (unscored, never 0). The total of a sample is the sum of
weight times reward over the functions, and None as soon as one function of non-zero weight gave None. (TRL leaves a
None out of its sum; here a sample is scored by all functions or not at all.)

A call that raises, hangs, kills its process or returns a wrong length is repeated on its parts until the guilty
samples are known: on single samples where that is cheap, by bisection where it costs a deadline or a process, of
which a batch spends at most MAX_DEATHS. What follows is `on_error`: `stop` raises RunFailed with function and sample,
`skip` leaves the sample unscored. Left out: isolation from files and network; the functions are the user's own.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isobit.errors import IsobitError, RunFailed
from isobit.tasks.data import Prompt, did_you_mean
from isobit.tasks.functions import check_reference
from isobit.tasks.process import Death, Reply, WorkerProcess, exchange
from isobit.tasks.task import RewardSpec

MAX_DEATHS = 16
EXCERPT_CHARACTERS = 60


@dataclass(frozen=True)
class Reward:
    """The rewards of one sample: the weighted sum, each function's own, and what went wrong (None: nothing)."""

    total: float | None
    by_function: dict[str, float | None]
    error: str | None = None


@dataclass(frozen=True)
class _Failure:
    """Why a call gave no rewards; `deadly` if it cost its process, `malformed` if it returned the wrong thing."""

    text: str
    deadly: bool = False
    malformed: bool = False


class RewardPool:
    """Reward functions in worker processes, which live from `start` (or the first `score`) to `close`."""

    def __init__(
        self,
        specs: Sequence[RewardSpec],
        *,
        deadline_s: float = 30.0,
        num_workers: int = 1,
        on_error: str = "stop",
        chunk_size: int = 64,
        log_dir: Path | None = None,
        environment: Sequence[str] = (),
    ) -> None:
        """Raises IsobitError for functions that are not there or not told apart.

        `deadline_s` is for one call. `log_dir` keeps what the functions print, as reward-worker-<i>.log; otherwise it
        is dropped, but for the last line before a failure. `environment` names variables that the functions get
        besides the usual ones (PATH, HOME and the like).
        """
        _check_specs(specs)
        assert on_error in ("stop", "skip")
        self.specs = tuple(specs)
        self._deadline_s = deadline_s
        self._num_workers = num_workers
        self._stop = on_error == "stop"
        self._chunk_size = chunk_size
        self._log_dir = log_dir
        self._environment = tuple(environment)
        self._workers: list[WorkerProcess] = []
        self._required: list[tuple[str, ...]] = []
        self._wants_tokens = False
        self.trainer_state: dict[str, float] | None = None  # global_step, max_steps, epoch, for functions that ask

    def __enter__(self) -> "RewardPool":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def start(self) -> None:
        """Start the workers and import the functions. Raises IsobitError, in one line, if one cannot be used."""
        if self._workers or not self.specs:
            return
        references = [spec.function for spec in self.specs]
        try:
            for i in range(self._num_workers):
                log = self._log(i)
                self._workers.append(WorkerProcess(references, log, self._environment))
            loaded = [worker.loaded() for worker in self._workers]
        except BaseException:
            self.close()
            raise
        self._required = [tuple(signature["required"]) for signature in loaded[0]]
        self._wants_tokens = any("completion_ids" in signature["names"] for signature in loaded[0])

    def check_columns(self, columns: Iterable[str]) -> None:
        """Raise IsobitError if a function cannot do without a column that the data does not have."""
        self.start()
        known = list(columns)
        for spec, required in zip(self.specs, self._required):
            for name in required:
                if name not in known:
                    hint = did_you_mean(name, known) if known else "the data has none but the prompt"
                    raise IsobitError(f"reward function {spec.function}: the data has no column {name!r}; {hint}")

    def score(
        self,
        prompts: Sequence[Prompt],
        completions: Sequence[str],
        columns: Sequence[Mapping[str, Any]],
        completion_ids: Sequence[Sequence[int]] | None = None,
    ) -> list[Reward]:
        """Score each completion; `columns[i]` is the row that it belongs to, with the same columns in every row.

        Functions get columns as lists, and the completion of a chat prompt as TRL gives it, [{"role": "assistant",
        "content": text}]. Raises RunFailed for the first failure under `stop`.
        """
        assert len(prompts) == len(completions) == len(columns)
        if not prompts:
            return []
        if not self.specs:
            return [Reward(0.0, {}) for _ in prompts]
        self.check_columns(columns[0])
        arguments: dict[str, list[Any]] = {name: [row[name] for row in columns] for name in columns[0]}
        arguments["prompts"] = list(prompts)
        arguments["completions"] = [
            text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
            for prompt, text in zip(prompts, completions)
        ]
        if self._wants_tokens and completion_ids is not None:
            arguments["completion_ids"] = [list(ids) for ids in completion_ids]
        if self.trainer_state is not None:
            arguments["trainer_state"] = [self.trainer_state for _ in prompts]
        scoring = _Scoring(self.specs, self._workers, self._deadline_s, self._stop, arguments)
        scoring.run(self._chunk_size)
        return [self._reward(scoring, i) for i in range(len(prompts))]

    def close(self) -> None:
        """Kill the workers and everything that they started. May be called again."""
        for worker in self._workers:
            worker.close()
        self._workers = []

    def _log(self, worker: int) -> Path | None:
        if self._log_dir is None:
            return None
        self._log_dir.mkdir(parents=True, exist_ok=True)
        return self._log_dir / f"reward-worker-{worker}.log"

    def _reward(self, scoring: "_Scoring", sample: int) -> Reward:
        by_function = {spec.label: values[sample] for spec, values in zip(self.specs, scoring.values)}
        problems = [problems[sample] for problems in scoring.problems if sample in problems]
        total: float | None = 0.0
        for spec in self.specs:
            value = by_function[spec.label]
            if spec.weight != 0:
                total = None if total is None or value is None else total + spec.weight * value
        return Reward(total, by_function, problems[0] if problems else None)


class _Scoring:
    """One batch on its way: values and problems (messages) of each function by sample, and the processes spent."""

    def __init__(
        self,
        functions: Sequence[RewardSpec],
        workers: Sequence[WorkerProcess],
        deadline_s: float,
        stop: bool,
        arguments: Mapping[str, Sequence[Any]],
    ) -> None:
        self.functions, self.workers, self.deadline_s, self.stop = functions, workers, deadline_s, stop
        self.arguments = arguments
        self.values: list[dict[int, float | None]] = [{} for _ in functions]
        self.problems: list[dict[int, str]] = [{} for _ in functions]
        self.deaths = 0

    def run(self, chunk_size: int) -> None:
        """Score everything. Raises RunFailed at the first problem, in the order of samples, if that is to stop."""
        count = len(self.arguments["prompts"])
        chunks = [range(start, min(start + chunk_size, count)) for start in range(0, count, chunk_size)]
        calls = [(function, chunk) for chunk in chunks for function in range(len(self.functions))]
        bodies = {chunk: self.body(chunk) for chunk in chunks}
        replies = self.exchange([_request(function, bodies[chunk]) for function, chunk in calls], self.workers)
        for (function, chunk), reply in zip(calls, replies):
            self.settle(function, chunk, reply)

    def settle(self, function: int, part: range, reply: Reply) -> None:
        """Record the values of a call, or find the samples of the part that made it fail."""
        failure = _failure(reply)
        if failure is None:
            assert isinstance(reply, dict)
            self.values[function].update(zip(part, reply["values"]))
            for i, text in reply["wrong"].items():
                self.record(function, part[int(i)], text)
        elif len(part) == 1:
            self.record(function, part[0], failure.text)
        else:
            before = len(self.problems[function])
            for smaller in _parts(part, failure.deadly):
                self.examine(function, smaller)
            if len(self.problems[function]) == before:
                self.unreproduced(function, part, failure)

    def examine(self, function: int, part: range) -> None:
        """Call the function on a part of a chunk that failed, if there are still processes to spend on it."""
        if self.deaths >= MAX_DEATHS:
            for i in part:
                self.record(function, i, f"not examined: {MAX_DEATHS} processes died or hung in this batch already")
            return
        reply = self.exchange([_request(function, self.body(part))], self.workers[:1])[0]
        self.deaths += isinstance(reply, Death)
        self.settle(function, part, reply)

    def record(self, function: int, sample: int, text: str) -> None:
        """Sample and function have a problem. Raises RunFailed with it if that is to stop."""
        excerpt = _excerpt(self.arguments["prompts"][sample])
        message = f"reward function {self.functions[function].function}, sample {sample} (prompt {excerpt}): {text}"
        if self.stop:
            raise RunFailed(message)
        self.values[function][sample] = None
        self.problems[function][sample] = message

    def unreproduced(self, function: int, part: range, failure: _Failure) -> None:
        """A call failed on a part, but on none of its samples alone: their values count, unless it cannot count."""
        hint = "; raise rewards.deadline_s if the function is slow" if failure.deadly else ""
        message = (
            f"reward function {self.functions[function].function}, samples {part[0]} to {part[-1]} together, though "
            f"none of them alone: {failure.text}{hint}"
        )
        if self.stop:
            raise RunFailed(message)
        if failure.malformed:
            self.values[function].update(dict.fromkeys(part, None))
            self.problems[function].update(dict.fromkeys(part, message))

    def body(self, part: range) -> str:
        """The part's arguments, as the end of a request."""
        arguments = {name: values[part.start : part.stop] for name, values in self.arguments.items()}
        return f'"count":{len(part)},"arguments":{json.dumps(arguments)}}}\n'

    def exchange(self, requests: Sequence[bytes], workers: Sequence[WorkerProcess]) -> list[Reply]:
        """Replies to the requests. Raises RunFailed if a worker that died cannot be replaced."""
        try:
            return exchange(workers, requests, self.deadline_s)
        except IsobitError as error:
            raise RunFailed(str(error)) from None


def _request(function: int, body: str) -> bytes:
    return f'{{"function":{function},{body}'.encode()


def _failure(reply: Reply) -> _Failure | None:
    if isinstance(reply, Death):
        return _Failure(reply.text, deadly=True)
    if "malformed" in reply:
        return _Failure(reply["malformed"], malformed=True)
    return _Failure(reply["raised"]) if "raised" in reply else None


def _parts(part: range, halves: bool) -> list[range]:
    if not halves:
        return [range(i, i + 1) for i in part]
    middle = part.start + len(part) // 2
    return [range(part.start, middle), range(middle, part.stop)]


def _excerpt(prompt: Prompt) -> str:
    text = prompt if isinstance(prompt, str) else prompt[-1]["content"]
    return repr(text if len(text) <= EXCERPT_CHARACTERS else text[:EXCERPT_CHARACTERS] + "...")


def _check_specs(functions: Sequence[RewardSpec]) -> None:
    for spec in functions:
        check_reference(spec.function)
        if not math.isfinite(spec.weight):
            raise IsobitError(f"reward function {spec.function}: its weight must be finite, got {spec.weight}")
    labels = [spec.label for spec in functions]
    twice = [label for label in labels if labels.count(label) > 1]
    if twice:
        raise IsobitError(f"two reward functions are called {twice[0]!r}; tell them apart by rewards.functions.name")
