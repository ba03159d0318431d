"""Scoring: reward functions over completions, in worker processes, with every failure traced to its
sample.

What is added to a batch together (a group, or all of it) is cut into chunks of `chunk_size`
samples, the same for any number of workers; one call is one function on one chunk, under the
deadline. A reward is a number or None: the function does not apply. The total of a sample is the
sum of weight times reward over the functions that apply (as in TRL), and None, unscored and never
0, where none of them does, or one of non-zero weight failed.

A call that raises, hangs, kills its process or returns a wrong length is repeated sample by sample,
so that a guilty one costs one deadline or one process; a batch spends at most MAX_DEATHS of these.
Where none is guilty, as when a judge dropped a connection, each has its reward, and a note says so.
Else, by `on_error`, `stop` raises RunFailed with function and sample, and `skip` leaves the sample
unscored. A reward by name (`named/`) that hangs or dies does so because of a completion, not by a
mistake of the user: that sample is unscored under both. A function that is an object of this
process is called in it, when a batch is collected: it has no deadline and cannot be killed. Left
out: isolation from files and network, since users run their own functions.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from copy import deepcopy
from dataclasses import dataclass
from itertools import count as counting
from typing import Any

from isobit.data.answers import ANSWERS
from isobit.data.columns import ANY
from isobit.data.dataset import Prompt
from isobit.data.episodes import EpisodeRecord
from isobit.errors import IsobitError, RunFailed, did_you_mean
from isobit.tasks.rewards.built import built, check_rows
from isobit.tasks.rewards.failures import (
    Failure,
    Reply,
    Result,
    complete,
    excerpt_of,
    failure_of,
    result_of,
)
from isobit.tasks.rewards.functions import answer, loaded_object
from isobit.tasks.rewards.spec import RewardSpec
from isobit.tasks.workers.dispatch import Death, Dispatcher, Program, Request, Worker
from isobit.tasks.workers.output import MAX_AT_ONCE, Output
from isobit.tasks.workers.variables import check_names

MAX_DEATHS = 16
_MOMENT_S = 0.001
_THREAD = "isobit-rewards"
Said = str | EpisodeRecord
"""What a model answered: a text, or several turns with an environment."""
Call = tuple[int, range, int]
"""A function, the samples that it is called on, and the key of the reply."""


@dataclass(frozen=True)
class Reward:
    """The rewards of one sample: the weighted sum, each function's own, and what went wrong (None:
    nothing)."""

    total: float | None
    by_function: dict[str, float | None]
    error: str | None = None


class RewardPool:
    """Reward functions in worker processes, which live from `start` (or the first `score`) to
    `close`."""

    def __init__(
        self,
        specs: Sequence[RewardSpec],
        *,
        deadline_s: float = 30.0,
        num_workers: int = 1,
        on_error: str = "stop",
        chunk_size: int = 64,
        environment: Sequence[str] = (),
        objects: Mapping[str, Callable[..., Any]] | None = None,
    ) -> None:
        """Prepare the rewards of `specs`. Raises IsobitError for functions that are missing or have
        the same name.

        `deadline_s` is for one call of a function without a deadline in its spec. `environment`
        names variables that the functions get in addition to the usual ones (PATH, HOME and the
        like). Their printed lines go to `output`. `objects` are the functions whose specs name
        objects of this process; these print where this process prints.
        """
        assert on_error in ("stop", "skip")
        self._named = built(specs, deadline_s)
        self.specs = tuple(specs)
        by_index = {
            i: (objects or {}).get(spec.function) for i, spec in enumerate(specs) if spec.is_object
        }
        if missing := [specs[i].label for i, function in by_index.items() if function is None]:
            raise IsobitError(
                f"reward function {missing[0]!r} was given in Python as an object: give it "
                "again there"
            )
        self.here = {
            i: loaded_object(function, specs[i].label)
            for i, function in by_index.items()
            if function
        }
        self._places = [i for i in range(len(specs)) if i not in self.here]
        self.deadlines_s = [spec.deadline_s or deadline_s for spec in specs]
        self.chunk_sizes = [(reward and reward.chunk_size) or chunk_size for reward in self._named]
        self.stop = on_error == "stop"
        self._num_workers = num_workers
        self.output = Output()
        self.environment = tuple(environment)
        self.workers: list[Worker] = []
        self._required: list[tuple[str, ...]] = []
        self.wants_tokens = False
        self.columns: frozenset[str] = frozenset()  # names of arguments, see data/columns.py
        self._trainer_state: Mapping[str, float] | None = None  # of the batch that was begun last
        self._open: RewardBatch | None = None

    def __enter__(self) -> "RewardPool":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def start(self) -> None:
        """Start the workers and import the functions. Raises IsobitError, in one line, if one
        cannot be used."""
        if self._required or not self.specs:
            return
        references = [self.specs[i].reference for i in self._places]
        check_names(self.environment)
        program = Program(
            "isobit.tasks.rewards.worker",
            "reward function",
            f"reward function {' and '.join(map(repr, references))}",
            references,
            result_of,
            "no answer within {:g} s, killed",
            imported="imported",
            variables=self.environment,
            capacity=1,
        )
        self.workers = [Worker(program) for _ in range(self._num_workers if references else 0)]
        try:
            with closing(Dispatcher[Result](self.workers, _THREAD)) as dispatcher:
                loaded = dispatcher.load()[:1]
        except BaseException:
            self.close()
            raise
        by_index = dict(zip(self._places, loaded[0] if loaded else ()))
        by_index |= {i: function.signature for i, function in self.here.items()}
        signatures = [by_index[i] for i in range(len(self.specs))]
        self._required = [tuple(signature["required"]) for signature in signatures]
        names = [signature["names"] for signature in signatures]
        self.columns = frozenset().union(*names, *self._required)
        self.wants_tokens = "completion_ids" in self.columns
        if any(signature["takes_more"] for signature in signatures):
            self.columns |= {ANY}

    @property
    def wants_answers(self) -> bool:
        """Whether a function takes what completions say without their thoughts; the workers, which
        know it, are started."""
        self.start()
        return ANSWERS in self.columns

    def check_columns(self, columns: Iterable[str]) -> None:
        """Raise IsobitError if a function cannot do without a column that the data does not
        have."""
        self.start()
        known = list(columns)
        for spec, required in zip(self.specs, self._required):
            for name in required:
                if name not in known:
                    hint = (
                        did_you_mean(name, known) if known else "the data has none but the prompt"
                    )
                    raise IsobitError(
                        f"reward function {spec.function}: the data has no column {name!r}; {hint}"
                    )

    def check_rows(
        self, rows: Iterable[tuple[str, Mapping[str, Any]]], *, quiet: bool = False
    ) -> None:
        """Raise IsobitError for the first row, of (place, columns), that a reward by name cannot
        score, whatever the completion; where failures are skipped, say on stderr how many there
        are, unless `quiet`."""
        if self.stop or not quiet:
            check_rows(list(zip(self.specs, self._named)), rows, self.stop)

    def begin(self, count: int, trainer_state: Mapping[str, float] | None = None) -> "RewardBatch":
        """Open a batch of `count` samples, which are scored as they come. One batch at a time can
        be open. `trainer_state`: global_step, max_steps and epoch, for functions that ask."""
        assert self._open is None, "a batch is scored already"
        self.start()
        self.output.written = False
        self._trainer_state = trainer_state
        self._open = RewardBatch(self, count, trainer_state)
        return self._open

    def score(
        self,
        prompts: Sequence[Prompt],
        completions: Sequence[Said],
        columns: Sequence[Mapping[str, Any]],
        completion_ids: Sequence[Sequence[int]] | None = None,
        trainer_state: Mapping[str, float] | None = None,
    ) -> list[Reward]:
        """Score each completion; `columns[i]` is the row that it belongs to, with the same columns
        in every row.

        Functions get columns as lists, and the completion of a chat prompt as TRL gives it,
        [{"role": "assistant", "content": text}], of an episode all its messages. Raises RunFailed
        for the first failure under `stop`.
        """
        with self.begin(len(prompts), trainer_state) as batch:
            if prompts:
                batch.add(0, prompts, completions, columns, completion_ids)
            rewards = batch.collect()
        self.output.add(0, "\n".join(batch.notes).encode(), self._heading)
        return rewards

    def close(self) -> None:
        """Kill the workers and everything that they started, and drop an open batch. May be called
        again."""
        if self._open is not None:
            self._open.cancel()
        self.pass_output_on()
        for worker in self.workers:
            worker.close()
        self.workers, self._required = [], []

    def request(self, key: int, function: int, arguments: Mapping[str, Any], count: int) -> Request:
        """Return the request to call a function; workers number only the functions that they
        have."""
        call = {"function": self._places.index(function), "count": count, "arguments": arguments}
        body = json.dumps({"key": key, **call}).encode() + b"\n"
        return Request(key, body, self.deadlines_s[function], first=True, last=True)

    def pass_output_on(self) -> None:
        """Copy the workers' new printed lines to `output`; called at the end of each batch, so that
        no caller waits for it."""
        for worker in self.workers:
            self.output.add(*worker.new_output(MAX_AT_ONCE), self._heading)

    @property
    def _heading(self) -> str:
        state = self._trainer_state
        return (
            "before the first step" if state is None else f"after step {state['global_step']:.0f}"
        )

    def closed(self, batch: "RewardBatch") -> None:
        """Note that a batch has ended, and copy its printed lines to `output`."""
        if self._open is batch:
            self._open = None
            self.pass_output_on()


class RewardBatch:
    """Samples on their way to their rewards: calls begin when samples are added, while others are
    still to come.

    What is added together is cut into calls of at most `chunk_size` samples, so that no call
    depends on when it is made. Values and problems (messages) are kept for each function by sample;
    `notes` say which chunks failed as one.
    """

    def __init__(
        self, pool: RewardPool, count: int, trainer_state: Mapping[str, float] | None
    ) -> None:
        self.functions, self.stop = pool.specs, pool.stop
        self.count = count
        self.overlapped_s = 0.0
        self.arguments: dict[str, list[Any]] = {}
        self.values: list[dict[int, float | None]] = [{} for _ in self.functions]
        self.problems: list[dict[int, str]] = [{} for _ in self.functions]
        self.deaths = 0
        self.notes: list[str] = []
        self._pool, self._trainer_state = pool, trainer_state
        self._added: set[int] = set()
        self._calls: list[Call] = []
        self._keys = counting()
        self._replies: dict[int, Reply] = {}
        self._dispatcher = Dispatcher[Result](pool.workers, _THREAD)
        self._meanwhile: Callable[[], None] | None = None

    def __enter__(self) -> "RewardBatch":
        return self

    def __exit__(self, *exception: object) -> None:
        self.cancel()

    def add(
        self,
        first: int,
        prompts: Sequence[Prompt],
        completions: Sequence[Said],
        columns: Sequence[Mapping[str, Any]],
        completion_ids: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """Begin to score these completions, which are samples `first`, `first` + 1, ... of the
        batch.

        Raises IsobitError if a function needs a column that is not there.
        """
        assert len(prompts) == len(completions) == len(columns)
        self._added |= set(range(first, first + len(prompts)))
        if not self.functions:  # rows may then have different columns
            return
        self._pool.check_columns(columns[0])
        arguments: dict[str, list[Any]] = {
            name: [row[name] for row in columns] for name in columns[0]
        }
        arguments["prompts"] = list(prompts)
        arguments["completions"] = [
            _messages(completion)
            if isinstance(completion, EpisodeRecord)
            else completion
            if isinstance(prompt, str)
            else [{"role": "assistant", "content": completion}]
            for prompt, completion in zip(prompts, completions)
        ]
        if not self._pool.wants_answers:
            arguments.pop(ANSWERS, None)
        if self._pool.wants_tokens and completion_ids is not None:
            arguments["completion_ids"] = [list(ids) for ids in completion_ids]
        if self._trainer_state is not None:
            arguments["trainer_state"] = [dict(self._trainer_state)] * len(prompts)
        samples = range(first, first + len(prompts))
        for name, values in arguments.items():
            self.arguments.setdefault(name, [None] * self.count)[samples.start : samples.stop] = (
                values
            )
        for function, size in enumerate(self._pool.chunk_sizes):
            for start in range(samples.start, samples.stop, size):
                chunk = range(start, min(start + size, samples.stop))
                self._calls.append(self._begin(function, chunk))

    def collect(self, meanwhile: Callable[[], None] | None = None) -> list[Reward]:
        """Return the rewards of the samples that were added, in order, once they are scored.

        `meanwhile` is called over and over until the workers are done. `overlapped_s` is then the
        seconds of scoring before this call. Raises RunFailed at the first problem in the samples'
        order, if problems stop the run.
        """
        self._meanwhile = meanwhile
        self.overlapped_s = self._dispatcher.worked_s
        try:
            called = zip(self._calls, self._finish(self._calls))
            settled = sorted(called, key=lambda call: (call[0][1].start, call[0][0]))
            for (function, chunk, _), reply in settled:
                self.settle(function, chunk, reply)
        except IsobitError as error:
            self.cancel()
            printed = (
                f"; what it printed: {self._pool.output.path}" if self._pool.output.written else ""
            )
            raise RunFailed(f"{error}{printed}") from None
        finally:
            self.cancel()
        return [self._reward(i) for i in sorted(self._added)]

    def cancel(self) -> None:
        """Stop scoring the batch. May be called again."""
        self._dispatcher.close()
        self._pool.closed(self)

    def _reward(self, sample: int) -> Reward:
        by_function = {
            spec.label: values[sample] for spec, values in zip(self.functions, self.values)
        }
        problems = [problems[sample] for problems in self.problems if sample in problems]
        weighted = [spec for spec in self.functions if spec.weight != 0]
        weighted_values = [
            spec.weight * value
            for spec in weighted
            if (value := by_function[spec.label]) is not None
        ]
        failed = any(
            sample in problems_of_function
            for spec, problems_of_function in zip(self.functions, self.problems)
            if spec.weight != 0
        )
        total = None if failed or (weighted and not weighted_values) else sum(weighted_values, 0.0)
        return Reward(total, by_function, problems[0] if problems else None)

    def settle(self, function: int, samples: range, reply: Reply) -> None:
        """Record the values of a call, or score its samples one by one where it failed."""
        failure = self._failure(function, reply)
        if failure is None and not complete(reply, len(samples)):
            failure = Failure("its process wrote what is no result into the pipe of its replies")
        if failure is None:
            assert isinstance(reply, dict)
            self.values[function].update(zip(samples, reply["values"]))
            for i, text in reply["wrong"].items():
                self.record(function, samples[int(i)], text, self.stop)
            for i, text in reply["unscored"].items():
                self.record(function, samples[int(i)], text, stop=False)
        elif len(samples) == 1:
            self.record(function, samples[0], failure.text, self.stops(function, failure.deadly))
        else:
            known = len(self.problems[function])
            self.examine(function, samples)
            if len(self.problems[function]) == known:
                self.note(function, samples, failure)

    def examine(self, function: int, samples: range) -> None:
        """Call the function on each sample of a chunk that failed, while there are processes to
        spend on it."""
        while samples and self.deaths < MAX_DEATHS:
            now, samples = samples[: MAX_DEATHS - self.deaths], samples[MAX_DEATHS - self.deaths :]
            calls = [self._begin(function, range(sample, sample + 1)) for sample in now]
            for (_, chunk, _), reply in zip(calls, self._finish(calls)):
                self.deaths += isinstance(reply, Death)
                self.settle(function, chunk, reply)
        for sample in samples:
            text = f"not examined: {MAX_DEATHS} processes died or hung in this batch already"
            self.record(function, sample, text, self.stops(function, deadly=True))

    def stops(self, function: int, deadly: bool) -> bool:
        """Return whether a failure ends the run: not where a reward by name hung or died over a
        completion."""
        return self.stop and not (deadly and self.functions[function].by_name)

    def record(self, function: int, sample: int, text: str, stop: bool) -> None:
        """Sample and function have a problem. Raises RunFailed with it if that is to stop."""
        excerpt = excerpt_of(self.arguments["prompts"][sample])
        message = (
            f"reward function {self.functions[function].function}, sample {sample} "
            f"(prompt {excerpt}): {text}"
        )
        if stop:
            raise RunFailed(message)
        self.values[function][sample] = None
        self.problems[function][sample] = message

    def note(self, function: int, samples: range, failure: Failure) -> None:
        """Note that a call failed on a chunk of samples but on none of them alone: their values
        count."""
        hint = "; raise rewards.deadline_s if the function is slow" if failure.deadly else ""
        self.notes.append(
            f"reward function {self.functions[function].function}: samples {samples[0]} to {samples[-1]} "
            f"were scored one by one, after it failed on them together: {failure.text}{hint}"
        )

    def _given(self, samples: range) -> dict[str, list[Any]]:
        return {
            name: values[samples.start : samples.stop] for name, values in self.arguments.items()
        }

    def _begin(self, function: int, samples: range) -> Call:
        """Ask a worker to call a function, if workers have it."""
        key = next(self._keys)
        if function not in self._pool.here:
            arguments = self._given(samples)
            self._dispatcher.ask(self._pool.request(key, function, arguments, len(samples)))
        return function, samples, key

    def _finish(self, calls: Sequence[Call]) -> list[Reply]:
        """Call the functions of this process, while the workers work; return the replies in the
        order of the calls. Raises IsobitError if a worker that died cannot be replaced."""
        for function, samples, key in calls:
            if function in self._pool.here:
                self._replies[key] = self.call_here(function, samples)
        waiting = {key for _, _, key in calls} - self._replies.keys()
        while waiting:
            if self._meanwhile is not None:
                self._meanwhile()
            reply = self._dispatcher.next(None if self._meanwhile is None else _MOMENT_S)
            if reply is not None:
                waiting.discard(reply[0])
                self._replies[reply[0]] = reply[1]
        return [self._replies.pop(key) for _, _, key in calls]

    def call_here(self, function: int, samples: range) -> Reply:
        """Call a function that is an object of this process on copies of its arguments, so that
        what it changes in them is not seen elsewhere."""
        return answer(
            self._pool.here[function], deepcopy(self._given(samples)), len(samples), Exception
        )

    def _failure(self, function: int, reply: Reply) -> Failure | None:
        return failure_of(reply, None if function in self._pool.here else self._pool.environment)


def _messages(episode: EpisodeRecord) -> list[dict[str, Any]]:
    """Return all messages of an episode; a single turn without its calls, as for a completion
    without an environment."""
    if len(episode.messages) == 1:
        return [{k: v for k, v in episode.messages[0].items() if k != "tool_calls"}]
    return list(episode.messages)
