"""The planner beside published times and bytes of other systems: each point, what is planned for it, and the error.

    python -m benchmarks published
    python -m benchmarks.published       the factors of isobit/plan/devices.py, fitted again

These systems are not isobit: they divide models over GPUs where isobit does not, and sample with vLLM. Each point is
planned with the layout that was published, tensor parallelism as one larger GPU without traffic. Factors are fitted on
the points marked so. An assumption (a length that was not published), a published range, or the form of the model was
chosen with the points in sight; they are no test. The others are held out, and some are missed.
"""

import json
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from benchmarks.common import Claim, Result
from benchmarks.plan_jobs import MODELS, job
from isobit.model import ModelConfig
from isobit.plan import Device, Job, Lengths, device_named
from isobit.plan.devices import FACTORS, GIB, Factors, rates
from isobit.plan.memory import cache_bytes_of_a_token, memory, num_parameters, weights
from isobit.plan.seconds import logprobs, micro_batch, rollout, seconds, step, sync
from isobit.plan.work import floor, learn
from isobit.precision import PRESETS

POWER = 0.82
"""Of an H100's operations at the 500 W of torchtitan's machines (data sheet: 700 W). Fitted, for that machine alone."""
TITAN, NEMO = "torchtitan, llama3_h100_202412", "NeMo RL 0.6"
VERL, FP8_RL, JET = "verl, docs/advance/fp8", "arXiv 2601.18150", "arXiv 2601.14243"
_H100, _H200, _H20 = (device_named(name) for name in ("h100", "h200", "h20"))
_ASSUMED = "completions of 4,000 tokens assumed"


def _spanning(device: Device, count: int) -> Device:
    """So many GPUs as one."""
    rates_of_all = {name: count * getattr(device, name) for name in ("memory", "bandwidth", "bf16", "fp8")}
    return replace(device, **rates_of_all)


@dataclass(frozen=True)
class Point:
    """One published number. `low` and `high` where it is a range; `fitted`: a factor was fitted to it; `in_sight`: an
    assumption or the form of the model was chosen with it in sight, so it is no test; `planned` None: the planner has
    nothing to say, and `note` why."""

    what: str
    source: str
    unit: str
    low: float
    high: float
    planned: float | None
    fitted: bool = False
    note: str = ""
    in_sight: bool = False

    @property
    def kind(self) -> str:
        return "fitted" if self.fitted else "in sight" if self.in_sight else "held out" if self.planned else "no plan"

    @property
    def error(self) -> float | None:
        """Of what is planned, relative to the nearest published value; 0 within the range."""
        if self.planned is None:
            return None
        nearest = min(max(self.planned, self.low), self.high)
        return self.planned / nearest - 1


@dataclass
class Points(Result):
    """A benchmark's result with the points themselves."""

    points: list[Point] = field(default_factory=list)

    def print(self) -> None:
        print(f"\n{self.name}\n{table(self.points)}")
        super().print()

    def write(self, folder: Path) -> Path:
        path = super().write(folder)
        content = json.loads(path.read_text())
        content["points"] = [{**asdict(point), "kind": point.kind, "error": point.error} for point in self.points]
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        return path


def table(points: list[Point]) -> str:
    """As Markdown."""
    lines = ["| point | source | published | planned | error | |", "|---|---|---|---|---|---|"]
    for point in points:
        given = _number(point.low) if point.low == point.high else f"{_number(point.low)} to {_number(point.high)}"
        if point.planned is None or point.error is None:
            cells = ["none", ""]
        else:
            cells = [_number(point.planned), f"{point.error:+.0%}"]
        remark = f"{point.kind}; {point.note}" if point.note else point.kind
        lines.append(f"| {point.what} | {point.source} | {given} {point.unit} | {' | '.join(cells)} | {remark} |")
    return "\n".join(lines)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def run(rounds: int) -> Points:
    points = all_points(FACTORS, POWER)
    result = Points("published", points=points)
    errors, fits = (
        [abs(point.error) for point in points if point.error is not None and point.kind == kind]
        for kind in ("held out", "fitted")
    )
    result.claims.append(Claim(f"largest error of the {len(fits)} fitted points", max(fits), "<=", 0.02))
    what = f"of the {len(errors)} held-out points"
    result.claims.append(Claim(f"median error {what}", statistics.median(errors), "<=", 0.15))
    near = sum(error <= 0.25 for error in errors) / len(errors)
    result.claims.append(Claim(f"share {what} that are planned to 25 %", near, ">=", 0.8))
    return result


def all_points(factors: Factors, power: float) -> list[Point]:
    """Every point, planned with these factors."""
    return [
        *training(factors, power),
        *training_memory(),
        *steps(factors),
        *rollouts(factors),
        *ratios(factors),
        *nothing(),
    ]


def training(factors: Factors, power: float) -> list[Point]:
    """Tokens a second and GPU of pretraining, 8 GPUs, two sequences of 8,192 each."""
    titan = replace(_H100, bandwidth=2.4e12, bf16=power * _H100.bf16, fp8=power * _H100.fp8)

    def speed(flow: str, device: Device, tokens: int = 16384, length: int = 8192, again: float = 0.5) -> float:
        """`again`: the share of the products that are computed again (selective checkpointing: every second)."""
        found = 0.0
        for recompute, share in ((False, 1 - again), (True, again)):
            phase = learn(MODELS["Llama-3.1-8B"], PRESETS[flow], tokens, length, recompute)
            phase.pop("optimizer")
            found += share * floor(phase, rates(device, factors))
        return tokens / found

    wide, low = speed("bf16", titan), speed("fp8-unified", titan)
    far, unit = "torchtitan, llama3_8b_h200_2025-06", "tokens/s/GPU"
    name, hidden = "Llama-3.1-8B, pretraining", "traffic taken as hidden"
    return [
        Point(f"{name}, 8 H100, BF16", TITAN, unit, 5762, 5762, wide, note="eager; the planner has fused kernels"),
        Point(f"{name}, 8 H100, BF16, compiled", TITAN, unit, 6667, 6667, wide, True),
        Point(f"{name}, 8 H100, Float8, compiled", TITAN, unit, 8532, 8532, low, True),
        Point(f"{name}, 128 H100, BF16, compiled", TITAN, unit, 6514, 6514, wide, note=hidden),
        Point(f"{name}, 128 H100, Float8, compiled", TITAN, unit, 8380, 8380, low, note=hidden),
        Point(
            f"{name}, 8 H100, Float8, 32,768 tokens, full checkpointing",
            TITAN,
            unit,
            3890,
            3890,
            speed("fp8-unified", titan, 32768, 32768, 1.0),
            in_sight=True,
        ),
        Point(f"{name}, 32 H200, Float8, compiled", far, unit, 10938, 10938, speed("fp8-unified", _H200), True),
    ]


def _kept_by_autograd(model: ModelConfig) -> float:
    """Bytes of a token and layer where every operator keeps its inputs in BF16; isobit keeps fewer."""
    heads, width = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    norms = 2 * (2 * 2 * model.hidden_size + 4)  # their inputs, and their results, which products take
    attention = 2 * model.qkv_size + 2 * 3 * heads + 4 * model.num_heads + 4 * width
    return norms + attention + 2 * 3 * model.intermediate_size


def training_memory() -> list[Point]:
    """GiB of the same."""
    model = MODELS["Llama-3.1-8B"]
    parameters, tokens = num_parameters(model), 16384
    saved = tokens * model.num_layers * _kept_by_autograd(model)
    logits = 3 * 4 * tokens * model.vocab_size
    whole = (16 * parameters / 8 + saved / 2 + logits) / GIB
    divided = 16 * parameters * (1 / 8 - 1 / 128) / GIB
    note = "half of the activations in BF16, all logits, as torchtitan keeps them"
    name = "Llama-3.1-8B, pretraining"
    return [
        Point(f"{name}, 8 H100, BF16: memory", TITAN, "GiB", 82.4, 82.4, whole, note=note, in_sight=True),
        Point(f"{name}, 8 H100, Float8, compiled: memory", TITAN, "GiB", 76.8, 76.8, whole, note=note, in_sight=True),
        Point(f"{name}, memory on 8 GPUs less that on 128, BF16", TITAN, "GiB", 15.4, 15.4, divided),
        Point(f"{name}, memory on 8 GPUs less that on 128, Float8, compiled", TITAN, "GiB", 15.0, 15.0, divided),
    ]


@dataclass(frozen=True)
class Parts:
    """Seconds of a step of NeMo RL: rollout, two passes for log-probabilities, four optimizer steps."""

    rollout: float
    logprobs: float
    learn: float

    @property
    def total(self) -> float:
        return self.rollout + self.logprobs + self.learn


def nemo(factors: Factors, name: str, flow: str, mean: int, gpus: int, split: int, share: float = 0.63) -> Parts:
    """2,048 completions, 64 prompts of about 130 tokens; `split`: GPUs that one engine spans. `share` of the memory is
    the engine's: 0.63 gives the 249,952 tokens that NeMo RL reports for Qwen3-8B; 0.85 where it has the GPU to itself.
    """
    lengths = Lengths(130, mean - 130, 4096 - 130)
    changes = (f"precision={flow}", "algorithm.updates_per_batch=4", "algorithm.recompute_old_logprobs=always")
    given = job(name, *changes, ranks=gpus, device=_H100, prompts=64, group=32, lengths=lengths)
    room = share * split * _H100.memory - weights(given.model, given.precision).quantized
    room -= weights(given.model, given.precision).plain
    pages = int(room / cache_bytes_of_a_token(given.model, given.precision) / given.page_size)
    config = replace(given.config, engine=replace(given.config.engine, kv_pages=pages))
    wide = replace(given, config=config, device=_spanning(_H100, split), ranks=gpus // split)
    learning = given.updates * given.rounds * micro_batch(given, factors)
    return Parts(rollout(wide, memory(wide), factors), 2 * logprobs(given, factors), learning)


def steps(factors: Factors) -> list[Point]:
    """Seconds of whole steps."""
    eight = nemo(factors, "Llama-3.1-8B", "bf16", 1060, 16, 1)
    mixture = nemo(factors, "Qwen3-30B-A3B", "bf16", 3203, 32, 2)
    dense = nemo(factors, "Qwen3-32B", "bf16", 3206, 32, 4)
    halves = nemo(factors, "Qwen3-30B-A3B", "bf16", 3201, 16, 2, 0.85)
    wide, low = (nemo(factors, "Llama-3.1-8B", flow, 1129, 8, 1, 0.85) for flow in ("bf16", "fp8-e2e"))
    even = "half of the GPUs sample, half learn (assumed)"

    def ahead(parts: Parts) -> float:
        return max(parts.rollout, parts.logprobs + parts.learn)

    note = "models are divided over 4 GPUs; traffic not planned"
    return [
        Point("Llama-3.1-8B, step, 16 H100, BF16", "NeMo RL 0.4", "s", 97.7, 97.7, eight.total, True),
        Point("Qwen3-30B-A3B, step, 32 H100, BF16", NEMO, "s", 192, 192, mixture.total, True),
        Point(
            "Qwen3-30B-A3B, one step off, 32 H100, BF16", NEMO, "s", 152, 152, ahead(halves), note=even, in_sight=True
        ),
        Point("Qwen3-32B, step, 32 H100, BF16", "NeMo RL 0.4, and later", "s", 376, 393, dense.total, note=note),
        Point(
            "Llama-3.1-8B, one step off, 16 H100, FP8 over BF16", "NeMo RL, April 2026", "x", 1.23, 1.23,
            ahead(wide) / ahead(low), note=even,
        ),
        Point("Qwen2.5-Math-7B, one step off, 16 H20", "verl, one_step_off", "s", 520, 520, verl_one_step_off(), note=(
            "from its synchronous parts: learning takes 16 / 12 of the time on 12 GPUs, and hides the rollout"
        )),
    ]  # fmt: skip


def verl_one_step_off() -> float:
    """Synchronous on 16 GPUs: 749 s, of which rollout 321, log-probabilities 88, update 286."""
    rest = 749 - 321 - 88 - 286
    return (88 + 286) * 16 / 12 + rest


def rollouts(factors: Factors) -> list[Point]:
    """Single phases: a step of decoding, and what FP8 gains in a rollout."""
    alone = job("Llama-3.1-8B", "precision=bf16", device=_H100)
    one = 1e3 * step(alone, 1, 512, replace(factors, step_s=0.0))
    name, sources = "Llama-8B, a captured step of decoding, H100, BF16", f"{VERL}; {FP8_RL}"
    linear, both, mixture = ([_gain(factors, which, mean) for mean in (4000, 2000, 8000)] for which in _CACHES)
    return [
        Point(name, "reported, 8.4 ms uncaptured", "ms", 5.1, 5.1, one, True, "batch 1 and 512 keys assumed"),
        _seen("Qwen3-8B, rollout, FP8 linear", VERL, 1.12, 1.18, linear),
        _seen("8B, rollout, FP8 linear, cache and attention", FP8_RL, 1.44, 1.44, both),
        _seen("Qwen3-8B, the same", "NeMo RL docs", 1.48, 1.48, both),
        _seen("Qwen3-30B-A3B, rollout, FP8 linear", sources, 1.35, 1.5, mixture),
    ]


def _seen(what: str, source: str, low: float, high: float, gains: list[float]) -> Point:
    """A gain for which the length of completions was chosen: at 4,000 tokens, and what two others give."""
    note = f"completions of 4,000 tokens assumed; {gains[1]:.2f} at 2,000, {gains[2]:.2f} at 8,000"
    return Point(what, source, "x", low, high, gains[0], note=note, in_sight=True)


_CACHES = {
    # tokens of NeMo RL's cache for Qwen3-8B on an H100
    "linear": ("Qwen3-8B", "fp8-rollout", _H100, 249_952, 299_344),
    "both": ("Qwen3-8B", "fp8", _H100, 249_952, 598_672),
    # on two GPUs, beside weights of 56.8 and of 29.0 GiB (FP8-RL), where both have 63 % of the memory
    "mixture": ("Qwen3-30B-A3B", "fp8-rollout", _spanning(_H100, 2), 468_000, 772_000),
}
"""Model, flow, GPU of an engine; tokens of its cache under BF16 and under the flow."""


def _gain(factors: Factors, which: str, mean: int) -> float:
    """Seconds of a rollout under BF16 over those under the flow: 96 prompts x 16 completions on 8 engines, as verl's
    recipe."""
    name, flow, device, wide, low = _CACHES[which]
    found = []
    for own, tokens in (("bf16", wide), (flow, low)):
        changes = (f"precision={own}", f"engine.kv_pages={tokens // 16}")
        lengths = Lengths(512, mean, 20480)
        given = job(name, *changes, ranks=8, device=device, prompts=96, group=16, lengths=lengths)
        found.append(rollout(given, memory(given), factors))
    return found[0] / found[1]


def ratios(factors: Factors) -> list[Point]:
    """What FP8 gains in learning and in a step; and a sync."""
    wide, low = (_long_job(flow) for flow in ("bf16", "fp8-unified"))
    learning = micro_batch(wide, factors) / micro_batch(low, factors)
    whole = [seconds(given, memory(given), factors).total for given in (wide, low)]
    sampling = [rollout(given, memory(given), factors) for given in (wide, low)]
    large = [
        rollout(given, memory(given), factors)
        for given in (_long_job(flow, "Qwen3-32B", _spanning(_H100, 2)) for flow in ("bf16", "fp8-unified"))
    ]
    refit = job("Qwen3-30B-A3B", "precision=bf16[engines=separate]", ranks=32, device=_H100)
    return [
        Point("Qwen3-8B, rollout phase, unified FP8", JET, "x", 1.07, 1.33, sampling[0] / sampling[1], note=_ASSUMED),
        Point("Qwen3-32B, rollout phase, unified FP8", JET, "x", 1.07, 1.33, large[0] / large[1], note=_ASSUMED),
        Point("8B, training phase, unified FP8", JET, "x", 1.41, 1.41, learning),
        Point("8B, whole step, unified FP8", JET, "x", 1.16, 1.16, whole[0] / whole[1], note=_ASSUMED),
        Point("8B, learner's time, end-to-end FP8", FP8_RL, "x", 1.25, 1.25, learning),
        Point(
            "Qwen3-30B-A3B, refit, BF16", "NeMo RL docs", "s", 0.74, 1.0, sync(refit, factors),
            note="names and layouts are converted there, which isobit need not",
        ),
    ]  # fmt: skip


def _long_job(flow: str, name: str = "Qwen3-8B", device: Device = _H100) -> Job:
    given = job(
        name, f"precision={flow}", ranks=8, device=device, prompts=32, group=16, lengths=Lengths(512, 4000, 8192)
    )
    pages = 249_952 // 16
    return replace(given, config=replace(given.config, engine=replace(given.config.engine, kv_pages=pages)))


def nothing() -> list[Point]:
    """What the planner cannot say anything about."""
    note = "deepseek_v3 is no family that isobit reads, and 671 GB of working weights fit on no GPU"
    return [
        Point("DeepSeek-V3, one step off, 512 H100, BF16", NEMO, "s", 64.1, 64.1, None, note=note),
        Point("DeepSeek-V3, one step off, 512 H100, FP8", NEMO, "s", 59.2, 59.2, None, note=note),
    ]


def fitted() -> tuple[Factors, float]:
    """The fitted factors and the power, found again: each by bisection on its own point."""
    factors, power = replace(FACTORS, products_bf16=0.5, products_fp8=0.5, experts=0.5, layer_s=0.0, step_s=0.0), 1.0
    for _ in range(12):  # these three depend on each other, through the power of one machine
        factors = _fit(factors, "products_bf16", 6667, lambda f, w=power: training(f, w)[1], 0.1, 1.5)
        factors = _fit(factors, "products_fp8", 10938, lambda f: training(f, 1.0)[-1], 0.1, 1.5)
        power = _bisect(lambda share, f=factors: training(f, share)[2].planned, 8532, 0.1, 1.5)
    factors = _fit(factors, "layer_s", 5.1, lambda f: rollouts(f)[0], 0.0, 1e-4)
    factors = _fit(factors, "step_s", 97.7, lambda f: steps(f)[0], 0.0, 0.1)
    return _fit(factors, "experts", 192, lambda f: steps(f)[1], 0.1, 1.0), power


def _fit(factors: Factors, name: str, wanted: float, point: Callable[..., Point], low: float, high: float) -> Factors:
    """With the value of one factor at which a point is planned as it was published."""

    def own(value: float) -> Factors:
        return replace(factors, **{name: value})

    return own(_bisect(lambda value: point(own(value)).planned, wanted, low, high))


def _bisect(planned: Callable[..., float | None], wanted: float, low: float, high: float) -> float:
    """The value at which what is planned is what is wanted; it rises or falls all the way."""
    rising = (planned(high) or 0.0) > (planned(low) or 0.0)
    for _ in range(22):
        middle = (low + high) / 2
        low, high = (low, middle) if ((planned(middle) or 0.0) > wanted) == rising else (middle, high)
    return (low + high) / 2


if __name__ == "__main__":
    again, share = fitted()
    print(*(f"{name} {value:.4g}" for name, value in vars(again).items()), f"power {share:.4g}", sep="\n")
