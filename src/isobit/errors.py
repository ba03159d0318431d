"""The exceptions that isobit raises for its users, and how a terminal shows what others wrote.

A message is one line that says what is wrong, where, and what would be right. The command line
prints it on stderr, without a traceback, and exits with `exit_code`. Broken internal invariants are
`assert`s instead.
"""

import re
import unicodedata
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from pathlib import Path

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_ENDLESS = re.compile(r"\S{400,}")
_FILES = {
    ".jsonl",
    ".ndjson",
    ".json",
    ".csv",
    ".tsv",
    ".parquet",
    ".pq",
    ".gz",
    ".yaml",
    ".yml",
    ".py",
    ".safetensors",
}
_LONGEST, _END = 1200, 300
"""Characters of a message, and of its end where it is cut: what would be right stands there."""
_LISTED = 600
LEFT_OUT = "characters left out"


class IsobitError(Exception):
    """A user's mistake: a wrong key, a missing file, a malformed row, a bad checkpoint. In its
    text, what a stranger's file says without end is cut, and control characters are written out: it
    stays one line, of at most `_LONGEST` characters and the note that says how many were left out.
    `brief` and `listed` keep a message whole."""

    exit_code = 2
    shared = False
    """Whether every rank of the run raises it, so that they can still act together."""

    def __str__(self) -> str:
        text = _ENDLESS.sub(lambda match: f"{match[0][:100]}...{match[0][-20:]}", super().__str__())
        line = printable(text).replace("\n", "\\n").replace("\t", "\\t")
        if len(line) <= _LONGEST:
            return line
        return f"{line[: _LONGEST - _END]} [{len(line) - _LONGEST:,} {LEFT_OUT}] {line[-_END:]}"


class RunFailed(IsobitError):
    """A run that started well and had to stop: a reward function failed, or too many steps in a row
    were bad."""

    exit_code = 1


class Corruption(RunFailed):
    """Memory or a computation is not what it must be: the hardware is at fault, or code that writes
    elsewhere."""


class RankLost(RunFailed):
    """Another process of the run is gone or late: what they compute together cannot go on, nor be
    saved."""


class NonFiniteError(IsobitError):
    """NaN or infinity where a number is needed. The learner skips a step in which this happens, and
    counts it."""


def failed_allocation(error: BaseException) -> str | None:
    """Return the memory that was requested in vain, in the words of PyTorch, NumPy or Python; None
    for any other error. PyTorch has a class for a GPU's memory, known here by its name, and a plain
    RuntimeError for the host's."""
    line = str(error).partition("\n")[0]
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return line or "Python found none"
    _, prefix, request = line.partition("DefaultCPUAllocator: ")
    return request if prefix and "allocate memory" in request else None


def printable(text: str) -> str:
    """Text that others wrote (a model, a data row, a template, an exception), as a terminal may
    have it: what it would obey, escape sequences and changes of the direction of writing, is
    written out."""
    return "".join(c if _harmless(c) else c.encode("unicode_escape").decode() for c in text)


def _harmless(c: str) -> bool:
    return c.isprintable() or c in "\n\t\u200c\u200d" or unicodedata.category(c) in ("Zs", "Co")


def brief(text: object, most: int = 120) -> str:
    """Return a name or value that others chose for a message: whole, or its two ends where it is
    longer than `most`."""
    whole = str(text)
    return whole if len(whole) <= most else f"{whole[: most - 23]}...{whole[-20:]}"


def listed(names: Iterable[object]) -> str:
    """List names that others chose for a message: as many as fit, and how many more there are."""
    shown, length, briefs = list[str](), 0, [brief(name) for name in names]
    for name in briefs:
        length += len(name) + 2
        if shown and length > _LISTED:
            return f"{', '.join(shown)} and {len(briefs) - len(shown):,} more"
        shown.append(name)
    return ", ".join(shown)


def did_you_mean(name: str, known: Sequence[str]) -> str:
    """Return a hint for a message about an unknown name: the nearest known one, else all of
    them."""
    close = get_close_matches(name, known, 1)
    return f"did you mean {brief(close[0])!r}?" if close else f"known: {listed(known)}"


def on_hub(name: str) -> bool:
    """Return whether a text looks like a name on the Hub: `owner/name`, and not a file's."""
    return _NAME.fullmatch(name) is not None and Path(name).suffix.lower() not in _FILES


def download_hint(path: str | Path, *, data: bool = False) -> str:
    """Return how to download `path` from the Hub, as the end of a message about a missing file;
    empty where it does not look like a name of the Hub."""
    name = str(path)
    if name.startswith("~"):
        return "; ~ is not read as the home directory here: write the whole path"
    if not on_hub(name) or Path(name).parent.exists():
        return ""
    parent, kind = ("data", " --repo-type dataset") if data else ("models", "")
    folder = f"{parent}/{name.rpartition('/')[2]}"
    return (
        f"; isobit reads what is here already: hf download {name}{kind} --local-dir "
        f"{folder}, then give {folder}"
    )
