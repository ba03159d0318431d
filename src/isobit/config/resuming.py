"""The keys of its config that a run which goes on may change: declared once, for the check, its message,
`--help`, docs."""

from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any

from isobit.config import another_run
from isobit.errors import IsobitError
from isobit.options.consistency import level

_KEYS = (
    "steps",
    "ranks",
    "divided",
    "on_mismatch",
    "rewards.on_error",
    "rewards.environment",
    "environment.workers",
    "environment.variables",
)
_SECTIONS = ("run", "tracking", "fleet", "serve")
_FIXED = ("run.dir",)

_NAMES = (*_KEYS, *(f"{section}.*" for section in _SECTIONS))
RESUMABLE = f"{', '.join(_NAMES[:-1])} and {_NAMES[-1]} (except {_FIXED[0]})"
"""In words, which docs, `--help` and docstrings repeat (tests/test_resume.py)."""


def check_resumed(overrides: Sequence[str], run: Path | None = None) -> None:
    """Raise IsobitError for an override that would make another run of it, with the command that
    begins one where the `run` has a checkpoint."""
    for override in overrides:
        key = override.partition("=")[0]
        section, dot, _ = key.partition(".")
        if key in _FIXED or not (key in _KEYS or (dot and section in _SECTIONS)):
            new = None if run is None or key in _FIXED else another_run.command(run, overrides)
            way = "" if new is None else f"; or begin a new run from its newest checkpoint: {new}"
            raise IsobitError(
                f"override {override!r}: a resumed run repeats its own config; only these may "
                f"change: {RESUMABLE}{way}"
            )


def repeated(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the plain values of a config that a run which goes on repeats; the order of sums,
    which `bitwise` may leave open, is not among them."""
    settings = _without(values, {*_KEYS, *_SECTIONS}, "")
    return {**settings, "consistency": level(str(settings.get("consistency")))}


def _without(values: Mapping[str, Any], free: Set[str], prefix: str) -> dict[str, Any]:
    return {
        key: _without(value, free, f"{prefix}{key}.") if isinstance(value, Mapping) else value
        for key, value in values.items()
        if f"{prefix}{key}" not in free
    }
