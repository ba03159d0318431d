"""A supervised run is a run: its directory, its metrics, and the one that is killed and goes on ends
as the one that was never stopped."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml

from isobit.config import load_config, load_sft_config
from isobit.errors import IsobitError
from isobit.model import Model
from isobit.run.checkpoints import all_checkpoints
from isobit.run.directory import require_run
from isobit.training.loop import training_loop
from isobit.training.train import open_resumed, open_run, resume, train, train_supervised
from tests import warm
from tests.distributed.threads import run as on_ranks
from tests.runs import fingerprint, killed_after, without_memory, write_config

STEPS = 6


def written(folder: Path, model: Path | None = None, **changes: Any) -> Path:
    """A supervised run of a few steps on one-digit additions, in `folder / "run"`."""
    init = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_layers": 2,
        "num_heads": 2,
        "max_positions": 32,
    }
    values: dict[str, Any] = {
        "model": {"init": init} if model is None else {"path": str(model)},
        "task": {
            "name": "arithmetic",
            "held_out_size": 8,
            "options": {"digits": 1, "train_size": 60},
        },
        "steps": STEPS,
        "batch_size": 7,
        "max_new_tokens": 3,
        "optimizer": {"learning_rate": 5e-3, "warmup_steps": 2, "micro_batch_tokens": 24},
        "evaluation": {"every": 3},
        "run": {"dir": str(folder / "run"), "checkpoint_every": 2, "report": False},
        **changes,
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "sft.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    path = written(tmp_path_factory.mktemp("unbroken"))
    found = train_supervised(load_sft_config(path, ["run.report=true"]), quiet=True)
    return found.run_dir, fingerprint(found.run_dir)


def test_what_a_run_leaves(unbroken: tuple[Path, dict[str, Any]]) -> None:
    directory, _ = unbroken
    require_run(directory)
    assert [path.name for path in all_checkpoints(directory / "checkpoints")] == [
        "step-000004",
        "step-000006",
    ]
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(STEPS + 1))
    assert [row["step"] for row in rows if "loss/held_out" in row] == [0, 3, 6]
    assert [row["step"] for row in rows if "accuracy/held_out" in row] == [0, 3, 6]
    assert rows[-1]["loss/cross_entropy"] < rows[1]["loss/cross_entropy"] - 0.3
    assert rows[-1]["loss/held_out"] < rows[0]["loss/held_out"] - 0.3
    assert not {"reward/mean", "loss/policy", "clip_fraction"} & rows[1].keys()
    assert rows[-1]["prompts/consumed"] == 7 * STEPS
    page = (directory / "report.html").read_text()
    assert "loss, first step" in page
    assert "cross_entropy" in page
    chain = (directory / "certificate.jsonl").read_text().splitlines()
    assert len(chain) == STEPS + 1


def test_the_held_out_loss_is_that_of_the_answers(unbroken: tuple[Path, dict[str, Any]]) -> None:
    """Of the saved weights, token by token; the control leaves the end of the answers out."""
    directory, _ = unbroken
    (newest,) = all_checkpoints(directory / "checkpoints")[-1:]
    model = Model.load(newest, "fp8")
    with open_resumed(directory, (), quiet=True) as run:
        assert run.parts.held_out is not None
        examples = run.parts.held_out._asked.examples
    losses = []
    for example in examples:
        prompt = model.tokenizer.encode(example.prompt)
        answer = model.tokenizer.encode(str(example.columns["answer"]), add_special=False)
        (row,) = model.logprobs([[*prompt, *answer, *model.tokenizer.eos_ids]])
        losses.append(-row[-len(answer) - 1 :])
    flat = [float(value) for row in losses for value in row]
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["loss/held_out"] == pytest.approx(sum(flat) / len(flat), rel=1e-6)
    short = [float(value) for row in losses for value in row[:-1]]
    assert rows[-1]["loss/held_out"] != pytest.approx(sum(short) / len(short), rel=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 4, 6])
def test_killed_it_goes_on_as_if_never_stopped(
    tmp_path: Path, unbroken: tuple[Path, dict[str, Any]], rows: int
) -> None:
    """SIGKILL after so many rows of metrics; by the command, whichever of the two is asked."""
    path = written(tmp_path)
    process = warm.start(["isobit", "sft", str(path), "--quiet"], tmp_path)
    assert killed_after(process, tmp_path / "run", rows) != 0
    again = "train" if rows == 4 else "sft"
    ended = warm.start(["isobit", again, "--resume", "run", "--quiet"], tmp_path).wait()
    assert ended.returncode == 0, ended.stderr
    assert fingerprint(tmp_path / "run") == unbroken[1]


@pytest.mark.slow
def test_a_run_of_another_seed_or_that_skips_an_example_is_another(
    tmp_path: Path, unbroken: tuple[Path, dict[str, Any]]
) -> None:
    """The controls of the fingerprint; the second goes on from a cursor that is one too far."""
    other = train_supervised(load_sft_config(written(tmp_path), ["seed=1"]), quiet=True)
    assert fingerprint(other.run_dir)["model.safetensors"] != unbroken[1]["model.safetensors"]
    path = written(tmp_path / "skipped")
    train_supervised(load_sft_config(path, ["steps=3"]), quiet=True)
    with open_resumed(tmp_path / "skipped" / "run", ["steps=6"], quiet=True) as run:
        run.state.cursor += 1
        training_loop(run)
        run.finish()
    found = fingerprint(tmp_path / "skipped" / "run")
    assert found["model.safetensors"] != unbroken[1]["model.safetensors"]


def test_a_run_that_is_extended_is_one_that_was_planned_longer(
    tmp_path: Path, unbroken: tuple[Path, dict[str, Any]]
) -> None:
    train_supervised(load_sft_config(written(tmp_path), ["steps=4"]), quiet=True)
    found = resume(tmp_path / "run", ["steps=6"], quiet=True)
    assert found.exit_code == 0
    assert fingerprint(tmp_path / "run") == unbroken[1]
    again = resume(tmp_path / "run", quiet=True)  # which has finished
    assert fingerprint(again.run_dir) == unbroken[1]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_it_saves_and_goes_on(
    tmp_path: Path, unbroken: tuple[Path, dict[str, Any]], number: signal.Signals
) -> None:
    with open_run(load_sft_config(written(tmp_path)), quiet=True) as run:
        learn = run.learning.learn

        def interrupted(*given: Any) -> Any:
            if run.state.step == 2:
                os.kill(os.getpid(), number)
            return learn(*given)

        run.learning.learn = interrupted  # type: ignore[method-assign]
        training_loop(run)
        run.finish()
        assert run.interruption.exit_code == 128 + number
        assert run.state.step == 3
    assert resume(tmp_path / "run", quiet=True).exit_code == 0
    assert fingerprint(tmp_path / "run") == unbroken[1]


@pytest.mark.slow
def test_ranks_train_the_same_bits(tmp_path: Path, unbroken: tuple[Path, dict[str, Any]]) -> None:
    """Two of them; and one that goes on where two stopped."""

    config = load_sft_config(written(tmp_path), ["steps=3"])

    def part(ranks: Any) -> None:
        with open_run(config, quiet=True, ranks=ranks) as run:
            training_loop(run)
            run.finish()

    on_ranks(2, part)
    resume(tmp_path / "run", ["steps=6", "ranks=1"], quiet=True)
    found, wanted = fingerprint(tmp_path / "run"), unbroken[1]
    for name in ("model.safetensors", "trainer/optimizer.safetensors", "step", "quantization"):
        assert found[name] == wanted[name]


@pytest.mark.slow
def test_ranks_that_the_command_starts_train_the_same_bits(
    tmp_path: Path, unbroken: tuple[Path, dict[str, Any]]
) -> None:
    """Two processes; a checkpoint of theirs is gone on from by one, and by two again."""
    path = written(tmp_path)
    for words in (
        [str(path), "ranks=2", "steps=2"],
        ["--resume", "run", "steps=4", "ranks=1"],
        ["--resume", "run", "steps=6", "ranks=2"],
    ):
        ended = warm.start(["isobit", "sft", *words, "--quiet"], tmp_path).wait()
        assert ended.returncode == 0, ended.stderr
    found, wanted = fingerprint(tmp_path / "run"), unbroken[1]
    assert without_memory(found) == without_memory(wanted)


@pytest.mark.slow
def test_an_adapter_is_saved_and_goes_on(tmp_path: Path, base_model: Path) -> None:
    given = {"adapter": {"rank": 2}, "steps": 4}
    whole = train_supervised(load_sft_config(written(tmp_path / "a", base_model, **given)))
    train_supervised(load_sft_config(written(tmp_path / "b", base_model, **given), ["steps=2"]))
    resume(tmp_path / "b" / "run", ["steps=4"])
    assert fingerprint(tmp_path / "b" / "run") == fingerprint(whole.run_dir)
    newest = all_checkpoints(whole.run_dir / "checkpoints")[-1]
    assert (newest / "adapter_config.json").is_file()


def test_a_run_is_the_model_of_another(
    tmp_path: Path, unbroken: tuple[Path, dict[str, Any]]
) -> None:
    """Of its newest checkpoint, which is that whose loss went on falling."""
    directory, _ = unbroken
    path = write_config(tmp_path, directory, steps=1)
    found = train(load_config(path), quiet=True)
    assert found.metrics[-1]["mismatch/differing_tokens"] == 0
    more = train_supervised(load_sft_config(written(tmp_path / "more", directory)), quiet=True)
    last = json.loads((directory / "metrics.jsonl").read_text().splitlines()[-1])
    assert more.metrics[0]["loss/held_out"] == last["loss/held_out"]


@pytest.mark.slow
def test_what_cannot_go_on_is_refused(
    tmp_path: Path, base_model: Path, unbroken: tuple[Path, dict[str, Any]]
) -> None:
    directory, _ = unbroken
    with pytest.raises(IsobitError, match="a resumed run repeats its own config"):
        resume(directory, ["batch_size=3"])
    with pytest.raises(IsobitError, match=r"exists and is a run; .* go on with it"):
        train_supervised(load_sft_config(written(tmp_path), [f"run.dir={directory}"]))
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1+1=", "completion": "2"}\n' * 3)
    task = {"path": str(rows), "held_out_size": 0}
    path = written(tmp_path, base_model, task=task, evaluation={}, steps=2)
    train_supervised(load_sft_config(path), quiet=True)
    rows.write_text('{"prompt": "1+1=", "completion": "3"}\n' * 3)
    with pytest.raises(IsobitError, match=r"changed since the run began: task\.path"):
        resume(tmp_path / "run", ["steps=3"])
    where = {"dir": str(tmp_path / "rl")}
    path = write_config(tmp_path, base_model, steps=1, run=where)
    train(load_config(path), quiet=True)
    ended = warm.start(["isobit", "sft", "--resume", "rl"], tmp_path).wait()
    assert ended.returncode == 2, ended.stderr
    assert "rl is a run of `isobit train`; go on with: isobit train --resume rl" in ended.stderr


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({"rewards": [len]}, "rewards"),
        ({"data": [{"prompt": "1+1=", "answer": "2"}]}, "data"),
        ({"held_out": []}, "held_out"),
        ({"callbacks": [print]}, "callbacks"),
        ({"callbacks": print}, "callbacks"),
        ({"measures": [max]}, "measures"),
    ],
)
def test_a_supervised_run_takes_no_objects(
    unbroken: tuple[Path, dict[str, Any]], given: dict[str, Any], what: str
) -> None:
    """They would be without effect; the control gives none."""
    directory, bits = unbroken
    with pytest.raises(IsobitError, match=f"^{what}: .* takes no objects of Python; leave {what}"):
        resume(directory, **given)
    empty: dict[str, Any] = {"rewards": (), "callbacks": [], "measures": ()}
    resume(directory, **empty, quiet=True)
    assert fingerprint(directory) == bits
