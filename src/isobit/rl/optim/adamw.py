"""AdamW on FP32 or BF16 masters, with both moments in FP32.

Loshchilov and Hutter 2019, arXiv 1711.05101. The update is PyTorch's fused kernel through its
functional form, since `torch.optim.Optimizer` imports the compiler: 70 MiB and most of a second.
BF16 masters are in float32 while they are updated, a part at a time (`masters.py`). Left out:
moments in 8 bits (`eight_bit.py`).
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from isobit.rl.optim.base import STEP, Form
from isobit.rl.optim.masters import Piece, UpdatedMasters, grouped, pieces
from isobit.rl.optim.schedule import OptimizerSettings

AT_ONCE = 1 << 26
"""Elements that one call updates, whose gradients are then freed: many small parameters, or a large
one."""
_MOMENTS = ("exp_avg", "exp_avg_sq")


class AdamW:
    """`isobit.rl.optim.base.Optimizer` for whatever no other one takes."""

    label: ClassVar[str] = "adamw, state fp32"
    whole_matrices: ClassVar[bool] = False

    def __init__(
        self, masters: UpdatedMasters, names: Sequence[str], settings: OptimizerSettings
    ) -> None:
        self._masters, self.settings = masters, settings
        self._state: dict[str, dict[str, Tensor]] = {}

    @staticmethod
    def takes(name: str, shape: Sequence[int], settings: OptimizerSettings) -> bool:
        return True

    @staticmethod
    def forms(shape: tuple[int, ...]) -> Mapping[str, Form]:
        return {"step": STEP} | {key: Form(torch.float32, shape) for key in _MOMENTS}

    def update(self, names: Sequence[str], rate: float) -> None:
        parameters = self._masters.parameters
        for decay, some in self._masters.by_decay(names, self.settings.weight_decay):
            wide = [name for name in some if parameters[name].dtype == torch.float32]
            for group in grouped(((name, parameters[name].numel()) for name in wide), AT_ONCE):
                self._update_wide(group, rate, decay)
            narrow = [name for name in some if parameters[name].dtype != torch.float32]
            for chunk in pieces(narrow, parameters):
                self._update_narrow(chunk, rate, decay)

    def tensors(self) -> Mapping[str, Mapping[str, Tensor]]:
        return self._state

    def load(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        device = {name: self._masters.parameters[name].device for name in state}
        self._state = {
            name: {key: value.to(device[name], copy=True) for key, value in tensors.items()}
            for name, tensors in state.items()
        }

    def _update_wide(self, names: list[str], rate: float, weight_decay: float) -> None:
        """Update FP32 masters, in place."""
        states = [self._state_of(name) for name in names]
        moments = [[state[key] for state in states] for key in _MOMENTS]
        gradients = [self._masters.holders[name].grad for name in names]
        masters: list[Tensor] = [self._masters.parameters[name] for name in names]
        self._adamw(
            masters, gradients, moments, [state["step"] for state in states], rate, weight_decay
        )
        self._masters.free_gradients(names)

    def _update_narrow(self, group: list[Piece], rate: float, weight_decay: float) -> None:
        """Update BF16 masters: a step counts once for all pieces of a parameter, with the last of
        them."""
        states = [self._state_of(name) for name, _ in group]
        moments = [
            [state[key].view(-1)[rows] for state, (_, rows) in zip(states, group)]
            for key in _MOMENTS
        ]
        gradients = [self._masters.gradient(name, rows) for name, rows in group]
        steps = [state["step"].clone() for state in states]
        masters = [self._masters.wide(*piece) for piece in group]
        self._adamw(masters, gradients, moments, steps, rate, weight_decay)
        for (name, rows), values, step in zip(group, masters, torch.stack(steps).tolist()):
            self._masters.put(name, rows, values, int(step))
            if rows.stop == self._masters.parameters[name].numel():
                self._state[name]["step"] += 1
                self._masters.free_gradients([name])

    def _state_of(self, name: str) -> dict[str, Tensor]:
        if name not in self._state:
            parameter = self._masters.parameters[name]
            moments = {key: torch.zeros_like(parameter, dtype=torch.float32) for key in _MOMENTS}
            self._state[name] = {"step": torch.zeros((), device=parameter.device), **moments}
        return self._state[name]

    def _adamw(
        self,
        masters: list[Tensor],
        gradients: Sequence[Tensor | None],
        moments: Sequence[list[Tensor]],
        steps: list[Tensor],
        rate: float,
        weight_decay: float,
    ) -> None:
        first, second = moments
        adamw(
            masters,
            [gradient for gradient in gradients if gradient is not None],
            first,
            second,
            [],
            steps,
            fused=True,
            amsgrad=False,
            beta1=self.settings.betas[0],
            beta2=self.settings.betas[1],
            lr=rate,
            weight_decay=weight_decay,
            eps=self.settings.eps,
            maximize=False,
        )
