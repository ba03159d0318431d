"""What the benchmarks share: contestants that take turns, claims, the machine, and the file that
keeps them.

The contestants of a comparison run in turns, round by round, so that whatever else the machine does
hits all of them; medians and ratios of medians are reported, and the least time beside them.
"""

import json
import platform
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

Contestants = Mapping[str, Callable[[], object]]


@dataclass(frozen=True)
class Row:
    """One line of a table: a case, who ran it, the median and the least time in seconds, and a
    rate."""

    case: str
    contestant: str
    median_s: float
    least_s: float
    rate: float | None = None
    unit: str = ""


@dataclass(frozen=True)
class Claim:
    """A figure that the project stands for. It holds if `value` is at least (`>=`) or at most
    (`<=`) `target`."""

    what: str
    value: float
    sign: str
    target: float

    @property
    def holds(self) -> bool:
        return self.value >= self.target if self.sign == ">=" else self.value <= self.target


@dataclass
class Result:
    """What one benchmark found."""

    name: str
    rows: list[Row] = field(default_factory=list)
    claims: list[Claim] = field(default_factory=list)
    parts: dict[str, dict[str, float]] = field(default_factory=dict)
    """Of what a counted figure consists: case to label to bytes."""

    def median(self, contestant: str, case: str | None = None) -> float:
        return next(
            r.median_s for r in self.rows if r.contestant == contestant and case in (None, r.case)
        )

    def print(self) -> None:
        print(f"\n{self.name}")
        for row in self.rows:
            rate = "" if row.rate is None else f"{row.rate:12,.0f} {row.unit}"
            print(
                f"  {row.case:34} {row.contestant:26} {_duration(row.median_s)} "
                f"{_duration(row.least_s)} {rate}"
            )
        for case, parts in self.parts.items():
            print(f"  {case}: {sum(parts.values()):,.1f}")
            for label, size in parts.items():
                print(f"    {label:60} {size:10,.1f}")
        for claim in self.claims:
            verdict = "holds" if claim.holds else "DOES NOT HOLD"
            print(
                f"  {claim.what}: {claim.value:.3f}, claimed {claim.sign} {claim.target}: {verdict}"
            )

    def write(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        claims = [{**asdict(claim), "holds": claim.holds} for claim in self.claims]
        content = {
            "name": self.name,
            "machine": machine(),
            "claims": claims,
            "rows": [asdict(r) for r in self.rows],
        }
        if self.parts:
            content["parts"] = self.parts
        path = folder / f"{self.name}.json"
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        return path


def race(
    case: str,
    contestants: Contestants,
    rounds: int,
    *,
    warmup: int = 1,
    amount: float | None = None,
    unit: str = "",
    clock: Callable[[], float] = time.perf_counter,
) -> list[Row]:
    """Run the contestants in turns; warm-up rounds are not counted. `amount` per run gives the
    rate, in `unit`/s. `clock`: in seconds."""
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for turn in range(rounds + warmup):
        for name, call in contestants.items():
            start = clock()
            call()
            if turn >= warmup:
                times[name].append(clock() - start)
    return [row(case, name, samples, amount, unit) for name, samples in times.items()]


def row(
    case: str, contestant: str, samples: list[float], amount: float | None = None, unit: str = ""
) -> Row:
    """A line of the table from the seconds of single runs."""
    median = statistics.median(samples)
    rate = None if amount is None else amount / median
    return Row(case, contestant, median, min(samples), rate, f"{unit}/s" if unit else "")


def machine() -> dict[str, object]:
    """Where and of what the numbers are."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    model = next(
        (line.split(":")[1].strip() for line in lines if line.startswith("model name")), ""
    )
    return {
        "processor": model or platform.processor(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": _git("rev-parse", "HEAD")
        + ("+changes" if _git("status", "--porcelain", "src") else ""),
    }


def _git(*arguments: str) -> str:
    """What git says, or "" where there is no git, or no repository: a copy of the tree on a machine
    that is lent."""
    here = Path(__file__).resolve().parent
    if shutil.which("git") is None:
        return ""
    return subprocess.run(
        ["git", *arguments], cwd=here, capture_output=True, text=True, check=False
    ).stdout.strip()


def _duration(seconds: float) -> str:
    return f"{seconds * 1e6:9.0f} us" if seconds < 0.01 else f"{seconds * 1e3:9.1f} ms"
