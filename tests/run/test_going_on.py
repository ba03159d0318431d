"""What a run goes on from: its newest checkpoint that is whole and finite, whatever its logs have
become; alone in its directory."""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from isobit.config import load_config
from isobit.errors import IsobitError, RunFailed
from isobit.model import Model
from isobit.rl.optim.sharded import ShardedOptimizer
from isobit.run import completions, ends
from isobit.run.certificate import CERTIFICATE
from isobit.run.checkpoints import all_checkpoints, file_digest, newest
from isobit.run.completions import COMPLETIONS, lines, members, pack, parse
from isobit.run.directory import METRICS, Lock, RunDirectory, read_jsonl
from isobit.run.ends import damaged_steps
from isobit.training.commands.export import export
from isobit.training.train import resume, train
from tests.runs import fingerprint, write_config


@pytest.fixture
def run(tmp_path: Path, base_model: Path) -> Path:
    """A finished run of four steps, with checkpoints after two and four."""
    return train(
        load_config(write_config(tmp_path, base_model, evaluation={"every": 2, "samples": 4}))
    ).run_dir


def spoil(checkpoint: Path) -> None:
    """NaN in a weight, under a manifest that says that this is right."""
    path = checkpoint / "model.safetensors"
    tensors = load_file(path)
    next(iter(tensors.values())).view(-1)[0] = float("nan")
    save_file(tensors, path)
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    (checkpoint / "manifest.json").write_text(json.dumps(manifest | {path.name: file_digest(path)}))


def test_it_falls_back_to_a_checkpoint_that_is_finite(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = fingerprint(run)
    spoil(all_checkpoints(run / "checkpoints")[-1])
    assert resume(run).exit_code == 0
    line = next(
        line for line in capsys.readouterr().err.splitlines() if "step-000004 is damaged" in line
    )
    assert "is not finite" in line
    assert fingerprint(run) == whole
    assert (run / "checkpoints" / ".damaged-step-000004").is_dir()


def _metrics(change: Callable[[list[bytes]], list[bytes]]) -> Callable[[Path], None]:
    def harm(run: Path) -> None:
        path = run / METRICS
        path.write_bytes(b"".join(change(path.read_bytes().splitlines(keepends=True))))

    return harm


def _flip_completions(run: Path) -> None:
    member = list(members(run / COMPLETIONS))[1]
    content = bytearray((run / COMPLETIONS).read_bytes())
    content[member.start + member.length // 2] ^= 1
    (run / COMPLETIONS).write_bytes(content)


def _shorten(name: str) -> Callable[[Path], None]:
    return lambda run: (run / name).write_bytes((run / name).read_bytes()[:-3])


_DEEP = b'{"step": 1, "a": ' + b"[" * 100_000 + b"\n"
LOGS: dict[str, tuple[Callable[[Path], None], str]] = {
    "emptied": (_metrics(lambda rows: []), "metrics.jsonl has 0 rows up to step 4, and had 5"),
    "gone": (
        lambda run: (run / METRICS).unlink(),
        "metrics.jsonl has 0 rows up to step 4, and had 5",
    ),
    "half a line": (
        _metrics(lambda rows: [*rows[:-1], rows[-1][:-9]]),
        "has 4 rows up to step 4, and had 5",
    ),
    "a text value": (
        _metrics(lambda rows: [*rows[:2], b'{"step": 2, "grad_norm": "high"}\n', *rows[3:]]),
        "has 4 rows up to step 4, and had 5",
    ),
    "nested": (
        _metrics(lambda rows: [*rows[:2], _DEEP, *rows[3:]]),
        "has 4 rows up to step 4, and had 5",
    ),
    "garbage in the middle": (
        _metrics(lambda rows: [*rows[:2], b"\0\xff\n" * 3, *rows[3:]]),
        "has 4 rows up to step 4",
    ),
    "no JSON and no UTF-8": (
        _metrics(lambda rows: [b"\xff\n", b"{\n", b"[]\n", b"1\n"]),
        "has 0 rows up to step 4",
    ),
    "zeros at the end": (_metrics(lambda rows: [*rows, b"\0" * 4096]), ""),
    "a flipped bit in completions": (
        _flip_completions,
        "completions.jsonl.gz: completions are damaged, of step 2",
    ),
    "completions cut off": (_shorten(COMPLETIONS), "completions.jsonl.gz has "),
    "quantization cut off": (_shorten("quantization.jsonl"), "quantization.jsonl has "),
    "the certificate cut off": (_shorten(CERTIFICATE), "certificate.jsonl has "),
}


def test_of_many_completions_the_newest_are_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long the run was; of the others a header that has changed is found, and without the
    bound (the control) a flipped bit too."""
    path, rows = tmp_path / COMPLETIONS, [{"step": 0, "text": "some of it"}]
    path.write_bytes(
        b"".join(pack([{**row, "step": step} for row in rows]) for step in range(1, 41))
    )
    every, whole = list(members(path)), path.read_bytes()
    unpacked = list[int]()
    monkeypatch.setattr(
        completions, "lines", lambda p, member: unpacked.append(member.start) or lines(p, member)
    )

    def told(*places: int, bound: int) -> list[str]:
        content = bytearray(whole)
        for place in places:
            content[place] ^= 1
        path.write_bytes(content)
        unpacked.clear()
        monkeypatch.setattr(ends, "_UNPACKED", bound)
        return damaged_steps(path, len(whole))

    newest = len(whole) - every[-3].start
    assert told(bound=newest) == []
    assert unpacked == [member.start for member in every[-3:]]
    bit, header, late = (every[4].start + 40, every[9].start + 17, every[38].start + 40)
    assert told(bit, bound=newest) == []
    assert told(bit, bound=len(whole)) == [f"{COMPLETIONS}: completions are damaged, of step 5"]
    assert told(bit, header, late, bound=newest) == [
        f"{COMPLETIONS}: completions are damaged, of step 10, step 39"
    ]
    assert len(unpacked) <= 5
    assert told(bit, bit + every[4].length, bound=len(whole)) == [
        f"{COMPLETIONS}: completions are damaged, of step 5, the next"
    ]


@pytest.mark.parametrize("name", LOGS)
def test_a_log_costs_its_rows_and_not_the_run(
    name: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The newest checkpoint is taken, whose weights are sound; a line says what is lost; later
    steps are recorded."""
    whole, before = fingerprint(run), newest(run / "checkpoints")
    harm, said = LOGS[name]
    harm(run)
    capsys.readouterr()
    assert resume(run, ["steps=6"]).exit_code == 0
    err = capsys.readouterr().err
    assert said in err
    assert "damaged (" not in err  # of a checkpoint
    assert ("the run goes on, and its weights are sound" in err) == bool(said)
    assert before[0] in all_checkpoints(run / "checkpoints")
    assert (
        hashlib.sha256((before[0] / "model.safetensors").read_bytes()).hexdigest()
        == whole["model.safetensors"]
    )
    steps = [int(row["step"]) for row in read_jsonl(run / METRICS)]
    assert steps[-2:] == [5, 6]
    assert steps == sorted(set(steps))
    last = list(members(run / COMPLETIONS))[-1]
    assert [parse(line)["step"] for line in lines(run / COMPLETIONS, last)] == [6] * 16


@pytest.mark.slow
def test_checkpoints_that_are_gone_are_said(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run that has recorded a step does not begin again without a word; one that has not begins
    again."""
    files = {name: (run / name).read_bytes() for name in (METRICS, COMPLETIONS, CERTIFICATE)}
    shutil.rmtree(run / "checkpoints")
    with pytest.raises(
        IsobitError,
        match=r"its checkpoints are gone, after step 4: bring .*checkpoints back, or begin",
    ) as said:
        resume(run)
    assert "--out" in str(said.value)
    assert {name: (run / name).read_bytes() for name in files} == files
    for name in files:  # any of them is enough to know
        for other in files:
            (run / other).write_bytes(files[other] if other == name else b"")
        with pytest.raises(IsobitError, match="its checkpoints are gone"):
            resume(run)
    (run / CERTIFICATE).write_bytes(files[CERTIFICATE].splitlines(keepends=True)[0])
    (run / METRICS).write_bytes(
        files[METRICS].splitlines(keepends=True)[0]
    )  # the evaluation before step 1
    (run / COMPLETIONS).write_bytes(b"")
    assert resume(run).exit_code == 0


def test_going_back_is_said(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(run / "checkpoints" / "step-000004")
    whole = (run / COMPLETIONS).read_bytes()
    assert resume(run).exit_code == 0
    assert (
        f"{run} goes on after step 2: steps up to 4, which it had recorded, are done again"
        in capsys.readouterr().err
    )
    assert (run / COMPLETIONS).read_bytes() == whole


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
    step, taken = ShardedOptimizer.step, list[float]()

    def breaking(self: ShardedOptimizer, rate: float, norm: float) -> None:
        step(self, rate, norm)
        taken.append(rate)
        if len(taken) == 3:
            with torch.no_grad():
                next(iter(self.parameters.values())).view(-1)[0] = float("inf")
            self.checksums.renew()  # as if the update had written it

    monkeypatch.setattr(ShardedOptimizer, "step", breaking)
    with pytest.raises(
        RunFailed, match=r"is not finite; the last good checkpoint is .*step-000002"
    ):
        train(load_config(write_config(tmp_path, base_model, steps=3)))
    assert [path.name for path in all_checkpoints(tmp_path / "run" / "checkpoints")] == [
        "step-000000",
        "step-000002",
    ]


def test_export_names_what_it_took_and_refuses_a_damaged_best(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    newest = all_checkpoints(run / "checkpoints")[-1]
    (newest / "model.safetensors").write_bytes(b"")
    export(run, tmp_path / "out", "fp32", None)
    assert "step-000004 is damaged (model.safetensors does not match" in capsys.readouterr().err
    assert Model.load(tmp_path / "out", "float32").parameters()
    (run / "best" / "model.safetensors").write_bytes(b"")
    with pytest.raises(
        IsobitError, match=r"best is damaged .*; take the newest checkpoint: leave out --best"
    ):
        export(run, tmp_path / "other", "fp32", None, best=True)


def test_a_lost_machine_file_is_said_and_written_anew(run: Path) -> None:
    (run / "machine.json").write_text("")
    with RunDirectory(run, {}) as directory:
        assert (
            "what the run began on is not known"
            in directory.record_machine({"backend": "native"})[0]
        )
        assert directory.record_machine({"backend": "native"}) == []
