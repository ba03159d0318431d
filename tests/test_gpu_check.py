"""The script's check on cards that no one has built: it goes on in the way that keeps bits, and says
what does not hold."""

from pathlib import Path

import pytest

from benchmarks.gpu import check
from benchmarks.gpu.common import Bench
from benchmarks.gpu.results import Results
from isobit.kernels.attention.triton import forward as attention
from isobit.kernels.backends import self_check
from isobit.kernels.backends.self_check import EXCHANGED, ONE_SIDE
from isobit.kernels.backends.triton import TritonOps
from isobit.kernels.product.triton import plan
from tests.kernels.triton.helpers import HAS_GPU
from tests.kernels.triton.hopper import Array, Card, last_channels_first, unlike_sides

pytestmark = pytest.mark.skipif(HAS_GPU, reason="a GPU has an instruction of its own")


@pytest.fixture
def _both_sides(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of attention alone, by a check of its own, and as it was afterwards."""
    monkeypatch.setattr(attention, "_FEW_ROWS", attention._FEW_ROWS)
    monkeypatch.setattr(plan, "_tokens_first", plan._tokens_first)
    monkeypatch.setenv("ISOBIT_CACHE", str(tmp_path / "cache"))

    def of_attention(ops: TritonOps, kind: str, sizes: self_check.Sizes) -> object:
        return self_check._attention(ops, kind, 40) if kind == "BF16" else iter(())

    monkeypatch.setattr(self_check, "_all", of_attention)


@pytest.mark.slow
@pytest.mark.usefixtures("_both_sides")
@pytest.mark.parametrize(
    ("card", "side", "says"),
    [
        (Card(), EXCHANGED, "the check passed"),
        (Card(unlike_sides), ONE_SIDE, "exchanged operands change bits on this GPU"),
    ],
    ids=["hopper", "unlike sides"],
)
def test_the_script_goes_on_in_the_way_that_keeps_bits(
    card: Card, side: str, says: str, tmp_path: Path
) -> None:
    results = Results(tmp_path, "one", rehearsal=True)
    results.begin()
    with card.computes():
        check.run(Bench("check", results))
    assert check.verdict(results) == (side, [])
    assert says in check.said(results)
    assert attention.keys_first() == plan._tokens_first == (side == EXCHANGED)


@pytest.mark.slow
@pytest.mark.usefixtures("_both_sides")
def test_a_card_that_neither_side_helps_is_named(tmp_path: Path) -> None:
    results = Results(tmp_path, "one", rehearsal=True)
    results.begin()
    bench = Bench("check", results)
    with Card(order=_in_low_tiles).computes():
        check.run(bench)
    assert bench.failed
    side, failed = check.verdict(results)
    assert side == ONE_SIDE
    assert failed
    assert "THE CHECK FAILED, and no figure counts: attention over keys in BF16" in check.said(
        results
    )


def _in_low_tiles(a: Array, b: Array) -> tuple[Array, Array]:
    """Another order on a long side of 64 than on one of 128, on which there are more rows."""
    return last_channels_first(a, b) if len(a) <= 64 else (a, b)
