"""The loss and the advantage of a run: functions by name, or the user's own,
`path/to/file.py:function`.

A user's function is called in this process, with the same inputs as those by name. Whatever it
raises or returns that cannot be used is an IsobitError in one line. A loss must not depend on how a
batch is split into micro-batches: `check_split` tries it on made-up tokens before a run begins
(tests/rl/test_functions.py).
"""

import hashlib
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from isobit.errors import IsobitError
from isobit.kernels.reference.sums import block_sum
from isobit.rl.algorithm.advantages import (
    Advantage,
    AdvantageFunction,
    AdvantageInputs,
    Advantages,
    dr_grpo,
    grpo,
    grpo_batch,
    maxrl,
    opo,
    rloo,
)
from isobit.rl.algorithm.given import GIVEN_ADVANTAGES, GIVEN_LOSSES
from isobit.rl.algorithm.loss import LOSSES, Loss, LossFunction, LossInputs, LossOutputs, PolicyLoss
from isobit.rl.algorithm.objective import Objective, ResolvedObjective
from isobit.rl.algorithm.token_advantages import (
    distillation,
    otb,
    reinforce_pp,
    reinforce_pp_baseline,
)
from isobit.run.metrics import METRICS
from isobit.tasks.workers.loading import find_function, last_line

ADVANTAGES: dict[str, AdvantageFunction] = {
    function.__name__: function
    for function in (
        *(grpo, grpo_batch, dr_grpo, rloo, opo, maxrl),
        *(reinforce_pp, reinforce_pp_baseline, otb, distillation),
    )
}
_LOSSES, _ADVANTAGES = {**LOSSES, **GIVEN_LOSSES}, {**ADVANTAGES, **GIVEN_ADVANTAGES}
_LOSS, _ADVANTAGE = "algorithm.loss", "algorithm.advantage"
_PROBED_LENGTHS = (5, 1, 4, 3)
_SPLIT_TOLERANCE = 1e-3
"""Largest difference of a gradient's element between splits, relative to the largest element: sums
are rounded."""


def loss_function(name: str) -> PolicyLoss:
    """Return the loss by this name or in this file. Raises IsobitError where it cannot be found or
    called."""
    if name in _LOSSES:
        return _LOSSES[name]
    call, label = _found(name, _LOSS, "loss(inputs: LossInputs) -> LossOutputs")

    def loss(inputs: LossInputs) -> LossOutputs:
        outputs = call(inputs)
        _check_outputs(outputs, inputs, label)
        return outputs  # type: ignore[no-any-return]

    return Loss(loss)


def advantage_function(name: str) -> AdvantageFunction:
    """Return the advantage by this name or in this file. Raises IsobitError where it cannot be
    found or called."""
    if name in _ADVANTAGES:
        return _ADVANTAGES[name]
    call, label = _found(
        name,
        _ADVANTAGE,
        "advantage(inputs: AdvantageInputs) -> one list of advantages for each group",
    )

    def advantage(inputs: AdvantageInputs) -> Advantages:
        advantages = _listed(
            call(inputs), len(inputs.rewards), f"{label}: expected one list for each group"
        )
        rows = zip(advantages, inputs.rewards, inputs.penalties, strict=True)
        return [
            [
                _advantage(value, reward, len(taken), f"{label}: group {number}, completion {i}")
                for i, (value, reward, taken) in enumerate(
                    zip(
                        _listed(row, len(rewards), f"{label}: group {number}"),
                        rewards,
                        penalties,
                        strict=True,
                    )
                )
            ]
            for number, (row, rewards, penalties) in enumerate(rows)
        ]

    return advantage


def digests(objective: Objective) -> dict[str, list[str]]:
    """Return the sha256 of the files of a user's functions, by the key that names them, in the form
    of `machine.json`, which also lists the later files of a resumed run."""
    by_key = {}
    for key, name, named in (
        (_LOSS, objective.loss, _LOSSES),
        (_ADVANTAGE, objective.advantage, _ADVANTAGES),
    ):
        if name not in named:
            _, file = find_function(name, key)
            by_key[key] = [hashlib.sha256(Path(file).read_bytes()).hexdigest()]
    return by_key


def check_functions(objective: ResolvedObjective) -> None:
    """Raise IsobitError for a loss or an advantage that cannot be found, or a loss that cannot be
    split."""
    advantage_function(objective.advantage)
    if objective.loss not in LOSSES:
        check_split(loss_function(objective.loss), objective, f"{_LOSS} {objective.loss!r}")


def check_split(loss: LossFunction, objective: ResolvedObjective, what: str) -> None:
    """Raise IsobitError unless the gradient of a batch is that of its micro-batches together, and
    finite."""
    inputs = _probe(objective)
    whole = _gradient(loss, inputs, what)
    if not bool(torch.isfinite(whole).all()):
        raise IsobitError(f"{what}: its gradient is not finite for ordinary log-probabilities")
    sizes, count = _PROBED_LENGTHS, len(_PROBED_LENGTHS)
    for cuts in ((1,), (2,), tuple(range(1, count))):
        bounds = [0, *cuts, count]
        gradients = []
        for first, last in pairwise(bounds):
            tokens = slice(sum(sizes[:first]), sum(sizes[:last]))
            gradients.append(_gradient(loss, _cut(inputs, tokens, first), what))
        if float((torch.cat(gradients, dim=1) - whole).abs().max()) > _SPLIT_TOLERANCE * float(
            whole.abs().max()
        ):
            raise IsobitError(
                f"{what}: its gradient depends on how a batch is split into micro-batches; return "
                "the loss of each token, from its own sequence alone, with no mean or other "
                "statistic of the micro-batch"
            )


def _probe(objective: ResolvedObjective) -> LossInputs:
    """Return made-up tokens of a few sequences: a policy that has moved a little, advantages of
    both signs."""
    generator = torch.Generator().manual_seed(0)
    count = sum(_PROBED_LENGTHS)
    old = -3 * torch.rand(count, generator=generator) - 0.1
    moved = 0.3 * torch.randn(count, generator=generator)
    penalized = objective.kl_coefficient > 0 and not objective.kl_in_reward
    sizes = torch.tensor(_PROBED_LENGTHS)
    return LossInputs(
        policy_logprobs=old + moved,
        old_logprobs=old,
        rollout_logprobs=old + 0.01 * moved,
        advantages=torch.randn(len(sizes), generator=generator).repeat_interleave(sizes),
        importance_weights=0.5 + torch.rand(count, generator=generator),
        token_weights=torch.full((count,), 1.0 / count),
        entropy=torch.rand(count, generator=generator),
        sequence=torch.arange(len(sizes)).repeat_interleave(sizes),
        clip_low=objective.clip_low,
        clip_high=objective.clip_high,
        settings=objective,
        reference_logprobs=old - 0.1 if penalized else None,
    )


def _cut(inputs: LossInputs, tokens: slice, first: int) -> LossInputs:
    """Return the inputs of some tokens, whose first sequence had the number `first`."""
    values: dict[str, Any] = {f.name: getattr(inputs, f.name) for f in fields(inputs)}
    tensors = {name: value[tokens] for name, value in values.items() if isinstance(value, Tensor)}
    return LossInputs(**values | tensors | {"sequence": inputs.sequence[tokens] - first})


def _gradient(loss: LossFunction, inputs: LossInputs, what: str) -> Tensor:
    """Return the gradient of the weighted sum of the loss of these inputs by policy_logprobs and by
    entropy, [2, T]."""
    leaves = [x.clone().requires_grad_() for x in (inputs.policy_logprobs, inputs.entropy)]
    outputs = loss(replace(inputs, policy_logprobs=leaves[0], entropy=leaves[1]))
    if not outputs.loss.requires_grad:
        raise IsobitError(
            f"{what}: the loss has no gradient: it must be computed from inputs.policy_logprobs or "
            "inputs.entropy"
        )
    weighted_sum(outputs, inputs).backward()  # type: ignore[no-untyped-call]
    return torch.stack([torch.zeros_like(x) if x.grad is None else x.grad for x in leaves])


def weighted_sum(outputs: LossOutputs, inputs: LossInputs) -> Tensor:
    """Return the sum that a micro-batch adds to the loss of the step."""
    return block_sum(outputs.loss * inputs.importance_weights * inputs.token_weights)


def _found(reference: str, key: str, form: str) -> tuple[Callable[[object], Any], str]:
    """Return (the user's function of one argument, wrapped so that whatever it raises becomes an
    IsobitError, and its name in error texts)."""
    label = f"{key} {reference!r}"
    function, file = find_function(reference, key)
    try:
        inspect.signature(function).bind(None)
    except TypeError:
        raise IsobitError(f"{label}: expected def {form}") from None

    def call(inputs: object) -> Any:
        try:
            return function(inputs)
        except Exception as error:  # the user's function may raise anything
            raise IsobitError(f"{label}: {last_line(error, file)}") from None

    return call, label


def _check_outputs(outputs: object, inputs: LossInputs, what: str) -> None:
    if not isinstance(outputs, LossOutputs):
        raise IsobitError(
            f"{what}: returned {type(outputs).__name__}, expected "
            "isobit.rl.algorithm.loss.LossOutputs"
        )
    shape = inputs.policy_logprobs.shape
    tensors: Mapping[str, object] = {
        "loss": outputs.loss,
        **({} if outputs.clipped is None else {"clipped": outputs.clipped}),
        **{f"metrics[{name!r}]": value for name, value in outputs.metrics.items()},
    }
    for name, value in tensors.items():
        if not isinstance(value, Tensor) or value.shape != shape:
            actual = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise IsobitError(
                f"{what}: {name} is {actual}, expected a tensor with a number for each token, "
                f"{list(shape)}"
            )
    for name in outputs.metrics:
        if not str(name).isidentifier() or f"loss/{name}" in METRICS:
            taken = [key.removeprefix("loss/") for key in METRICS if key.startswith("loss/")]
            raise IsobitError(
                f"{what}: metric {name!r}: expected letters, digits and _, and none of "
                f"{', '.join(key for key in taken if key != '*')}, which isobit itself logs"
            )


def _listed(values: Any, count: int, what: str) -> Sequence[Any]:
    if (
        isinstance(values, (str, bytes, Mapping))
        or not hasattr(values, "__len__")
        or not hasattr(values, "__iter__")
    ):
        raise IsobitError(f"{what}: returned {type(values).__name__}, expected a list of {count}")
    if len(values) != count:
        raise IsobitError(f"{what}: returned {len(values)} values, expected {count}")
    return list(values)


def _advantage(value: Any, reward: float | None, num_tokens: int, what: str) -> Advantage | None:
    """Return an advantage in plain numbers. Raises IsobitError for a value that is not one."""
    if (value is None) != (reward is None):
        raise IsobitError(
            f"{what}: expected None exactly where the reward is None, which is {reward}; got "
            f"{value}"
        )
    if value is None:
        return None
    single = not hasattr(value, "__len__") or getattr(value, "ndim", 1) == 0
    try:
        numbers = [
            float(number) for number in ([value] if single else _listed(value, num_tokens, what))
        ]
    except (TypeError, ValueError):
        raise IsobitError(
            f"{what}: expected a number, or one for each trained token, got {value!r:.60}"
        ) from None
    if not all(map(math.isfinite, numbers)):
        raise IsobitError(f"{what}: expected finite numbers, got {value!r:.60}")
    return numbers[0] if single else tuple(numbers)
