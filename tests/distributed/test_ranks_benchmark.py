"""What ranks send is what a model of it says."""

from pathlib import Path

import pytest

from benchmarks import ranks
from benchmarks.models import save_model
from tests.distributed.threads import ThreadRanks, run


@pytest.mark.parametrize("experts", [0, 4])
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
    monkeypatch.setattr("isobit.distributed.exchange.buckets", lambda names: [list(names)])  # the control
    assert any(found != modelled for found, modelled in run(4, both))
