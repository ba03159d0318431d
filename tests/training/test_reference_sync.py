"""A reference that follows the policy: TRL's formula, a copy and a mean, runs that end alike whether
they were stopped or not and at any number of ranks, with an adapter too."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from isobit.config import load_config, load_sft_config
from isobit.config.sections import ReferenceSync
from isobit.errors import IsobitError
from isobit.model import Model
from isobit.run.checkpoints import all_checkpoints
from isobit.training.plan import Machine, job_of, plan
from isobit.training.saving.reference import FollowingReference, mix
from isobit.training.train import resume, train, train_supervised
from tests.distributed.sessions import bits, resumed, session, trained, written
from tests.distributed.threads import run
from tests.models import tiny_model
from tests.rl.trl_loss import needs_trl
from tests.runs import fingerprint, write_config
from tests.training.test_preference_run import pairs

HERE = Machine("this machine", 64 << 30, host=True, packs=True)
PENALTY = {"kl_coefficient": 0.1, "recompute_old_logprobs": "never"}


def penalized(folder: Path, model: Path, reference: dict[str, Any], **changes: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    given = {"algorithm": dict(PENALTY), "reference": reference, "steps": 6, **changes}
    return write_config(folder, model, **given)


def kl(run_dir: Path | str) -> list[float]:
    rows = (Path(run_dir) / "metrics.jsonl").read_text().splitlines()
    return [json.loads(row)["loss/kl"] for row in rows]


def reference_at(run_dir: Path | str, step: int) -> dict[str, torch.Tensor]:
    folder = next(
        each for each in all_checkpoints(Path(run_dir) / "checkpoints") if f"{step:06}" in each.name
    )
    return load_file(folder / "trainer" / "reference.safetensors")


@needs_trl
@pytest.mark.parametrize("alpha", [1.0, 0.6, 0.05])
def test_a_move_is_trls(alpha: float) -> None:
    """`_sync_target_model` of TRL 1.16, to the last rounding; exactly, as float64 has it rounded
    after each operation. The control: another alpha."""
    from trl.trainer.callbacks import SyncRefModelCallback

    generator = torch.Generator().manual_seed(1)
    mine = torch.randn(33, 7, generator=generator)
    policy = torch.randn(33, 7, generator=generator)
    theirs, source = torch.nn.Linear(7, 33, bias=False), torch.nn.Linear(7, 33, bias=False)
    theirs.weight.data, source.weight.data = mine.clone(), policy.clone()
    SyncRefModelCallback._sync_target_model(source, theirs, alpha)
    found = mine.clone()
    mix(found, policy, alpha)
    assert torch.equal(policy, source.weight.data), "the policy stays what it is"
    torch.testing.assert_close(found, theirs.weight.data, rtol=3e-7, atol=1e-7)
    first = (mine.double() * torch.tensor(1 - alpha).double()).float()
    second = (policy.double() * torch.tensor(alpha).double()).float()
    assert torch.equal(found, first + second)
    mix(other := mine.clone(), policy, alpha / 2)
    assert not torch.allclose(other, found, atol=1e-3)


def test_a_move_has_the_same_bits_at_every_place_of_a_tensor() -> None:
    """A rank that keeps some of the rows has those that the whole would have."""
    generator = torch.Generator().manual_seed(2)
    mine, policy = (torch.randn(37, 5, generator=generator) for _ in range(2))
    mix(whole := mine.clone(), policy, 0.3)
    for first in (1, 6, 29):
        mix(rows := mine[first:].clone(), policy[first:], 0.3)
        assert torch.equal(rows, whole[first:])


@pytest.mark.parametrize("precision", ["fp8", "bf16", "fp8-rollout"])
def test_a_copy_has_the_bits_of_the_policy(precision: str) -> None:
    """Before the policy learns, and after each move; the control: after it moved alone."""
    model = tiny_model(precision, scale=4)
    moves: list[int] = []
    found = FollowingReference(
        model, precision, ReferenceSync(sync_every=2), lambda each: moves.append(1)
    )
    ids = [[1, 4, 2, 9, 3]]

    def equal() -> bool:
        mine, theirs = (each.logprobs(ids)[0] for each in (model, found.model))
        return torch.equal(mine, theirs)

    assert equal()
    with torch.no_grad():
        for rows in model.parameters():
            rows.add_(0.05 * torch.randn(rows.shape, generator=torch.Generator().manual_seed(4)))
    model.sync()
    found.after(1)
    assert not equal()
    found.after(2)
    assert equal()
    assert len(moves) == 2


@pytest.mark.slow
def test_the_penalty_is_0_after_each_copy_and_a_stopped_run_goes_on(
    tmp_path: Path, base_model: Path
) -> None:
    """Stopped between two moves, the reference that the policy has left is in the checkpoint. The
    controls: a reference that stays, and another alpha."""
    config = load_config(penalized(tmp_path / "whole", base_model, {"sync_every": 3}))
    whole = train(config, quiet=True)
    found = kl(whole.run_dir)
    assert [value == 0 for value in found] == [True, False, False, True, False, False]
    stopped = load_config(
        penalized(tmp_path / "stopped", base_model, {"sync_every": 3}), ["steps=5"]
    )
    train(stopped, quiet=True)
    again = resume(tmp_path / "stopped" / "run", ["steps=6"], quiet=True)
    assert fingerprint(again.run_dir) == fingerprint(whole.run_dir)
    stays = train(load_config(penalized(tmp_path / "stays", base_model, {})), quiet=True)
    assert [value == 0 for value in kl(stays.run_dir)] == [True] + [False] * 5
    part = {"sync_every": 3, "sync_alpha": 0.5}
    mixed = train(load_config(penalized(tmp_path / "mixed", base_model, part)), quiet=True)
    assert kl(mixed.run_dir)[:3] == found[:3]
    assert kl(mixed.run_dir)[3] > 0


def test_scales_of_its_cache_are_found_again_after_a_move_and_after_a_stop(
    tmp_path: Path, base_model: Path
) -> None:
    """Where the learner's cache is calibrated. The control: where a separate engine does it, it is
    refused."""
    config = penalized(tmp_path / "whole", base_model, {"sync_every": 2}, steps=4)
    flow = "precision=fp8[kv_cache=e4m3-calibrated]"
    whole = train(load_config(config, [flow]), quiet=True)
    found = kl(whole.run_dir)
    assert found[2] < 0.1 * found[1]
    config = penalized(tmp_path / "stopped", base_model, {"sync_every": 2}, steps=4)
    train(load_config(config, [flow, "steps=3"]), quiet=True)
    again = resume(tmp_path / "stopped" / "run", ["steps=4"], quiet=True)
    assert fingerprint(again.run_dir) == fingerprint(whole.run_dir)
    (tmp_path / "refused").mkdir()
    config = penalized(tmp_path / "refused", base_model, {"sync_every": 2})
    apart = "precision={preset: fp8-rollout-kv, learner: {kv_cache: e4m3-calibrated}}"
    with pytest.raises(IsobitError, match="a separate engine calibrates the learner's KV cache"):
        train(load_config(config, [apart]), quiet=True)


def test_a_teacher_in_every_step_is_the_mean_of_policies(tmp_path: Path, base_model: Path) -> None:
    """Recomputed from the checkpoints of the policy, in float64. The control: of another alpha."""
    given = {"sync_every": 1, "sync_alpha": 0.25}
    run_files = {"checkpoint_every": 1, "keep_last": 9}
    config = load_config(penalized(tmp_path, base_model, given, steps=3, run=run_files))
    result = train(config, quiet=True)
    policies = [Model.load(base_model)]
    policies += [Model.load(p) for p in all_checkpoints(Path(result.run_dir) / "checkpoints")]
    by_name = [each.named_parameters() for each in policies]
    found = reference_at(result.run_dir, 3)
    largest = 0.0
    for name, rows in found.items():
        wanted, other = (by_name[0][name].detach().double() for _ in range(2))
        for policy in by_name[-3:]:
            wanted = 0.75 * wanted + 0.25 * policy[name].detach().double()
            other = 0.5 * other + 0.5 * policy[name].detach().double()
        torch.testing.assert_close(rows.double(), wanted, rtol=3e-7, atol=1e-7)
        largest = max(largest, float((rows - other).abs().max()))
    assert largest > 1e-4


@pytest.mark.slow
def test_a_run_goes_on_with_its_reference_at_other_numbers_of_ranks(tmp_path: Path) -> None:
    """3, then 1 and 2 (each number alone: `tests/distributed/test_runs.py`). The control: another
    alpha."""
    config = written(tmp_path)
    changes = [
        "algorithm.kl_coefficient=0.1",
        "reference={sync_every: 1, sync_alpha: 0.5}",
        "run.checkpoint_every=1",
    ]
    alone = trained(config, tmp_path / "alone", 0, [*changes, "steps=3"])
    directory = tmp_path / "elastic"
    run(3, lambda ranks: session(config, [*changes, f"run.dir={directory}", "steps=1"], ranks))
    for size, steps in ((1, 2), (2, 3)):
        run(size, partial(resumed, directory, [f"steps={steps}"]))
    assert bits(directory) == alone
    assert "trainer/reference.safetensors" in alone["manifest.json"]
    other = [*changes, "reference.sync_alpha=0.25", "steps=3"]
    assert trained(config, tmp_path / "other", 0, other) != alone


@pytest.mark.slow
def test_with_an_adapter_it_is_the_adapter_that_follows(tmp_path: Path, base_model: Path) -> None:
    """It begins as the model without one, keeps no second model, and goes on after a stop."""
    given: dict[str, Any] = {"adapter": {"rank": 2}, "optimizer": {"learning_rate": 1e-2}}
    path = penalized(tmp_path / "whole", base_model, {"sync_every": 2}, **given)
    whole = train(load_config(path), quiet=True)
    assert [value == 0 for value in kl(whole.run_dir)] == [True, False] * 3
    path = penalized(tmp_path / "stopped", base_model, {"sync_every": 2}, **given)
    train(load_config(path, ["steps=3"]), quiet=True)
    again = resume(tmp_path / "stopped" / "run", ["steps=6"], quiet=True)
    assert fingerprint(again.run_dir) == fingerprint(whole.run_dir)
    job = job_of(load_config(path), HERE)
    held = dict(plan(job).held)
    row = json.loads((Path(whole.run_dir) / "metrics.jsonl").read_text().splitlines()[-1])
    planned = held["reference, FP32 masters"] + held["reference, working factors"]
    assert row["memory/reference_mib"] * 2**20 == planned < held["working weights, rollout"]


def test_a_run_holds_what_was_planned(tmp_path: Path, base_model: Path) -> None:
    """To the byte; the control: a reference that stays has no masters."""
    path = penalized(tmp_path, base_model, {"sync_every": 2}, steps=1)
    found = train(load_config(path), quiet=True)
    held = dict(plan(job_of(load_config(path), HERE)).held)
    planned = held["reference, FP32 masters"] + held["working weights, rollout"]
    assert found.metrics[-1]["memory/reference_mib"] * 2**20 == planned
    packs = held["working weights, packed by the backend"]
    assert held["reference, working weights only"] == held["working weights, rollout"] + packs
    stays = dict(plan(job_of(load_config(path, ["reference.sync_every=0"]), HERE)).held)
    assert "reference, FP32 masters" not in stays


def test_preferences_are_compared_with_a_reference_that_follows(
    tmp_path: Path, base_model: Path
) -> None:
    """The margin is 0 again after each copy, and a run that was stopped goes on."""
    given = {"reference": {"sync_every": 2}, "evaluation": {}}
    path = pairs(tmp_path / "whole", base_model, **given)
    whole = train_supervised(load_sft_config(path, ["steps=5"]), quiet=True)
    rows = [row["preference/margin"] for row in whole.metrics if "loss/dpo" in row]
    assert [value == 0 for value in rows] == [True, False, True, False, True]
    path = pairs(tmp_path / "stopped", base_model, **given)
    train_supervised(load_sft_config(path, ["steps=3"]), quiet=True)
    again = resume(tmp_path / "stopped" / "run", ["steps=5"], quiet=True)
    assert fingerprint(again.run_dir) == fingerprint(whole.run_dir)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("algorithm.kl_coefficient=0", "nothing is compared with a reference"),
        ("reference.path=elsewhere", "a model of its own does not follow the policy"),
        ("reference.sync_every=0", "sync_alpha needs sync_every"),
        ("reference.sync_alpha=1.5", "reference.sync_alpha"),
        ("adapter={rank: 2}", "has the policy's own"),
    ],
)
def test_a_reference_that_cannot_follow_is_refused(
    change: str, said: str, tmp_path: Path, base_model: Path
) -> None:
    given = {"sync_every": 2, "sync_alpha": 0.5, "precision": "bf16"}
    with pytest.raises(IsobitError, match=said):
        load_config(penalized(tmp_path, base_model, given), [change])
    with pytest.raises(IsobitError, match="is compared with no reference"):
        load_sft_config(
            pairs(tmp_path, base_model), ["loss=cross_entropy", "reference.sync_every=2"]
        )
