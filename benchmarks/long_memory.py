"""What a step of GRPO holds as its completions grow from 2,048 to 32,768 tokens: bytes per token stay what they are.

    python -m benchmarks long_memory

Counted, not timed: every storage of PyTorch's operators (`isobit.plan.live_bytes`), by phase of a step; what
Python and numpy allocate in the rollout, by `tracemalloc`, which is the engine's bookkeeping; and what the recorded
forward keeps (`saved_bytes`). One prompt, two completions, two layers, learned from in one micro-batch. A claim is
about growth: bytes of the tokens that were added from one length to the next, the most over those from 2,048 to 4,096.
A mask or a matrix of scores would make it double with every length.
"""

import tempfile
import tracemalloc
from itertools import pairwise
from pathlib import Path

import yaml

from benchmarks import rewards
from benchmarks.common import Claim, Result
from benchmarks.long_completions import long_model
from benchmarks.saved_bytes import saved
from isobit import Engine, Sampling
from isobit.config import load_config
from isobit.plan.live_bytes import LiveBytes
from isobit.training.loop import training_step
from isobit.training.objects import NO_OBJECTS
from isobit.training.session.opening import open_session

LENGTHS = (2048, 4096, 8192, 16384, 32768)
PRESETS = ("fp8", "bf16")
_SAMPLES, _LAYERS = 2, 2
_PROMPT = 8
"""At least the tokens of a prompt, the first one included."""


def run(rounds: int) -> Result:
    result = Result("long_memory")
    with tempfile.TemporaryDirectory() as name:
        for preset in PRESETS:
            found = {length: _bytes(Path(name), preset, length) for length in LENGTHS}
            for length, parts in found.items():
                result.parts[f"{preset}, {length:,} tokens"] = parts
            for part in found[LENGTHS[0]]:
                added = [(found[long][part] - found[short][part]) / (long - short) for short, long in pairwise(LENGTHS)]
                what = f"{preset}, {part}: bytes of an added token, the most over those of the first added"
                result.claims.append(Claim(what, max(added) / added[0], "<=", 1.05))
    return result


def _bytes(folder: Path, preset: str, length: int) -> dict[str, float]:
    model = long_model("native", preset, length, _LAYERS)
    model.save(folder / f"{preset}-{length}")
    kept = float(sum(saved(model, length).values()))
    pages, held, most = _step(folder, preset, length)
    return {
        "pages of the rollout": pages,
        "bookkeeping of the rollout": _bookkeeping(model, length),
        "kept for the backward, one sequence": kept,
        "held between steps": held,
        "besides, at the most": most,
    }


def _bookkeeping(model, length: int) -> float:  # type: ignore[no-untyped-def]
    """The most that Python and numpy hold while two completions are sampled."""
    engine = Engine(model, kv_pages=_SAMPLES * (length // 16) + 2, page_size=16)
    sampling = Sampling(n=_SAMPLES, max_new_tokens=length - _PROMPT, ignore_eos=True)
    tracemalloc.start()
    try:
        engine.generate([[3] * _PROMPT], sampling)
        return float(tracemalloc.get_traced_memory()[1])
    finally:
        tracemalloc.stop()


def _step(folder: Path, preset: str, length: int) -> tuple[float, float, float]:
    """Bytes of keys and values, of all that a run holds after its first step, and of what that took besides."""
    path = folder / f"{preset}-{length}.yaml"
    values = {
        "model": {"path": str(folder / f"{preset}-{length}")},
        "precision": preset,
        "task": {"name": "arithmetic", "held_out_size": 0, "options": {"digits": 1, "train_size": 60}},
        "prompts_per_step": 1,
        "sampling": {"group_size": _SAMPLES, "max_new_tokens": length - _PROMPT, "ignore_eos": True},
        "optimizer": {"learning_rate": 1e-5, "micro_batch_tokens": _SAMPLES * length},
        "run": {"dir": str(folder / path.stem / "run"), "checkpoint_every": 0, "report": False},
        "rewards": {"functions": [{"function": f"{rewards.__file__}:in_turn"}]},
        "steps": 1,
    }
    path.write_text(yaml.safe_dump(values))
    with LiveBytes() as live, open_session(load_config(path), NO_OBJECTS, quiet=True) as session:
        training_step(session)
        return float(session.parts.kv_bytes), float(live.live), float(live.take() - live.live)
