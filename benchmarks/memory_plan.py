"""The memory that is planned beside the most that the run then takes: two steps of GRPO in a
process of its own.

    python -m benchmarks memory_plan

The peak is that of the resident memory, as the system counts it for a process: without what is
allocated and stays zero, such as most of an embedding's gradient. What is allocated is held to a
tenth by `tests/plan/test_against_runs.py`. Three random models of Qwen3's form with tied heads; the
largest has the sizes of Qwen3-0.6B, wants 16 GB and some minutes, and is left out where the machine
has less.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import yaml

from benchmarks.common import Claim, Result
from isobit.config import load_config
from isobit.engine.memory import memory_limit
from isobit.kernels import get_ops
from isobit.training.plan import job_of, plan
from isobit.training.plan.host import this_machine

SIZES = {
    "16 million": (6, 384, 1024, 16384, 100),
    "77 million": (12, 640, 1792, 32768, 24),
    "0.6 billion": (28, 1024, 3072, 151936, 8),
    "77 million, entropy bonus": (12, 640, 1792, 32768, 24),
}
"""Name to layers, hidden, intermediate, vocabulary, and new tokens of a completion."""
MICRO_BATCH = 1024
_NEEDS = 18 << 30
_PROMPT = 4  # tokens: two digits, a sign and =


def run(rounds: int) -> Result:
    result = Result("memory_plan")
    for name in SIZES:
        if name == "0.6 billion" and memory_limit(torch.device("cpu"))[0] < _NEEDS:
            continue
        with tempfile.TemporaryDirectory() as folder:
            planned, peak = compare(Path(folder), name)
        ratio = max(planned, peak) / min(planned, peak)
        what = (
            f"{name}: {planned >> 20} MiB planned, {peak >> 20} MiB measured, the larger "
            "over the smaller"
        )
        result.claims.append(Claim(what, ratio, "<=", 1.15))
    return result


def compare(folder: Path, name: str) -> tuple[int, int]:
    """(planned, measured) bytes."""
    _child(folder, "save", name)
    config = written(folder, SIZES[name][-1], 0.01 if "entropy" in name else 0.0)
    return _planned(config), _child(folder, "train", str(config))[1]


def _planned(path: Path) -> int:
    """Bytes; prompts have some tokens."""
    config = load_config(path)
    return plan(job_of(config, this_machine(get_ops()), _PROMPT)).total


def written(folder: Path, new: int, entropy: float = 0.0) -> Path:
    (folder / "reward.py").write_text(
        "def digits(prompts, completions, **columns):\n"
        "    return [float(sum(c in '56789' for c in text)) for text in completions]\n"
    )
    values = {
        "model": {"path": str(folder / "model")},
        "task": {
            "name": "arithmetic",
            "held_out_size": 0,
            "options": {"digits": 1, "train_size": 60},
        },
        "prompts_per_step": 4,
        "sampling": {"group_size": 4, "max_new_tokens": new, "ignore_eos": True},
        "optimizer": {"learning_rate": 1e-5, "micro_batch_tokens": MICRO_BATCH},
        "algorithm": {"entropy_coefficient": entropy},
        "run": {"dir": str(folder / "run"), "checkpoint_every": 0, "report": False},
        "rewards": {"functions": [{"function": f"{folder / 'reward.py'}:digits"}]},
        "steps": 2,
    }
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def _child(folder: Path, *words: str) -> tuple[str, int]:
    """(the last line that it prints, its peak of resident memory in bytes) of a process."""
    output = folder / "output"
    with output.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.memory_plan", str(folder), *words], stdout=file
        )
        _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{words[0]} failed")
    return (output.read_text().splitlines() or [""])[-1], usage.ru_maxrss * 1024


def _save(folder: Path, name: str) -> None:
    from isobit import Model
    from isobit.model import ModelConfig, Tokenizer

    layers, hidden, inner, vocabulary, _ = SIZES[name]
    alphabet = "0123456789+-= " + "".join(chr(0x20000 + i) for i in range(vocabulary - 40))
    config = ModelConfig(
        family="qwen3",
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=inner,
        num_layers=layers,
        num_heads=hidden // 64,
        num_kv_heads=hidden // 128,
        head_dim=128 if hidden == 1024 else 64,
        qk_norm=True,
        tie_embeddings=True,
        max_positions=4096,
        eos_ids=(0,),
    )
    Model.init(config, Tokenizer.characters(alphabet), "bf16").save(folder / "model")


def main() -> None:
    torch.set_num_threads(1)
    folder, verb, argument = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    if verb == "save":
        _save(folder, argument)
        return
    from isobit.training.train import train

    train(load_config(argument), quiet=True)


if __name__ == "__main__":
    main()
