"""What a GPU is asked first: its matrix instruction against the kept products of Hopper's model."""

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from benchmarks.gpu.instruction import FORMATS, VECTORS, compare_instruction

from ..helpers import same
from .helpers import HAS_GPU
from .hopper import Card, last_channels_first, rounded_once, unlike_sides
from .vectors import PROVENANCE, vectors

CPU = torch.device("cpu")
interpreted = pytest.mark.skipif(HAS_GPU, reason="a GPU computes with its own instruction")


def test_the_file_is_what_the_model_makes_of_its_operands() -> None:
    """And says whose model it is. `python -m tests.kernels.triton.vectors` writes it."""
    kept, made = load_file(VECTORS), vectors()
    assert kept.keys() == made.keys()
    for name, x in made.items():
        assert same(kept[name], x), name
    with safe_open(VECTORS, "pt") as file:
        assert file.metadata() == PROVENANCE
    assert VECTORS.stat().st_size < 64 * 1024


@pytest.mark.parametrize("name", FORMATS)
def test_most_products_show_an_order(name: str) -> None:
    """More than half of them are not the exact sum, rounded or cut off, so chance does not make
    them equal."""
    kept = load_file(VECTORS)
    a, b, c, d = (kept[f"{name}.{part}"] for part in "abcd")
    exact = a.double() @ b.double().t() + c.double()
    assert bool(torch.isfinite(exact).all())
    assert float((exact.float() != d).float().mean()) > 0.5
    assert float((d != 0).float().mean()) > 0.8


@interpreted
def test_the_emulated_instruction_holds_in_every_row() -> None:
    with Card().computes() as card:
        rows = compare_instruction(CPU, claimed=True)
    assert len(rows) == 9 * len(FORMATS)
    assert all(row["holds"] for row in rows)
    assert {(m, n) for _, m, n, _ in card.asked} == {(64, n) for n in (16, 32, 64, 128)}


@interpreted
def test_other_instructions_are_noticed() -> None:
    """The controls: a product that rounds once; a chain over descending channels; sides that are
    not alike, which only exchanged operands show."""
    for broken in (Card(rounded_once), Card(order=last_channels_first), Card(unlike_sides)):
        with broken.computes():
            rows = compare_instruction(CPU, claimed=True)
        for name in FORMATS:
            own = [row for row in rows if str(row["contestant"]).startswith(name)]
            assert sum(not row["holds"] for row in own) > 0, (broken, name)


@interpreted
def test_without_a_claim_rows_are_a_record() -> None:
    rows = compare_instruction(CPU)
    assert not any("holds" in row or "expected" in row for row in rows)
    assert sum(int(str(row["differing"])) for row in rows) > 0
    first = next(row for row in rows if row["differing"])
    assert first["found"] != first["wanted"]


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA device")
def test_this_gpus_instruction_is_the_models() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the model is Hopper's")
    rows = compare_instruction(torch.device("cuda"))
    assert [row for row in rows if not row["holds"]] == []
