"""The project's targets on one GPU, each beside what the stages have found.

A ratio is formed within one case (a model and a size) and on one GPU, `bf16` over `fp8`, both
bitwise; over several cases the lowest and the highest are given. A rehearsal measures nothing, nor
does a session whose check failed, nor a step whose log-probabilities prove nothing. Left out: what
counts as a case (the stages).
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.results import measured, measured_on
from benchmarks.gpu.shapes import SHAPES

Rows = list[dict[str, Any]]
NOT_MEASURED = "not measured"
LAUNCH_BOUND = "Qwen3-1.7B, 16 x 8 completions"
"""The small step of GRPO, whose rollout waits for launches, not for bytes."""
MIXTURES = tuple(name for name, config in SHAPES.items() if config.routed is not None)


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
        return (
            f"{low} {self.unit}, {cases}"
            if low == high
            else f"{low} to {high} {self.unit}, {cases}"
        )


def targets(folder: Path) -> list[Target]:
    """Every target, from the results in `folder`."""
    steps = [row for row in measured(folder, "grpo") if row.get("sound") and "rollout_s" in row]
    timed = [row for row in steps if "seconds" in row]
    learned = _updates(measured(folder, "learner"))
    shares = tuple(
        row["share"]
        for row in of_known_work(measured(folder, "decode"))
        if row["contestant"] == "fp8" and "share" in row
    )
    small = [row for row in steps if row["case"].startswith(LAUNCH_BOUND)]
    large = [row for row in steps if row not in small]
    fast = ("fp8, bitwise", "fp8, fast")
    exact = [row for row in steps if row["contestant"] in ("fp8, bitwise", "bf16, bitwise")]
    differing = tuple(row["differing_tokens"] for row in exact if "differing_tokens" in row)
    return [
        Target(
            "tokens whose bits differ between rollout and learner", "0", differing or None, "tokens"
        ),
        Target("rollout, `bf16` over `fp8`", "≥ 1.6", _ratios(large, _rollout)),
        Target(
            "the same of 128 sequences of a small model, which launches bound",
            "none",
            _ratios(small, _rollout),
        ),
        Target(
            "learner step, `bf16` over `fp8`",
            "≥ 1.45",
            _ratios(learned, lambda row: row["seconds"]),
        ),
        Target(
            "whole step, `bf16` over `fp8`", "≥ 1.5", _ratios(timed, lambda row: row["seconds"])
        ),
        Target(
            "step of `fp8`, `bitwise` over `fast`",
            "≤ 1.1",
            _ratios(timed, lambda row: row["seconds"], *fast),
        ),
        Target("rollout of `fp8`, `bitwise` over `fast`", "≤ 1.1", _ratios(steps, _rollout, *fast)),
        Target("decoding under `fp8`, share of the floor", "≥ 0.65", shares or None, "of it"),
        *_memory(steps),
    ]


def of_known_work(rows: Iterable[dict[str, Any]]) -> Rows:
    """Return the decode rows whose work is known: a mixture reads the weights of those experts that
    its tokens choose, so its rows must count them."""
    return [row for row in rows if "experts" in row or not row["case"].startswith(MIXTURES)]


def _rollout(row: Mapping[str, Any]) -> float:
    return float(row["rollout_s"])


def _memory(steps: Rows) -> list[Target]:
    """Peak memory by parts: masters, their gradients and moments are float32 under every preset, so
    that a target for the whole would be one for the model's size."""
    sides = ("fp8, bitwise", "bf16, bitwise")
    parts = (
        ("memory of working weights", "≤ 0.65", _part("working_bytes")),
        ("memory of a token's keys and values", "≤ 0.55", _part("kv_bytes_per_token")),
        ("memory of activations, at the peak of learning", "≤ 1.05", _activations),
    )
    return [
        Target(f"{what}, `fp8` over `bf16`", required, _ratios(steps, value, *sides))
        for what, required, value in parts
    ]


def _part(name: str) -> Callable[[Mapping[str, Any]], float]:
    return lambda row: row[name]


def _activations(row: Mapping[str, Any]) -> float:
    """The peak of learning less what else is there: four float32 numbers a parameter (master,
    gradient, two moments), working weights, and the cache, which stays where graphs hold its
    addresses."""
    return (
        row["peak_bytes"]["learn"]
        - 4 * row["parameter_bytes"]
        - row["working_bytes"]
        - row["kv_bytes"]
    )


def losses(folder: Path) -> dict[str, float]:
    """Shapes on which FP8 with its quantization is slower than the best BF16 product: how many
    times its time."""
    found = [row for row in measured(folder, "kernels") if row["contestant"] == "fp8 loses"]
    return {row["case"]: row["seconds"] / row["floor_s"] for row in found}


def _lost(folder: Path) -> str:
    """How many of the shapes, and the three at which most is lost."""
    rows = measured(folder, "kernels")
    if not rows:
        return NOT_MEASURED
    shapes = sum(row["contestant"] == "fp8 with its quantization" for row in rows)
    found = sorted(losses(folder).items(), key=lambda item: -item[1])
    most = "; ".join(f"{case}: {times:.2f} × BF16's time" for case, times in found[:3])
    return f"{len(found)} of {shapes}, most of all {most}" if found else "none"


def table(folder: Path) -> str:
    """All of it in Markdown; its head names the GPU."""
    found = measured_on(folder)
    gpu = "one H100 or H200" if found is None else f"one {found['machine']['gpu']['name']}"
    lines = [f"| target, on {gpu} | required | measured |", "|---|---|---|"]
    lines += [
        f"| {target.what} | {target.required} | {target.measured} |" for target in targets(folder)
    ]
    lost = _lost(folder)
    return "\n".join([*lines, f"| shapes where FP8 loses to BF16 | named | {lost} |"])


BITS = {
    "tiles": "one product by every tile: tokens on N = 16, 32, 64, 128",
    "rows": "rows alone, by 16 to 512, and in 8,192: products, head, experts, norms, gates",
    "shards": "a shard's product against the whole weight's, 2, 4 and 8 shards of seven models",
    "attention": "attention: decoding and chunks against packed",
    "adapters": "several adapters at once against each alone",
    "replay": "a captured step against an eager one",
    "engine": "a rollout against the learner; with graphs and without",
    "two": "a backward in two processes, by `CUBLAS_WORKSPACE_CONFIG`",
    "sigmoid": "the sigmoid of gradients, beyond its bound around float64's",
}
"""The claims of the stage `bits`, by the first word of their cases."""


def bits_table(folder: Path) -> str:
    """For every claim: elements compared, how many differ, controls that did; in Markdown."""
    lines = [
        "| bits | compared | differ | controls that differ, as they must |",
        "|---|---|---|---|",
    ]
    rows = measured(folder, "bits")
    for word, what in BITS.items():
        own = [row for row in rows if row["case"].split()[0].strip(",") == word]
        claims = [
            row for row in own if row.get("expected", "equal") == "equal" and "compared" in row
        ]
        controls = [row for row in own if row.get("expected") == "different"]
        count, differ = (
            f"{sum(row[key] for row in claims):,}" for key in ("compared", "differing")
        )
        held = f"{sum(row['holds'] for row in controls)} of {len(controls)}"
        lines.append(
            f"| {what} | {count} | {differ} | {held} |"
            if own
            else f"| {what} | {NOT_MEASURED} | | |"
        )
    other = [row for row in rows if row["case"].startswith("cuBLAS") and "compared" in row]
    shares = [row["differing"] / row["compared"] for row in other]
    said = f"{min(shares):.1%} to {max(shares):.1%} of elements" if shares else NOT_MEASURED
    return "\n".join(
        [
            *lines,
            f"| cuBLAS against Triton (a record, not a claim) | {len(other) or ''} | {said} | |",
        ]
    )


def ceilings_table(folder: Path) -> str:
    """What the machine reached at most, which floors are formed from."""
    rows = measured(folder, "ceilings")
    lines = ["| at most, on this machine | measured |", "|---|---|"]
    for what, words, unit in (
        ("copy", "copy, bytes read and written", "TB/s"),
        ("bf16", "BF16 product", "TFLOP/s"),
        ("fp8", "FP8 product, one scale for each operand", "TFLOP/s"),
    ):
        rates = [row["rate"] for row in rows if row["what"] == what]
        lines.append(
            f"| {words} | {f'{max(rates) / 1e12:,.2f} {unit}' if rates else NOT_MEASURED} |"
        )
    return "\n".join(lines)


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
    return [
        {"case": case, "contestant": who, "seconds": seconds}
        for (case, who), seconds in sums.items()
    ]
