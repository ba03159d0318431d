"""No run is accused of what it did not do: one of each kind, and what the commands say that look at
its records. The controls forge each kind's, and are found."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from isobit.errors import RunFailed
from isobit.monitor.report import write_report
from isobit.monitor.screen.watch import watch
from isobit.run.certificate import CERTIFICATE
from isobit.run.completions import COMPLETIONS, pack
from isobit.run.directory import METRICS
from isobit.run.ends import cut_short
from isobit.run.metrics import of_an_evaluation, of_the_machine
from isobit.training.commands.verify import verify_command
from isobit.training.train import resume
from tests.commands.test_forgeries import sign
from tests.kinds import KINDS, SUPERVISED, finished


@pytest.fixture(scope="module", params=list(KINDS))
def made(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, base_model: Path
) -> tuple[str, Path]:
    return request.param, finished(request.param, tmp_path_factory, base_model)


def test_it_is_not_accused(
    made: tuple[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the report, the screen, a resume of the finished run and a longer one, or by verify, which
    says what it has checked."""
    kind, whole = made
    run = Path(shutil.copytree(whole, tmp_path / "run"))
    capsys.readouterr()
    write_report([run], tmp_path / "report.html")
    watch(run, once=True)
    resume(run, quiet=True)
    assert cut_short(run) is None
    said = capsys.readouterr()
    assert "not what was recorded" not in said.out + said.err
    assert said.err == ""
    verify_command(run, None)
    said = capsys.readouterr()
    assert "certificate: " in said.out
    assert said.err == ""
    last = said.out.splitlines()[-1]
    undrawn = {"replayed": "verify ", "calibrated": "calibrated"}
    undrawn |= dict.fromkeys(SUPERVISED, "a supervised run samples nothing")
    if kind in undrawn:
        assert "the weights of " in last
        assert undrawn[kind] in last
        assert ("completions, their rewards" in said.out) == (kind not in SUPERVISED)
    else:
        assert "0 of their" in last
        assert " 0 of " not in last.replace("and 0 of their", "")


def test_each_metric_that_it_measured_is_held(made: tuple[str, Path], tmp_path: Path) -> None:
    """The control of the last: a row of each kind with one number changed, whichever that is."""
    _, run = made
    rows = [json.loads(line) for line in (run / METRICS).read_text().splitlines()]
    names = [
        name
        for name in rows[-1]
        if name != "step" and not of_the_machine(name) and not of_an_evaluation(name)
    ]
    assert len(names) > 8, names
    copy = tmp_path / "run"
    shutil.copytree(run, copy, ignore=shutil.ignore_patterns("checkpoints", "best"))
    shutil.copytree(run / "checkpoints", copy / "checkpoints")
    for name in names:
        forged = [*rows[:-1], {**rows[-1], name: (rows[-1][name] or 0.0) + 0.25}]
        (copy / METRICS).write_text("".join(json.dumps(row) + "\n" for row in forged))
        assert f"step {rows[-1]['step']} is not what was recorded" in str(cut_short(copy)), name
    with pytest.raises(RunFailed, match="not what was recorded, in 1 places: metrics"):
        verify_command(copy, 1)


@pytest.mark.parametrize("kind", ["sft", "dpo", "sft, an adapter"])
def test_a_forged_supervised_run_is_found(
    kind: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, base_model: Path
) -> None:
    """One bit of the weights under a manifest that says that it is right, another config,
    completions where there can be none, and no chain."""
    run = Path(shutil.copytree(finished(kind, tmp_path_factory, base_model), tmp_path / "run"))
    newest = sorted((run / "checkpoints").iterdir())[-1]
    (weights,) = newest.glob("*model.safetensors")
    config = run / "config.yaml"

    def other_weights() -> None:
        tensors = load_file(weights)
        tensors[sorted(tensors)[0]].view(-1)[7] += 1e-7
        save_file(tensors, weights, {"format": "pt"})
        sign(newest, weights.name)

    forgeries: dict[str, tuple[Path, Callable[[], object]]] = {
        "step-000002 are not those that the certificate has of step 2": (newest, other_weights),
        "is not the config that step 2 was done with": (
            config,
            lambda: config.write_text(config.read_text().replace("seed: 0", "seed: 1")),
        ),
        "completions of step 1 are not those that were recorded": (
            run / COMPLETIONS,
            lambda: (run / COMPLETIONS).write_bytes(pack([{"step": 1, "prompt_index": 0}])),
        ),
        f"{CERTIFICATE} is missing": (run / CERTIFICATE, (run / CERTIFICATE).unlink),
    }
    for what, (path, forge) in forgeries.items():
        kept = tmp_path / "kept"
        (shutil.copytree if path.is_dir() else shutil.copy)(path, kept)
        forge()
        with pytest.raises(RunFailed, match=what):
            verify_command(run, None)
        if path.is_dir():
            shutil.rmtree(path)
        kept.rename(path)
    verify_command(run, None)
