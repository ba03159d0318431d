"""What the GPU benchmarks share: time by events, contestants in turns, a budget, rows with their floor, and rehearsals.

A *rehearsal* runs the same code at toy sizes on the CPU, in Triton's interpreter. Its times mean nothing; that it runs
is what it is for. What the budget or the memory does not allow is listed as missing, with the reason.
"""

import gc
import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from benchmarks.common import machine
from benchmarks.gpu.shapes import SHAPES, shortened
from isobit import Model
from isobit.errors import IsobitError
from isobit.kernels import find_gpu, get_ops, versions
from isobit.model import Experts, ModelConfig, Tokenizer
from isobit.model.transformer import Transformer, parameter_shapes
from isobit.precision import precision_from

GIB = 1 << 30
PRESETS = ("bf16", "fp8-rollout", "fp8")
_L2_BYTES = 60 << 20


@dataclass
class Bench:
    """One stage: its rows, what is missing, and how much of its budget is left."""

    name: str
    rehearsal: bool = False
    budget_s: float = 60.0
    rounds: int = 20
    rows: list[dict[str, object]] = field(default_factory=list)
    missing: list[dict[str, str]] = field(default_factory=list)
    failed: bool = False
    started: float = field(default_factory=time.perf_counter)

    @property
    def device(self) -> torch.device:
        return torch.device("cpu" if self.rehearsal else "cuda")

    @property
    def left_s(self) -> float:
        return self.budget_s - (time.perf_counter() - self.started)

    def has_time(self, case: str) -> bool:
        """Whether to go on; if not, the case is missing."""
        if self.left_s > 0 or self.rehearsal:
            return True
        self.miss(case, f"the budget of {self.budget_s:.0f} s was spent")
        return False

    def fits(self, case: str, nbytes: float) -> bool:
        """Whether that many bytes are free; if not, the case is missing."""
        if self.rehearsal:
            return True
        free = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        if nbytes < 0.95 * free:
            return True
        self.miss(case, f"needs {nbytes / GIB:.0f} GiB, {free / GIB:.0f} are free")
        return False

    def miss(self, case: str, why: str) -> None:
        self.missing.append({"case": case, "why": why})

    def row(self, case: str, contestant: str, seconds: float, floor_s: float | None = None, **more: object) -> None:
        """One measurement; `share` is the part of the floor that it reaches."""
        share = None if floor_s is None else floor_s / seconds
        values = {"case": case, "contestant": contestant, "seconds": seconds, "floor_s": floor_s, "share": share}
        self.rows.append({key: value for key, value in (values | more).items() if value is not None})

    def time(
        self, case: str, contestants: Mapping[str, Callable[[], object]], rounds: int | None = None
    ) -> dict[str, float]:
        """Median seconds of each contestant, which run in turns. One that fails is missing. A rehearsal takes the first
        call, which is the compiler's and the caches' too."""
        first: dict[str, float] = {}
        for name, call in contestants.items():
            with self.attempt(f"{case}, {name}"):
                first[name] = self._once(call)
        if self.rehearsal:
            return first
        samples: dict[str, list[float]] = {name: [] for name in first}
        for turn in range((rounds or self.rounds) + 2):
            for name in first:
                seconds = self._once(contestants[name])
                if turn >= 2:
                    samples[name].append(seconds)
        return {name: statistics.median(found) for name, found in samples.items()}

    @contextmanager
    def attempt(self, case: str) -> Iterator[None]:
        """Inside, an error makes the case missing and the stage failed, and ends nothing else."""
        try:
            yield
            self.wait()
        except (RuntimeError, ValueError, NotImplementedError, IsobitError) as error:
            self.failed = True
            self.miss(case, f"{type(error).__name__}: {str(error).splitlines()[0][:200]}")

    def wait(self) -> None:
        if not self.rehearsal:
            torch.cuda.synchronize()

    def _once(self, call: Callable[[], object]) -> float:
        if self.rehearsal:
            start = time.perf_counter()
            call()
            return time.perf_counter() - start
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3

    def write(self, folder: Path) -> None:
        """One JSON file: machine, versions, commit, rows, what is missing."""
        folder.mkdir(parents=True, exist_ok=True)
        content = {
            "name": self.name,
            "rehearsal": self.rehearsal,
            "machine": gpu_machine(),
            "rows": self.rows,
            "missing": self.missing,
            "took_s": time.perf_counter() - self.started,
        }
        (folder / f"{self.name}.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def gpu_machine() -> dict[str, object]:
    """The machine, the GPU, and the versions that can change a bit."""
    gpu = find_gpu()
    name = None if gpu is None else {"name": gpu.name, "architecture": gpu.architecture, "memory": gpu.memory}
    return machine() | versions() | {"gpu": name}


def release() -> None:
    """Give memory back between cases."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def copies(nbytes: int, rehearsal: bool) -> int:
    """How many sets of inputs of this size to rotate among, so that the cache holds none of them."""
    return 1 if rehearsal else max(1, -(-4 * _L2_BYTES // max(nbytes, 1)))


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


def random_model(config: ModelConfig, precision: str, bench: Bench, consistency: str = "bitwise") -> Model:
    """Weights of the model, random; made on the device, since nobody waits for 8 billion on a CPU."""
    ops = get_ops("triton", consistency)
    generator = torch.Generator(ops.device).manual_seed(0)
    masters = {
        name: torch.ones(shape, device=ops.device)
        if len(shape) == 1
        else torch.randn(shape, generator=generator, device=ops.device) * 0.02
        for name, shape in parameter_shapes(config).items()
    }
    tokenizer = Tokenizer.characters("0123456789+-*=")
    return Model(Transformer(config, precision_from(precision), ops, masters), tokenizer)


def that_fits(name: str, config: ModelConfig, bench: Bench, per_parameter: float) -> tuple[str, ModelConfig]:
    """The model, or as many of its layers as 60 % of the free memory hold at so many bytes a parameter; and its
    name, which says so."""
    if bench.rehearsal:
        return name, config
    fitting = shortened(config, 0.6 * torch.cuda.mem_get_info()[0], per_parameter)
    layers = fitting.num_layers
    return (name if layers == config.num_layers else f"{name}, {layers} of its {config.num_layers} layers"), fitting


def presets(bench: Bench) -> tuple[str, ...]:
    """Those that are measured; a rehearsal takes the one that runs the most kernels."""
    return PRESETS[-1:] if bench.rehearsal else PRESETS


def consistencies(preset: str, bench: Bench) -> tuple[str, ...]:
    """Those that a preset is measured under; the interpreter has one product only."""
    return ("bitwise",) if bench.rehearsal or preset == "fp8-rollout" else ("bitwise", "fast")
