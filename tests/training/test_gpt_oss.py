"""GRPO on a gpt-oss of two layers and the quickstart's task: no token differs after updates, and
all is trained."""

from pathlib import Path

import pytest
import torch

from isobit import load_config, train
from isobit.model import Model
from isobit.run.checkpoints import all_checkpoints
from tests.models import tiny_model
from tests.runs import write_config


@pytest.mark.parametrize("precision", ["bf16", "fp8", "fp8-unified"])
def test_no_token_differs_after_updates(precision: str, tmp_path: Path) -> None:
    tiny_model(family="gpt_oss", scale=4.0, windows=(3, None)).save(tmp_path / "model")
    changes = {
        "precision": precision,
        "algorithm": {"updates_per_batch": 2},
        "optimizer": {"learning_rate": 0.02},
    }
    result = train(load_config(write_config(tmp_path, tmp_path / "model", **changes)), quiet=True)
    rows = result.metrics[-4:]
    assert [row["mismatch/differing_tokens"] for row in rows] == [0.0] * 4
    assert all(row["mismatch/compared_tokens"] > 0 and row["grad_norm"] > 0 for row in rows)
    before, after = (
        Model.load(path, "float32").named_parameters()
        for path in (tmp_path / "model", all_checkpoints(tmp_path / "run" / "checkpoints")[-1])
    )
    still = [name for name in before if torch.equal(before[name], after[name])]
    assert still == []
