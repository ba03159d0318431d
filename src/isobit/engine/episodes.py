"""`Episodes`: conversations of several turns with environments, many at a time over one engine.

    submit -> answer -> the environment's messages -> continue_from -> answer -> ... -> completion

An episode that is over is one completion: all turns' tokens, of which those that were given are
masked, and what happened in it (`data/episodes.py`). A prompt without an environment is an
episode of one turn, and has the engine's own completion.

Environments answer elsewhere and in time; meanwhile the engine decodes other episodes. Sampling
keys are (seed, prompt, sample, absolute position), and tokens are only appended, so neither the
order nor the time of replies moves a bit (tests/engine/test_episodes.py). An episode that waits
keeps nothing in the engine: its pages are found again, or computed again. Left out: what tokens a
message is (`dialogue.py`), and which environment is asked on which rank (`training/rollouts`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

from isobit.data.answers import ANSWERS
from isobit.data.dataset import Example, Message
from isobit.data.dataset import Prompt as DataPrompt
from isobit.data.episodes import EpisodeRecord, last_answer
from isobit.data.turns import Reply
from isobit.engine.dialogue import Dialogue
from isobit.engine.endings import forked
from isobit.engine.engine import OnGroup, Progress
from isobit.engine.groups import AskedEngine, OpenGroups
from isobit.engine.prompts import Prompt
from isobit.engine.sequences import Stats, added_seconds, summed
from isobit.engine.types import Completion, Request, Sampling
from isobit.errors import IsobitError

MOST_SAMPLES = 1 << 20
"""The most samples of a prompt, where episodes fork: the keys of later contexts are behind
these."""
_WAIT_S = 0.05  # for a reply, where the engine has nothing to do


@dataclass(eq=False)
class _Open:
    """An episode under way, one sample of its group's request.

    `row_prompt`: the prompt of its row. `so_far`: the completion of its context, and `earlier` that
    of the contexts before, `forks` of them. `begin`: where the tokens of its last turn begin in the
    former; `turns` have been sampled. `request`: the one that the engine computes now. `over`: no
    turn follows; `done`: its environment says so; `cut`: no tokens are left for one.
    """

    key: int
    group: Request
    sample: int
    row_prompt: Prompt
    columns: Mapping[str, Any]
    began: Reply | None = None
    request: Request | None = None
    so_far: Completion | None = None
    earlier: Completion | None = None
    forks: int = 0
    begin: int = 0
    turns: int = 0
    messages: list[Message] = field(default_factory=list)
    uses: list[tuple[str, str | None]] = field(default_factory=list)
    over: bool = False
    done: bool = False
    cut: bool = False
    problem: str | None = None

    @property
    def prompt(self) -> Prompt:
        """The prompt, as its environment has changed it."""
        changed = None if self.began is None else self.began.prompt
        return self.row_prompt if changed is None else changed

    @property
    def changed_prompt(self) -> DataPrompt | None:
        """The prompt that its environment has made of the given one; None where it is as it was
        given."""
        changed = None if self.began is None else self.began.prompt
        return None if changed is None or list(changed) == list(self.row_prompt) else changed

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        """The schemas of the tools that the model may call in the episode."""
        return () if self.began is None else self.began.tools

    @property
    def context(self) -> Completion:
        """The completion that the last turn goes on from; only of an episode that has answered."""
        assert self.so_far is not None
        return self.so_far

    @property
    def completion(self) -> Completion:
        """The completion of all contexts; only of an episode that has answered."""
        return self.context if self.earlier is None else forked(self.earlier, self.context)


class Episodes:
    """An engine whose completions are episodes, with the engine's methods. With no `dialogue` they
    are the engine's own."""

    def __init__(self, engine: AskedEngine, dialogue: Dialogue | None = None) -> None:
        self._engine, self._dialogue = engine, dialogue
        self._groups: dict[Request, list[_Open]] = {}
        self._open: dict[int, _Open] = {}
        self._asked: dict[Request, dict[int, _Open]] = {}
        self._over: list[tuple[Request, Completion]] = []
        self.stats = Stats()

    def submit(
        self,
        prompt: Prompt,
        sampling: Sampling,
        prompt_id: int = 0,
        columns: Mapping[str, Any] | None = None,
        adapter: str | None = None,
        sample_index: int = 0,
    ) -> Request:
        """Ask for `sampling.n` episodes on a prompt, each with a separate environment, which is
        given `columns`; `sampling.max_new_tokens` are those of a turn. The request names the group
        of episodes."""
        if self._dialogue is None:
            return self._engine.submit(prompt, sampling, prompt_id, sample_index, adapter)
        assert sample_index + sampling.n <= MOST_SAMPLES
        group = Request([], sampling, prompt_id, sample_index, None, adapter)
        episodes = [
            _Open(next(self._dialogue.keys), group, sample_index + sample, prompt, columns or {})
            for sample in range(sampling.n)
        ]
        self._groups[group] = episodes
        for episode in episodes:
            self._open[episode.key] = episode
            self._dialogue.environments.begin(episode.key, prompt, episode.columns)  # type: ignore[arg-type]
        return group

    def step(self) -> list[tuple[Request, Completion]]:
        """Compute one step of the engine, take what environments have said, and return the episodes
        that are over with it, each with the request of its group. Where the engine has nothing to
        do it waits for a reply, a moment at most. Raises as `Engine.step`, and what
        `Environments.poll` raises."""
        if self._dialogue is not None:
            for reply in self._dialogue.environments.poll(
                0.0 if self._engine.num_open else _WAIT_S
            ):
                self._take(reply)
        had = self._engine.num_open
        for request, completion in self._engine.step():
            self._answered(request, completion)
        if had and not self._engine.num_open:  # it counts anew from the next request on
            self.stats = summed(self.stats, done_by(self._engine))
        over, self._over = self._over, []
        return over

    def cancel(self, request: Request) -> None:
        """Drop a group's episodes, whatever state they are in."""
        for episode in self._groups.pop(request, ()):
            self._forget(episode)
            if episode.request is not None:
                self._asked.pop(episode.request, None)
                self._engine.cancel(episode.request)
        self._engine.cancel(request)

    def generate(
        self,
        examples: Sequence[Example],
        sampling: Sampling,
        ids: Sequence[int],
        progress: Progress | None = None,
        adapters: Sequence[str | None] | None = None,
        on_group: OnGroup | None = None,
    ) -> list[list[Completion]]:
        """Sample a group of episodes for each example, in order, as `Engine.generate` does for
        prompts."""
        groups: list[list[Completion]] = [[] for _ in examples]
        with OpenGroups(self) as gathering:
            for index, (example, prompt_id) in enumerate(zip(examples, ids, strict=True)):
                adapter = None if adapters is None else adapters[index]
                request = self.submit(example.prompt, sampling, prompt_id, example.columns, adapter)
                gathering.add(index, request)
            while gathering:
                for index, group in gathering.step():
                    groups[index] = group
                    if on_group is not None:
                        on_group(index, group)
                if progress is not None:
                    progress(self.stats.sampled_tokens, gathering.completed)
        return groups

    def _take(self, reply: Reply) -> None:
        """Take a reply of an environment: to the question how an episode begins, what follows a
        turn, or what the episode earned."""
        episode = self._open.get(reply.key)
        if episode is None:  # it was cancelled meanwhile
            return
        episode.problem = episode.problem or reply.problem
        for use in reply.uses:
            episode.uses.append((use.name, use.error))
            took = {use.name: use.seconds}
            self.stats.tool_s = added_seconds(self.stats.tool_s, took)
        if episode.began is None:
            episode.began = reply
            if all(member.began is not None for member in self._groups[episode.group]):
                self._begin(self._groups[episode.group])
        elif episode.over:
            self._finish(episode, reply.rewards)
        else:
            self._follow(episode, reply)

    def _begin(self, episodes: Sequence[_Open]) -> None:
        """Submit the prompts of a group whose environments have all begun: episodes next to one
        another with equal prompts share a request, as all do where environments add nothing."""
        group, num_ids = episodes[0].group, self._engine.model.num_ids
        prompts: list[list[int]] = []
        for episode, previous in zip(episodes, (None, *episodes)):
            if previous is not None and _alike(previous, episode):
                prompts.append(prompts[-1])
            else:
                prompts.append(self._said.prompt(episode.prompt, episode.tools, num_ids))
        for tokens, run in groupby(zip(prompts, episodes), key=lambda pair: pair[0]):
            members = [episode for _, episode in run]
            sampling = replace(group.sampling, n=len(members), max_new_tokens=self._room(group, 0))
            try:
                request = self._engine.submit(
                    tokens, sampling, group.prompt_id, members[0].sample, group.adapter
                )
            except IsobitError as error:
                if members[0].changed_prompt is None:
                    raise
                raise IsobitError(f"environment: with what reset adds, {error}") from None
            self._asked[request] = {episode.sample: episode for episode in members}
            for episode in members:
                episode.request = request

    def _answered(self, request: Request, completion: Completion) -> None:
        """Take a sampled turn, and ask its environment what follows."""
        if self._dialogue is None:
            self._over.append((request, completion))
            return
        waiting = self._asked[request]
        episode = waiting.pop(completion.sample_index)
        if not waiting:
            del self._asked[request]
        episode.so_far, episode.request = completion, None
        turn, message = self._said.turn(episode.turns, completion, episode.begin, episode.tools)
        episode.messages.append(message)
        episode.turns += 1
        if episode.began is not None and episode.began.step.done:  # its environment answers no more
            self._finish(episode, {})
        else:
            self._said.environments.turn(episode.key, turn)

    def _follow(self, episode: _Open, reply: Reply) -> None:
        """Take an environment's answer to a turn: the episode goes on, or is over."""
        dialogue, messages = self._said, reply.step.messages
        episode.messages += messages
        episode.done = reply.step.done or not messages
        if episode.done or episode.turns >= dialogue.environments.max_turns:
            self._close(episode)
            return
        context, forks = self._context(episode, reply)
        first = (episode.earlier or episode.context).prompt_token_ids
        left = self._engine.model.config.max_positions - len(context)
        room = min(self._room(episode.group, len(context) - len(first)), left)
        episode.cut = room < 1
        if episode.cut:
            self._close(episode)
            return
        self._go_on(episode, context, forks, room)

    def _context(self, episode: _Open, reply: Reply) -> tuple[list[int], bool]:
        """Return the tokens that the next turn begins with, and whether they are something else
        than the tokens of the last turn with more behind them."""
        dialogue, so_far = self._said, episode.context
        tokens_so_far = [*so_far.prompt_token_ids, *so_far.token_ids]
        if not dialogue.forks:
            answer = so_far.token_ids[episode.begin :]
            appended = dialogue.appended(episode.prompt, reply.step.messages, answer)
            return [*tokens_so_far, *appended], False
        if reply.context is not None:
            whole = list(reply.context)
        else:
            size = self._engine.model.num_ids
            whole = dialogue.rendered(episode.prompt, episode.messages, episode.tools, size)
        return whole, whole[: len(tokens_so_far)] != tokens_so_far or len(whole) == len(
            tokens_so_far
        )

    def _go_on(self, episode: _Open, context: Sequence[int], forks: bool, room: int) -> None:
        """Ask for the next turn, of at most `room` tokens. In a new context it is drawn with other
        keys, since positions come again."""
        group, so_far = episode.group, episode.context
        sampling = replace(group.sampling, n=1, max_new_tokens=room)
        if forks:
            episode.earlier, episode.so_far, episode.begin = episode.completion, None, 0
            episode.forks += 1
            key = episode.sample + episode.forks * MOST_SAMPLES
            episode.request = self._engine.submit(
                context, sampling, group.prompt_id, key, group.adapter
            )
            self._asked[episode.request] = {key: episode}
            return
        known = len(so_far.prompt_token_ids) + len(so_far.token_ids)
        episode.begin = len(context) - len(so_far.prompt_token_ids)
        episode.request = self._engine.continue_from(so_far, context[known:], sampling)
        self._asked[episode.request] = {so_far.sample_index: episode}

    def _room(self, group: Request, tokens: int) -> int:
        """Return how many tokens the next turn may have, in an episode that has `tokens`
        already."""
        turn, episode = group.sampling.max_new_tokens, self._said.max_tokens
        return turn if episode is None else min(turn, episode - tokens)

    def _close(self, episode: _Open) -> None:
        """End an episode: its environment is asked what it has earned, where environments give
        rewards."""
        environments = self._said.environments
        episode.over = True
        if not environments.reward_weights:
            self._finish(episode, {})
            return
        arguments = {
            **episode.columns,
            "prompts": episode.prompt,
            "completions": list(episode.messages),
            "completion_ids": episode.completion.token_ids,
            ANSWERS: last_answer(episode.messages),
        }
        environments.finish(episode.key, arguments)

    def _finish(self, episode: _Open, rewards: Mapping[str, float | None]) -> None:
        """End an episode of which nothing more is asked, and keep its completion for the next
        `step`."""
        completion = episode.completion
        self._forget(episode)
        group = self._groups[episode.group]
        group.remove(episode)
        if not group:
            del self._groups[episode.group]
        happened = EpisodeRecord(
            episode.turns,
            tuple(episode.messages),
            tuple(episode.uses),
            dict(rewards),
            episode.done,
            episode.problem,
            episode.changed_prompt,
        )
        self.stats.episodes += 1
        reason = "length" if episode.cut else completion.finish_reason
        self._over.append(
            (episode.group, replace(completion, episode=happened, finish_reason=reason))
        )

    def _forget(self, episode: _Open) -> None:
        del self._open[episode.key]
        self._said.environments.end(episode.key)

    @property
    def _said(self) -> Dialogue:
        assert self._dialogue is not None
        return self._dialogue


def _alike(left: _Open, right: _Open) -> bool:
    """Return whether two episodes have begun with the same prompt and tools."""
    if left.began is None or right.began is None:
        return False
    return left.began.prompt == right.began.prompt and left.began.tools == right.began.tools


def done_by(engine: AskedEngine) -> Stats:
    """Return the counts of what an engine did since it had nothing to do, clamped keys and values
    included."""
    clamped, written = engine.clamped
    return replace(engine.stats, kv_clamped=clamped, kv_written=written)
