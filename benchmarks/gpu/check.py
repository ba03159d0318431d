"""The check of a first start (`isobit.kernels.backends.self_check`), which every call begins with:
what follows counts only where it passes.

Where exchanged operands of an instruction change bits, attention and products have all rows on one
side from here on, in every stage, as a run would have; what else fails is named, and the stages go on, so that one
call shows as much as it can. Left out: whole models (`bits.py`).
"""

from benchmarks.gpu.common import Bench, Case
from benchmarks.gpu.results import Results
from isobit.kernels.backends import self_check
from isobit.kernels.backends.self_check import EXCHANGED
from isobit.kernels.backends.triton import TritonOps
from isobit.kernels.gpu import ARCHITECTURES, find_gpu
from isobit.kernels.triton.launch import compile_for, target

CASE = "rows alone and among others, against the definitions"


def run(bench: Bench) -> None:
    """One case, in every call: the next machine may be another one."""
    with bench.case(CASE) as case:
        gpu = find_gpu()
        if gpu is not None and gpu.capability in ARCHITECTURES:
            compile_for(ARCHITECTURES[gpu.capability])
        tried: dict[str, list[str]] = {}
        ops = TritonOps("bitwise", "being checked", bench.device)
        sizes = self_check.SMALL if bench.rehearsal else self_check.FULL
        self_check.remembered(ops, target().fp8, tried, sizes)
        record(case, tried)


def record(case: Case, tried: dict[str, list[str]]) -> None:
    """A row for each side that was tried; the last is what is computed with."""
    *before, side = tried
    for name in before:
        case.row(name, failures=tried[name])
    case.row(side, failures=tried[side], holds=not tried[side])


def verdict(results: Results) -> tuple[str, list[str]]:
    """(the side that this session's rows stand on, what failed there); where the check has not come
    to an end, that."""
    lines = [
        line
        for line in results.lines()
        if line["session"] == results.session and line.get("stage") == "check" and "rows" in line
    ]
    if not lines or not lines[-1]["rows"]:
        return EXCHANGED, ["the check has not come to its end"]
    row = lines[-1]["rows"][-1]
    return row["contestant"], row["failures"]


def said(results: Results) -> str:
    """What a reader has to know before all else."""
    side, failed = verdict(results)
    if failed:
        return f"THE CHECK FAILED, and no figure counts: {failed[0]} ({len(failed)} in all)"
    if side == EXCHANGED:
        return "the check passed"
    return (
        "the check passed with all rows on one side of the instructions: exchanged operands "
        "change bits on this GPU"
    )
