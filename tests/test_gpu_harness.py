"""What the benchmarks on a GPU rest on: how a call is timed, that a failure ends nothing else, and
that nothing is lost where a process ends."""

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import __main__ as command
from benchmarks.gpu import (
    bits,
    check,
    decode,
    grpo,
    kernel_cache,
    kernels,
    learner,
    results,
    sanitizer,
    supervise,
    tests,
    timing,
    two_processes,
)
from benchmarks.gpu.common import GPU_LOST, Bench, Case, random_model, shapes
from benchmarks.gpu.comparing import compared
from benchmarks.gpu.results import FILE, ROOMS, Results, digests
from benchmarks.gpu.timing import CALLS, Rotation, Timer, computed_nothing, race
from isobit import Engine, Sampling
from isobit.kernels.backends.self_check import EXCHANGED, ONE_SIDE
from isobit.kernels.backends.triton import TritonOps
from isobit.kernels.triton.launch import record_launches
from isobit.precision import E4M3, QTensor, QuantSpec
from isobit.run.source import code_digest
from tests.engine.helpers import differing
from tests.kernels.helpers import computed
from tests.models import slow_where, tiny_model

ROOT = Path(__file__).resolve().parents[1]
_machine, _digests = map(functools.cache, (results.gpu_machine, results.digests))


@pytest.fixture(autouse=True)
def _asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine, the commit and the digests of the source stay: git and 600 files are asked for
    them once, and not in every test."""
    monkeypatch.setattr(results, "gpu_machine", _machine)
    monkeypatch.setattr(results, "digests", _digests)


class Clock:
    """A pretended GPU: calls are launched in some microseconds, and run for as long as they say."""

    def __init__(self, captures: bool) -> None:
        self.now, self.captures, self.capturing, self.log = 0.0, captures, False, []

    def call(self, name: object, seconds: float) -> Callable[[], None]:
        def run() -> None:
            self.log.append(name)
            if not self.capturing:
                self.now += seconds + 50e-6  # Python's launch
            elif not self.captures:
                raise RuntimeError("operation not permitted when stream is capturing")
            else:
                self.graph.append(seconds)

        return run

    @contextmanager
    def capture(self, graph: "Graph", stream: object) -> Iterator[None]:
        self.capturing, self.graph = True, graph.calls
        try:
            yield
        finally:
            self.capturing = False


class Graph:
    clock: Clock

    def __init__(self) -> None:
        self.calls: list[float] = []

    def replay(self) -> None:
        self.clock.now += sum(self.calls)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Clock:
    clock = Clock(getattr(request, "param", True))

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            self.at = 0.0

        def record(self) -> None:
            self.at = clock.now

        def synchronize(self) -> None:
            pass

        def elapsed_time(self, end: "Event") -> float:
            return 1e3 * (end.at - self.at)

    class Stream:
        def wait_stream(self, other: object) -> None:
            pass

    @contextmanager
    def stream(which: object) -> Iterator[None]:
        yield

    monkeypatch.setattr(Graph, "clock", clock, raising=False)
    fakes = {
        "Event": Event,
        "Stream": Stream,
        "stream": stream,
        "current_stream": Stream,
        "CUDAGraph": Graph,
    }
    for name, fake in (fakes | {"graph": clock.capture, "synchronize": lambda: None}).items():
        monkeypatch.setattr(timing.torch.cuda, name, fake)
    return clock


def test_a_time_is_that_of_the_gpu_and_not_of_launches(gpu: Clock) -> None:
    contestant = Rotation([gpu.call(i, 2e-6) for i in range(3)], nbytes=100)
    found = race({"a": Timer(contestant, False), "b": Timer(Rotation([gpu.call(9, 4e-6)]), False)})
    assert found["a"].seconds == pytest.approx(2e-6)
    assert found["b"].seconds == pytest.approx(4e-6)
    assert found["a"].how == "graph"
    assert (found["a"].sets, found["a"].set_bytes) == (3, 300)
    assert found["a"].calls >= CALLS
    assert gpu.log[:3] == [0, 1, 2], "warmed up, each"
    captured = gpu.log[3:24]
    assert captured == [0, 1, 2] * 7, "at least 20 in a graph, in turns"


@pytest.mark.parametrize("gpu", [False], indirect=True)
def test_what_cannot_be_captured_is_timed_and_says_so(gpu: Clock) -> None:
    """The control of the test above: launched by Python, the same call takes 26 times as long."""
    found = race({"a": Timer(Rotation([gpu.call(0, 2e-6)]), False)})["a"]
    assert found.seconds == pytest.approx(52e-6)
    assert found.how == (
        "eager, the capture failed: RuntimeError: operation not permitted when stream is capturing"
    )
    assert found.calls >= CALLS


def test_long_calls_are_not_repeated(gpu: Clock) -> None:
    found = race({"a": Timer(Rotation([gpu.call(0, 0.5)], calls=1), False)})["a"]
    assert (found.calls, found.samples) == (1, 5)
    whole = race(
        {"a": Timer(Rotation([gpu.call("whole", 0.5)], eager=True, calls=1), False)}, samples=3
    )["a"]
    assert (whole.calls, whole.samples, whole.how) == (1, 3, "eager, as a run launches it")
    assert gpu.log.count("whole") == 4, "warmed up once, and counted three times"


def test_sets_exceed_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(timing, "l2_bytes", lambda: 50 << 20)
    for nbytes in (1 << 20, 3 << 20, 60 << 20, 1 << 30):
        assert timing.num_sets(nbytes) * nbytes >= 200 << 20
        assert timing.num_sets(nbytes) >= 2
    assert timing.num_sets(10) == 256


@pytest.mark.usefixtures("_idle")
def test_a_test_that_compares_tokens_needs_some() -> None:
    """Rollout and learner of kernels that do nothing differ in no token. The control is
    `tests/engine/test_triton.py`."""
    model = tiny_model("fp8", backend="triton", num_layers=1, head_dim=16)
    groups = Engine(model, page_size=4).generate([[3, 4], [5]], Sampling(1, 2, ignore_eos=True))
    with pytest.raises(AssertionError, match="nothing that could differ"):
        differing(model, groups)


@pytest.mark.usefixtures("_idle")
def test_what_the_sanitizer_watches_computes_something() -> None:
    """Kernels that do nothing have no error of memory either. The control is the rehearsal."""
    with pytest.raises(RuntimeError, match="the kernels compute nothing"):
        sanitizer.watched(rehearsal=True)


def test_a_result_of_zeros_is_of_kernels_that_do_nothing() -> None:
    """Of one tensor, several, codes and their scales. The controls: one number that is not 0, and
    what returns no tensor."""
    zeros, codes = torch.zeros(3), torch.zeros(1, 128, dtype=torch.uint8)
    spec = QuantSpec(E4M3, "1x128")
    nothing = QTensor(codes.view(torch.float8_e4m3fn), torch.zeros(1, 1), spec)
    assert not any(map(computed, (zeros, zeros - 1, zeros - torch.inf, zeros + torch.nan)))
    assert computed(torch.tensor([-1.0, -2.0]))
    for result in (zeros, (zeros, zeros.bfloat16()), [nothing, (zeros,)], -zeros):
        assert computed_nothing(result)
        with pytest.raises(RuntimeError, match="computed nothing"):
            Timer(Rotation([lambda result=result: result]), rehearsal=True)
    some = QTensor(nothing.data, torch.ones(1, 1), spec)
    for result in (torch.tensor([0.0, 1e-40]), (zeros, zeros + torch.nan), some, None, (), 3):
        assert not computed_nothing(result)
        assert Timer(Rotation([lambda result=result: result]), rehearsal=True).sample() >= 0


def _bench(folder: Path, stage: str = "kernels", session: str = "one", **more: Any) -> Bench:
    own = Results(folder, session, rehearsal=True, **more)
    own.begin()
    return Bench(stage, own)


def _lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / FILE).read_text().splitlines()]


def _broken(*_: object) -> None:
    raise type("CompilationError", (Exception,), {})(
        "PassManager::run failed"
    )  # Triton's are no RuntimeErrors


@pytest.mark.slow  # the next test has the same of one case
def test_a_broken_kernel_ends_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One contestant that does not compile, and one case that does not start."""
    ops = kernels.get_ops("triton")
    monkeypatch.setattr(type(ops), "gate_mul_quantized", _broken)
    monkeypatch.setattr(kernels, "_attend", _broken)
    monkeypatch.setattr(kernels, "_products", lambda case, *_: case.row("x", 1.0))
    bench = _bench(tmp_path)
    kernels.run(bench)
    assert bench.failed
    cases = {
        line["case"]: line for line in _lines(tmp_path) if line.get("status") in ("done", "failed")
    }
    failed = {name for name, line in cases.items() if line["status"] == "failed"}
    assert failed == {
        name for name in cases if name.startswith(("attention", "gate_mul_quantized"))
    }
    assert len(cases) == 15
    (failure,) = cases["gate_mul_quantized, 4 rows"]["failures"]
    assert (failure["error"], failure["message"]) == ("CompilationError", "PassManager::run failed")
    assert "test_gpu_harness.py" in failure["where"]
    assert cases["rms_norm_quantized, 4 rows"]["rows"]


@pytest.mark.slow
def test_one_contestant_fails_and_the_others_are_timed(tmp_path: Path) -> None:
    bench = _bench(tmp_path)
    with bench.case("a") as case:
        for name, found in case.time(
            {"bad": Rotation([_broken]), "good": Rotation([lambda: None])}
        ).items():
            case.row(name, found)
    line = _lines(tmp_path)[-1]
    assert (line["status"], [row["contestant"] for row in line["rows"]]) == ("failed", ["good"])
    assert [failure["contestant"] for failure in line["failures"]] == ["bad"]


def test_where_the_gpu_is_lost_the_process_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = _bench(tmp_path)
    monkeypatch.setattr("benchmarks.gpu.common.answers", lambda rehearsal: False)
    with pytest.raises(SystemExit) as stop, bench.case("a") as case, case.attempt("x"):
        _broken()
    assert stop.value.code == GPU_LOST
    assert _lines(tmp_path)[-1]["status"] == "failed"
    assert len(_lines(tmp_path)[-1]["failures"]) == 1


@pytest.mark.slow
def test_a_run_goes_on_where_another_was_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = _bench(tmp_path)
    for name in ("a", "b"):
        with bench.case(name) as case:
            case.row("x", 1.0)
            if name == "b":
                _broken()
    bench.results.case("kernels", "c", "started")
    with (tmp_path / FILE).open("a") as file:
        file.write('{"session": "one", "stage": "kernels", "case": "c", "st')  # torn
    later = _bench(tmp_path, session="two")
    assert [later.wants(name) for name in "abcd"] == [False, False, True, True]
    assert later.results.rows("kernels") == [
        {"case": name, "contestant": "x", "seconds": 1.0} for name in "ab"
    ]
    assert [_bench(tmp_path, session="three", retry=True).wants(name) for name in "abc"] == [
        False,
        True,
        True,
    ]
    monkeypatch.setattr(
        "benchmarks.gpu.results.digests", lambda: dict.fromkeys(ROOMS, "other code")
    )
    changed = _bench(tmp_path, session="four")
    assert [changed.wants(name) for name in "abcd"] == [True] * 4
    assert changed.results.rows("kernels") == []


def test_a_stage_without_time_says_what_is_missing(tmp_path: Path) -> None:
    own = Results(tmp_path, "one")
    own.begin()
    assert not Bench("decode", own, budget_s=-1.0).wants("a")
    assert (_lines(tmp_path)[-1]["status"], _lines(tmp_path)[-1]["case"]) == ("missing", "a")
    assert not own.whole("decode")


@pytest.mark.slow
def test_what_a_stage_does_not_run_restarts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for stage in ("kernels", "grpo"):
        with _bench(tmp_path, stage, f"first {stage}").case("a") as case:
            case.row("x", 1.0)
    code = digests() | {"rl": "edited"}
    monkeypatch.setattr("benchmarks.gpu.results.digests", lambda: code)
    found = {stage: _bench(tmp_path, stage, f"then {stage}") for stage in ("kernels", "grpo")}
    assert {stage: bench.wants("a") for stage, bench in found.items()} == {
        "kernels": False,
        "grpo": True,
    }


def test_small_cases_are_not_the_whole_of_a_stage(tmp_path: Path) -> None:
    results = _bench(tmp_path, "grpo").results
    end = {"session": "one", "stage": "grpo", "ended": "ended"}
    results.case("grpo", "a", "done")
    results.write(end | {"small": True})
    assert results.whole("grpo", small=True)
    assert not results.whole("grpo")
    results.write(end | {"small": False})
    assert results.whole("grpo")


def test_what_code_computes_has_a_name(tmp_path: Path) -> None:
    """A comment, a docstring and a line's place do not change it; a number does."""
    texts = {
        "one": "def f(x):\n    return x + 1\n",
        "said": '"""A module."""\n\n\ndef f(x):  # more\n    """What it is."""\n\n    return x + 1\n',
        "two": "def f(x):\n    return x + 2\n",
    }
    for name, text in texts.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "module.py").write_text(text)
    one, said, two = (code_digest(tmp_path / name) for name in texts)
    assert one == said != two


def _run(bench: Bench, silence: float = 60.0, seconds: float = 100.0, **more: Any) -> str:
    limits = supervise.Limits(seconds, 1e18, silence)
    return supervise.run_stage(bench.name, lambda left: ["unused"], limits, bench.results, **more)


def test_where_a_process_dies_the_next_one_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = _bench(tmp_path, "bits")
    ends = iter([-11, GPU_LOST, 0])

    def run(*given: object) -> tuple[int, str]:
        status = next(ends)
        name = f"case before {status}"
        bench.results.case("bits", name, "started")
        if status != -11:
            bench.results.case("bits", name, "failed" if status else "done")
        return status, ""

    monkeypatch.setattr(supervise, "watched", run)
    assert _run(bench) == "ended"
    found = {case: line["status"] for (_, case), line in bench.results.of_this_machine().items()}
    assert found == {
        "case before -11": "failed",
        f"case before {GPU_LOST}": "failed",
        "case before 0": "done",
    }
    assert next(ends, None) is None


def test_a_stage_that_is_stopped_leaves_its_case_for_the_next_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = _bench(tmp_path, "bits")
    bench.results.case("bits", "a", "started")
    monkeypatch.setattr(supervise, "watched", lambda *given: (None, "late"))
    assert _run(bench).startswith("stopped after")
    assert _lines(tmp_path)[-1]["status"] == "cut"
    assert _bench(tmp_path, "bits", "two").wants("a")


_HANGS = """
import json, sys, time
path, session = sys.argv[1:]
lines = [json.loads(line) for line in open(path)]
ended = {line["case"] for line in lines if line.get("status") in ("done", "failed")}

def write(case, status, **more):
    line = {"session": session, "stage": "bits", "case": case, "status": status, **more}
    with open(path, "a") as file:
        file.write(json.dumps(line) + "\\n")

write("around", "started", around=True)
for name in "abc":
    if name not in ended:
        write(name, "started")
        if name == "b":
            time.sleep(60)
        write(name, "done")
write("around", "done")
"""


@pytest.mark.slow
def test_a_case_that_hangs_costs_itself_alone(tmp_path: Path) -> None:
    """Its process is ended, it has failed and is not run again, and another process goes on; the
    case around it is run again."""
    bench = _bench(tmp_path, "bits")
    program = tmp_path / "stage.py"
    program.write_text(_HANGS)
    words = [sys.executable, str(program), str(bench.results.path), "one"]
    limits = supervise.Limits(100.0, 1e18, 1.5)
    assert supervise.run_stage("bits", lambda left: words, limits, bench.results) == "ended"
    found = {case: line for (_, case), line in bench.results.of_this_machine().items()}
    assert {case: line["status"] for case, line in found.items()} == {
        **dict.fromkeys(("a", "c", "around"), "done"),
        "b": "failed",
    }
    assert found["b"]["failures"][0]["error"] == "hang"
    again = _bench(tmp_path, "bits", "two")
    assert not again.wants("b")


@pytest.mark.slow
def test_a_case_that_hangs_at_the_limit_of_its_stage_is_known_to(tmp_path: Path) -> None:
    """Otherwise it would be left for the next call, and hang there again. A case that goes on is
    waited for, to its end. The control: where the call ends, so does either."""
    file, step = tmp_path / "lines", "open('lines', 'a').write('x\\n'); time.sleep(4)"
    hangs = [sys.executable, "-c", f"import os, time; os.chdir({str(tmp_path)!r}); {step}"]
    code = "; ".join([hangs[2], "open('lines', 'a').write('ended\\n'); time.sleep(9)"])
    works = [sys.executable, "-c", code]
    assert supervise.watched(hangs, file, 0.3, 1.0, 60.0) == (None, "silent")
    assert supervise.watched(works, file, 2.0, 60.0, 60.0) == (None, "late")
    assert file.read_text().endswith("ended\n")
    for words in (hangs, works):
        file.write_text("")
        assert supervise.watched(words, file, 0.3, 60.0, 0.6) == (None, "late")
        assert "ended" not in file.read_text()


def test_a_stage_in_which_all_hangs_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = _bench(tmp_path, "bits")
    names = iter("abcdef")

    def run(*given: object) -> tuple[None, str]:
        bench.results.case("bits", next(names), "started")
        return None, "silent"

    monkeypatch.setattr(supervise, "watched", run)
    assert _run(bench) == "stopped: 3 cases hung; the others are left for the next call"
    assert next(names) == "d"
    monkeypatch.setattr(supervise, "watched", lambda *given: (None, "silent"))
    assert _run(bench, 5.0) == "stopped: outside of any case it said nothing for 5 s"


@pytest.mark.slow
def test_a_process_that_takes_too_long_is_ended_with_its_children(tmp_path: Path) -> None:
    mark, file = tmp_path / "mark", tmp_path / "lines"
    child = f"import time; time.sleep(2); open({str(mark)!r}, 'w')"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    assert supervise.watched([sys.executable, "-c", code], file, 0.5, 60) == (None, "late")
    assert supervise.watched([sys.executable, "-c", code], file, 60, 0.5) == (None, "silent")
    ends = [sys.executable, "-c", "raise SystemExit(5)"]
    assert supervise.watched(ends, file, 60.0, 60.0) == (5, "")
    subprocess.run([sys.executable, "-c", "import time; time.sleep(2)"], check=True)
    assert not mark.exists()


def _check(folder: Path, session: str, tried: dict[str, list[str]]) -> Results:
    bench = _bench(folder, "check", session)
    with bench.case(check.CASE) as case:
        check.record(case, tried)
    return bench.results


@pytest.mark.parametrize(
    ("tried", "side", "failed", "says"),
    [
        ({EXCHANGED: []}, EXCHANGED, [], "the check passed"),
        ({ONE_SIDE: []}, ONE_SIDE, [], "exchanged operands change bits"),
        ({EXCHANGED: ["x"], ONE_SIDE: []}, ONE_SIDE, [], "exchanged operands"),
        ({EXCHANGED: ["x"]}, EXCHANGED, ["x"], "THE CHECK FAILED, and no figure counts: x"),
        ({EXCHANGED: ["x"], ONE_SIDE: ["y"]}, ONE_SIDE, ["y"], "FAILED"),
    ],
)
def test_the_check_says_how_it_goes_on(
    tried: dict[str, list[str]], side: str, failed: list[str], says: str, tmp_path: Path
) -> None:
    results = _check(tmp_path, "one", tried)
    assert check.verdict(results) == (side, failed)
    assert says in check.said(results)
    assert _lines(tmp_path)[-1]["status"] == ("failed" if failed else "done")


def test_a_check_that_died_has_not_passed(tmp_path: Path) -> None:
    results = _bench(tmp_path, "check").results
    results.case("check", check.CASE, "started")
    assert check.verdict(results)[1] == ["the check has not come to its end"]
    results.case("check", check.CASE, "failed", failures=[{"error": "hang", "message": "no"}])
    assert check.verdict(results)[1] == ["the check has not come to its end"]


def test_every_call_begins_with_the_check(tmp_path: Path) -> None:
    results = _check(tmp_path, "one", {EXCHANGED: []})
    assert [step.stage for step in command._steps(["kernels"], results)][:2] == [
        "check",
        "ceilings",
    ]
    first = [step.stage for step in command.PLAN]
    assert first[:4] == ["compiling", "check", "bits", "grpo"]
    assert sum(step.seconds for step in command.PLAN[:4]) <= 9 * 60


def test_compiled_kernels_are_carried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each kernel what a launch needs, found where the other machine's cache is elsewhere."""
    here, there = tmp_path / "here", tmp_path / "there"
    archive = tmp_path / "out" / kernel_cache.ARCHIVE
    monkeypatch.setenv("TRITON_CACHE_DIR", str(here))
    assert kernel_cache.pack(archive) == "no kernels to carry"
    (here / "KEY").mkdir(parents=True)
    for name in ("k.cubin", "k.json", "k.ptx", "k.ttir"):
        (here / "KEY" / name).write_text(name)
    paths = {name: str(here / "KEY" / name) for name in ("k.cubin", "k.json", "k.ptx")}
    (here / "KEY" / "__grp__k.json").write_text(json.dumps({"child_paths": paths}))
    kernel_cache.mark("code").touch()
    assert kernel_cache.pack(archive).startswith("4 files of kernels")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(there))
    there.mkdir()
    assert kernel_cache.unpack(archive).startswith("4 files of kernels")
    assert {path.name for path in (there / "KEY").iterdir()} == {
        "k.cubin",
        "k.json",
        "__grp__k.json",
    }
    group = json.loads((there / "KEY" / "__grp__k.json").read_text())["child_paths"]
    assert group["k.cubin"] == str(there / "KEY" / "k.cubin")
    assert kernel_cache.mark("code").exists()
    assert not kernel_cache.mark("other").exists()
    monkeypatch.setattr(kernel_cache, "_MOST", 10)
    assert "not carried" in kernel_cache.pack(tmp_path / "small" / kernel_cache.ARCHIVE)
    assert list((tmp_path / "small").iterdir()) == []


@pytest.mark.slow
def test_floors_are_of_what_this_machine_reached(tmp_path: Path) -> None:
    bench = _bench(tmp_path, "ceilings")
    assert bench.rates is None, "no other GPU's numbers"
    for what, rate in (("copy", 3e12), ("copy", 2e12), ("bf16", 7e14), ("fp8", 1.2e15)):
        with bench.case(f"{what} {rate}") as case:
            case.row("x", 1.0, what=what, rate=rate)
    rates = bench.rates
    assert rates is not None
    assert (rates.bandwidth, rates.bf16, rates.fp8) == (3e12, 7e14, 1.2e15)


def test_bits_that_prove_nothing_do_not_hold() -> None:
    case, x = Case("a", True), torch.tensor([1.0, 2.0, 3.0])
    compared(case, "equal", x, x.clone())
    compared(
        case,
        "one bit",
        x.view(torch.int32).add(torch.tensor([0, 1, 0], dtype=torch.int32)).view(torch.float32),
        x,
    )
    compared(case, "control", x, x.clone(), "different")
    compared(case, "zeros", torch.zeros(3), torch.zeros(3))
    compared(case, "nan", torch.full((3,), torch.nan), torch.full((3,), torch.nan))
    compared(case, "a record", -x, x, None)
    assert [row.get("holds") for row in case.rows] == [True, False, False, False, False, None]
    assert (case.rows[1]["differing"], case.rows[1]["first"]) == (1, 1)
    assert case.rows[1]["largest"] == pytest.approx(2**-22 / 3)


@pytest.mark.slow
def test_a_tile_that_changed_a_bit_would_be_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    product = bits.product_module.product

    def wrong(a: Any, b: Any, bias: Any, out: torch.dtype) -> torch.Tensor:
        y = product(a, b, bias, out)
        return (
            y * (1 + 2**-20) if bits.product_module.plan(5, 64, 32, torch.uint8).tile_m == 64 else y
        )

    for implementation, expected in ((product, "done"), (wrong, "failed")):
        monkeypatch.setattr(bits.product_module, "product", implementation)
        bench = _bench(tmp_path, "bits", expected)
        with bench.case(expected) as case:
            bits._tiles("fp8", 64, 32, case, bench)
        line = _lines(tmp_path)[-1]
        assert line["status"] == expected
        wrong_rows = {row["contestant"][:6] for row in line["rows"] if not row["holds"]}
        assert wrong_rows == ({"N = 64", "64 tok"} if expected == "failed" else set())


@pytest.mark.parametrize("kind", ["fp8", "bf16"])
def test_a_product_whose_columns_are_divided_would_be_found(
    kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Where one row alone is the sum of two halves of K, in float32: rounded to BF16, as results
    were compared once, next to nothing shows."""
    product: Any = TritonOps.product
    share: list[list[float]] = []

    def divided(ops: TritonOps, a: Any, b: Any, bias: Any, out: torch.dtype) -> torch.Tensor:
        whole = product(ops, a, b, bias, torch.float32)
        if a.shape[0] > 1:
            return whole.to(out)
        left, right = (
            product(ops, *(_columns(x, part) for x in (a, b)), bias, torch.float32)
            for part in (slice(0, 256), slice(256, 512))
        )
        pairs = [(left + right, whole), ((left + right).bfloat16(), whole.bfloat16())]
        share.append([float((x != y).float().mean()) for x, y in pairs])
        return (left + right).to(out)

    monkeypatch.setattr(TritonOps, "product", divided)
    torch.manual_seed(0)
    bench = _bench(tmp_path, "bits", "rows")
    with bench.case("rows") as case:
        bits._rows_of_products(kind, 128, 512, case, bench)
    rows = {row["contestant"]: row["holds"] for row in _lines(tmp_path)[-1]["rows"]}
    assert not rows["1 from 0 of 9"]
    assert rows["4 from 0 of 9"], "the control: as it was"
    in_float32, in_bf16 = (sum(numbers) / len(share) for numbers in zip(*share))
    assert in_float32 > 0.1
    assert in_bf16 < 0.01


def _columns(x: Any, part: slice) -> Any:
    if isinstance(x, torch.Tensor):
        return x[:, part].contiguous()
    scales = slice(part.start // 128, part.stop // 128)
    return QTensor(x.data[:, part].contiguous(), x.scale[:, scales].contiguous(), x.spec)


_SUITE = """
import pytest
def test_good(): pass
def test_bad(): assert 1 == 2, "a message"
@pytest.mark.skip
def test_none(): pass
@pytest.mark.parametrize("i", range(3))
def test_more(i): pass
"""


def _suite(text: str, workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """The stage over a file of tests."""
    (tmp_path / "test_suite.py").write_text(text)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "src"), str(ROOT)]))
    for name in [name for name in os.environ if name.startswith("PYTEST_")]:
        monkeypatch.delenv(name)
    if not workers:
        monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # others' take a second
    monkeypatch.setattr(tests, "_REHEARSED", ("test_suite.py",))
    original = tests._pytest
    monkeypatch.setattr(tests, "_pytest", lambda chosen, _, bench: original(chosen, workers, bench))
    bench = _bench(tmp_path, "tests")
    tests.run(bench)
    return bench


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_every_test_is_a_case_and_is_not_run_twice(
    workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = _suite(_SUITE, workers, tmp_path, monkeypatch)
    found = {case: line for (_, case), line in bench.results.of_this_machine().items()}
    outcomes = {
        case.partition("::")[2]: line["outcome"] for case, line in found.items() if "::" in case
    }
    passed = ("test_good", "test_more[0]", "test_more[1]", "test_more[2]")
    assert outcomes == {
        **dict.fromkeys(passed, "passed"),
        "test_bad": "failed",
        "test_none": "skipped",
    }
    assert "a message" in found["test_suite.py::test_bad"]["message"]
    group = found["pytest: bits"]
    assert group["status"] == "failed"
    assert (
        group["rows"][0].items() >= {"passed": 4, "failed": 1, "skipped": 1, "holds": False}.items()
    )
    before = len(_lines(tmp_path))
    bench.results.case("tests", "pytest: bits", "cut")
    tests.run(bench)
    again = [line for line in _lines(tmp_path)[before:] if "::" in line.get("case", "")]
    assert again == [], "all of them are on record"


_LOST = """
import os, pytest
from benchmarks.gpu import tests
tests.answers = lambda rehearsal: "LOST" not in os.environ
@pytest.mark.parametrize("i", range(12))
def test_more(i):
    assert "LOST" not in os.environ, "what another test has done"
    if i == 3:
        os.environ["LOST"] = "1"
        assert False, "illegal address"
"""


@pytest.mark.slow
def test_a_test_that_loses_the_gpu_fails_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = _suite(_LOST, 2, tmp_path, monkeypatch)
    found = {
        case: line for (_, case), line in bench.results.of_this_machine().items() if "::" in case
    }
    failed = [case for case, line in found.items() if line["outcome"] == "failed"]
    assert failed == ["test_suite.py::test_more[3]"]
    assert len(found) == 12
    assert (
        "illegal address" in found[failed[0]]["message"] or "crashed" in found[failed[0]]["message"]
    )


@pytest.mark.slow
@pytest.mark.parametrize("status", slow_where([0, 5, 2, -9], lambda status: status not in (0, 5)))
def test_a_pytest_that_records_nothing_has_failed(
    status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No test found is no success: it has not begun."""
    monkeypatch.setattr(tests, "_pytest", lambda *_: status)
    bench = _bench(tmp_path, "tests")
    tests.run(bench)
    assert bench.failed
    assert _lines(tmp_path)[-1]["status"] == "failed"
    bench.results.case("tests", f"{tests._REHEARSED[0]}::test_a", "done", outcome="passed")
    bench.results.case("tests", "pytest: bits", "cut")
    tests.run(bench)
    assert _lines(tmp_path)[-1]["status"] == ("done" if status in (0, 5) else "failed")


@pytest.mark.parametrize(("errors", "holds"), [(0, True), (2, False)])
def test_what_the_sanitizer_finds_is_kept(
    errors: int, holds: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / sanitizer.PROGRAM
    line = "========= Invalid __global__ read of size 16 bytes\n" if errors else ""
    program.write_text(
        f"#!/bin/sh\nprintf '{line}========= ERROR SUMMARY: {errors} errors\\n'\nexit "
        f"{86 if errors else 0}\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    bench = _bench(tmp_path, "sanitizer")
    sanitizer.run(bench)
    (row,) = _lines(tmp_path)[-1]["rows"]
    assert row["holds"] is holds
    assert row["summary"] == [f"{errors} errors"]
    assert bench.failed is not holds
    assert ("Invalid __global__ read" in " ".join(row["found"])) is not holds


_COMPILED = """
import torch, triton
from pathlib import Path
from triton.backends.compiler import GPUTarget

class Driver:
    def get_current_target(self): return GPUTarget("cuda", 90, 32)
    def get_current_device(self): return 0
    def get_current_stream(self, device): return 0

triton.runtime.driver.set_active(Driver())
from dataclasses import replace
from benchmarks.gpu.compiling import compile_all, distinct

launches = [l for l in distinct() if l.kernel.__name__ == "_row_sums"][:1]
assert len(launches) == 1
(line,) = compile_all(launches)
assert "failure" not in line, line
cache = Path(FOLDER)
before = sorted(p.name for p in cache.iterdir())
assert before
launches[0].kernel.device_caches.clear()

def real(value):
    return torch.empty(64, dtype=value.dtype) if isinstance(value, torch.Tensor) else value

(line,) = compile_all([replace(launches[0], arguments=tuple(map(real, launches[0].arguments)))])
assert "failure" not in line, line
assert sorted(p.name for p in cache.iterdir()) == before, "a launch over real memory finds the kernel"
other = {**launches[0].constants, "TILE": 2 * launches[0].constants["TILE"]}
(line,) = compile_all([replace(launches[0], constants=other)])
assert len(sorted(cache.iterdir())) > len(before), "the control"
(line,) = compile_all([replace(launches[0], constants={})])
assert line["failure"]
"""


@pytest.mark.slow
def test_what_is_compiled_ahead_is_found_when_it_is_launched(tmp_path: Path) -> None:
    """Without a GPU: Triton's own key, under a driver that says sm_90."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {
        "TRITON_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
    }
    code = _COMPILED.replace("FOLDER", repr(str(tmp_path)))
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("preset", ["fp8", "bf16"])
def test_where_nothing_is_trained_no_master_is_kept(preset: str, tmp_path: Path) -> None:
    """And the working weights are those that masters would have made: every byte."""
    config = replace(shapes(_bench(tmp_path))["toy"], num_layers=1)
    frozen, trained = (random_model(config, preset, trained=some) for some in (False, True))
    assert frozen.named_parameters() == {}
    assert sum(p.numel() for p in trained.parameters()) > 10_000
    stored = (model.transformer.learner_storage() for model in (frozen, trained))
    pairs = list(zip(*stored, strict=True))
    assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs)


@pytest.fixture
def _idle(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels are launched and do nothing, over memory that is zero."""
    empty, like = torch.empty, torch.empty_like
    monkeypatch.setattr(torch, "empty", lambda *a, **more: empty(*a, **more).zero_())
    monkeypatch.setattr(torch, "empty_like", lambda *a, **more: like(*a, **more).zero_())
    new = torch.Tensor.new_empty
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *a, **more: new(*a, **more).zero_())
    with record_launches():
        yield


@pytest.mark.slow
@pytest.mark.usefixtures("_idle")
def test_kernels_that_do_nothing_pass_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rollout and learner then agree in every bit. The control is the rehearsal of
    tests/test_gpu_benchmarks.py, in which these stages' cases are done."""
    stages: dict[str, Callable[[Bench], None]] = {
        "check": check.run,
        "grpo": lambda bench: grpo.run(bench, small=True),
        "bits": bits.run,
        "decode": decode.run,
        "kernels": kernels.run,
        "learner": learner.run,
    }
    monkeypatch.setattr(two_processes, "run", lambda bench: None)  # others, which compute
    for name, run in stages.items():
        run(_bench(tmp_path, name, name))
    lines = [line for line in _lines(tmp_path) if line.get("status") in ("done", "failed")]
    assert {line["stage"] for line in lines} == set(stages)
    records = ("cuBLAS", "the matrix instruction")  # which claim nothing here
    done = [line["case"] for line in lines if line["status"] == "done"]
    done = [case for case in done if not case.endswith(": the model")]  # which only builds it
    assert [case for case in done if not case.startswith(records)] == []
    steps = [row for line in lines for row in line["rows"] if "differing_tokens" in row]
    assert steps
    assert not any(row["sound"] for row in steps)
