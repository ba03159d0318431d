"""Everything that needs a GPU: whether the bits are right, then whether the tests pass, then how
fast it is.

`python3 -m benchmarks.gpu first --out DIR` runs all stages in the order of the first minutes on a
new machine, each in a separate process. Every case is written to DIR/results.jsonl when it ends;
the same command again goes on with what is left, so it may be cut off at any time, and `--minutes`
is what one call may take. A case that fails is recorded and ends nothing else; the exit status is
then 1. `--rehearse` runs all of it at toy sizes on a CPU.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from benchmarks.gpu.common import GPU_LOST, Bench, run_limited
from benchmarks.gpu.results import ENDED, FILE, Results, gpu_machine
from benchmarks.gpu.targets import table

STAGES = {
    "ceilings": 60,
    "compiling": 90,
    "bits": 240,
    "tests": 330,
    "sanitizer": 150,
    "kernels": 180,
    "decode": 200,
    "learner": 150,
    "grpo": 330,
}
"""In the order of the first minutes on a machine; the most seconds that each takes of one call."""
GROUPS = {"first": tuple(STAGES), "times": ("kernels", "decode", "learner", "grpo")}
_LEAST_S = 15.0  # a stage with less is left for the next call


def main() -> None:
    arguments = _arguments()
    if arguments.rehearse:
        os.environ["TRITON_INTERPRET"] = "1"  # inherited by the stages
    os.environ["ISOBIT_GPU_CHECK"] = "skip"  # it is a case of the bits here, and fails no other
    # one cache of compiled kernels for all processes
    os.environ.setdefault(
        "TRITON_CACHE_DIR", str(Path(tempfile.gettempdir(), "isobit-triton-cache"))
    )
    if arguments.child:
        _stage(arguments)
    else:
        sys.exit(_all(arguments))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python3 -m benchmarks.gpu", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "stages",
        nargs="*",
        metavar="STAGE",
        default=["first"],
        help=f"of {_names()}; default: first",
    )
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help=f"{FILE} is there, or goes there"
    )
    parser.add_argument(
        "--resume", type=Path, metavar="DIR", help=f"go on from a copy of the {FILE} there"
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=30.0,
        help="for this call; what is left is left for the next",
    )
    parser.add_argument("--retry", action="store_true", help="also what failed before")
    parser.add_argument(
        "--rehearse", action="store_true", help="toy sizes on the CPU: shows only that it runs"
    )
    parser.add_argument(
        "--prompts", type=int, help="of a GRPO step; default: what the GPU's memory holds"
    )
    parser.add_argument("--group", type=int, default=8, help="completions of a prompt")
    parser.add_argument("--new-tokens", type=int, default=512, help="of a completion")
    parser.add_argument(
        "--child", metavar="SESSION", help=argparse.SUPPRESS
    )  # what a stage's own process is given
    arguments = parser.parse_args()
    if unknown := sorted(set(arguments.stages) - {*STAGES, *GROUPS}):
        parser.error(f"unknown stage {unknown[0]!r}; there are {_names()}")
    wanted = {name for one in arguments.stages for name in GROUPS.get(one, (one,))}
    arguments.stages = [name for name in STAGES if name in wanted]
    if not arguments.rehearse and gpu_machine()["gpu"] is None:
        parser.error("PyTorch sees no GPU; --rehearse runs toy sizes on the CPU")
    return arguments


def _names() -> str:
    return f"{', '.join(STAGES)}, and the groups {' and '.join(GROUPS)}"


def _stage(arguments: argparse.Namespace) -> None:
    """Run one stage in this process."""
    (name,) = arguments.stages
    results = Results(arguments.out, arguments.child, arguments.rehearse, arguments.retry)
    bench = Bench(name, results, arguments.minutes * 60)
    sizes = {
        "prompts": arguments.prompts,
        "group": arguments.group,
        "new_tokens": arguments.new_tokens,
    }
    import_module(f"benchmarks.gpu.{name}").run(bench, **(sizes if name == "grpo" else {}))
    sys.exit(int(bench.failed))


def _all(arguments: argparse.Namespace) -> int:
    """Every stage in turn; 1 if anything has failed."""
    end = time.perf_counter() + arguments.minutes * 60
    arguments.out.mkdir(parents=True, exist_ok=True)
    if (
        arguments.resume is not None
        and (arguments.resume / FILE).exists()
        and not (arguments.out / FILE).exists()
    ):
        shutil.copyfile(arguments.resume / FILE, arguments.out / FILE)
    session = f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{os.getpid()}"
    results = Results(arguments.out, session, arguments.rehearse, arguments.retry)
    results.begin()
    stages = arguments.stages
    if "ceilings" not in stages and not results.rows("ceilings"):
        stages = ["ceilings", *stages]  # floors are formed from them
    for name in stages:
        seconds = min(STAGES[name], end - time.perf_counter())
        if results.whole(name):
            status = "ended before"
        elif seconds < _LEAST_S:
            status = "left for the next call: the minutes are spent"
        else:
            status = _run_stage(name, seconds, end, arguments, results)
        results.write({"session": session, "stage": name, "ended": status})
        print(f"{name}: {status}", flush=True)
    return _summary(stages, results)


def _run_stage(
    name: str, seconds: float, end: float, arguments: argparse.Namespace, results: Results
) -> str:
    """A process that plans for so many seconds, and is stopped where it takes a quarter more, or
    when none are left.

    Where the process dies, the case that was open has failed, and another process goes on with the
    next."""
    started = time.perf_counter()
    while True:
        left = seconds - (time.perf_counter() - started)
        command = [
            sys.executable,
            "-m",
            "benchmarks.gpu",
            name,
            "--child",
            results.session,
            "--out",
            str(results.folder),
        ]
        command += ["--minutes", str(left / 60), *(["--rehearse"] if arguments.rehearse else [])]
        command += ["--retry"] if arguments.retry else []
        for option in ("prompts", "group", "new_tokens"):
            value = getattr(arguments, option)
            command += [] if value is None else [f"--{option.replace('_', '-')}", str(value)]
        limit = (
            600
            if arguments.rehearse
            else max(min(1.25 * left, end - time.perf_counter()), _LEAST_S)
        )
        status = _run(command, limit)
        open_case = results.open_case(name)
        if status is None:
            if open_case is not None:
                results.case(
                    name, open_case, "cut", why=f"the stage was stopped after {limit:.0f} s"
                )
            return f"stopped after {limit:.0f} s"
        if status in (0, 1) and open_case is None:
            return "ended" if status == 0 else "ended, with failures"
        if open_case is not None:
            what = {
                "contestant": "the case",
                "error": "process",
                "message": f"it ended with status {status}",
            }
            results.case(name, open_case, "failed", failures=[what])
        elif status != GPU_LOST:
            return f"failed with exit status {status}"
        if seconds - (time.perf_counter() - started) < _LEAST_S:
            return "stopped: the GPU was lost, and the time is spent"


def _run(command: Sequence[str], limit: float) -> int | None:
    """The exit status of a process, or None: it and all that it has started were stopped at the
    limit."""
    try:
        return run_limited(command, limit).returncode
    except subprocess.TimeoutExpired:
        return None


def _summary(stages: Sequence[str], results: Results) -> int:
    """What a reader wants to see first: what failed, what is missing, and the targets. 1 if
    anything failed."""
    found = results.of_this_machine()
    bad = 0
    for name in stages:
        lines = {case: line for (stage, case), line in found.items() if stage == name}
        count = {
            s: sum(line["status"] == s for line in lines.values())
            for s in (*ENDED, "missing", "cut")
        }
        bad += count["failed"]
        print(f"\n{name}: " + ", ".join(f"{n} {status}" for status, n in count.items()))
        for case, line in lines.items():
            if line["status"] == "failed":
                print(f"  failed: {case}: {_why(line)}")
            elif line["status"] != "done":
                print(f"  {line['status']}: {case}: {line.get('why', '')}")
    own = [line for line in results.lines() if line["session"] == results.session]
    ends = {line["stage"]: line["ended"] for line in own if "ended" in line}
    print(f"\n{table(results.folder)}\n\nstages of this call: {ends}")
    return int(
        bad > 0 or any(not end.startswith(("ended", "stopped", "left")) for end in ends.values())
    )


def _why(line: dict) -> str:  # type: ignore[type-arg]
    wrong = [
        f"{row['contestant']} does not hold"
        for row in line.get("rows", [])
        if not row.get("holds", True)
    ]
    errors = [
        f"{f['contestant']}: {f['error']}: {f['message'][:200]}" for f in line.get("failures", [])
    ]
    return "; ".join([*errors, *wrong, line.get("message", "")[-200:]])[:600]


if __name__ == "__main__":
    main()
