"""`isobit plan`: memory of a GPU by part and number of GPUs, whether it fits, and what lowers it;
as text or JSON.

Nothing is loaded but the config and the config.json of its models; of random weights, their
characters, which a built-in task has. A run that fits on none of
the given numbers of GPUs is refused, after its table.
"""

import json
from collections.abc import Sequence
from typing import Any

from isobit.config import Config, SftConfig, load_sft_config
from isobit.errors import IsobitError
from isobit.model import ModelConfig
from isobit.monitor.report.tables import text_table
from isobit.training.parts.given import load_supervised
from isobit.training.parts.model import described_model, model_named
from isobit.training.plan import Job, Machine, MemoryPlan, job_of, plan
from isobit.training.plan.advice import (
    advice,
    changes,
    does_not_fit,
    fits_well,
    together,
    verdict,
    warnings,
)
from isobit.training.plan.cards import GIB, MIB
from isobit.training.plan.divided import resolved
from isobit.training.plan.job import architecture, supervised_job_of
from isobit.training.plan.memory import num_parameters

_MOST_GPUS = 1 << 16
_UNITS = {GIB: "GiB", MIB: "MiB"}
_NO_SECONDS = (
    "isobit plan does not estimate time: isobit was measured on one GPU so far (docs/gpu.md)."
)
Planned = Sequence[tuple[Job, MemoryPlan]]


def plan_command(
    config: Config | SftConfig,
    gpus: str | None,
    machine: Machine,
    tokens: tuple[int | None, int | None],
    as_json: bool,
) -> None:
    """Print the plan. `tokens`: the lengths of a prompt and of a supervised run's completion, if
    they are given. Raises IsobitError for what cannot be planned, and, after the table, where nothing
    fits."""
    for option, number in zip(("--prompt-tokens", "--completion-tokens"), tokens):
        if number is not None and number < 1:
            raise IsobitError(f"{option} {number}: expected a whole number, at least 1")
    counts = [config.ranks] if gpus is None else _counts(gpus)
    if isinstance(config, SftConfig):
        job = supervised_job_of(config, machine, _architecture(config), *tokens)
    elif tokens[1] is not None:
        raise IsobitError(
            f"--completion-tokens {tokens[1]} is of a supervised run, whose answers are given; this "
            f"one samples them: sampling.max_new_tokens={tokens[1]}"
        )
    else:
        job = job_of(config, machine, tokens[0], model=_architecture(config))
    try:
        plans = [(job_, plan(job_)) for job_ in (resolved(job.on(count)) for count in counts)]
        text = json.dumps(_plain(plans), indent=1) if as_json else _text(plans)
    except OverflowError:
        raise IsobitError("a number of the config is too large to be planned with") from None
    print(text)
    if all(job_.total > machine.memory for _, job_ in plans):
        raise IsobitError(does_not_fit(*plans[-1]))


def _architecture(config: Config | SftConfig) -> ModelConfig:
    """Return the architecture of the model that a run begins with, of one that is not trained yet
    too."""
    if config.model.path is not None:
        return architecture(str(model_named(config.model.path)))
    if isinstance(config, Config):
        return _architecture(load_sft_config(str(config.model.sft)))
    return described_model(config, load_supervised(config)).config


def _counts(gpus: str) -> list[int]:
    """Return the numbers of GPUs between commas."""
    words = gpus.split(",")
    if not all(word.strip().isdecimal() and 1 <= int(word) <= _MOST_GPUS for word in words):
        raise IsobitError(
            f"--gpus {gpus!r}: expected whole numbers from 1 to {_MOST_GPUS:,}, such as 8 or 1,8,64"
        )
    return list(map(int, words))


def _text(plans: Planned) -> str:
    job, first = plans[0]
    config, trained = job.config, ""
    if (adapter := config.adapter) is not None:
        count, names = num_parameters(job.model, adapter), ", ".join(adapter.targets)
        trained = f", frozen, with an adapter of rank {adapter.rank} on {names}: {count:,}"
    batches = f"micro-batches of {first.micro_batch:,} tokens"
    unit = "prompts" if job.sampled is not None else "examples"
    group = f" x {job.group} completion{'s' * (job.group > 1)}"
    heading = (
        f"{job.model.family}, {num_parameters(job.model):,} parameters{trained}, "
        f"{job.precision.name}\n"
        f"{job.prompts} {unit}{group} a step: "
        "prompts of "
        f"{job.prompt:,} tokens, completions of at most {job.completion:,}; {batches}"
    )
    size = GIB if max(ranked.total for _, ranked in plans) >= GIB else MIB
    table = f"Memory of each GPU in {_UNITS[size]}\n{_memory_table(plans, size)}"
    notes = [f"{_gpus(ranked)}: {advice(ranked, planned)}" for ranked, planned in plans]
    notes += [
        f"warning: {_gpus(ranked)}: {line}"
        for ranked, planned in plans
        for line in warnings(ranked, planned)
    ]
    return "\n\n".join([heading, table, "\n".join(notes), _NO_SECONDS])


def _memory_table(plans: Planned, unit: int) -> str:
    labels = list(
        dict.fromkeys(label for _, planned in plans for label, _ in (*planned.held, *planned.parts))
    )
    sizes = [dict((*planned.held, *planned.parts)) for _, planned in plans]
    rows = [["", *(_gpus(job) for job, _ in plans)]]
    rows += [
        [label, *(f"{size[label] / unit:,.1f}" if label in size else "" for size in sizes)]
        for label in labels
    ]
    total = "total: what is held, and the largest part of a step"
    rows.append([total, *(f"{planned.total / unit:,.1f}" for _, planned in plans)])
    rows.append(
        ["free", *(f"{(job.machine.memory - planned.total) / unit:,.1f}" for job, planned in plans)]
    )
    return text_table(rows, rule=True)


def _gpus(job: Job) -> str:
    together = f", divided={job.divided}" if job.divided > 1 else ""
    return f"{job.ranks} GPU{'s' * (job.ranks > 1)}{together}"


def _plain(plans: Planned) -> dict[str, Any]:
    """Return all of it as plain values, in bytes."""
    job = plans[0][0]
    return {
        "model": {
            "family": job.model.family,
            "parameters": num_parameters(job.model),
            "trained": num_parameters(job.model, job.config.adapter),
        },
        "precision": job.precision.name,
        "card": {"name": job.machine.name, "memory": job.machine.memory},
        "lengths": {"prompt": job.prompt, "completion": job.completion},
        "plans": [
            {
                "gpus": candidate.ranks,
                "divided": candidate.divided,
                "held": dict(planned.held),
                "parts": dict(planned.parts),
                "bytes": planned.total,
                "fits": planned.total <= candidate.machine.memory,
                "verdict": verdict(candidate, planned),
                "advice": _advice(candidate, planned),
                "warnings": warnings(candidate, planned),
            }
            for candidate, planned in plans
        ],
    }


def _advice(job: Job, planned: MemoryPlan) -> list[dict[str, Any]]:
    if fits_well(job, planned):
        return []
    single = changes(job)
    both = together(job, single)
    return [
        {"keys": change.keys, "bytes": change.total}
        for change in (*single, *([] if both is None else [both]))
    ]
