"""Which prompts a policy solves: every prompt's mean reward over its visits, and four kinds of
prompts.

A completion is solved if its reward is at least `RolloutIndex.solved_from`; `always`: every
completion of every visit was solved; `never`: none was; `learned`: of several visits, the last was
solved more often than the first by at least half; `sometimes`: all others. A prompt is its text, so
that a task that asks again is recognized.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from isobit.monitor.report.document import escaped
from isobit.monitor.report.rollouts import RolloutIndex, Visit

KINDS = {
    "always": "every completion solved",
    "learned": "solved more often at the last visit than at the first, by at least half of the "
    "completions",
    "sometimes": "some completions solved",
    "never": "no completion solved",
}
_MOST_VISITS, _LONGEST, _STATIC_ROWS = 12, 400, 12


def kind(visits: Sequence[Visit]) -> str:
    """Return the kind of a prompt, one of KINDS."""
    solved, scored = sum(v.solved for v in visits), sum(v.scored for v in visits)
    if solved == scored:
        return "always"
    if solved == 0:
        return "never"
    first, last = visits[0], visits[-1]
    gained = last.solved / last.scored - first.solved / first.scored
    return "learned" if len(visits) > 1 and gained >= 0.5 else "sometimes"


def prompt_table(rollouts: RolloutIndex, budget: int) -> dict[str, Any]:
    """Return the page's data: counts of each kind over all prompts, and `rows`, those with most
    visits first, of at most about `budget` bytes as JSON. A row: prompt, kind, mean reward, and
    [step, mean reward] of its visits, thinned."""
    kinds = {prompt: kind(visits) for prompt, visits in rollouts.visits.items()}
    rows: list[dict[str, Any]] = []
    spent = 0
    for prompt, visits in sorted(
        rollouts.visits.items(), key=lambda item: (-len(item[1]), item[1][0].step)
    ):
        shown = _thinned(visits)
        text = prompt if len(prompt) <= _LONGEST else prompt[:_LONGEST] + " …"
        spent += len(text.encode("utf-8", "replace")) + 14 * len(shown) + 60
        if spent > budget:
            break
        mean = sum(v.total for v in visits) / sum(v.scored for v in visits)
        trend = [[v.step, float(f"{v.mean:.4g}")] for v in shown]
        rows.append(
            {
                "prompt": text,
                "kind": kinds[prompt],
                "visits": len(visits),
                "mean": float(f"{mean:.4g}"),
                "trend": trend,
            }
        )
    counts = {name: sum(kind_ == name for kind_ in kinds.values()) for name in KINDS}
    return {
        "rows": rows,
        "counts": counts,
        "total": len(kinds),
        "solved_from": rollouts.solved_from,
    }


def prompt_section(table: Mapping[str, Any]) -> str:
    """Return the kinds as one bar with its figures, and a short table, which the script replaces by
    a whole one."""
    total = table["total"]
    repeated = any(row["visits"] > 1 for row in table["rows"])
    shares = {name: table["counts"][name] / total for name in KINDS}
    bar = "".join(
        f"<i class='{name}' style='flex-grow:{share:.4f}'></i>"
        for name, share in shares.items()
        if table["counts"][name]
    )
    keys = "".join(
        (
            f"<li class='{name}'><b>{table['counts'][name]:,}</b> {name} <span>{shares[name]:.0%}; "
            f"{meaning}</span></li>"
        )
        for name, meaning in KINDS.items()
    )
    lines = "".join(
        _line(row) for row in sorted(table["rows"], key=lambda row: row["mean"])[:_STATIC_ROWS]
    )
    once = "" if repeated else " Every prompt was visited once, so none could be learned."
    return (
        f"<p>{total:,} prompts. Solved: reward of at least {table['solved_from']:.4g}.{once}</p>"
        f"<div class='kinds' aria-hidden='true'>{bar}</div><ul class='kind-list'>{keys}</ul>"
        "<div class='prompt-browser' data-static><div class='wide'><table><caption>Hardest "
        "prompts</caption>"
        "<thead><tr><th>prompt</th><th>kind</th><th class='number'>visits</th><th "
        "class='number'>mean reward</th></tr>"
        f"</thead><tbody>{lines}</tbody></table></div></div>"
    )


def _line(row: Mapping[str, Any]) -> str:
    return (
        f"<tr><td class='text'>{escaped(row['prompt'])}</td><td>{row['kind']}</td>"
        f"<td class='number'>{row['visits']}</td><td class='number'>{row['mean']:.3g}</td></tr>"
    )


def _thinned(visits: Sequence[Visit]) -> list[Visit]:
    if len(visits) <= _MOST_VISITS:
        return list(visits)
    return [visits[round(i * (len(visits) - 1) / (_MOST_VISITS - 1))] for i in range(_MOST_VISITS)]
