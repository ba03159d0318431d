"""Every tracker holds what metrics.jsonl holds, each step once, also after kill -9 and resume. Read
back with each tracker's own reader; no network."""

import json
import os
import signal
import sys
from pathlib import Path

import pytest

from isobit import cli
from isobit.config import load_config
from isobit.monitor.trackers.follow import State
from isobit.monitor.trackers.mlflow import metric_name
from isobit.run.completions import COMPLETIONS, read
from isobit.run.directory import read_jsonl
from isobit.run.metrics import is_timing
from isobit.training.train import resume, train
from tests.kinds import KINDS
from tests.runs import fingerprint, wait_for_lines, write_config
from tests.test_resume import start
from tests.trackers.readers import READERS, wandb_records
from tests.until import until

pytestmark = pytest.mark.slow
ALL = list(READERS)


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # for the reader
    for name in ("WANDB_DIR", "TRACKIO_DIR", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)


def check_copies(run: Path, names: list[str] = ALL, *, exact: bool = True) -> None:
    """Each tracker has each row once, under the same names. `exact`: timings too, which a repeated
    step has anew."""
    rows = {int(row.pop("step")): row for row in read_jsonl(run / "metrics.jsonl")}
    for name in names:
        stored = READERS[name](run)
        assert [step for step, _ in stored] == sorted(rows), name
        for step, values in stored:
            called = metric_name if name == "mlflow" else str
            expected = {called(k): v for k, v in rows[step].items() if v is not None}
            assert set(values) == set(expected), name
            same = [key for key in expected if exact or not is_timing(key)]
            assert len(same) > (12 if step else 1)
            assert [values[k] for k in same] == pytest.approx(
                [expected[k] for k in same], rel=1e-6
            ), name


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, base_model: Path) -> Path:
    """A run with all trackers, resumed once."""
    folder = tmp_path_factory.mktemp("tracked")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_MODE", "offline")
        tracking = {"trackers": ALL, "completions": 3, "group": "a group", "close_s": 60}
        config = write_config(
            folder, base_model, tracking=tracking, evaluation={"every": 3, "samples": 4}
        )
        train(load_config(config, ["steps=3"]))
        resume(folder / "run", ["steps=5"])
    return folder / "run"


def test_all_trackers_hold_what_the_file_holds(finished: Path) -> None:
    assert [row["step"] for row in read_jsonl(finished / "metrics.jsonl")] == [0, 1, 2, 3, 4, 5]
    check_copies(finished)


def test_a_resumed_run_is_one_run(finished: Path) -> None:
    """One id in each; the control is that another run has another."""
    records = wandb_records(finished)
    runs = [record["run"] for record in records if record["type"] == "run"]
    assert len(runs) == 2
    assert {(run["run_id"], run["display_name"], run["run_group"]) for run in runs} == {
        (State(finished).of("wandb")["kept"]["id"], "run", "a group")
    }
    assert [r["exit"].get("exit_code", 0) for r in records if r["type"] == "exit"] == [0, 0]


def test_the_config_and_the_completions_are_there(finished: Path) -> None:
    from mlflow.artifacts import load_dict
    from mlflow.tracking import MlflowClient
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    rows = [row for row in read(finished / COMPLETIONS) if row["step"] == 4][:3]
    texts = [row["completion"] for row in rows]
    client = MlflowClient((finished / "tracking/mlflow").resolve().as_uri())
    experiment = client.get_experiment_by_name("isobit")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.data.params["sampling.group_size"] == "4"
    assert run.info.status == "FINISHED"
    table = load_dict(f"{run.info.artifact_uri}/completions/step-000004.json")["completions"]
    assert [row["completion"] for row in table] == texts
    media = (finished / "tracking/wandb/wandb").glob(
        "offline-run-*/files/media/table/completions_*.table.json"
    )
    tables = [json.loads(path.read_text())["data"] for path in media]
    assert [[row[2] for row in table] for table in tables if table[0][0] == 4] == [texts]
    events = EventAccumulator(str(finished / "tracking/tensorboard"), size_guidance={"tensors": 0})
    events.Reload()
    assert b'"group_size": 4' in events.Tensors("config/text_summary")[0].tensor_proto.string_val[0]
    shown = next(
        e for e in events.Tensors("completions/text_summary") if e.step == 4
    ).tensor_proto.string_val[0]
    assert all(f"| {text.replace('|', chr(92) + '|')} |" in shown.decode() for text in texts)


@pytest.mark.parametrize("also", ["run", "trackers"])
def test_killed_and_resumed_no_step_is_doubled(tmp_path: Path, base_model: Path, also: str) -> None:
    """SIGKILL after step 5, where the last checkpoint is of step 4: steps after 4 are made again.
    Once the follower lives on, once it is killed too."""
    config = write_config(
        tmp_path, base_model, tracking={"trackers": ALL, "completions": 2}, steps=200
    )
    values = config.read_text().replace("checkpoint_every: 2", "checkpoint_every: 4")
    config.write_text(values)
    process = start(config)
    run = tmp_path / "run"
    wait_for_lines(run / "metrics.jsonl", 5)
    until(lambda: _all_after(run, 4))
    children = _children(process.id)
    assert len(children) == 1
    process.kill()
    if also == "trackers":
        for child in children:
            os.kill(child, signal.SIGKILL)
    process.wait()
    done = sum(1 for _ in read_jsonl(run / "metrics.jsonl"))
    before = fingerprint(run)["step"]
    assert int(before.removeprefix("step-")) <= done
    resume(run, [f"steps={done + 2}", "tracking.close_s=60"])
    check_copies(run, exact=False)


def _all_after(run: Path, step: int) -> bool:
    state = State(run)
    return all(state.of(name).get("last", -1) > step for name in ALL)


def _children(parent: int) -> list[int]:
    """The follower: a child that runs `isobit.monitor.trackers`."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            status, command = (path / "stat").read_text(), (path / "cmdline").read_bytes()
        except OSError:
            continue
        if (
            int(status.rpartition(")")[2].split()[1]) == parent
            and b"isobit.monitor.trackers" in command
        ):
            found.append(int(path.name))
    return found


def test_a_tracker_that_was_added_later_gets_everything(
    tmp_path: Path, base_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`isobit track`, and resuming with another tracker: what it lacks comes from the file."""

    def track(*overrides: str) -> None:
        monkeypatch.setattr(sys, "argv", ["isobit", "track", str(run), *overrides])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        assert stop.value.code == 0

    config = load_config(write_config(tmp_path, base_model), ["steps=2"])
    train(config)
    run = tmp_path / "run"
    track("tracking.trackers=[tensorboard]")
    check_copies(run, ["tensorboard"])
    resume(run, ["steps=3", "tracking.trackers=[tensorboard,mlflow]", "tracking.close_s=60"])
    check_copies(run, ["tensorboard", "mlflow"])
    track("tracking.trackers=[tensorboard,mlflow]")
    check_copies(run, ["tensorboard", "mlflow"])


@pytest.mark.parametrize("kind", ["turns", "sft", "dpo", "distillation"])
def test_every_kind_of_run_is_copied(
    kind: str, tmp_path: Path, base_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To all trackers, by `isobit track`; as if tools had been called, too."""
    run = KINDS[kind](tmp_path, base_model)
    tools = {"tools/call_frequency": 0.5, "tools/call_frequency/add": 0.25, "time/tools/add": 1.0}
    rows = [row | tools for row in read_jsonl(run / "metrics.jsonl")]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    names = f"tracking.trackers=[{','.join(ALL)}]"
    monkeypatch.setattr(sys, "argv", ["isobit", "track", str(run), names, "tracking.close_s=60"])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 0
    check_copies(run)
