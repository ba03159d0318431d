"""The environments of a run, as a rollout asks them: in worker processes, many episodes in each.

Every question is answered within `environment.turn_deadline_s` and a grace for the process; if an
environment raises, hangs or dies, the reply says so. Under `on_error: stop` that ends the run. Left
out: a cage. A tool runs as the user, with all that the user may do.
"""

import json
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import count
from math import inf
from typing import Any

from isobit.data.columns import ANY
from isobit.data.dataset import Prompt
from isobit.data.turns import Reply, Step, Turn
from isobit.errors import IsobitError, RunFailed, brief, did_you_mean, listed
from isobit.tasks.environments.mistakes import Mistake
from isobit.tasks.environments.replies import reply_of
from isobit.tasks.environments.settings import EnvironmentConfig
from isobit.tasks.rewards.spec import RewardSpec
from isobit.tasks.workers.dispatch import (
    START_DEADLINE_S,
    Death,
    Dispatcher,
    Program,
    Request,
    Worker,
)
from isobit.tasks.workers.output import MAX_AT_ONCE, Output
from isobit.tasks.workers.variables import check_names, hint

PATIENCE_S = 5.0
"""Seconds after which a line on stderr says what a worker is still loading."""
GRACE_S = 5.0
"""Seconds after its deadline in which a worker may still answer by itself."""
Row = tuple[str, Prompt, Mapping[str, Any]]
"""A row of the data: its place, its prompt and its other columns."""
_TRIED = -1
"""The key of an episode of `tried`."""
_COLUMN = "environment"
_VARIABLES = "environment.variables"


class EnvironmentPool:
    """Environments in worker processes, from `start` to `close`; see `base.Environments`.

    `called_here`: the labels of the `rewards` that ask for `environments` and so are called in the
    environments' processes, on one episode at a time. `answers_turns`: some of the environments
    answer turns themselves, in their `step`. The output of environments goes to `output`.
    """

    def __init__(self, config: EnvironmentConfig, rewards: Sequence[RewardSpec] = ()) -> None:
        assert config.used
        self.config = config
        self.max_turns = config.max_turns
        self.tools: Sequence[Mapping[str, Any]] = ()
        self.answers_turns = False
        self.reward_weights: Mapping[str, float] = {}
        self.called_here: tuple[str, ...] = ()
        self.output = Output()
        self._rewards = [spec for spec in rewards if not (spec.by_name or spec.is_object)]
        self._kinds: dict[str | None, list[Mapping[str, Any]]] = {}
        self._workers: list[Worker] = []
        self._dispatcher: Dispatcher[Reply] | None = None
        self._serials = count()
        self._keys: dict[int, int] = {}  # of episodes that are open, by serial number
        self._open: dict[int, int] = {}  # the other way round
        self._names: dict[str | None, list[str]] = {}  # of rewards, by kind
        self._kind_of: dict[int, str | None] = {}
        self._required: dict[str, list[str]] = {}  # columns that the functions called here take

    def __enter__(self) -> "EnvironmentPool":
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def start(self) -> None:
        """Start the workers, which load and check tools and factories. Raises IsobitError, in one
        line, if one of them cannot be used."""
        if self._workers:
            return
        check_names(self._variables, _VARIABLES)
        program = Program(
            "isobit.tasks.environments.worker",
            "environment",
            "environment",
            self._load(),
            reply_of,
            "its process did not answer within {:g} s and was killed",
            variables=self._variables,
            option=_VARIABLES,
            grace_s=GRACE_S,
            patience_s=PATIENCE_S,
        )
        self._workers = [Worker(program) for _ in range(self.config.workers)]
        self._dispatcher = Dispatcher(self._workers, "isobit-environments")
        try:
            self._take_up(self._dispatcher.load()[0])
        except BaseException:
            self.close()
            raise

    def _take_up(self, loaded: Mapping[str, Any]) -> None:
        """Keep what a worker has loaded: kinds, tools, and names and weights of rewards. Raises
        IsobitError if two rewards have the same name."""
        self._required = dict(loaded["called_here"])
        self.called_here = tuple(self._required)
        weights: dict[str, float] = {}
        tools: dict[str, Mapping[str, Any]] = {}
        for name, schemas, own_reward, turns in loaded["kinds"]:
            self.answers_turns |= turns
            self._kinds[name] = schemas
            self._names[name] = [own_reward] * (own_reward is not None) + list(self.called_here)
            tools |= {json.dumps(schema): schema for schema in schemas}
            weights |= {own_reward: 1.0} if own_reward is not None else {}
        for spec in self._rewards:
            if spec.label in weights:
                raise IsobitError(
                    f"two rewards are called {spec.label!r}: the environment's own, under its "
                    "class's name, and a reward function; give the function a name of its own"
                )
        weights |= {e.label: e.weight for e in self._rewards if e.label in self.called_here}
        self.tools, self.reward_weights = tuple(tools.values()), weights

    @property
    def _variables(self) -> Sequence[str]:
        return self.config.variables

    def _load(self) -> dict[str, Any]:
        config = self.config
        return {
            "tools": config.tools,
            "factory": config.factory,
            "mcp": [asdict(server) for server in config.mcp],
            "rewards": [[spec.label, spec.reference] for spec in self._rewards],
            "max_turns": config.max_turns,
            "deadline_s": config.turn_deadline_s,
            "start_deadline_s": 0.9 * START_DEADLINE_S,  # its own word comes first
            "on_error": config.on_error,
        }

    def check_row(self, where: str, columns: Mapping[str, Any]) -> None:
        """Raise IsobitError if a row does not name one of the environments, or lacks a column that
        a reward function called in the environments' processes takes."""
        self._kind(columns, where)
        for label, names in self._required.items():
            if lacks := [name for name in names if name not in columns]:
                raise IsobitError(
                    f"reward function {label}: {where} has no column {lacks[0]!r}, which it takes; "
                    f"it has {listed(columns)}"
                )

    @property
    def columns(self) -> frozenset[str]:
        """The columns of the data that are read here: `reset` is given all of them."""
        return frozenset() if self.config.factory is None else frozenset({_COLUMN, ANY})

    def first_rows(self, rows: Iterable[Row]) -> Iterator[Row]:
        """Yield the first row of each kind of environment."""
        kinds = set(self._kinds)
        for row in rows:
            if (kind := self._kind(row[2], row[0])) in kinds:
                kinds.remove(kind)
                yield row
            if not kinds:
                return

    def _kind(self, columns: Mapping[str, Any], where: str) -> str | None:
        if None in self._kinds:
            return None
        known = [str(name) for name in self._kinds]
        if _COLUMN not in columns:
            raise IsobitError(
                f"{where}: no column {_COLUMN!r}, which chooses one of environment.factory: "
                f"{', '.join(known)}"
            )
        name = columns[_COLUMN]
        if not isinstance(name, str) or name not in self._kinds:
            raise IsobitError(
                f"{where}: environment {brief(name)!r} is not in environment.factory; "
                f"{did_you_mean(str(name), known)}"
            )
        return name

    def begin(self, key: int, prompt: Prompt, columns: Mapping[str, Any]) -> None:
        """Open an episode on a row. Raises IsobitError for a row that does not name one of the
        environments."""
        assert key not in self._open
        kind = self._kind(columns, "a row")
        serial = next(self._serials)
        self._keys[serial], self._open[key] = key, serial
        self._kind_of[key] = kind
        begin = {"prompt": prompt, "columns": dict(columns)}
        self._ask(key, {"begin": begin, "kind": kind})

    def tried(self, where: str, prompt: Prompt, columns: Mapping[str, Any]) -> Prompt:
        """Return a row's prompt with what its environment's reset adds, in an episode that is ended
        at once; print a line on stderr if that takes long. Raises IsobitError if the episode cannot
        begin, and its subclass `Mistake` if no episode can."""
        reply: Reply | None = None
        due = time.monotonic() + PATIENCE_S
        self.begin(_TRIED, prompt, columns)
        try:
            while reply is None:
                reply = next(
                    (answer for answer in self._replies(1.0) if answer.key == _TRIED), None
                )
                if reply is None and time.monotonic() > due:
                    limit = f"it has {self.config.turn_deadline_s:g} s"
                    print(f"environment: waiting for reset, {where}; {limit}", file=sys.stderr)
                    due = inf
        finally:
            self.end(_TRIED)
        if reply.problem is not None:
            kind = Mistake if reply.mistake else IsobitError
            raise kind(f"{where}: {self.explained(reply.problem)}")
        return prompt if reply.prompt is None else reply.prompt

    def turn(self, key: int, turn: Turn) -> None:
        """Ask the environment of an episode what follows this turn."""
        self._ask(key, {"turn": asdict(turn)})

    def finish(self, key: int, arguments: Mapping[str, Any]) -> None:
        """Ask for the rewards of an episode that is over."""
        self._ask(key, {"finish": dict(arguments)})

    def end(self, key: int) -> None:
        """End an episode and free its environment; safe at any time, no reply follows."""
        if key not in self._open:
            return
        self._ask(key, {"end": True})
        del self._keys[self._open.pop(key)], self._kind_of[key]
        if not self._open:
            self.pass_output_on()

    def _ask(self, key: int, question: Mapping[str, Any]) -> None:
        assert self._dispatcher is not None, "it was not started"
        serial, last = self._open[key], "end" in question
        body = json.dumps({"key": serial, **question}).encode() + b"\n"
        deadline_s = None if last else self.config.turn_deadline_s
        self._dispatcher.ask(Request(serial, body, deadline_s, "begin" in question, last))

    def poll(self, wait_s: float) -> list[Reply]:
        """Return the replies that have come; wait at most `wait_s` seconds for the first. Raises
        RunFailed for a mistake of the program, and for every problem if `on_error` is stop;
        IsobitError if a worker that died cannot be replaced; and any other error that ended the
        dispatcher's thread."""
        replies = self._replies(wait_s)
        for reply in replies:
            if reply.problem is not None and (reply.mistake or self.config.on_error == "stop"):
                raise RunFailed(self.explained(reply.problem))
        return replies

    def _replies(self, wait_s: float) -> list[Reply]:
        assert self._dispatcher is not None, "it was not started"
        replies: list[Reply] = []
        while arrived := self._dispatcher.next(0 if replies else max(0.0, wait_s)):
            serial, reply = arrived
            key = self._keys.get(serial)
            if key is None:  # the episode was ended meanwhile
                continue
            kind = self._kind_of[key]
            if isinstance(reply, Death):
                rewards = dict.fromkeys(self._names[kind])
                reply = Reply(key, Step(done=True), problem=reply.text, rewards=rewards)
            replies.append(replace(reply, key=key, tools=tuple(self._kinds[kind])))
        return replies

    def explained(self, problem: str) -> str:
        """Return a problem as a message, with the variable that seems to be missing and the file
        with the workers' output."""
        self.pass_output_on()
        printed = f"; what it printed: {self.output.path}" if self.output.written else ""
        return f"environment: {problem}{hint(problem, self._variables, option=_VARIABLES)}{printed}"

    def pass_output_on(self) -> None:
        """Add the workers' new output to `output`; called when no episode is open, so that no
        episode waits meanwhile."""
        for worker in self._workers:
            self.output.add(*worker.new_output(MAX_AT_ONCE), "environments")

    def close(self) -> None:
        """Kill the workers and all processes that they started. May be called again."""
        if self._dispatcher is not None:
            self._dispatcher.close()
            self._dispatcher = None
            self.pass_output_on()
        for worker in self._workers:
            worker.close()
        self._workers = []
        self._keys, self._open, self._kind_of = {}, {}, {}
