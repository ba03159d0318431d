"""The least time that each phase can take on one GPU: bytes over bandwidth, or operations over the matrix units' rate.

For decoding, prefill, the learner and a whole GRPO step, by preset, a floor is the sum over kinds of work of the larger
of two times: that of the bytes which must move through device memory (each weight, key, value and saved activation
once), and that of the operations at the rate of the unit that does them. What is measured over its floor is the share
that a run reaches. A ratio of floors is the most that FP8 can win on a shape, with kernels that are equally good.

Counted: linear layers, experts, output head, attention with its cache, and the traffic of norms, gates and quantization
between them. Left out: launches, waiting, sampling, collectives. `python -m benchmarks.roofline` prints the tables.
"""

import argparse
from dataclasses import dataclass

from benchmarks.gpu.shapes import SHAPES, num_parameters
from isobit.model import ModelConfig
from isobit.precision import PRESETS, Flow, Precision


@dataclass(frozen=True)
class Machine:
    """Rates in bytes and operations a second."""

    name: str
    bandwidth: float
    bf16: float
    fp8: float


H200 = Machine("H200", 4.3e12, 790e12, 1580e12)
"""Measured: a copy, counting bytes read and written; an 8192-cubed BF16 product of random numbers. FP8 is taken as
twice BF16, which is the ratio of the datasheet and has not been measured."""


@dataclass(frozen=True)
class Work:
    """One kind of work: operations of the matrix units in BF16 and in FP8, and bytes through memory."""

    bf16: float = 0.0
    fp8: float = 0.0
    bytes: float = 0.0

    def seconds(self, machine: Machine) -> float:
        return max(self.bf16 / machine.bf16 + self.fp8 / machine.fp8, self.bytes / machine.bandwidth)


Phase = dict[str, Work]
"""Kinds of work by name, one after the other."""


def floor(phase: Phase, machine: Machine = H200) -> float:
    """Seconds."""
    return sum(work.seconds(machine) for work in phase.values())


def linear_sizes(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """(outputs, inputs) of a dense layer's products, or of one expert's."""
    inner = config.intermediate_size if config.experts is None else config.experts.intermediate_size
    heads = config.num_heads * config.head_dim
    hidden = config.hidden_size
    return {
        "qkv": (config.qkv_size, hidden),
        "o": (hidden, heads),
        "gate_up": (2 * inner, hidden),
        "down": (hidden, inner),
    }


def _elements(config: ModelConfig, tokens: float) -> tuple[float, float]:
    """Weights of the linear layers that (one token multiplies, this many tokens touch between them)."""
    sizes = {name: n * k for name, (n, k) in linear_sizes(config).items()}
    attention, mlp = sizes["qkv"] + sizes["o"], sizes["gate_up"] + sizes["down"]
    used, touched = 1.0, 1.0
    if config.experts is not None:
        count, used = config.experts.count, float(config.experts.per_token)
        touched = count * (1 - (1 - used / count) ** tokens)  # of a router that chooses evenly
    layers = config.num_layers
    return layers * (attention + used * mlp), layers * (attention + touched * mlp)


def _forward(config: ModelConfig, flow: Flow, rows: float, keys: float, sequences: float) -> Phase:
    """`rows` tokens, each attending to `keys` on average, of `sequences` whose caches are read once for all rows."""
    active, touched = _elements(config, rows)
    quantized = flow.weight is not None and flow.activation is not None
    operations = 2 * rows * active
    weight_bytes = (1 + 4 / 128**2) if flow.weight is not None else 2
    kv_bytes = 2 if flow.kv is None else 1 + 4 / config.head_dim
    width = config.num_layers * 2 * config.num_kv_heads * config.head_dim
    return {
        "linear": Work(0 if quantized else operations, operations if quantized else 0, touched * weight_bytes),
        "between": Work(bytes=rows * config.num_layers * _between(config, quantized)),
        "attention": Work(
            4 * rows * keys * config.num_layers * config.num_heads * config.head_dim,
            0,
            width * kv_bytes * (sequences * keys + rows),
        ),
    }


def _between(config: ModelConfig, quantized: bool) -> float:
    """Bytes that a token's rows cost in one layer outside the weights: what fused kernels read and write."""
    operand = 1 + 4 / 128 if quantized else 2
    inner = config.intermediate_size
    if config.experts is not None:
        inner = config.experts.per_token * config.experts.intermediate_size
    heads = config.num_heads * config.head_dim
    norms = 2 * (6 * config.hidden_size + 2 * operand * config.hidden_size)  # x, residual, sum; y written and read
    attention = 2 * 2 * config.qkv_size + 2 * heads + (2 + 2 * operand) * heads
    return norms + attention + 2 * 2 * 2 * inner + 2 * operand * inner + 2 * 2 * config.hidden_size


def _head(config: ModelConfig, rows: float, passes: float = 1) -> Work:
    size = config.vocab_size * config.hidden_size
    return Work(2 * rows * size * passes, 0, 2 * size * passes)


def decode(config: ModelConfig, precision: Precision, batch: int, context: int) -> Phase:
    """One step: a token for each of `batch` sequences with `context` keys."""
    phase = _forward(config, precision.rollout, batch, context, batch)
    return phase | {"head": _head(config, batch)}


def prefill(config: ModelConfig, precision: Precision, sequences: int, length: int) -> Phase:
    """Prompts of this length; only their last rows reach the head."""
    phase = _forward(config, precision.rollout, sequences * length, length / 2, sequences)
    return phase | {"head": _head(config, sequences)}


def learn(config: ModelConfig, precision: Precision, tokens: int, length: int) -> Phase:
    """Forward and backward of packed sequences of this length, and the optimizer's step over FP32 masters."""
    forward = _forward(config, precision.learner, tokens, length / 2, tokens / length)
    linear, attention = forward["linear"], forward["attention"]
    operations = linear.bf16 + linear.fp8
    low = sum(operations for product in (precision.dgrad, precision.wgrad) if product == "fp8")
    _, touched = _elements(config, tokens)
    parameters = touched + config.vocab_size * config.hidden_size * (1 if config.tie_embeddings else 2)
    return {
        "linear": Work(linear.bf16 + 2 * operations - low, linear.fp8 + low, 2 * linear.bytes + 4 * touched),
        "between": Work(bytes=3 * forward["between"].bytes),
        "attention": Work(3.5 * attention.bf16, 0, 3 * attention.bytes),  # 2 products forward, 5 backward
        "head": _head(config, tokens, passes=4),  # logits twice, and their two gradients
        "optimizer": Work(bytes=parameters * (4 * 7 + 2)),  # gradient, master and moments read; the latter written
    }


def grpo_step(
    config: ModelConfig, precision: Precision, prompts: int, group: int, prompt_length: int, new_tokens: int, batch: int
) -> dict[str, float]:
    """Seconds of (rollout, learn): all completions of one length, `batch` of them decoding at a time."""
    waves = prompts * group / batch
    steps = [decode(config, precision, batch, prompt_length + at) for at in range(0, new_tokens, 64)]
    rollout = waves * 64 * sum(floor(step) for step in steps)
    rollout += floor(prefill(config, precision, prompts, prompt_length))
    length = prompt_length + new_tokens
    return {"rollout": rollout, "learn": floor(learn(config, precision, prompts * group * length, length))}


MEMORY = 139 * 2**30
"""Bytes of an H200 that programs can use."""


def largest_batch(config: ModelConfig, precision: Precision, context: int) -> int:
    """Sequences whose keys and values fit beside working weights, FP32 masters and AdamW's moments."""
    flow, head = precision.rollout, config.vocab_size * config.hidden_size * (1 if config.tie_embeddings else 2)
    linear = num_parameters(config) - head
    weights = 12 * num_parameters(config) + 2 * head + linear * (1 if flow.weight is not None else 2)
    if not precision.shared:
        weights += 2 * linear + 2 * head  # the learner has its own
    kv = 2 if flow.kv is None else 1 + 4 / config.head_dim
    width = config.num_layers * 2 * config.num_kv_heads * config.head_dim
    return max(0, int((0.95 * MEMORY - weights) // (width * kv * context)))


BATCHES, CONTEXTS = (1, 64, 512), (1024, 8192, 32768)
_COLUMNS = ("bf16", "fp8-rollout", "fp8")


def decode_table() -> str:
    """Milliseconds of a decode step, ratios of floors, and the largest batch, as a Markdown table."""
    lines = [
        "| model | context | batch | bf16, ms | fp8-rollout, ms | fp8, ms | bf16 / fp8-rollout | bf16 / fp8 | "
        "most sequences: bf16, fp8-rollout, fp8 |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, config in SHAPES.items():
        for context in CONTEXTS:
            most = ", ".join(str(largest_batch(config, PRESETS[p], context)) for p in _COLUMNS)
            for batch in BATCHES:
                times = [floor(decode(config, PRESETS[p], batch, context)) for p in _COLUMNS]
                cells = [f"{1e3 * t:.2f}" for t in times] + [f"{times[0] / t:.2f}" for t in times[1:]]
                lines.append(f"| {name} | {context:,} | {batch} | " + " | ".join(cells) + f" | {most} |")
    return "\n".join(lines)


def target_table() -> str:
    """What the floors allow for each target of a whole step: 512 prompts, groups of 8, 512 decoding at a time."""
    lines = [
        "| model | new tokens | rollout bf16 / fp8 | learner bf16 / fp8 | step bf16 / fp8 | rollout's share, bf16 |",
        "|---|---|---|---|---|---|",
    ]
    for name, config in SHAPES.items():
        for new in (2048, 8192):
            wide, low = (grpo_step(config, PRESETS[p], 512, 8, 512, new, 512) for p in ("bf16", "fp8"))
            ratios = [wide[part] / low[part] for part in ("rollout", "learn")]
            whole = sum(wide.values()) / sum(low.values())
            share = wide["rollout"] / sum(wide.values())
            cells = " | ".join(f"{ratio:.2f}" for ratio in (*ratios, whole))
            lines.append(f"| {name} | {new:,} | {cells} | {share:.0%} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.roofline", description="Floors on one GPU.")
    parser.parse_args()
    print(
        f"{H200.name}: {H200.bandwidth / 1e12:.1f} TB/s, BF16 {H200.bf16 / 1e12:.0f}, FP8 {H200.fp8 / 1e12:.0f} TFLOP/s"
    )
    print(f"\n{target_table()}\n\n{decode_table()}")


if __name__ == "__main__":
    main()
