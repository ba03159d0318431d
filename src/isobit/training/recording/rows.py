"""The records of a step in `completions.jsonl.gz`: completions as rows, and rows as completions.

A row has the sample (`rl/algorithm/samples.py`), `policy_logprobs`, the row of the data by its
number and its columns, and the prompt's text without and with special tokens. Under
`run.completions: sample` eight completions of a step have whole rows, and the others only the
values that the report's figures need. Left out: the file (`run/completions.py`).
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from isobit.config import Config
from isobit.data.dataset import Dataset
from isobit.errors import IsobitError
from isobit.model import Tokenizer
from isobit.monitor.report.selection import best_worst_and_between
from isobit.rl import Group, Sample
from isobit.rl.learner.batch import SampleKey, sample_key
from isobit.run import completions
from isobit.run.completions import COMPLETIONS, SAME
from isobit.run.directory import METRICS, read_jsonl

SAMPLED = 8
"""The number of whole rows of a step under `run.completions: sample`."""
LONGEST_COLUMN = 2000
"""The most characters of a column as JSON; of a longer column, such as the tests of a program, the
beginning is recorded."""


@dataclass(frozen=True, eq=False)
class CompletionRows:
    """The maker of a step's rows, in the way that `run.completions` says (`kind`), for prompts of
    `train`."""

    kind: str
    tokenizer: Tokenizer
    train: Dataset

    def of(
        self, step: int, groups: Sequence[Group], compared: Mapping[SampleKey, Sequence[float]]
    ) -> Iterator[dict[str, Any]]:
        """Yield the rows of a step's groups. `compared`: the learner's log-probabilities of some
        samples, one for each completion token."""
        if self.kind == "none":
            return
        samples = [sample for group in groups for sample in group]
        rewards = [float("nan") if s.reward is None else s.reward for s in samples]
        every = range(len(samples))
        whole = set(every if self.kind == "all" else best_worst_and_between(rewards, SAMPLED))
        number = 0
        for group in groups:
            prompt = self._prompt(group[0]) if group else {}
            for sample in group:
                yield {"step": step, **_row(sample, prompt, compared, number in whole)}
                number += 1

    def _prompt(self, sample: Sample) -> dict[str, Any]:
        """Return the values that all rows of a group have in common."""
        example = self.train.at(sample.prompt_index)
        return {
            "row": example.index,
            "prompt": self.tokenizer.decode(sample.prompt_ids),
            "prompt_rendered": self.tokenizer.decode(sample.prompt_ids, special=True),
            "columns": {name: shortened(value) for name, value in example.columns.items()},
        }


def _row(
    sample: Sample,
    prompt: Mapping[str, Any],
    compared: Mapping[SampleKey, Sequence[float]],
    whole: bool,
) -> dict[str, Any]:
    if not whole:
        fields = ("prompt_index", "sample_index", "reward", "rewards", "truncated")
        return {"row": prompt["row"], "prompt": prompt["prompt"]} | {
            name: getattr(sample, name) for name in fields
        }
    rollout = list(sample.rollout_logprobs)
    policy = compared.get(sample_key(sample))
    return {
        **prompt,
        **sample.to_json(),
        "rollout_logprobs": _compact(rollout),
        "policy_logprobs": None
        if policy is None
        else SAME
        if _bits(policy) == _bits(rollout)
        else _compact(policy),
    }


def _bits(values: Sequence[float]) -> bytes:
    return np.asarray(values, np.float32).tobytes()


def _compact(values: Sequence[float]) -> list[float]:
    """Return the float32 numbers `values` with the fewest digits that distinguish them from other
    float32 numbers, instead of the digits of float64."""
    array = np.asarray(values, np.float32)
    assert array.astype(np.float64).tolist() == list(values), "log-probabilities are float32"
    return [float(text) for text in array.astype(str)]


def shortened(value: Any) -> Any:
    """Return a column's value as JSON has it, cut if it is too long: NaN is null, and an object
    that a program gave is its text."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    if len(text) > LONGEST_COLUMN:
        return f"{text[:LONGEST_COLUMN]} … ({len(text):,} characters)"
    return json.loads(text, parse_constant=lambda name: None)


def recorded_groups(run: Path, config: Config) -> Iterator[list[Group]]:
    """Yield the groups of a recorded run, one step after another. Raises IsobitError if groups are
    missing."""
    path = run / COMPLETIONS
    if config.run.completions != "all":
        raise IsobitError(
            f"{run} cannot be repeated from its rollouts: it recorded run.completions: "
            f"{config.run.completions}, and only with all (the default) are they all there"
        )
    if not path.is_file():
        raise IsobitError(f"{run}: no {COMPLETIONS} to learn from")
    rows = [row for row in read_jsonl(run / METRICS) if row["step"] > 0]
    needed = {int(row["step"]) for row in rows if row.get("advantage/nonzero_fraction") is not None}
    if needed and next(completions.members(path), None) is None:
        raise IsobitError(f"{path}: holds no whole step, and {len(needed):,} were learned from")
    return _groups(path, needed)


def _groups(path: Path, needed: set[int]) -> Iterator[list[Group]]:
    step, groups = 1, dict[int, list[Sample]]()
    for row in completions.read(path):
        while row["step"] != step:
            yield _whole(path, step, groups, needed)
            step, groups = step + 1, {}
        if "completion_ids" not in row:
            raise IsobitError(
                f"{path}: step {step} was recorded with run.completions: sample, and cannot be "
                "repeated"
            )
        sample = Sample.from_json(row)
        groups.setdefault(sample.prompt_index, []).append(sample)
    yield _whole(path, step, groups, needed)
    for later in sorted(needed - set(range(step + 1))):
        _whole(path, later, {}, needed)


def _whole(
    path: Path, step: int, groups: Mapping[int, list[Sample]], needed: set[int]
) -> list[Group]:
    if not groups and step in needed:
        raise IsobitError(
            f"{path}: step {step} was recorded with run.completions: none, and cannot be repeated"
        )
    return list(groups.values())
