"""One engine of several ranks that hold its model together (`model/divided`), to which requests
come from outside: at the group's first rank, which says them to the others before each step.

Every rank then schedules the same steps, so nothing else is said. Ranks whose requests are known to
all, as a run's are, use their engines as they are; what environments answer comes from outside too.
"""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from isobit.data.dataset import Prompt as DataPrompt
from isobit.data.turns import Environments, Reply, Step, ToolUse, Turn
from isobit.distributed import Ranks
from isobit.engine.endings import OnToken
from isobit.engine.engine import Engine
from isobit.engine.prompts import Prompt, check_plain
from isobit.engine.types import Completion, Request, Sampling

_DEFAULT = Sampling()


class GroupEngine:
    """An engine, of each rank of a group its own. The first rank submits, cancels, steps and closes;
    the others `follow`. An idle first rank must step within the ranks' time limit."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self._ranks = engine, engine.model.transformer.group
        self._said: list[list[Any]] = []
        self._open: dict[int, Request] = {}
        self._count = 0

    def submit(
        self,
        prompt: Prompt,
        sampling: Sampling = _DEFAULT,
        prompt_id: int = 0,
        sample_index: int = 0,
    ) -> Request:
        """Call `Engine.submit`, on every rank before the next step."""
        check_plain(sampling)
        request = self._submit(prompt, sampling, prompt_id, sample_index)
        numbers = prompt_id, sample_index
        self._said.append(["submit", request.prompt_token_ids, asdict(sampling), *numbers])
        return request

    def cancel(self, request: Request) -> None:
        """Call `Engine.cancel`, on every rank before the next step."""
        number = next((n for n, item in self._open.items() if item is request), None)
        if number is not None:
            self._cancel(number)
            self._said.append(["cancel", number])

    def step(self, on_token: OnToken | None = None) -> list[tuple[Request, Completion]]:
        """Call `Engine.step` on every rank."""
        verbs, self._said = self._said, []
        self._ranks.all_gather_json(verbs)
        return self._step(on_token)

    def close(self) -> None:
        """End `follow` on the other ranks."""
        self._ranks.all_gather_json(None)

    def follow(self) -> None:
        """Do what the first rank does, until it closes."""
        while (verbs := self._ranks.all_gather_json(None)[0]) is not None:
            for verb, *values in verbs:
                if verb == "cancel":
                    self._cancel(*values)
                else:
                    prompt, sampling, *numbers = values
                    lists = {key: tuple(sampling[key]) for key in ("stop", "stop_tokens")}
                    self._submit(prompt, Sampling(**sampling | lists), *numbers)
            self._step(None)

    def _submit(
        self, prompt: Prompt, sampling: Sampling, prompt_id: int, sample_index: int
    ) -> Request:
        request = self.engine.submit(prompt, sampling, prompt_id, sample_index)
        self._open[self._count] = request
        self._count += 1
        return request

    def _cancel(self, number: int) -> None:
        self.engine.cancel(self._open.pop(number))

    def _step(self, on_token: OnToken | None) -> list[tuple[Request, Completion]]:
        ended = self.engine.step(on_token)
        still = self.engine.scheduler.requests
        self._open = {number: request for number, request in self._open.items() if request in still}
        return ended


class GroupEnvironments:
    """The environments of a group's first rank: it alone asks them, and says their replies to the
    others, so that every rank goes on with the same turns in the same step."""

    def __init__(self, environments: Environments, group: Ranks) -> None:
        self._environments, self._group = environments, group
        self.tools, self.max_turns = environments.tools, environments.max_turns
        self.reward_weights = environments.reward_weights

    def begin(self, key: int, prompt: DataPrompt, columns: Mapping[str, Any]) -> None:
        if self._group.first:
            self._environments.begin(key, prompt, columns)

    def turn(self, key: int, turn: Turn) -> None:
        if self._group.first:
            self._environments.turn(key, turn)

    def finish(self, key: int, arguments: Mapping[str, Any]) -> None:
        if self._group.first:
            self._environments.finish(key, arguments)

    def end(self, key: int) -> None:
        if self._group.first:
            self._environments.end(key)

    def poll(self, wait_s: float) -> list[Reply]:
        replies = self._group.broadcast_result(
            lambda: [asdict(reply) for reply in self._environments.poll(wait_s)]
        )
        return [_reply_of(values) for values in replies]


def _reply_of(values: Mapping[str, Any]) -> Reply:
    step, uses = values["step"], tuple(ToolUse(**use) for use in values["uses"])
    step = Step(**{**step, "messages": tuple(step["messages"])})
    return Reply(**{**values, "step": step, "uses": uses, "tools": tuple(values["tools"])})
