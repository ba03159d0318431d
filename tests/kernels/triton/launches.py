"""What the tests launch, written down while they run in the interpreter, and compiled for sm_90.

Each different launch of a kernel of isobit is noted: its kernel, the types of its tensors, its
numbers, constants and options. Numbers are different where Triton compiles a kernel anew: 1,
multiples of 16, more than 32 bits. Left out: kernels that tests define, grids, and whether what was
compiled is right or fast.
"""

import importlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from triton.runtime.interpreter import InterpretedFunction

from isobit.kernels.triton.launch import KernelLaunch

from ..compiler import python

Launch = dict[str, Any]
_OPTIONS = ("num_warps", "num_stages")
_PLAIN = (type(None), bool, int, float, str)
_PROGRAM = """
import json
from pathlib import Path
from benchmarks.cross_compile import kernel_name, triton_compile
from benchmarks.kernel_table import signature
from tests.kernels.triton.launches import launch_of
from triton.backends.compiler import GPUTarget

found = {}
for line in Path("FILE").read_text().splitlines():
    launch = launch_of(json.loads(line))
    found.setdefault(signature(launch), launch)
failures = []
for launch in found.values():
    try:
        triton_compile(launch, GPUTarget("cuda", 90, 32))
    except Exception as error:
        while error.__cause__ is not None:
            error = error.__cause__
        constants = {name: str(value) for name, value in launch.constants.items()}
        last = (str(error).strip() or type(error).__name__).splitlines()[-1]
        failures.append([kernel_name(launch), constants, last])
print(json.dumps([len(found), failures]))
"""


@contextmanager
def noted() -> Iterator[dict[str, Launch]]:
    """Inside, launches are noted, by what makes them different."""
    found: dict[str, Launch] = {}
    own = InterpretedFunction.run

    def run(kernel: Any, *arguments: object, **more: Any) -> object:
        if kernel.fn.__module__.startswith("isobit."):
            launch = described(kernel.fn, arguments, more)
            found.setdefault(launch_class(launch), launch)
        return own(kernel, *arguments, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpretedFunction, "run", run)
        yield found


def compiled(launches: Sequence[Launch], folder: Path) -> tuple[int, list[Any]]:
    """(how many different ones were compiled for sm_90, [kernel, constants, why] of those that do
    not compile)."""
    file = folder / "launches.jsonl"
    file.write_text("\n".join(map(json.dumps, launches)), encoding="utf-8")
    count, failures = json.loads(python(_PROGRAM.replace("FILE", str(file)), folder))
    return count, failures


def described(
    function: Callable[..., object], arguments: Sequence[object], more: Mapping[str, Any]
) -> Launch:
    """A launch as plain values: a tensor is its type."""
    constants = {
        name: value
        for name, value in more.items()
        if name not in (*_OPTIONS, "grid", "warmup", "enable_fp_fusion")
    }
    assert all(isinstance(value, _PLAIN) for value in constants.values()), constants
    return {
        "module": function.__module__,
        "kernel": function.__name__,
        "arguments": [
            str(x.dtype).removeprefix("torch.") if isinstance(x, torch.Tensor) else [x]
            for x in arguments
        ],
        "constants": constants,
        **{name: more[name] for name in _OPTIONS},
    }


def launch_class(launch: Launch) -> str:
    """The same for launches that are compiled once."""
    arguments = [
        [x[0] == 1, x[0] % 16 == 0, -(2**31) <= x[0] < 2**31] if type(x[0]) is int else str(x)
        for x in launch["arguments"]
    ]
    return json.dumps(launch | {"arguments": arguments}, sort_keys=True)


def launch_of(launch: Launch) -> KernelLaunch:
    """A noted launch, of tensors without values."""
    arguments = tuple(
        x[0] if isinstance(x, list) else torch.empty(1, dtype=getattr(torch, x), device="meta")
        for x in launch["arguments"]
    )
    kernel = getattr(importlib.import_module(launch["module"]), launch["kernel"])
    options = (launch["num_warps"], launch["num_stages"])
    return KernelLaunch(kernel, (1,), arguments, launch["constants"], *options)
