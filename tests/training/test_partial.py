"""Completions that go on across weight updates: whose weights drew which tokens, what is learned
from them, and that such a run can be resumed, split over ranks and repeated."""

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from isobit.config import load_config
from isobit.engine.engine import Engine
from isobit.errors import IsobitError, RunFailed
from isobit.model import Model
from isobit.rl import Sample
from isobit.rl.algorithm.partial import learnable
from isobit.rl.algorithm.samples import Segment
from isobit.run.completions import COMPLETIONS, read
from isobit.training.train import TrainResult, replay, resume, train
from tests.distributed.sessions import bits, resumed, session
from tests.distributed.threads import run as run_ranks
from tests.models import slow_where, tiny_model
from tests.runs import fingerprint, killed_after, write_config
from tests.test_resume import start

MOST = 40
PARTIAL: dict[str, Any] = {
    "partial": {"tokens_per_round": 4, "extra_prompts": 4},
    "sampling": {"group_size": 2, "max_new_tokens": MOST},
    "run": {"checkpoint_every": 1, "keep_last": 99},
    "steps": 5,
}


def run(folder: Path, model: Path, *overrides: str, **changes: Any) -> TrainResult:
    folder.mkdir(exist_ok=True)
    changes = {**PARTIAL, **changes}
    return train(load_config(write_config(folder, model, **changes), overrides))


def samples_of(result: TrainResult) -> list[tuple[int, Sample]]:
    """Each recorded sample with the step that learned from it."""
    rows = list(read(result.run_dir / COMPLETIONS))
    return [(row["step"], Sample.from_json(row)) for row in rows]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, base_model: Path) -> TrainResult:
    return run(tmp_path_factory.mktemp("partial"), base_model)


@pytest.fixture(scope="module")
def ahead(tmp_path_factory: pytest.TempPathFactory, base_model: Path) -> TrainResult:
    """Sampled one step before it is learned from."""
    return run(tmp_path_factory.mktemp("ahead"), base_model, "rollouts_ahead=1")


def _bits(values: Any) -> np.ndarray:
    return np.asarray(values, np.float32).view(np.uint32)


@pytest.mark.parametrize("kind", ["finished", "ahead"])
def test_each_segment_has_the_bits_of_its_weights(
    request: pytest.FixtureRequest, kind: str
) -> None:
    """The learner's log-probabilities under the weights of each segment's step, over all tokens
    before it; the control: those of the step after."""
    finished: TrainResult = request.getfixturevalue(kind)
    models: dict[int, Model] = {}
    compared = differing = control = 0
    for _, sample in samples_of(finished):
        for segment in sample.segments:
            for step in (segment.rollout_step, segment.rollout_step + 1):
                if step not in models:
                    path = finished.run_dir / "checkpoints" / f"step-{step:06d}"
                    models[step] = Model.load(path, "fp8")
                tokens = [*sample.prompt_ids, *sample.completion_ids[: segment.stop]]
                count = segment.stop - segment.start
                learner = _bits(models[step].logprobs([tokens])[0][-count:])
                rollout = _bits(sample.rollout_logprobs[segment.start : segment.stop])
                found = int((learner != rollout).sum())
                if step == segment.rollout_step:
                    compared, differing = compared + count, differing + found
                else:
                    control += found
    assert differing == 0
    assert compared > 50
    assert control > compared / 2


def test_what_is_interrupted_goes_on_and_is_counted(finished: TrainResult) -> None:
    found = samples_of(finished)
    assert any(len(sample.segments) > 2 for _, sample in found)
    assert any(not sample.segments for _, sample in found)
    for step, sample in found:
        *interrupted, newest = sample.drawn
        assert all((each.stop - each.start) % 4 == 0 for each in interrupted)
        steps = [each.rollout_step for each in sample.drawn]
        assert steps == sorted(set(steps))
        assert newest.rollout_step <= step - 1
        assert sample.truncated <= (len(sample.completion_ids) == MOST)
    rows = finished.metrics
    assert all(row["mismatch/differing_tokens"] == 0 for row in rows)
    assert all(row["mismatch/compared_tokens"] > 0 for row in rows)
    assert all(row["prompts/consumed"] == 4 * row["step"] + 4 for row in rows)
    assert any(row["partial/rounds"] * 4 < MOST for row in rows), "a step that waits for all"
    later = rows[2:]
    assert all(0 < row["partial/completions_fraction"] < 1 for row in later)
    assert all(row["partial/unfinished"] > 0 and row["partial/rounds"] >= 1 for row in rows)
    assert all(row["staleness/max"] >= 1 and row["staleness/kl_k3"] > 0 for row in later)
    assert all(0 < row["correction/effective_sample_size"] < 1 for row in later)
    sampled = sum(row["rollout/tokens"] for row in rows)
    left = json.loads(
        (finished.run_dir / "checkpoints" / "step-000005" / "trainer" / "state.json").read_text()
    )
    waiting = [s for name in ("unfinished", "pending") for group in left[name] for s in group]
    tokens = sum(len(sample.completion_ids) for _, sample in found)
    assert sampled == tokens + sum(sample["completion_ids"] for sample in waiting)


def test_what_is_sampled_ahead_is_learned_from_a_step_later(ahead: TrainResult) -> None:
    """Each batch waits whole, and what is unfinished goes on in the next one that is sampled. Tokens
    of older weights are compared in the step that draws them."""
    found, rows = samples_of(ahead), ahead.metrics
    assert any(len(sample.segments) > 2 for _, sample in found)
    for step, sample in found:
        steps = [each.rollout_step for each in sample.drawn]
        assert steps == sorted(set(steps))
        assert steps[-1] <= max(0, step - 2)
    assert all(row["prompts/consumed"] == 4 * row["step"] + 8 for row in rows)
    assert all(row["mismatch/differing_tokens"] == 0 for row in rows)
    assert all(row["mismatch/compared_tokens"] > 0 for row in rows)
    assert all(row["partial/unfinished"] > 0 for row in rows)
    assert all(row["staleness/max"] >= 1 for row in rows[1:])


@pytest.mark.slow
@pytest.mark.parametrize("steps_ahead", [0, 1])
def test_without_prompts_to_spare_it_is_the_run_without_it(
    tmp_path: Path, base_model: Path, steps_ahead: int
) -> None:
    """A step then waits for all of its completions: rounds of two tokens give the completions of
    one go, and the weights. The control: with prompts to spare it is another run."""
    changes: dict[str, Any] = {
        "algorithm": {"recompute_old_logprobs": "always"},
        "rollouts_ahead": steps_ahead,
    }
    whole = fingerprint(run(tmp_path / "whole", base_model, partial={}, **changes).run_dir)

    def parted(name: str, extra: int) -> Mapping[str, Any]:
        settings = {"tokens_per_round": 2, "extra_prompts": extra}
        return fingerprint(run(tmp_path / name, base_model, partial=settings, **changes).run_dir)

    alike, other = parted("alike", 0), parted("other", 1)
    for name in ("completions", "model.safetensors", "trainer/optimizer.safetensors"):
        assert alike[name] == whole[name], name
        assert other[name] != whole[name], name


@pytest.mark.slow
def test_tokens_grow_too_old_while_a_batch_waits(
    tmp_path: Path, base_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their age counts where they are learned from. The control: as it was where the batch was
    sampled."""
    settings = {**PARTIAL["partial"], "max_staleness": 1}

    def too_old(name: str) -> tuple[int, int]:
        """(tokens that are older than a step and no target, and those that are one)."""
        result, masked, trained = run(tmp_path / name, base_model, **changes), 0, 0
        for step, sample in samples_of(result):
            for segment in sample.drawn:
                if step - 1 - segment.rollout_step > 1:
                    places = range(segment.start, segment.stop)
                    trained += len(set(sample.trained) & set(places))
                    masked += len(set(places) - set(sample.trained))
        return masked, trained

    changes = {"partial": settings, "rollouts_ahead": 1}
    masked, trained = too_old("run")
    assert masked > 0
    assert trained == 0
    monkeypatch.setattr(
        "isobit.training.parts.sampled.AgedRollouts", lambda source, state, most: source
    )
    assert too_old("control")[1] > 0


def test_tokens_that_are_too_old_are_context(tmp_path: Path, base_model: Path) -> None:
    """With max_staleness 0 only what the weights of now drew is learned from, so nothing is left to
    correct; the completions themselves stay whole."""
    result = run(tmp_path, base_model, partial={**PARTIAL["partial"], "max_staleness": 0})
    masked = 0
    for step, sample in samples_of(result):
        young = [each for each in sample.drawn if each.rollout_step == step - 1]
        start = young[0].start if young else len(sample.completion_ids)
        assert list(sample.trained) == list(range(start, len(sample.completion_ids)))
        masked += start
    assert masked > 0
    rows = result.metrics
    assert any(row.get("partial/masked_fraction", 0) > 0 for row in rows)
    assert all(row.get("staleness/kl_k3", 0) == 0 for row in rows)
    assert all(row["correction/effective_sample_size"] == 1 for row in rows)
    assert all(row["mismatch/differing_tokens"] == 0 for row in rows)


def test_the_age_limit_is_in_steps() -> None:
    segments = (Segment(0, 2, 1, 0), Segment(2, 3, 4, 2), Segment(3, 5, 5, 3))
    sample = Sample(
        0, 0, (5,), (1, 2, 3, 4, 5), (-1.0,) * 5, "", False, 5, rollout_step=3, segments=segments,
        reference_kl=(0.1, 0.2, 0.3, 0.4, 0.5),
    )  # fmt: skip
    trained = {
        limit: [list(each.trained) for each in learnable([sample], 4, limit)]
        for limit in (4, 3, 2, 1, 0)
    }
    assert trained == {4: [[0, 1, 2, 3, 4]], 3: [[2, 3, 4]], 2: [[2, 3, 4]], 1: [[3, 4]], 0: [[]]}
    twice = learnable(learnable([sample], 3, 1), 4, 1)[0]
    assert (list(twice.trained), twice.reference_kl, twice.oldest_step) == ([3, 4], (0.4, 0.5), 3)
    assert (sample.oldest_step, twice.num_sampled, twice.num_trained) == (0, 5, 2)
    assert Sample.from_json(json.loads(json.dumps(twice.to_json()))) == twice


@pytest.mark.parametrize(
    "changes",
    slow_where(
        [
            {},
            {"algorithm": {"preset": "dapo", "updates_per_batch": 2}},
            {
                "algorithm": {"kl_coefficient": 0.1, "kl_in_reward": True},
                "partial": {**PARTIAL["partial"], "max_staleness": 1},
            },
            {"precision": "fp8-rollout", "evaluation": {"every": 2, "samples": 4}},
            {"algorithm": {"recompute_old_logprobs": "never"}, "curriculum": {"mode": "skip"}},
            {"rollouts_ahead": 1},
            {"rollouts_ahead": 2, "algorithm": {"preset": "dapo", "updates_per_batch": 2}},
        ],
        lambda changes: changes.get("rollouts_ahead") != 1,
    ),
    ids=[
        *("grpo", "dynamic sampling", "KL in the reward", "two engines", "bypass"),
        *("ahead", "two ahead, dynamic sampling"),
    ],
)
def test_a_run_that_is_resumed_is_the_run_that_never_stopped(
    tmp_path: Path, base_model: Path, changes: dict[str, Any]
) -> None:
    """Unfinished completions are in the checkpoint."""
    whole = fingerprint(run(tmp_path / "whole", base_model, **changes).run_dir)
    begun = run(tmp_path / "begun", base_model, "steps=2", **changes)
    state = begun.run_dir / "checkpoints" / "step-000002" / "trainer" / "state.json"
    assert json.loads(state.read_text())["unfinished"]
    assert fingerprint(resume(begun.run_dir, ["steps=5"]).run_dir) == whole
    if not changes:  # the control: without them it is another run
        other = run(tmp_path / "other", base_model, "steps=2", "seed=1")
        assert fingerprint(resume(other.run_dir, ["steps=5"]).run_dir) != whole


@pytest.mark.slow
def test_two_ranks_sample_what_one_samples(tmp_path: Path, base_model: Path) -> None:
    """Whoever goes on with a group; also where the run goes on with another number of ranks."""
    config = write_config(tmp_path, base_model, **{**PARTIAL, "steps": 4})

    def given(name: str, *more: str) -> list[str]:
        return [f"run.dir={tmp_path / name}", *more]

    session(config, given("one"))
    one = bits(tmp_path / "one")
    run_ranks(2, lambda ranks: session(config, given("two"), ranks))
    run_ranks(2, lambda ranks: session(config, given("elastic", "steps=2"), ranks))
    run_ranks(1, partial(resumed, tmp_path / "elastic", ["steps=4"]))
    for name in ("two", "elastic"):
        assert bits(tmp_path / name) == one, name


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["finished", "ahead"])
def test_recorded_segments_are_learned_from_again(
    request: pytest.FixtureRequest, kind: str, tmp_path: Path
) -> None:
    finished: TrainResult = request.getfixturevalue(kind)
    again = fingerprint(replay(finished.run_dir, tmp_path / "again").run_dir)
    assert again["model.safetensors"] == fingerprint(finished.run_dir)["model.safetensors"]
    other = replay(finished.run_dir, tmp_path / "other", ["algorithm.correction=none"])
    assert fingerprint(other.run_dir)["model.safetensors"] != again["model.safetensors"]


@pytest.mark.slow
def test_killed_in_the_middle_of_a_step(
    finished: TrainResult, tmp_path: Path, base_model: Path
) -> None:
    killed_after(start(write_config(tmp_path, base_model, **PARTIAL)), tmp_path / "run", 3)
    assert fingerprint(resume(tmp_path / "run").run_dir) == fingerprint(finished.run_dir)


@pytest.mark.slow
def test_an_error_loses_no_unfinished_completion(tmp_path: Path, base_model: Path) -> None:
    whole = fingerprint(run(tmp_path / "whole", base_model).run_dir)
    flag, source = tmp_path / "away", tmp_path / "failing.py"
    source.write_text(
        "from pathlib import Path\n\n"
        "def digits(prompts, completions, trainer_state):\n"
        f"    if trainer_state.global_step >= 3 and Path({str(flag)!r}).exists():\n"
        "        raise ConnectionError('the judge is away')\n"
        "    return [sum(c in '56789' for c in text) / 3 for text in completions]\n"
    )
    flag.touch()
    rewards = {"functions": [{"function": f"{source}:digits"}]}
    with pytest.raises(RunFailed, match="step 3 is saved"):
        run(tmp_path / "failed", base_model, "run.checkpoint_every=0", rewards=rewards)
    flag.unlink()
    again = fingerprint(resume(tmp_path / "failed" / "run").run_dir)
    assert again == whole


def test_keys_of_the_old_weights_are_noticed(
    tmp_path: Path, base_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control of what is compared: an engine that keeps its cache over an update, as in-flight
    updates do, draws what no version of the weights draws."""
    monkeypatch.setattr(Engine, "_root", lambda self: 0)
    with pytest.raises(RunFailed, match=r"rollout and learner differ in .* promises the same bits"):
        run(tmp_path, base_model)


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_5_text"])
def test_other_families(tmp_path: Path, family: str) -> None:
    tiny_model("fp8", family, scale=2.0).save(tmp_path / "base")
    result = run(tmp_path, tmp_path / "base", "steps=4")
    assert any(sample.segments for _, sample in samples_of(result))
    found = [row["mismatch/differing_tokens"] for row in result.metrics if "mismatch/kl_k3" in row]
    assert found
    assert not any(found)


@pytest.mark.parametrize(
    ("override", "names"),
    [
        ("fleet.engines=1", "fleet.engines"),
        ("environment.tools=[tools.py:add]", "environment"),
        ("replay={capacity: 4, groups_per_step: 1}", "replay"),
        ("algorithm.router_replay=true", "algorithm.router_replay"),
    ],
)
def test_what_it_cannot_be_used_with_is_refused(
    tmp_path: Path, base_model: Path, override: str, names: str
) -> None:
    with pytest.raises(IsobitError, match=rf"cannot be used with {names} yet: set ") as refused:
        run(tmp_path, base_model, override)
    assert "\n" not in str(refused.value)


def test_batches_that_would_be_too_old_are_refused(tmp_path: Path, base_model: Path) -> None:
    with pytest.raises(IsobitError, match=r"rollouts_ahead 5 exceeds partial\.max_staleness 4"):
        run(tmp_path, base_model, "rollouts_ahead=5", replay={"max_staleness": 9})
