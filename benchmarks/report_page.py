"""The report of a long run: 1,000 steps of 64 completions of 120 and of 500 tokens; how long, and how large."""

import tempfile
import time
from pathlib import Path

from benchmarks.common import Claim, Result, row
from benchmarks.recorded_run import write_run
from isobit.monitor.report import write_report

STEPS = 1000
_SECONDS, _MEGABYTES = 10.0, 5.0


def run(rounds: int) -> Result:
    result = Result("report_page")
    with tempfile.TemporaryDirectory() as folder:
        for tokens in (120, 500):
            directory = write_run(Path(folder) / str(tokens), STEPS, tokens=tokens)
            times = []
            for _ in range(min(rounds, 3)):
                began = time.perf_counter()
                page = write_report([directory], directory / "report.html")
                times.append(time.perf_counter() - began)
            case = f"{STEPS:,} steps x 64 completions x {tokens:,} tokens"
            result.rows.append(row(case, "report", times))
            result.claims.append(Claim(f"{case}: seconds", result.rows[-1].median_s, "<=", _SECONDS))
            result.claims.append(Claim(f"{case}: MB", page.stat().st_size / 1e6, "<=", _MEGABYTES))
    return result
