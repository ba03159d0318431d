"""Training with top-p, top-k and min-p: rollout and learner keep the same tokens and renormalize,
bit for bit."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from isobit.config import load_config
from isobit.engine.engine import Engine
from isobit.engine.types import Sampling
from isobit.errors import IsobitError, RunFailed
from isobit.kernels.sampling import filtering
from isobit.model import Model
from isobit.rl import ResolvedObjective, Sample
from isobit.rl.learner.forward import forward
from isobit.rl.learner.packing import pack
from isobit.run.directory import read_jsonl
from isobit.training.train import TrainResult, resume, train
from tests.models import ALPHABET, level, require, tiny_model
from tests.rl.helpers import alternating, make_learner, roll_out
from tests.runs import fingerprint, write_config

TRUNCATIONS: dict[str, dict[str, Any]] = {
    "top_p": {"top_p": 0.9},
    "top_k": {"top_k": 20},
    "min_p": {"min_p": 0.05},
    "penalty": {"repetition_penalty": 1.5},
    "all": {
        "repetition_penalty": 1.2,
        "top_p": 0.9,
        "top_k": 20,
        "min_p": 0.05,
        "temperature": 0.8,
    },
}
LETTERS = ALPHABET + "*"
FLOWS = ["fp8", "fp8-unified", "bf16"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "base"
    tiny_model(scale=4.0, alphabet=LETTERS).save(folder)
    return folder


def _run(folder: Path, base: Path, sampling: dict[str, Any], **changes: Any) -> TrainResult:
    folder.mkdir(exist_ok=True)
    settings = {"sampling": sampling, "optimizer": {"learning_rate": 0.01}, **changes}
    return train(load_config(write_config(folder, base, **settings)), quiet=True)


@pytest.mark.parametrize("kind", TRUNCATIONS)
@pytest.mark.parametrize("precision", FLOWS)
@pytest.mark.parametrize("backend", ["native", "reference"])
def test_no_token_differs_over_several_steps(
    tmp_path: Path, base: Path, backend: str, precision: str, kind: str
) -> None:
    """After updates too, and the weights do move."""
    require(backend)
    flow = {"backend": backend, "consistency": level(backend), "precision": precision, "steps": 3}
    rows = _run(tmp_path, base, TRUNCATIONS[kind], **flow).metrics[-3:]
    assert [row["mismatch/differing_tokens"] for row in rows] == [0.0] * 3
    assert all(row["mismatch/compared_tokens"] > 20 for row in rows)
    assert all(row["grad_norm"] > 0 and row["steps/skipped"] == 0 for row in rows)


@pytest.mark.parametrize("kind", TRUNCATIONS)
def test_a_learner_of_the_whole_distribution_differs(
    tmp_path: Path, base: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control of the test before this one."""
    monkeypatch.setattr(Sampling, "filtering", None)
    with pytest.raises(RunFailed, match="differ in"):
        _run(tmp_path, base, TRUNCATIONS[kind])


def _rollouts(model: Model, **sampling: Any) -> tuple[list[Sample], ResolvedObjective]:
    asked = Sampling(n=4, max_new_tokens=8, seed=0, **sampling)
    samples = roll_out(model, length=8, sampling=asked)
    return samples, ResolvedObjective(temperature=asked.temperature, filtering=asked.filtering)


def _bits(model: Model, samples: list[Sample], objective: ResolvedObjective) -> Tensor:
    with torch.no_grad():
        found = forward(model, pack(samples), objective.temperature, objective.filtering)[0]
    return found.view(torch.int32)


@pytest.mark.parametrize("kind", TRUNCATIONS)
@pytest.mark.parametrize("precision", FLOWS)
def test_a_support_that_is_a_little_wider_differs(precision: str, kind: str) -> None:
    """Of the same rollouts: the learner's own settings agree in every bit, close ones do not."""
    model = tiny_model(precision, scale=4.0, alphabet=LETTERS)
    samples, objective = _rollouts(model, **TRUNCATIONS[kind])
    rolled = torch.tensor([x for s in samples for x in s.rollout_logprobs]).view(torch.int32)
    assert torch.equal(_bits(model, samples, objective), rolled)
    assert objective.filtering is not None
    top_k, top_p, min_p, penalty = objective.filtering
    wider = (
        top_k + 1 if top_k else 0,
        min(top_p + 0.01, 1.0) if top_p < 1 else 1.0,
        min_p / 2,
        1 + (penalty - 1) / 2,
    )
    differing = int((_bits(model, samples, replace(objective, filtering=wider)) != rolled).sum())
    assert differing > len(rolled) // 20


def test_ties_at_every_edge_are_kept_alike() -> None:
    """A head of four distinct rows: every logit occurs twelve times, so an edge falls among equal
    ones."""
    model = tiny_model("fp8", scale=4.0, alphabet=LETTERS)
    with torch.no_grad():
        head = model.named_parameters()["embed"]
        head.copy_(head[torch.arange(len(head)) % 4])
    model.sync()
    for kind in TRUNCATIONS.values():
        samples, objective = _rollouts(model, ignore_eos=True, **kind)
        rolled = torch.tensor([x for s in samples for x in s.rollout_logprobs])
        assert torch.equal(_bits(model, samples, objective), rolled.view(torch.int32))


def test_tokens_that_leave_the_support_keep_a_finite_log_probability(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two updates a batch with a large step: some drawn tokens are no longer among the kept
    ones."""
    model = tiny_model("fp8", scale=4.0, alphabet=LETTERS)
    samples, objective = _rollouts(model, top_p=0.7)
    learner = make_learner(
        model, replace(objective, updates_per_batch=2), rate=0.05, on_mismatch="stop"
    )
    found = learner.learn(samples, alternating(samples), 0).metrics
    assert found["mismatch/differing_tokens"] == 0
    assert found["steps/skipped"] == 0
    model.sync()
    with torch.no_grad():
        moved = forward(model, pack(samples), 1.0, objective.filtering)[0]
    assert bool(torch.isfinite(moved).all())
    monkeypatch.setattr(filtering, "filter_around", _without_the_drawn_tokens)
    monkeypatch.setattr("isobit.model.forward.head.filter_around", _without_the_drawn_tokens)
    with torch.no_grad():
        control = forward(model, pack(samples), 1.0, objective.filtering)[0]
    outside = ~torch.isfinite(control)
    assert bool(outside.any()), "the control: no token has left"
    assert torch.equal(control[~outside], moved[~outside])


def _without_the_drawn_tokens(
    logits: Tensor, tokens: Tensor, temperature: float, given: Any
) -> Tensor:
    return filtering.filter_logits(
        logits, filtering.of_rows(temperature, logits), filtering._limits(given, logits)
    )


@pytest.mark.parametrize(
    "algorithm",
    [{"updates_per_batch": 2, "epochs": 2}, {"recompute_old_logprobs": "always"}],
    ids=["several updates", "recomputed"],
)
def test_other_ways_to_learn_from_a_batch(
    tmp_path: Path, base: Path, algorithm: dict[str, Any]
) -> None:
    rows = _run(tmp_path, base, {"top_p": 0.9}, algorithm=algorithm, steps=3).metrics[-3:]
    assert [row["mismatch/differing_tokens"] for row in rows] == [0.0] * 3
    assert all(row["steps/skipped"] == 0 for row in rows)


def test_rollouts_that_run_ahead_have_finite_ratios(tmp_path: Path, base: Path) -> None:
    rows = _run(tmp_path, base, {"top_p": 0.8}, rollouts_ahead=2, steps=5).metrics[-5:]
    assert all(row["steps/skipped"] == 0 and row["grad_norm"] < 1e6 for row in rows)
    assert any(row.get("staleness/kl_k3", 0.0) > 0 for row in rows)
    assert sum(row.get("mismatch/differing_tokens", 0.0) for row in rows) == 0


def test_experts_and_adapters_agree_too(tmp_path: Path) -> None:
    tiny_model(family="qwen3_moe", scale=4.0, alphabet=LETTERS).save(tmp_path / "moe")
    adapter = {"rank": 4, "alpha": 8, "targets": ["q_proj", "k_proj", "v_proj", "o_proj"]}
    rows = _run(tmp_path, tmp_path / "moe", {"top_p": 0.9}, adapter=adapter).metrics[-4:]
    assert [row["mismatch/differing_tokens"] for row in rows] == [0.0] * 4


@pytest.mark.slow
def test_a_run_resumes_bit_for_bit_and_its_report_has_no_differing_token(
    tmp_path: Path, base: Path
) -> None:
    whole = _run(tmp_path / "whole", base, {"top_p": 0.9}, run={"report": True})
    half = _run(tmp_path / "half", base, {"top_p": 0.9}, steps=2)
    resumed = resume(half.run_dir, ["steps=4"])
    assert fingerprint(resumed.run_dir) == fingerprint(whole.run_dir)
    other = _run(tmp_path / "other", base, {"top_p": 0.8})
    assert (
        fingerprint(other.run_dir)["model.safetensors"]
        != fingerprint(whole.run_dir)["model.safetensors"]
    )
    rows = [
        row
        for row in read_jsonl(whole.run_dir / "metrics.jsonl")
        if "mismatch/differing_tokens" in row
    ]
    assert rows
    assert all(row["mismatch/differing_tokens"] == 0 for row in rows)
    assert "top_p: 0.9" in (whole.run_dir / "config.yaml").read_text()
    assert (whole.run_dir / "report.html").is_file()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"precision": "fp8-rollout"},
            "cannot be used in training with a precision with two engines",
        ),
        ({"consistency": "fast"}, "cannot be used in training with consistency: fast"),
        ({"algorithm": {"kl_coefficient": 0.01}}, "cannot be used with a KL penalty"),
        (
            {"algorithm": {"kl_coefficient": 0.01, "kl_in_reward": True}},
            "cannot be used with a KL penalty",
        ),
    ],
)
def test_what_is_not_defined_is_refused(
    tmp_path: Path, base: Path, changes: dict[str, Any], message: str
) -> None:
    """In one line, with what to set; the control is the same run without a filtering."""
    for sampling in TRUNCATIONS.values():
        with pytest.raises(IsobitError, match=message) as caught:
            load_config(write_config(tmp_path, base, sampling=sampling, **changes))
        assert "\n" not in str(caught.value)
        assert "top_k: 0, top_p: 1, min_p: 0" in str(caught.value)
    load_config(write_config(tmp_path, base, **changes))


def test_what_the_engine_records_is_of_the_kept_tokens() -> None:
    """A completion's log-probabilities are the learner's, renormalized: at top-k 2, those of two
    tokens sum to 1."""
    model = tiny_model("fp8", scale=2.0, alphabet=LETTERS)
    groups = Engine(model).generate(
        ["ab"], Sampling(n=64, max_new_tokens=1, top_k=2, seed=1, ignore_eos=True)
    )
    drawn = {c.token_ids[0]: c.logprobs[0] for c in groups[0]}
    assert len(drawn) == 2
    assert sum(torch.tensor(list(drawn.values())).exp().tolist()) == pytest.approx(1.0, abs=1e-6)
