"""Exposed communication on 8 to 1,024 simulated ranks, by the planner's model.

    python -m benchmarks exposed

A round is one micro-batch of 16,384 tokens a rank under `fp8` on H100s, forward and backward, and the exchange of its
gradients: bucket after bucket, each when the backward has completed it. Exposed is what is left of the exchange when
the backward has ended. Nothing was measured: rates of links are those of `isobit/plan/devices.py`.
"""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks.common import Claim, Result
from benchmarks.plan_jobs import job
from isobit.plan import traffic
from isobit.plan.seconds import exchange, micro_batch

RANKS = (8, 16, 64, 256, 1024)
NAMES = ("Qwen3-8B", "Qwen3-32B", "Qwen3-30B-A3B")


@dataclass(frozen=True)
class Round:
    """Of a rank: seconds of a micro-batch, of its exchange, and of what is exposed; GB that it sends inside its machine
    and outside."""

    model: str
    ranks: int
    sum_group: int
    micro_batch: float
    exchange: float
    exposed: float
    inside: float
    outside: float

    @property
    def share(self) -> float:
        """Exposed, of the round."""
        return self.exposed / (self.micro_batch + self.exposed)


@dataclass
class Rounds(Result):
    """A benchmark's result with its rounds."""

    rounds: list[Round] = field(default_factory=list)

    def print(self) -> None:
        print(f"\n{self.name}\n{table(self.rounds)}")
        super().print()

    def write(self, folder: Path) -> Path:
        path = super().write(folder)
        content = json.loads(path.read_text())
        content["rounds"] = [{**asdict(each), "share": each.share} for each in self.rounds]
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        return path


def all_rounds() -> list[Round]:
    """Every model on every number of ranks, with sums of single ranks and of machines."""
    found = []
    for name in NAMES:
        for ranks in RANKS:
            for group in (1, 8):
                given = job(name, ranks=ranks, device="h100", sum_group=group, prompts=4 * 1024)
                sent, (whole, shown) = traffic.exchange(given), exchange(given)
                sizes = sent.inside / 1e9, sent.outside / 1e9
                found.append(Round(name, ranks, group, micro_batch(given), whole, shown, *sizes))
    return found


def table(rounds: list[Round]) -> str:
    """As Markdown: for each model and number of ranks, without sums of machines and with them."""
    lines = [
        "| model | ranks | micro-batch, s | exchange, s | exposed, s | of the round "
        "| with sum_group 8: exchange | exposed | of the round |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for one, eight in zip(rounds[::2], rounds[1::2]):
        cells = [one.model, f"{one.ranks:,}", f"{one.micro_batch:.2f}"]
        for each in (one, eight):
            cells += [f"{each.exchange:.2f}", f"{each.exposed:.3f}", f"{each.share:.1%}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def run(rounds: int) -> Rounds:
    found = all_rounds()
    result = Rounds("exposed", rounds=found)
    grouped = [r.share for r in found if r.ranks == 8 or r.sum_group == 8]
    dense = [r.share for r in found if r.sum_group == 1 and r.model != NAMES[-1]]
    mixture = [r.share for r in found if r.ranks > 8 and r.sum_group == 1 and r.model == NAMES[-1]]
    what = "exposed communication, share of a round"
    result.claims.append(Claim(f"{what}, 8 to 1,024 ranks with sum_group 8, at most", max(grouped), "<=", 0.1))
    result.claims.append(Claim(f"{what}, dense models with sum_group 1, at most", max(dense), "<=", 0.1))
    what = f"{what}, {NAMES[-1]} beyond a machine with sum_group 1, at least"
    result.claims.append(Claim(what, min(mixture), ">=", 0.4))
    return result
