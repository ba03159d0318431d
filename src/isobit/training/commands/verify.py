"""`isobit verify`: whether a run's weights sampled what the run recorded, token by token and bit by
bit, and whether what it recorded is all there.

A rollout is a function of the weights, the prompt, the seed and a token's place. So a checkpoint,
which has the weights after n steps, draws again every completion that was sampled after n steps,
with every log-probability, its text, and how it ended; so a run can be verified without trust in
its maker. Of a completion that went on across updates, the segments whose weights are in a
checkpoint are drawn again, each after the tokens before it. Completions of steps whose checkpoint
is gone are held by the certificate's chain of hashes alone, and so are rewards, which are not
computed again (`records.py`). For a run that sampled no completions (a supervised run, for
example) the chain holds metrics and weights. Left out: the learning, which `isobit train
--from-rollouts` repeats.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from isobit.config import Config, SftConfig, load_any_run_config
from isobit.engine.engine import Engine
from isobit.engine.episodes import Episodes
from isobit.engine.groups import OpenGroups
from isobit.engine.types import Completion, Sampling
from isobit.errors import IsobitError, RunFailed, brief
from isobit.evaluation.best import DESCRIPTION
from isobit.evaluation.progress import ProgressLine
from isobit.kernels import computed_by
from isobit.model import Model
from isobit.precision import precision_from
from isobit.rl import Sample
from isobit.rl.algorithm.partial import unfinished
from isobit.run import checkpoints
from isobit.run import directory as runs
from isobit.run.certificate import CERTIFICATE, Chain
from isobit.training.commands.records import Records, checkpoint_problem, read_records
from isobit.training.measuring.agreement import unlike
from isobit.training.parts.assembly import (
    base_of,
    recorded_dialogue,
    rollout_sampling,
    sized_engine,
)
from isobit.training.parts.model import load_trained, model_named
from isobit.training.rollouts.partial import completion_of
from isobit.training.running.machine import date_of
from isobit.training.saving.certificate import of_weights


@dataclass(frozen=True)
class Compared:
    """The comparison of one checkpoint's completions with those drawn again. `tokens`: how many
    there are; `differing`: how many were drawn with another log-probability or not at all; `first`:
    the first difference of any kind, in words, or None; `other`: the facts of the computation that
    were different when the completions were recorded."""

    completions: int
    tokens: int
    differing: int
    first: str | None
    other: Sequence[str] = ()


def verify_command(run: Path, limit: int | None, head: str | None = None) -> None:
    """Draw again the completions that each checkpoint of the run sampled, at least `limit` for each
    checkpoint if that many are recorded (None: all), compare the records with the certificate, and
    print a line for each checkpoint. `head`: the hash of a step that was kept elsewhere. Raises
    RunFailed where anything differs, and IsobitError where nothing can be compared."""
    config = load_any_run_config(run)
    undrawn = _undrawn(run, config)
    saved = checkpoints.all_checkpoints(run / runs.CHECKPOINTS)
    steps = {checkpoints.step_of(path) for path in saved}
    records = read_records(run, config, steps if undrawn is None else set())
    if head is not None:
        records.problems += _kept_elsewhere(records.chain, head)
    drawn, tokens, failed = 0, 0, list(records.problems)
    for path in saved:
        step = checkpoints.step_of(path)
        samples = _whole_groups(
            [sample for _, sample in sorted(records.samples.get(step, {}).items())], limit
        )
        compared_, problems = _checkpoint(run, config, path, samples, records)
        failed += problems
        if samples:
            drawn, tokens = drawn + len(samples), tokens + compared_.tokens
            print(report := _line(step, compared_), flush=True)
            failed += [report] if compared_.first is not None else []
    if (problem := _best_problem(run, config, records.chain)) is not None:
        failed.append(problem)
    if undrawn is None and not drawn and not failed:
        assert isinstance(config, Config)
        raise IsobitError(
            f"{run}: none of its checkpoints sampled completions that are recorded; it keeps the "
            f"newest {config.run.keep_last} (run.keep_last), and records {config.run.completions} "
            "(run.completions)"
        )
    if records.chain is None:
        failed.append(
            f"{CERTIFICATE} is missing, so nothing says which rows and rewards were recorded"
        )
    for line in records.problems:
        print(line)
    if failed:
        raise RunFailed(f"{run}: not what was recorded, in {len(failed)} places: {failed[0]}")
    print(_held(records))
    if undrawn is not None:
        print(f"{run}: the weights of {len(saved):,} checkpoints are as they were; {undrawn}")
        return
    unit, total = "completions", records.count
    if isinstance(config, Config) and config.partial.used:
        unit, total = "segments of completions", records.segments
        print(
            f"{records.tokens - tokens:,} of {records.tokens:,} tokens were drawn by weights that no "
            "checkpoint here has: the certificate alone holds these"
        )
    print(
        f"{run}: {drawn:,} of {total:,} {unit} were drawn again, and 0 of their "
        f"{tokens:,} tokens differ in any bit: these weights sampled what is recorded"
    )


def _kept_elsewhere(chain: Chain | None, head: str) -> list[str]:
    """Return a problem in a list where no step of the chain has the hash `head`, which was kept
    elsewhere; otherwise an empty list."""
    rows = {} if chain is None else chain.rows
    if any(row["hash"] == head for row in rows.values()):
        return []
    return [f"no step has the hash {head}: this is not the run of which it was said"]


def _held(records: Records) -> str:
    chain = records.chain
    assert chain is not None
    completions = f"{records.held:,} completions, their rewards and " if records.held else ""
    return (
        f"certificate: {completions}the metrics of steps {chain.first} to {chain.last} are as they "
        "were recorded (SHA-256), but for times and evaluations, which it does not hold; its last "
        f"hash: {chain.head}"
    )


def _undrawn(run: Path, config: Config | SftConfig) -> str | None:
    """Return why no completion of a run can be drawn again, or None."""
    if isinstance(config, SftConfig):
        return "a supervised run samples nothing that could be drawn again"
    if (source := runs.rollouts_from(run)) is not None:
        return f"it learned from the rollouts of another run and sampled none: verify {source} too"
    precision = precision_from(config.precision)
    if precision.calibrated and precision.calibration.schedule != "never":
        return (
            f"no completion was drawn again: under {precision.name} keys and values have scales "
            "that were calibrated during the run and are not recorded"
        )
    return None


def _whole_groups(samples: Sequence[Sample], limit: int | None) -> list[Sample]:
    """Return the samples of the first whole groups that together hold at least `limit` samples; all
    samples for None."""
    whole: list[Sample] = []
    for _, group in groupby(samples, lambda sample: sample.prompt_index):
        if limit is not None and len(whole) >= limit:
            break
        whole += group
    return whole


def _checkpoint(
    run: Path,
    config: Config | SftConfig,
    checkpoint: Path,
    samples: Sequence[Sample],
    records: Records,
) -> tuple[Compared, list[str]]:
    """Draw the samples of a checkpoint again, and return (the comparison, other problems of the
    checkpoint)."""
    step = checkpoints.step_of(checkpoint)
    tokens = sum(map(_size, samples))
    chain = records.chain
    if (damage := checkpoints.damage(checkpoint)) is not None:
        line = f"checkpoint {checkpoint} is damaged: {damage}"
        return Compared(len(samples), tokens, tokens, line), [] if samples else [line]
    problem = checkpoint_problem(checkpoint, chain)
    if not samples and chain is None:
        return Compared(0, 0, 0, None), [problem] if problem is not None else []
    model = _load(run, config, checkpoint)
    row = {} if chain is None else chain.rows.get(step, {})
    if problem is None and row and of_weights(model) != row["weights"]:
        problem = (
            f"the weights in {checkpoint} are not those that the certificate has of step {step}"
        )
    problems = [problem] if problem is not None else []
    if not samples:
        return Compared(0, 0, 0, None), problems
    assert isinstance(config, Config)
    return _draw_again(run, config, model, samples, records), problems


def _load(run: Path, config: Config | SftConfig, folder: Path) -> Model:
    """Load the model in `folder`, a checkpoint or the best model; an adapter is loaded on the model
    that it is for."""
    began = runs.began_by(run)
    base = folder
    if config.adapter is not None and isinstance(config, Config):
        base = base_of(config, began, quiet=True)
    elif config.adapter is not None and config.model.path is not None:
        base = model_named(config.model.path)
    ids = began.get("vocabulary")
    vocabulary = ids if isinstance(ids, int) and ids > 0 else None
    return load_trained(config, base, folder, now=date_of(began), vocabulary=vocabulary)


def _best_problem(run: Path, config: Config | SftConfig, chain: Chain | None) -> str | None:
    """Return why the best model is not the model of the step in its description, or None."""
    folder = run / runs.BEST
    if chain is None or not folder.is_dir():
        return None
    if (damage := checkpoints.damage(folder)) is not None:
        return f"{folder} is damaged: {damage}"
    step = (runs.object_in(folder / DESCRIPTION) or {}).get("step")
    if type(step) is not int or step not in chain.rows:
        return f"{folder} is of step {brief(step)}, of which {CERTIFICATE} has no row"
    if of_weights(_load(run, config, folder)) == chain.rows[step]["weights"]:
        return None
    return f"the weights in {folder} are not those that the certificate has of step {step}"


def _draw_again(
    run: Path, config: Config, model: Model, samples: Sequence[Sample], records: Records
) -> Compared:
    step = samples[0].rollout_step
    with ProgressLine(str(run)) as progress:
        drawn = {
            (c.prompt_id, c.sample_index): c
            for c in _drawn(
                config, model, samples, lambda done, of: progress.update(f"step {step}", done, of)
            )
        }
    facts = computed_by(model.ops) | {"formats": model.precision.formats()}
    most = config.sampling.max_new_tokens if config.partial.used else 0
    result = replace(compared(samples, drawn, most), other=unlike(run, config, facts))
    for sample in samples if result.first is None else ():
        row = records.rows[step, sample.prompt_index, sample.sample_index]
        if (problem := _text_problem(row, model)) is not None:
            return replace(
                result,
                first=f"prompt {sample.prompt_index}, sample {sample.sample_index}: {problem}",
            )
    return result


def _drawn(
    config: Config,
    model: Model,
    samples: Sequence[Sample],
    progress: Callable[[int, int], None],
) -> Iterator[Completion]:
    """Yield the completions of the groups of these samples, drawn again. Where environments
    answered, their recorded answers are repeated, whatever is drawn."""
    prompts = {sample.prompt_index: list(sample.prompt_ids) for sample in samples}
    sampling = rollout_sampling(config)
    count = len(prompts) * sampling.n
    engine = sized_engine(config, model, list(prompts.values()), count)
    engine.calibrate([])  # of scales that are 1, on no data; others `_undrawn` leaves out
    if config.partial.used:
        yield from _segments(engine, sampling, samples, progress)
        return
    if all(sample.episode is None for sample in samples):
        notify = lambda _, done: progress(done, count)  # noqa: E731
        for group in engine.generate(list(prompts.values()), sampling, list(prompts), notify):
            yield from group
        return
    episodes = Episodes(engine, recorded_dialogue(config, model))
    with OpenGroups(episodes) as gathering:
        for index, sample in enumerate(samples):
            single, columns = replace(sampling, n=1), _recorded(config, sample)
            named = sample.prompt_index, columns, None, sample.sample_index
            gathering.add(index, episodes.submit(list(sample.prompt_ids), single, *named))
        while gathering:
            for _, group in gathering.step():
                yield from group
            progress(gathering.completed, count)


def _segments(
    engine: Engine,
    sampling: Sampling,
    samples: Sequence[Sample],
    progress: Callable[[int, int], None],
) -> Iterator[Completion]:
    """Draw the last segment of each sample again, for completions that may have gone on across
    updates, and yield the completion up to its end. The tokens before the segment are given."""
    most = sampling.max_new_tokens
    with OpenGroups(engine) as gathering:
        for index, sample in enumerate(samples):
            last = sample.drawn[-1]
            stop = last.stop if unfinished(sample, most) else most
            single = replace(sampling, n=1, max_new_tokens=stop - last.start)
            numbers = sample.prompt_index, sample.sample_index
            if last.start:
                previous = completion_of(sample.until(sample.segments[-2]))
                request = engine.resume(previous, single)
            else:
                request = engine.submit(list(sample.prompt_ids), single, *numbers)
            gathering.add(index, request)
        while gathering:
            for _, drawn in gathering.step():
                yield from drawn
            progress(gathering.completed, len(samples))


def _size(sample: Sample) -> int:
    """Return the number of tokens that are drawn again: those of the newest segment."""
    last = sample.drawn[-1]
    return last.stop - last.start


def _recorded(config: Config, sample: Sample) -> dict[str, Any]:
    """Return the recorded columns of a sample: its episode and, where an episode may fork, its
    contexts, which are the prompts of its turns."""
    if config.environment.history != "fork":
        return {"episode": sample.episode}
    mask = sample.completion_mask or ()
    begins = [i for i in range(1, len(mask)) if mask[i] and not mask[i - 1]]
    return {"episode": sample.episode, "contexts": [sample.before(begin) for begin in begins]}


def _text_problem(row: Mapping[str, Any], model: Model) -> str | None:
    """Return, in words, the first recorded text of a prompt that is not the text of its tokens, or
    None."""
    texts = {"prompt": False, "prompt_rendered": True}
    for name, special in texts.items():
        if row.get(name) != model.tokenizer.decode(row["prompt_ids"], special=special):
            return f"its {name} is not the text of its tokens"
    return None


def compared(
    samples: Sequence[Sample], drawn: Mapping[tuple[int, int], Completion], most: int = 0
) -> Compared:
    """Compare recorded samples with the completions that were drawn, by (prompt, sample). `most`:
    the limit of tokens of a completion; a truncated completion with fewer was interrupted."""
    tokens = differing = 0
    first = None
    for sample in samples:
        tokens += _size(sample)
        again = drawn.get((sample.prompt_index, sample.sample_index))
        where = f"prompt {sample.prompt_index}, sample {sample.sample_index}"
        if again is None:
            differing = differing + _size(sample)
            first = first or f"{where}: no such sample is drawn"
            continue
        count, difference = _tokens_differ(sample, again)
        differing += count
        difference = difference or _ending_differs(sample, again, most)
        first = first or (difference and f"{where}, {difference}")
    return Compared(len(samples), tokens, differing, first)


def _tokens_differ(sample: Sample, again: Completion) -> tuple[int, str | None]:
    """Return (the number of tokens that differ, the first of them in words or None)."""
    ids, logprobs = again.token_ids, again.logprobs
    drawn, wanted = _pairs(ids, logprobs), _pairs(sample.completion_ids, sample.rollout_logprobs)
    equal = [index < len(drawn) and drawn[index] == pair for index, pair in enumerate(wanted)]
    count = max(equal.count(False), len(drawn) - len(wanted))
    if not count:
        return 0, None
    index = equal.index(False) if False in equal else len(wanted)
    recorded = _said(sample.completion_ids, sample.rollout_logprobs, index)
    return count, f"token {index}: recorded {recorded}, drawn {_said(ids, logprobs, index)}"


def _ending_differs(sample: Sample, again: Completion, most: int) -> str | None:
    """Return, in words, the first difference in prompt, end, text, forks or mask between a sample
    and a completion with the same tokens, or None."""
    if list(sample.prompt_ids) != list(again.prompt_token_ids):
        return "its prompt: recorded other tokens than those that its group was drawn with"
    if sample.truncated != (again.finish_reason == "length"):
        return f"truncated: recorded {sample.truncated}, drawn {again.finish_reason == 'length'}"
    if sample.completion != again.text and not unfinished(sample, most):
        return f"its text: recorded {sample.completion[:60]!r}, drawn {again.text[:60]!r}"
    if sample.forks != again.forks:
        return f"forks: recorded {sample.forks}, drawn {again.forks}"
    mask = None if again.completion_mask is None else tuple(again.completion_mask)
    return (
        None if sample.completion_mask == mask else "completion_mask: recorded another than drawn"
    )


def _pairs(ids: Sequence[int], logprobs: Sequence[float]) -> list[tuple[int, int]]:
    """Return each token with the bits of its log-probability in float32."""
    return list(zip(ids, np.asarray(logprobs, np.float32).view(np.uint32).tolist()))


def _said(ids: Sequence[int], logprobs: Sequence[float], index: int) -> str:
    return (
        f"id {ids[index]} with log-probability {logprobs[index]!r}" if index < len(ids) else "none"
    )


def _line(step: int, comparison: Compared) -> str:
    text = f"step {step}: {comparison.completions:,} completions, {comparison.tokens:,} tokens"
    if comparison.first is None:
        return f"{text}: drawn again, every token and every bit of its log-probability"
    note = (
        f" (recorded with another {', '.join(comparison.other)}, where bits may differ)"
        if comparison.other
        else ""
    )
    return f"{text}: {comparison.differing:,} differ; first: {comparison.first}{note}"
