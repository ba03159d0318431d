"""Conversations whose template writes the past otherwise: an episode has several contexts, and is
one sample."""

from dataclasses import replace

import pytest
import torch

from isobit.data.episodes import EpisodeRecord
from isobit.engine.engine import Engine
from isobit.engine.episodes import MOST_SAMPLES, Episodes
from isobit.engine.types import Completion
from isobit.errors import IsobitError
from isobit.model import Model
from isobit.model.text.appending import Appending, numbered
from isobit.rl import Sample
from isobit.rl.learner.packing import pack
from isobit.training.rollouts.sources import sample_of
from tests.dialogues import SHORTENING, FakeEnvironments, chat, dialogue_of
from tests.engine.test_episodes import (
    PROMPTS,
    ROWS,
    SAMPLING,
    finish,
    flat,
    gathered,
    learned,
    recorded,
    sampled_spans,
)
from tests.models import ALPHABET, tiny_model


def forking(model: Model, environments: FakeEnvironments, **size: int) -> list[Completion]:
    engine = Engine(model, **{"kv_pages": 200, "page_size": 4, **size})
    dialogue = replace(dialogue_of(model, environments), forks=True)
    model.tokenizer.chat_template = SHORTENING
    groups = gathered(Episodes(engine, dialogue), engine, SAMPLING)
    assert engine.num_open == engine.pages.num_used == 0
    return flat(groups)


@pytest.fixture(scope="module")
def model() -> Model:
    return tiny_model(alphabet=ALPHABET, scale=3.0, max_positions=256)


@pytest.fixture(scope="module")
def episodes(model: Model) -> list[Completion]:
    return forking(model, FakeEnvironments())


def record_of(completion: Completion) -> EpisodeRecord:
    assert completion.episode is not None
    return completion.episode


def test_each_turn_begins_with_what_the_template_writes(
    model: Model, episodes: list[Completion]
) -> None:
    """And is drawn as from this prompt, with keys that no other context of the episode has. Some
    turns go on, where the template writes what was sampled."""
    engine, contexts, turns, other = Engine(model, kv_pages=200), 0, 0, 0
    for c in episodes:
        happened, sample = record_of(c), sample_of(c)
        assert happened.turns == ROWS[c.prompt_id - 7]["turns"]
        spans = sampled_spans(c)
        assert len(spans) == happened.turns
        answers = [i for i, m in enumerate(happened.messages) if m["role"] == "assistant"]
        for (start, stop), place in zip(spans, answers):
            said = [*chat(PROMPTS[c.prompt_id - 7]), *happened.messages[:place]]
            before = list(sample.before(start))
            assert before == model.tokenizer.encode_chat(said)
            forks = sum(fork <= start for fork in c.forks)
            drawn = {}
            for key in {c.sample_index, c.sample_index + forks * MOST_SAMPLES}:
                one = replace(SAMPLING, n=1)
                request = engine.submit(before, one, c.prompt_id, key)
                drawn[key] = finish(engine)[request]
            again = drawn[c.sample_index + forks * MOST_SAMPLES]
            assert again.token_ids == c.token_ids[start:stop]
            assert again.logprobs == c.logprobs[start:stop]
            other += drawn[c.sample_index].token_ids != again.token_ids
            turns += 1
        contexts += 1 + len(c.forks)
    assert len(episodes) < contexts < turns, "some fork, and some go on"
    assert other > 0


@pytest.mark.parametrize("size", [{}, {"kv_pages": 30}])
def test_the_order_of_replies_moves_no_bit(
    model: Model, episodes: list[Completion], size: dict[str, int]
) -> None:
    assert forking(model, FakeEnvironments(seed=3), **size) == episodes


@pytest.mark.parametrize("share_prompts", [False, True])
def test_the_learner_has_the_log_probabilities_of_all_contexts(
    model: Model, episodes: list[Completion], share_prompts: bool
) -> None:
    """0 differing tokens, and each belongs to its sample; the control sees the contexts as one."""
    samples = [sample_of(c) for c in episodes]
    assert learned(model, samples, share_prompts) == recorded(samples)
    packed = pack(samples, share_prompts)
    assert packed.num_targets == sum(s.num_trained for s in samples)
    counts = torch.bincount(packed.sequence, minlength=len(samples)).tolist()
    assert counts == [s.num_trained for s in samples]
    joined = [replace(s, forks=()) for s in samples]
    assert learned(model, joined, share_prompts) != recorded(samples)


def test_a_forked_sample_is_its_contexts_to_the_learner(
    model: Model, episodes: list[Completion]
) -> None:
    """The gradient of its log-probabilities is that of its contexts, as samples of their own."""
    whole = [sample_of(c) for c in episodes if c.forks]
    apart = [part for sample in whole for part in contexts_of(sample)]
    assert len(apart) > len(whole)
    assert gradient(model, whole) == gradient(model, apart)


def contexts_of(sample: Sample) -> list[Sample]:
    """Each context as a sample."""
    edges = [0, *sample.forks, len(sample.completion_ids)]
    found = []
    for number, tokens in enumerate(sample.contexts):
        begin, end = edges[number], edges[number + 1]
        first = 0 if number == 0 else 1
        mask = sample.completion_mask
        assert mask is not None
        found.append(
            replace(
                sample,
                prompt_ids=sample.prompt_ids if number == 0 else tokens[:1],
                completion_ids=sample.completion_ids[begin + first : end],
                completion_mask=mask[begin + first : end],
                rollout_logprobs=sample.rollout_logprobs[begin + first : end],
                forks=(),
            )
        )
    return found


def gradient(model: Model, samples: list[Sample]) -> list[bytes]:
    from isobit.rl.learner.forward import forward

    parameters = model.named_parameters()
    for parameter in parameters.values():
        parameter.grad = None
    with torch.enable_grad():
        forward(model, pack(samples), 1.0)[0].sum().backward()
    return [p.grad.numpy().tobytes() for p in parameters.values() if p.grad is not None]


def test_samples_keep_their_forks(episodes: list[Completion]) -> None:
    for c in episodes:
        sample = sample_of(c)
        values = sample.to_json()
        assert ("forks" in values) == bool(c.forks)
        assert Sample.from_json(values) == sample
        joined = [token for tokens in sample.contexts for token in tokens]
        assert joined == [*c.prompt_token_ids, *c.token_ids]


def test_calls_and_answers_have_ids_in_order() -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    asked = {"role": "assistant", "content": "", "tool_calls": [call, call]}
    told = {"role": "tool", "name": "f", "content": "1"}
    found = numbered([asked, told, told, asked, told])
    ids = [[each["id"] for each in m.get("tool_calls", ())] or m["tool_call_id"] for m in found]
    first, second = ["call00000", "call00001"], ["call00002", "call00003"]
    assert ids == [first, *first, second, second[0]]
    assert "id" not in call


def test_a_template_that_drops_what_tools_say_is_refused(model: Model) -> None:
    """Also where it may change the past; the control shows it."""
    tokenizer = model.tokenizer
    tokenizer.chat_template = SHORTENING
    Appending(tokenizer).check_shown("tool", "user")
    tokenizer.chat_template = SHORTENING.replace("in messages", "in messages if m.role != 'tool'")
    with pytest.raises(IsobitError, match="leaves out what a message of role tool says"):
        Appending(tokenizer).check_shown("tool")
