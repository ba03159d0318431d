"""The benchmark of saved bytes counts all that is alive after a forward, and nothing twice."""

import pytest
import torch

from benchmarks.saved_bytes import bytes_of_a_token
from isobit.kernels import Layout
from isobit.model import Model
from isobit.model.forward.recompute import Recompute
from isobit.training.plan.live_bytes import LiveBytes
from tests.models import tiny_model


def _alive(model: Model, tokens: int, recompute: Recompute) -> int:
    ids = torch.arange(tokens) % model.config.vocab_size
    layout = Layout.packed([tokens])
    model.transformer.hidden(ids, layout)  # what is made at first use
    with torch.enable_grad(), LiveBytes() as live:
        hidden = model.transformer.hidden(ids, layout, recompute=recompute)
        alive = live.live - hidden.untyped_storage().nbytes()
    return alive


@pytest.mark.parametrize("recompute", [False, "mlp", True])
@pytest.mark.parametrize(
    ("preset", "family"),
    [("bf16", "qwen3"), ("fp8", "qwen3"), ("fp8-e2e", "qwen3_moe"), ("fp8", "qwen3_5_text")],
)
def test_what_is_counted_is_what_is_alive(preset: str, family: str, recompute: Recompute) -> None:
    """The tokens themselves and the rotary tables' places are the caller's."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "max_positions": 256}
    model = tiny_model(preset, family, **sizes)
    counted = sum(bytes_of_a_token(model, recompute).values())
    alive = (_alive(model, 256, recompute) - _alive(model, 128, recompute)) / 128
    assert counted - 8 == pytest.approx(alive, rel=0.02)
    less = sum(
        bytes_of_a_token(
            tiny_model(preset, family, **(sizes | {"num_layers": 1})), recompute
        ).values()
    )
    assert less < 0.7 * counted, "the control: a model of one layer"
