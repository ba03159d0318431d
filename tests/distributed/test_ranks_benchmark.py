"""What ranks send is what a model of it says, and the page has the ratios that were kept."""

import json
from functools import partial
from pathlib import Path

import pytest

from benchmarks import divided, ranks
from benchmarks.models import save_model
from tests.distributed.threads import ThreadRanks, run

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("experts", [0, pytest.param(4, marks=pytest.mark.slow)])
def test_what_ranks_send_in_a_step_is_what_the_model_says(
    tmp_path: Path, experts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = save_model(tmp_path / "model", 256, 2, 512, 64, experts)

    def both(each: ThreadRanks) -> tuple[ranks.Bytes, ranks.Bytes]:
        return ranks.measured_bytes(each, model), ranks.modelled_bytes(each, model)

    for size in (1, *ranks.SIZES):
        for found, modelled in run(size, both):
            assert found == modelled, size
            assert (min(found.gradients, found.weights) > 0) == (size > 1)
    monkeypatch.setattr(
        "isobit.distributed.exchange.buckets", lambda names: [list(names)]
    )  # the control
    assert any(found != modelled for found, modelled in run(4, both))


def test_the_kept_ratios_are_on_the_page() -> None:
    kept = json.loads((ROOT / "benchmarks" / "results" / "ranks.json").read_text())
    table = ranks.table(kept["ratios"])
    page = (ROOT / "docs" / "measured.md").read_text()
    assert table in page
    other = [{**each, "value": each["value"] + 0.001} for each in kept["ratios"]]  # the control
    assert ranks.table(other) not in page
    bytes_sent = [claim for claim in kept["claims"] if claim["what"].startswith("bytes")]
    assert len(bytes_sent) == 2 * len(ranks.SIZES)
    assert all(claim["value"] == 0 for claim in bytes_sent)


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_that_hold_a_model_together_receive_the_bytes_of_the_formula(
    tmp_path: Path, size: int
) -> None:
    """In a forward of the rollout; the control: a model of more layers, and its formula."""
    few, more = (
        run(size, partial(divided.counted, path=str(save_model(tmp_path / str(n), 512, n, 512))))
        for n in (1, 2)
    )
    assert all(received == formula > 0 for received, formula in (*few, *more))
    assert all(a[1] < b[1] for a, b in zip(few, more))
