"""Launches that the tests make, noted and compiled for the card that they are for.

A full run compiles all of them at its end (`conftest.py`).
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from isobit.errors import IsobitError
from isobit.kernels.product.triton.kernels import plain_product
from isobit.kernels.product.triton.product import product
from isobit.kernels.triton.launch import launch

from .helpers import DEVICE, HAS_GPU
from .launches import compiled, described, launch_class, launch_of, noted

pytestmark = pytest.mark.skipif(HAS_GPU, reason="a GPU compiles what it launches")


def _one_product(inner: int) -> list[dict[str, Any]]:
    x, w = (torch.ones(n, inner, dtype=torch.bfloat16, device=DEVICE) for n in (3, 5))
    with noted() as found:
        product(x, w)
        product(x[:2], w)
    return list(found.values())


def test_different_launches_are_noted_once() -> None:
    """Rows are not compiled anew, and the channels of this product are."""
    [launch] = _one_product(64)
    assert (launch["kernel"], launch["constants"]["BLOCK_K"]) == ("plain_product", 64)
    assert launch["arguments"][:4] == ["bfloat16", "bfloat16", [None], "bfloat16"]
    [other] = _one_product(65)
    assert launch_class(launch) != launch_class(other)


@pytest.mark.slow
def test_a_launch_that_does_not_compile_is_named(tmp_path: Path) -> None:
    """The control: steps of 8 channels, which no instruction has, beside a launch as it is."""
    [launch] = _one_product(64)
    broken = launch | {"constants": launch["constants"] | {"BLOCK_K": 8}}
    count, failures = compiled([launch, broken], tmp_path)
    assert count == 2
    [(kernel, constants, why)] = failures
    assert (kernel, constants["BLOCK_K"]) == ("product.plain_product", "8")
    assert why


def test_launches_are_told_apart_as_the_compiler_does() -> None:
    """By the types of tensors, constants and options, and of numbers by what matters of them."""

    def key(x: Tensor, number: int, **more: Any) -> str:
        given = {"num_warps": 4, "num_stages": 2, "grid": (1,), "BLOCK": 64, **more}
        return launch_class(described(_one_product, (x, number, None), given))

    x, other = torch.empty(3), torch.empty(3, dtype=torch.bfloat16)
    assert key(x, 17) == key(torch.empty(5), 18, grid=(7,))
    others = [key(other, 17), key(x, 1), key(x, 16), key(x, 1 << 31 | 1)]
    others += [key(x, 17, BLOCK=32), key(x, 17, num_warps=8)]
    assert len({key(x, 17), *others}) == 7


def test_a_noted_launch_is_made_again() -> None:
    [launch] = _one_product(64)
    made = launch_of(json.loads(json.dumps(launch)))
    assert made.kernel is plain_product
    types = [x.dtype for x in made.arguments if isinstance(x, Tensor)]
    assert types == [torch.bfloat16] * 3
    assert (made.constants, made.num_warps) == (launch["constants"], launch["num_warps"])


def test_what_a_gpu_has_not_is_one_line() -> None:
    """As Triton says it of a kernel that it has compiled. The control: another error stays."""

    class Kernel:
        __name__ = "_dkv"

        def __init__(self, error: Exception) -> None:
            self.error = error

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            def run(*arguments: object, **options: object) -> None:
                raise self.error

            return run

    short = OutOfResources(131072, 101376, "shared memory")
    with pytest.raises(IsobitError, match="cannot run dkv, which needs 131072 of shared memory"):
        launch(Kernel(short), (1,), num_warps=4)
    with pytest.raises(RuntimeError, match="another"):
        launch(Kernel(RuntimeError("another")), (1,), num_warps=4)
