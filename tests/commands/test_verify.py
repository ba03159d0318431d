"""`isobit verify`: what a run recorded is drawn again from its checkpoints; whatever was changed is
found."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from isobit import cli, load_config, train
from isobit.errors import IsobitError, RunFailed
from isobit.run import completions
from isobit.run.certificate import CERTIFICATE
from isobit.run.completions import COMPLETIONS
from isobit.training.commands.verify import verify_command

from ..conftest import Refused
from ..runs import write_config

FLOWS: dict[str, dict[str, Any]] = {
    "fp8": {},
    "two engines": {"precision": "fp8-rollout"},
    "truncated": {"sampling": {"top_p": 0.9, "repetition_penalty": 1.1, "temperature": 0.7}},
    "ahead": {"rollouts_ahead": 1},
    "an adapter": {"adapter": {"rank": 4, "alpha": 8}},
    "stochastic masters": {"optimizer": {"masters": "bf16"}},
    "dynamic sampling": {"algorithm": {"preset": "dapo"}},
}


def _trained(folder: Path, model: Path, **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    changes = {**changes, "run": {"keep_last": 9, **changes.get("run", {})}}
    assert train(load_config(write_config(folder, model, **changes))).exit_code == 0
    return folder / "run"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, base_model: Path) -> Path:
    return _trained(tmp_path_factory.mktemp("verify"), base_model)


@pytest.fixture
def run(tmp_path: Path, finished: Path) -> Path:
    """A copy, to be tampered with."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


def _said(run: Path, capsys: pytest.CaptureFixture[str], limit: int | None = None) -> list[str]:
    capsys.readouterr()
    verify_command(run, limit)
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("name", FLOWS)
def test_a_run_is_what_its_weights_sampled(
    name: str, tmp_path: Path, base_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = _trained(tmp_path, base_model, **FLOWS[name])
    rows = list(completions.read(run / COMPLETIONS))
    lines = _said(run, capsys)
    kept = [row for row in rows if row["rollout_step"] in (0, 2)]
    assert [line.split(":")[0] for line in lines[:-2]] == ["step 0", "step 2"]
    assert all(
        line.endswith("drawn again, every token and every bit of its log-probability")
        for line in lines[:-2]
    )
    tokens = sum(len(row["completion_ids"]) for row in kept)
    assert lines[-2].startswith(
        f"certificate: {len(rows)} completions, their rewards and the metrics of steps 0 to 4 "
    )
    assert lines[-1].startswith(
        f"{run}: {len(kept)} of {len(rows)} completions were drawn again, and 0 of their "
    )
    assert lines[-1].endswith(
        f"{tokens} tokens differ in any bit: these weights sampled what is recorded"
    )


def _rewritten(run: Path, change: Any) -> None:
    """completions.jsonl.gz with `change` applied to each row."""
    rows = [change(row) for row in completions.read(run / COMPLETIONS)]
    steps = sorted({row["step"] for row in rows})
    members = [completions.pack([row for row in rows if row["step"] == step]) for step in steps]
    (run / COMPLETIONS).write_bytes(b"".join(members))


def _differs(run: Path, places: int = 2) -> str:
    """What the line of the checkpoints says, without the chain, which finds everything."""
    _without_certificate(run)
    with pytest.raises(RunFailed, match=f"not what was recorded, in {places} places: ") as failed:
        verify_command(run, None)
    return str(failed.value)


def _without_certificate(run: Path) -> None:
    """With every trace of the chain, which would find all else; that it is gone is found too."""
    (run / CERTIFICATE).unlink()
    for path in run.glob("checkpoints/*/trainer/certificate.json"):
        path.unlink()
        manifest = json.loads((path.parents[1] / "manifest.json").read_text())
        del manifest["trainer/certificate.json"]
        (path.parents[1] / "manifest.json").write_text(json.dumps(manifest))


def test_a_log_probability_that_was_changed_by_one_bit_is_found(run: Path) -> None:
    def change(row: dict[str, Any]) -> dict[str, Any]:
        if (row["step"], row["sample_index"], row["prompt_index"]) == (3, 1, 9):
            first = row["rollout_logprobs"][0]
            row["rollout_logprobs"][0] = first * (1 + 2**-23)
        return row

    _rewritten(run, change)
    assert "step 2: 16 completions" in (line := _differs(run))
    assert ": 1 differ; first: prompt 9, sample 1, token 0: recorded id " in line


def test_tokens_of_somebody_else_are_found(run: Path) -> None:
    def change(row: dict[str, Any]) -> dict[str, Any]:
        if row["step"] == 1 and row["prompt_index"] == 0:
            row["completion_ids"], row["rollout_logprobs"] = (
                row["completion_ids"][:1],
                row["rollout_logprobs"][:1],
            )
        return row

    _rewritten(run, change)
    assert "token 1: recorded none, drawn id " in _differs(run)


def test_other_weights_are_found(run: Path, tmp_path: Path, base_model: Path) -> None:
    """Of a run with twice the rate, whose checkpoints are whole."""
    other = _trained(tmp_path / "other", base_model, optimizer={"learning_rate": 2e-3})
    shutil.rmtree(run / "checkpoints" / "step-000002")
    shutil.copytree(other / "checkpoints" / "step-000002", run / "checkpoints" / "step-000002")
    assert "step 2: 16 completions" in _differs(run)


def test_another_seed_is_found(run: Path) -> None:
    config = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(config.replace("seed: 0", "seed: 1"))
    with pytest.raises(
        RunFailed, match=r"in 3 places: config\.yaml is not the config that step 4 was done with"
    ):
        verify_command(run, None)


def test_a_damaged_checkpoint_is_found(run: Path) -> None:
    weights = run / "checkpoints" / "step-000002" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert "step-000002 is damaged" in _differs(run)


def test_rows_that_do_not_say_when_they_were_sampled_are_left_out(run: Path) -> None:
    """They are not of step 0 for that."""
    _rewritten(run, lambda row: {key: value for key, value in row.items() if key != "rollout_step"})
    _without_certificate(run)
    with pytest.raises(
        IsobitError, match="none of its checkpoints sampled completions that are recorded"
    ):
        verify_command(run, None)


def test_whole_groups_up_to_a_number(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert [line.partition(" completions")[0] for line in _said(run, capsys, 5)[:-2]] == [
        "step 0: 8",
        "step 2: 8",
    ]


def test_another_machine_is_named(run: Path) -> None:
    facts = json.loads((run / "machine.json").read_text())
    (run / "machine.json").write_text(json.dumps(facts | {"torch": "2.0.0"}))
    verify_command(run, 4)
    _rewritten(run, lambda row: row | {"rollout_logprobs": [-0.5] * len(row["rollout_logprobs"])})
    assert "(recorded with another torch, where bits may differ)" in _differs(run, 3)


def test_what_cannot_be_verified_is_refused(
    run: Path, base_model: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of runs that no checkpoint draws again the chain is checked: `test_honest.py`."""
    assert "is not a run directory" in refused("verify", base_model)
    _rewritten(
        run, lambda row: {key: value for key, value in row.items() if key != "completion_ids"}
    )
    _without_certificate(run)
    assert "none of its checkpoints sampled completions that are recorded" in refused("verify", run)
    monkeypatch.setattr(sys, "argv", ["isobit", "verify", str(run), "--samples", "0"])
    with pytest.raises(SystemExit, match="2"):
        cli.main()
