"""Seconds of a step of every preset that `configs/compare-recipes.yaml` compares, over as many steps of `fp8` alone.

The steps of the benchmarks, presets in turns: what `isobit compare` costs beyond running one preset as often. Under two
engines the learner also scores the rollout's tokens before it learns, which it need not do under a unified flow.
"""

import tempfile
from contextlib import ExitStack
from pathlib import Path

import yaml

from benchmarks.common import Claim, Result, race
from benchmarks.models import save_model
from benchmarks.steps import GROUP, NEW, PROMPTS, open_step

CONFIG = Path(__file__).resolve().parent.parent / "configs" / "compare-recipes.yaml"


def run(rounds: int) -> Result:
    result = Result("compare_presets")
    presets = yaml.safe_load(CONFIG.read_text(encoding="utf-8"))["presets"]
    completions = PROMPTS * GROUP
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        model = save_model(folder / "model", 128, 4, 64, 64)
        steps = {preset: open_step(folder, model, preset, stack) for preset in presets}
        case = f"{completions} completions x {NEW} tokens"
        result.rows += race(case, steps, rounds, warmup=2, amount=completions, unit="completions")
    all_of_them = sum(row.median_s for row in result.rows)
    ratio = all_of_them / (len(presets) * result.median("fp8"))
    what = f"seconds of a step of each of {len(presets)} presets over {len(presets)} of fp8"
    result.claims.append(Claim(what, ratio, "<=", 1.5))
    return result
