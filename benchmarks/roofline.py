"""The least time that each phase can take on one GPU: bytes over bandwidth, or operations over the
matrix units' rate.

For decoding, prefill, the learner and a whole GRPO step, by preset, a floor is the sum over kinds
of work of the larger of two times: that of the bytes which must move through device memory (each
weight, key, value and saved activation once), and that of the operations at the rate of the unit
that does them. What is measured over its floor is the share that a run reaches. A ratio of floors
is the most that FP8 can win on a shape, with kernels that are equally good.

What is counted, and what is left out, is in `work.py`.
`python -m benchmarks.roofline` prints the tables.
"""

import argparse

from benchmarks.gpu.shapes import SHAPES
from benchmarks.work import (
    Rates,
    attentions,
    decode,
    floor,
    learn,
    prefill,
    state_elements,
)
from isobit.model import ModelConfig
from isobit.precision import PRESETS, Precision
from isobit.training.plan.memory import num_parameters

H200 = Rates(4.3e12, 790e12, 1580e12)
"""Measured: a copy, counting bytes read and written; an 8192-cubed BF16 product of random numbers.
FP8 is taken as twice BF16, which is the ratio of the datasheet and has not been measured."""


def grpo_step(
    config: ModelConfig,
    precision: Precision,
    prompts: int,
    group: int,
    prompt_length: int,
    new_tokens: int,
    batch: int,
    rates: Rates = H200,
) -> dict[str, float]:
    """Seconds of (rollout, learn): all completions of one length, `batch` of them decoding at a
    time."""
    waves = prompts * group / batch
    steps = [
        decode(config, precision, batch, prompt_length + at) for at in range(0, new_tokens, 64)
    ]
    rollout = waves * 64 * sum(floor(step, rates) for step in steps)
    rollout += floor(prefill(config, precision, prompts, prompt_length), rates)
    length = prompt_length + new_tokens
    return {
        "rollout": rollout,
        "learn": floor(learn(config, precision, prompts * group * length, length), rates),
    }


MEMORY = 139 * 2**30
"""Bytes of an H200 that programs can use."""


def largest_batch(config: ModelConfig, precision: Precision, context: int) -> int:
    """Sequences whose keys, values and states fit beside working weights, FP32 masters and AdamW's
    moments."""
    flow = precision.rollout
    head = config.vocab_size * config.hidden_size * (1 if config.tie_embeddings else 2)
    linear = num_parameters(config) - head
    weights = (
        12 * num_parameters(config) + 2 * head + linear * (1 if flow.weight is not None else 2)
    )
    if not precision.shared:
        weights += 2 * linear + 2 * head  # the learner has its own
    kv = 2 if flow.kv is None else 1 + 4 / config.head_dim
    width = attentions(config) * 2 * config.num_kv_heads * config.head_dim
    each = width * kv * context + 4 * state_elements(config)
    return max(0, int((0.95 * MEMORY - weights) // each))


BATCHES, CONTEXTS = (1, 64, 512), (1024, 8192, 32768)
_COLUMNS = ("bf16", "fp8-rollout", "fp8")


def decode_table() -> str:
    """Milliseconds of a decode step, ratios of floors, and the largest batch, as a Markdown
    table."""
    lines = [
        "| model | context | batch | bf16, ms | fp8-rollout, ms | fp8, ms | bf16 / fp8-rollout | "
        "bf16 / fp8 | most sequences: bf16, fp8-rollout, fp8 |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, config in SHAPES.items():
        for context in CONTEXTS:
            most = ", ".join(str(largest_batch(config, PRESETS[p], context)) for p in _COLUMNS)
            for batch in BATCHES:
                times = [floor(decode(config, PRESETS[p], batch, context), H200) for p in _COLUMNS]
                cells = [f"{1e3 * t:.2f}" for t in times] + [
                    f"{times[0] / t:.2f}" for t in times[1:]
                ]
                lines.append(
                    f"| {name} | {context:,} | {batch} | " + " | ".join(cells) + f" | {most} |"
                )
    return "\n".join(lines)


def target_table() -> str:
    """What the floors allow for each target of a whole step: 512 prompts, groups of 8, 512 decoding
    at a time."""
    lines = [
        "| model | new tokens | rollout bf16 / fp8 | learner bf16 / fp8 | step bf16 / fp8 | "
        "rollout's share, bf16 |",
        "|---|---|---|---|---|---|",
    ]
    for name, config in SHAPES.items():
        for new in (2048, 8192):
            wide, low = (
                grpo_step(config, PRESETS[p], 512, 8, 512, new, 512) for p in ("bf16", "fp8")
            )
            ratios = [wide[part] / low[part] for part in ("rollout", "learn")]
            whole = sum(wide.values()) / sum(low.values())
            share = wide["rollout"] / sum(wide.values())
            cells = " | ".join(f"{ratio:.2f}" for ratio in (*ratios, whole))
            lines.append(f"| {name} | {new:,} | {cells} | {share:.0%} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.roofline", description="Floors on one GPU."
    )
    parser.parse_args()
    print(
        f"H200: {H200.bandwidth / 1e12:.1f} TB/s, BF16 {H200.bf16 / 1e12:.0f}, FP8 "
        f"{H200.fp8 / 1e12:.0f} TFLOP/s"
    )
    print(f"\n{target_table()}\n\n{decode_table()}")


if __name__ == "__main__":
    main()
