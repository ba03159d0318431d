"""What an environment says as something to learn (ECHO): which tokens, with which gradient, and
that the trained tokens and a run without it stay as they are."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from isobit.config import Config, parse_config
from isobit.errors import IsobitError
from isobit.model import Model
from isobit.model.hub import names
from isobit.rl import Objective, ResolvedObjective, Sample
from isobit.rl.algorithm.objective import OBJECTIVES
from isobit.rl.learner.forward import forward
from isobit.rl.learner.packing import pack
from tests.distributed.test_learning import learn, model_of, same
from tests.distributed.threads import run
from tests.model.helpers import directory
from tests.model.helpers import tokens as random_tokens
from tests.models import tensor, tiny_model
from tests.rl.helpers import alternating, gradients, make_learner
from tests.rl.test_completion_mask import two_turns

CASES = (
    ("....", "sss.oooss"),
    ("....", "s.oos.ooos"),
    ("...", "ssssss"),
    ("......", "ss.oo|.....sss.os"),
    ("..", "ss.s|....s.ooo"),
)
"""Prompts and completions, a mark for each token: `s` sampled, `o` learned as what an environment
said, `.` neither; behind `|` a context of its own begins."""
ADVANTAGES = [1.0, -0.5, 2.0, 0.0, -1.5]
AVERAGED = Objective(loss_aggregation="token_mean")


def marks_of(case: tuple[str, str]) -> str:
    return case[1].replace("|", "")


def episode(number: int, case: tuple[str, str]) -> Sample:
    """Of random tokens."""
    prompt, completion = case
    marks, ids = marks_of(case), random_tokens(len(prompt) + len(marks_of(case)), number)
    pieces = completion.split("|")
    return Sample(
        prompt_index=number,
        sample_index=0,
        prompt_ids=tuple(ids[: len(prompt)]),
        completion_ids=tuple(ids[len(prompt) :]),
        rollout_logprobs=(0.0,) * len(marks),
        completion="",
        truncated=False,
        weights_version=0,
        completion_mask=tuple(mark == "s" for mark in marks),
        forks=tuple(len("".join(pieces[: i + 1])) for i in range(len(pieces) - 1)),
    )


EPISODES = [episode(number, case) for number, case in enumerate(CASES)]


def marked(sample: Sample, case: tuple[str, str]) -> Iterator[tuple[list[int], str]]:
    """The tokens of each context, and a mark for each."""
    marks = [case[0] + case[1].split("|")[0], *case[1].split("|")[1:]]
    yield from zip(map(list, sample.contexts), marks, strict=True)


def recorded(model: Model, samples: Sequence[Sample]) -> list[Sample]:
    """With the log-probabilities that a rollout of the model's weights would have recorded."""
    found = []
    for sample in samples:
        values = iter(forward(model, pack([sample]), 1.0)[0].tolist())
        logprobs = [next(values) if trained else 0.0 for trained in sample.completion_mask or ()]
        version = model.weights_version
        found.append(replace(sample, rollout_logprobs=tuple(logprobs), weights_version=version))
    return found


@pytest.mark.parametrize("share_prompts", [False, True])
def test_what_is_said_between_answers_counts_and_no_prompt(share_prompts: bool) -> None:
    """Not the token right behind an answer, nor what a context begins with; each is predicted from
    the row of the token before it."""
    cases = [*CASES, CASES[0]]
    samples = [*EPISODES, replace(EPISODES[0], sample_index=1)]
    expected = []
    for number, (sample, case) in enumerate(zip(samples, cases)):
        assert sample.observed == [i for i, mark in enumerate(marks_of(case)) if mark == "o"]
        for tokens, marks in marked(sample, case):
            expected += [
                (number, tokens[place - 1], tokens[place])
                for place, mark in enumerate(marks)
                if mark == "o"
            ]
    packed = pack(samples, share_prompts, observes=True)
    assert packed.observed is not None
    before = packed.tokens[packed.observed.rows].tolist()
    ids, sequence = packed.observed.targets.tolist(), packed.observed.sequence.tolist()
    assert list(zip(sequence, before, ids)) == expected
    plain = pack(samples, share_prompts)
    assert plain.observed is None
    for name in ("tokens", "rows", "targets", "sequence", "whole"):
        assert torch.equal(getattr(plain, name), getattr(packed, name))


def test_an_answer_of_older_weights_is_nothing_that_was_said() -> None:
    """Nor is a sample without a mask."""
    assert replace(EPISODES[2], completion_mask=None).observed == []
    assert replace(EPISODES[2], completion_mask=None).trained_from(4).observed == []
    assert pack([EPISODES[2]], observes=True).observed is None


def defined(
    theirs: Any, samples: Sequence[Sample], coefficient: float, learned: Sequence[bool]
) -> tuple[Tensor, Tensor]:
    """(the loss, the mean cross-entropy of what was said), in float64, context by context: minus
    the mean of A · log p over sampled tokens, and the mean of -log p over those said in the samples
    that are `learned`."""
    policy, said = [], []
    for sample, case, advantage, takes in zip(samples, CASES, ADVANTAGES, learned):
        for tokens, marks in marked(sample, case):
            logits = theirs(torch.tensor([tokens])).logits[0]
            assert logits.dtype == torch.float64
            logprobs = logits.log_softmax(-1)
            for place, mark in enumerate(marks):
                if mark == "s":
                    policy.append(takes * advantage * logprobs[place - 1, tokens[place]])
                if mark == "o" and takes:
                    said.append(-logprobs[place - 1, tokens[place]])
    of_policy = -torch.stack(policy).sum() / sum(
        marks_of(case).count("s") for case, takes in zip(CASES, learned) if takes
    )
    mean = torch.stack(said).mean()
    return of_policy + coefficient * mean, mean


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("share_prompts", "budget"), [(True, 4096), (False, 30)])
def test_the_gradient_is_that_of_float64(
    share_prompts: bool, budget: int, masked: bool, tmp_path: Path
) -> None:
    """By transformers, parameter by parameter, in any micro-batches; a truncated completion that
    the loss leaves out teaches nothing of either. The control: another coefficient."""
    single, path = directory(tmp_path, "qwen3", hidden_size=32, head_dim=8)
    theirs = single.double()
    model = Model.load(path, "float32")
    samples = recorded(model, EPISODES)
    samples[1] = replace(samples[1], truncated=masked)
    learned = [not sample.truncated for sample in samples]
    loss, mean = defined(theirs, samples, 0.3, learned)
    loss.backward()
    wanted = names.fuse(
        lambda name, lo, hi: dict(theirs.named_parameters())[name].grad[lo:hi], model.config
    )

    def errors(coefficient: float) -> tuple[list[float], float]:
        objective = replace(AVERAGED, observation_coefficient=coefficient, mask_truncated=masked)
        given = {"share_prompts": share_prompts, "micro_batch_tokens": budget}
        learner = make_learner(model, objective, **given)
        found = gradients(learner, samples, ADVANTAGES)
        assert found.keys() == wanted.keys()
        off = [
            float((tensor(found[name]).double() - wanted[name]).norm() / wanted[name].norm())
            for name in wanted
        ]
        fresh = make_learner(Model.load(path, "float32"), objective, **given)
        metrics = fresh.learn(samples, ADVANTAGES, 0).metrics
        return off, metrics.get("loss/observation", 0.0)

    off, logged = errors(0.3)
    assert max(off) < 2e-5
    assert logged == pytest.approx(float(mean.detach()), rel=1e-5)
    assert min(errors(0.2)[0]) > 1e-3
    assert errors(0.0)[1] == 0.0


def test_trained_tokens_keep_their_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are those of the rollout, with what was said beside them and without, and so is all that
    is logged of them. Without it nothing more is computed: a head for each micro-batch."""
    samples = two_turns(tiny_model("fp8", scale=8))

    def learned(coefficient: float) -> tuple[Any, int, dict[str, Tensor]]:
        model, heads = tiny_model("fp8", scale=8), 0
        head = model.transformer.head_logprobs

        def counted(*given: Any, **more: Any) -> tuple[Tensor, Tensor]:
            nonlocal heads
            heads += 1
            return head(*given, **more)

        monkeypatch.setattr(model.transformer, "head_logprobs", counted)
        objective = Objective(observation_coefficient=coefficient)
        learner = make_learner(model, objective, on_mismatch="stop", micro_batch_tokens=24)
        found = learner.learn(samples, alternating(samples), 0)
        return found, heads, {n: p.detach() for n, p in model.named_parameters().items()}

    (plain, heads, before), (said, more, after) = learned(0.0), learned(0.5)
    assert more == 2 * heads > 2
    assert plain.compared == said.compared
    assert [plain.compared[s.prompt_index, s.sample_index] for s in samples] == [
        list(s.rollout_logprobs) for s in samples
    ]
    moved = {"loss/observation", "grad_norm"}
    assert said.metrics.keys() - plain.metrics.keys() == {"loss/observation"}
    assert {k: v for k, v in said.metrics.items() if k not in moved} == {
        k: v for k, v in plain.metrics.items() if k not in moved
    }
    assert said.metrics["mismatch/differing_tokens"] == 0
    assert not same(before, after), "the control: it is learned"


def test_a_sample_without_an_advantage_teaches_what_was_said() -> None:
    """And one in which nothing was said is left out as before; the cross-entropy falls. The
    control: without a coefficient nothing is learned."""
    samples = two_turns(tiny_model("fp8", scale=8))
    samples += [replace(s, completion_mask=None, sample_index=9) for s in samples[:1]]
    model, found = tiny_model("fp8", scale=8), []
    learner = make_learner(
        model, Objective(observation_coefficient=1.0), rate=3e-3, micro_batch_tokens=1
    )
    for step in range(5):
        metrics = learner.learn(samples, [0.0] * len(samples), step).metrics
        assert metrics["learn/skipped_share"] == pytest.approx(
            (len(samples[-1].prompt_ids) + len(samples[-1].completion_ids))
            / sum(len(s.prompt_ids) + len(s.completion_ids) for s in samples)
        )
        found.append(metrics["loss/observation"])
        model.sync()
    assert found == sorted(found, reverse=True)
    assert found[-1] < 0.8 * found[0]
    nothing = make_learner(tiny_model("fp8", scale=8), Objective(), micro_batch_tokens=1)
    metrics = nothing.learn(samples, [0.0] * len(samples), 0).metrics
    assert metrics["learn/skipped_share"] == 1
    assert metrics["grad_norm"] == 0


def test_two_ranks_learn_the_same() -> None:
    """Bit for bit, what is logged too. The control: without it."""
    flow = ("fp8-unified", "qwen3")
    samples = two_turns(model_of(*flow))
    own = {"max_new_tokens": 5, "updates_per_batch": 2}
    objective = ResolvedObjective.of(OBJECTIVES["grpo"], **own, observation_coefficient=0.3)
    state, metrics = learn(samples, *flow, objective=objective)
    assert all(row["loss/observation"] > 0 for row in metrics)
    for found, measured in run(2, lambda ranks: learn(samples, *flow, ranks, objective)):
        assert same(found, state)
        assert repr(measured) == repr(metrics)
    assert not same(learn(samples, *flow)[0], state)


def test_a_run_without_observations_is_refused() -> None:
    values: dict[str, Any] = {
        "model": {"path": "m"},
        "algorithm": {"observation_coefficient": 0.05},
        "environment": {"factory": "games.py:Game", "max_turns": 2},
    }
    found = parse_config(Config, values, "a test")
    assert found.algorithm.observation_coefficient == 0.05
    for environment, why in (
        ({}, "the environment is not there"),
        ({"max_turns": 1}, r"the environment ends with the first answer \(max_turns: 1\)"),
    ):
        given = {**values, "environment": environment and values["environment"] | environment}
        with pytest.raises(IsobitError, match=why) as caught:
            parse_config(Config, given, "a test")
        assert "\n" not in str(caught.value)
