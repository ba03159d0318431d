"""The optimizer of all masters of a model, on one rank or on many; each master is updated by its
own kind of optimizer.

Here is what optimizers share: the gradient's global norm and its clipping, which optimizer updates
which master, and the state as a flat mapping of tensors, so that safetensors can hold it. Left out:
the updates (`adamw.py`, `eight_bit.py`, `muon.py`).
"""

import math
from collections.abc import Mapping, Sequence
from itertools import islice

import torch
from torch import Tensor

from isobit.distributed import Shards
from isobit.distributed.files import FileTensor, Part
from isobit.distributed.shards import BLOCK_ROWS
from isobit.errors import IsobitError
from isobit.kernels import Ops, get_ops
from isobit.model import Model
from isobit.model.hub.names import matrices
from isobit.model.weights.checksums import Checksums
from isobit.rl.optim.adamw import AdamW
from isobit.rl.optim.base import Optimizer, state_bytes
from isobit.rl.optim.eight_bit import AdamW8bit
from isobit.rl.optim.masters import UpdatedMasters
from isobit.rl.optim.muon import Muon
from isobit.rl.optim.schedule import OptimizerSettings

OPTIMIZERS: tuple[type[Optimizer], ...] = (AdamW8bit, Muon, AdamW)
"""The kinds of optimizer; a master is updated by the first that takes it."""


def optimizer_type(name: str, shape: Sequence[int], settings: OptimizerSettings) -> type[Optimizer]:
    """Return the optimizer that updates a master of this name and whole shape. Only the part of the
    name after the last point counts."""
    return next(kind for kind in OPTIMIZERS if kind.takes(name, shape, settings))


def bytes_of_state(name: str, shape: tuple[int, ...], settings: OptimizerSettings) -> int:
    """Return the bytes that an optimizer keeps for a master of this name and whole shape; nothing
    is allocated."""
    return state_bytes(optimizer_type(name, shape, settings).forms(shape))


class ShardedOptimizer:
    """The update of named parameters; the state is on the parameter's device, gradients are in the
    `.grad` of `holders`, by default of the parameters themselves.

    Where ranks share the parameters (`shards`), each updates the rows that it keeps. `ops`: those
    of the backend that computed the gradients, by default the reference's, which has the same bits
    on a CPU. `matrices`: the rows of each matrix that a master is made of, one above the other,
    where it is more than one (`of`).
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        settings: OptimizerSettings,
        shards: Shards | None = None,
        ops: Ops | None = None,
        holders: Mapping[str, Tensor] | None = None,
        matrices: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        self.parameters = dict(parameters)
        self.holders: Mapping[str, Tensor] = self.parameters if holders is None else holders
        self._ops = ops or get_ops("reference")
        self.settings = settings
        self.shards = shards or Shards.of(
            {name: tuple(p.shape) for name, p in self.parameters.items()}
        )
        self._masters = UpdatedMasters(
            self.parameters, self.holders, self.shards, self._ops, settings.seed, matrices or {}
        )
        self._kinds = {
            name: optimizer_type(name, shape, settings)
            for name, shape in self.shards.shapes.items()
        }
        self._optimizers: dict[type[Optimizer], Optimizer] = {}
        for kind in OPTIMIZERS:
            names = [name for name, type_ in self._kinds.items() if type_ is kind]
            if names:
                self._optimizers[kind] = kind(self._masters, names, settings)
        self.checksums = Checksums(self._written_by_step)

    @staticmethod
    def of(model: Model, settings: OptimizerSettings) -> "ShardedOptimizer":
        """Return the optimizer of all masters that a model trains. Queries, keys and values are
        separate matrices, and so are each expert's, also where the Hugging Face checkpoint has them
        in one tensor."""
        masters = model.transformer.masters
        return ShardedOptimizer(
            model.named_parameters(),
            settings,
            masters.shards,
            model.ops,
            masters.holders,
            matrices(model.config),
        )

    def set(self, settings: OptimizerSettings) -> None:
        """Use other settings from the next step on. They must leave each master with the optimizer
        that it has."""
        kinds = [optimizer_type(n, shape, settings) for n, shape in self.shards.shapes.items()]
        assert kinds == list(self._kinds.values()), "another optimizer has another state"
        self.settings = settings
        for optimizer in self._optimizers.values():
            optimizer.settings = settings

    def zero_grad(self) -> None:
        self._masters.free_gradients(list(self.holders))

    def gradient_norm(self) -> float:
        """Return the global L2 norm before clipping; inf if any gradient is not finite. The sum of
        the blocks' sums is rounded once, so it does not depend on their order, and is the same
        however the ranks share the blocks."""
        gradients = [self.holders[name].grad for name in self.parameters]
        mine = _sums_of_squares(
            [gradient for gradient in gradients if gradient is not None], self._ops
        )
        squares = [s for sums in self.shards.ranks.all_gather_json(mine) for s in sums]
        total = math.fsum(squares) if all(math.isfinite(s) for s in squares) else math.inf
        return math.sqrt(total)

    @torch.no_grad()
    def step(self, rate: float, norm: float) -> None:
        """Update all masters once at this rate, with gradients scaled so that their norm `norm` is
        at most `max_grad_norm`; each gradient is freed once it is applied."""
        if norm > self.settings.max_grad_norm:
            factor = self.settings.max_grad_norm / norm
            for holder in self.holders.values():
                if holder.grad is not None:
                    holder.grad.mul_(factor)
        updated = [name for name in self.parameters if self.holders[name].grad is not None]
        for kind, optimizer in self._optimizers.items():
            mine = [name for name in updated if self._kinds[name] is kind]
            if mine or kind.whole_matrices:
                optimizer.update(mine, rate)
        self.checksums.renew()

    @property
    def gradient_bytes(self) -> int:
        """The bytes of all gradients, in FP32 whatever the masters are."""
        return 4 * sum(p.numel() for p in self.parameters.values())

    @property
    def nbytes(self) -> int:
        """The bytes of the state of all parameters, whether it exists yet or not."""
        return sum(
            state_bytes(self._kinds[name].forms(tuple(p.shape)))
            for name, p in self.parameters.items()
        )

    def state(self) -> dict[str, Tensor]:
        """Return the state of the rows that this rank keeps, copied to the CPU, by names such as
        `NAME.exp_avg` (`Optimizer.forms`). Empty before the first update."""
        tensors = self._tensors()
        return {
            f"{name}.{key}": t.to("cpu", copy=True)
            for name, state in tensors.items()
            for key, t in state.items()
        }

    def parts(self) -> dict[str, Part]:
        """Return the state of all ranks as parts of a file, of which each rank writes what it
        keeps; `.step` is written by the rank that keeps the first rows."""
        mine = self._tensors()
        known = {name for names in self.shards.ranks.all_gather_json(list(mine)) for name in names}
        pieces: dict[str, Part] = {}
        for name in known:
            lo, _ = self.shards.own(name)
            for key, form in self._kinds[name].forms(self.shards.shapes[name]).items():
                tensor = mine[name][key] if name in mine and (form.shape or lo == 0) else None
                start = lo * self.shards.width(name) // form.block if form.shape else 0
                pieces[f"{name}.{key}"] = Part(form.dtype, form.shape, tensor, start)
        return pieces

    def load_state(self, tensors: Mapping[str, Tensor | FileTensor]) -> None:
        """Restore what `state` returned, bit for bit; from the state of all ranks this rank reads
        its rows. Raises IsobitError if the tensors are not of these parameters, or are another
        optimizer's."""
        states: dict[str, dict[str, Tensor | FileTensor]] = {}
        for key, tensor in tensors.items():
            name = self._name_in(key)
            states.setdefault(name, {})[key.removeprefix(f"{name}.")] = tensor
        for name, state in states.items():
            self._check(name, {key: tuple(tensor.shape) for key, tensor in state.items()})
        for kind, optimizer in self._optimizers.items():
            mine = [n for n in self.parameters if n in states and self._kinds[n] is kind]
            optimizer.load({name: self._own_rows(name, states[name]) for name in mine})

    def _own_rows(self, name: str, state: Mapping[str, Tensor | FileTensor]) -> dict[str, Tensor]:
        forms = self._kinds[name].forms(self.shards.shapes[name])
        return {key: state[key][form.rows(self.shards, name)] for key, form in forms.items()}

    def _name_in(self, key: str) -> str:
        """Return the parameter to which a tensor of a state belongs. Raises IsobitError for a
        tensor of another model."""
        name = key
        while name and name not in self.shards.shapes:
            name = name.rpartition(".")[0]
        if not name:
            prefix = key.rpartition(".")[0] or key
            raise IsobitError(f"optimizer state has {prefix!r}, which the model does not have")
        return name

    def _check(self, name: str, state: Mapping[str, tuple[int, ...]]) -> None:
        """Raise IsobitError unless the tensors of these shapes are the whole state of a
        parameter."""
        kind, shape = self._kinds[name], self.shards.shapes[name]
        if state == {key: form.shape for key, form in kind.forms(shape).items()}:
            return
        for optimizer in OPTIMIZERS:
            if optimizer is not kind and state.keys() == optimizer.forms(shape).keys():
                raise IsobitError(
                    f"optimizer state of {name} is of a run with {optimizer.label}, and this run "
                    f"trains it with {kind.label}; a run goes on with its own optimizer. Set it "
                    "back, or begin a new run from these weights with model.path"
                )
        raise IsobitError(f"optimizer state of {name} does not fit the model")

    def _tensors(self) -> dict[str, Mapping[str, Tensor]]:
        """Return the state that this rank keeps, by parameter and key."""
        tensors: dict[str, Mapping[str, Tensor]] = {}
        for optimizer in self._optimizers.values():
            tensors |= optimizer.tensors()
        return tensors

    def _written_by_step(self) -> dict[str, Tensor]:
        """Return the masters and the optimizers' state, which a step writes."""
        tensors: dict[str, Tensor] = {
            f"master {name}": parameter for name, parameter in self.parameters.items()
        }
        states = self._tensors()
        return tensors | {
            f"{key} of {name}": value
            for name, state in states.items()
            for key, value in state.items()
        }


def _sums_of_squares(gradients: Sequence[Tensor], ops: Ops) -> list[float]:
    """Return the sum of squares in float64 of each block of 128 rows, whose bits do not depend on
    the rows around it; a block is the sum of its rows, rounded once, so its bits do not depend on
    threads either."""
    matrices = [g if g.ndim > 1 else g.view(-1, 1) for g in gradients]
    if not matrices:
        return []
    rows = iter(
        torch.cat([ops.square_sums(m) for m in matrices]).tolist()
    )  # one wait for all of them
    lengths = [
        min(BLOCK_ROWS, len(m) - first) for m in matrices for first in range(0, len(m), BLOCK_ROWS)
    ]
    return [math.fsum(islice(rows, length)) for length in lengths]
