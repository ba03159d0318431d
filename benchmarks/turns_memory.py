"""Memory of 1,000 conversations that are open at once, by how many turns they have had.

250 prompts x 4 episodes on a random model (hidden 64, 2 layers) under `fp8`, with environments in
two worker processes. All episodes have as many tokens in the end, some in two turns and some in
eight: what a turn leaves behind is what was said in it. Counted are the bytes of Python's objects
at their most (`tracemalloc`), as the driver and the engine hold them, the pages of the cache that
were in use at a time, and the largest resident memory of the workers. The control keeps the
completion of every turn.
"""

import gc
import json
import tempfile
import tracemalloc
from pathlib import Path

import torch

from benchmarks.common import Claim, Result
from benchmarks.models import save_model
from benchmarks.turns import ENVIRONMENT, TEMPLATE
from isobit.data.dataset import Example
from isobit.engine.dialogue import Dialogue
from isobit.engine.engine import Engine
from isobit.engine.episodes import Episodes
from isobit.engine.types import Completion, Request, Sampling
from isobit.model import Model
from isobit.tasks.environments.pool import EnvironmentPool
from isobit.tasks.environments.settings import EnvironmentConfig

PROMPTS, GROUP = 250, 4
SAMPLED, GIVEN = 16, 98
"""Tokens of an episode; the template writes eight of those that are given between two turns."""


class Keeping(Episodes):
    """Keeps the completion of every turn."""

    def __init__(self, engine: Engine, dialogue: Dialogue) -> None:
        super().__init__(engine, dialogue)
        self.kept: list[Completion] = []

    def _answered(self, request: Request, completion: Completion) -> None:
        self.kept.append(completion)
        super()._answered(request, completion)


def run(rounds: int) -> Result:
    del rounds  # bytes, not seconds
    result = Result("turns_memory")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = save_model(folder / "model", 64, 2, 64, 256)
        (path / "chat_template.jinja").write_text(TEMPLATE)
        model = Model.load(path, "fp8")
        found = {
            what: _measured(model, folder / what.replace(" ", "-"), turns, kind)
            for what, turns, kind in (
                ("2 turns", 2, Episodes),
                ("8 turns", 8, Episodes),
                ("8 turns, all kept", 8, Keeping),
            )
        }
    result.parts = found
    few, many, kept = (found[what] for what in found)
    objects, *others = few
    left = (many[objects] - few[objects]) * 1024 / (6 * PROMPTS * GROUP)
    result.claims.append(Claim("KiB of objects that a turn leaves in an episode", left, "<=", 1.5))
    control = Claim("the control's objects over these", kept[objects] / many[objects], ">=", 1.5)
    result.claims.append(control)
    for label in others:
        claim = f"{label}, 8 turns over 2 of as many tokens"
        result.claims.append(Claim(claim, many[label] / few[label], "<=", 1.2))
    return result


def _measured(model: Model, folder: Path, turns: int, kind: type[Episodes]) -> dict[str, float]:
    """Of one rollout, in MiB, and pages."""
    folder.mkdir()
    text = GIVEN // (turns - 1) - 8
    source = ENVIRONMENT.replace("SECONDS", "0.0").replace("TURNS", str(turns))
    (folder / "answering.py").write_text(source.replace("060d", f"0{text}d"))
    config = EnvironmentConfig(
        factory=f"{folder / 'answering.py'}:Sleeping", max_turns=turns, workers=2
    )
    sampling = Sampling(n=GROUP, max_new_tokens=SAMPLED // turns, seed=1, ignore_eos=True)
    examples = [Example(a, [{"role": "user", "content": f"{a}+1="}], {}) for a in range(PROMPTS)]
    engine = Engine(model, kv_pages=4096, page_size=8, max_sequences=256)
    with EnvironmentPool(config) as pool, torch.no_grad():
        episodes = kind(engine, Dialogue.of(model.tokenizer, pool, "hermes", None))
        gc.collect()
        tracemalloc.start()
        groups = episodes.generate(examples, sampling, list(range(PROMPTS)))
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        workers = (each._process for each in pool._workers)
        resident = sum(_peak_resident(each.pid) for each in workers if each is not None)
    for completion in (each for group in groups for each in group):
        fewer = SAMPLED + GIVEN - len(completion.token_ids)  # an end that was sampled is not given
        assert 0 <= fewer < turns, fewer
    return {
        "objects at their most, MiB": peak / 2**20,
        "pages in use at a time": float(episodes.stats.peak_pages),
        "resident memory of the workers, MiB": resident / 2**20,
    }


def _peak_resident(process: int) -> int:
    """Bytes, at their most."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


if __name__ == "__main__":
    print(json.dumps(run(1).parts, indent=1))
