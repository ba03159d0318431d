"""AdamW on FP32 or BF16 masters, and clipping by the global norm.

Loshchilov and Hutter 2019, arXiv 1711.05101. Weight decay touches matrices only: no norms, no biases. The state is a
flat mapping of tensors, so that safetensors can hold it. The update is PyTorch's fused kernel through its functional
form, since `torch.optim.Optimizer` imports the compiler: 70 MiB and most of a second. With `state` 8bit the moments of
large parameters are kept in 8 bits (`eight_bit.py`); BF16 masters are in float32 while they are updated, a part at a
time (`masters.py`).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from types import EllipsisType

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from isobit.distributed import Shards
from isobit.distributed.files import FileTensor, Part
from isobit.distributed.shards import BLOCK_ROWS, MOMENT_BLOCK
from isobit.errors import IsobitError
from isobit.kernels import Ops, get_ops
from isobit.model.weights.checksums import Checksums
from isobit.rl.optim import masters as optim_masters
from isobit.rl.optim.eight_bit import EightBitState, in_blocks, quantizable, widened
from isobit.rl.optim.masters import Piece, UpdatedMasters, grouped, pieces
from isobit.rl.optim.schedule import OptimizerSettings

AT_ONCE = 1 << 26
"""Elements that one call updates, whose gradients are then freed: many small parameters, or a large one."""
_MOMENTS = ("exp_avg", "exp_avg_sq")


class Optimizer:
    """AdamW over named parameters; moments and step counts are where their parameter is, gradients in the `.grad` of
    `holders`, by default of the parameters themselves.

    Where ranks share the parameters (`shards`), each updates the rows that it keeps. `ops`: of the backend that
    computed the gradients, by default the reference's, which has the same bits on a CPU.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        settings: OptimizerSettings,
        shards: Shards | None = None,
        ops: Ops | None = None,
        holders: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.parameters = dict(parameters)
        self.holders: Mapping[str, Tensor] = self.parameters if holders is None else holders
        self._ops = ops or get_ops("reference")
        self.settings = settings
        self.shards = shards or Shards.of({name: tuple(p.shape) for name, p in self.parameters.items()})
        self._state: dict[str, dict[str, Tensor]] = {}
        self._masters = UpdatedMasters(self.parameters, self.holders, self.shards, self._ops, settings.seed)
        large = [name for name in self.parameters if self._is_eight_bit(name)]
        self._eight_bit = EightBitState(self._masters, large, settings) if large else None
        self.checksums = Checksums(self._written_by_step)

    def zero_grad(self) -> None:
        self._masters.free_gradients(list(self.holders))

    def gradient_norm(self) -> float:
        """The global L2 norm, before clipping; inf if any gradient is not finite. The sum of its blocks' sums is
        rounded once, so it has no order, and is the same however the ranks share the blocks."""
        gradients = [self.holders[name].grad for name in self.parameters]
        mine = _sums_of_squares([gradient for gradient in gradients if gradient is not None], self._ops)
        squares = [s for sums in self.shards.ranks.all_gather_json(mine) for s in sums]
        total = math.fsum(squares) if all(math.isfinite(s) for s in squares) else math.inf
        return math.sqrt(total)

    @torch.no_grad()
    def step(self, rate: float, norm: float) -> None:
        """One update at this rate, with gradients scaled so that their norm `norm` is at most `max_grad_norm`; each is
        freed when it was applied."""
        if norm > self.settings.max_grad_norm:
            factor = self.settings.max_grad_norm / norm
            for holder in self.holders.values():
                if holder.grad is not None:
                    holder.grad.mul_(factor)
        updated = [name for name in self.parameters if self.holders[name].grad is not None]
        decayed = [name for name in updated if self.parameters[name].ndim > 1]
        others = [name for name in updated if self.parameters[name].ndim <= 1]
        self._update(decayed, rate, self.settings.weight_decay)
        self._update(others, rate, 0.0)
        self.checksums.renew()

    def _update(self, names: list[str], rate: float, weight_decay: float) -> None:
        if self._eight_bit is not None:
            self._eight_bit.update([name for name in names if name in self._eight_bit], rate, weight_decay)
            names = [name for name in names if name not in self._eight_bit]
        wide = [name for name in names if self.parameters[name].dtype == torch.float32]
        for some in grouped(((name, self.parameters[name].numel()) for name in wide), AT_ONCE):
            self._update_wide(some, rate, weight_decay)
        narrow = [name for name in names if self.parameters[name].dtype != torch.float32]
        for group in pieces(narrow, self.parameters, optim_masters.AT_ONCE):
            self._update_narrow(group, rate, weight_decay)

    def _update_wide(self, names: list[str], rate: float, weight_decay: float) -> None:
        """FP32 masters, in place."""
        states = [self._state_of(name) for name in names]
        moments = [[state[key] for state in states] for key in _MOMENTS]
        gradients = [self.holders[name].grad for name in names]
        masters: list[Tensor] = [self.parameters[name] for name in names]
        self._adamw(masters, gradients, moments, [state["step"] for state in states], rate, weight_decay)
        self._masters.free_gradients(names)

    def _update_narrow(self, group: list[Piece], rate: float, weight_decay: float) -> None:
        """BF16 masters: a step counts once for all pieces of a parameter, with the last of them."""
        states = [self._state_of(name) for name, _ in group]
        moments = [[state[key].view(-1)[part] for state, (_, part) in zip(states, group)] for key in _MOMENTS]
        gradients = [self._masters.gradient(name, part) for name, part in group]
        steps, masters = [state["step"].clone() for state in states], [self._masters.wide(*piece) for piece in group]
        self._adamw(masters, gradients, moments, steps, rate, weight_decay)
        for (name, part), values, step in zip(group, masters, torch.stack(steps).tolist()):
            self._masters.put(name, part, values, int(step))
            if part.stop == self.parameters[name].numel():
                self._state[name]["step"] += 1
                self._masters.free_gradients([name])

    def _state_of(self, name: str) -> dict[str, Tensor]:
        if name not in self._state:
            parameter = self.parameters[name]
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

    def _tensors(self) -> dict[str, dict[str, Tensor]]:
        """What this rank keeps of the state, by parameter and key."""
        eight_bit = self._eight_bit
        if eight_bit is None:
            return self._state
        steps = {name: {"step": torch.tensor(float(step))} for name, step in eight_bit.steps.items()}
        return self._state | {name: steps[name] | tensors for name, tensors in eight_bit.tensors().items()}

    def _written_by_step(self) -> dict[str, Tensor]:
        """The masters, their moments and step counts."""
        found: dict[str, Tensor] = {f"master {name}": parameter for name, parameter in self.parameters.items()}
        states = self._state | ({} if self._eight_bit is None else self._eight_bit.tensors())
        return found | {f"{key} of {name}": value for name, state in states.items() for key, value in state.items()}

    @property
    def gradient_bytes(self) -> int:
        """Of all gradients, in FP32 whatever the masters are."""
        return 4 * sum(p.numel() for p in self.parameters.values())

    @property
    def nbytes(self) -> int:
        """Bytes of the moments of all parameters."""
        eight_bit = self._eight_bit
        plain = [p for name, p in self.parameters.items() if eight_bit is None or name not in eight_bit]
        return sum(8 * p.numel() for p in plain) + (0 if eight_bit is None else eight_bit.nbytes)

    def state(self) -> dict[str, Tensor]:
        """Moments and step counts, copied to the CPU: `NAME.exp_avg`, `NAME.exp_avg_sq`, `NAME.step`; of 8-bit moments
        `.codes` and `.scale`. Empty before the first update. Of the rows that this rank keeps."""
        found = self._tensors()
        return {f"{name}.{key}": t.to("cpu", copy=True) for name, state in found.items() for key, t in state.items()}

    def parts(self) -> dict[str, Part]:
        """The state of all ranks for a file, of which each rank writes what it keeps; `.step` is the first rows'."""
        mine = self._tensors()
        known = {name for names in self.shards.ranks.all_gather_json(list(mine)) for name in names}
        found: dict[str, Part] = {}
        for name in known:
            lo, _ = self.shards.own(name)
            for key, form in self._forms(name, self._is_eight_bit(name)).items():
                tensor = mine[name][key] if name in mine and (form.shape or lo == 0) else None
                start = lo * self.shards.width(name) // form.block if form.shape else 0
                found[f"{name}.{key}"] = Part(form.dtype, form.shape, tensor, start)
        return found

    def load_state(self, tensors: Mapping[str, Tensor | FileTensor]) -> None:
        """The inverse of `state`, bit for bit; of the state of all ranks this one reads its rows. Raises IsobitError if
        the tensors are not of these parameters."""
        self._check(tensors)
        given = {
            name: {
                k: tensors[f"{name}.{k}"][form.rows(self.shards, name)]
                for k, form in self._forms(name, self._has_codes(name, tensors)).items()
            }
            for name in self.parameters
            if f"{name}.step" in tensors
        }
        for name in given:
            if not self._is_eight_bit(name) and self._has_codes(name, tensors):
                given[name] = widened(given[name])
        eight_bit = self._eight_bit
        if eight_bit is not None:
            eight_bit.load_state({name: given.pop(name) for name in list(given) if name in eight_bit})
        self._state = {
            name: {key: value.to(self.parameters[name].device, copy=True) for key, value in state.items()}
            for name, state in given.items()
        }

    def _check(self, tensors: Mapping[str, Tensor | FileTensor]) -> None:
        """Raise IsobitError unless these are the whole state of some of all ranks' parameters."""
        seen: dict[str, int] = {}
        for key, tensor in tensors.items():
            name = key.partition(".exp_avg")[0].removesuffix(".step")
            if name not in self.shards.shapes:
                raise IsobitError(f"optimizer state has {name!r}, which the model does not have")
            form = self._forms(name, self._has_codes(name, tensors)).get(key.removeprefix(f"{name}."))
            if form is None or tuple(tensor.shape) != form.shape:
                raise self._misfit(name)
            seen[name] = seen.get(name, 0) + 1
        for name, count in seen.items():
            if count != len(self._forms(name, self._has_codes(name, tensors))):
                raise self._misfit(name)

    def _misfit(self, name: str) -> IsobitError:
        what = ": it was not kept in 8 bits" if self._is_eight_bit(name) else " the model"
        return IsobitError(f"optimizer state of {name} does not fit{what}")

    def _is_eight_bit(self, name: str) -> bool:
        return self.settings.state == "8bit" and quantizable(name, self.shards.shapes[name])

    def _has_codes(self, name: str, tensors: Mapping[str, object]) -> bool:
        """Whether a parameter's moments are in 8 bits in a state to load: also those of embedding and head, where it is
        of a run that began when they had 8 bits too."""
        if self._is_eight_bit(name):
            return True
        codes = self.settings.state == "8bit" and in_blocks(self.shards.shapes[name])
        return codes and f"{name}.exp_avg.codes" in tensors

    def _forms(self, name: str, eight_bit: bool) -> dict[str, "_Form"]:
        """The tensors of a parameter's state, by key."""
        shape = self.shards.shapes[name]
        found = {"step": _Form(torch.float32, ())}
        for key in _MOMENTS:
            if eight_bit:
                scales = _Form(torch.float32, (math.prod(shape) // MOMENT_BLOCK,), MOMENT_BLOCK)
                found |= {f"{key}.codes": _Form(torch.uint8, shape), f"{key}.scale": scales}
            else:
                found[key] = _Form(torch.float32, shape)
        return found


@dataclass(frozen=True)
class _Form:
    """A tensor of the state; `block` elements of the parameter have one of its elements."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    block: int = 1

    def rows(self, shards: Shards, name: str) -> slice | EllipsisType:
        """Those of the parameter's rows that this rank keeps."""
        if not self.shape:
            return ...
        ratio = self.block * math.prod(self.shape[1:])
        lo, hi = (row * shards.width(name) // ratio for row in shards.own(name))
        return slice(lo, hi)


def _sums_of_squares(gradients: Sequence[Tensor], ops: Ops) -> list[float]:
    """In float64, of each block of 128 rows, whose bits do not depend on the rows around it; a block is the sum of its
    rows, rounded once, so they do not depend on threads either."""
    matrices = [g if g.ndim > 1 else g.view(-1, 1) for g in gradients]
    if not matrices:
        return []
    rows = iter(torch.cat([ops.square_sums(m) for m in matrices]).tolist())  # one wait for all of them
    lengths = [min(BLOCK_ROWS, len(m) - first) for m in matrices for first in range(0, len(m), BLOCK_ROWS)]
    return [math.fsum(islice(rows, length)) for length in lengths]
