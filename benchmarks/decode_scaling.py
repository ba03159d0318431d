"""What decoding 64 completions costs beside 64 times decoding one: how far the engine shares the reading of weights.

Hidden 512, 8 layers; one prompt of 32 tokens, 32 new tokens each.
"""

import tempfile
from pathlib import Path

import torch

from benchmarks.common import Claim, Result, race
from benchmarks.models import save_model
from isobit import Engine, Model, Sampling
from isobit.engine.types import EngineSize

PROMPT, NEW = 32, 32


def run(rounds: int) -> Result:
    result = Result("decode_scaling")
    prompt = torch.randint(10, 60, (1, PROMPT)).tolist()
    with tempfile.TemporaryDirectory() as folder:
        path = save_model(Path(folder) / "model", 512, 8, 4096)
        for precision in ("fp8", "bf16"):
            engine = Engine.sized_for(Model.load(path, precision), prompt, 64, NEW, EngineSize(prefix_cache=False))
            cases = {
                f"{precision}, {n} completions": (
                    lambda engine=engine, n=n: engine.generate(prompt, Sampling(n, NEW, ignore_eos=True))
                )
                for n in (1, 64)
            }
            result.rows += race("one prompt", cases, rounds)
            ratio = result.median(f"{precision}, 64 completions") / (64 * result.median(f"{precision}, 1 completions"))
            result.claims.append(Claim(f"{precision}: 64 completions over 64 times one", ratio, "<=", 0.2))
    return result
