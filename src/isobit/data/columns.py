"""Which columns of the data a run reads.

Each part of a run that reads columns declares their names: reward functions by their arguments,
environments, tags, losses. `ANY` stands for a function that takes every column as a keyword; it may
read whatever it likes, except columns that others give to the model (`_HINTS`): a run that does not
show these is probably not what was meant, and says so.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol

from isobit.errors import brief, listed

ANY = "**"
"""Stands among names of columns for all others."""
_TOOLS = "environment.tools names the tools that the model is shown"
_SYSTEM = "a message of role system in the prompt says it, or task.system in all rows"
_HINTS = {
    False: {"tools": _TOOLS, "functions": _TOOLS, "system": _SYSTEM},
    True: {
        "system": _SYSTEM,
        "functions": "task.columns: {tools: functions} shows them",
        "weight": "messages have a key weight, 0 or 1",
        "chosen": "loss: dpo reads it",
        "rejected": "loss: dpo reads it",
        "label": "loss: kto reads it",
    },
}
"""Of sampled and of supervised runs: what would read a column of this name."""
_REST = {
    False: "a reward function reads the columns that its arguments name",
    True: "task.columns gives a column another name",
}


class Row(Protocol):
    """The fields of an example that this module reads."""

    @property
    def sources(self) -> Mapping[str, str]: ...


def sources_of(
    row: Mapping[str, Any],
    columns: Collection[str],
    renamed: Mapping[str, str],
    of_prompt: Collection[str],
) -> dict[str, str]:
    """Return for each of an example's `columns` the column of its `row` that holds it, except those
    `of_prompt`, of which prompt and answer are made."""
    sources = {name: renamed.get(name, name) for name in columns}
    if "reward_model" in row and "answer" not in renamed:
        sources["answer"] = "reward_model"
    return {n: old for n, old in sources.items() if old in row and old not in of_prompt}


def unread(rows: Iterable[Row], read: Collection[str], *, supervised: bool) -> list[str]:
    """Return the columns of these rows that nothing reads, where columns `read` are read."""
    shown, names = _HINTS[supervised], dict[str, None]()
    for sources in {id(row.sources): row.sources for row in rows}.values():
        taken = {sources[name] for name in read if name in sources}
        names |= dict.fromkeys(
            old
            for old in sources.values()
            if old not in taken and (ANY not in read or old in shown)
        )
    return list(names)


def unread_line(rows: Sequence[Row], read: Collection[str], *, supervised: bool) -> str | None:
    """Return a line that names the columns which nothing reads, and what would; None without any."""
    names, hints = unread(rows, read, supervised=supervised), _HINTS[supervised]
    if not names:
        return None
    named = [f"{brief(name)!r}" + (f" ({hints[name]})" if name in hints else "") for name in names]
    rest = "" if set(names) <= hints.keys() else f"; {_REST[supervised]}"
    return f"columns of the data that nothing reads: {listed(named)}{rest}"
