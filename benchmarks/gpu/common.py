"""What the GPU benchmarks share: a stage and its cases, models that fit, and rehearsals.

A case that fails is recorded with its message and ends nothing else, unless the GPU itself no
longer answers: then the process ends, and the command goes on with the next case in a new one. A
*rehearsal* runs the same code at toy sizes on the CPU, in Triton's interpreter. Its times mean
nothing; that it runs is what it is for.
"""

import gc
import os
import subprocess
import sys
import time
import traceback
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch

from benchmarks.gpu.results import Results
from benchmarks.gpu.shapes import SHAPES, shortened
from benchmarks.gpu.timing import Rotation, Timer, Timing, race
from benchmarks.work import Rates
from isobit import Model
from isobit.kernels import KVStore, get_ops
from isobit.model import Experts, ModelConfig, Tokenizer
from isobit.model.adapters.low_rank import Adapter
from isobit.model.hub.shapes import parameter_shapes
from isobit.model.transformer import Transformer
from isobit.precision import precision_from

GIB = 1 << 30
_Made = TypeVar("_Made")
PRESETS = ("bf16", "fp8-rollout", "fp8")
_LARGEST_CODE = 0x6F  # of INT8 111, of E4M3 120
GPU_LOST = 3
"""The exit status of a process whose GPU no longer answers: an illegal address, say, which stays
until it ends."""


@dataclass
class Case:
    """One case while it runs: its rows, and which of its contestants failed."""

    name: str
    rehearsal: bool
    rows: list[dict[str, object]] = field(default_factory=list)
    failures: list[dict[str, str]] = field(default_factory=list)

    def row(
        self,
        contestant: str,
        timing: Timing | float | None = None,
        floor_s: float | None = None,
        **more: object,
    ) -> None:
        """One measurement; `share` is the part of the floor that it reaches."""
        found = timing.fields() if isinstance(timing, Timing) else {"seconds": timing}
        seconds = found["seconds"]
        share = floor_s / seconds if floor_s is not None and isinstance(seconds, float) else None
        values = {
            "case": self.name,
            "contestant": contestant,
            **found,
            "floor_s": floor_s,
            "share": share,
            **more,
        }
        self.rows.append({key: value for key, value in values.items() if value is not None})

    def fail(self, contestant: str, error: BaseException) -> None:
        self.failures.append({"contestant": contestant, **described(error)})

    def time(
        self, contestants: Mapping[str, Rotation], samples: int | None = None
    ) -> dict[str, Timing]:
        """Each contestant's time; one that fails is recorded, and the others are timed."""
        timers: dict[str, Timer] = {}
        for name, contestant in contestants.items():
            with self.attempt(name):
                timers[name] = Timer(contestant, self.rehearsal)
        return race(timers, samples)

    @contextmanager
    def attempt(self, contestant: str) -> Iterator[None]:
        """Inside, an error is recorded as this contestant's. A Triton kernel that does not compile
        raises a plain Exception, so nothing narrower would do."""
        try:
            yield
        except Exception as error:
            self.fail(contestant, error)
            if not answers(self.rehearsal):
                raise


@dataclass
class Bench:
    """One stage: where its cases are written, and how much of its time is left."""

    name: str
    results: Results
    budget_s: float = 60.0
    failed: bool = False
    started: float = field(default_factory=time.perf_counter)

    @property
    def rehearsal(self) -> bool:
        return self.results.rehearsal

    @property
    def device(self) -> torch.device:
        return torch.device("cpu" if self.rehearsal else "cuda")

    @property
    def left_s(self) -> float:
        return self.budget_s - (time.perf_counter() - self.started)

    @property
    def rates(self) -> Rates | None:
        """What this machine reached at most (`ceilings.py`); None where that was not measured: then
        there is no floor."""
        most: dict[str, float] = {}
        for row in self.results.rows("ceilings"):
            most[row["what"]] = max(row["rate"], most.get(row["what"], 0.0))
        if not {"copy", "bf16", "fp8"} <= most.keys():
            return None
        return Rates(most["copy"], most["bf16"], most["fp8"])

    def wants(self, case: str, nbytes: float = 0.0) -> bool:
        """Whether to run the case: not if it is done, nor without the time or the memory, which is
        recorded."""
        if self.results.settled(self.name, case):
            return False
        if self.rehearsal:
            return True
        if self.left_s <= 0:
            self.miss(case, f"the {self.budget_s:.0f} s of this stage were spent")
            return False
        free = (
            torch.cuda.mem_get_info()[0]
            + torch.cuda.memory_reserved()
            - torch.cuda.memory_allocated()
        )
        if nbytes > 0.95 * free:
            self.miss(case, f"needs {nbytes / GIB:.0f} GiB, {free / GIB:.0f} are free")
            return False
        return True

    def miss(self, case: str, why: str) -> None:
        self.results.case(self.name, case, "missing", why=why)

    @contextmanager
    def case(self, name: str, around: bool = False) -> Iterator[Case]:
        """Inside, the case runs; its line is written when it ends, however it ends. `around` other
        cases: where one of these hangs, this one is run again for the others."""
        case, start = Case(name, self.rehearsal), time.perf_counter()
        self.results.case(self.name, name, "started", **({"around": True} if around else {}))
        lost = False
        try:
            yield case
            if not self.rehearsal:
                torch.cuda.synchronize()
        except Exception as error:  # a kernel may raise anything, and the other cases are wanted
            case.failures += (
                [] if _recorded(case, error) else [{"contestant": "the case", **described(error)}]
            )
            lost = not answers(self.rehearsal)
        bad = bool(case.failures) or not all(row.get("holds", True) for row in case.rows)
        self.failed |= bad
        more = {"failures": case.failures} if case.failures else {}
        status = "failed" if bad else "done"
        self.results.case(
            self.name, name, status, rows=case.rows, took_s=time.perf_counter() - start, **more
        )
        _print(self.name, name, case)
        if lost:
            sys.exit(GPU_LOST)
        release()

    def built(self, what: str, make: Callable[[], _Made]) -> _Made | None:
        """What several cases share, a case of its own that is run again for those that are left;
        None where it has failed, now or before, and without the time."""
        line = self.results.of_this_machine().get((self.name, what))
        if (
            line is not None
            and line["status"] == "failed"
            and self.results.settled(self.name, what)
        ):
            return None
        if self.left_s <= 0 and not self.rehearsal:
            self.miss(what, f"the {self.budget_s:.0f} s of this stage were spent")
            return None
        found: list[_Made] = []
        with self.case(what):
            found.append(make())
        return found[0] if found else None


def run_limited(
    command: Sequence[str], limit: float, **more: Any
) -> "subprocess.CompletedProcess[str]":
    """Run a process of its own session; TimeoutExpired, when it and all that it has started were
    killed at the limit. What outlived it would run beside what is timed next."""
    process = subprocess.Popen(command, start_new_session=True, text=True, **more)
    try:
        out, errors = process.communicate(timeout=limit)
        return subprocess.CompletedProcess(command, process.returncode, out, errors)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, 9)
            with suppress(subprocess.TimeoutExpired):  # the driver may hold it
                process.wait(20)


def described(error: BaseException) -> dict[str, str]:
    """An error for a reader who has only the file: its type, its message, and where it was
    raised."""
    frames = traceback.extract_tb(error.__traceback__)
    where = " < ".join(
        f"{frame.filename.rsplit('/', 1)[-1]}:{frame.lineno}" for frame in reversed(frames[-4:])
    )
    return {"error": type(error).__name__, "message": str(error)[:1500], "where": where}


def answers(rehearsal: bool) -> bool:
    """Whether the GPU still does. After some errors every later call fails alike, until the process
    ends."""
    if rehearsal or not torch.cuda.is_available():
        return True
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


def _recorded(case: Case, error: BaseException) -> bool:
    message = described(error)["message"]
    return any(failure["message"] == message for failure in case.failures)


def _print(stage: str, name: str, case: Case) -> None:
    """A line for a row, at once: a call that is cut off has shown what it found."""
    for row in case.rows:
        seconds = (
            f"{1e3 * row['seconds']:10.4f} ms" if isinstance(row.get("seconds"), float) else ""
        )
        share = f" {row['share']:5.0%} of the floor" if "share" in row else ""
        verdict = {True: " holds", False: " DOES NOT HOLD"}.get(row.get("holds"), "")  # type: ignore[call-overload]
        bits = f" {row['differing']} of {row['compared']} differ" if "differing" in row else ""
        print(
            f"{stage}: {row['case']}, {row['contestant']}: {seconds}{share}{bits}{verdict}",
            flush=True,
        )
    for failure in case.failures:
        print(
            f"{stage}: {name}, {failure['contestant']}: FAILED: {failure['error']}: "
            f"{failure['message'][:300]}"
        )


def release() -> None:
    """Give memory back between cases."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def shapes(bench: Bench) -> dict[str, ModelConfig]:
    """The models; in a rehearsal a toy of one dense layer and one with experts."""
    if not bench.rehearsal:
        return SHAPES
    toy = replace(
        SHAPES["Qwen3-30B-A3B"],
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        head_dim=16,
        max_positions=256,
        experts=Experts(4, 2, 32, dense_layers=(0,)),
    )
    return {"toy": toy}


def largest_first(bench: Bench) -> dict[str, ModelConfig]:
    """Return the models, those that a target is about first: a lease may end before the others."""
    return dict(reversed(shapes(bench).items()))


def fill_cache(store: KVStore) -> None:
    """Fill keys and values with random numbers about zero, as a norm leaves them. Codes are of both
    signs and finite: those of one sign would give every token the same large vector."""
    for data, scale in ((store.k, store.k_scale), (store.v, store.v_scale)):
        if data.is_floating_point():
            data.normal_()
        elif data.dtype == torch.int8:
            data.random_(-_LARGEST_CODE, _LARGEST_CODE + 1)
        else:  # E4M3, whose highest bit is the sign
            data.random_(0, _LARGEST_CODE + 1).bitwise_or_(torch.randint_like(data, 2) << 7)
        if scale is not None:
            scale.fill_(1 / 64)


def random_model(
    config: ModelConfig,
    precision: str,
    consistency: str = "bitwise",
    trained: bool = True,
    backend: str = "triton",
) -> Model:
    """Weights of the model, random; made on the device, since nobody waits for 8 billion on a CPU.
    Where it is not `trained`, no master is kept: an adapter of nothing freezes it."""
    ops = get_ops(backend, consistency)
    masters: Mapping[str, torch.Tensor] = _RandomMasters(config, ops.device)
    frozen = None if trained else Adapter(1, 1.0, (), {})
    if trained:
        masters = dict(masters)
    tokenizer = Tokenizer.characters("0123456789+-*=")
    flow = precision_from(precision)
    return Model(Transformer(config, flow, ops, masters, adapter=frozen), tokenizer)


class _RandomMasters(Mapping[str, torch.Tensor]):
    """Made when they are asked for, each from its own name; vectors are ones."""

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        self._shapes, self._device = parameter_shapes(config), device

    def __getitem__(self, name: str) -> torch.Tensor:
        shape = self._shapes[name]
        if len(shape) == 1:
            return torch.ones(shape, device=self._device)
        generator = torch.Generator(self._device).manual_seed(zlib.crc32(name.encode()))
        return torch.randn(shape, generator=generator, device=self._device) * 0.02

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)


def that_fits(
    name: str, config: ModelConfig, bench: Bench, per_parameter: float
) -> tuple[str, ModelConfig]:
    """The model, or as many of its layers as 60 % of the GPU's memory hold at so many bytes a
    parameter; and its name, which says so. Of its whole memory, so that a case has the same name in
    every session."""
    if bench.rehearsal:
        return name, config
    memory = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    fitting = shortened(config, 0.6 * memory, per_parameter)
    layers = fitting.num_layers
    return (
        name
        if layers == config.num_layers
        else f"{name}, {layers} of its {config.num_layers} layers"
    ), fitting


def presets(bench: Bench) -> tuple[str, ...]:
    """Those that are measured; a rehearsal takes the one that runs the most kernels."""
    return PRESETS[-1:] if bench.rehearsal else PRESETS


def consistencies(preset: str, bench: Bench) -> tuple[str, ...]:
    """Those that a preset is measured under; the interpreter has one product only."""
    return ("bitwise",) if bench.rehearsal or preset == "fp8-rollout" else ("bitwise", "fast")
