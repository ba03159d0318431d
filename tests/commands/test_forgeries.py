"""What somebody may do to a recorded run: `isobit verify` notices each of it, and says where."""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from isobit.config import load_config
from isobit.errors import RunFailed
from isobit.run import certificate, completions
from isobit.run.certificate import CERTIFICATE, GENESIS, digest, read_chain
from isobit.run.completions import COMPLETIONS
from isobit.training.commands.verify import verify_command
from isobit.training.train import resume, train

from ..runs import write_config

Row = dict[str, Any]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, base_model: Path) -> Path:
    folder = tmp_path_factory.mktemp("forged")
    train(
        load_config(write_config(folder, base_model, run={"keep_last": 9, "checkpoint_every": 2}))
    )
    return folder / "run"


@pytest.fixture
def run(tmp_path: Path, finished: Path) -> Path:
    """A copy, to be tampered with."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


def _steps(run: Path) -> list[list[Row]]:
    path = run / COMPLETIONS
    return [
        [json.loads(line) for line in completions.lines(path, m)] for m in completions.members(path)
    ]


def _write(run: Path, steps: list[list[Row]]) -> None:
    (run / COMPLETIONS).write_bytes(b"".join(map(completions.pack, steps)))


def _row(step: int, change: Callable[[Row], object], sample: int = 1) -> Callable[[Path], None]:
    """One sample of the second group of a step changed."""

    def forge(run: Path) -> None:
        steps = _steps(run)
        row = next(r for r in steps[step - 1][4:] if r["sample_index"] == sample)
        before = json.dumps(row)
        change(row)
        assert json.dumps(row) != before
        _write(run, steps)

    return forge


def _completions(change: Callable[[list[list[Row]]], object]) -> Callable[[Path], None]:
    def forge(run: Path) -> None:
        change(steps := _steps(run))
        _write(run, steps)

    return forge


def _lines(name: str, change: Callable[[list[Row]], object]) -> Callable[[Path], None]:
    def forge(run: Path) -> None:
        rows = [json.loads(line) for line in (run / name).read_text().splitlines()]
        change(rows)
        (run / name).write_text("".join(json.dumps(row) + "\n" for row in rows))

    return forge


def _redate(steps: list[list[Row]]) -> None:
    for row in steps[1]:
        row["step"], row["rollout_step"] = 3, 2
    del steps[2]


def _weights(run: Path) -> None:
    """One bit of the last checkpoint, after which nothing is sampled, under a manifest that says
    that it is right."""
    path = run / "checkpoints" / "step-000004" / "model.safetensors"
    tensors = load_file(path)
    name = sorted(tensors)[0]
    tensors[name].view(-1)[7] += 1e-7
    save_file(tensors, path)
    sign(path.parent, path.name)


def sign(checkpoint: Path, name: str) -> None:
    """Let a manifest say that a changed file is right."""
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    manifest[name] = hashlib.sha256((checkpoint / name).read_bytes()).hexdigest()
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))


def _last_step_gone(run: Path) -> None:
    """Of everything that grows; the checkpoint of the step stays."""
    _completions(lambda steps: steps.pop())(run)
    _lines("metrics.jsonl", lambda rows: rows.pop())(run)
    _lines(CERTIFICATE, lambda rows: rows.pop())(run)


def _signed_again(run: Path) -> None:
    """A reward is changed, and the chain from there on computed anew; the checkpoints have the old
    one."""

    def better(row: Row) -> None:
        row["reward"], row["rewards"] = 1.0, {"digits": 1.0}

    _row(3, better)(run)
    path = run / COMPLETIONS
    lines = [completions.lines(path, member) for member in completions.members(path)]
    hashes = [
        None,
        *(hashlib.sha256(b"".join(line + b"\n" for line in step)).hexdigest() for step in lines),
    ]

    def sign(rows: list[Row]) -> None:
        previous = GENESIS
        for row, rollouts in zip(rows, hashes):
            row |= {"previous": previous, "rollouts": rollouts}
            row["hash"] = previous = digest({key: row[key] for key in row if key != "hash"})

    _lines(CERTIFICATE, sign)(run)


def _swap(rows: list[Row]) -> None:
    rows[2], rows[3] = rows[3], rows[2]


def _cut(run: Path) -> None:
    path = run / COMPLETIONS
    path.write_bytes(path.read_bytes()[:-5])


def _flip(run: Path) -> None:
    content = bytearray((run / COMPLETIONS).read_bytes())
    content[len(content) // 2] ^= 1
    (run / COMPLETIONS).write_bytes(content)


def _other_config(run: Path) -> None:
    text = (run / "config.yaml").read_text()
    assert "learning_rate: 0.001" in text
    (run / "config.yaml").write_text(text.replace("learning_rate: 0.001", "learning_rate: 0.002"))


FORGERIES: dict[str, tuple[Callable[[Path], None], str]] = {
    "a prompt's ids, of a sample that is not the first": (
        _row(3, lambda row: row["prompt_ids"].reverse()),
        "its prompt is not that of its group",
    ),
    "a text": (_row(3, lambda row: row.update(completion="42")), "its text: recorded '42', drawn "),
    "a prompt's text": (
        _row(3, lambda row: row.update(prompt="1+1=")),
        "its prompt is not the text of its tokens",
    ),
    "a rendered prompt": (
        _row(3, lambda row: row.update(prompt_rendered="")),
        "its prompt_rendered is not the text",
    ),
    "truncated": (
        _row(3, lambda row: row.update(truncated=not row["truncated"])),
        "truncated: recorded ",
    ),
    "a reward": (
        _row(3, lambda row: row.update(reward=1.0)),
        "its reward is 1.0, and its parts make ",
    ),
    "a reward and its part": (
        _row(2, lambda row: row.update(reward=1.0, rewards={"digits": 1.0})),
        "completions of step 2 are not those that were recorded (SHA-256)",
    ),
    "a column of the data": (
        _row(2, lambda row: row.update(columns={"answer": "1"})),
        "completions of step 2 are not",
    ),
    "the learner's log-probabilities": (
        _row(2, lambda row: row.update(policy_logprobs=None)),
        "step 2 are not those",
    ),
    "tokens whose weights are gone": (
        _row(2, lambda row: row["completion_ids"].reverse()),
        "completions of step 2 are not those that were recorded",
    ),
    "a row twice": (
        _completions(lambda steps: steps[1].append(steps[1][0])),
        "its samples are [0, 0, 1, 2, 3]",
    ),
    "a row gone": (
        _completions(lambda steps: steps[1].pop()),
        "its samples are [0, 1, 2], and a group has 0 to 3",
    ),
    "a group gone": (
        _completions(lambda steps: steps[1].__delitem__(slice(4))),
        "completions of step 2 are not",
    ),
    "a step twice": (_completions(lambda steps: steps.append(steps[3])), "step 4 is there twice"),
    "a step gone": (_completions(lambda steps: steps.pop(1)), "completions of step 2 are missing"),
    "a step with another number": (_completions(_redate), "completions of step 2 are missing"),
    "steps in another order": (
        _completions(lambda steps: steps.reverse()),
        "step 3 stands after step 4",
    ),
    "a step more": (
        _completions(lambda steps: steps.append([row | {"step": 5} for row in steps[3]])),
        f"step 5 is not in {CERTIFICATE}",
    ),
    "rows that are none": (
        _completions(lambda steps: steps[1].append({"step": 2})),
        "step 2: 'prompt_index'",
    ),
    "a flipped bit": (_flip, "damaged at byte "),
    "bytes cut off": (_cut, "are no whole step"),
    "a metric": (
        _lines("metrics.jsonl", lambda rows: rows[1].update({"reward/mean": 1.0})),
        "the row of step 2 is not",
    ),
    "a row of metrics gone": (
        _lines("metrics.jsonl", lambda rows: rows.pop(0)),
        "the row of step 1 is missing",
    ),
    "the weights of the last step": (
        _weights,
        "step-000004 are not those that the certificate has of step 4",
    ),
    "the last step of all files": (_last_step_gone, f"{CERTIFICATE} has no row of step 4"),
    "a row of the certificate gone": (
        _lines(CERTIFICATE, lambda rows: rows.pop(2)),
        "step 3 does not follow the row before it",
    ),
    "the first rows of the certificate gone": (
        _lines(CERTIFICATE, lambda rows: rows.__delitem__(slice(2))),
        "step 2 does not follow the row before it",
    ),
    "a row of the certificate changed": (
        _lines(CERTIFICATE, lambda rows: rows[2].update(rollouts="0" * 64)),
        "line 3: its hash is not that of what it says",
    ),
    "rows of the certificate exchanged": (
        _lines(CERTIFICATE, _swap),
        "step 3 does not follow the row before it",
    ),
    "the certificate gone": (lambda run: (run / CERTIFICATE).unlink(), f"{CERTIFICATE} is missing"),
    "the certificate computed anew": (
        _signed_again,
        f"has another hash of step 4 than {CERTIFICATE}",
    ),
    "the config": (_other_config, "config.yaml is not the config that step 4 was done with"),
}


def test_what_the_chain_does_not_hold_is_not_said_to_be_held(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Accuracies and times are in no hash, and the verdict says so; `test_each_is_noticed` has the
    metrics that are."""

    def better(rows: list[Row]) -> None:
        rows[2] |= {"accuracy/held_out": 1.0, "time/step": 0.0}

    _lines("metrics.jsonl", better)(run)
    verify_command(run, None)
    said = capsys.readouterr().out
    assert "but for times and evaluations, which it does not hold" in said


def test_the_best_model_is_of_its_step(tmp_path: Path, base_model: Path) -> None:
    """Its weights are those of the chain; the control is the run as it is."""
    evaluation = {"every": 1, "samples": 2}
    train(load_config(write_config(tmp_path, base_model, steps=1, evaluation=evaluation)))
    best = tmp_path / "run" / "best"
    verify_command(tmp_path / "run", 1)
    tensors = load_file(best / "model.safetensors")
    tensors[sorted(tensors)[0]].view(-1)[7] += 1e-7
    save_file(tensors, best / "model.safetensors")
    with pytest.raises(RunFailed, match="best is damaged"):
        verify_command(tmp_path / "run", 1)
    sign(best, "model.safetensors")
    with pytest.raises(RunFailed, match="best are not those that the certificate has of step"):
        verify_command(tmp_path / "run", 1)
    (best / "best.json").write_text('{"step": 7}')
    sign(best, "best.json")
    with pytest.raises(RunFailed, match=f"best is of step 7, of which {CERTIFICATE} has no row"):
        verify_command(tmp_path / "run", 1)


@pytest.mark.parametrize("name", FORGERIES)
def test_each_is_noticed(name: str, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    forge, said = FORGERIES[name]
    forge(run)
    with pytest.raises(RunFailed, match="not what was recorded") as caught:
        verify_command(run, None)
    assert said in capsys.readouterr().out + str(caught.value)


def test_an_untouched_run_passes(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The control. Its lines say how many completions were drawn again, and how many the chain
    alone holds."""
    verify_command(run, None)
    out = capsys.readouterr().out
    assert (
        "certificate: 64 completions, their rewards and the metrics of steps 0 to 4 are as they "
        "were recorded"
    ) in out
    assert "32 of 64 completions were drawn again, and 0 of their " in out
    chain = read_chain(run / CERTIFICATE)
    assert chain is not None
    for step in (2, 4):
        verify_command(run, 4, str(chain.rows[step]["hash"]))


def test_who_rewrites_everything_is_found_by_a_hash_that_was_kept(
    run: Path, base_model: Path, tmp_path: Path
) -> None:
    """Another whole run in its place verifies, as it must; of the hash that the first one printed
    it has none."""
    chain = read_chain(run / CERTIFICATE)
    assert chain is not None
    (tmp_path / "other").mkdir()
    config = write_config(tmp_path / "other", base_model, seed=1, run={"keep_last": 9})
    other = train(load_config(config)).run_dir
    verify_command(other, None)
    with pytest.raises(RunFailed, match=f"no step has the hash {chain.head}"):
        verify_command(other, None, chain.head)


def test_a_resumed_run_continues_the_chain_of_one_that_never_stopped(
    tmp_path: Path, finished: Path, base_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bit for bit; the last hash is printed, and is in the checkpoint."""
    whole = (finished / CERTIFICATE).read_bytes()
    config = load_config(finished / "config.yaml", [f"run.dir={tmp_path}/again", "steps=2"])
    train(config)
    capsys.readouterr()
    resume(tmp_path / "again", ["steps=4", "run.keep_last=3"], quiet=False)
    assert (tmp_path / "again" / CERTIFICATE).read_bytes() == whole
    chain = read_chain(finished / CERTIFICATE)
    assert chain is not None
    assert f"certificate of step 4: {chain.head}" in capsys.readouterr().err
    kept = json.loads(
        (
            tmp_path / "again" / "checkpoints" / "step-000004" / "trainer" / "certificate.json"
        ).read_text()
    )
    assert kept == {"step": 4, "hash": chain.head}
    verify_command(tmp_path / "again", None)


def test_control_another_seed_has_another_chain(finished: Path, tmp_path: Path) -> None:
    train(load_config(finished / "config.yaml", [f"run.dir={tmp_path}/seed", "seed=1", "steps=1"]))
    rows = [
        (each / CERTIFICATE).read_text().splitlines()[0] for each in (finished, tmp_path / "seed")
    ]
    assert json.loads(rows[0])["weights"] == json.loads(rows[1])["weights"]
    assert json.loads(rows[0])["config"] != json.loads(rows[1])["config"]


def test_a_chain_that_is_gone_with_every_trace_is_missed(run: Path) -> None:
    """The control has it: see the first test."""
    (run / CERTIFICATE).unlink()
    for checkpoint in run.glob("checkpoints/*"):
        (checkpoint / "trainer" / "certificate.json").unlink()
        manifest = json.loads((checkpoint / "manifest.json").read_text())
        del manifest["trainer/certificate.json"]
        state = json.loads((checkpoint / "trainer" / "state.json").read_text())
        del state["offsets"][CERTIFICATE]
        (checkpoint / "trainer" / "state.json").write_text(json.dumps(state))
        manifest["trainer/state.json"] = hashlib.sha256(
            (checkpoint / "trainer/state.json").read_bytes()
        ).hexdigest()
        (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(RunFailed, match=r"in 1 places: certificate\.jsonl is missing"):
        verify_command(run, None)


def test_the_hash_of_metrics_has_no_times_and_no_evaluation() -> None:
    row = {
        "step": 1.0,
        "reward/mean": float("nan"),
        "time/step": 2.0,
        "accuracy/held_out": 0.5,
        "memory/peak_rss_mib": 1,
    }
    assert certificate.of_metrics(row) == certificate.of_metrics({"reward/mean": None})
    assert certificate.of_metrics(row) != certificate.of_metrics({"reward/mean": 0.0})
