"""Runs with a loss and an advantage of the user's file, and what a resumed run says of another
text."""

import json
from pathlib import Path

import pytest

from isobit.config import load_config
from isobit.errors import IsobitError
from isobit.training.train import train
from tests.runs import write_config

CLIP = """
import torch
from isobit.rl.algorithm.loss import LossOutputs, ratios

def loss(inputs):
    ratio = ratios(inputs)
    bounded = ratio.clamp(1 - inputs.clip_low, 1 + inputs.clip_high)
    loss = -torch.minimum(ratio * inputs.advantages, bounded * inputs.advantages)
    return LossOutputs(loss, metrics={"ratio": ratio})
"""
CENTRED = """
import math

def advantage(inputs):
    found = []
    for row in inputs.totals():
        scored = [reward for reward in row if reward is not None]
        mean = math.fsum(scored) / max(len(scored), 1)
        found.append([None if r is None else r - mean if len(set(scored)) > 1 else 0.0 for r in row])
    return found
"""


def weights(run: Path) -> bytes:
    return (sorted((run / "checkpoints").glob("step*"))[-1] / "model.safetensors").read_bytes()


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "losses.py").write_text(CLIP)
    (tmp_path / "credit.py").write_text(CENTRED)
    return tmp_path


def run(folder: Path, model: Path, name: str, *overrides: str) -> Path:
    settings = [f"run.dir={folder / name}", "steps=2", "algorithm.preset=dr_grpo", *overrides]
    return train(load_config(write_config(folder, model), settings)).run_dir


@pytest.mark.slow
def test_the_named_ones_written_anew_train_to_the_same_bits(files: Path, base_model: Path) -> None:
    own = run(files, base_model, "own", f"algorithm.loss={files}/losses.py:loss")
    both = f"algorithm.advantage={files}/credit.py:advantage"
    all_own = run(files, base_model, "all", f"algorithm.loss={files}/losses.py:loss", both)
    named = run(files, base_model, "named")
    (files / "twice.py").write_text(CLIP.replace("loss = -", "loss = -2 * "))
    other = run(files, base_model, "other", f"algorithm.loss={files}/twice.py:loss")
    assert weights(own) == weights(all_own) == weights(named)
    assert weights(other) != weights(named)  # the control
    rows = [json.loads(line) for line in (own / "metrics.jsonl").read_text().splitlines()]
    assert [row["loss/ratio"] for row in rows if row["step"] > 0] == [1.0, 1.0]
    facts = json.loads((all_own / "machine.json").read_text())["functions"]
    assert {key: len(found) for key, found in facts.items()} == {
        "algorithm.loss": 1,
        "algorithm.advantage": 1,
    }


def test_a_loss_that_cannot_be_split_costs_nothing(files: Path, base_model: Path) -> None:
    (files / "losses.py").write_text(
        CLIP.replace("LossOutputs(loss,", "LossOutputs(loss / len(loss),")
    )
    with pytest.raises(IsobitError, match="depends on how a batch is split into micro-batches"):
        run(files, base_model, "own", f"algorithm.loss={files}/losses.py:loss")
    assert not (files / "own").exists()
