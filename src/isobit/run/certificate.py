"""`certificate.jsonl`: a chain of hashes over the records of a run, with a row for each step; the
first row is of step 0.

A row has the hash of the row before it (`previous`) and the SHA-256 of the records of its step: the
`weights` after the step (`training/saving/certificate.py`), the `rollouts` as their lines in
completions.jsonl.gz, the `metrics` without times and without those of an evaluation
(`of_an_evaluation` in metrics.py), and the `config` without the values that a resume may change;
and the `build` of isobit. `hash` is the SHA-256 of all of these. So a row that is changed, deleted,
repeated or moved anywhere breaks the chain there, and a checkpoint, which has the hash of its
step's row, shows rows that are missing at the end. A rewritten run can have a new chain, whose last
hash differs from a copy kept of the old one (tests/commands/test_forgeries.py).
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isobit import __version__
from isobit.data.foreign import BadJson, check_readable, parse_json, reason_of
from isobit.errors import brief
from isobit.run.metrics import of_an_evaluation, of_the_machine
from isobit.run.source import source_digest

CERTIFICATE = "certificate.jsonl"
GENESIS = "0" * 64
"""The `previous` of the first row, which has no row before it."""
_INFINITE = (float("inf"), float("-inf"))
_LONGEST = 4096
_KEYS = ("step", "previous", "weights", "rollouts", "metrics", "config", "build")


@dataclass(frozen=True)
class Facts:
    """The hashes of a step in its row, and the build of isobit; `rollouts` is None for a step
    without recorded rollouts."""

    weights: str
    rollouts: str | None
    metrics: str
    config: str
    build: str


def row_of(step: int, previous: str, facts: Facts) -> dict[str, Any]:
    """Return the row of a step, with its `hash`."""
    values: dict[str, Any] = {"step": step, "previous": previous, **vars(facts)}
    return {**values, "hash": digest(values)}


def digest(value: Any) -> str:
    """Return the SHA-256, in hexadecimal, of a value as JSON text with sorted keys."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def of_rollouts(lines: Iterable[bytes]) -> str:
    """Return the SHA-256 of a step's lines of completions.jsonl.gz, given without line ends."""
    return hashlib.sha256(b"".join(line + b"\n" for line in lines)).hexdigest()


def of_metrics(values: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a step's metrics, the same for measured values and for a row of
    metrics.jsonl. Left out: metrics of the machine, and metrics of an evaluation, which a run that
    is extended may lose."""
    lasting = {
        name: value
        for name, value in values.items()
        if name != "step" and not of_the_machine(name) and not of_an_evaluation(name)
    }
    return digest(
        {
            name: None if value != value or value in _INFINITE else value
            for name, value in lasting.items()
        }
    )


def build() -> str:
    """Return the version of isobit and the digest of its source, as text."""
    return f"isobit {__version__}, source {source_digest()}"


@dataclass(frozen=True)
class Chain:
    """The rows of a certificate, by step, and their problems, in words; `head` is the last row's
    hash."""

    rows: Mapping[int, Mapping[str, Any]]
    problems: tuple[str, ...] = ()

    @property
    def first(self) -> int:
        return min(self.rows)

    @property
    def last(self) -> int:
        return max(self.rows)

    @property
    def head(self) -> str:
        return str(self.rows[self.last]["hash"])


def read_chain(path: Path) -> Chain | None:
    """Read the chain of a certificate; None without the file. The chain's problems name the rows
    that are cut, whose hash is not that of their values, or that do not follow the row before
    them."""
    rows: dict[int, Mapping[str, Any]] = {}
    problems: list[str] = []
    try:
        check_readable(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        return Chain({}, (f"{path.name} cannot be read: {reason_of(error)}",))
    previous, expected = GENESIS, None
    for number, row in enumerate(_parsed(path), 1):
        line = f"{path.name}, line {number}"
        if (problem := _wrong(row)) is not None:
            problems.append(f"{line}: {problem}")
            continue
        step = row["step"]
        if row["previous"] != previous:
            problems.append(
                f"{line}: step {step} does not follow the row before it: a row was changed or "
                "is missing"
            )
        elif expected is not None and step != expected:
            problems.append(f"{line}: step {step} stands where step {expected} belongs")
        if step in rows:
            problems.append(f"{line}: step {step} is there twice")
        rows[step], previous, expected = row, row["hash"], step + 1
    return Chain(rows, tuple(problems))


def _parsed(path: Path) -> Iterator[Any]:
    with path.open("rb") as file:
        while line := file.readline(_LONGEST):
            try:
                yield parse_json(line.decode("ascii"))
            except (BadJson, UnicodeDecodeError) as error:
                yield f"not a row: {reason_of(error)}"


def _wrong(row: Any) -> str | None:
    """Return why a value is not a row of a certificate; None for a sound row."""
    if isinstance(row, str):
        return row
    if not isinstance(row, dict) or row.keys() != {*_KEYS, "hash"}:
        return f"not a row of a certificate: {brief(row)}"
    if type(row["step"]) is not int or row["hash"] != digest({key: row[key] for key in _KEYS}):
        return "its hash is not that of what it says: the row was changed"
    return None
