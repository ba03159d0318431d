"""Seconds of a step of a model of Qwen3-0.6B's shape: 16 completions of 16 tokens, of two prompts, by level.

Hidden 1024, 28 layers, MLP 3072, 16 query and 8 key heads of 128, vocabulary 151,936, tied. It takes about 14 GiB of
memory and minutes a step, so contestants take turns of one step, each in a process of its own, and `--rounds` counts
those. A process makes two steps, of which the second is counted. `exact` is what 0.1.0 computed: it shares no prompts.
"""

import json
import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

import torch

from benchmarks.common import Claim, Result, row
from benchmarks.models import tokenizer
from benchmarks.steps import open_run
from isobit import Model
from isobit.model import ModelConfig
from isobit.run.directory import read_jsonl
from isobit.training.loop import training_step

PROMPTS, NEW = 2, 16
LEVELS = ("exact", "bitwise", "fast")
PHASES = ("rollout", "learn", "sync")


def run(rounds: int) -> Result:
    result = Result("large_model")
    seconds: dict[tuple[str, str], list[float]] = {}
    with tempfile.TemporaryDirectory() as name:
        model = _save(Path(name) / "model")
        for turn in range(rounds):
            for level in LEVELS:
                folder = Path(name) / f"{turn} {level}"
                folder.mkdir()
                given = [sys.executable, "-m", "benchmarks.large_model", str(folder), str(model), level]
                subprocess.run([*given, str(torch.get_num_threads())], check=True)
                for phase, found in json.loads((folder / "seconds.json").read_text()).items():
                    seconds.setdefault((phase, level), []).append(found)
    for (phase, level), samples in seconds.items():
        result.rows.append(row(phase, level, samples))
    for phase in ("rollout", "learn"):
        ratio = statistics.median(seconds[phase, "exact"]) / statistics.median(seconds[phase, "bitwise"])
        result.claims.append(Claim(f"{phase}: exact over bitwise", ratio, ">=", 5.0))
    return result


def _save(directory: Path) -> Path:
    known = tokenizer()
    config = ModelConfig(
        family="qwen3", vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_layers=28, num_heads=16,
        num_kv_heads=8, head_dim=128, qk_norm=True, tie_embeddings=True, max_positions=512, eos_ids=known.eos_ids,
    )  # fmt: skip
    Model.init(config, known, "float32", seed=0).save(directory, torch.bfloat16)
    return directory


def _measure(folder: Path, model: Path, level: str) -> None:
    with ExitStack() as stack:
        changes = ("optimizer.share_prompts=false",) if level == "exact" else ()
        given = {"prompts": PROMPTS, "new": NEW, "reward": "in_turn", "changes": changes}
        session = open_run(folder, model, "fp8", stack, level, **given)  # type: ignore[arg-type]
        training_step(session)
        training_step(session)
    (path,) = folder.glob("*/metrics.jsonl")
    last = list(read_jsonl(path))[-1]
    (folder / "seconds.json").write_text(json.dumps({phase: last[f"time/{phase}"] for phase in PHASES}))


if __name__ == "__main__":
    torch.set_num_threads(int(sys.argv[4]))
    _measure(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
