"""The hash of the weights: every change of a word, and the same on any number of ranks."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from isobit.distributed import Shards
from isobit.training.saving.certificate import _sum, of_weights

SHAPES = {"a": (700, 24), "b": (301,), "c": (5, 3), "d": (128, 2)}


def _model(masters: dict[str, torch.Tensor], rank: int = 0, size: int = 1) -> Any:
    """What one of several ranks keeps of the masters, and what the others give."""
    shards = [Shards.of(SHAPES, SimpleNamespace(rank=each, size=size)) for each in range(size)]  # type: ignore[arg-type]

    def rows(each: int) -> dict[str, torch.Tensor]:
        return {name: master[slice(*shards[each].own(name))] for name, master in masters.items()}

    def gather(mine: dict[str, int]) -> list[dict[str, int]]:
        others = []
        for each in range(size):
            kept = {name: part for name, part in rows(each).items() if part.numel()}
            first = {
                name: shards[each].own(name)[0] * shards[each].width(name) // 256 for name in kept
            }
            others.append({name: int(_sum(part, first[name])) for name, part in kept.items()})
        assert others[rank] == mine
        return others

    transformer = SimpleNamespace(masters=SimpleNamespace(shards=shards[rank]))
    return SimpleNamespace(
        transformer=transformer,
        named_parameters=lambda: rows(rank),
        ranks=SimpleNamespace(all_gather_json=gather),
    )


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def masters(request: pytest.FixtureRequest) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(shape, generator=generator).to(request.param)
        for name, shape in SHAPES.items()
    }


def test_it_is_the_same_on_any_number_of_ranks(masters: dict[str, torch.Tensor]) -> None:
    whole = of_weights(_model(masters))
    for size in (2, 3, 4):
        assert {of_weights(_model(masters, rank, size)) for rank in range(size)} == {whole}


def test_any_bit_that_flips_changes_it(masters: dict[str, torch.Tensor]) -> None:
    whole, generator = of_weights(_model(masters)), torch.Generator().manual_seed(1)
    for name, master in masters.items():
        data = master.view(-1).view(torch.uint8)
        for place in [
            0,
            len(data) - 1,
            *torch.randint(len(data), (40,), generator=generator).tolist(),
        ]:
            for bit in (1, 16, 128):
                data[place] ^= bit
                assert of_weights(_model(masters)) != whole, (name, place, bit)
                data[place] ^= bit
    assert of_weights(_model(masters)) == whole


def test_rows_that_are_exchanged_change_it(masters: dict[str, torch.Tensor]) -> None:
    whole = of_weights(_model(masters))
    masters["a"][[0, 600]] = masters["a"][[600, 0]]
    assert of_weights(_model(masters)) != whole


def test_a_view_at_an_odd_place_has_the_same_sum(masters: dict[str, torch.Tensor]) -> None:
    flat = masters["a"].view(-1)
    shifted = torch.cat([flat[:1], flat])[1:]
    assert int(_sum(shifted, 3)) == int(_sum(flat, 3))
    assert int(_sum(flat, 4)) != int(_sum(flat, 3))
