"""Whole runs: the same bits on both sides in every step, learning, replay, and runs that must
stop."""

import math
from pathlib import Path
from typing import Any

import pytest

from isobit.config import load_config
from isobit.engine.calibration import Calibrator
from isobit.engine.engine import Engine
from isobit.errors import IsobitError, RunFailed
from isobit.kernels import get_ops
from isobit.model import Model, Transformer
from isobit.options.declare import choices, options_of
from isobit.options.precisions import PrecisionChanges
from isobit.precision import precision_from
from isobit.rl.algorithm.correction_rule import CORRECTIONS
from isobit.run import checkpoints
from isobit.run.completions import COMPLETIONS, read
from isobit.run.directory import CONFIG, ROLLOUTS_FROM, read_jsonl
from isobit.training.train import TrainResult, replay, resume, train
from tests.models import slow_where, tiny_model
from tests.rl.helpers import alternating, make_learner, roll_out
from tests.runs import fingerprint, write_config

POSITIONS = "mismatch/kl_k3_from_"


def run(folder: Path, model: Path, *overrides: str, **changes: object) -> TrainResult:
    return train(load_config(write_config(folder, model, **changes), overrides))


@pytest.mark.parametrize(
    "preset", ["fp8", "fp8-unified", "bf16", "float32", "mxfp8", "nvfp4", "fp8[kv_cache=e4m3]"]
)
def test_unified_presets_have_no_differing_token_in_any_step(
    tmp_path: Path, base_model: Path, preset: str
) -> None:
    """The claim of docs/numerics.md, section 1, in a run, after optimizer steps; the control is the
    next test."""
    result = run(tmp_path, base_model, f"precision={preset}")
    assert [row["mismatch/differing_tokens"] for row in result.metrics] == [0] * 4
    assert all(
        row["mismatch/kl_k3"] == 0 and row["mismatch/token_mult_prob_error"] == 1
        for row in result.metrics
    )
    assert all(row["rollout/tokens"] > 0 for row in result.metrics)
    assert not any(name.startswith(POSITIONS) for row in result.metrics for name in row)


def test_two_flows_differ_and_are_corrected(tmp_path: Path, base_model: Path) -> None:
    result = run(tmp_path, base_model, "precision=fp8-rollout")
    assert all(row["mismatch/differing_tokens"] > 0 for row in result.metrics)
    assert all(row["mismatch/token_mult_prob_error"] > 1 for row in result.metrics)
    assert all(0 < row["correction/effective_sample_size"] <= 1 for row in result.metrics)
    found = [
        {int(name.removeprefix(POSITIONS)) for name in row if name.startswith(POSITIONS)}
        for row in result.metrics
    ]
    assert all({1, 2} <= places for places in found)
    for row, places in zip(result.metrics, found):
        values = [row[f"{POSITIONS}{n}"] for n in places]
        assert min(values) < row["mismatch/kl_k3"] < max(values), (
            "the mean of all is between the parts'"
        )


@pytest.mark.parametrize(
    "name", ["none", *(name for name in CORRECTIONS if name not in ("none", "token_tis"))]
)
def test_every_named_correction_runs_on_two_flows(
    tmp_path: Path, base_model: Path, name: str
) -> None:
    result = run(
        tmp_path, base_model, "precision=fp8-rollout", f"algorithm.correction={name}", "steps=2"
    )
    assert all(row["mismatch/differing_tokens"] > 0 for row in result.metrics)
    assert all(("correction/mean_weight" in row) == (name != "none") for row in result.metrics)
    if name == "geometric_mask":
        assert all(row["correction/rejected_fraction"] > 0 for row in result.metrics)


@pytest.mark.slow
def test_reward_rises(tmp_path: Path, base_model: Path) -> None:
    result = run(
        tmp_path, base_model, "steps=25", "prompts_per_step=8", "optimizer.learning_rate=0.003"
    )
    rewards = [row["reward/mean"] for row in result.metrics]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.2
    assert sum(row["mismatch/differing_tokens"] for row in result.metrics) == 0


@pytest.mark.parametrize(
    "override",
    [
        "algorithm.preset=dapo",
        "algorithm={preset: gspo, updates_per_batch: 2}",
        "algorithm={preset: cispo, updates_per_batch: 2}",
        "algorithm={preset: dppo_tv, updates_per_batch: 2}",
        "algorithm={preset: luspo, advantage: maxrl, updates_per_batch: 2}",
        "algorithm={preset: reinforce_pp, dual_clip: 3}",
        "algorithm={preset: rloo, updates_per_batch: 2, epochs: 2}",
        "algorithm={preset: dr_grpo, kl_coefficient: 0.1}",
        "algorithm={overlong_buffer: 2}",
        "precision={preset: fp8, wgrad: bf16, dgrad: bf16, bf16_first_layers: 1}",
        "consistency=fast",
        pytest.param("backend=reference", marks=pytest.mark.slow),
    ],
)
def test_variants_run_and_log_what_they_add(
    tmp_path: Path, base_model: Path, override: str
) -> None:
    result = run(tmp_path, base_model, override, "steps=2")
    assert len(result.metrics) == 2
    assert all(row["grad_norm"] > 0 for row in result.metrics)
    if "kl_coefficient" in override:
        assert (
            result.metrics[0]["loss/kl"] == 0
        )  # the reference is the policy, bit for bit, before the first update
        assert result.metrics[1]["loss/kl"] > 0


def test_kl_in_the_reward(tmp_path: Path, base_model: Path) -> None:
    """Zero before the first update, where reference and policy are one; then it moves the weights;
    a replay agrees."""
    plain = run(tmp_path, base_model, "steps=3")
    given = [
        "steps=3",
        "algorithm={kl_coefficient: 0.5, kl_in_reward: true}",
        f"run.dir={tmp_path / 'kl'}",
    ]
    result = run(tmp_path, base_model, *given)
    assert result.metrics[0]["reward/reference_kl"] == 0
    assert result.metrics[-1]["reward/reference_kl"] != 0
    assert all(row["loss/kl"] == 0 for row in result.metrics)
    assert (
        fingerprint(result.run_dir)["model.safetensors"]
        != fingerprint(plain.run_dir)["model.safetensors"]
    )
    again = replay(result.run_dir, tmp_path / "again")
    assert (
        fingerprint(again.run_dir)["model.safetensors"]
        == fingerprint(result.run_dir)["model.safetensors"]
    )


def test_dynamic_sampling_drops_groups_and_keeps_the_surplus(
    tmp_path: Path, base_model: Path
) -> None:
    result = run(
        tmp_path, base_model, "algorithm.preset=dapo", "prompts_per_step=3", "sampling.group_size=2"
    )
    learned = [row for row in read(result.run_dir / COMPLETIONS) if row["step"] == 1]
    assert len({row["prompt_index"] for row in learned}) == 3
    assert sum(row["groups/resampled"] for row in result.metrics) > 0
    assert result.metrics[-1]["prompts/consumed"] > 4 * 3


@pytest.mark.slow
def test_replay_repeats_the_learning_bit_for_bit(tmp_path: Path, base_model: Path) -> None:
    """`--from-rollouts`; the control is a replay under another seed of nothing: a changed rate must
    change the weights."""
    first = run(tmp_path, base_model)
    again = replay(first.run_dir, tmp_path / "again")
    for name in ("model.safetensors", "trainer/optimizer.safetensors", "completions"):
        assert fingerprint(first.run_dir)[name] == fingerprint(again.run_dir)[name]
    other = replay(first.run_dir, tmp_path / "other", ["optimizer.learning_rate=0.002"])
    assert (
        fingerprint(first.run_dir)["model.safetensors"]
        != fingerprint(other.run_dir)["model.safetensors"]
    )


@pytest.mark.parametrize(
    "change", ["sampling.group_size=2", "prompts_per_step=3", "sampling.temperature=0.5"]
)
def test_a_replay_of_rollouts_that_are_others_is_refused(
    tmp_path: Path, base_model: Path, change: str
) -> None:
    """Nothing is sampled: what the new run's config said of its rollouts would not be so. The
    control says what they are."""
    first, key = run(tmp_path, base_model, steps=1), change.partition("=")[0]
    before = {"sampling.group_size": 4, "prompts_per_step": 4, "sampling.temperature": 1.0}[key]
    with pytest.raises(IsobitError, match=f"^{change}: .* with {before}, .* leave {key} out, or"):
        replay(first.run_dir, tmp_path / "other", [change], quiet=True)
    assert not (tmp_path / "other").exists()
    assert replay(first.run_dir, tmp_path / "same", [f"{key}={before}"], quiet=True).metrics
    for junk, said in (
        (b"", "holds no whole step, and 1 were learned from"),
        (b"x" * 99, "byte 0"),
    ):
        (first.run_dir / COMPLETIONS).write_bytes(junk)
        with pytest.raises(IsobitError, match=said):
            replay(first.run_dir, tmp_path / "junk", quiet=True)
        assert not (tmp_path / "junk").exists()


def test_a_replay_that_goes_on_learns_from_the_same_rollouts(
    tmp_path: Path, base_model: Path
) -> None:
    """Stopped after two of four steps; the control goes on by sampling, as a run that is no replay
    does."""
    first, faster = run(tmp_path, base_model), "optimizer.learning_rate=0.002"
    whole = replay(first.run_dir, tmp_path / "whole", [faster])
    halves = {
        name: replay(first.run_dir, tmp_path / name, [faster, "steps=2"]).run_dir
        for name in ("half", "control")
    }
    resume(halves["half"], [f"steps={len(first.metrics)}"])
    assert fingerprint(halves["half"]) == fingerprint(whole.run_dir)
    with pytest.raises(
        IsobitError, match=r"steps=5: .* recorded 4, and no more can be learned .* at most steps=4$"
    ):
        resume(halves["half"], ["steps=5"])
    with pytest.raises(IsobitError, match=r"^steps=5: .* recorded 4, "):
        replay(first.run_dir, tmp_path / "longer", ["steps=5"])
    assert not (tmp_path / "longer").exists()
    (halves["control"] / ROLLOUTS_FROM).unlink()
    resume(halves["control"], [f"steps={len(first.metrics)}"])
    assert (
        fingerprint(halves["control"])["completions"] != fingerprint(whole.run_dir)["completions"]
    )
    first.run_dir.rename(tmp_path / "moved")
    with pytest.raises(
        IsobitError,
        match=r"learns from the rollouts of .*, which is no run directory any more; if it",
    ):
        resume(halves["half"], ["steps=5"])


@pytest.mark.slow
def test_ranks_that_are_started_again_go_on_with_a_replay(
    tmp_path: Path, base_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, out = run(tmp_path, base_model), tmp_path / "again"
    replay(first.run_dir, out, ["steps=2"])
    with pytest.raises(IsobitError, match="again"):  # a run is there: no replay begins in it
        replay(first.run_dir, out)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    (out / CONFIG).write_text(
        (out / CONFIG).read_text().replace("steps: 2", f"steps: {len(first.metrics)}")
    )
    replay(first.run_dir, out)  # as after the death of a rank
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT")
    assert fingerprint(out) == fingerprint(replay(first.run_dir, tmp_path / "whole").run_dir)


def test_a_run_begins_where_a_replay_was_killed_before_its_config(
    tmp_path: Path, base_model: Path
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ROLLOUTS_FROM).write_text("elsewhere\n")
    result = run(tmp_path, base_model, f"run.dir={tmp_path / 'run'}", "steps=1")
    assert not (
        result.run_dir / ROLLOUTS_FROM
    ).exists()  # else a resume would look for the other run
    assert len(resume(result.run_dir, ["steps=2"]).metrics) == 2


@pytest.mark.slow
def test_results_do_not_depend_on_the_engine_settings(tmp_path: Path, base_model: Path) -> None:
    """Small pages, chunks and batches, and a cache so small that sequences are preempted and
    computed again."""
    long = ("sampling.max_new_tokens=24", "sampling.ignore_eos=true")
    plain = run(tmp_path, base_model, *long)
    cramped = "engine={kv_pages: 24, page_size: 2, max_batch_tokens: 5, max_sequences: 4}"
    other = run(tmp_path, base_model, *long, cramped, f"run.dir={tmp_path / 'cramped'}")
    for name in ("model.safetensors", "completions"):
        assert fingerprint(plain.run_dir)[name] == fingerprint(other.run_dir)[name]
    assert sum(row["rollout/preemptions"] for row in plain.metrics) == 0
    assert sum(row["rollout/preemptions"] for row in other.metrics) > 0


def test_engines_may_sleep_while_the_learner_works(
    tmp_path: Path, base_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[Engine] = []
    sleep = Engine.sleep
    monkeypatch.setattr(Engine, "sleep", lambda engine: slept.append(engine) or sleep(engine))
    awake = run(tmp_path, base_model, "evaluation={every: 2, samples: 4}")
    assert slept == [], "auto, on a CPU"
    directory = f"run.dir={tmp_path / 'sleeps'}"
    sleeps = run(
        tmp_path, base_model, "evaluation={every: 2, samples: 4}", "engine.sleep=always", directory
    )
    assert (len(slept), len(set(slept))) == (8, 2), (
        "the rollout's and that of the held-out prompts, at every step"
    )
    assert fingerprint(sleeps.run_dir) == fingerprint(awake.run_dir)


def test_evaluation_is_logged_before_between_and_after(tmp_path: Path, base_model: Path) -> None:
    result = run(tmp_path, base_model, "evaluation={every: 3, samples: 4}")
    evaluated = [row["step"] for row in result.metrics if "accuracy/held_out" in row]
    assert evaluated == [0, 3, 4]


def test_a_reward_that_fails_stops_the_run_or_is_skipped(tmp_path: Path, base_model: Path) -> None:
    bad = tmp_path / "bad.py"
    bad.write_text(
        "def bad(prompts, completions, **k):\n    return [1 / (len(c) - 1) for c in completions]\n"
    )
    rewards = {"functions": [{"function": f"{bad}:bad"}]}
    with pytest.raises(RunFailed, match=r"bad\.py:bad, sample \d+ .*ZeroDivisionError"):
        run(tmp_path, base_model, rewards=rewards)
    skipped = run(
        tmp_path,
        base_model,
        "rewards.on_error=skip",
        f"run.dir={tmp_path / 'skip'}",
        rewards=rewards,
    )
    assert sum(row["groups/unscored"] for row in skipped.metrics) > 0
    rows = list(read(skipped.run_dir / COMPLETIONS))
    assert {row["reward"] for row in rows if len(row["completion"]) == 1} == {None}


def test_scoring_beside_the_rollout_changes_nothing(
    tmp_path: Path, base_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against groups handed over after the rollout, last first, with other workers; the reward is
    of whole calls."""
    own = tmp_path / "own.py"
    own.write_text(
        "def rank(completions, **k):\n    return [float(sorted(completions).index(c)) for c in "
        "completions]\n"
    )
    changes: dict[str, Any] = {
        "rewards": {"functions": [{"function": f"{own}:rank"}], "num_workers": 3},
        "engine": {"max_sequences": 5},
        "algorithm": {"preset": "dapo"},
        "rollouts_ahead": 1,
    }
    beside = run(tmp_path, base_model, **changes)
    generate = Engine.generate

    def generate_first(self: Engine, *arguments: Any, on_group: Any = None, **more: Any) -> Any:
        groups = generate(self, *arguments, **more)
        for index in reversed(range(len(groups) if on_group is not None else 0)):
            on_group(index, groups[index])
        return groups

    monkeypatch.setattr(Engine, "generate", generate_first)
    changes["rewards"]["num_workers"] = 1
    after = run(tmp_path, base_model, f"run.dir={tmp_path / 'after'}", **changes)
    assert fingerprint(beside.run_dir) == fingerprint(after.run_dir)
    assert sum(row["time/score_overlapped"] for row in beside.metrics) > 0


def test_non_finite_steps_end_the_run_with_the_last_good_checkpoint(
    tmp_path: Path, base_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "isobit.rl.optim.sharded.ShardedOptimizer.gradient_norm", lambda self: float("nan")
    )
    with pytest.raises(RunFailed, match=r"3 optimizer steps in a row .*step-000002"):
        run(tmp_path, base_model)
    path, warnings = checkpoints.newest(tmp_path / "run" / "checkpoints")
    assert (path.name, warnings) == ("step-000002", [])
    rows = list(read_jsonl(tmp_path / "run" / "metrics.jsonl"))
    assert [row["steps/skipped"] for row in rows] == [1, 1, 1]
    assert rows[0]["grad_norm"] is None


def test_an_existing_run_is_refused(tmp_path: Path, base_model: Path) -> None:
    run(tmp_path, base_model, "steps=1")
    with pytest.raises(
        IsobitError, match=r"exists and is a run; .*or go on with it: isobit train --resume "
    ):
        run(tmp_path, base_model)


def test_checkpoints_load_in_transformers(tmp_path: Path, base_model: Path) -> None:
    transformers = pytest.importorskip("transformers")
    result = run(tmp_path, base_model, "steps=1")
    path = checkpoints.all_checkpoints(result.run_dir / "checkpoints")[-1]
    model = transformers.AutoModelForCausalLM.from_pretrained(path)
    assert sum(p.numel() for p in model.parameters()) > 1000
    assert transformers.AutoTokenizer.from_pretrained(path)("1+2=")["input_ids"]


@pytest.fixture(scope="module")
def mixture_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random mixture of experts, whose routers have something to choose from."""
    path = tmp_path_factory.mktemp("mixtures") / "tiny"
    tiny_model("fp8", "qwen3_moe", scale=5).save(path)
    return path


@pytest.mark.parametrize("preset", ["fp8", "bf16"])
def test_a_mixture_of_experts_agrees_without_replay(
    tmp_path: Path, mixture_model: Path, preset: str
) -> None:
    settings = "algorithm={updates_per_batch: 2, router_aux_coefficient: 0.01}"
    result = run(tmp_path, mixture_model, f"precision={preset}", settings)
    assert [row["mismatch/differing_tokens"] for row in result.metrics] == [0] * 4
    assert all(
        row["router/load_max_over_mean"] >= 1 and row["router/auxiliary_loss"] > 1
        for row in result.metrics
    )


def test_router_replay_between_two_engines(tmp_path: Path, mixture_model: Path) -> None:
    """The learner takes the rollout's experts: the mismatch that other experts made is gone, the
    rest stays."""
    (tmp_path / "free").mkdir()
    (tmp_path / "replay").mkdir()
    runs = {
        name: run(
            tmp_path / name,
            mixture_model,
            "precision=fp8-rollout",
            f"algorithm.router_replay={flag}",
        ).metrics
        for name, flag in (("free", "false"), ("replay", "true"))
    }
    assert sum(row["router/differing_choices"] for row in runs["free"]) > 0
    first = {name: rows[0] for name, rows in runs.items()}  # of the same weights and completions
    assert first["replay"]["router/differing_choices"] > 0  # what it would have chosen itself
    assert 0 < first["replay"]["mismatch/kl_k3"] < first["free"]["mismatch/kl_k3"]


@pytest.mark.slow
def test_routes_are_recorded_and_replayed_from_a_run(tmp_path: Path, mixture_model: Path) -> None:
    recorded = run(tmp_path, mixture_model, "precision=fp8-rollout", "algorithm.router_replay=true")
    again = replay(recorded.run_dir, tmp_path / "again")
    assert (
        fingerprint(again.run_dir)["model.safetensors"]
        == fingerprint(recorded.run_dir)["model.safetensors"]
    )


@pytest.mark.parametrize("key", ["router_replay=true", "router_aux_coefficient=0.1"])
def test_a_dense_model_has_no_router(tmp_path: Path, base_model: Path, key: str) -> None:
    with pytest.raises(
        IsobitError, match=rf"algorithm.{key.partition('=')[0]}: the model is dense \(qwen3\)"
    ):
        run(tmp_path, base_model, f"algorithm.{key}")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("preset", ["fp8", "fp8-rollout"])
def test_rollouts_ahead_of_the_learner(tmp_path: Path, base_model: Path, preset: str) -> None:
    """The same six verbs in another order: every batch but the first ones is as old as rollouts run
    ahead."""
    result = run(tmp_path, base_model, f"precision={preset}", "rollouts_ahead=2", "steps=6")
    assert [row.get("staleness/max", 0) for row in result.metrics] == [0, 1, 2, 2, 2, 2]
    assert result.metrics[-1]["prompts/consumed"] == (6 + 2) * 4
    assert all("mismatch/kl_k3" in row for row in result.metrics)
    assert all(row["staleness/kl_k3"] > 0 for row in result.metrics[1:])
    assert all(0 < row["correction/effective_sample_size"] <= 1 for row in result.metrics)
    if preset == "fp8":
        assert all(row["mismatch/differing_tokens"] == 0 for row in result.metrics)
    steps = [(row["step"], row["rollout_step"]) for row in read(result.run_dir / COMPLETIONS)]
    assert {(step, step - 1 - rolled) for step, rolled in steps} == {
        (1, 0),
        (2, 1),
        (3, 2),
        (4, 2),
        (5, 2),
        (6, 2),
    }


@pytest.mark.slow
def test_replayed_groups_are_learned_from_again_and_corrected(
    tmp_path: Path, base_model: Path
) -> None:
    settings = "replay={capacity: 8, groups_per_step: 2, max_staleness: 3}"
    result = run(tmp_path, base_model, settings, "steps=6")
    assert result.metrics[0]["replay/groups"] == 0
    assert all(
        row["replay/groups"] == 2 and 1 <= row["staleness/max"] <= 3 for row in result.metrics[2:]
    )
    # of the fresh ones every bit is the same, and the old ones are told apart
    assert all(row["mismatch/differing_tokens"] == 0 for row in result.metrics)
    assert all(row["staleness/kl_k3"] > 0 for row in result.metrics[2:])
    again = replay(result.run_dir, tmp_path / "again")
    assert (
        fingerprint(again.run_dir)["model.safetensors"]
        == fingerprint(result.run_dir)["model.safetensors"]
    )


def test_rollouts_ahead_are_repeated_from_a_recorded_run(tmp_path: Path, base_model: Path) -> None:
    recorded = run(tmp_path, base_model, "rollouts_ahead=1")
    again = replay(recorded.run_dir, tmp_path / "again")
    assert (
        fingerprint(again.run_dir)["model.safetensors"]
        == fingerprint(recorded.run_dir)["model.safetensors"]
    )


def test_ahead_without_recomputation_the_ratio_is_to_the_rollout(
    tmp_path: Path, base_model: Path
) -> None:
    """Bypass: nothing is corrected, and no stale token counts as a mismatch."""
    settings = "algorithm={recompute_old_logprobs: never, updates_per_batch: 2}"
    result = run(tmp_path, base_model, "rollouts_ahead=1", settings)
    assert all(row["mismatch/differing_tokens"] == 0 for row in result.metrics)
    assert all(
        row["mismatch/compared_tokens"] < 10 for row in result.metrics[1:]
    )  # one of 16 completions, ahead
    assert all("correction/mean_weight" not in row for row in result.metrics)


@pytest.mark.parametrize("consistency", slow_where(["bitwise", "fast"], lambda c: c == "fast"))
@pytest.mark.parametrize("preset", ["fp8", "fp8-e2e", "mxfp8", "nvfp4", "fp8-rollout", "bf16"])
def test_every_option_of_a_precision_learns_or_is_refused(preset: str, consistency: str) -> None:
    """No combination of one preset and one option is accepted and then breaks in the middle of a
    step."""
    taken = 0
    for name, option in options_of(PrecisionChanges).items():
        for choice in choices(option.kind) if name != "bf16_layers" else ():
            try:
                flow = precision_from({"preset": preset, name: choice})
            except IsobitError:
                continue
            plain = tiny_model("float32")
            masters = {name: p.detach() for name, p in plain.named_parameters().items()}
            ops = get_ops("auto", consistency)
            model = Model(Transformer(plain.config, flow, ops, masters), plain.tokenizer)
            Calibrator(model).calibrate(["1+1="])
            samples = roll_out(model)
            metrics = make_learner(model).learn(samples, alternating(samples), 0).metrics
            assert math.isfinite(metrics["grad_norm"]), (preset, name, choice, consistency)
            taken += 1
    assert taken > 5


def test_learner_logprobs_stand_beside_those_of_the_rollout(
    tmp_path: Path, base_model: Path
) -> None:
    """Of the first optimizer step, or of all where they are recomputed: the same bits under a
    unified flow, and as many tokens as the metric says; the control is a flow with two engines."""
    unified = run(tmp_path, base_model, "algorithm.updates_per_batch=2")
    separate = run(
        tmp_path, base_model, "precision=fp8-rollout", f"run.dir={tmp_path / 'separate'}"
    )
    for result, differs in ((unified, False), (separate, True)):
        rows = list(read(result.run_dir / COMPLETIONS))
        compared = [row for row in rows if row["policy_logprobs"] is not None]
        assert len(compared) == (len(rows) if differs else len(rows) // 2)
        pairs = [
            p
            for row in compared
            for p in zip(row["policy_logprobs"], row["rollout_logprobs"], strict=True)
        ]
        assert len(pairs) == sum(row["mismatch/compared_tokens"] for row in result.metrics)
        assert sum(a != b for a, b in pairs) == sum(
            row["mismatch/differing_tokens"] for row in result.metrics
        )
        assert any(a != b for a, b in pairs) == differs


def test_quantization_is_recorded_by_layer(tmp_path: Path, base_model: Path) -> None:
    override = "precision={preset: fp8, bf16_first_layers: 1}"
    result = run(tmp_path, base_model, "steps=5", "run.quantization_every=3", override)
    rows = list(read_jsonl(result.run_dir / "quantization.jsonl"))
    assert [row["step"] for row in rows] == [1, 3]
    weights = [
        name for name in sorted(rows[0]["tensors"]) if " " not in name
    ]  # others are of the learner
    assert weights == ["down", "gate_up", "o", "qkv"]
    first, second = rows[0]["tensors"]["qkv"]["relative_error"]
    assert first is None
    assert 0.005 < second < 0.06
