"""A reference that follows the policy: every `sync_every` steps it moves towards the policy,

    reference ← (1 - α)·reference + α·policy,

in separate masters, in FP32 whatever the policy's are (TR-DPO: Gorbatovski et al. 2024, arXiv
2404.09656; TRL's `sync_ref_model`). With α = 1 it becomes the policy, and with a small α in every
step it is the exponential mean of policies that teaches in SDFT and SDPO.

Each product and the sum are rounded once, element by element, so a reference has the same bits at
any number of ranks, which share its masters as they share the policy's. A checkpoint holds these
(tests/training/test_reference_sync.py). With an adapter the reference is an adapter over the same
frozen model, which begins as the policy's does but with B = 0, that is as the model without it; its
factors are what is mixed. Left out: a reference that stays, which needs no masters.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from isobit.config import Config, SftConfig
from isobit.config.sections import PrecisionValue, ReferenceSync
from isobit.distributed.files import Part, file_tensors, write_file
from isobit.engine.calibration import Calibrator
from isobit.errors import IsobitError
from isobit.model import Model
from isobit.model.transformer import Transformer
from isobit.precision import precision_from
from isobit.rl.optim.masters import AT_ONCE
from isobit.tasks.builtin import Task


class FollowingReference:
    """A reference model that follows the policy. `model` moves towards the `policy` as `settings`
    say, and is calibrated after every move, where its KV cache has scales."""

    def __init__(
        self,
        policy: Model,
        precision: PrecisionValue,
        settings: ReferenceSync,
        calibrate: Callable[[Model], None],
    ) -> None:
        self._policy, self._settings, self._calibrate = policy, settings, calibrate
        made = _adapted(policy) if policy.transformer.adapter else _copied(policy, precision)
        masters = made.masters
        made.freeze()
        made.masters = masters  # of which it is made again at every move
        self.model = Model(made, policy.tokenizer)
        calibrate(self.model)

    def after(self, step: int) -> None:
        """Move the reference towards the policy, which has learned in this step, if it is time.
        Raises NonFiniteError where the policy is not finite."""
        if step % self._settings.sync_every:
            return
        masters = self._policy.named_parameters()
        for name, mine in self.model.named_parameters().items():
            mix(mine.detach(), masters[name].detach(), self._settings.sync_alpha)
        self._remake()

    def _remake(self) -> None:
        self.model.sync()
        self._calibrate(self.model)

    def save(self, path: Path) -> None:
        """Write the masters into a file; every rank writes its rows."""
        mine, shards = self.model.named_parameters(), self.model.transformer.masters.shards
        slices = {
            name: Part(
                torch.float32, shape, mine.get(name), shards.own(name)[0] * shards.width(name)
            )
            for name, shape in shards.shapes.items()
        }
        write_file(path, slices, self.model.ranks)

    def load(self, path: Path) -> None:
        """Read the masters that `save` wrote, by any number of ranks. Raises IsobitError for a file
        that cannot be read, or holds another model."""
        self.model.ranks.run_on_all(lambda: self._read(path))
        self._remake()

    @torch.no_grad()
    def _read(self, path: Path) -> None:
        shards = self.model.transformer.masters.shards
        try:
            with safe_open(path, framework="pt") as file:
                tensors = file_tensors(file)
                if {name: tensor.shape for name, tensor in tensors.items()} != dict(shards.shapes):
                    raise IsobitError(f"{path}: a reference of another model")
                for name, mine in self.model.named_parameters().items():
                    mine.copy_(tensors[name][slice(*shards.own(name))])
        except (OSError, SafetensorError) as error:
            raise IsobitError(f"{path}: cannot be read: {error}") from None

    @property
    def nbytes(self) -> int:
        """The bytes of this rank's masters, plus the working weights that are not shared with the
        policy."""
        held = self.model.memory()
        if (adapter := self.model.transformer.adapter) is None:
            return sum(held.values())
        width = self.model.precision.learner.compute.itemsize
        count = sum(torch.Size(shape).numel() for shape in adapter.shapes.values())
        return held["masters"] + width * count


def followed(
    policy: Model, precision: PrecisionValue, config: Config | SftConfig, task: Task
) -> FollowingReference | None:
    """Build the reference of a run if it follows the policy; called before the policy has learned,
    or before both are restored. Raises IsobitError where its learner has scales that a separate
    engine calibrates."""
    if not config.reference.follows:
        return None
    flow = precision_from(precision)
    if not flow.shared and (flow.learner.calibrated or flow.learner.calibrated_queries):
        raise IsobitError(
            f"reference.sync_every: under {flow.name} a separate engine calibrates the learner's KV "
            "cache, and a reference has no engine after it has moved: take another precision as "
            "reference.precision, or leave sync_every out"
        )

    def calibrate(model: Model) -> None:
        if flow.shared:  # else the scales are of a rollout, which a reference has not
            calibrate_reference(model, task)

    return FollowingReference(policy, precision, config.reference, calibrate)


def calibrate_reference(reference: Model, task: Task) -> None:
    """Calibrate a reference's KV cache, if it has calibrated scales, for its present weights."""
    Calibrator(reference).calibrate([example.prompt for example in task.train.examples[:8]])


@torch.no_grad()
def mix(reference: Tensor, policy: Tensor, alpha: float) -> None:
    """Replace `reference`, FP32, by (1 - alpha)·reference + alpha·policy."""
    for mine, theirs in zip(reference.view(-1).split(AT_ONCE), policy.view(-1).split(AT_ONCE)):
        if alpha == 1:
            mine.copy_(theirs)
        else:  # no fused multiply and add, which only some places of a tensor would have
            mine.mul_(1.0 - alpha).add_(theirs.float() * alpha)


def _copied(policy: Model, precision: PrecisionValue) -> Transformer:
    """Return the policy's weights under another precision, from a copy of its masters."""
    masters = {
        name: rows.detach().to(torch.float32, copy=True)
        for name, rows in policy.named_parameters().items()
    }
    flow = precision_from(precision)
    group = policy.transformer.group
    return Transformer(policy.config, flow, policy.ops, masters, policy.ranks, group=group)


@torch.no_grad()
def _adapted(policy: Model) -> Transformer:
    """Return the frozen model with an adapter whose A are the policy's, and whose B are 0."""
    adapter = policy.transformer.adapter
    assert adapter is not None
    zeros = {name: torch.zeros(shape) for name, shape in adapter.shapes.items()}
    made = policy.transformer.adapted(replace(adapter, tensors=zeros))
    first = {proj.masters[0] for proj in adapter.projections}
    for name, rows in made.parameters.items():
        if name in first:
            rows.copy_(policy.named_parameters()[name])
    made.sync()
    return made
