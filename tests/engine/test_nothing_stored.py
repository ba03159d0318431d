"""A Nemotron-H whose layers are MLPs or experts alone stores nothing of a token: its pages have 0
bytes."""

from pathlib import Path

import pytest

from isobit.config import load_config
from isobit.engine.engine import Engine
from isobit.engine.types import Sampling
from isobit.training.train import train
from tests.models import one_part_values, tiny_model
from tests.runs import dry_run, write_config


@pytest.mark.parametrize("kinds", [("mlp", "mlp"), ("moe",), ("moe", "mlp", "moe")])
def test_an_engine_is_sized_for_prompts(kinds: tuple[str, ...]) -> None:
    """Rollout and learner agree. The control is a model with attention, whose pages have bytes."""
    model = tiny_model("fp8", "nemotron_h", **one_part_values(kinds))
    engine = Engine.sized_for(model, ["12+3=", "7-"], 4, 8)
    assert engine.kv_bytes == 0
    sampling = Sampling(max_new_tokens=8, seed=1, n=2)
    for prompt, group in zip(("12+3=", "7-"), engine.generate(["12+3=", "7-"], sampling)):
        for completion in group:
            given = model.tokenizer.encode(prompt)
            (logprobs,) = model.logprobs([[*given, *completion.token_ids]])
            assert logprobs.tolist()[len(given) - 1 :] == list(completion.logprobs)
    other = tiny_model("fp8", "nemotron_h", **one_part_values(("full_attention", *kinds)))
    assert Engine.sized_for(other, ["12+3="], 4, 8).kv_bytes > 0


def test_it_is_planned_and_trained(tmp_path: Path) -> None:
    model = tiny_model("fp8", "nemotron_h", **one_part_values(("mlp", "moe")))
    model.save(tmp_path / "model")
    config = load_config(write_config(tmp_path, tmp_path / "model", steps=1))
    blocks: list[str] = []
    dry_run(config, blocks.append)
    assert "; cache: " in "".join(blocks)
    result = train(config, quiet=True)
    assert result.metrics[-1]["mismatch/differing_tokens"] == 0
