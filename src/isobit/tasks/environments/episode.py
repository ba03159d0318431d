"""One episode in a worker: it is begun, answered turn by turn, and scored.

An environment that raises or is late gives a `problem`, and `environment.on_error` says what
follows: under `observe` a message tells the model, and the episode goes on if it can. It cannot go
on if the environment's thread hangs in a call. A mistake of the program (`mistakes.py`) is marked
as such and ends the run.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from isobit.data.dataset import Prompt
from isobit.data.turns import Reply, Step, ToolUse, Turn
from isobit.errors import IsobitError, brief
from isobit.tasks.environments.home import Home, Late, Outcome
from isobit.tasks.environments.kinds import Instance, Kind
from isobit.tasks.environments.mistakes import Mistake, check_call, is_mistake, place_of
from isobit.tasks.environments.openenv import Client
from isobit.tasks.environments.returned import joined, step_of
from isobit.tasks.environments.tools import UNKNOWN, Answer, answers, unparsed
from isobit.tasks.rewards.functions import LoadedFunction, MalformedResult, checked_values
from isobit.tasks.workers.loading import last_line


@dataclass(frozen=True)
class Limits:
    """The limits of every episode of a run: turns, seconds for each answer, and `on_error`."""

    max_turns: int
    deadline_s: float
    on_error: str


@dataclass(frozen=True)
class Scorer:
    """A reward function that asks for `environments`, under its label."""

    label: str
    function: LoadedFunction


@dataclass(frozen=True)
class _Scored:
    """The value of a named reward, or the problem because of which it is missing."""

    name: str
    value: float | None
    problem: str | None = None
    mistake: bool = False


class Episode:
    """An episode of one kind of environment, from `begin` to `release`. `several`: the column
    `environment` has chosen the kind, and is not passed on, as in TRL. `lost`: a call of the
    episode has not come back, and holds a thread."""

    def __init__(self, key: int, kind: Kind, limits: Limits, several: bool) -> None:
        self.key, self.kind, self.limits = key, kind, limits
        self._several = several
        self.lost = False
        self._instance: Instance | None = None
        self._reward: float | None = None

    async def begin(self, prompt: Prompt, columns: Mapping[str, Any]) -> Reply:
        """Reset an environment on a row of the data. Return the row's prompt with what reset adds
        to it, or the problem."""
        until = self._until()
        try:
            self._instance = await self.kind.instance(until)
            value = self._instance.value
            if value is None:
                return Reply(self.key, prompt=prompt)
            arguments = {name: value for name, value in columns.items() if name != "environment"}
            row = {"prompt": prompt, **(arguments if self._several else columns)}
            check_call(value.reset, row, "reset")
            outcome = await self._instance.home.run(partial(value.reset, **row), until)
            if outcome.error is not None:
                return self._over(*self._raised("reset", outcome.error), prompt)
            self.kind.worked.add("reset")
            where = place_of(value.reset)
            return Reply(self.key, prompt=joined(prompt, outcome.result, where))
        except IsobitError as error:  # from the factory, or for what reset returned
            return self._over(str(error), isinstance(error, Mistake), prompt)
        except Late as late:
            self.lost = self._instance is None or self._instance.home.lost
            return self._over(f"reset: no result in time: {late}", False, prompt)

    async def turn(self, turn: Turn) -> Reply:
        """Return the reply to a turn of the model. The last of `max_turns` turns calls no tools."""
        if self._instance is None:
            return self._over("it was not begun")
        if self._instance.answers_turns:
            return await self._step(self._instance, turn)
        last = turn.number + 1 >= self.limits.max_turns
        if last or not (turn.calls or turn.problems):
            return Reply(self.key, Step(done=True))
        answered = await answers(
            turn.calls, self._instance.tools, self._instance.home, self._until()
        ) + [unparsed(problem) for problem in turn.problems]
        return self._answered(self._instance, answered)

    def _answered(self, instance: Instance, answered: Sequence[Answer]) -> Reply:
        worked = self.kind.worked
        worked |= {answer.message["name"] for answer in answered if answer.worked}
        failed = [answer for answer in answered if answer.problem is not None]
        for answer in failed:
            if answer.mistake and answer.message["name"] not in worked:
                return self._over(str(answer.problem), True)
        problem = failed[0].problem if failed else None
        over = problem is not None and self.limits.on_error != "observe"
        over = over or (isinstance(instance.value, Client) and instance.value.over)
        if instance.home.lost:
            self.lost = True
            if instance.value is None:  # tools alone have nothing to lose
                self._instance = Instance(None, Home(), instance.tools)
            else:
                over = True
        messages = tuple(answer.message for answer in answered)
        uses = tuple(answer.use for answer in answered if answer.use is not None)
        return Reply(self.key, Step(messages, done=over), uses, problem)

    async def _step(self, instance: Instance, turn: Turn) -> Reply:
        """Return the reply of an `Environment` to a turn. Each call of the turn is given an equal
        part of the seconds that the environment took."""
        began = asyncio.get_running_loop().time()

        def uses(problem: str | None = None) -> tuple[ToolUse, ...]:
            return self._uses(turn, asyncio.get_running_loop().time() - began, problem)

        def failed(problem: str) -> Reply:
            return replace(self._failed(problem), uses=uses(problem))

        try:
            outcome = await instance.home.run(partial(instance.value.step, turn), self._until())
        except Late as late:
            self.lost = instance.home.lost
            return failed(f"step: no result in time: {late}")
        if outcome.error is not None:
            problem, mistake = self._raised("step", outcome.error)
            return replace(failed(problem), mistake=mistake)
        self.kind.worked.add("step")
        try:
            step = step_of(outcome.result, place_of(instance.value.step))
        except IsobitError as error:
            return replace(failed(str(error)), mistake=isinstance(error, Mistake))
        self._reward = self._reward if step.reward is None else step.reward
        return Reply(self.key, replace(step, reward=self._reward), uses())

    def _uses(self, turn: Turn, seconds: float, problem: str | None) -> tuple[ToolUse, ...]:
        """Return a ToolUse for each call of a turn that an `Environment` answered in `seconds`,
        under the names of its tools; a name that is not a tool's is counted as UNKNOWN."""
        names = {schema.get("function", schema).get("name") for schema in self.kind.schemas}
        mean_seconds = round(seconds / max(len(turn.calls), 1), 6)
        return tuple(
            ToolUse(brief(call.name) if call.name in names else UNKNOWN, mean_seconds, problem)
            for call in turn.calls
        )

    async def finish(self, arguments: Mapping[str, Any], scorers: Sequence[Scorer]) -> Reply:
        """Return the episode's rewards: the environment's own reward, and those of the functions
        that ask for the environment. A reward that returned None does not apply, and is left out; a
        reward that failed is None."""
        instance, own_reward, until = self._instance, self.kind.reward, self._until()
        if instance is None:
            names = [own_reward] if own_reward is not None else []
            names += [scorer.label for scorer in scorers]
            return Reply(self.key, rewards=dict.fromkeys(names))
        scores = list[_Scored]()
        if own_reward is not None and instance.answers_turns:
            scores.append(_Scored(own_reward, self._reward))
        elif own_reward is not None:
            method = instance.value.get_reward
            try:
                check_call(method, {}, "get_reward")
            except Mistake as error:
                return self._over(str(error), True)
            outcome = await self._called(instance, method, until)
            outcome_in_batch = replace(outcome, result=[outcome.result])
            scores.append(
                self._scored(own_reward, "get_reward", outcome_in_batch, place_of(method))
            )
        batch = {name: [value] for name, value in arguments.items()}
        batch["environments"] = [instance.value]
        for scorer in scorers:
            outcome = await self._called(instance, partial(scorer.function.begin, batch), until)
            scores.append(self._scored(scorer.label, f"reward function {scorer.label}", outcome))
        applies = [
            score for score in scores if score.value is not None or score.problem is not None
        ]
        failed = [score for score in scores if score.problem is not None]
        failed.sort(key=lambda score: not score.mistake)
        rewards = {score.name: score.value for score in applies}
        reply = Reply(self.key, rewards=rewards)
        if failed:
            reply = replace(reply, problem=failed[0].problem, mistake=failed[0].mistake)
        return reply

    async def _called(self, instance: Instance, call: Callable[[], Any], until: float) -> Outcome:
        try:
            return await instance.home.run(call, until)
        except Late as late:
            self.lost = instance.home.lost
            return Outcome(error=TimeoutError(f"no result in time: {late}"))

    def _scored(self, name: str, call: str, outcome: Outcome, where: str = "") -> _Scored:
        if outcome.error is not None:
            problem, mistake = self._raised(call, outcome.error)
            return _Scored(name, None, problem, mistake)
        self.kind.worked.add(call)
        try:
            values, wrong = checked_values(outcome.result, 1)
        except MalformedResult as error:
            return _Scored(name, None, f"{call}{where} {error}", True)
        if not wrong:
            return _Scored(name, values[0])
        numeric = hasattr(next(iter(outcome.result)), "__float__")
        return _Scored(name, None, f"{call}{where} {wrong[0]}", not numeric)

    def _raised(self, method: str, error: BaseException) -> tuple[str, bool]:
        """Return the problem for an error that a method of the environment raised, and whether it
        is the program's mistake (`is_mistake`); it is not if the method has come back before."""
        value = None if self._instance is None else self._instance.value
        mistake = method not in self.kind.worked and is_mistake(error, value, self.kind.file)
        return f"{method}: {last_line(error, self.kind.file)}", mistake

    def release(self) -> None:
        """Let the episode's environment wait for another episode; close it if a call of it has not
        come back."""
        instance, self._instance = self._instance, None
        if instance is None:
            return
        if instance.home.lost:
            instance.home.close()
        else:
            self.kind.idle.append(instance)

    def _until(self) -> float:
        return asyncio.get_running_loop().time() + self.limits.deadline_s

    def _over(self, problem: str, mistake: bool = False, prompt: Prompt | None = None) -> Reply:
        return Reply(self.key, Step(done=True), (), problem, mistake, prompt)

    def _failed(self, problem: str) -> Reply:
        """Return the reply to a `step` that failed: as `on_error` says, the episode goes on with a
        message about the problem, or is over."""
        if self.limits.on_error != "observe" or self.lost:
            return self._over(problem)
        message = {"role": "user", "content": str({"error": problem})}
        return Reply(self.key, Step((message,), self._reward), problem=problem)
