"""`StepwiseLearner`: forward, gradients and optimizer steps, each when its caller asks for it.

Gradients of several `forward_backward` add up in the order of the calls until `optim_step`, one
micro-batch after the other, as those of one call with all the data do. A call that raises has
changed nothing. Left out: several ranks, and when what is called (a server's clients say).
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import inf

import torch
from torch import Tensor

from isobit.errors import IsobitError, NonFiniteError
from isobit.model import Model
from isobit.model.adapters.low_rank import Adapter
from isobit.model.forward.accumulate_grad import adding_in_place
from isobit.model.forward.recompute import Recompute
from isobit.rl.learner.forward import forward
from isobit.rl.optim.schedule import OptimizerSettings
from isobit.rl.optim.sharded import ShardedOptimizer
from isobit.rl.stepwise.data import Datum, check, micro_batches, pack
from isobit.rl.stepwise.losses import Loss, Rows, loss_of


@dataclass(frozen=True)
class Adam:
    """AdamW's numbers of one step, with the defaults of Tinker's AdamParams; `grad_clip_norm`: 0
    clips nothing."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


@dataclass(frozen=True, eq=False)
class Outputs:
    """Of each datum the log-probabilities of its targets, float32 of their shape, on the CPU; sums
    over all, by Tinker's names."""

    logprobs: Sequence[Tensor]
    metrics: Mapping[str, float]


class StepwiseLearner:
    """Trains a model: one that is `Model.adapted`, or a whole one."""

    def __init__(
        self, model: Model, *, micro_batch_tokens: int = 16384, recompute: Recompute = False
    ) -> None:
        if model.ranks.size > 1:
            raise IsobitError("a learner that is called step by step runs on one rank")
        self.model = model
        self._micro_batch_tokens, self._recompute = micro_batch_tokens, recompute
        self._optimizer = ShardedOptimizer.of(model, OptimizerSettings())

    def forward(self, data: Sequence[Datum], loss: str, options: Mapping[str, float]) -> Outputs:
        """Log-probabilities and the loss, without a gradient. Raises IsobitError, in one line, for
        whatever is wrong with the arguments."""
        with torch.no_grad():
            return self._run(data, loss, options)

    def forward_backward(
        self, data: Sequence[Datum], loss: str, options: Mapping[str, float]
    ) -> Outputs:
        """The same, and adds the gradient of the loss to those since the last step. Raises
        IsobitError as `forward`, and where the gradient is not finite."""
        with self._gradients_kept():
            found = self._run(data, loss, options)
            if self._optimizer.gradient_norm() == inf:
                raise NonFiniteError("forward_backward: the gradient is not finite")
        return found

    def optim_step(self, adam: Adam) -> Mapping[str, float]:
        """One AdamW update by the gradients so far, which are gone then, and new working weights.
        Without gradients nothing changes."""
        if not any(holder.grad is not None for holder in self._optimizer.holders.values()):
            return {}
        norm = self._optimizer.gradient_norm()
        self._optimizer.set(
            replace(
                self._optimizer.settings,
                betas=(adam.beta1, adam.beta2),
                eps=adam.eps,
                weight_decay=adam.weight_decay,
                max_grad_norm=adam.grad_clip_norm or inf,
            )
        )
        self._optimizer.step(adam.learning_rate, norm)
        self._optimizer.zero_grad()
        self.model.sync()
        return {"grad_norm": norm}

    def adapter(self) -> Adapter:
        """The present factors, a copy. Raises IsobitError of a whole model."""
        adapter = self.model.transformer.adapter
        if adapter is None:
            raise IsobitError("this model is trained whole, and has no adapter")
        masters = self.model.named_parameters()
        copied = {name: rows.detach().to("cpu", copy=True) for name, rows in masters.items()}
        return replace(adapter, tensors=copied)

    def _run(self, data: Sequence[Datum], name: str, options: Mapping[str, float]) -> Outputs:
        loss, config = loss_of(name), self.model.config
        if not data:
            raise IsobitError("data: expected at least one datum")
        for place, datum in enumerate(data):
            check(datum, place, loss, config.vocab_size, config.max_positions)
        logprobs, total = list[Tensor](), 0.0
        with adding_in_place(self.model.transformer.masters.leaves.values()):
            for part in micro_batches(data, self._micro_batch_tokens):
                found, value = self._micro_batch([data[i] for i in part], loss, options)
                logprobs += found
                total += value
        self.model.ops.raise_faults()
        return Outputs(logprobs, {"loss:sum": total})

    def _micro_batch(
        self, data: Sequence[Datum], loss: Loss, options: Mapping[str, float]
    ) -> tuple[list[Tensor], float]:
        """(log-probabilities of each datum, the loss); with a gradient where one is enabled."""
        packed = pack(data)
        logprobs, _ = forward(self.model, packed, 1.0, recompute=self._recompute)
        inputs = {
            name: torch.cat([d.inputs[name].reshape(-1) for d in data]) for name in loss.inputs
        }
        losses = loss.of(Rows(logprobs, inputs, packed.sequence, options))
        if torch.is_grad_enabled():
            losses.sum().backward()
        sizes = [datum.targets.numel() for datum in data]
        rows = logprobs.detach().split(sizes)
        shaped = [row.view(datum.targets.shape) for row, datum in zip(rows, data, strict=True)]
        return shaped, float(losses.detach().double().sum())

    @contextmanager
    def _gradients_kept(self) -> Iterator[None]:
        """Inside, whatever fails leaves the gradients as they were."""
        holders = self._optimizer.holders
        before = {n: None if h.grad is None else h.grad.clone() for n, h in holders.items()}
        try:
            yield
        except BaseException:
            for name, gradient in before.items():
                holders[name].grad = gradient
            raise
