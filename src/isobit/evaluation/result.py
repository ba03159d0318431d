"""The result of an evaluation: every completion with its reward, by prompt; and the JSON file that
stores it.

    {"model": ..., "settings": {...}, "ks": [...], "rewards": [...], "prompts": [{"prompt": ...,
     "tag": ..., "greedy": completion, "samples": [completion, ...]}, ...], "summary": {value of the
     tag, or "(all)": {measure: {"value", "low", "high", "prompts"}}}}

    completion: {"completion", "reward", "answer", "tokens", "truncated", "error"}, for several
     turns also "episode": the messages of all turns

The summary is for the reader: `read_result` computes nothing from it. Left out: conclusions
(`summary.py`, `comparison.py`).
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from isobit.data.dataset import Prompt
from isobit.data.text_rows import kind
from isobit.errors import IsobitError, brief
from isobit.run import durable


@dataclass(frozen=True)
class Graded:
    """A completion with its reward (None: unscored, for the reason `error`), its answer (None: it
    has none) and length.

    `tokens` and `truncated` are None for a completion that was given, not sampled; `episode` holds
    the plain values of an `EpisodeRecord` where there were several turns, of which `completion` is
    the last. A completion is correct if its reward is at least 1.
    """

    completion: str
    reward: float | None
    answer: str | None = None
    tokens: int | None = None
    truncated: bool | None = None
    error: str | None = None
    episode: Mapping[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        """Return plain values; `episode` is left out without an environment."""
        return {k: v for k, v in vars(self).items() if k != "episode" or v is not None}

    @property
    def correct(self) -> bool:
        return self.reward is not None and self.reward >= 1


@dataclass(frozen=True)
class Question:
    """A prompt, the value of its tag, its greedy (or given) completion, its samples, and the
    columns of its row. Every prompt of a result has the same number of samples."""

    prompt: Prompt
    tag: str | None
    greedy: Graded
    samples: tuple[Graded, ...] = ()
    columns: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return plain values without the columns, which are in the data."""
        samples = [sample.to_json() for sample in self.samples]
        tagged = {"prompt": self.prompt, "tag": self.tag}
        return {**tagged, "greedy": self.greedy.to_json(), "samples": samples}


@dataclass(frozen=True)
class Result:
    """The result of an evaluation, with its model, its settings (plain values), the values of k and
    the names of the rewards."""

    model: str
    questions: tuple[Question, ...]
    ks: tuple[int, ...] = ()
    rewards: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def num_samples(self) -> int:
        return len(self.questions[0].samples)

    @property
    def prompts(self) -> list[Prompt]:
        return [question.prompt for question in self.questions]

    @property
    def given(self) -> bool:
        """Whether completions were given instead of sampled."""
        return self.questions[0].greedy.tokens is None

    def to_json(self) -> dict[str, Any]:
        """Return plain values, without the summary."""
        return {
            "model": self.model,
            "settings": dict(self.settings),
            "ks": list(self.ks),
            "rewards": list(self.rewards),
            "prompts": [question.to_json() for question in self.questions],
        }


def write_result(path: Path, content: Mapping[str, Any]) -> None:
    """Write plain values as JSON. Raises IsobitError if the file cannot be written."""
    try:
        durable.write_text(path, json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    except OSError as error:
        raise IsobitError(f"cannot write {path}: {error.strerror}") from None


def read_result(path: Path) -> Result:
    """Read a file that `isobit eval --out` wrote. Raises IsobitError for another file, or a damaged
    one."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise IsobitError(f"cannot read result {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise IsobitError(f"{path}: not UTF-8 text, so not a result of isobit eval --out") from None
    except json.JSONDecodeError as error:
        raise IsobitError(f"{path}, line {error.lineno}: malformed JSON: {error.msg}") from None
    except (RecursionError, ValueError):
        raise IsobitError(
            f"{path}: malformed JSON: nested too deeply or a number too long"
        ) from None
    try:
        questions = tuple(_question(values) for values in content["prompts"])
        ks = tuple(int(k) for k in content["ks"])
        rewards = tuple(_text(name) for name in content["rewards"])
        result = Result(_text(content["model"]), questions, ks, rewards, dict(content["settings"]))
    except (KeyError, TypeError, ValueError) as error:
        problem = f"no key {error}" if isinstance(error, KeyError) else brief(error, 200)
        raise IsobitError(f"{path}: not a result of isobit eval --out: {problem}") from None
    counts = {len(question.samples) for question in questions}
    if not questions or len(counts) > 1 or any(not 1 <= k <= min(counts) for k in ks):
        raise IsobitError(
            f"{path}: not a result of isobit eval --out: prompts or samples are missing"
        )
    return result


def _text(name: Any) -> str:
    if not isinstance(name, str):
        raise TypeError(f"a name is {kind(name)}, expected text")
    return name


def _question(values: Mapping[str, Any]) -> Question:
    greedy, *samples = (_graded(graded) for graded in (values["greedy"], *values["samples"]))
    return Question(values["prompt"], values["tag"], greedy, tuple(samples))


def _graded(values: Mapping[str, Any]) -> Graded:
    reward = values["reward"]
    if not isinstance(values["completion"], str) or isinstance(reward, bool):
        raise TypeError("a completion is no text, or its reward no number")
    episode = values.get("episode")
    if episode is not None and not isinstance(episode, dict):
        raise TypeError("an episode is no object")
    return Graded(
        values["completion"],
        None if reward is None else float(reward),
        values["answer"],
        values["tokens"],
        values["truncated"],
        values["error"],
        episode,
    )
