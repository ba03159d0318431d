"""What a run goes on from: its newest checkpoint that is whole, finite and fits its files; alone in its directory."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from isobit.commands.export import export
from isobit.config import load_config
from isobit.errors import IsobitError, RunFailed
from isobit.model import Model
from isobit.rl.optim import Optimizer
from isobit.run.checkpoints import _digest, all_checkpoints
from isobit.run.directory import METRICS, Lock, RunDirectory
from isobit.training.train import resume, train
from tests.runs import fingerprint, write_config


@pytest.fixture
def run(tmp_path: Path, base_model: Path) -> Path:
    """A finished run of four steps, with checkpoints after two and four."""
    return train(load_config(write_config(tmp_path, base_model, evaluation={"every": 2, "samples": 4}))).run_dir


def spoil(checkpoint: Path) -> None:
    """NaN in a weight, under a manifest that says that this is right."""
    path = checkpoint / "model.safetensors"
    tensors = load_file(path)
    next(iter(tensors.values())).view(-1)[0] = float("nan")
    save_file(tensors, path)
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    (checkpoint / "manifest.json").write_text(json.dumps(manifest | {path.name: _digest(path)}))


def cut(run: Path) -> None:
    path = run / METRICS
    path.write_bytes(path.read_bytes()[:-1])


def test_it_falls_back_to_a_checkpoint_that_is_finite_and_fits(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = fingerprint(run)
    for harm, said in (
        (lambda: spoil(all_checkpoints(run / "checkpoints")[-1]), "is not finite"),
        (lambda: cut(run), "metrics.jsonl has"),
    ):
        harm()
        assert resume(run).exit_code == 0
        line = next(line for line in capsys.readouterr().err.splitlines() if "step-000004 is damaged" in line)
        assert said in line
        assert fingerprint(run) == whole
    assert (run / "checkpoints" / ".damaged-step-000004").is_dir()


def test_a_second_process_touches_nothing(run: Path) -> None:
    half = run / "checkpoints" / ".writing-step-000009"
    half.mkdir()
    lock = Lock(run)
    with pytest.raises(IsobitError, match="in use by another process"):
        resume(run, ["steps=5"])
    assert half.is_dir()
    lock.close()
    assert resume(run, ["steps=5"]).exit_code == 0
    assert not half.exists()


def test_weights_that_are_not_finite_are_not_saved(
    tmp_path: Path, base_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken by the update of the last step, which nothing computes with."""
    step, taken = Optimizer.step, list[float]()

    def breaking(self: Optimizer, rate: float, norm: float) -> None:
        step(self, rate, norm)
        taken.append(rate)
        if len(taken) == 3:
            with torch.no_grad():
                next(iter(self.parameters.values())).view(-1)[0] = float("inf")
            self.checksums.renew()  # as if the update had written it

    monkeypatch.setattr(Optimizer, "step", breaking)
    with pytest.raises(RunFailed, match=r"is not finite; the last good checkpoint is .*step-000002"):
        train(load_config(write_config(tmp_path, base_model, steps=3)))
    assert [path.name for path in all_checkpoints(tmp_path / "run" / "checkpoints")] == ["step-000000", "step-000002"]


def test_export_names_what_it_took_and_refuses_a_damaged_best(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    newest = all_checkpoints(run / "checkpoints")[-1]
    (newest / "model.safetensors").write_bytes(b"")
    export(run, tmp_path / "out", "fp32", None)
    assert "step-000004 is damaged (model.safetensors does not match" in capsys.readouterr().err
    assert Model.load(tmp_path / "out", "float32").parameters()
    (run / "best" / "model.safetensors").write_bytes(b"")
    with pytest.raises(IsobitError, match=r"best is damaged .*; take the newest checkpoint: leave out --best"):
        export(run, tmp_path / "other", "fp32", None, best=True)


def test_a_lost_machine_file_is_said_and_written_anew(run: Path) -> None:
    (run / "machine.json").write_text("")
    with RunDirectory(run, {}) as directory:
        assert "what the run began on is not known" in directory.record_machine({"backend": "native"})[0]
        assert directory.record_machine({"backend": "native"}) == []
