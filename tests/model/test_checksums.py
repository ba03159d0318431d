"""Checksums of tensors: any flipped bit is seen, and what their docstring says is not seen."""

import math

import pytest
import torch
from torch import Tensor

from isobit.errors import Corruption
from isobit.kernels import tensors_of
from isobit.model.weights.checksums import Checksums, checksums, first_difference
from tests.models import require, tiny_model


def seen(before: Tensor, after: Tensor) -> bool:
    return first_difference(checksums({"x": before}), checksums({"x": after})) == "x"


@pytest.mark.parametrize("shape", [(), (1,), (7,), (4096,), (5000,), (3, 5), (3, 34), (2, 2, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.uint8])
def test_any_flipped_bit_is_seen(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    size = math.prod(shape)
    x = torch.arange(size).remainder(7).to(dtype).view(shape)
    assert not seen(x, x.clone())
    generator = torch.Generator().manual_seed(size)
    num_bytes = x.numel() * x.element_size()
    places = torch.randint(num_bytes, (40,), generator=generator).tolist()
    for place in {0, num_bytes - 1, *places}:
        for bit in range(8):
            flipped = x.clone()
            flipped.view(-1).view(torch.uint8)[place] ^= 1 << bit
            assert seen(x, flipped)


def test_what_a_sum_of_the_whole_would_miss_is_seen() -> None:
    """Rows that are exchanged, and flips that cancel. The sum of the whole tensor is the
    control."""
    x = torch.randint(-(2**62), 2**62, (4, 64), generator=torch.Generator().manual_seed(0))
    exchanged, cancelling, signs = x[[1, 0, 2, 3]], x.clone(), x.clone()
    cancelling[0, 3] += 64
    cancelling[2, 5] -= 64
    signs[:2, 0] ^= -(2**63)
    for other in (exchanged, cancelling, signs):
        assert int(other.sum()) == int(x.sum())
        assert seen(x, other)


def test_changes_that_cancel_within_a_row_are_not_seen() -> None:
    x = torch.arange(64).view(2, 32)
    assert not seen(x, x.flip(1))
    assert seen(x, x.flip(0))


def test_views_and_transposes_are_read_as_they_are() -> None:
    x = torch.randn(33, 70)
    for part in (x.view(-1)[1:], x.t(), x[3:5]):
        changed = part.clone()
        assert not seen(part, changed)
        changed[(-1,) * changed.ndim] += 1
        assert seen(part, changed)


def test_only_what_changes_between_two_writes_is_corruption() -> None:
    x = torch.zeros(10)
    kept = Checksums(lambda: {"x": x})
    x[0] = 1
    kept.renew()  # nothing, before `begin`
    kept.compare()
    kept.begin()
    x[0] = 2
    kept.renew()
    kept.compare()
    x[0] = 3
    with pytest.raises(Corruption, match="x changed in memory"):
        kept.compare()


@pytest.mark.parametrize("backend", ["reference", "native"])
@pytest.mark.parametrize(
    ("precision", "family"), [("fp8", "qwen3_moe"), ("fp8-rollout", "qwen2"), ("bf16", "llama")]
)
def test_all_that_products_read_is_summed(precision: str, family: str, backend: str) -> None:
    """A flip in any tensor of either use, and in any pack but oneDNN's own; and a sync is no
    corruption."""
    require(backend)
    transformer = tiny_model(precision, family, backend=backend).transformer
    transformer.checksums.begin()
    with torch.no_grad():
        for parameter in transformer.parameters.values():
            parameter.mul_(1.5)
    transformer.sync()
    transformer.sync(rollout=False)
    transformer.checksums.compare()
    read = [
        t
        for w in transformer._working.values()
        for _, operand, _ in w.tensors()
        for t in tensors_of(operand)
    ]
    packed = [
        pack for working in transformer._working.values() for pack in working.packs().values()
    ]
    assert bool(packed) == (backend == "native")
    for tensor in (
        *read,
        *(pack.panels for pack in packed if pack.panels is not None and not pack.panels.is_mkldnn),
    ):
        first = tensor.view(-1)[:1].view(torch.uint8)
        first[0] ^= 1
        with pytest.raises(Corruption):
            transformer.checksums.compare()
        first[0] ^= 1
    transformer.checksums.compare()
