"""Conversations of several turns over one engine: the bits do not depend on when environments
reply."""

import gc
import sys
from dataclasses import replace
from itertools import pairwise
from types import FunctionType, ModuleType
from typing import Any

import pytest
import torch

from isobit.data.episodes import EpisodeRecord
from isobit.data.turns import Reply, Step, ToolUse, Turn
from isobit.engine.dialogue import Dialogue
from isobit.engine.engine import Engine
from isobit.engine.episodes import Episodes
from isobit.engine.groups import OpenGroups
from isobit.engine.types import Completion, Request, Sampling
from isobit.errors import RunFailed
from isobit.model import Model
from isobit.model.text.tokenizer import Tokenizer
from isobit.model.text.tool_formats.table import FORMATS
from isobit.rl import Sample
from isobit.rl.learner.forward import forward
from isobit.rl.learner.packing import pack
from isobit.training.rollouts.sources import sample_of
from tests.dialogues import FakeEnvironments, adding, chat, dialogue_of
from tests.models import ALPHABET, tiny_model

PROMPTS = ["1+1", "17+23=", "9", "how many letters"]
SAMPLING = Sampling(n=3, max_new_tokens=6, seed=11)
ROWS = [{"turns": 1}, {"turns": 2}, {"turns": 4}, {"turns": 3}]


@pytest.fixture(scope="module")
def model() -> Model:
    return tiny_model(alphabet=ALPHABET, scale=3.0, max_positions=256)


def gathered(episodes: Episodes, engine: Engine, sampling: Sampling) -> list[list[Completion]]:
    """The groups of all prompts, proving after every step that the pages are in order."""
    found: dict[int, list[Completion]] = {}
    with OpenGroups(episodes) as gathering:
        for place, (prompt, row) in enumerate(zip(PROMPTS, ROWS)):
            gathering.add(place, episodes.submit(chat(prompt), sampling, 7 + place, row))
        while gathering:
            found.update(gathering.step())
            engine.integrity()
    return [group for _, group in sorted(found.items())]


def run(
    model: Model,
    environments: FakeEnvironments,
    sampling: Sampling = SAMPLING,
    max_tokens: int | None = None,
    **size: Any,
) -> tuple[list[list[Completion]], Episodes]:
    """The groups of all prompts; nothing is left open behind them."""
    engine = Engine(model, **{"kv_pages": 200, "page_size": 4, **size})
    episodes = Episodes(engine, dialogue_of(model, environments, max_tokens))
    groups = gathered(episodes, engine, sampling)
    assert environments.ended == len(PROMPTS) * sampling.n
    assert not environments.columns
    assert not engine.num_open
    assert engine.pages.num_used == 0
    return groups, episodes


def flat(groups: list[list[Completion]]) -> list[Completion]:
    return [completion for group in groups for completion in group]


def test_an_episode_is_its_turns_one_after_another(model: Model) -> None:
    """Each turn has the bits of all tokens before it as a prompt; what is given is not trained."""
    groups, _ = run(model, FakeEnvironments())
    assert [[c.episode.turns for c in group] for group in groups] == [  # type: ignore[union-attr]
        [row["turns"]] * 3 for row in ROWS
    ]
    engine, turns = Engine(model, kv_pages=200), 0
    for c in flat(groups):
        assert c.episode is not None
        spans = sampled_spans(c)
        assert len(spans) == c.episode.turns
        for start, stop in spans:
            one = replace(SAMPLING, n=1)
            so_far = [*c.prompt_token_ids, *c.token_ids[:start]]
            request = engine.submit(so_far, one, c.prompt_id, c.sample_index)
            again = finish(engine)[request]
            assert again.token_ids == c.token_ids[start:stop]
            assert again.logprobs == c.logprobs[start:stop]
            turns += 1
        assert c.text == c.episode.messages[-2]["content"]
        roles = [message["role"] for message in c.episode.messages]
        assert roles == ["assistant", "tool"] * c.episode.turns
        assert c.episode.done
        assert c.episode.rewards == {"earned": c.episode.rewards["earned"]}
        assert c.episode.uses == (("count", None),) * c.episode.turns
    assert turns == 3 * sum(row["turns"] for row in ROWS)


def sampled_spans(completion: Completion) -> list[tuple[int, int]]:
    """Where turns begin and end."""
    edges = [False, *completion.sampled, False]
    changes = [i for i in range(len(edges) - 1) if edges[i] != edges[i + 1]]
    return list(zip(changes[::2], changes[1::2]))


def finish(engine: Engine) -> dict[Request, Completion]:
    found: dict[Request, Completion] = {}
    while engine.num_open:
        found.update(engine.step())
    return found


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "size",
    [
        {},
        {"kv_pages": 30},
        {"max_batch_tokens": 7, "prefix_cache": False},
    ],
)
def test_the_order_of_replies_moves_no_bit(model: Model, seed: int, size: dict[str, Any]) -> None:
    """Preempted, evicted, in chunks, and with replies in another order; the control is another
    observation."""
    groups, roomy = run(model, FakeEnvironments())
    mixed, episodes = run(model, FakeEnvironments(seed=seed), **size)
    assert mixed == groups
    if size:
        assert episodes.stats.prefill_tokens > roomy.stats.prefill_tokens, "some is computed again"

    def other(columns: Any, turns: Any) -> Step:
        step = adding(columns, turns)
        return replace(step, messages=({"role": "tool", "content": "another"},))

    changed, _ = run(model, FakeEnvironments(other))
    several = [c for c in flat(groups) if c.episode is not None and c.episode.turns > 1]
    differ = [c for c, d in zip(flat(groups), flat(changed)) if c.logprobs != d.logprobs]
    assert differ == several


@pytest.mark.parametrize("preset", ["fp8", "bf16"])
def test_the_learner_has_the_log_probabilities_of_all_turns(preset: str) -> None:
    """0 differing tokens; the control is a history that is rendered again from its texts."""
    model = tiny_model(preset, alphabet=ALPHABET, scale=3.0, max_positions=256)
    groups, _ = run(model, FakeEnvironments(seed=1))
    samples = [sample_of(c) for c in flat(groups)]
    assert learned(model, samples) == recorded(samples)
    again = [rendered_again(model, c) for c in flat(groups)]
    other = [tokens != c.token_ids for tokens, c in zip(again, flat(groups))]
    assert any(other), "a text does not become the tokens that it was of"
    changed = [
        replace(s, completion_ids=tuple(tokens)) if len(tokens) == len(s.completion_ids) else s
        for tokens, s in zip(again, samples)
    ]
    assert learned(model, changed) != recorded(samples)


def learned(model: Model, samples: list[Sample], share_prompts: bool = False) -> list[float]:
    with torch.no_grad():
        found: list[float] = forward(model, pack(samples, share_prompts), 1.0)[0].tolist()
    return found


def recorded(samples: list[Sample]) -> list[float]:
    return [s.rollout_logprobs[i] for s in samples for i in s.trained]


def rendered_again(model: Model, completion: Completion) -> list[int]:
    """The tokens behind the prompt, if the conversation's texts are encoded."""
    assert completion.episode is not None
    prompt = completion.prompt_token_ids
    messages = [*chat(PROMPTS[completion.prompt_id - 7]), *completion.episode.messages]
    while messages[-1]["role"] != "assistant":
        messages.pop()
    return model.tokenizer.encode_chat(messages, False)[len(prompt) :]


def test_an_environment_may_begin_otherwise_for_each_sample(model: Model) -> None:
    """Samples whose prompts differ are those of these prompts; equal neighbours share a request."""
    environments = FakeEnvironments(added=lambda columns, key: " abc"[: key % 3 + 1])
    groups, _ = run(model, environments)
    lengths = [[len(c.prompt_token_ids) for c in group] for group in groups]
    assert all(len(set(each)) == 3 for each in lengths)
    engine = Engine(model, kv_pages=200)
    for c in flat(groups):
        start, stop = sampled_spans(c)[0]
        request = engine.submit(
            c.prompt_token_ids, replace(SAMPLING, n=1), c.prompt_id, c.sample_index
        )
        assert finish(engine)[request].logprobs == c.logprobs[start:stop]


@pytest.mark.parametrize(
    ("prompt", "text", "thoughts", "content"),
    [
        ("ask", "it is 5", None, "it is 5"),
        ("ask", "<think>\nhm\n</think>\n\nit is 5", "hm", "it is 5"),
        ("ask<think>", "hm\n</think>\n\nit is 5", "hm", "it is 5"),
        ("ask", "the mark </think> is 5", None, "the mark </think> is 5"),  # which nothing opened
        ("ask", "<think>\nhm", "hm", ""),  # cut off
        ("ask<think>", "hm", "hm", ""),
        ("ask", "<think>\n\n</think>\n\nit is 5", None, "it is 5"),
    ],
)
def test_thoughts_are_told_apart(
    prompt: str, text: str, thoughts: str | None, content: str
) -> None:
    """In what rewards and templates see of an answer."""
    tokenizer = Tokenizer.characters("aks<think>")
    said = Completion(0, 0, tokenizer.encode(prompt), [2], text, [0.0], "stop", 0)
    dialogue = Dialogue(FakeEnvironments(), tokenizer, FORMATS["hermes"])
    turn, message = dialogue.turn(0, said, 0, ())
    assert (turn.content, turn.reasoning or None) == (content, thoughts)
    wanted = {"role": "assistant", "content": content}
    assert message == (wanted if thoughts is None else wanted | {"reasoning_content": thoughts})


def test_seconds_are_added_up_by_tool(model: Model) -> None:
    """Half a second a turn, of tools by the turn's number."""

    class Named(FakeEnvironments):
        def turn(self, key: int, turn: Turn) -> None:
            super().turn(key, turn)
            use = ToolUse(f"tool{turn.number % 2}", 0.5)
            self.waiting[-1] = replace(self.waiting[-1], uses=(use,))

    _, episodes = run(model, Named())
    turns = sum(row["turns"] for row in ROWS)
    odd = sum(row["turns"] // 2 for row in ROWS)
    assert episodes.stats.tool_s == {"tool0": 1.5 * (turns - odd), "tool1": 1.5 * odd}


@pytest.mark.slow
def test_limits_end_an_episode(model: Model) -> None:
    endless = FakeEnvironments(lambda columns, turns: Step(({"role": "tool", "content": "ok"},)))
    groups, _ = run(model, endless)
    assert all(c.episode.turns == 4 and not c.episode.done for c in flat(groups))  # type: ignore[union-attr]
    endless = FakeEnvironments(endless.answer, max_turns=100)
    for most in (3, 20, 41):
        groups, _ = run(model, endless_again(endless), max_tokens=most)
        assert all(len(c.token_ids) <= most for c in flat(groups))
        assert all(c.finish_reason == "length" for c in flat(groups))
        assert all(c.completion_mask is None or c.completion_mask[-1] for c in flat(groups))
    groups, _ = run(model, endless_again(endless))  # what the context takes
    assert all(len(c.prompt_token_ids) + len(c.token_ids) <= 256 for c in flat(groups))
    assert all(c.finish_reason == "length" for c in flat(groups))


def endless_again(environments: FakeEnvironments) -> FakeEnvironments:
    return FakeEnvironments(environments.answer, max_turns=100, seed=3)


def test_a_failure_of_the_environments_leaves_nothing_behind(model: Model) -> None:
    class Failing(FakeEnvironments):
        def poll(self, wait_s: float) -> list[Reply]:
            if self.asked > 5:
                raise RunFailed("the environment is broken")
            return super().poll(wait_s)

    engine, environments = Engine(model, kv_pages=100, page_size=4), Failing(seed=2)
    episodes = Episodes(engine, dialogue_of(model, environments))
    with pytest.raises(RunFailed, match="broken"):
        gathered(episodes, engine, SAMPLING)
    assert engine.num_open == engine.pages.num_used == 0
    assert environments.ended == 12
    engine.integrity()


def test_an_environment_that_did_not_begin_is_asked_nothing(model: Model) -> None:
    class Dead(FakeEnvironments):
        def begin(self, key: int, prompt: Any, columns: Any) -> None:
            super().begin(key, prompt, columns)
            reply = self.waiting[-1]
            self.waiting[-1] = replace(reply, step=Step(done=True), problem="it hung")

    environments = Dead()
    groups, _ = run(model, environments)
    assert environments.asked == 0
    for c in flat(groups):
        assert c.episode == EpisodeRecord(1, c.episode.messages, problem="it hung", done=False)  # type: ignore[union-attr]


def test_what_is_prefilled_is_what_is_new(model: Model) -> None:
    """Of an episode's turns no token is computed twice, exactly; what is computed beside what is new
    is the last token of a turn, which was only drawn. Without the cache, the control, the whole
    history is."""
    sampling = replace(SAMPLING, ignore_eos=True)
    long = FakeEnvironments(
        lambda columns, turns: Step(({"role": "tool", "content": "x" * 61},), 0.0, len(turns) == 4)
    )
    size = {"page_size": 16, "kv_pages": 1000}
    groups, episodes = run(wide(), long, sampling, **size)
    prompts = sum(len(group[0].prompt_token_ids) for group in groups)
    given = drawn = 0
    for c in flat(groups):
        spans = sampled_spans(c)
        for (_, stop), (start, _) in pairwise(spans):
            given += start - stop
            drawn += 1
    assert episodes.stats.prefill_tokens == prompts + given + drawn
    assert episodes.stats.prefill_tokens <= 1.1 * (prompts + given)
    _, slow = run(wide(), FakeEnvironments(long.answer), sampling, prefix_cache=False, **size)
    assert slow.stats.prefill_tokens > 2 * (prompts + given)


def wide() -> Model:
    return tiny_model(alphabet=ALPHABET, scale=3.0, max_positions=512)


def test_memory_does_not_grow_with_turns_that_are_done(model: Model) -> None:
    """Pages and slots of episodes that wait are others': as many as for one turn of each."""
    sizes = []
    for turns in (1, 4):
        environments = FakeEnvironments(
            lambda columns, so_far, n=turns: Step(
                ({"role": "tool", "content": "ok"},), done=len(so_far) == n
            )
        )
        _, episodes = run(model, environments, kv_pages=30, max_sequences=4)
        record = episodes._engine.scheduler.record  # type: ignore[attr-defined]
        sizes.append((record.num_slots, record.tokens.nbytes))
    assert sizes[0] == sizes[1]


class Together(FakeEnvironments):
    """Answers when all that are open have asked, and looks at them before."""

    def look(self, turns: int) -> None:
        """Called with the number of turns that each has had."""

    def poll(self, wait_s: float) -> list[Reply]:
        if len(self.waiting) < len(self.columns):
            return []
        if self.waiting and not self.waiting[0].rewards and self.asked:
            self.look(max(map(len, self.turns.values())))
        return super().poll(wait_s)


class Keeping(Episodes):
    """The control keeps every turn's completion."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.kept: list[Completion] = []

    def _answered(self, request: Request, completion: Completion) -> None:
        self.kept.append(completion)
        super()._answered(request, completion)


@pytest.mark.slow
def test_a_thousand_open_episodes_keep_their_tokens_once(model: Model) -> None:
    """What is held of those that wait is their tokens and what was said; a token of four turns takes
    no more bytes than one of the first, and the engine holds nothing. With every turn's completion
    kept, the control, it takes twice as many."""
    engine = Engine(model, kv_pages=400, page_size=4, max_sequences=256)
    bytes_a_token, control = dict[int, float](), dict[int, float]()

    class Looking(Together):
        def look(self, turns: int) -> None:
            opened = list(episodes._open.values())
            assert len(opened) == 1000
            assert engine.num_open == engine.pages.num_used == 0
            tokens = sum(len(e.context.prompt_token_ids + e.context.token_ids) for e in opened)
            bytes_a_token[turns] = held(opened) / tokens
            control[turns] = held([opened, episodes.kept]) / tokens

    endless = FakeEnvironments(lambda columns, turns: Step(({"role": "tool", "content": "ok"},)))
    dialogue = dialogue_of(model, Looking(endless.answer))
    episodes = Keeping(engine, dialogue)
    with OpenGroups(episodes) as gathering:
        for place in range(250):
            sampling = replace(SAMPLING, n=4, max_new_tokens=4)
            gathering.add(place, episodes.submit(chat(f"{place}+1"), sampling, place, {}))
        while gathering:
            gathering.step()
    assert bytes_a_token[4] <= bytes_a_token[1]
    assert control[1] == pytest.approx(bytes_a_token[1], rel=0.01)
    assert control[4] > 1.5 * bytes_a_token[4]


def held(objects: object) -> int:
    """Bytes of all that can be reached, each object once, without code."""
    seen, left, size = set[int](), [objects], 0
    while left:
        one = left.pop()
        if id(one) in seen or isinstance(one, (type, FunctionType, ModuleType)):
            continue
        seen.add(id(one))
        size += sys.getsizeof(one)
        left += gc.get_referents(one)
    return size
