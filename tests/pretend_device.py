"""A GPU that is not there: tensors that hold their values on the CPU and say that they are on
`cuda:0`.

On it the code for a GPU can run, and be wrong, where there is none. An operation over tensors of
two devices raises, as CUDA's do; a single number on the CPU is allowed beside them, as there, but
not in the fused optimizer. Every time that the host reads a value, and so would wait, is counted by
the operator's name. PyTorch's own fake tensors cannot do this in a build without CUDA (autograd
ends the process), and have no values to compare. Left out: whatever a kernel does.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

DEVICE = torch.device("cuda", 0)
_WAITS = (
    "aten._local_scalar_dense.default",
    "aten.nonzero.default",
    "aten.masked_select.default",
    "aten.equal.default",
)
_WITHOUT_EXCEPTION = (
    "aten._fused",
    "aten._foreach",
    "aten.index",
    "aten.embedding",
    "aten.cat",
    "aten.stack",
)


class Mixed(RuntimeError):
    """An operation over tensors of two devices."""


class Elsewhere(Tensor):
    """A tensor of the device; `held` are its values."""

    held: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    device = property(lambda self: DEVICE)  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, held: Tensor) -> "Elsewhere":
        strides, offset = held.stride(), held.storage_offset()
        made = Tensor._make_wrapper_subclass(
            cls, held.shape, strides=strides, storage_offset=offset, dtype=held.dtype
        )
        made.held = held
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Elsewhere({self.held!r})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return _run(func, args, kwargs or {}, Counter())


class PretendDevice(TorchFunctionMode):
    """Within it the device can be used; `waits` counts, by operator, what the host would have
    waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[str] = Counter()
        self._operators = _Operators(self.waits)

    def __enter__(self) -> "PretendDevice":
        self._operators.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._operators.__exit__(*error)

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in (Tensor.backward, torch.autograd.grad):
            return self._backward(*args, **(kwargs or {}))
        outer, self._operators.in_engine = self._operators.in_engine, False
        try:
            return self._call(func, args, dict(kwargs or {}))
        finally:
            self._operators.in_engine = outer

    def _call(self, func: Any, args: Sequence[Any], named: dict[str, Any]) -> Any:
        if func is Tensor.cpu:
            return self._moved(args[0], torch.device("cpu"))
        if func is Tensor.tolist and isinstance(args[0], Elsewhere):
            self.waits["tolist"] += 1
            return args[0].held.tolist()
        if func is Tensor.to:
            places = [
                i for i, value in enumerate(args[1:], 1) if isinstance(value, (torch.device, str))
            ]
            device = args[places[0]] if places else named.pop("device", None)
            if device is None:
                return func(*args, **named)
            rest = [value for i, value in enumerate(args) if i not in places]
            named.pop("non_blocking", None)
            result = rest[0].to(*rest[1:], **named) if len(rest) > 1 or named else rest[0]
            return self._moved(result, torch.device(device))
        if named.get("device") is not None:
            device = torch.device(named.pop("device"))
            return self._moved(func(*args, **named), device)
        return func(*args, **named)

    def _backward(
        self,
        outputs: Any,
        inputs: Sequence[Tensor] | None = None,
        grad_outputs: Any = None,
        **_: Any,
    ) -> tuple[Tensor | None, ...]:
        """Through the engine itself, with the mode on again, which is off in here."""
        found = (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)
        given = (
            tuple(torch.ones_like(t) for t in found)
            if grad_outputs is None
            else tuple(grad_outputs)
        )
        engine, outer = torch.autograd.Variable._execution_engine, self._operators.in_engine
        self._operators.in_engine = True
        super().__enter__()
        try:
            return engine.run_backward(
                found, given, False, False, tuple(inputs or ()), True, not inputs
            )
        finally:
            super().__exit__(None, None, None)
            self._operators.in_engine = outer

    def _moved(self, tensor: Tensor, device: torch.device) -> Tensor:
        if device == tensor.device:
            return tensor
        if device.type == "cpu":
            self.waits["copy to the host"] += 1
        return _Move.apply(tensor, device)


class _Operators(TorchDispatchMode):
    def __init__(self, waits: "Counter[str]") -> None:
        super().__init__()
        self.waits, self.in_engine = waits, False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = _run(func, args, kwargs or {}, self.waits)
        # zeros for a gradient that nobody gave: autograd takes the device for the CPU
        return Elsewhere(result) if self.in_engine and str(func) == "aten.zeros.default" else result


class _Move(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, device: torch.device) -> Tensor:
        ctx.back = tensor.device
        return _placed(tensor, device)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return _placed(gradient, ctx.back), None


def _placed(tensor: Tensor, device: torch.device) -> Tensor:
    values = tensor.held if isinstance(tensor, Elsewhere) else tensor
    return values.clone() if device.type == "cpu" else Elsewhere(values.clone())


def _run(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], waits: "Counter[str]") -> Any:
    name, tensors = str(func), [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    ours = [t for t in tensors if isinstance(t, Elsewhere)]
    there = isinstance(args[0], Elsewhere) if name == "aten.copy_.default" else bool(ours)
    if ours and len(ours) < len(tensors) and name != "aten.copy_.default":
        strict = name.startswith(_WITHOUT_EXCEPTION)
        if any(strict or t.ndim > 0 for t in tensors if not isinstance(t, Elsewhere)):
            raise Mixed(
                f"{name} over {', '.join(f'{t.device.type}{list(t.shape)}' for t in tensors)}"
            )
    if ours:
        masked = name.startswith("aten.index") and any(t.dtype == torch.bool for t in tensors[1:])
        if name in _WAITS or masked or not there:
            waits[name] += 1
    kept = {id(t.held): t for t in ours}
    given, named = tree_map(
        lambda t: t.held if isinstance(t, Elsewhere) else t, (tuple(args), dict(kwargs))
    )
    result = func(*given, **named)

    def back(value: Any) -> Any:
        if not isinstance(value, Tensor) or not there:
            return value
        return (
            kept[id(value)] if id(value) in kept else Elsewhere(value)
        )  # in place: the very tensor

    return tree_map(back, result)
