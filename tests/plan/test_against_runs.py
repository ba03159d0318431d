"""The plan beside what runs on a CPU report: bytes in metrics.jsonl, and what the forward saves for the backward."""

from pathlib import Path

import pytest

from isobit.config import load_config
from isobit.plan import device_named, job_of
from isobit.plan.memory import memory, moment_bytes, num_parameters, saved_bytes, weights
from isobit.run.directory import METRICS, read_jsonl
from isobit.training.assembly import open_parts
from isobit.training.plan import measure
from isobit.training.train import train
from tests.models import tiny_model
from tests.runs import write_config

MIB = 2**20
RUNS = [
    ("fp8", "qwen3", ()),
    ("bf16", "qwen3", ("optimizer.activation_checkpointing=true",)),
    ("fp8-unified", "qwen3_moe", ()),
    ("fp8-rollout", "qwen3", ()),
    ("fp8", "qwen3_moe", ("algorithm.kl_coefficient=0.01", "evaluation.every=1", "evaluation.samples=4")),
]


@pytest.mark.parametrize(("flow", "family", "changes"), RUNS)
def test_a_run_reports_what_was_planned(flow: str, family: str, changes: tuple[str, ...], tmp_path: Path) -> None:
    """To 10 %, as the design asks; weights and moments to the byte."""
    tiny_model(family=family, hidden_size=128, intermediate_size=256).save(tmp_path / "model")
    given = (*changes, f"precision={flow}", "steps=1")
    config = load_config(write_config(tmp_path, tmp_path / "model"), given)
    parts = open_parts(config, quiet=True)
    parts.rewards.close()
    job = job_of(config, device_named("h200"), parts.engine.longest_prompt)
    row = list(read_jsonl(Path(train(config, quiet=True).run_dir) / METRICS))[-1]
    planned, held = memory(job), dict(memory(job).held)
    size = weights(job.model, job.precision).total
    assert row["memory/weights_mib"] * MIB == 4 * num_parameters(job.model) + size
    assert row["memory/optimizer_mib"] * MIB == moment_bytes(job.model, "fp32")
    cache = held["keys and values"] + held.get("keys and values of the evaluation", 0)
    assert row["memory/kv_cache_mib"] * MIB == pytest.approx(cache, rel=0.1)
    if job.reference is not None:
        assert row["memory/reference_mib"] * MIB == held["reference model, on every rank"]
    assert planned.total > sum(held.values()) > 16 * num_parameters(job.model) + size
    # the control: another flow's plan is not this run
    other = job.under(tiny_model("bf16" if flow != "bf16" else "fp8").precision, 1)
    assert (
        row["memory/weights_mib"] * MIB != 4 * num_parameters(job.model) + weights(other.model, other.precision).total
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flow", "family"),
    [
        *((flow, "qwen3") for flow in ("float32", "bf16", "fp8", "fp8-unified", "fp8-e2e", "fp8[bf16_layers=down]")),
        *((flow, "qwen3_moe") for flow in ("float32", "bf16", "fp8")),
    ],
)
def test_saved_activations_are_those_of_the_forward(flow: str, family: str) -> None:
    """To 10 %, as counted from tensors (`isobit.training.live_bytes`), without recomputation and with it."""
    layers = 12 if family == "qwen3_moe" else 3  # what its last layer works with weighs little
    model = tiny_model(flow, family, hidden_size=256, intermediate_size=512, num_layers=layers, head_dim=64)
    config, hidden = model.config, model.precision.learner.compute.itemsize * model.config.hidden_size
    planned = sum(saved_bytes(config, model.precision, layer) for layer in range(config.num_layers)) + 2 * hidden
    forward = measure(model).phases[0].slope
    assert forward == pytest.approx(planned, rel=0.1)
    kept = measure(model, recompute=True).phases[0].slope
    assert kept < 0.7 * forward
