"""How the time of an `fp8` step grows with its work: completions, their length, the model's width.

Seconds per unit of work at each size over the least at any smaller size: 1.2 says that growth costs a fifth more than
the work. Work is the operations of products and of attention (`isobit.plan` counts bytes; here only growth matters):
per token 2 · parameters, and 2 · layers · width for each token that it sees, in the rollout once, in learning three
times. Where attention is most of the work its own rate shows, which is below that of products.
"""

import tempfile
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.common import Claim, Result, race
from benchmarks.models import save_model
from benchmarks.steps import GROUP, open_run
from isobit.training.loop import training_step

PROMPT = 8
"""About the tokens of a prompt, `ddd+ddd=` and the first token."""


@dataclass(frozen=True)
class Size:
    """A step: `prompts` of 8 completions of `new` tokens, of a model of `layers`, `hidden` wide."""

    prompts: int
    new: int
    hidden: int
    layers: int = 4

    @property
    def work(self) -> float:
        """Operations of the rollout and of learning."""
        length, width = PROMPT + self.new, self.layers * self.hidden
        parameters = width * self.hidden * (4 + 9)
        return 4 * self.prompts * GROUP * length * (2 * parameters + 2 * width * length / 2)


_BASE = Size(64, 5, 128)
GROWTH = {
    "completions": [replace(_BASE, prompts=n // GROUP) for n in (64, 256, 1024, 4096)],
    "tokens of a completion": [replace(_BASE, prompts=2, new=n) for n in (16, 64, 256, 1024, 4096)],
    "hidden": [replace(_BASE, prompts=16, hidden=n) for n in (128, 256, 512, 1024, 2048)],
}


def run(rounds: int) -> Result:
    result = Result("growth")
    for what, sizes in GROWTH.items():
        labels = [_label(what, size) for size in sizes]
        with tempfile.TemporaryDirectory() as folder:
            for label, size in zip(labels, sizes):
                # one open at a time: the widest models fill the memory
                with ExitStack() as stack:
                    step = _open(Path(folder), size, stack)
                    result.rows += race(what, {label: step}, rounds)
        each = [result.median(label, what) / size.work for label, size in zip(labels, sizes)]
        for label, cost, before in zip(labels[1:], each[1:], (min(each[:i]) for i in range(1, len(each)))):
            result.claims.append(Claim(f"{label}: time per work over the least before", cost / before, "<=", 1.2))
    return result


def _label(what: str, size: Size) -> str:
    number = {"completions": size.prompts * GROUP, "hidden": size.hidden}.get(what, size.new)
    return f"{number:,} {what}" if what != "hidden" else f"hidden {number:,}"


def _open(folder: Path, size: Size, stack: ExitStack):  # type: ignore[no-untyped-def]
    own = folder / f"{size.prompts}-{size.new}-{size.hidden}"
    own.mkdir()
    model = save_model(own / "model", size.hidden, size.layers, 64, positions=PROMPT + size.new + 8)
    session = open_run(own, model, "fp8", stack, prompts=size.prompts, new=size.new, reward="in_turn")
    return lambda: training_step(session)
