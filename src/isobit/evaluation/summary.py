"""From graded completions to estimates with 95 % intervals, over all prompts and for each value of
a tag; and tables.

Names follow the field: mean@N is the mean reward of N samples (verl), pass@k the chance that one of
k samples is correct (Chen et al. 2021), maj@k that the answer of most of k is (Wang et al. 2022;
cons@k in NeMo RL). Accuracy has Wilson's interval, everything else the bootstrap over prompts.
Unscored completions count as wrong and are left out of mean rewards.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from isobit.evaluation.majority import majority_at_k
from isobit.evaluation.result import Graded, Question, Result
from isobit.monitor.report.intervals import Estimate, bootstrap_mean, pass_at_k, proportion
from isobit.monitor.report.tables import text_table

ALL = "(all)"
"""The row of all prompts."""
LENGTHS = ("tokens", "truncated")
"""Measures of which more is not better."""
Values = list[float | None]
"""One value for each prompt; None where it has none."""


def values_per_prompt(questions: Sequence[Question], ks: Sequence[int]) -> dict[str, Values]:
    """Return every measure of every prompt: accuracy, reward, and, of samples, mean@N, pass@k and
    maj@k; then lengths."""
    n = len(questions[0].samples)
    columns: dict[str, Values] = {
        "accuracy": [float(q.greedy.correct) for q in questions],
        "reward": [q.greedy.reward for q in questions],
    }
    if n:
        columns[f"mean@{n}"] = [_mean([s.reward for s in q.samples]) for q in questions]
        right = [sum(s.correct for s in q.samples) for q in questions]
        columns |= {f"pass@{k}": [pass_at_k(n, count, k) for count in right] for k in ks}
        votes = [
            majority_at_k([s.answer for s in q.samples], [s.correct for s in q.samples], ks)
            for q in questions
        ]
        columns |= {f"maj@{k}": [vote[k] for vote in votes] for k in ks if k > 1}  # maj@1 is pass@1
    if questions[0].greedy.tokens is not None:
        columns["tokens"] = [_mean([g.tokens for g in _completions(q)]) for q in questions]
        columns["truncated"] = [_mean([g.truncated for g in _completions(q)]) for q in questions]
    return columns


def summarize(result: Result) -> dict[str, dict[str, Estimate]]:
    """Measure to estimate, for each value of the tag (in the order of their text) and for ALL,
    which comes last.

    A measure that no prompt has a value of, such as the mean reward of unscored completions, is
    left out.
    """
    values = values_per_prompt(result.questions, result.ks)
    tags = sorted({question.tag for question in result.questions if question.tag is not None})
    groups = {tag: [i for i, q in enumerate(result.questions) if q.tag == tag] for tag in tags}
    groups[ALL] = list(range(len(result.questions)))
    return {
        tag: _estimates({name: [column[i] for i in rows] for name, column in values.items()})
        for tag, rows in groups.items()
    }


def summary_json(summary: Mapping[str, Mapping[str, Estimate]]) -> dict[str, Any]:
    """Return plain values of a summary."""
    return {
        tag: {name: asdict(estimate) for name, estimate in row.items()}
        for tag, row in summary.items()
    }


def summary_table(result: Result) -> str:
    """Return the summary as plain text: a line for each measure, and below it, where there is a
    tag, a line for each of its values, with as many measures as fit in a line."""
    summary = summarize(result)
    rows = [["", "value", "95 % interval", "prompts"]]
    for name, estimate in summary[ALL].items():
        label = f"greedy {name}" if name in ("accuracy", "reward") and not result.given else name
        value, low, high = (number(x, name) for x in (estimate.value, estimate.low, estimate.high))
        rows.append([label, value, f"{low} to {high}", str(estimate.prompts)])
    tables = [text_table(rows, rule=True)]
    if len(summary) > 1:
        tables.append(_rows(str(result.settings.get("tag", "tag")), result.ks, summary))
    return "\n\n".join([*tables, *unscored(result), *cut_off(result)])


def unscored(result: Result) -> list[str]:
    """Return a line about completions without a reward, if any."""
    graded = [g for q in result.questions for g in _completions(q) if g.reward is None]
    why = f"; the first: {graded[0].error}" if graded and graded[0].error is not None else ""
    return (
        [f"unscored completions, wrong and in no mean reward: {len(graded)}{why}"] if graded else []
    )


def cut_off(result: Result) -> list[str]:
    """Return a line that says that no completion ended by itself, if so."""
    truncated = [g.truncated for q in result.questions for g in _completions(q)]
    if not all(truncated):
        return []
    most = result.settings.get("max_new_tokens", "its limit")
    return [f"all {len(truncated)} completions ran to max_new_tokens {most} and were cut off there"]


def results_table(head: str, results: Mapping[str, Result]) -> str:
    """Return a line for each of several results by the same measures, with as many as fit in a
    line."""
    ks = next(iter(results.values())).ks
    return _rows(head, ks, {name: summarize(result)[ALL] for name, result in results.items()})


def beside_each_other(ks: Sequence[int]) -> list[str]:
    """Return the measures that a line shows."""
    ends = [f"pass@{k}" for k in sorted({*ks[:1], *ks[-1:]})]
    return ["accuracy", *(ends if ends else ["reward"]), *(f"maj@{k}" for k in ks[-1:] if k > 1)]


def _rows(head: str, ks: Sequence[int], rows: Mapping[str, Mapping[str, Estimate]]) -> str:
    names = beside_each_other(ks)
    cells = [
        [label, str(row["accuracy"].prompts), *(_cell(row, name) for name in names)]
        for label, row in rows.items()
    ]
    return text_table([[head, "prompts", *names], *cells], rule=True)


def number(value: float, name: str) -> str:
    """Return a value of a measure as text, with as many digits as are significant."""
    return f"{value:.1f}" if name == "tokens" else f"{value:.4f}"


def _estimates(values: Mapping[str, Values]) -> dict[str, Estimate]:
    estimates = {}
    for name, column in values.items():
        present = [value for value in column if value is not None]
        if name == "accuracy":
            estimates[name] = proportion(round(sum(present)), len(present))
        elif present:
            estimates[name] = bootstrap_mean(present)
    return estimates


def _cell(row: Mapping[str, Estimate], name: str) -> str:
    if name not in row:
        return ""
    digits = 1 if name == "tokens" else 3
    estimate = row[name]
    return f"{estimate.value:.{digits}f} [{estimate.low:.{digits}f}, {estimate.high:.{digits}f}]"


def _completions(question: Question) -> list[Graded]:
    return [question.greedy, *question.samples]


def _mean(values: Sequence[float | None]) -> float | None:
    present = [value for value in values if value is not None]
    return sum(present) / len(present) if present else None
