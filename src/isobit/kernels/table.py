"""The one table of backends: name to implementation, chosen once, at the start, and recorded."""

import os
from functools import cache
from typing import TYPE_CHECKING

import torch

from isobit.errors import IsobitError
from isobit.kernels.backends.reference import ReferenceOps
from isobit.kernels.cache import keep_kernels_of_triton
from isobit.kernels.gpu import ARCHITECTURES, Gpu, find_gpu, refusal, triton_refusal
from isobit.kernels.inference_engine.definition import InferenceEngineOps
from isobit.kernels.ops import Ops
from isobit.options import consistency as orders

if TYPE_CHECKING:
    from isobit.kernels.backends.triton import TritonOps

BACKENDS = ("auto", "triton", "native", "reference")


def get_ops(backend: str = "auto", consistency: str = "bitwise") -> Ops:
    """Return the operators of a backend.

    `triton` runs on the GPUs of `gpu.ARCHITECTURES`, if its kernels pass a check there at the first
    start; `native` is C++, from the wheel or compiled on first use; `reference` is PyTorch. `auto`
    is triton where there is such a GPU, else native where that works, else reference, for `bitwise`
    at the level `exact`; a consistency that names an order of a CPU's sums is computed there. The
    result's `why` names the choice and the reason. Raises IsobitError for an unknown name, and if
    the named backend cannot work here.
    """
    if backend not in BACKENDS:
        raise IsobitError(f"unknown backend {backend!r}: choose from {', '.join(BACKENDS)}")
    if consistency not in orders.CONSISTENCIES:
        raise IsobitError(
            f"unknown consistency {consistency!r}: choose from {', '.join(orders.CONSISTENCIES)}"
        )
    if backend == "reference":
        return ReferenceOps(consistency, "reference backend: asked for")
    if backend == "triton":
        return triton_ops(consistency)
    unused = ""
    if backend == "auto" and (gpu := find_gpu()) is not None:
        if orders.order(consistency) is not None:
            reason: str | None = f"consistency: {consistency} names an order of a CPU's sums"
        else:
            reason = (
                refusal(gpu)
                or triton_refusal()
                or (_failing(gpu) if consistency in ("bitwise", "fast") else None)
            )
        if reason is None:
            return triton_ops(consistency)
        unused = f"; the GPU is not used: {reason}"
    return _cpu_ops(backend, consistency, unused)


def triton_ops(consistency: str) -> "TritonOps":
    """Return the operators of the GPU; where there is none and TRITON_INTERPRET=1, of Triton's
    interpreter. Raises IsobitError where they cannot run."""
    if consistency not in ("bitwise", "fast"):
        raise IsobitError(
            f"consistency: {consistency} is a CPU's; on a GPU use consistency: bitwise, or "
            "backend: native"
        )
    gpu, interpreted = find_gpu(), os.environ.get("TRITON_INTERPRET") == "1"
    if gpu is None and not interpreted:
        raise IsobitError(
            "backend: triton needs an NVIDIA GPU, and PyTorch sees none; use backend: auto"
        )
    reason = triton_refusal()
    if gpu is not None:
        reason = reason or refusal(gpu) or _failing(gpu)
    if reason is not None:
        raise IsobitError(f"backend: triton cannot be used: {reason}")
    from isobit.kernels.backends.triton import TritonOps  # here: it imports Triton

    if gpu is None:
        return TritonOps(
            consistency, "triton backend: in Triton's interpreter, for tests", torch.device("cpu")
        )
    from isobit.kernels.attention.triton.forward import keys_first

    sides = "" if keys_first() else ", with all rows on one side of the instructions"
    return TritonOps(consistency, f"triton backend: {gpu}{sides}", _device())


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


@cache
def _failing(gpu: Gpu) -> str | None:
    """Return why the kernels cannot be used on this GPU, or None, and compile for it."""
    from isobit.kernels.backends import self_check
    from isobit.kernels.backends.triton import TritonOps
    from isobit.kernels.triton import launch  # here: they import Triton

    keep_kernels_of_triton()
    architecture = ARCHITECTURES[gpu.capability]
    launch.compile_for(architecture)
    if os.environ.get("ISOBIT_GPU_CHECK") == "skip":
        return None
    try:
        failures = self_check.remembered(
            TritonOps("bitwise", "being checked", _device()), architecture.fp8
        )
    except Exception as error:  # of a compiler or a driver, anything
        return f"{gpu}: the kernels' check ended with {type(error).__name__}: {error}"
    return (
        f"{gpu}: the kernels fail their check here: {failures[0]} ({len(failures)} in all)"
        if failures
        else None
    )


def _cpu_ops(backend: str, consistency: str, unused: str) -> Ops:
    from isobit.kernels.backends.native import NativeOps
    from isobit.kernels.native import available
    from isobit.kernels.product.ordered_native import instruction_set  # here: it may compile

    works, reason = available()
    if works:
        order = orders.order(orders.resolved(consistency))
        sums = "" if order is None else f", sums {order} by {instruction_set(order)}"
        return NativeOps(consistency, f"native backend: {reason}{sums}{unused}")
    if backend == "native":
        raise IsobitError(
            f"backend: native cannot be built: {reason}; use backend: auto or reference"
        )
    why = f"reference backend, because native cannot be built: {reason}{unused}"
    if orders.level(consistency) == "bitwise":  # whose order takes PyTorch a hundred times as long
        return ReferenceOps("exact", f"{why}; exact sums")
    return ReferenceOps(consistency, why)


def inference_engine_ops(learner: Ops) -> Ops:
    """Return the operators of a rollout on a second engine; `learner` are those of the learner. On
    a GPU these are other kernels: cuBLAS products, as under `consistency: fast`."""
    if learner.backend == "triton":
        return triton_ops("fast")
    if learner.backend == "native":
        from isobit.kernels.backends.native import NativeOps
        from isobit.kernels.inference_engine.native import NativeInferenceEngineOps

        assert isinstance(learner, NativeOps)
        return NativeInferenceEngineOps(learner)
    return InferenceEngineOps(learner)
