"""What docs/measured.md says of the server's hardness, made of the files in benchmarks/results:

    python -m tests.serve.figures

prints it as the page has it.
"""

import json
from typing import Any

from tests.documents import ROOT

RESULTS = ROOT / "benchmarks" / "results"
ROWS = (
    ("answers compared, of them streamed", ("answers", "streams")),
    ("told to come again: 408, 429, 503", ("408, and again", "429, and again", "503, and again")),
    ("training runs, from a session to an adapter's archive", ("runs trained",)),
    ("hostile requests", ("hostile",)),
    (
        "clients that left: after asking, in their body, reading slowly, reading nothing",
        ("gone: asked", "gone: half", "gone: slow", "gone: never reads"),
    ),
    ("connections at which nothing was asked", ("connections at which nothing was asked",)),
    ("descriptors more than before", ("descriptors more",)),
)


def read(name: str) -> dict[str, Any]:
    """A file of results."""
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return found


def claims(found: dict[str, Any]) -> dict[str, float]:
    """Of a file, by what they are of."""
    return {claim["what"]: claim["value"] for claim in found["claims"]}


def load() -> str:
    """The table of `tests.serve.load`."""
    found = read("serve_load")
    parts, (waits, slowest) = found["parts"], found["rows"]
    counts, memory = parts["counts"], parts["MiB"]
    lines = [f"| {waits['case']} | |", "|---|---|"]
    for label, kinds in ROWS:
        lines.append(f"| {label} | {', '.join(f'{counts.get(k, 0):,.0f}' for k in kinds)} |")
    lines.append(
        f"| seconds to an answer: median, 99 of 100 | {waits['median_s']:.1f}, "
        f"{slowest['median_s']:.1f} |"
    )
    quarters = ", ".join(f"{size:.0f}" for size in memory.values())
    lines.append(f"| MiB of the process in each quarter of the time | {quarters} |")
    return "\n".join(lines)


def kills() -> str:
    """A sentence of `tests.serve.kills`."""
    found = read("serve_kills")
    (row,) = found["rows"]
    values = claims(found)
    return (
        f"`python -m tests.serve.kills --times 30`: {row['case']}, of {row['median_s']:.0f} "
        f"seconds each in the median; {values['results compared']:.0f} results and the adapters "
        "were compared with those of a server that was not killed, and "
        f"{values['rounds that end otherwise than without kills']:.0f} rounds ended otherwise."
    )


def hostile() -> str:
    """A sentence of `tests.serve.hostile`."""
    found = read("serve_hostile")
    (row,) = found["rows"]
    values, statuses = claims(found), found["parts"]["statuses"]
    served = sum(count for status, count in statuses.items() if int(status) < 300)
    return (
        f"`python -m tests.serve.hostile --cases 10000`: {row['case']} over "
        f"{len(found['parts']['answered'])} routes, of which {served:,.0f} were answered and "
        f"{sum(statuses.values()) - served:,.0f} refused in one line, "
        f"{values['answers with a status from 500 on']:.0f} with a fault of the server's; the "
        f"slowest took {values['seconds of the slowest answer']:.1f} seconds, and "
        f"{values['honest runs among them, with one adapter']:.0f} honest training runs among "
        "them have one adapter."
    )


if __name__ == "__main__":
    for part in (load, kills, hostile):
        print(part(), end="\n\n")
