"""A run whose batches a fleet samples beside the learner is the run of one process with
`rollouts_ahead: k`."""

import json
import os
import re
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from isobit.config import load_config
from isobit.distributed import Ranks
from isobit.engine.fleet.fleet import Fleet
from isobit.errors import RunFailed
from isobit.rl.learner.learner import Learner
from isobit.training.train import TrainResult, resume, train
from tests.distributed import sessions, threads
from tests.distributed.sessions import session, trained, written
from tests.fleet.flipping import FlippingWorker
from tests.models import tiny_model
from tests.runs import fingerprint, write_config
from tests.test_resume import FAILING

BY_ENGINE = (
    "rollout/cached_tokens",
    "rollout/prefix_hit_fraction",
    "rollout/preemptions",
    "quant/kv_saturated_fraction",
)
"""What engines did, not what they sampled: an engine that samples alone shares more pages."""
HARD: dict[str, Any] = {
    "algorithm": {"preset": "dapo", "updates_per_batch": 2},
    "replay": {"capacity": 5, "groups_per_step": 1, "max_staleness": 4},
    "evaluation": {"every": 2, "samples": 4},
    "prompts_per_step": 3,
    "sampling": {"group_size": 3, "max_new_tokens": 3},
}
"""Dynamic sampling makes the prompts of a batch depend on the rewards of the one before."""
WITH_KL = {**HARD, "algorithm": {**HARD["algorithm"], "kl_coefficient": 0.1, "kl_in_reward": True}}
"""The KL in the reward is computed with weights that several updates of a batch change."""


def bits(run: Path) -> dict[str, Any]:
    """`fingerprint`, without what engines count of their own work."""
    return bits_of(fingerprint(run))


def bits_of(found: dict[str, Any]) -> dict[str, Any]:
    rows = [
        {k: v for k, v in row.items() if k not in BY_ENGINE} for row in json.loads(found["metrics"])
    ]
    return found | {"metrics": rows}


def go(folder: Path, model: Path, *overrides: str, **changes: Any) -> TrainResult:
    folder.mkdir()
    return train(load_config(write_config(folder, model, **changes), overrides))


@pytest.mark.parametrize(
    ("ahead", "engines", "changes"),
    [
        (0, 1, {}),
        (1, 2, WITH_KL),
        (2, 1, {"precision": "fp8-rollout-kv"}),
        (1, 1, {"algorithm": {"advantage": "otb"}}),
    ],
    ids=[
        *("synchronous", "dynamic sampling and KL", "a separate engine with a calibrated cache"),
        "credit that asks the learner",
    ],
)
@pytest.mark.slow
def test_a_fleet_is_one_process(
    tmp_path: Path, base_model: Path, ray: object, ahead: int, engines: int, changes: Any
) -> None:
    one = go(tmp_path / "one", base_model, f"rollouts_ahead={ahead}", **changes)
    fleet = go(
        tmp_path / "fleet",
        base_model,
        f"rollouts_ahead={ahead}",
        f"fleet.engines={engines}",
        **changes,
    )
    assert bits(fleet.run_dir) == bits(one.run_dir)
    other = go(
        tmp_path / "other", base_model, f"rollouts_ahead={ahead + 1}", **changes
    )  # the control
    assert bits(other.run_dir)["model.safetensors"] != bits(one.run_dir)["model.safetensors"]


@pytest.mark.slow
def test_ranks_share_a_fleet(tmp_path: Path, ray: object) -> None:
    """The first of two ranks has it; both learn from its batches, and a third run goes on with it
    alone."""
    config = written(tmp_path, rollouts_ahead=1, **HARD)
    one = bits_of(trained(config, tmp_path / "one", 0, ["steps=4"]))
    run = tmp_path / "fleet"
    trained(config, run, 2, ["steps=3", "fleet.engines=2"])
    resume(run, ["steps=4", "ranks=1"])
    assert bits_of(sessions.bits(run)) == one
    assert (
        bits_of(trained(config, tmp_path / "other", 2, ["steps=4", "rollouts_ahead=2"])) != one
    )  # the control


@pytest.mark.slow
def test_a_reward_that_fails_ends_all_ranks(tmp_path: Path, ray: object) -> None:
    """In one line that both have, though only the first scores."""
    (tmp_path / "failing.py").write_text(FAILING.format(step=1, flag=str(tmp_path / "failing.py")))
    rewards = {"functions": [{"function": f"{tmp_path}/failing.py:digits"}]}
    config, said = written(tmp_path, rollouts_ahead=1, rewards=rewards), list[str]()

    def one(ranks: Ranks) -> None:
        with pytest.raises(RunFailed) as raised:
            session(config, ["fleet.engines=1", f"run.dir={tmp_path / 'run'}"], ranks)
        said.append(str(raised.value))

    threads.run(2, one)
    assert len(said) == 2
    assert said[0] == said[1]
    assert "the judge is away" in said[0]


@pytest.mark.slow
def test_a_mixture_with_replayed_routes_beside_the_learner(
    tmp_path: Path, ray: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No batch but the first is there before the learner has begun to learn the one before."""
    model = tmp_path / "mixture"
    tiny_model(family="qwen3_moe").save(model)
    settings = {"algorithm": {"router_replay": True}, "steps": 3}
    one = go(tmp_path / "one", model, "rollouts_ahead=1", **settings)
    learning = threading.Event()
    calls = list[bool]()
    generate = Fleet.generate
    learn = Learner.learn

    def late(self: Fleet, *given: Any, **options: Any) -> Any:
        found = generate(self, *given, **options)
        calls.append(not calls or learning.wait(60))
        learning.clear()
        return found

    def begun(self: Learner, *given: Any) -> Any:
        learning.set()
        return learn(self, *given)

    monkeypatch.setattr(Fleet, "generate", late)
    monkeypatch.setattr(Learner, "learn", begun)
    fleet = go(tmp_path / "fleet", model, "rollouts_ahead=1", "fleet.engines=1", **settings)
    assert calls == [True] * 4
    assert bits(fleet.run_dir) == bits(one.run_dir)


@pytest.mark.slow
def test_killed_engines_and_a_resume(
    tmp_path: Path, base_model: Path, ray: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine is killed in every step, the run stops, and goes on with another number of engines,
    then with none."""
    one = go(tmp_path / "one", base_model, "rollouts_ahead=2", "steps=5", **HARD)
    send, killed = Fleet.send, list[int]()

    def kill(self: Fleet) -> None:
        send(self)
        for engine in [engine for engine in self._engines if engine.opened][:1]:
            killed.append(int(engine.host.rpartition("process ")[2].rstrip(")")))
            os.kill(killed[-1], signal.SIGKILL)

    monkeypatch.setattr(Fleet, "send", kill)
    run = go(
        tmp_path / "fleet", base_model, "rollouts_ahead=2", "steps=2", "fleet.engines=2", **HARD
    ).run_dir
    assert killed
    monkeypatch.undo()
    resume(run, ["steps=4", "fleet.engines=1"])
    resume(run, ["steps=5", "fleet.engines=0"])
    assert bits(run) == bits(one.run_dir)


@pytest.mark.slow
def test_a_reward_that_fails_beside_the_learner(
    tmp_path: Path, base_model: Path, ray: object
) -> None:
    """The step that was learned beside it is not saved; the run that goes on is the one that never
    failed."""
    (tmp_path / "one").mkdir()
    one = train(load_config(write_config(tmp_path / "one", base_model, rollouts_ahead=1)))
    flag = tmp_path / "away"
    flag.touch()
    (tmp_path / "failing.py").write_text(FAILING.format(step=3, flag=str(flag)))
    rewards = {"functions": [{"function": f"{tmp_path}/failing.py:digits"}]}
    config = write_config(
        tmp_path, base_model, rollouts_ahead=1, fleet={"engines": 1}, rewards=rewards
    )
    with pytest.raises(RunFailed, match="the judge is away"):
        train(load_config(config))
    flag.unlink()
    resume(tmp_path / "run")
    assert bits(tmp_path / "run") == bits(one.run_dir)


@pytest.mark.parametrize("updates", [1, 2])
@pytest.mark.slow
def test_keys_that_flip_in_an_engine_end_the_run(
    tmp_path: Path, base_model: Path, ray: object, monkeypatch: pytest.MonkeyPatch, updates: int
) -> None:
    """With the share that is compared by default. The controls: engines that are whole, where
    nothing differs, and a run that compares none."""
    settings = ["backend=reference", "consistency=exact", "rollouts_ahead=1", "fleet.engines=1"]
    settings.append(f"algorithm.updates_per_batch={updates}")
    whole = go(tmp_path / "whole", base_model, *settings)
    steps = [row for row in whole.metrics if row["step"] > 0]
    assert all(
        row["mismatch/differing_tokens"] == 0 and row["mismatch/compared_tokens"] > 0
        for row in steps
    )
    monkeypatch.setattr("isobit.engine.fleet.engines.Worker", FlippingWorker)
    with pytest.raises(RunFailed) as caught:
        go(tmp_path / "flipped", base_model, *settings)
    message = str(caught.value)
    assert re.search(r"step \d: rollout and learner differ in ", message), message
    assert "nothing was learned from this batch; the last good checkpoint is " in message
    blind = go(tmp_path / "blind", base_model, *settings, "mismatch.share_ahead=0")
    assert not any(row.get("mismatch/differing_tokens") for row in blind.metrics)
