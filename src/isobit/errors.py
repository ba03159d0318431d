"""The exceptions that isobit raises for its users, and how a terminal shows what others wrote.

A message is one line that says what is wrong, where, and what would be right. The command line prints it on
stderr, without a traceback, and exits with `exit_code`. Broken internal invariants are `assert`s instead.
"""

import re
import unicodedata
from collections.abc import Sequence
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


class IsobitError(Exception):
    """A user's mistake: a wrong key, a missing file, a malformed row, a bad checkpoint. In its text, what
    a stranger's file says without end is cut, and control characters are written out: it stays one line."""

    exit_code = 2

    def __str__(self) -> str:
        text = _ENDLESS.sub(lambda found: f"{found[0][:100]}...{found[0][-20:]}", super().__str__())
        return printable(text).replace("\n", "\\n").replace("\t", "\\t")


class RunFailed(IsobitError):
    """A run that started well and had to stop: a reward function failed, or too many steps in a row were bad."""

    exit_code = 1


class Corruption(RunFailed):
    """Memory or a computation is not what it must be: the hardware is at fault, or code that writes elsewhere."""


class NonFiniteError(IsobitError):
    """NaN or infinity where a number is needed. The learner skips a step in which this happens, and counts it."""


def printable(text: str) -> str:
    """Text that others wrote (a model, a data row, a template, an exception), as a terminal may have it: what it would
    obey, escape sequences and changes of the direction of writing, is written out."""
    return "".join(c if _harmless(c) else c.encode("unicode_escape").decode() for c in text)


def _harmless(c: str) -> bool:
    return c.isprintable() or c in "\n\t\u200c\u200d" or unicodedata.category(c) in ("Zs", "Co")


def did_you_mean(name: str, known: Sequence[str]) -> str:
    """A hint for a message about an unknown name: the nearest known one, else all of them."""
    close = get_close_matches(name, known, 1)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known)}"


def download_hint(path: str | Path, *, data: bool = False) -> str:
    """How to get what is called `path` there, as the end of a message; empty where it does not look like such a name.

    `owner/name` is one, unless it ends like a file or the folder `owner` is here.
    """
    name = str(path)
    if not _NAME.fullmatch(name) or Path(name).suffix.lower() in _FILES or Path(name).parent.exists():
        return ""
    place, kind = ("data", " --repo-type dataset") if data else ("models", "")
    folder = f"{place}/{name.rpartition('/')[2]}"
    return f"; isobit reads what is here already: hf download {name}{kind} --local-dir {folder}, then give {folder}"
