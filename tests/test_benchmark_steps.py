"""What the benchmarks time is what they say: a step of an open run, and a peer's whole model."""

from contextlib import ExitStack
from pathlib import Path

import pytest
from safetensors import safe_open

from benchmarks import learning
from benchmarks.models import save_model
from benchmarks.peers.llamacpp import named
from benchmarks.steps import GROUP, PROMPTS, open_run
from isobit.run.directory import read_jsonl
from isobit.training.loop import training_step


@pytest.mark.slow
def test_a_step_of_the_benchmarks_is_one_of_a_run(tmp_path: Path, base_model: Path) -> None:
    with ExitStack() as stack:
        session = open_run(tmp_path, base_model, "fp8", stack)
        training_step(session)
        [row] = [
            row for row in read_jsonl(session.run.directory / "metrics.jsonl") if row["step"] == 1
        ]
    assert row["prompts/consumed"] == PROMPTS
    assert row["mismatch/compared_tokens"] >= PROMPTS * GROUP
    assert row["mismatch/differing_tokens"] == 0


def test_llamacpp_is_given_every_tensor_under_a_name_of_its_own(tmp_path: Path) -> None:
    with safe_open(save_model(tmp_path / "m", 32, 2, 64) / "model.safetensors", "pt") as tensors:
        names = list(tensors.keys())
    given = {named(name) for name in names}
    assert len(given) == len(names) == 2 + 2 * 11
    assert {"token_embd.weight", "output_norm.weight", "blk.1.attn_q_norm.weight"} <= given
    with pytest.raises(KeyError):
        named("model.layers.0.mlp.experts.0.up_proj.weight")


@pytest.mark.slow
def test_learning_is_timed_beside_autocast() -> None:
    """Of a model of one layer, with every contestant, and a claim for each preset."""
    pytest.importorskip("transformers")
    result = learning.compare(1, 1, 256)
    names = [row.contestant for row in result.rows]
    assert names == ["isobit bf16 bitwise", "isobit fp8 bitwise", learning.PEER]
    assert all(row.rate and row.rate > 0 for row in result.rows)
    assert [claim.target for claim in result.claims] == [2.0, 2.0]
