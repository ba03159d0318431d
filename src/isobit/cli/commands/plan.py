"""`isobit plan`: memory of a GPU and seconds of a step, by precision preset and number of GPUs, as tables or JSON.

Nothing is loaded but the config and the config.json of its models. A run that fits on none of the given numbers of GPUs
is refused, after its memory table.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from isobit.config import Config
from isobit.errors import IsobitError
from isobit.monitor.report.tables import text_table
from isobit.plan import Estimate, device_named, does_not_fit, estimate, job_of, warnings
from isobit.plan.devices import GIB, MIB
from isobit.plan.memory import num_parameters
from isobit.precision import precision_from

_MOST_GPUS = 1 << 16
_UNITS = {GIB: "GiB", MIB: "MiB"}
_PARTS = ("rollout", "logprobs", "learn", "exchange", "exposed", "update", "sync")
_NOTE = (
    "Seconds are a model: bytes and operations at rates that were fitted to others' published times.\n"
    "Nothing was measured with isobit on a GPU. sequences: decoded at a time. exposed: the part of\n"
    "exchange that the backward does not hide; only that is in the step."
)


def plan_command(
    config: Config,
    gpus: str,
    device: str,
    presets: Sequence[str],
    *,
    per_node: int,
    prompt_tokens: int | None,
    new_tokens: int | None,
    as_json: bool,
) -> None:
    """Print the plan. Raises IsobitError for what cannot be planned, and, after the tables, where nothing fits."""
    given = {"--per-node": per_node, "--prompt-tokens": prompt_tokens, "--new-tokens": new_tokens}
    for name, value in given.items():
        if value is not None and value < 1:
            raise IsobitError(f"{name} {value}: expected a whole number, at least 1")
    counts = _counts(gpus, per_node)
    job = job_of(config, device_named(device), prompt_tokens, new_tokens, per_node=per_node)
    flows = {flow.name: flow for flow in (job.precision, *map(precision_from, presets))}
    try:
        own = [estimate(job.under(job.precision, ranks)) for ranks in counts]
        found = [estimate(job.under(flow, ranks)) for ranks in counts for flow in flows.values()]
    except OverflowError:
        raise IsobitError("a number of the config is too large to be planned with") from None
    print(json.dumps(_plain(own, found), indent=1) if as_json else _text(own, found))
    if not any(each.fits for each in own):
        raise IsobitError(does_not_fit(own[-1]))


def _counts(gpus: str, per_node: int) -> list[int]:
    """Numbers of GPUs between commas."""
    counts = []
    for word in gpus.split(","):
        if not word.strip().isdecimal() or not 1 <= int(word) <= _MOST_GPUS:
            raise IsobitError(f"--gpus {gpus!r}: expected whole numbers from 1 to {_MOST_GPUS:,}, such as 8 or 1,8,64")
        counts.append(int(word))
        if counts[-1] > per_node and counts[-1] % per_node:
            raise IsobitError(
                f"--gpus {counts[-1]}: not whole machines of {per_node} GPUs; give a multiple, or another --per-node"
            )
    return counts


def _text(own: Sequence[Estimate], found: Sequence[Estimate]) -> str:
    job = own[0].job
    lengths, config = job.lengths, job.config
    groups = f", gradients summed in groups of {job.sum_group} first" if job.sum_group > 1 else ""
    nodes = f"{job.per_node} in a machine{groups}"
    trained = ","
    if (adapter := config.adapter) is not None:
        count, names = num_parameters(job.model, adapter), ", ".join(adapter.targets)
        trained = f", frozen, with an adapter of rank {adapter.rank} on {names}: {count:,},"
    heading = (
        f"{job.model.family}, {num_parameters(job.model):,} parameters{trained} on {job.device.name} "
        f"({job.device.memory / GIB:.1f} GiB; {job.device.source}), {nodes}\n"
        f"{config.prompts_per_step} prompts x {config.sampling.group_size} completions a step: prompts of "
        f"{lengths.prompt:,} tokens, completions of {lengths.mean:,} on average and at most {lengths.longest:,};\n"
        f"micro-batches of {job.micro_batch_limit:,} tokens, {job.updates} optimizer step{'s' * (job.updates > 1)}"
    )
    notes = [f"warning: {_gpus(each)}: {line}" for each in own for line in warnings(each)]
    unit = GIB if max(each.memory.total for each in own) >= GIB else MIB
    tables = [f"Memory of a GPU in {_UNITS[unit]}, {job.precision.name}\n{_memory_table(own, unit)}"]
    tables.append(f"Seconds of a step, by precision\n{_seconds_table(found, unit)}")
    return "\n\n".join([heading, *tables, *(["\n".join(notes)] if notes else []), _NOTE])


def _memory_table(own: Sequence[Estimate], unit: int) -> str:
    labels = list(dict.fromkeys(label for each in own for label, _ in (*each.memory.held, *each.memory.parts)))
    sizes = [dict((*each.memory.held, *each.memory.parts)) for each in own]
    rows = [["", *map(_gpus, own)]]
    rows += [[label, *(f"{size[label] / unit:,.1f}" if label in size else "" for size in sizes)] for label in labels]
    total = "total: what is held, and the larger of rolling out and learning"
    rows.append([total, *(f"{each.memory.total / unit:,.1f}" for each in own)])
    rows.append(["free", *(f"{(each.job.device.memory - each.memory.total) / unit:,.1f}" for each in own)])
    return text_table(rows, rule=True)


def _seconds_table(found: Sequence[Estimate], unit: int) -> str:
    rows = [["precision", "GPUs", _UNITS[unit], "sequences", *_PARTS, "step", "tokens/s/GPU"]]
    for each in found:
        cells = [each.job.precision.name, str(each.job.ranks), f"{each.memory.total / unit:,.1f}"]
        if each.fits:
            cells += [f"{each.at_a_time:.0f}", *(_seconds(getattr(each.seconds, part)) for part in _PARTS)]
            cells += [_seconds(each.seconds.total), f"{each.tokens_per_gpu:,.0f}"]
        else:
            cells += [*[""] * (len(_PARTS) + 2), "does not fit"]
        rows.append(cells)
    return text_table(rows, rule=True)


def _seconds(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.2g}" if value >= 0.01 or value == 0 else f"{value:.1e}"


def _gpus(each: Estimate) -> str:
    return f"{each.job.ranks} GPU{'s' * (each.job.ranks > 1)}"


def _plain(own: Sequence[Estimate], found: Sequence[Estimate]) -> dict[str, Any]:
    """All of it as plain values: bytes and seconds."""
    job = own[0].job
    return {
        "model": {
            "family": job.model.family,
            "parameters": num_parameters(job.model),
            "trained": num_parameters(job.model, job.config.adapter),
        },
        "device": asdict(job.device),
        "lengths": asdict(job.lengths),
        "memory": {str(each.job.ranks): dict((*each.memory.held, *each.memory.parts)) for each in own},
        "plans": [
            {
                "precision": each.job.precision.name,
                "gpus": each.job.ranks,
                "bytes": each.memory.total,
                "fits": each.fits,
                "seconds": {**asdict(each.seconds), "step": each.seconds.total},
                "tokens_per_second_and_gpu": each.tokens_per_gpu,
            }
            for each in found
        ],
        "warnings": {str(each.job.ranks): warnings(each) for each in own},
    }
