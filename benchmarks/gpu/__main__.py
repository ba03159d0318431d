"""Everything that needs a GPU: whether the bits are right, then how fast it is, then whether the
tests pass.

`python3 -m benchmarks.gpu first --out DIR` runs all stages in the order of the first minutes on a
new machine, each in a separate process; every call begins with the check of a first start. Every
case is written to DIR/results.jsonl when it ends; the same command again goes on with what is left,
so it may be cut off at any time, and `--minutes` is what one call may take. A case that fails, or
hangs, is recorded and ends nothing else; the exit status is then 1. Compiled kernels lie beside the
results, and `--resume` takes both along. `--rehearse` runs all of it at toy sizes on a CPU.
"""

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

from benchmarks.gpu import check, compiling, kernel_cache
from benchmarks.gpu.common import Bench
from benchmarks.gpu.results import CHECK, ENDED, FILE, Line, Results, gpu_machine
from benchmarks.gpu.supervise import LEAST_S, Limits, run_stage
from benchmarks.gpu.targets import table
from isobit.kernels.backends.self_check import EXCHANGED


class Step(NamedTuple):
    """A stage in its turn: the most seconds that it takes of one call, and those without a result
    after which its process is ended. `small`: only its small cases."""

    stage: str
    seconds: float
    silence: float
    small: bool = False


PLAN = (
    Step("compiling", 110, 150),
    Step(CHECK, 80, 90),
    Step("bits", 170, 75),
    Step("grpo", 120, 120, small=True),
    Step("ceilings", 45, 60),
    Step("profile", 40, 60),
    Step("decode", 60, 75),
    Step("kernels", 70, 60),
    Step("learner", 70, 120),
    Step("grpo", 240, 150),
    Step("tests", 300, 120),
    Step("sanitizer", 150, 170),
)
"""What is worth most comes first: the bits, and with one small step of GRPO under `fp8` and `bf16`
seven of the ten targets; a call may end before the rest."""
STAGES = tuple(dict.fromkeys(step.stage for step in PLAN))
GROUPS = {
    "first": STAGES,
    "times": ("ceilings", "profile", "decode", "kernels", "learner", "grpo"),
}
_SKIP = "ISOBIT_GPU_CHECK"
_REHEARSAL_S = 600.0  # of a stage in the interpreter


def main() -> None:
    arguments = _arguments()
    if arguments.rehearse:
        os.environ["TRITON_INTERPRET"] = "1"  # inherited by the stages
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
    add = parser.add_argument
    stages = f"of {_names()}; default: first"
    add("stages", nargs="*", metavar="STAGE", default=["first"], help=stages)
    add("--out", type=Path, required=True, metavar="DIR", help=f"{FILE} is there, or goes there")
    add("--resume", type=Path, metavar="DIR", help=f"go on from copies of {FILE} and kernels there")
    minutes = "for this call; what is left is left for the next"
    add("--minutes", type=float, default=30.0, help=minutes)
    add("--retry", action="store_true", help="also what failed before")
    toys = "toy sizes on the CPU: shows only that it runs"
    add("--rehearse", action="store_true", help=toys)
    add("--prompts", type=int, help="of a GRPO step; default: what the GPU's memory holds")
    add("--group", type=int, default=8, help="completions of a prompt")
    add("--new-tokens", type=int, default=512, help="of a completion")
    # what a stage's own process is given
    add("--child", metavar="SESSION", help=argparse.SUPPRESS)
    add("--small", action="store_true", help=argparse.SUPPRESS)
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
    given = ("prompts", "group", "new_tokens", "small") if name == "grpo" else ()
    import_module(f"benchmarks.gpu.{name}").run(
        bench, **{option: getattr(arguments, option) for option in given}
    )
    sys.exit(int(bench.failed))


def _all(arguments: argparse.Namespace) -> int:
    """Every step in turn; 1 if anything has failed."""
    end = time.perf_counter() + arguments.minutes * 60
    out, resume = arguments.out, arguments.resume
    out.mkdir(parents=True, exist_ok=True)
    if resume is not None and (resume / FILE).exists() and not (out / FILE).exists():
        shutil.copyfile(resume / FILE, out / FILE)
    session = f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{os.getpid()}"
    results = Results(out, session, arguments.rehearse, arguments.retry)
    results.begin()
    with tempfile.TemporaryDirectory(prefix="isobit-gpu-") as own:
        os.environ["ISOBIT_CACHE"] = own  # no check that has passed before counts for this call
        os.environ[_SKIP] = "skip"  # until it has passed: it is a stage here, and ends no other
        if not arguments.rehearse:
            carried = [folder / kernel_cache.ARCHIVE for folder in (out, resume or out)]
            print(kernel_cache.unpack(next(filter(Path.exists, carried), carried[0])), flush=True)
        for step in _steps(arguments.stages, results):
            status = _step(step, end, arguments, results)
            results.write(
                {"session": session, "stage": step.stage, "ended": status, "small": step.small}
            )
            print(f"{step.stage}: {status}", flush=True)
            if step.stage == CHECK:
                _after_the_check(arguments, results, end)
        if not arguments.rehearse:
            print(kernel_cache.pack(out / kernel_cache.ARCHIVE), flush=True)
    return _summary(results)


def _steps(stages: Sequence[str], results: Results) -> list[Step]:
    """Those of the stages that were asked for, with the check, and kernels compiled for it; and
    with the ceilings that floors are formed from."""
    wanted = {*stages, CHECK}
    wanted |= set() if results.rehearsal else {"compiling"}
    wanted |= set() if results.rows("ceilings") else {"ceilings"}
    return [step for step in PLAN if step.stage in wanted]


def _step(step: Step, end: float, arguments: argparse.Namespace, results: Results) -> str:
    """Run a step, unless it has been; how it ended."""
    seconds = min(step.seconds, end - time.perf_counter())
    if step.stage == "compiling" and not arguments.rehearse:
        if kernel_cache.mark(compiling.code(EXCHANGED)).exists():
            return "ended: all kernels are there"
    elif step.stage != CHECK and results.whole(step.stage, step.small):
        return "ended before"
    if seconds < LEAST_S:
        return "left for the next call: the minutes are spent"

    def command(left: float) -> list[str]:
        return _command(step, left, arguments, results)

    limits = Limits(seconds, end, step.silence)
    if arguments.rehearse:
        limits = Limits(_REHEARSAL_S, time.perf_counter() + _REHEARSAL_S, _REHEARSAL_S)
    status = run_stage(step.stage, command, limits, results)
    if step.stage == "compiling" and not arguments.rehearse:
        print(kernel_cache.pack(results.folder / kernel_cache.ARCHIVE), flush=True)
    return status


def _command(step: Step, left: float, arguments: argparse.Namespace, results: Results) -> list[str]:
    words = [sys.executable, "-m", "benchmarks.gpu", step.stage, "--child", results.session]
    words += ["--out", str(results.folder), "--minutes", str(left / 60)]
    words += [f"--{name}" for name in ("rehearse", "retry") if getattr(arguments, name)]
    words += ["--small"] if step.small else []
    for option in ("prompts", "group", "new_tokens"):
        value = getattr(arguments, option)
        words += [] if value is None else [f"--{option.replace('_', '-')}", str(value)]
    return words


def _after_the_check(arguments: argparse.Namespace, results: Results, end: float) -> None:
    """What it found, and how the stages go on: with rows on the sides where it has passed."""
    side, failed = check.verdict(results)
    print(f"\n{check.said(results)}\n", flush=True)
    if failed:
        return
    del os.environ[_SKIP]  # from here on every process finds the pass, and the side
    if side != EXCHANGED and not kernel_cache.mark(compiling.code(side)).exists():
        again = next(step for step in PLAN if step.stage == "compiling")
        limits = Limits(again.seconds, end, again.silence)
        print("compiling, for that side:", run_stage(
            again.stage, lambda left: _command(again, left, arguments, results), limits, results
        ), flush=True)  # fmt: skip


def _summary(results: Results) -> int:
    """What a reader wants to see first: the check, what failed, what is missing, and the targets. 1
    if anything failed."""
    found = results.of_this_machine()
    own = [line for line in results.lines() if line["session"] == results.session]
    ends = {line["stage"]: line["ended"] for line in own if "ended" in line}
    bad = 0
    for name in ends:
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
    print(f"\n{table(results.folder)}\n\nstages of this call: {ends}")
    print(check.said(results))
    good = ("ended", "stopped after", "left")
    return int(bad > 0 or any(not end.startswith(good) for end in ends.values()))


def _why(line: Line) -> str:
    wrong = [
        f"{row['contestant']} does not hold: {'; '.join(row.get('failures', []))}".rstrip(": ")
        for row in line.get("rows", [])
        if not row.get("holds", True)
    ]
    errors = [
        f"{f['contestant']}: {f['error']}: {f['message'][:200]}" for f in line.get("failures", [])
    ]
    return "; ".join([*errors, *wrong, line.get("message", "")[-200:]])[:600]


if __name__ == "__main__":
    main()
