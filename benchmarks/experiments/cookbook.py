"""Which recipes of tinker-cookbook run against `isobit serve --train`, unmodified, and how far
sampling and training are apart in them.

Each recipe of `examples/cookbook.py` has some steps on a server of its own. What it logs is kept,
and makes the table of docs/experiments/cookbook.md: `kl_sample_train` is the cookbook's mean
difference between a sampled token's log-probability in sampling and in training.

    python -m benchmarks.experiments.cookbook MODEL --reader READER --python PYTHON --out FILE

PYTHON is an interpreter that has tinker-cookbook; READER is a model that calls tools, for
`rl_numerics_check`. A recipe that FILE has already is not run again. Left out: whether a recipe
learns, which models as small as these do not show.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.common import machine
from benchmarks.experiments.command import command, write

ROOT = Path(__file__).resolve().parents[2]
KL = ("optim/kl_sample_train_v1", "optim/kl_sample_train_v2")
TOLD = {
    "env/all/reward/total": "reward",
    "env/all/turns_per_episode": "turns",
    "train_mean_nll": "loss",
    "dpo_loss": "loss",
    "margin": "margin to the sampled reference",
    "teacher_kl": "KL to the teacher",
    "sdft/mean_teacher_entropy": "entropy of the teacher",
}
"""What the table calls the metrics that it shows."""
RECIPES: Mapping[str, tuple[str, str]] = {
    "math_rl": ("`math_rl`, `env=arithmetic`", "its own additions"),
    "numerics": ("`rl_numerics_check`, pages read with a tool", "a text as its corpus"),
    "guess_number": ("`multiplayer_rl.guess_number`", ""),
    "twenty_questions": (
        "`multiplayer_rl.twenty_questions`",
        "the base model as the other player",
    ),
    "text_arena": ("`multiplayer_rl.text_arena`, tic-tac-toe", "a random opponent for tests"),
    "shorter": ("`preference.shorter`", ""),
    "rubric": ("`rubric`", "rows; the base model marks"),
    "distillation": (
        "`distillation`, on-policy",
        "prompts; an adapter that was trained before as the teacher",
    ),
    "sdft": ("`sdft`", "rows; its teacher is the base model"),
    "chat_sl": ("`chat_sl`, supervised", "conversations"),
    "dpo": ("`preference.dpo`", "eight comparisons, the same in each step"),
}
"""Those of `examples/cookbook.py`: their names in the cookbook, and what they are given."""
_LINE = re.compile(r"^(\S+): (\S+) to (\S+), 0\.0 in (\d+) of (\d+)$", re.M)
Found = dict[str, Any]


@contextmanager
def server(model: Path, folder: Path) -> Iterator[str]:
    """The address of a server that trains adapters of a model."""
    words = ["--train", "--state", folder / "state", "--token", folder / "token", "--port", 0]
    given = [sys.executable, "-m", "isobit", "serve", model, *words]
    process = subprocess.Popen(list(map(str, given)), stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        yield process.stderr.readline().split()[-1]
    finally:
        process.terminate()
        process.communicate()


def run(recipe: str, model: Path, python: Path, steps: int) -> Found:
    """What a recipe has logged: by metric its first value, its last, in how many steps it was
    exactly 0.0, and in how many there was one."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with server(model, folder) as url:
            began = time.monotonic()
            words = [python, ROOT / "examples" / "cookbook.py", recipe, url, folder / "token"]
            given = [*words, model, steps]
            done = subprocess.run(
                list(map(str, given)), capture_output=True, text=True, check=False, cwd=folder
            )
            took = time.monotonic() - began
    if done.returncode:
        raise SystemExit(f"{recipe}: {done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    metrics = {
        name: {"first": float(first), "last": float(last), "zeros": int(zeros), "of": int(of)}
        for name, first, last, zeros, of in _LINE.findall(done.stdout)
    }
    return {"steps": steps, "seconds": round(took, 1), "metrics": metrics}


def versions(python: Path) -> dict[str, str]:
    """Of the cookbook and the client."""
    code = "from importlib.metadata import version as v; print(v('tinker-cookbook'), v('tinker'))"
    printed = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    cookbook, tinker = printed.stdout.split()
    return {"tinker-cookbook": cookbook, "tinker": tinker}


def table(found: Found) -> str:
    """The page's table."""
    lines = [
        "| recipe | given to it | steps | `kl_sample_train` | what else it logged |",
        "|---|---|---|---|---|",
    ]
    for recipe, (title, given) in RECIPES.items():
        if recipe not in found["recipes"]:
            continue
        one = found["recipes"][recipe]
        metrics = one["metrics"]
        kinds = [metrics[name] for name in KL if name in metrics]
        shown = "not logged"
        if kinds:
            zeros, of = min(kind["zeros"] for kind in kinds), kinds[0]["of"]
            shown = f"0.0 in {zeros} of {of}"
        said = "; ".join(
            f"{called} {metrics[name]['first']:.3g} to {metrics[name]['last']:.3g}"
            for name, called in TOLD.items()
            if name in metrics and _tells(metrics[name])
        )
        lines.append(f"| {title} | {given} | {one['steps']} | {shown} | {said} |")
    return "\n".join(lines)


def _tells(metric: Mapping[str, float]) -> bool:
    """Whether a metric was more than 0, or one turn, in every step."""
    return metric["zeros"] < metric["of"] and (metric["first"], metric["last"]) != (1, 1)


def main() -> None:
    """Run what is asked for, and keep it."""
    parser = command(__file__, __doc__)
    parser.add_argument("model", type=Path, help="a model directory")
    parser.add_argument("--reader", type=Path, help="a model that calls tools")
    parser.add_argument("--python", type=Path, default=Path(sys.executable))
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--recipe", action="append", choices=list(RECIPES), help="default: all")
    given = parser.parse_args()
    os.environ |= {"TINKER_TELEMETRY": "0", "HF_HUB_OFFLINE": "1"}
    found: Found = {"recipes": {}}
    if given.out.exists():
        found = json.loads(given.out.read_text())
    for recipe in given.recipe or RECIPES:
        model = given.reader if recipe == "numerics" else given.model
        if recipe in found["recipes"] or model is None:
            continue
        found["recipes"][recipe] = run(
            recipe, model.resolve(), given.python.absolute(), given.steps
        )
        found |= {"machine": machine(), "versions": versions(given.python)}
        write(given.out, found)
    print(table(found))


if __name__ == "__main__":
    main()
