"""What a teacher is shown beside the prompt: as TRL builds it for SDFT and SDPO, and the gradient of
its advantages as that of TRL's loss of sampled tokens."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from isobit.data.dataset import Prompt
from isobit.errors import IsobitError
from isobit.rl import Group, ResolvedObjective, Sample
from isobit.rl.algorithm.advantages import AdvantageInputs
from isobit.rl.algorithm.credit import assign_credit
from isobit.rl.algorithm.shown import Shown, composed, demonstration_of, feedback_function
from isobit.rl.algorithm.token_advantages import distillation
from tests.rl.helpers import group, loss_inputs
from tests.rl.trl_loss import needs_trl

CHAT: Prompt = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "What is {shown}?"},
]
SDPO = "{prompt}\nCorrect solution:\n\n{shown}\n\n\n\nCorrectly solve the original question.\n"
FEEDBACK = (
    "{prompt}\nThe following is feedback from your unsuccessful earlier attempt:\n\n{shown}\n\n\n\n"
    "Correctly solve the original question.\n"
)


def answered(*rewards: float | None) -> Group:
    return [
        replace(sample, completion=f"answer {i}") for i, sample in enumerate(group(0, *rewards))
    ]


def said(prompt: Any, completion: str, reward: float | None, columns: Any) -> str | None:
    """Feedback on one of the completions."""
    return "it is too long" if completion == "answer 1" else None


def trl_prompts(answers: Group, prompt: Any, shown: Shown, feedback: bool) -> list[Any]:
    """What TRL's SDPO has its teacher read; None where it masks the completion."""
    from trl.experimental.sdpo import sdpo_trainer

    kept: list[Any] = []

    def encode(prompts: list[Any]) -> list[list[int]]:
        kept.extend(prompts)
        return [[1]] * len(prompts)

    args = SimpleNamespace(
        success_reward_threshold=shown.success,
        use_successful_as_teacher=shown.success is not None,
        dont_reprompt_on_self_success=True,
        environment_feedback_only_without_solution=True,
        include_environment_feedback=feedback,
        remove_thinking_from_demonstration=False,
        max_reprompt_len=100,
        reprompt_template="{prompt}{solution}{feedback}\n\nCorrectly solve the original question.\n",
        solution_template="\nCorrect solution:\n\n{successful_previous_attempt}\n\n",
        feedback_template="\nThe following is feedback from your unsuccessful earlier attempt:\n\n"
        "{feedback_raw}\n\n",
    )
    trainer = SimpleNamespace(
        args=args,
        model=SimpleNamespace(training=True),
        num_generations=len(answers),
        accelerator=SimpleNamespace(
            device="cpu",
            process_index=0,
            gather=lambda x: x,
            pad_across_processes=lambda x, dim, pad_index: x,
        ),
        _tokenizer=SimpleNamespace(pad_token_id=0),
        processing_class=SimpleNamespace(
            decode=lambda ids, skip_special_tokens: f"answer {int(ids[0]) - 1}"
        ),
        _tokenize_prompts_untruncated=encode,
    )
    ids = torch.arange(1, len(answers) + 1).unsqueeze(1)
    rewards = torch.tensor([float("-inf") if s.reward is None else s.reward for s in answers])
    given = [said(prompt, s.completion, s.reward, {}) for s in answers] if feedback else None
    built = sdpo_trainer.SuccessfulRolloutTeacherContextBuilder(trainer).build(
        {"completion_ids": ids, "completion_mask": torch.ones_like(ids)},
        [prompt] * len(answers),
        rewards,
        given,
    )
    mask = built["self_distillation_mask"].tolist()
    return [each if taught else None for each, taught in zip(kept, mask, strict=True)]


@needs_trl
@pytest.mark.parametrize("feedback", [False, True])
@pytest.mark.parametrize("prompt", ["1+1=", [CHAT[1]], CHAT])
@pytest.mark.parametrize(
    "rewards", [(0.0, 1.0, 0.5, 1.0), (0.0, 0.0, 1.0), (0.0, 0.0), (None, 2.0, 0.0)]
)
def test_a_success_or_feedback_is_shown_as_by_trl(
    rewards: tuple[float | None, ...], prompt: Any, feedback: bool
) -> None:
    """The first other success; else feedback; else nothing, and the completion is masked."""
    answers = answered(*rewards)
    shown = Shown(
        success=1.0,
        feedback="any.py:function" if feedback else None,
        template=SDPO,
        feedback_template=FEEDBACK,
    )
    given = said if feedback else None
    found = shown.prompts(answers, prompt, {}, given)
    wanted = trl_prompts(answers, prompt, shown, feedback)
    if isinstance(prompt, str):  # TRL's own text of a prompt is filled by format
        assert found == wanted
        return
    text = [None if each is None else each[-1]["content"] for each in wanted]
    assert [None if each is None else each[-1]["content"] for each in found] == text
    assert all(each[:-1] == prompt[:-1] for each in found if each is not None)


@needs_trl
@pytest.mark.parametrize("prompt", ["1+1=", [CHAT[1]], CHAT])
@pytest.mark.parametrize(
    "shown", ["two", [{"role": "user", "content": "So?"}, {"role": "assistant", "content": "Two"}]]
)
def test_a_demonstration_is_shown_as_by_trl(prompt: Any, shown: Any) -> None:
    from trl.experimental.sdft.sdft_trainer import DemonstrationTeacherContextBuilder

    template = "{prompt}\n\nAn example:\n{privileged_context}"
    trainer = SimpleNamespace(args=SimpleNamespace(teacher_prompt_template=template))
    wanted = DemonstrationTeacherContextBuilder(trainer)._compose_teacher_prompt(prompt, shown)
    ours = Shown(demonstration="how", template=template.replace("privileged_context", "shown"))
    found = ours.prompts(answered(0.0, 0.0), prompt, {"how": shown}, None)
    assert found == [wanted, wanted]


def test_texts_are_no_places_of_a_template() -> None:
    """`{shown}` in a prompt is text, and so are braces in a demonstration."""
    found = composed(CHAT, "{prompt} {x}", "{prompt} / {shown}")
    assert found[-1]["content"] == "What is {shown}? / {prompt} {x}"  # type: ignore[index]
    assert found[0] == CHAT[0]
    assert CHAT[-1]["content"] == "What is {shown}?"


@needs_trl
def test_the_gradient_is_that_of_trl_s_loss_of_sampled_tokens() -> None:
    """By the logits, in the first update of a batch, for the clipped loss and, with its clip at 2 as
    SDPO has it, for cispo. The controls: a teacher that saw nothing more moves nothing, and the
    forward KL of the same distributions is another gradient."""
    from trl.experimental.sdpo.loss_utils import (
        apply_importance_sampling_clipping,
        compute_full_logit_self_distillation_loss,
        compute_sampled_token_self_distillation_loss,
    )

    generator = torch.Generator().manual_seed(0)
    logits, teacher = torch.randn(2, 1, 6, 11, generator=generator, dtype=torch.float64)
    ids = torch.randint(11, (1, 6), generator=generator)

    def theirs(other: Tensor) -> Tensor:
        leaf = logits.clone().requires_grad_()
        rows = compute_sampled_token_self_distillation_loss(
            leaf, other, ids, distillation_alpha=1.0
        )
        own = leaf.log_softmax(-1).gather(-1, ids.unsqueeze(-1)).squeeze(-1)
        apply_importance_sampling_clipping(rows, own, own.detach(), 2.0).mean().backward()
        assert leaf.grad is not None
        return leaf.grad

    def ours(other: Tensor, **objective: Any) -> Tensor:
        leaf = logits.clone().requires_grad_()
        rows = [x.log_softmax(-1).gather(-1, ids.unsqueeze(-1)).flatten() for x in (leaf, other)]
        policy, taught = rows
        sample = replace(group(0, 0.0, length=6)[0], reference_kl=(0.0,) * 6)
        charged = (policy.detach() - taught).tolist()
        inputs = AdvantageInputs([[0.0]], [[charged]], [[sample]], ResolvedObjective())
        advantages = torch.tensor(distillation(inputs)[0][0], dtype=torch.float64)
        settings = ResolvedObjective(**objective)
        from isobit.rl.algorithm.loss import LOSSES

        found = LOSSES[settings.loss](
            loss_inputs(policy, policy.detach(), advantages, settings)
        ).loss
        found.mean().backward()
        assert leaf.grad is not None
        return leaf.grad

    wanted = theirs(teacher)
    for objective in ({}, {"loss": "cispo", "clip_low": 1.0, "clip_high": 1.0}):
        assert torch.allclose(ours(teacher, **objective), wanted, rtol=1e-12, atol=1e-15)
    assert not ours(logits).any()
    leaf = logits.clone().requires_grad_()
    compute_full_logit_self_distillation_loss(
        leaf, teacher, distillation_alpha=0.0
    ).mean().backward()
    assert leaf.grad is not None
    assert not torch.allclose(leaf.grad, wanted, rtol=0.1)


def test_a_completion_without_a_teacher_has_no_advantage() -> None:
    """And so no part in any average; the control is a KL of 0, which has."""
    objective = ResolvedObjective(
        advantage="distillation", kl_coefficient=2.0, kl_in_reward=True, kl_estimator="k1"
    )
    one, other, last = group(0, 0.0, 0.0, 0.0, length=2)
    groups = [
        [
            replace(one, reference_kl=(0.5, -1.0)),
            other,
            replace(last, reference_kl=(0.0, 0.0)),
        ]
    ]
    samples, advantages = assign_credit(groups, objective)
    assert [s.sample_index for s in samples] == [0, 2]
    assert advantages == [(-1.0, 2.0), (-0.0, -0.0)]


def test_what_cannot_be_shown_is_refused(tmp_path: Path) -> None:
    """Each in one line."""
    with pytest.raises(IsobitError, match="give either demonstration"):
        Shown()
    with pytest.raises(IsobitError, match="give either demonstration"):
        Shown(demonstration="how", success=1.0)
    with pytest.raises(IsobitError, match=r"no column 'how'; there are: answer"):
        demonstration_of({"answer": "2"}, "how")
    for value in (3, "", [{"role": "user"}], None):
        with pytest.raises(IsobitError, match="column 'how' must be text or messages"):
            demonstration_of({"how": value}, "how")
    with pytest.raises(IsobitError, match=r"last message must be the user's, got role 'system'"):
        composed(CHAT[:1], "two", "{prompt}{shown}")
    file = tmp_path / "own.py"
    file.write_text("def wrong(**given):\n    return 3\n\ndef fails(**given):\n    return 1 / 0\n")
    answers: list[Sample] = list(answered(0.0, 0.0))
    for name, match in (("wrong", "expected text or None, got 3"), ("fails", "ZeroDivisionError")):
        shown = Shown(feedback=f"{file}:{name}")
        with pytest.raises(IsobitError, match=match):
            shown.prompts(answers, "1+1=", {}, feedback_function(shown))
    shown = Shown(feedback=f"{file}:missing")
    with pytest.raises(IsobitError, match=r"reference\.shown\.feedback .* has no function"):
        feedback_function(shown)
