"""The records of a run, read as strictly as they were written: its completions, its metrics, and
the chain of hashes that holds them together (`run/certificate.py`).

Problems that can be seen without the weights are found here: a line that is not a row, a row that
is there twice or is missing, a row with another prompt than its group, a reward that is not the sum
of its parts, and a record that does not have the hash that the certificate has of it. Left out:
what the weights sample (`verify.py`).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from isobit.config import Config, SftConfig
from isobit.config.reading import read_source
from isobit.errors import IsobitError
from isobit.rl import Sample
from isobit.run import certificate, checkpoints, completions
from isobit.run import directory as runs
from isobit.run.certificate import CERTIFICATE, Chain
from isobit.run.completions import COMPLETIONS
from isobit.training.saving.certificate import of_config
from isobit.training.saving.checkpoint import head_of


@dataclass
class Records:
    """The records of a run. `samples`: whole samples by (prompt, sample), for each requested number
    of learned steps; a sample that went on across updates ends with its segment of that step.
    `rows`: their rows, by (learned steps, prompt, sample). `count`: all completions; `tokens` and
    `segments`: those of all whole samples; `held`: completions whose lines have the hash that the
    certificate has of them; `problems`: in words."""

    chain: Chain | None
    samples: dict[int, dict[tuple[int, int], Sample]] = field(default_factory=dict)
    rows: dict[tuple[int, int, int], Mapping[str, Any]] = field(default_factory=dict)
    count: int = 0
    tokens: int = 0
    segments: int = 0
    held: int = 0
    problems: list[str] = field(default_factory=list)


def read_records(run: Path, config: Config | SftConfig, steps: set[int]) -> Records:
    """Read the records of a run and check them against its certificate. Whole samples are kept for
    the given numbers of learned steps, after which they were sampled; a supervised run has none."""
    chain = certificate.read_chain(run / CERTIFICATE)
    records = Records(chain, problems=list(chain.problems) if chain is not None else [])
    last = None
    if runs.in_use(run):  # rows after the newest checkpoint are still written
        last = max(steps, default=0)
    members, newest = dict[int, str](), 0
    for step, lines in _steps(run / COMPLETIONS, records):
        if last is not None and step > last:
            break
        digest = certificate.of_rollouts(lines)
        if step in members:
            records.problems.append(f"{COMPLETIONS}: step {step} is there twice")
        elif step < newest:
            records.problems.append(f"{COMPLETIONS}: step {step} stands after step {newest}")
        members[step], newest = digest, max(newest, step)
        records.count += len(lines)
        records.held += len(lines) * (
            chain is not None and chain.rows.get(step, {}).get("rollouts") == digest
        )
        if isinstance(config, Config):
            _take(step, lines, steps, config, records)
    if chain is not None and not chain.rows:
        records.problems.append(f"{CERTIFICATE} has no row")
    elif chain is not None:
        _against_chain(run, chain, members, last, records)
    return records


def _steps(path: Path, records: Records) -> Iterator[tuple[int, list[bytes]]]:
    """Yield (step, the lines of its completions) for one step after another; problems are added to
    `records`."""
    offset = 0
    for member in completions.members(path):
        offset = member.start + member.length
        try:
            lines = completions.lines(path, member)
            yield int(completions.parse(lines[0])["step"]), lines
        except (IsobitError, IndexError) as error:
            records.problems.append(str(error) or f"{path}: no row at byte {member.start}")
    if path.is_file() and path.stat().st_size > offset and not runs.in_use(path.parent):
        records.problems.append(f"{path.name}: bytes from {offset:,} on are no whole step")


def _take(
    step: int, lines: Sequence[bytes], steps: set[int], config: Config, records: Records
) -> None:
    """Check each row of a step, add its problems to `records`, and keep its sample where the step
    that it was sampled after is in `steps`."""
    groups: dict[int, list[int]] = {}
    prompts: dict[int, object] = {}
    for line in lines:
        try:
            row = completions.parse(line)
            where = f"step {step}, prompt {row['prompt_index']}, sample {row['sample_index']}"
            sample = _sample(row)
        except (IsobitError, KeyError) as error:
            records.problems.append(f"{COMPLETIONS}, step {step}: {error}")
            continue
        groups.setdefault(row["prompt_index"], []).append(row["sample_index"])
        if row["step"] != step:
            records.problems.append(f"{where}: the row says step {row['step']}")
        if (problem := _reward_problem(row, config)) is not None:
            records.problems.append(f"{where}: {problem}")
        if sample is None or "rollout_step" not in row:  # rows may be recorded in part
            continue
        if prompts.setdefault(sample.prompt_index, sample.prompt_ids) != sample.prompt_ids:
            records.problems.append(f"{where}: its prompt is not that of its group")
        if (problem := _segments_problem(sample, config)) is not None:
            records.problems.append(f"{where}: {problem}")
        records.tokens += len(sample.completion_ids)
        records.segments += len(sample.drawn)
        for segment in sample.drawn:
            key, rolled = (sample.prompt_index, sample.sample_index), segment.rollout_step
            if rolled in steps:
                recorded = sample.until(segment) if config.partial.used else sample
                records.samples.setdefault(rolled, {})[key] = recorded
                # the row is there once, though it may be learned from again
                records.rows[rolled, sample.prompt_index, sample.sample_index] = row
    size = config.sampling.group_size
    for prompt, samples in groups.items():
        if sorted(samples) != list(range(size)):
            records.problems.append(
                f"step {step}, prompt {prompt}: its samples are {sorted(samples)}, and a group "
                f"has 0 to {size - 1}"
            )


def _sample(row: Mapping[str, Any]) -> Sample | None:
    """Return the sample of a whole row; None for a row in part, which a run that records a choice
    of completions has. Raises IsobitError for a row that is neither."""
    numbers = (
        "prompt_index",
        "sample_index",
        *(("rollout_step", "weights_version") if "completion_ids" in row else ()),
    )
    if any(type(row.get(name, 0)) is not int for name in numbers):
        raise IsobitError("not a row of completions: its numbers are no whole numbers")
    if "completion_ids" not in row:
        return None
    try:
        ids = (*row["prompt_ids"], *row["completion_ids"])
        whole = all(type(token) is int for token in ids) and isinstance(row["completion"], str)
        if not whole or type(row["truncated"]) is not bool:
            raise TypeError
        return Sample.from_json(row)
    except (KeyError, TypeError, AssertionError):
        raise IsobitError("not a row of completions") from None


def _segments_problem(sample: Sample, config: Config) -> str | None:
    """Return what is wrong with the places where a completion was interrupted, or None: a segment
    that is interrupted has whole rounds, and later segments are of later steps."""
    *interrupted, last = sample.drawn
    budget = config.partial.tokens_per_round
    if interrupted and not budget:
        return "it has segments, and partial.tokens_per_round is 0"
    for segment, following in zip(interrupted, [*interrupted[1:], last]):
        if (segment.stop - segment.start) % budget:
            return (
                f"its segment of step {segment.rollout_step} has {segment.stop - segment.start} "
                f"tokens, and a round has {budget} (partial.tokens_per_round)"
            )
        if segment.rollout_step >= following.rollout_step:
            return f"its segment of step {following.rollout_step} follows one of a step that is not older"
    return None


def _reward_problem(row: Mapping[str, Any], config: Config) -> str | None:
    """Return what is wrong with a row's reward, where its parts and the config's weights determine
    it, or None."""
    specs = [(spec.label, spec.weight) for spec in config.rewards.functions]
    weights = dict([*specs, *((model.name, model.weight) for model in config.rewards.models)])
    reward, components = row.get("reward"), row.get("rewards")
    if reward is None or not config.rewards.functions or not isinstance(components, Mapping):
        return None
    if components.keys() != weights.keys():
        return f"its rewards are {', '.join(map(str, components))}, and the config's {', '.join(weights)}"
    try:
        total = sum(
            (
                weight * components[name]
                for name, weight in weights.items()
                if weight and components[name] is not None
            ),
            0.0,
        )
    except TypeError:
        return "its rewards are no numbers"
    return None if reward == total else f"its reward is {reward!r}, and its parts make {total!r}"


def _against_chain(
    run: Path,
    chain: Chain,
    members: Mapping[int, str],
    last: int | None,
    report: Records,
) -> None:
    if chain.first:
        report.problems.append(f"{CERTIFICATE} begins at step {chain.first}: rows are missing")
    for step in sorted({*members, *chain.rows}):
        if step < chain.first or (last is not None and step > last):
            continue
        recorded, digest = chain.rows.get(step, {}).get("rollouts"), members.get(step)
        if step not in chain.rows:
            report.problems.append(
                f"{COMPLETIONS}: step {step} is not in {CERTIFICATE}; {_whole_again(run)}"
            )
        elif recorded != digest:
            problem = "are missing" if digest is None else "are not those that were recorded"
            report.problems.append(f"{COMPLETIONS}: completions of step {step} {problem} (SHA-256)")
    seen: dict[int, str] = {}
    for row in runs.read_jsonl(run / runs.METRICS, report.problems.append):
        step = int(row["step"])
        if step in seen:
            report.problems.append(f"{runs.METRICS}: step {step} is there twice")
        seen[step] = certificate.of_metrics(row)
    for step, held in chain.rows.items():
        if step and step not in seen and (last is None or step <= last):
            report.problems.append(
                f"{runs.METRICS}: the row of step {step} is missing; {_whole_again(run)}"
            )
        elif step and step in seen and seen[step] != held["metrics"]:
            report.problems.append(
                f"{runs.METRICS}: the row of step {step} is not the one that was recorded"
            )
    if extra := [step for step in seen if step > chain.last and last is None]:
        report.problems.append(
            f"{runs.METRICS}: step {extra[0]} is not in {CERTIFICATE}; {_whole_again(run)}"
        )
    if of_config(read_source(run / runs.CONFIG, ())[0]) != chain.rows[chain.last]["config"]:
        report.problems.append(
            f"{runs.CONFIG} is not the config that step {chain.last} was done with"
        )


def _whole_again(run: Path) -> str:
    return f"if the run was interrupted there: isobit train --resume {run}"


def checkpoint_problem(path: Path, chain: Chain | None) -> str | None:
    """Return why a checkpoint does not belong to the chain, or None. A checkpoint without a hash
    has a problem only if the chain has its step: `verify` reports that the chain is missing."""
    head, step = head_of(path), checkpoints.step_of(path)
    if head == certificate.GENESIS:
        return (
            None
            if chain is None or step not in chain.rows
            else f"{path} has no hash of the certificate"
        )
    if chain is None:
        return f"{CERTIFICATE} is missing, and {path} has the hash of its row of step {step}"
    if step not in chain.rows:
        return f"{CERTIFICATE} has no row of step {step}, of which {path} is: rows are missing"
    if chain.rows[step]["hash"] != head:
        return (
            f"{path} has another hash of step {step} than {CERTIFICATE}: one of them is not "
            "this run's"
        )
    return None
