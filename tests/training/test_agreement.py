"""A token that differs although the flow promises the same bits: the run stops, warns or corrects,
and says where."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from isobit.config import load_compare_config, load_config, load_run_config
from isobit.errors import RunFailed
from isobit.evaluation.inspection.locate import locate
from isobit.kernels.backends.reference import ReferenceOps
from isobit.model import Model, Transformer
from isobit.rl import ResolvedObjective
from isobit.rl.learner.agreement import Disagreement, promises_bits
from isobit.run import checkpoints
from isobit.run.directory import read_jsonl
from isobit.training.commands.compare import compare
from isobit.training.measuring.agreement import unlike
from isobit.training.train import replay, resume, train
from tests.models import slow_where, tiny_model
from tests.rl.helpers import alternating, make_learner, roll_out, same_bits, snapshot
from tests.runs import fingerprint, write_config

Broken = Callable[[], None]


@pytest.fixture
def broken_operator(monkeypatch: pytest.MonkeyPatch) -> Broken:
    """From the call on, a row of the products that end layer 1 depends on how many rows are with
    it."""

    def breaks() -> None:
        whole = ReferenceOps.product

        def product(self, a, b, bias=None, out=torch.bfloat16):  # type: ignore[no-untyped-def]
            found = whole(self, a, b, bias, out)
            if out is torch.bfloat16 and b.shape == (32, 48) and a.shape[0] > 32:
                found = found + found.flip(1) * 30
            return found

        monkeypatch.setattr(ReferenceOps, "product", product)

    return breaks


@pytest.fixture
def stale_rollout(monkeypatch: pytest.MonkeyPatch) -> None:
    """The third sync leaves the rollout with the weights of before, as a sync that was lost
    would."""
    sync = Transformer.sync

    def loses(self: Transformer, rollout: bool = True) -> None:
        before = deepcopy(self._working["rollout"])
        sync(self, rollout)
        if self.weights_version == 3:
            self._working["rollout"] = before

    monkeypatch.setattr(Transformer, "sync", loses)


def config_of(folder: Path, model: Path, *overrides: str):  # type: ignore[no-untyped-def]
    return load_config(
        write_config(folder, model),
        ["backend=reference", "consistency=exact", "run.checkpoint_every=1", *overrides],
    )


def test_a_broken_operator_stops_the_run_before_it_learns(
    tmp_path: Path, base_model: Path, broken_operator: Broken
) -> None:
    config = config_of(tmp_path, base_model, "steps=2")
    train(config)
    before = fingerprint(tmp_path / "run")
    broken_operator()
    with pytest.raises(RunFailed) as caught:
        resume(tmp_path / "run", ["steps=4"])
    message = str(caught.value)
    assert "\n" not in message
    for part in (
        "step 3: rollout and learner differ in ",
        "fp8 promises the same bits; first: prompt ",
        ", token ",
        "layers.0.down, operator product: row ",
        "has other bits in its batch than alone",
        "nothing was learned from this batch",
        f"the last good checkpoint is {tmp_path / 'run' / 'checkpoints' / 'step-000002'}",
        f"isobit train --resume {tmp_path / 'run'} on_mismatch=warn",
    ):
        assert part in message, message
    assert fingerprint(tmp_path / "run")["model.safetensors"] == before["model.safetensors"]
    assert checkpoints.all_checkpoints(tmp_path / "run" / "checkpoints")[-1].name == "step-000002"


@pytest.mark.slow
def test_a_resume_may_warn_and_go_on_or_correct(
    tmp_path: Path, base_model: Path, broken_operator: Broken, capsys: pytest.CaptureFixture[str]
) -> None:
    broken_operator()
    config = config_of(tmp_path, base_model)
    with pytest.raises(RunFailed, match="differ in"):
        train(config)
    capsys.readouterr()
    warned = resume(tmp_path / "run", ["on_mismatch=warn"], quiet=False)
    lines = [
        line
        for line in capsys.readouterr().err.splitlines()
        if "rollout and learner differ in" in line
    ]
    assert len(lines) == 4
    assert all("learned from nonetheless (on_mismatch: warn)" in line for line in lines)
    assert all(row["mismatch/differing_tokens"] > 0 for row in warned.metrics if row["step"] > 0)
    assert all("correction/mean_weight" not in row for row in warned.metrics)

    corrected = train(
        config_of(tmp_path, base_model, "on_mismatch=correct", f"run.dir={tmp_path / 'other'}")
    )
    assert [row["mismatch/corrected"] for row in corrected.metrics] == [1.0] * 4
    assert all(row["correction/effective_sample_size"] < 1 for row in corrected.metrics)
    weights = [
        fingerprint(folder)["model.safetensors"] for folder in (warned.run_dir, corrected.run_dir)
    ]
    assert weights[0] != weights[1]


def test_a_stale_weight_version_stops_the_run(
    tmp_path: Path, base_model: Path, stale_rollout: None
) -> None:
    with pytest.raises(RunFailed) as caught:
        train(config_of(tmp_path, base_model, "run.checkpoint_every=0"))
    assert "step 3: rollout and learner differ in " in str(caught.value)
    assert f"the last good checkpoint is {tmp_path / 'run' / 'checkpoints' / 'step-000002'}" in str(
        caught.value
    )
    assert "other bits token by token, as in a rollout, than alone" in str(caught.value)
    assert checkpoints.all_checkpoints(tmp_path / "run" / "checkpoints")[-1].name == "step-000002"


@pytest.mark.slow
@pytest.mark.parametrize(
    "precision",
    slow_where(
        ["fp8", "fp8-unified", "fp8[kv_cache=e4m3-calibrated]", "bf16"],
        lambda precision: precision not in ("fp8", "bf16"),
    ),
)
def test_an_unbroken_run_never_stops(tmp_path: Path, base_model: Path, precision: str) -> None:
    """The control, under each mode; with several optimizer steps a batch, whose later ones are of
    other weights."""
    several = ["algorithm.updates_per_batch=2", f"precision={precision}"]
    runs = [
        train(
            config_of(
                tmp_path, base_model, *several, f"on_mismatch={mode}", f"run.dir={tmp_path / mode}"
            )
        )
        for mode in ("stop", "warn", "correct")
    ]
    assert all(row["mismatch/differing_tokens"] == 0 for run in runs for row in run.metrics)
    assert [row["mismatch/corrected"] for row in runs[2].metrics] == [0.0] * 4
    assert len({fingerprint(run.run_dir)["model.safetensors"] for run in runs}) == 1


@pytest.mark.parametrize(
    "override", ["precision=fp8-rollout", "consistency=fast", "rollouts_ahead=1"]
)
def test_where_nothing_is_promised_or_samples_are_stale_nothing_stops(
    tmp_path: Path, base_model: Path, override: str
) -> None:
    result = train(config_of(tmp_path, base_model, override, "steps=3"))
    assert len(result.metrics) == 3
    assert "mismatch/corrected" not in result.metrics[-1]


def test_a_replay_stops_under_the_same_config_and_not_under_another(
    tmp_path: Path, base_model: Path, broken_operator: Broken, capsys: pytest.CaptureFixture[str]
) -> None:
    first = train(config_of(tmp_path, base_model, "steps=2"))
    replay(first.run_dir, tmp_path / "same")
    other = replay(first.run_dir, tmp_path / "other", ["optimizer.learning_rate=0.01"], quiet=False)
    assert other.metrics[-1]["mismatch/differing_tokens"] > 0
    assert "it had another optimizer" in capsys.readouterr().err
    config = load_run_config(first.run_dir)
    assert unlike(first.run_dir, replace(config, ranks=4, divided=2), {}) == []
    assert unlike(first.run_dir, replace(config, seed=1), {}) == ["seed"]
    broken_operator()
    with pytest.raises(
        RunFailed, match=r"differ in .* --from-rollouts RECORDED --out DIR on_mismatch=warn"
    ):
        replay(first.run_dir, tmp_path / "broken")
    assert len(replay(first.run_dir, tmp_path / "warned", ["on_mismatch=warn"]).metrics) == 2


def test_a_comparison_keeps_the_stop_as_a_result(
    tmp_path: Path, base_model: Path, broken_operator: Broken, capsys: pytest.CaptureFixture[str]
) -> None:
    broken_operator()
    path = write_config(tmp_path, base_model, backend="reference", consistency="exact", steps=1)
    compare(load_compare_config(path, ["fp8", "fp8-rollout"], 1, str(tmp_path / "out")))
    assert "differ in" in (tmp_path / "out" / "fp8" / "seed-0" / "outcome.json").read_text()
    assert list(read_jsonl(tmp_path / "out" / "fp8-rollout" / "seed-0" / "metrics.jsonl"))


@pytest.mark.parametrize("recompute", [False, True])
def test_the_learner_changes_nothing_before_it_disagrees(recompute: bool) -> None:
    """Weights, optimizer and gradients; the first differing token is named. The control is an
    untouched batch."""

    model = tiny_model()
    samples = roll_out(model)
    learner = make_learner(model, ResolvedObjective(recompute_old=recompute), on_mismatch="stop")
    assert promises_bits(model)
    changed = list(samples)
    logprobs = list(changed[2].rollout_logprobs)
    logprobs[1] = float(torch.tensor(logprobs[1]).nextafter(torch.tensor(0.0)))
    changed[2] = replace(changed[2], rollout_logprobs=tuple(logprobs))
    before = snapshot(learner)
    with pytest.raises(Disagreement) as caught:
        learner.learn(changed, alternating(changed), 0)
    assert same_bits(before, snapshot(learner))
    assert (caught.value.differing, caught.value.first.sample, caught.value.first.position) == (
        1,
        changed[2],
        1,
    )
    learner.learn(samples, alternating(samples), 0)
    assert not same_bits(before, snapshot(learner))


def test_a_difference_that_does_not_repeat_is_said_to_be_none() -> None:
    model: Model = tiny_model()
    (sample, *_) = roll_out(model)
    tokens = [*sample.prompt_ids, *sample.completion_ids]
    found = locate(model, tokens[:-1], tokens[-1], [tokens[:-1], tokens[:3]], 0, 1.0)
    assert found.difference is None
    assert found.logprob == sample.rollout_logprobs[-1]
