"""Everything that needs a GPU, in one command: first whether the bits are right, then how fast they come.

`python -m benchmarks.gpu --out DIR` runs the tests that need a GPU and then the stages, each in a process of its own so
that a broken kernel takes nothing else down, and within its part of the time; it writes one JSON file for each and a
summary, and prints a short table last. `--rehearse` runs all of it at toy sizes on a CPU.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from xml.etree import ElementTree

from benchmarks.gpu.common import Bench, gpu_machine
from benchmarks.gpu.targets import table

SHARES = {"ceilings": 0.03, "kernels": 0.22, "decode": 0.24, "learner": 0.19, "grpo": 0.32}
"""The stages, and their parts of the time that the tests leave."""
_TESTS = ("tests/kernels/triton", "tests/gpu")
_TESTS_S = 150.0


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="one JSON file for each stage goes here")
    parser.add_argument("--only", nargs="+", metavar="STAGE", help=f"of tests, {', '.join(SHARES)}; default: all")
    parser.add_argument("--minutes", type=float, default=8.5, help="for everything together")
    parser.add_argument("--rehearse", action="store_true", help="toy sizes on the CPU: shows only that it runs")
    parser.add_argument("--prompts", type=int, default=64, help="of a GRPO step")
    parser.add_argument("--group", type=int, default=8, help="completions of a prompt")
    parser.add_argument("--new-tokens", type=int, default=512, help="of a completion")
    parser.add_argument("--stage", help=argparse.SUPPRESS)  # what a process of its own is told
    arguments = parser.parse_args()
    names = arguments.only or ["tests", *SHARES]
    if unknown := sorted(set(names) - {"tests", *SHARES}):
        parser.error(f"unknown stage {unknown[0]!r}; there are tests, {', '.join(SHARES)}")
    if arguments.rehearse:
        os.environ["TRITON_INTERPRET"] = "1"  # inherited by the stages
    elif gpu_machine()["gpu"] is None:
        parser.error("PyTorch sees no GPU; --rehearse runs toy sizes on the CPU")
    if arguments.stage:
        _stage(arguments)
    else:
        sys.exit(_all(names, arguments))


def _stage(arguments: argparse.Namespace) -> None:
    """Run one stage in this process."""
    from importlib import import_module

    bench = Bench(arguments.stage, arguments.rehearse, arguments.minutes * 60)
    sizes = {"prompts": arguments.prompts, "group": arguments.group, "new_tokens": arguments.new_tokens}
    try:
        import_module(f"benchmarks.gpu.{arguments.stage}").run(bench, **(sizes if arguments.stage == "grpo" else {}))
    finally:
        bench.write(arguments.out)
    sys.exit(int(bench.failed))


def _all(names: list[str], arguments: argparse.Namespace) -> int:
    """Every stage in turn; the exit status is that of the worst."""
    start, end = time.perf_counter(), time.perf_counter() + arguments.minutes * 60
    summary: dict[str, object] = {"machine": gpu_machine(), "rehearsal": arguments.rehearse}
    if "tests" in names:
        summary["tests"] = _tests(arguments.out, min(_TESTS_S, end - time.perf_counter()), arguments.rehearse)
    stages = [name for name in SHARES if name in names]
    statuses = {}
    for index, name in enumerate(stages):
        share = SHARES[name] / sum(SHARES[other] for other in stages[index:])
        seconds = share * (end - time.perf_counter())
        statuses[name] = _run_stage(name, seconds, end - time.perf_counter(), arguments)
    summary["stages"], summary["took_s"] = statuses, time.perf_counter() - start
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    _print_tables(arguments.out, stages, summary)
    tests = summary.get("tests")
    failed = isinstance(tests, dict) and (tests["failed"] or not tests["ended"])
    return int(bool(failed) or any(status != "ended" for status in statuses.values()))


def _run_stage(name: str, seconds: float, left: float, arguments: argparse.Namespace) -> str:
    """A process that plans for so many seconds; it is stopped a fifth later, or when none of all are left."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--stage", name, "--out", str(arguments.out)]
    command += ["--minutes", str(seconds / 60), *(["--rehearse"] if arguments.rehearse else [])]
    for option in ("prompts", "group", "new_tokens"):
        command += [f"--{option.replace('_', '-')}", str(getattr(arguments, option))]
    limit = 300 if arguments.rehearse else max(min(1.2 * seconds, left), 10)
    try:
        done = subprocess.run(command, timeout=limit, check=False)
    except subprocess.TimeoutExpired:
        return f"stopped after {limit:.0f} s"
    return "ended" if done.returncode == 0 else f"failed with exit status {done.returncode}"


def _tests(out: Path, seconds: float, rehearse: bool) -> dict[str, object]:
    """The tests of the kernels and of the bits, on this GPU: how many passed, failed, were skipped."""
    out.mkdir(parents=True, exist_ok=True)
    report = out / "tests.xml"
    report.unlink(missing_ok=True)
    chosen = ["tests/kernels/triton/test_numbers.py"] if rehearse else list(_TESTS)
    command = [sys.executable, "-m", "pytest", *chosen, "-p", "no:cacheprovider", f"--junitxml={report}", "-q"]
    if not rehearse and find_spec("xdist") is not None:
        command += ["-n", "8"]  # most of their time is the compiler's
    try:
        ended = subprocess.run(command, timeout=seconds, check=False).returncode in (0, 1)
    except subprocess.TimeoutExpired:
        ended = False
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    failures = []
    if report.exists():
        for case in ElementTree.parse(report).iter("testcase"):
            bad = case.find("failure") is not None or case.find("error") is not None
            kind = "failed" if bad else "skipped" if case.find("skipped") is not None else "passed"
            counts[kind] += 1
            failures += [f"{case.get('classname')}::{case.get('name')}"] if bad else []
    return {"ended": ended, **counts, "failures": failures}


def _print_tables(out: Path, stages: list[str], summary: dict[str, object]) -> None:
    """What a reader wants to see first: a line for each row, and what is missing."""
    for name in stages:
        path = out / f"{name}.json"
        if not path.exists():
            continue
        content = json.loads(path.read_text(encoding="utf-8"))
        print(f"\n{name} ({content['took_s']:.0f} s)")
        for row in content["rows"]:
            share = f"{row['share']:5.0%} of the floor" if "share" in row else ""
            print(f"  {row['case']:54} {row['contestant']:28} {1e3 * row['seconds']:10.3f} ms {share}")
        for missing in content["missing"]:
            print(f"  missing: {missing['case']}: {missing['why']}")
    print(f"\n{table(out)}")
    print(f"\ntests: {summary.get('tests', 'not run')}\nstages: {summary['stages']}")


if __name__ == "__main__":
    main()
