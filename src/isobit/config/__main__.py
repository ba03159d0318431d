"""`python -m isobit.config` prints docs/config.md: every key of a configuration, from its
declaration."""

import re
from collections.abc import Sequence
from dataclasses import is_dataclass

from isobit.config.commands import READ_BY_EVAL, GenerateConfig, ServerConfig
from isobit.config.schema import CompareConfig, Config, SftConfig
from isobit.options.declare import REQUIRED, Option, options_of, sections, type_text
from isobit.options.precisions import FlowChanges, PrecisionChanges
from isobit.tasks.builtin import TASKS

_HEAD = """# Configuration

A run is one YAML file. `key.sub=value` on the command line changes a key, and `isobit train CONFIG --dry-run` shows
the result. An unknown key is an error. A file that a config names is looked for next to the config, and then in the
current directory; what a run writes, such as `run.dir`, and what stands on the command line is relative to the current
directory. The [quick reference](quick-reference.md) has the twenty keys that people set; this page, which
`python -m isobit.config` prints, has all of them.
"""
_HEADING = ("| key | type | default | |", "|---|---|---|---|")
_EVAL = "An evaluation depends on these keys and sections of `isobit train`, of a run by default its own:"


def markdown() -> str:
    """Return the text of docs/config.md."""
    printed = {
        section for option in options_of(Config).values() for section in sections(option.kind)
    }
    train = "\n".join(_section(Config, "", "isobit train", set()))
    sft = "\n".join(_section(SftConfig, "", "isobit sft", printed))
    compare = "\n".join(_section(CompareConfig, "", "isobit compare", set()))
    commands = "\n".join(
        "\n".join(_differing(schema, title, train.splitlines()))
        for title, schema in (("isobit generate", GenerateConfig), ("isobit serve", ServerConfig))
    )
    evaluation = f"## isobit eval\n\n{_EVAL} {', '.join(f'`{key}`' for key in READ_BY_EVAL)}.\n"
    tasks = "\n".join(
        "\n".join(_section(schema, "", f"`task.options` of {name}", set()))
        for name, (_, schema) in TASKS.items()
    )
    precision = "\n".join(_section(PrecisionChanges, "", "Options of `precision`", {FlowChanges}))
    page = _HEAD, train, sft, compare, evaluation, commands, tasks, precision
    return "\n".join(page)


def _differing(schema: type, title: str, known: Sequence[str]) -> list[str]:
    """Return the table of a command: its keys that are not among the `known` rows, and the names of
    those that are."""
    rows = [row for row in _section(schema, "", "", set()) if row.startswith("| `")]
    same = ", ".join(row.split(" | ")[0].removeprefix("| ") for row in rows if row in known)
    text = f"{(schema.__doc__ or '').strip()} As of `isobit train`: {same}. And these:"
    return [f"## {title}", "", text, "", *_HEADING, *(row for row in rows if row not in known), ""]


def _section(schema: type, prefix: str, title: str, printed: set[type]) -> list[str]:
    """Return the lines of the tables of a dataclass and its sections, except the sections that were
    `printed` before."""
    text = " ".join((schema.__doc__ or "").partition("\n\n")[0].split()).replace("|", "\\|")
    lines = [f"## {title}", "", text, "", *_HEADING]
    nested: list[str] = []
    for name, option in options_of(schema).items():
        key = f"{prefix}{name}"
        limits = ", ".join(map(str, option.limits))
        kind = f"{type_text(option.kind)} {limits}".strip().replace("|", "\\|")
        section = next(sections(option.kind), None)
        about = option.text or _first_sentence(section)
        lines.append(
            f"| `{key}` | {kind} | {_default(option)} | {about.replace('|', chr(92) + '|')} |"
        )
        if section is not None and section not in printed:
            nested += _section(section, f"{key}.", f"`{key}`", set())
    return [*lines, "", *nested]


def _first_sentence(section: type | None) -> str:
    """Return the first sentence of a section's docstring, for the row that leads to the section."""
    text = " ".join(((section.__doc__ if section else "") or "").split())
    return re.split(r"[.:](?: |$)", text)[0]


def _default(option: Option) -> str:
    value = option.default
    if value is REQUIRED:
        return "required"
    if value is None or is_dataclass(value) or value in ((), {}):
        return ""
    value = list(value) if isinstance(value, tuple) else value
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return f"`{text}`".replace("\n", "\\n")  # as YAML has it in double quotes


if __name__ == "__main__":
    print(markdown(), end="")
