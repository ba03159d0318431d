"""`isobit verify`: whether a run's weights sampled what the run recorded, token by token and bit by bit.

A rollout is a function of the weights, the prompt, the seed and a token's place. So a checkpoint, which has the weights
after n steps, draws again every completion that was sampled after n steps, with every log-probability; whoever gets a
run can ask that of it without trusting whoever made it. Completions of steps whose checkpoint is gone stay unverified,
and of the newest checkpoint there are none unless the run samples ahead. Left out: rewards, and the learning, which
`isobit train --from-rollouts` repeats.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

import numpy as np

from isobit.config import Config, load_run_config
from isobit.errors import IsobitError, RunFailed
from isobit.evaluation.progress import ProgressLine
from isobit.kernels import computed_by
from isobit.precision import precision_from
from isobit.rl import Sample
from isobit.run import checkpoints, completions
from isobit.run import directory as runs
from isobit.training.adapting import load_trained
from isobit.training.agreement import unlike
from isobit.training.assembly import base_of, date_of, rollout_sampling, sized_engine


@dataclass(frozen=True)
class Compared:
    """Of the completions of one checkpoint: how many tokens there are, how many were drawn with another log-probability
    or not at all, and the first of these in words; `other`: what was computed otherwise when they were recorded."""

    completions: int
    tokens: int
    differing: int
    first: str | None
    other: Sequence[str] = ()


def verify_command(run: Path, limit: int | None) -> None:
    """Draw again what each checkpoint of the run sampled, of each at least `limit` completions if so many are recorded
    (None: all), and print a line for each. Raises RunFailed where anything differs, and IsobitError where nothing can
    be compared."""
    runs.require_run(run)
    config = load_run_config(run)
    _refuse(run, config)
    found = checkpoints.all_checkpoints(run / runs.CHECKPOINTS)
    recorded = _recorded(run, {checkpoints.step_of(path) for path in found})
    tokens, asked, failed = 0, 0, list[str]()
    for path in found:
        if not (samples := _whole_groups(recorded.get(checkpoints.step_of(path), []), limit)):
            continue
        drawn = _draw_again(run, config, path, samples)
        tokens, asked = tokens + drawn.tokens, asked + 1
        said = _line(checkpoints.step_of(path), drawn)
        print(said, flush=True)
        if drawn.first is not None:
            failed.append(said)
    if not tokens:
        raise IsobitError(
            f"{run}: none of its checkpoints sampled completions that are recorded; it keeps the newest "
            f"{config.run.keep_last} (run.keep_last), and records {config.run.completions} (run.completions)"
        )
    if failed:
        raise RunFailed(f"{run}: {len(failed)} of {asked} checkpoints did not sample what is recorded: {failed[0]}")
    print(f"{run}: 0 of {tokens:,} tokens differ in any bit: these weights sampled what is recorded")


def _refuse(run: Path, config: Config) -> None:
    if (other := runs.rollouts_from(run)) is not None:
        raise IsobitError(f"{run} learned from the rollouts of another run and sampled none; verify {other}")
    precision = precision_from(config.precision)
    if precision.calibrated:
        raise IsobitError(
            f"{run}: under {precision.name} keys and values have scales that were calibrated during the run and "
            "are not recorded, so its completions cannot be drawn again"
        )


def _recorded(run: Path, steps: set[int]) -> dict[int, list[Sample]]:
    """By the number of steps that had been learned: what was sampled then and is recorded whole."""
    found: dict[int, dict[tuple[int, int], Sample]] = {}
    for row in completions.read(run / completions.COMPLETIONS):
        if "completion_ids" in row and row.get("rollout_step") in steps:
            sample = Sample.from_json(row)  # once, though it may have been learned from again
            found.setdefault(sample.rollout_step, {})[sample.prompt_index, sample.sample_index] = sample
    return {step: [samples[key] for key in sorted(samples)] for step, samples in found.items()}


def _whole_groups(samples: Sequence[Sample], limit: int | None) -> list[Sample]:
    """The first groups that hold `limit` samples."""
    kept: list[Sample] = []
    for _, group in groupby(samples, lambda sample: sample.prompt_index):
        if limit is not None and len(kept) >= limit:
            break
        kept += group
    return kept


def _draw_again(run: Path, config: Config, checkpoint: Path, samples: Sequence[Sample]) -> Compared:
    step, tokens = checkpoints.step_of(checkpoint), sum(len(sample.completion_ids) for sample in samples)
    if (damage := checkpoints.damage(checkpoint)) is not None:
        return Compared(len(samples), tokens, tokens, f"checkpoint {checkpoint} is damaged: {damage}")
    base = checkpoint if config.adapter is None else base_of(config, runs.began_by(run), quiet=True)
    model = load_trained(config, base, checkpoint)
    model.tokenizer.now = date_of(runs.began_by(run))
    model.tokenizer.special_tokens_in_content = config.task.special_tokens_in_content
    prompts = {sample.prompt_index: list(sample.prompt_ids) for sample in samples}
    sampling = rollout_sampling(config)
    engine = sized_engine(config, model, list(prompts.values()), len(prompts) * sampling.n)
    with ProgressLine(str(run)) as progress:
        groups = engine.generate(
            list(prompts.values()), sampling, list(prompts),
            lambda _, done: progress.update(f"step {step}", done, len(prompts) * sampling.n),
        )  # fmt: skip
    drawn = {(c.prompt_id, c.sample_index): (c.token_ids, c.logprobs) for group in groups for c in group}
    facts = computed_by(model.ops) | {"formats": model.precision.formats()}
    return replace(compared(samples, drawn), other=unlike(run, config, facts))


def compared(
    samples: Sequence[Sample], drawn: Mapping[tuple[int, int], tuple[Sequence[int], Sequence[float]]]
) -> Compared:
    """Recorded samples beside what was drawn: token ids and log-probabilities by prompt and sample."""
    tokens = differing = 0
    first = None
    for sample in samples:
        ids, logprobs = drawn[sample.prompt_index, sample.sample_index]
        found = _pairs(ids, logprobs)
        wanted = _pairs(sample.completion_ids, sample.rollout_logprobs)
        tokens += len(wanted)
        equal = [place < len(found) and found[place] == pair for place, pair in enumerate(wanted)]
        count = max(equal.count(False), len(found) - len(wanted))
        if count and first is None:
            place = equal.index(False) if False in equal else len(wanted)
            first = (
                f"prompt {sample.prompt_index}, sample {sample.sample_index}, token {place}: recorded "
                f"{_said(sample.completion_ids, sample.rollout_logprobs, place)}, drawn {_said(ids, logprobs, place)}"
            )
        differing += count
    return Compared(len(samples), tokens, differing, first)


def _pairs(ids: Sequence[int], logprobs: Sequence[float]) -> list[tuple[int, int]]:
    """Each token with the bits of its log-probability."""
    return list(zip(ids, np.asarray(logprobs, np.float32).view(np.uint32).tolist()))


def _said(ids: Sequence[int], logprobs: Sequence[float], place: int) -> str:
    return f"id {ids[place]} with log-probability {logprobs[place]!r}" if place < len(ids) else "none"


def _line(step: int, found: Compared) -> str:
    what = f"step {step}: {found.completions:,} completions, {found.tokens:,} tokens"
    if found.first is None:
        return f"{what}: drawn again, every token and every bit of its log-probability"
    note = f" (recorded with another {', '.join(found.other)}, where bits may differ)" if found.other else ""
    return f"{what}: {found.differing:,} differ; first: {found.first}{note}"
