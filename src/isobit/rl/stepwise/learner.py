"""`StepwiseLearner`: forward, gradients and optimizer steps, each when its caller asks for it.

Gradients of several `forward_backward` calls add up in the order of the calls until `optim_step`,
one micro-batch after the other, as those of one call with all the data do: where micro-batches end
at the same data, so that the sums are rounded alike, the bits are the same. Log-probabilities have
the bits of sampling wherever the model's flow promises them. A call that raises has changed nothing
(tests/rl/stepwise/). Left out: several ranks, routes that a rollout recorded, and which caller
makes which call.
"""

import math
from collections.abc import Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from isobit.errors import IsobitError, NonFiniteError, brief
from isobit.kernels.reference.sums import total
from isobit.model import Model
from isobit.model.adapters.low_rank import Adapter
from isobit.model.forward.recompute import Recompute
from isobit.rl.learner.forward import logprobs_learned
from isobit.rl.learner.gradient import backward
from isobit.rl.optim.schedule import OptimizerSettings
from isobit.rl.optim.sharded import ShardedOptimizer
from isobit.rl.stepwise.data import Datum, check, micro_batches, pack
from isobit.rl.stepwise.losses import Rows, SummedLoss, loss_of, options_of
from isobit.rl.stepwise.saving import read_masters, read_moments, write

_LARGEST_NORM = 1e18  # of a gradient: its square is still finite in AdamW's second moment
_SMALLEST_EPS, _LARGEST = 1e-30, 1e6
_TOKEN_BYTES = 40  # of a Python number in a tuple
_T = TypeVar("_T")
Parts = Generator[None, None, _T]
"""Work in parts, between which its caller may do other work; what the generator returns is the
result of the work."""


@dataclass(frozen=True)
class Adam:
    """AdamW's numbers for one optimizer step, with the defaults of Tinker's AdamParams. The decay
    is decoupled. A `grad_clip_norm` of 0 clips nothing. Raises IsobitError for a value that is not
    a number in its range."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0

    def __post_init__(self) -> None:
        for name in (field.name for field in fields(self)):
            value = getattr(self, name)
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            least = _SMALLEST_EPS if name == "eps" else 0
            if name.startswith("beta"):
                expected, fits = "from 0 to below 1", number and 0 <= value < 1
            else:
                expected = f"from {least:g} to {_LARGEST:g}"
                fits = number and least <= value <= _LARGEST
            if not fits:
                raise IsobitError(f"{name}: expected a number {expected}, got {brief(repr(value))}")


@dataclass(frozen=True, eq=False)
class Outputs:
    """The results of a forward. `logprobs`: for each datum the log-probabilities of its targets,
    float32 in the shape of the targets, on the CPU. `metrics`: sums over all data, by Tinker's
    names: `loss:sum`."""

    logprobs: Sequence[Tensor]
    metrics: Mapping[str, float]


class StepwiseLearner:
    """Trains a model: the adapter of one that is `Model.adapted`, or a whole model. Several data
    share a forward, up to `micro_batch_tokens` targets. Raises IsobitError for a model without
    masters and for a model that several ranks share."""

    def __init__(
        self, model: Model, *, micro_batch_tokens: int = 16384, recompute: Recompute = False
    ) -> None:
        if model.ranks.size > 1:
            raise IsobitError("a learner that is called step by step runs on one rank")
        if not model.named_parameters():
            raise IsobitError("this model is frozen; train an adapter over it (Model.adapted)")
        self.model = model
        self._micro_batch_tokens, self._recompute = micro_batch_tokens, recompute
        self._optimizer = ShardedOptimizer.of(model, OptimizerSettings())
        self._optimizer.zero_grad()  # which another learner of the same model may have left
        self._calls: list[tuple[Sequence[Datum], SummedLoss, Mapping[str, float]]] | None = []
        """Those since the last step, from which gradients could be computed again; None: gradients
        are copied before each call instead."""
        self._call_bytes = 0
        self._undone = False  # gradients of the calls are gone

    def forward(self, data: Sequence[Datum], loss: str, options: Mapping[str, float]) -> Outputs:
        """Return the log-probabilities of all targets and the sum of the loss, without a gradient.
        Raises IsobitError, in one line, for any wrong argument."""
        return _whole(self.forward_in_parts(data, loss, options))

    def forward_in_parts(
        self, data: Sequence[Datum], loss: str, options: Mapping[str, float]
    ) -> Parts[Outputs]:
        """Do the work of `forward`, one micro-batch at a time."""
        return self._run(data, *self._checked(data, loss, options), gradient=False)

    def forward_backward(
        self, data: Sequence[Datum], loss: str, options: Mapping[str, float]
    ) -> Outputs:
        """Return what `forward` returns, and add the gradient of the loss to the gradients since
        the last step. Raises IsobitError as `forward` does, and for a gradient that is not finite
        or is too large for AdamW."""
        return _whole(self.forward_backward_in_parts(data, loss, options))

    def forward_backward_in_parts(
        self, data: Sequence[Datum], loss: str, options: Mapping[str, float]
    ) -> Parts[Outputs]:
        """Do the work of `forward_backward`, one micro-batch at a time. Between two micro-batches
        no other call of this learner may run; its weights may be sampled from, and other weights
        sampled from and trained."""
        checked = self._checked(data, loss, options)
        yield from self._compute_again()
        copies = self._copies()
        try:
            results = yield from self._run(data, *checked, gradient=True)
            if not (norm := self._optimizer.gradient_norm()) <= _LARGEST_NORM:
                raise NonFiniteError(
                    f"forward_backward: the gradient's norm is {norm:.3g}, and may be "
                    f"{_LARGEST_NORM:g}; are weights, advantages or ratios too large?"
                )
        except BaseException:
            self._undo(copies)
            raise
        self._remember(data, *checked)
        return results

    def optim_step(self, adam: Adam) -> Mapping[str, float]:
        """Update the masters once, by AdamW and the gradients since the last step, clear these
        gradients, and make new working weights from the masters. Return the norm of the gradient
        before it is clipped. Where no gradient was computed, nothing changes and the norm is 0."""
        _whole(self._compute_again())
        self._calls, optimizer = [], self._optimizer
        if all(holder.grad is None for holder in optimizer.holders.values()):
            return {"grad_norm": 0.0}
        norm = optimizer.gradient_norm()
        settings = replace(
            optimizer.settings,
            betas=(adam.beta1, adam.beta2),
            eps=adam.eps,
            weight_decay=adam.weight_decay,
            max_grad_norm=adam.grad_clip_norm or math.inf,
        )
        optimizer.set(settings)
        optimizer.step(adam.learning_rate, norm)
        optimizer.zero_grad()
        self.model.sync()
        return {"grad_norm": norm}

    def adapter(self) -> Adapter:
        """Return a copy of the adapter with its present factors. Raises IsobitError for a model
        that is trained whole."""
        adapter = self.model.transformer.adapter
        if adapter is None:
            raise IsobitError("this model is trained whole, and has no adapter")
        masters = self.model.named_parameters()
        copied = {name: rows.detach().to("cpu", copy=True) for name, rows in masters.items()}
        return replace(adapter, tensors=copied)

    def save(self, folder: Path, *, optimizer: bool) -> None:
        """Write a PEFT folder, of a whole model a Hugging Face directory, with or without the
        optimizer's state. Gradients that wait for a step are not in it. Raises IsobitError for a
        folder that cannot be written."""
        write(folder, self.model, self._optimizer if optimizer else None)

    def load(self, folder: Path, *, optimizer: bool) -> None:
        """Restore what `save` wrote; without the `optimizer` its state begins anew. Gradients that
        waited for a step are cleared. Raises IsobitError, before anything has changed, for a folder
        that is damaged, is of another model, rank or alpha, or has no optimizer state where
        `optimizer` asks for it."""
        masters = read_masters(folder, self.model)
        state = read_moments(folder) if optimizer else {}
        fresh = ShardedOptimizer.of(self.model, self._optimizer.settings)
        fresh.load_state(state)
        self._optimizer.zero_grad()
        self._optimizer, self._calls, self._undone = fresh, [], False
        with torch.no_grad():
            for name, parameter in self.model.named_parameters().items():
                parameter.copy_(masters[name])
        self.model.sync()

    def _checked(
        self, data: Sequence[Datum], name: str, settings: Mapping[str, float]
    ) -> tuple[SummedLoss, Mapping[str, float]]:
        """Return (the loss by this name, its options). Raises IsobitError for wrong arguments."""
        loss, config = loss_of(name), self.model.config
        sizes = config.vocab_size, config.max_positions, self.model.transformer.images
        options = options_of(name, loss, settings)
        if not data:
            raise IsobitError("data: expected at least one datum")
        for index, datum in enumerate(data):
            check(datum, index, loss, *sizes)
        return loss, options

    def _run(
        self, data: Sequence[Datum], loss: SummedLoss, options: Mapping[str, float], gradient: bool
    ) -> Parts[Outputs]:
        rows, total = list[Tensor](), 0.0
        for micro_batch in micro_batches(data, self._micro_batch_tokens):
            if micro_batch.start:
                yield
            with torch.set_grad_enabled(gradient):
                outputs, value = self._micro_batch([data[i] for i in micro_batch], loss, options)
            self.model.ops.raise_faults()  # while they are of this work
            rows += outputs
            total += value
        return Outputs(rows, {"loss:sum": total})

    def _micro_batch(
        self, data: Sequence[Datum], loss: SummedLoss, options: Mapping[str, float]
    ) -> tuple[list[Tensor], float]:
        """Return (the log-probabilities of each datum, the sum of the loss), and add the gradient
        of the loss to the masters' where gradients are enabled."""
        # recurrent layers' backward is of whole sequences
        packed = pack(data, self.model.config.linear is None, self.model.transformer.images)
        wanted = {**dict.fromkeys(loss.needs, 0.0), **options}
        inputs = {
            name: torch.cat([datum.of_rows(name, default) for datum in data])
            for name, default in wanted.items()
        }
        factor = torch.ones(packed.num_targets) if loss.factor is None else inputs[loss.factor]
        logprobs = logprobs_learned(self.model, packed, factor != 0, self._recompute)
        losses = loss(Rows(logprobs, inputs, packed.sequence))
        value = total(losses)
        if not math.isfinite(value):
            raise NonFiniteError(
                "the loss is not finite; are weights, advantages or ratios too large?"
            )
        if torch.is_grad_enabled():
            backward(self.model, losses.sum())
        rows = logprobs.detach().split([datum.targets.numel() for datum in data])
        return [row.view(datum.targets.shape) for row, datum in zip(rows, data)], value

    def _copies(self) -> dict[str, Tensor | None] | None:
        """Return copies of the gradients, or None where the gradients could be computed again,
        which takes no memory."""
        if self._calls is not None:
            return None
        holders = self._optimizer.holders
        return {n: None if h.grad is None else h.grad.clone() for n, h in holders.items()}

    def _undo(self, copies: Mapping[str, Tensor | None] | None) -> None:
        """Restore the gradients from before a call that has failed: from `copies` of them, or,
        where this is None, by computing them again before something needs them."""
        self._undone = copies is None and bool(self._calls)
        if copies is None:
            self._optimizer.zero_grad()
        else:
            for name, gradient in copies.items():
                self._optimizer.holders[name].grad = gradient
        with suppress(NonFiniteError):  # else it would be the next caller's
            self.model.ops.raise_faults()

    def _compute_again(self) -> Parts[None]:
        """Compute the gradients of all calls again, at most once for each step: calls that fail
        cost no more time than these calls took."""
        if not self._undone:
            return
        assert self._calls is not None
        try:
            for call in self._calls:
                yield from self._run(*call, gradient=True)
        except BaseException:
            self._optimizer.zero_grad()
            raise
        self._calls, self._undone = None, False

    def _remember(
        self, data: Sequence[Datum], loss: SummedLoss, options: Mapping[str, float]
    ) -> None:
        """Keep the arguments of a call, unless those of all calls together would have more bytes
        than the gradients."""
        if self._calls is None:
            return
        copies = [
            Datum(datum.tokens, {k: v.clone() for k, v in datum.inputs.items()}) for datum in data
        ]
        self._call_bytes = _bytes_of(copies) + (self._call_bytes if self._calls else 0)
        self._calls.append((copies, loss, options))
        if self._call_bytes > self._optimizer.gradient_bytes:
            self._calls = None


def _bytes_of(data: Sequence[Datum]) -> int:
    tensors = [tensor for datum in data for tensor in datum.inputs.values()]
    tokens = sum(len(datum.tokens) for datum in data)
    return _TOKEN_BYTES * tokens + sum(tensor.nbytes for tensor in tensors)


def _whole(parts: Parts[_T]) -> _T:
    """Do all parts, one after the other, and return the result."""
    while True:
        try:
            next(parts)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
