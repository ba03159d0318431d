"""Small training runs for the tests: a config in a file, and what of a finished run must repeat."""

import hashlib
import json
import time
from pathlib import Path
from typing import Any

import yaml

from isobit.config import Config
from isobit.run import metrics
from isobit.run.checkpoints import all_checkpoints
from isobit.run.completions import COMPLETIONS
from isobit.run.directory import METRICS, QUANTIZATION, read_jsonl
from isobit.training.commands.dry_run import dry_run
from tests import warm
from tests.until import until


def write_config(folder: Path, model: Path, **changes: Any) -> Path:
    """A run of a few steps on one-digit additions, in `folder / "run"`."""
    values: dict[str, Any] = {
        "model": {"path": str(model)},
        "task": {
            "name": "arithmetic",
            "held_out_size": 8,
            "options": {"digits": 1, "train_size": 60},
        },
        "prompts_per_step": 4,
        "sampling": {"group_size": 4, "max_new_tokens": 3},
        "optimizer": {"learning_rate": 1e-3},
        "run": {"dir": str(folder / "run"), "checkpoint_every": 2, "report": False},
        "steps": 4,
        "rewards": {"functions": [{"function": f"{digit_reward_file(folder)}:digits"}]},
    }
    for key, value in changes.items():
        values[key] = (
            {**values[key], **value}
            if isinstance(value, dict) and isinstance(values.get(key), dict)
            else value
        )
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def digit_reward_file(folder: Path) -> Path:
    """A reward that a random model can earn: the share of digits above 4 in the completion."""
    path = folder / "digit_reward.py"
    path.write_text(
        "def digits(prompts, completions, **columns):\n"
        "    return [sum(c in '56789' for c in text) / 3 for text in completions]\n"
    )
    return path


def fingerprint(run: Path) -> dict[str, Any]:
    """Weights (as `model.safetensors`, also where they are an adapter's), optimizer, all else of
    the last checkpoint, metrics without timings, completions, and the best model where one is kept:
    what an exact repetition has in common."""
    newest = all_checkpoints(run / "checkpoints")[-1]
    files = {
        name: newest / name
        for name in ("model.safetensors", "trainer/optimizer.safetensors", "manifest.json")
    }
    if (newest / "adapter_model.safetensors").is_file():
        files["model.safetensors"] = newest / "adapter_model.safetensors"
    hashes = {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in files.items()}
    manifest = json.loads(files["manifest.json"].read_text())
    manifest.pop(
        "trainer/certificate.json", None
    )  # which also depends on the config's words, such as paths
    hashes["manifest.json"] = json.dumps(manifest)
    rows = [
        {k: v for k, v in row.items() if not metrics.is_timing(k)}
        for row in read_jsonl(run / "metrics.jsonl")
    ]
    lines = {"completions": COMPLETIONS, "quantization": QUANTIZATION}
    hashes |= {
        name: hashlib.sha256((run / file).read_bytes()).hexdigest() for name, file in lines.items()
    }
    kept = [(run / "best" / name) for name in ("best.json", "model.safetensors")]
    best = [hashlib.sha256(path.read_bytes()).hexdigest() for path in kept if path.is_file()]
    return {"step": newest.name, **hashes, "metrics": json.dumps(rows), "best": best}


def without_memory(found: dict[str, Any]) -> dict[str, Any]:
    """A fingerprint without the memory of its ranks, which share what one rank has alone."""
    rows = json.loads(found["metrics"])
    kept = [{k: v for k, v in row.items() if not k.startswith("memory/")} for row in rows]
    return {**found, "metrics": json.dumps(kept)}


def wait_for_lines(path: Path, count: int) -> None:
    """Until a file that another process writes has so many."""
    until(lambda: path.is_file() and path.read_bytes().count(b"\n") >= count)


def killed_after(process: warm.Process, run: Path, rows: int, seconds: float = 0.0) -> int:
    """The exit code of a run that is sent SIGKILL once its metrics have so many rows, and so many
    seconds later."""
    wait_for_lines(run / METRICS, rows)
    time.sleep(seconds)
    process.kill()
    return process.wait().returncode


def dry_run_text(config: Config) -> str:
    """What `isobit train --dry-run` prints."""
    blocks: list[str] = []
    dry_run(config, blocks.append)
    return "\n".join(blocks)
