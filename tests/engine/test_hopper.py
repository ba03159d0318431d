"""What the engine records is what the learner computes, with the Triton kernels under Hopper's matrix
instruction as it is emulated, and heads of 128 channels, which are several instructions."""

import pytest
import torch

from isobit import Completion, Engine, Model, Sampling
from tests.kernels.triton.hopper import Card, in_small_tiles, last_channels_first
from tests.models import tiny_model

from .helpers import differing

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="a GPU is asked itself: tests/gpu"
)


def _model(precision: str) -> Model:
    return tiny_model(precision, backend="triton", scale=6, num_layers=1, num_heads=2,
                      num_kv_heads=1, head_dim=128)  # fmt: skip


def _completions(model: Model) -> list[list[Completion]]:
    engine = Engine(model, kv_pages=12, page_size=4, max_batch_tokens=9, max_sequences=3)
    groups = engine.generate([[3, 4, 5, 6, 7, 8, 9], [5]], Sampling(2, 3, seed=1, ignore_eos=True))
    engine.integrity()
    return groups


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp8", "bf16", "fp8[kv_cache=e4m3]"])
def test_an_engine_records_what_its_learner_computes_with_heads_of_128(precision: str) -> None:
    """The control: a learner on a card whose small tiles have another order. Of BF16 the sums of a
    model as small as this one show none."""
    model = _model(precision)
    with Card().computes() as card:
        groups = _completions(model)
        assert differing(model, groups) == (0, 12)
    assert card.asked
    if precision == "bf16":
        return
    with Card(order=in_small_tiles(last_channels_first)).computes():
        assert differing(model, groups)[0] > 0
