"""A run directory, and for a seed one file of it damaged and a command called on it."""

import hashlib
import json
import random
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from isobit.config import load_config, load_run_config
from isobit.monitor.report import write_report
from isobit.monitor.screen.watch import watch
from isobit.monitor.trackers.base import Opened, TrackedRun
from isobit.monitor.trackers.follow import STATE, TRACKING, Follower, State
from isobit.run import completions
from isobit.run.directory import require_run
from isobit.training.commands.evaluate import Request, evaluate_command
from isobit.training.commands.export import export
from isobit.training.commands.verify import verify_command
from isobit.training.train import resume, train
from tests.loaders import mutate
from tests.loaders.outcome import put_no_file
from tests.runs import write_config

CHECKPOINT = "checkpoints/step-000002"


class Silent:
    """A tracker that takes everything."""

    def check(self, settings: Mapping[str, Any]) -> None:
        pass

    def open(self, run: TrackedRun) -> Opened:
        return Opened(run.last)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        json.dumps(metrics, allow_nan=False)

    def log_completions(self, step: int, rows: Sequence[Sequence[Any]]) -> None:
        json.dumps(rows)

    def close(self, exit_code: int) -> None:
        pass


def write_valid(folder: Path, model: Path) -> Path:
    """A finished run that has all files that a run can have."""
    folder.mkdir(exist_ok=True)
    evaluation = {"every": 1, "samples": 2}
    config = write_config(
        folder, model, steps=2, run={"keep_last": 2, "checkpoint_every": 1}, evaluation=evaluation
    )
    run = train(load_config(config)).run_dir
    (run / "logs").mkdir()
    beat = {
        "rank": 0,
        "host": "h",
        "pid": 1,
        "step": 1,
        "phase": "learn",
        "since": 1.0,
        "memory_mib": 9,
    }
    for rank in (0, 1):
        (run / "logs" / f"rank-{rank:05d}.json").write_text(json.dumps(beat | {"rank": rank}))
    (run / TRACKING).mkdir()
    kept = {"silent": {"last": 0, "kept": {"id": "a"}}}
    (run / TRACKING / STATE).write_text(json.dumps(kept))
    return run


def _track(run: Path) -> None:
    require_run(run)
    load_run_config(run)
    (run / TRACKING).mkdir(exist_ok=True)
    follower = Follower(Silent(), "silent", run, 4, State(run))
    request = {"project": "p", "name": "n", "group": None, "config": {}, "limit_s": 1.0}
    follower.open(request, {})
    follower.catch_up()


def _report(run: Path) -> None:
    write_report([run], run.parent / "report.html")


def _evaluate(run: Path) -> None:
    evaluate_command(run, None, Request(["evaluation.samples=2"], best=True), None)


def _export(run: Path) -> None:
    shutil.rmtree(run.parent / "exported", ignore_errors=True)
    export(run, run.parent / "exported", "fp32", None)


COMMANDS: dict[str, Callable[[Path], object]] = {
    "watch": lambda run: watch(run, once=True),
    "report": _report,
    "track": _track,
    "resume": lambda run: resume(run, ["run.on_change=warn"]),
    "verify": lambda run: verify_command(run, 4),
    "eval": _evaluate,
    "export": _export,
}
TARGETS: dict[str, tuple[str, ...]] = {
    "metrics.jsonl": ("watch", "report", "track", "resume", "verify"),
    "completions.jsonl.gz": ("watch", "report", "track", "resume", "verify"),
    "quantization.jsonl": ("report", "resume"),
    "certificate.jsonl": ("verify", "resume"),
    "config.yaml": ("watch", "report", "track", "resume", "verify", "eval", "export"),
    "format.txt": ("watch", "report", "track", "resume", "verify", "eval", "export"),
    "machine.json": ("resume", "verify", "eval", "track"),
    "resolved.json": ("resume", "report"),
    "inputs.json": ("resume",),
    "rollouts_from.txt": ("resume", "verify"),
    ".lock": ("watch", "resume", "verify"),
    "logs/rank-00001.json": ("watch",),
    "tracking/state.json": ("track",),
    "best/best.json": ("resume", "eval"),
    f"{CHECKPOINT}/manifest.json": ("resume", "verify", "eval", "export"),
    f"{CHECKPOINT}/trainer/state.json": ("resume",),
    f"{CHECKPOINT}/trainer/certificate.json": ("verify", "resume"),
    f"{CHECKPOINT}/trainer/optimizer.safetensors": ("resume",),
    f"{CHECKPOINT}/tokenizer.json": ("report", "resume"),
}
"""What is damaged, and who reads it."""


def run(folder: Path, seed: int) -> str:
    """Damage a copy as the seed says and call a command; returns what was done. Raises what the
    command raises."""
    rng = random.Random(seed)
    name = rng.choice(list(TARGETS))
    command = rng.choice(TARGETS[name])
    copy = folder / "copy"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(folder / "run", copy / "run")
    _damage(copy / "run" / name, rng)
    if name.startswith(CHECKPOINT) and not name.endswith("manifest.json") and rng.random() < 0.7:
        _sign(copy / "run" / CHECKPOINT, name.removeprefix(f"{CHECKPOINT}/"))
    sys.stderr.flush()
    COMMANDS[command](copy / "run")
    return f"{command} {name}"


def _sign(checkpoint: Path, name: str) -> None:
    """The manifest says that the damaged file is right."""
    if (checkpoint / name).is_file():
        manifest = json.loads((checkpoint / "manifest.json").read_text())
        manifest[name] = hashlib.sha256((checkpoint / name).read_bytes()).hexdigest()
        (checkpoint / "manifest.json").write_text(json.dumps(manifest))


def _damage(file: Path, rng: random.Random) -> None:
    before = file.read_bytes() if file.is_file() else b"/runs/first\n"
    kind = rng.random()
    if kind < 0.15:
        file.unlink(missing_ok=True)
        put_no_file(file, rng)
    elif kind < 0.45 or file.suffix not in (".json", ".jsonl", ".gz", ".yaml"):
        file.write_bytes(mutate.data(before, rng))
    elif file.suffix == ".gz":
        _rows(file, rng)
    elif file.suffix == ".yaml":
        lines = before.decode().splitlines()
        at = rng.randrange(len(lines))
        lines[at] = lines[at].partition(":")[0] + rng.choice(
            (": [", ": 1e999", ": -1", ": ''", ": {a: b}", "", ": null")
        )
        file.write_text("\n".join(lines))
    else:
        lines = before.decode().splitlines() if file.suffix == ".jsonl" else [before.decode()]
        at = rng.randrange(len(lines))
        lines[at] = mutate.dumped(mutate.value(json.loads(lines[at]), rng))
        file.write_text("\n".join(lines) + "\n", encoding="utf-8", errors="surrogatepass")


def _rows(file: Path, rng: random.Random) -> None:
    """One row of completions with another value, packed as a run packs it."""
    steps = [
        [json.loads(line) for line in completions.lines(file, m)] for m in completions.members(file)
    ]
    step = rng.choice(steps)
    at = rng.randrange(len(step))
    step[at] = json.loads(json.dumps(mutate.value(step[at], rng)))
    file.write_bytes(b"".join(map(completions.pack, steps)))
