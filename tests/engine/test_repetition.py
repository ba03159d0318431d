"""The repetition penalty: transformers' definition, and the learner's bits whatever the order of
the work."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from isobit.engine.engine import Engine
from isobit.engine.types import Completion, Sampling
from isobit.kernels import Layout
from isobit.kernels.sampling.filtering import Context, penalize
from isobit.model import Model
from tests.models import slow_where

from .helpers import outcome, tiny
from .test_consistency import HARD
from .test_invariance import PROMPT_IDS, PROMPTS

MakeEngine = Callable[..., Engine]
PENALIZED = Sampling(n=4, max_new_tokens=20, seed=3, repetition_penalty=1.7)


def test_logits_are_those_of_transformers() -> None:
    from transformers import RepetitionPenaltyLogitsProcessor

    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(1))
    tokens = torch.tensor([[1, 2, 2, 9, 0], [3, 3, 3, 3, 3], [49, 0, 7, 7, 8]])
    starts = torch.tensor([0, 5, 10])
    seen = Context(tokens.flatten(), starts, starts + 4).seen(slice(0, 3), 50)
    for penalty in (1.3, 0.8):
        found = penalize(logits, seen, torch.full((3, 1), penalty))
        assert torch.equal(found, RepetitionPenaltyLogitsProcessor(penalty)(tokens, logits.clone()))
    earlier = Context(tokens.flatten(), starts, starts + 3).seen(slice(0, 3), 50)
    other = penalize(logits, earlier, torch.full((3, 1), 0.8))
    assert not torch.equal(other, found), "the control: one token fewer"


def differing(model: Model, completions: list[Completion], sampling: Sampling) -> float:
    """The share of tokens whose bits differ from the learner's, of all tokens before each."""
    count = total = 0
    for completion in completions:
        ids = torch.tensor([*completion.prompt_token_ids, *completion.token_ids])
        rows = torch.arange(len(completion.prompt_token_ids) - 1, len(ids) - 1)
        hidden = model.transformer.hidden(ids[:-1], Layout.packed([len(ids) - 1]), use="learner")[
            rows
        ]
        found, _ = model.transformer.head_logprobs(
            hidden,
            ids[rows + 1],
            1.0,
            filtering=sampling.filtering,
            context=Context(ids, torch.zeros_like(rows), rows),
        )
        own = torch.tensor(completion.sampled)
        count += int(
            (found.view(torch.int32) != torch.tensor(completion.logprobs).view(torch.int32))[
                own
            ].sum()
        )
        total += int(own.sum())
    return count / total


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize(
    ("preset", "backend"),
    slow_where(
        [("fp8", "native"), ("bf16", "native"), ("bf16", "reference"), ("fp8", "reference")],
        lambda preset, backend: (preset, backend) == ("fp8", "reference"),
    ),
)
def test_the_learner_has_the_bits_under_preemption_and_sharing(
    preset: str, backend: str, make_engine: MakeEngine
) -> None:
    """The control is a learner with another penalty, and one without."""
    model = tiny(preset, backend)
    engine = make_engine(model, **HARD)
    groups = engine.generate(PROMPTS, PENALIZED, PROMPT_IDS)
    assert engine.stats.preemptions > 0
    assert engine.stats.shared_pages > 0
    completions = [completion for group in groups for completion in group]
    assert differing(model, completions, PENALIZED) == 0
    assert differing(model, completions, replace(PENALIZED, repetition_penalty=1.6)) > 0.5
    assert (
        differing(model, completions, replace(PENALIZED, repetition_penalty=1.0, top_k=10**6)) > 0.5
    )
    roomy = make_engine(model).generate(PROMPTS, PENALIZED, PROMPT_IDS)
    assert outcome(roomy) == outcome(groups)


@torch.no_grad()
def test_further_turns_count_all_tokens_before(make_engine: MakeEngine) -> None:
    model = tiny("fp8")
    engine = make_engine(model)
    one = replace(PENALIZED, n=1, max_new_tokens=6, ignore_eos=True)
    (before,) = engine.generate([[5, 6, 7]], one)[0]
    engine.continue_from(before, [8, 9], one)
    ((_, after),) = [found for _ in range(6) for found in engine.step()]
    assert len(after.token_ids) == 14
    assert differing(model, [after], one) == 0


def test_a_row_without_a_penalty_is_as_it_is_alone(make_engine: MakeEngine) -> None:
    model, engine = tiny("fp8"), make_engine(tiny("fp8"))
    plain = Sampling(n=2, max_new_tokens=12, seed=3)
    alone = outcome(make_engine(model).generate([[5, 6, 7]], plain))
    engine.submit([5, 6, 7], plain, prompt_id=0)
    engine.submit([5, 6, 7], replace(PENALIZED, n=2, max_new_tokens=12), prompt_id=1)
    greedy = replace(PENALIZED, n=1, temperature=0.0, ignore_eos=True)
    engine.submit([5, 6, 7], greedy, prompt_id=2)
    done = []
    while engine.num_open:
        done += [completion for _, completion in engine.step()]
    found = outcome([done])
    assert {key: value for key, value in found.items() if key[0] == 0} == alone
    penalized = [found[1, i][0] for i in range(2)]
    assert penalized != [alone[0, i][0] for i in range(2)]
    repeated = [len(tokens) - len(set(tokens)) for tokens in (found[2, 0][0],)]
    (without,) = make_engine(model).generate([[5, 6, 7]], replace(greedy, repetition_penalty=1.0))[
        0
    ]
    assert repeated[0] < len(without.token_ids) - len(set(without.token_ids))
