"""Batches that are sampled ahead of the learner: a share of each is compared under the weights that
sampled it."""

from pathlib import Path
from typing import Any

import pytest
import torch

from isobit.config import load_config
from isobit.engine.engine import Engine
from isobit.errors import RunFailed
from isobit.kernels.backends.reference import ReferenceOps
from isobit.run import checkpoints
from isobit.training.sampled_ahead import AheadCompared, SampledAhead
from isobit.training.train import TrainResult, resume, train
from tests.models import tiny_model
from tests.runs import fingerprint, write_config

SIGN = 0x80


@pytest.fixture
def flipped_keys(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """From the third step on each step of the engine leaves keys with another bit: the learner's
    own are whole. What is in the list counts them."""
    sampling, flips = list[bool](), list[int]()
    step, write = Engine.step, ReferenceOps.kv_write

    def stepping(self: Engine) -> Any:
        sampling.append(self.model.weights_version > 1)
        try:
            return step(self)
        finally:
            sampling.pop()

    def writing(store: Any, k: Any, v: Any, layout: Any) -> None:
        write(store, k, v, layout)
        if sampling and sampling[-1]:
            store.k.view(torch.uint8)[1::4] ^= SIGN
            flips.append(1)

    monkeypatch.setattr(Engine, "step", stepping)
    monkeypatch.setattr(ReferenceOps, "kv_write", staticmethod(writing))
    return flips


def go(folder: Path, model: Path, *overrides: str) -> TrainResult:
    folder.mkdir(exist_ok=True)
    every = [
        "backend=reference",
        "consistency=exact",
        "run.checkpoint_every=1",
        "rollouts_ahead=1",
        *overrides,
    ]
    return train(load_config(write_config(folder, model), every))


def rows(result: TrainResult) -> list[Any]:
    return [row for row in result.metrics if row["step"] > 0]


@pytest.mark.slow
def test_flipped_keys_end_the_run_in_the_step_that_sampled_them(
    tmp_path: Path, base_model: Path, flipped_keys: list[int]
) -> None:
    """With the share by default, before anything is learned from them. The control compares none,
    and learns from them without a word."""
    with pytest.raises(RunFailed) as caught:
        go(tmp_path / "one", base_model)
    message = str(caught.value)
    last = tmp_path / "one" / "run" / "checkpoints" / "step-000001"
    for part in (
        "step 2: rollout and learner differ in ",
        "nothing was learned from this batch",
        f"checkpoint is {last}",
    ):
        assert part in message, message
    assert checkpoints.all_checkpoints(last.parent)[-1] == last
    assert flipped_keys
    blind = rows(go(tmp_path / "blind", base_model, "mismatch.share_ahead=0"))
    assert len(blind) == 4
    assert not any(row.get("mismatch/differing_tokens") for row in blind)
    assert ["mismatch/compared_tokens" in row for row in blind] == [True, False, False, False]
    assert all(row["mismatch/comparable_tokens"] > 0 for row in blind)


@pytest.mark.slow
def test_a_run_may_warn_or_correct(
    tmp_path: Path, base_model: Path, flipped_keys: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    """Samples of older weights are weighed by the run's correction; where it has none, there is
    nothing to correct them with, and the run ends."""
    warned = rows(go(tmp_path / "warned", base_model, "on_mismatch=warn"))
    assert [bool(row["mismatch/differing_tokens"]) for row in warned] == [False, True, True, True]
    corrected = rows(go(tmp_path / "corrected", base_model, "on_mismatch=correct"))
    assert [row["mismatch/corrected"] for row in corrected] == [0.0, 1.0, 1.0, 1.0]
    assert all("correction/mean_weight" in row for row in corrected[1:])
    with pytest.raises(RunFailed, match="step 2: rollout and learner differ in"):
        go(tmp_path / "none", base_model, "on_mismatch=correct", "algorithm.correction=none")


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        ("precision=fp8",),
        (
            "precision=fp8",
            "algorithm.updates_per_batch=2",
            "replay.groups_per_step=1",
            "replay.capacity=4",
        ),
        pytest.param(
            ("precision=fp8[kv_cache=e4m3-calibrated]", "rollouts_ahead=2"), marks=pytest.mark.slow
        ),
        pytest.param(("precision=bf16", "algorithm.preset=dapo"), marks=pytest.mark.slow),
    ],
)
def test_without_a_fault_nothing_differs_and_nothing_changes(
    tmp_path: Path, base_model: Path, overrides: tuple[str, ...]
) -> None:
    """Weights, moments and completions are those of a run that compares none, in every bit; and so
    is a resumed run."""
    compared = go(tmp_path / "compared", base_model, "mismatch.share_ahead=0.3", *overrides)
    for row in rows(compared):
        assert row["mismatch/differing_tokens"] == 0
        assert 0 < row["mismatch/compared_tokens"] < row["mismatch/comparable_tokens"]
    none = go(tmp_path / "none", base_model, "mismatch.share_ahead=0", *overrides)
    left, right = (fingerprint(result.run_dir) for result in (compared, none))
    assert {key for key in left if left[key] != right[key]} <= {"metrics", "config"}
    go(tmp_path / "cut", base_model, "mismatch.share_ahead=0.3", "steps=2", *overrides)
    assert fingerprint(resume(tmp_path / "cut" / "run", ["steps=4"]).run_dir) == left


def test_two_engines_are_measured_in_every_step(tmp_path: Path, base_model: Path) -> None:
    """Where nothing is promised, the mismatch is known all the same: it was not from the second
    step on."""
    measured = rows(go(tmp_path, base_model, "precision=fp8-rollout"))
    assert all(
        row["mismatch/kl_k3"] > 0 and row["mismatch/differing_tokens"] > 0 for row in measured
    )


@pytest.mark.slow
def test_a_mixture_that_repeats_routes(tmp_path: Path) -> None:
    tiny_model(family="qwen3_moe").save(tmp_path / "model")
    measured = rows(go(tmp_path, tmp_path / "model", "algorithm.router_replay=true"))
    assert all(
        row["mismatch/differing_tokens"] == 0 and row["mismatch/compared_tokens"] > 0
        for row in measured
    )


@pytest.mark.slow
def test_which_are_compared_is_drawn_by_batch(
    tmp_path: Path, base_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The share rounded up, others in each batch, the same ones again."""
    seen: list[list[tuple[int, int]]] = []
    compare = SampledAhead._compare

    def noting(self: SampledAhead, took: dict[str, float]) -> AheadCompared:
        found = compare(self, took)
        seen.append([(sample.prompt_index, sample.sample_index) for sample, _, _ in found.pairs])
        return found

    monkeypatch.setattr(SampledAhead, "_compare", noting)
    go(tmp_path / "one", base_model, "mismatch.share_ahead=0.3")
    once, seen[:] = list(seen), []
    go(tmp_path / "again", base_model, "mismatch.share_ahead=0.3")
    assert seen == once
    completions = 16  # of a step of tests.runs
    assert {len(chosen) for chosen in once} == {-(-3 * completions // 10)}
    assert len({tuple(number for _, number in chosen) for chosen in once}) > 1
