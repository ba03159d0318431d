"""Losses and advantages of the user's file: the same interface as those by name, and one line for
every mistake."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from isobit.errors import IsobitError
from isobit.rl import OBJECTIVES, ResolvedObjective, Sample
from isobit.rl.algorithm.advantages import AdvantageInputs
from isobit.rl.algorithm.credit import assign_credit
from isobit.rl.algorithm.functions import (
    LOSSES,
    advantage_function,
    check_functions,
    check_split,
    digests,
    loss_function,
)
from isobit.rl.algorithm.loss import LossInputs, LossOutputs
from isobit.rl.algorithm.objective import RATIOS
from tests.models import tiny_model
from tests.rl.helpers import alternating, gradients, loss_inputs, make_learner, roll_out

HEADER = "import torch\nfrom isobit.rl.algorithm.loss import LossOutputs, clip, ratios\n"
PLAIN = "-inputs.policy_logprobs * inputs.advantages"


def loss_file(folder: Path, body: str, signature: str = "inputs", name: str = "losses.py") -> str:
    """The reference of a function `loss` with this body."""
    file = folder / name
    file.write_text(f"{HEADER}\ndef loss({signature}):\n    {body}\n")
    return f"{file}:loss"


def advantage_file(folder: Path, expression: str) -> str:
    file = folder / "advantages.py"
    file.write_text(f"def advantage(inputs):\n    return {expression}\n")
    return f"{file}:advantage"


def line_of(call: Callable[[], object]) -> str:
    with pytest.raises(IsobitError) as caught:
        call()
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("loss", sorted(LOSSES.keys() - {"divergence"}))  # in test_divergence.py
def test_the_losses_by_name_do_not_depend_on_the_split(loss: str, ratio: str) -> None:
    objective = ResolvedObjective(loss=loss, ratio=ratio, dual_clip=3.0)
    check_split(LOSSES[loss], objective, loss)


@pytest.mark.parametrize(
    "body",
    [
        f"return LossOutputs(({PLAIN}).mean().expand(len(inputs.advantages)))",
        f"return LossOutputs({PLAIN} - inputs.policy_logprobs.mean())",
        "a = inputs.advantages - inputs.advantages.mean()\n    return "
        "LossOutputs(-inputs.policy_logprobs * a)",
        f"return LossOutputs({PLAIN} / len(inputs.advantages))",
        f"return LossOutputs(({PLAIN}) / (1 + inputs.sequence))",
        f"return LossOutputs({PLAIN} - inputs.entropy.mean())",
    ],
)
def test_a_statistic_of_the_micro_batch_is_refused(tmp_path: Path, body: str) -> None:
    """The controls of the split: means, normalized advantages, the number of tokens or
    sequences."""
    objective = ResolvedObjective(loss=loss_file(tmp_path, body))
    assert "depends on how a batch is split" in line_of(lambda: check_functions(objective))


def test_a_loss_of_each_token_or_of_its_sequence_is_taken(tmp_path: Path) -> None:
    check_functions(ResolvedObjective(loss=loss_file(tmp_path, f"return LossOutputs({PLAIN})")))
    whole = (
        "sums = torch.zeros(99).index_add(0, inputs.sequence, "
        "inputs.policy_logprobs)[inputs.sequence]"
    )
    body = f"{whole}\n    return LossOutputs(-sums * inputs.advantages)"
    check_functions(ResolvedObjective(loss=loss_file(tmp_path, body)))


BONUS = "return LossOutputs({plain} - 0.01 * inputs.entropy{detached})"
FORKS = "forks = inputs.entropy{detached} {above} 0.5\n    return LossOutputs(({plain}) * forks)"


@pytest.mark.parametrize(
    "body",
    [
        FORKS.format(plain=PLAIN, detached=".detach()", above=">"),
        FORKS.format(plain=PLAIN, detached="", above=">"),  # a comparison has no gradient anyway
        f"return LossOutputs(({PLAIN}) * inputs.entropy.detach())",
        BONUS.format(plain=PLAIN, detached=".detach()"),
        f"return LossOutputs({PLAIN}, metrics={{'entropy': inputs.entropy}})",
        BONUS.format(plain=PLAIN, detached=""),
        f"return LossOutputs(({PLAIN}) * inputs.entropy)",
        "return LossOutputs(-inputs.entropy * inputs.advantages)",
    ],
)
def test_entropy_may_choose_and_weigh_tokens_be_a_metric_and_be_learned(
    tmp_path: Path, body: str
) -> None:
    check_functions(ResolvedObjective(loss=loss_file(tmp_path, body)))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (f"return {PLAIN}", "returned Tensor, expected isobit.rl.algorithm.loss.LossOutputs"),
        (
            f"return LossOutputs(({PLAIN}).sum())",
            "loss is [], expected a tensor with a number for each token, [13]",
        ),
        (f"return LossOutputs(({PLAIN})[1:])", "loss is [12], expected"),
        ("return LossOutputs(inputs.advantages)", "the loss has no gradient"),
        (f"return LossOutputs(({PLAIN}) * float('nan'))", "its gradient is not finite"),
        (
            f"return LossOutputs({PLAIN}, metrics={{'mine': 1.0}})",
            "metrics['mine'] is float, expected a tensor",
        ),
        (f"return LossOutputs({PLAIN}, metrics={{'kl': inputs.entropy}})", "none of policy, kl"),
        (f"return LossOutputs({PLAIN}, metrics={{'held_out': inputs.entropy}})", "none of policy"),
        (f"return LossOutputs({PLAIN}, clipped=True)", "clipped is bool, expected a tensor"),
        ("return 1 / 0", "ZeroDivisionError: division by zero (losses.py, line 5)"),
        ("return inputs.logprobs", "'LossInputs' object has no attribute 'logprobs'"),
    ],
)
def test_what_a_loss_does_wrong_is_one_line(tmp_path: Path, body: str, message: str) -> None:
    reference = loss_file(tmp_path, body)
    line = line_of(lambda: check_functions(ResolvedObjective(loss=reference)))
    assert line.startswith(f"algorithm.loss {reference!r}: ")
    assert message in line


def test_what_cannot_be_loaded_is_one_line(tmp_path: Path) -> None:
    found = loss_file(tmp_path, f"return LossOutputs({PLAIN})")
    file = found.removesuffix(":loss")
    for reference, message in (
        (f"{tmp_path}/none.py:loss", f"no file {tmp_path}/none.py"),
        (f"{file}:lost", "has no function 'lost'; did you mean 'loss'?"),
        ("losses.py", "expected path/to/file.py:function"),
    ):
        line = line_of(lambda reference=reference: loss_function(reference))  # type: ignore[misc]
        assert line.startswith(f"algorithm.loss {reference!r}: ")
        assert message in line
    two = loss_file(tmp_path, "pass", "policy, old")
    assert "expected def loss(inputs: LossInputs) -> LossOutputs" in line_of(
        lambda: loss_function(two)
    )
    broken = tmp_path / "broken.py"
    broken.write_text("def loss(inputs):\nreturn 1\n")
    for _ in range(2):  # a module that failed is not kept
        assert "broken.py, line 2" in line_of(lambda: loss_function(f"{broken}:loss"))


def test_a_file_that_has_changed_is_loaded_again(tmp_path: Path) -> None:
    """As in a notebook; and its sha256 is another."""
    inputs = loss_inputs(torch.zeros(2), torch.zeros(2), torch.ones(2), ResolvedObjective())
    first = loss_file(tmp_path, "return LossOutputs(inputs.entropy)")
    before = digests(ResolvedObjective(loss=first))
    assert loss_function(first)(inputs).loss.tolist() == [1, 1]
    assert digests(ResolvedObjective(loss=first)) == before
    loss_file(tmp_path, "return LossOutputs(2 * inputs.entropy)")
    assert loss_function(first)(inputs).loss.tolist() == [2, 2]
    assert digests(ResolvedObjective(loss=first)) != before
    assert digests(ResolvedObjective()) == {}


@pytest.mark.parametrize("precision", ["fp8", "fp8-rollout"])
def test_a_loss_that_is_the_clip_written_anew_has_its_gradient(
    tmp_path: Path, precision: str
) -> None:
    """Bit for bit, with a correction and without, in micro-batches; another loss has another
    gradient."""
    mine = (
        "r = ratios(inputs)\n"
        "    bounded = r.clamp(1 - inputs.clip_low, 1 + inputs.clip_high)\n"
        "    loss = -torch.minimum(r * inputs.advantages, bounded * inputs.advantages)\n"
        "    return LossOutputs(loss, metrics={'ratio': r})"
    )
    objective = ResolvedObjective.of(OBJECTIVES["dapo"], max_new_tokens=5)
    found = []
    twice = loss_file(tmp_path, "return LossOutputs(2 * clip(inputs).loss)", name="twice.py")
    for loss in ("clip", loss_file(tmp_path, mine), twice):
        model = tiny_model(precision, scale=8)
        samples = roll_out(model)
        learner = make_learner(model, replace(objective, loss=loss), micro_batch_tokens=40)
        found.append(gradients(learner, samples, alternating(samples)))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
    assert not all(torch.equal(found[0][name], found[2][name]) for name in found[0])


def test_metrics_are_means_over_tokens_of_all_micro_batches(tmp_path: Path) -> None:
    body = (
        f"return LossOutputs({PLAIN}, metrics={{'size': inputs.advantages.abs(), 'one': "
        "inputs.entropy > -1})"
    )
    model = tiny_model("fp8", scale=8)
    samples = roll_out(model)
    advantages = alternating(samples)
    learner = make_learner(
        model, ResolvedObjective(loss=loss_file(tmp_path, body)), micro_batch_tokens=17
    )
    metrics = learner.learn(samples, advantages, 0).metrics
    sizes = [abs(a) for s, a in zip(samples, advantages) for _ in s.completion_ids]
    assert metrics["loss/size"] == pytest.approx(sum(sizes) / len(sizes))
    assert metrics["loss/one"] == 1
    assert metrics["clip_fraction"] == 0


def scored(rewards: list[list[float | None]]) -> list[list[Sample]]:
    return [
        [
            Sample(g, i, (1,), (2,) * (i + 1), (-1.0,) * (i + 1), "", False, 0, reward=r)
            for i, r in enumerate(group)
        ]
        for g, group in enumerate(rewards)
    ]


def test_advantages_of_completions_and_of_tokens(tmp_path: Path) -> None:
    groups = scored([[1.0, None, 0.5], [0.0, 2.0]])
    half = advantage_file(
        tmp_path, "[[None if r is None else r / 2 for r in row] for row in inputs.rewards]"
    )
    samples, advantages = assign_credit(groups, ResolvedObjective(advantage=half))
    assert (len(samples), advantages) == (4, [0.5, 0.25, 0.0, 1.0])
    each = (
        "[[None if s.reward is None else [s.reward] * s.num_trained for s in g] for g in "
        "inputs.groups]"
    )
    _, of_tokens = assign_credit(
        groups, ResolvedObjective(advantage=advantage_file(tmp_path, each))
    )
    assert of_tokens == [(1.0,), (0.5, 0.5, 0.5), (0.0,), (2.0, 2.0)]
    tensors = (
        "[[None if r is None else __import__('torch').tensor(r) for r in row] for row in "
        "inputs.totals()]"
    )
    _, of_tensors = assign_credit(
        groups, ResolvedObjective(advantage=advantage_file(tmp_path, tensors))
    )
    assert of_tensors == [1.0, 0.5, 0.0, 2.0]


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("None", "expected one list for each group: returned NoneType, expected a list of 1"),
        ("[]", "expected one list for each group: returned 0 values, expected 1"),
        ("[[1.0]]", "group 0: returned 1 values, expected 3"),
        (
            "[[1.0, 2.0, 3.0]]",
            "group 0, completion 1: expected None exactly where the reward is None, which is None",
        ),
        (
            "[[None, None, 3.0]]",
            "group 0, completion 0: expected None exactly where the reward is None, which is 1.0",
        ),
        ("[[float('nan'), None, 1.0]]", "group 0, completion 0: expected finite numbers, got nan"),
        ("[[1.0, None, [1.0]]]", "group 0, completion 2: returned 1 values, expected 3"),
        ("[['much', None, 1.0]]", "group 0, completion 0"),
        ("inputs.rewards[7]", "IndexError: list index out of range (advantages.py, line 2)"),
    ],
)
def test_what_an_advantage_does_wrong_is_one_line(
    tmp_path: Path, expression: str, message: str
) -> None:
    reference = advantage_file(tmp_path, expression)
    groups = scored([[1.0, None, 0.5]])
    line = line_of(lambda: assign_credit(groups, ResolvedObjective(advantage=reference)))
    assert line.startswith(f"algorithm.advantage {reference!r}: ")
    assert message in line


def test_an_advantage_with_two_parameters_is_refused_before_a_run(tmp_path: Path) -> None:
    file = tmp_path / "advantages.py"
    file.write_text("def advantage(rewards, lengths):\n    return rewards\n")
    line = line_of(lambda: check_functions(ResolvedObjective(advantage=f"{file}:advantage")))
    assert "expected def advantage(inputs: AdvantageInputs)" in line
    assert callable(advantage_function("grpo"))


def test_the_inputs_are_as_documented() -> None:
    """Shapes and dtypes of what a loss is given, and of what an advantage is."""
    seen: list[LossInputs] = []

    def loss(inputs: LossInputs) -> LossOutputs:
        seen.append(inputs)
        return LossOutputs(-inputs.policy_logprobs * inputs.advantages)

    model = tiny_model("fp8-rollout", scale=8)
    samples = roll_out(model)
    learner = make_learner(
        model, ResolvedObjective(kl_coefficient=0.1), reference=tiny_model("fp8", scale=8)
    )
    learner.differentiation.loss = loss
    learner.learn(samples, alternating(samples), 0)
    (inputs,) = seen
    count = sum(len(s.completion_ids) for s in samples)
    for name in (
        *(
            "policy_logprobs",
            "old_logprobs",
            "rollout_logprobs",
            "advantages",
            "importance_weights",
            "token_weights",
        ),
        *("entropy", "reference_logprobs"),
    ):
        tensor = getattr(inputs, name)
        assert (tensor.shape, tensor.dtype, tensor.device.type) == (
            (count,),
            torch.float32,
            "cpu",
        ), name
        assert tensor.requires_grad is (name in ("policy_logprobs", "entropy")), name
    assert inputs.sequence.dtype == torch.int64
    assert inputs.sequence.unique_consecutive().tolist() == list(range(len(samples)))
    assert float(inputs.token_weights.sum()) == pytest.approx(1.0)
    given = AdvantageInputs([[1.0, 3.0]], [[(0.5,), (0.0, 0.25)]], [], ResolvedObjective())
    assert given.totals() == [[0.5, 2.75]]
    assert inputs.settings.dual_clip is None
