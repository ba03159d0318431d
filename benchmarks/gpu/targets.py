"""The project's targets on one GPU, each beside what the stages' JSON says of it.

A ratio is formed within one case (a model and a size) and one run of the benchmarks, `bf16` over `fp8`, both bitwise;
over several cases the lowest and the highest are told. A rehearsal measures nothing. Left out: what counts as a case
(the stages).
"""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Rows = list[dict[str, Any]]
NOT_MEASURED = "not measured"


@dataclass(frozen=True)
class Target:
    """What is required, in words, and what was measured: values of single cases, or None."""

    what: str
    required: str
    values: tuple[float, ...] | None
    unit: str = "×"

    @property
    def measured(self) -> str:
        """The range of the cases, in words."""
        if not self.values:
            return NOT_MEASURED
        low, high = (f"{value:.2f}" for value in (min(self.values), max(self.values)))
        cases = f"{len(self.values)} case{'s' if len(self.values) > 1 else ''}"
        return f"{low} {self.unit}, {cases}" if low == high else f"{low} to {high} {self.unit}, {cases}"


def rows_of(folder: Path, stage: str) -> Rows:
    """What a stage measured on a GPU; nothing, if it was not run there."""
    path = folder / f"{stage}.json"
    if not path.exists():
        return []
    content = json.loads(path.read_text(encoding="utf-8"))
    return [] if content["rehearsal"] else content["rows"]


def targets(folder: Path) -> list[Target]:
    """Every target, from the stages' files in `folder`."""
    steps, learned = rows_of(folder, "grpo"), _updates(rows_of(folder, "learner"))
    shares = tuple(row["share"] for row in rows_of(folder, "decode") if row["contestant"] == "fp8")
    exact = [row for row in steps if row["contestant"] in ("fp8, bitwise", "bf16, bitwise")]
    differing = tuple(row["differing_tokens"] for row in exact if "differing_tokens" in row)
    return [
        Target("tokens whose bits differ between rollout and learner", "0", differing or None, "tokens"),
        Target("rollout, `bf16` over `fp8`", "≥ 1.6", _ratios(steps, lambda row: row["rollout_s"])),
        Target("learner step, `bf16` over `fp8`", "≥ 1.45", _ratios(learned, lambda row: row["seconds"])),
        Target("whole step, `bf16` over `fp8`", "≥ 1.5", _ratios(steps, lambda row: row["seconds"])),
        Target(
            "step of `fp8`, `bitwise` over `fast`",
            "≤ 1.1",
            _ratios(steps, lambda row: row["seconds"], "fp8, bitwise", "fp8, fast"),
        ),
        Target("decoding under `fp8`, share of the floor", "≥ 0.65", shares or None, "of it"),
        Target(
            "peak memory of a step, `fp8` over `bf16`",
            "≤ 0.65",
            _ratios(steps, lambda row: max(row["peak_bytes"].values()), "fp8, bitwise", "bf16, bitwise"),
        ),
    ]


def losses(folder: Path) -> list[str]:
    """Shapes on which FP8 with its quantization is slower than the best BF16 product."""
    found = [row for row in rows_of(folder, "kernels") if row["contestant"] == "fp8 loses"]
    return [f"{row['case']}: {row['seconds'] / row['floor_s']:.2f} × BF16's time" for row in found]


def table(folder: Path) -> str:
    """All of it in Markdown."""
    lines = ["| target, on one H200 | required | measured |", "|---|---|---|"]
    lines += [f"| {target.what} | {target.required} | {target.measured} |" for target in targets(folder)]
    lost = "; ".join(losses(folder)) or ("none" if rows_of(folder, "kernels") else NOT_MEASURED)
    return "\n".join([*lines, f"| shapes where FP8 loses to BF16 | named | {lost} |"])


def _ratios(
    rows: Iterable[Mapping[str, Any]],
    value: Callable[[Mapping[str, Any]], float],
    above: str = "bf16, bitwise",
    below: str = "fp8, bitwise",
) -> tuple[float, ...] | None:
    """For every case that both contestants have: the value of one over that of the other."""
    found: dict[str, dict[str, float]] = {}
    for row in rows:
        found.setdefault(row["case"], {})[row["contestant"]] = value(row)
    return tuple(c[above] / c[below] for c in found.values() if above in c and below in c) or None


def _updates(rows: Rows) -> Rows:
    """Forward, backward, update and sync of a case as one row."""
    sums: dict[tuple[str, str], float] = {}
    for row in rows:
        case, _, what = row["case"].rpartition(", ")
        if what != "prefill":
            key = (case, row["contestant"])
            sums[key] = sums.get(key, 0.0) + row["seconds"]
    return [{"case": case, "contestant": who, "seconds": seconds} for (case, who), seconds in sums.items()]
