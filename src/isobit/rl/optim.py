"""AdamW on FP32 masters, and clipping by the global norm.

Loshchilov and Hutter 2019, arXiv 1711.05101. Weight decay touches matrices only: no norms, no biases. The state is a
flat mapping of tensors, so that safetensors can hold it. The update is PyTorch's fused kernel through its functional
form, since `torch.optim.Optimizer` imports the compiler: 70 MiB and most of a second. With `state` 8bit the moments of
large parameters are kept in 8 bits (`optim_8bit.py`).
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from isobit.distributed import Shards
from isobit.distributed.shards import BLOCK_ROWS
from isobit.errors import IsobitError
from isobit.model.checksums import Checksums
from isobit.rl.optim_8bit import EightBitState, quantizable
from isobit.rl.schedule import OptimizerSettings

_MOMENTS = ("exp_avg", "exp_avg_sq")
_NORM_ROWS = 32 * BLOCK_ROWS  # of a gradient on a CPU, squared in float64 at a time


class Optimizer:
    """AdamW over named FP32 parameters; moments and step counts are where their parameter is.

    Where ranks share the parameters (`shards`), each updates the rows that it keeps.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        settings: OptimizerSettings,
        shards: Shards | None = None,
    ) -> None:
        self.parameters = dict(parameters)
        self.settings = settings
        self.shards = shards or Shards.of({name: tuple(p.shape) for name, p in self.parameters.items()})
        self._state: dict[str, dict[str, Tensor]] = {}
        large = [n for n in self.parameters if quantizable(self.shards.shapes[n])] if settings.state == "8bit" else []
        self._eight_bit = EightBitState({name: self.parameters[name] for name in large}, settings) if large else None
        self.checksums = Checksums(self._written_by_step)

    def zero_grad(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None

    def gradient_norm(self) -> float:
        """The global L2 norm, before clipping; inf if any gradient is not finite. The sum of its blocks' sums is
        rounded once, so it has no order, and is the same however the ranks share the blocks."""
        mine = [s for p in self.parameters.values() if p.grad is not None for s in _sums_of_squares(p.grad)]
        squares = [s for sums in self.shards.ranks.gather(mine) for s in sums]
        total = math.fsum(squares) if all(math.isfinite(s) for s in squares) else math.inf
        return math.sqrt(total)

    @torch.no_grad()
    def step(self, rate: float, norm: float) -> None:
        """One update at this rate, with gradients scaled so that their norm `norm` is at most `max_grad_norm`."""
        if norm > self.settings.max_grad_norm:
            factor = self.settings.max_grad_norm / norm
            for parameter in self.parameters.values():
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)
        decayed = [name for name, p in self.parameters.items() if p.grad is not None and p.ndim > 1]
        others = [name for name, p in self.parameters.items() if p.grad is not None and p.ndim <= 1]
        self._update(decayed, rate, self.settings.weight_decay)
        self._update(others, rate, 0.0)
        self.checksums.renew()

    def _update(self, names: list[str], rate: float, weight_decay: float) -> None:
        if self._eight_bit is not None:
            self._eight_bit.update([name for name in names if name in self._eight_bit], rate, weight_decay)
            names = [name for name in names if name not in self._eight_bit]
            if not names:
                return
        parameters = [self.parameters[name] for name in names]
        for name, parameter in zip(names, parameters):
            if name not in self._state:
                moments = {key: torch.zeros_like(parameter) for key in _MOMENTS}
                self._state[name] = {"step": torch.zeros((), device=parameter.device), **moments}
        states = [self._state[name] for name in names]
        adamw(
            list(parameters),
            [p.grad for p in parameters if p.grad is not None],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            fused=True,
            amsgrad=False,
            beta1=self.settings.betas[0],
            beta2=self.settings.betas[1],
            lr=rate,
            weight_decay=weight_decay,
            eps=self.settings.eps,
            maximize=False,
        )

    def _written_by_step(self) -> dict[str, Tensor]:
        """The masters, their moments and step counts."""
        found: dict[str, Tensor] = {f"master {name}": parameter for name, parameter in self.parameters.items()}
        states = self._state | ({} if self._eight_bit is None else self._eight_bit.tensors())
        return found | {f"{key} of {name}": value for name, state in states.items() for key, value in state.items()}

    @property
    def nbytes(self) -> int:
        """Bytes of the moments of all parameters."""
        eight_bit = self._eight_bit
        plain = [p for name, p in self.parameters.items() if eight_bit is None or name not in eight_bit]
        return sum(8 * p.numel() for p in plain) + (0 if eight_bit is None else eight_bit.nbytes)

    def state(self) -> dict[str, Tensor]:
        """Moments and step counts, copied to the CPU: `NAME.exp_avg`, `NAME.exp_avg_sq`, `NAME.step`; of 8-bit moments
        `.codes` and `.scale`. Empty before the first update."""
        tensors: dict[str, Tensor] = {} if self._eight_bit is None else self._eight_bit.state()
        for name, state in self._state.items():
            for key, value in state.items():
                tensors[f"{name}.{key}"] = value.to("cpu", copy=True)
        return tensors

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """The inverse of `state`, bit for bit. Raises IsobitError if the tensors are not of these parameters."""
        if self._eight_bit is not None:
            tensors = self._eight_bit.load_state(tensors)
        for name, parameter in self.parameters.items():
            given = {k: tensors[f"{name}.{k}"] for k in ("step", *_MOMENTS) if f"{name}.{k}" in tensors}
            if not given:
                self._state.pop(name, None)
                continue
            if len(given) != 3 or any(given[key].shape != parameter.shape for key in _MOMENTS):
                raise IsobitError(f"optimizer state of {name} does not fit the model")
            self._state[name] = {key: value.to(parameter.device, copy=True) for key, value in given.items()}
        unknown = {key.rpartition(".")[0] for key in tensors} - set(self.parameters)
        if unknown:
            raise IsobitError(f"optimizer state has {min(unknown)!r}, which the model does not have")


def _sums_of_squares(gradient: Tensor) -> list[float]:
    """In float64, of each block of 128 rows, whose bits do not depend on the rows around it. On a CPU of each row, so
    that they do not depend on the number of threads either."""
    rows = gradient if gradient.ndim > 1 else gradient.view(-1, 1)
    if gradient.device.type == "cpu":
        sums = [block.double().square_().sum(1) for block in rows.split(_NORM_ROWS)]
        return [math.fsum(block.tolist()) for part in sums for block in part.split(BLOCK_ROWS)]
    blocks = rows.split(BLOCK_ROWS)
    return torch.stack([block.double().square().sum() for block in blocks]).tolist()  # one wait for all of them
