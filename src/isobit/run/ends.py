"""The lengths to which the files that grow are cut when a run goes on from a checkpoint, and the
losses and damage in these files.

Weights have their own checksums: a loss in a log costs only the log's rows, and gives a line of
text.
"""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from typing import Any

from isobit.data.foreign import exists
from isobit.errors import IsobitError
from isobit.run import certificate, completions
from isobit.run.certificate import CERTIFICATE
from isobit.run.checkpoints import all_checkpoints, step_of
from isobit.run.completions import COMPLETIONS, HELD_OUT
from isobit.run.directory import CHECKPOINTS, METRICS, NOTHING_WRITTEN, in_use, read_jsonl
from isobit.run.rows import BadRow, end_of_lines, kept_until, metric_row, next_line

_UNPACKED = 1 << 27


def ends(directory: Path, state: Mapping[str, Any]) -> tuple[dict[str, int], list[str]]:
    """Return the byte at which each file is cut when a run goes on from a checkpoint, and lines
    about what the files have lost since. `state`: the checkpoint's, with the values of
    `RunDirectory.written`, the `step`, and `unrecorded` if its metrics are not recorded yet."""
    offsets, lost = NOTHING_WRITTEN | state["offsets"], list[str]()
    last = state["step"] - (state.get("unrecorded") is not None)
    offsets[METRICS], rows = kept_until(directory / METRICS, last)
    if rows < state["rows"]:
        lost.append(f"{METRICS} has {rows:,} rows up to step {last}, and had {state['rows']:,}")
    for name, offset in state["offsets"].items():
        path = directory / name
        size = path.stat().st_size if path.is_file() else 0
        if size < offset:
            packed = name in (COMPLETIONS, HELD_OUT)
            offsets[name] = completions.end(path) if packed else end_of_lines(path)
            lost.append(f"{name} has {size:,} bytes, and had {offset:,} at step {state['step']}")
    metrics = directory / METRICS
    recorded = read_jsonl(metrics, lambda line: None) if exists(metrics) else ()
    lost += [] if (line := _other_metrics(metrics, recorded)) is None else [line]
    lost += damaged_steps(directory / COMPLETIONS, offsets[COMPLETIONS])
    return offsets, [
        f"{directory}: {line}; the run goes on, and its weights are sound" for line in lost
    ]


def damaged_steps(path: Path, until: int) -> list[str]:
    """Return a line about the steps before the byte `until` whose completions cannot be read; no
    line if all can. The newest `_UNPACKED` bytes are unpacked, which finds a changed bit; of
    earlier steps only the headers are read, since unpacking all steps of a long run would take
    hours; `isobit verify` does that."""
    members = list(takewhile(lambda member: member.start < until, completions.members(path)))
    damaged, last = list[str](), -1
    for number, member in enumerate(members):
        newest = until - member.start <= _UNPACKED
        if completions.has_its_header(path, member) and not (
            newest and _step_of(path, member) is None
        ):
            continue
        if damaged and last == number - 1:
            damaged.append("the next")
        else:
            sound = (_step_of(path, earlier) for earlier in reversed(members[:number]))
            damaged.append(
                f"step {next((earlier for earlier in sound if earlier is not None), 0) + 1}"
            )
        last = number
    if not damaged:
        return []
    more = f" and {len(damaged) - 3:,} more" if len(damaged) > 3 else ""
    return [f"{path.name}: completions are damaged, of {', '.join(damaged[:3])}{more}"]


def _step_of(path: Path, member: completions.Member) -> int | None:
    """Return the step of a member; None if the member is damaged."""
    try:
        return int(completions.parse(completions.lines(path, member)[0])["step"])
    except (IsobitError, IndexError):
        return None


def last_step(directory: Path) -> int:
    """Return the last step that any file of a run has recorded; 0 if none has."""
    steps = [0]
    if exists(directory / METRICS):
        steps += [int(row["step"]) for row in read_jsonl(directory / METRICS, lambda line: None)]
    chain = certificate.read_chain(directory / CERTIFICATE)
    steps += [] if chain is None else chain.rows
    for member in reversed(list(completions.members(directory / COMPLETIONS))):
        step = _step_of(directory / COMPLETIONS, member)
        steps.append(1 if step is None else step)  # a damaged member is a step too
        if step is not None:
            break
    return max(steps)


def cut_short(directory: Path) -> str | None:
    """Return a line if the metrics of a run on which no process works end before its newest
    checkpoint, or are not those of its certificate; else None."""
    path, saved = directory / METRICS, all_checkpoints(directory / CHECKPOINTS)
    if not saved or not exists(path) or in_use(directory):
        return None
    rows = list(read_jsonl(path, lambda line: None))
    last = max((int(row["step"]) for row in rows), default=0)
    if last >= step_of(saved[-1]):
        return _other_metrics(path, rows)
    return (
        f"{path} ends at step {last}, and {saved[-1].name} is a checkpoint: the rows between are "
        "missing"
    )


def _other_metrics(path: Path, rows: Iterable[Mapping[str, Any]]) -> str | None:
    hashes = {int(row["step"]): certificate.of_metrics(row) for row in rows}
    return _another(path, hashes, "metrics")


def other_completions(directory: Path) -> str | None:
    """Return a line if the completions of a run are not those of its certificate; else None."""
    path, hashes = directory / COMPLETIONS, dict[int, str]()
    for member in completions.members(path):
        with suppress(IsobitError, IndexError):  # reading a damaged step raises elsewhere
            lines = completions.lines(path, member)
            hashes[int(completions.parse(lines[0])["step"])] = certificate.of_rollouts(lines)
    return _another(path, hashes, "rollouts")


def _another(path: Path, hashes: Mapping[int, str], column: str) -> str | None:
    """Return a line about the first step whose hash is not that in the certificate; None if all
    agree. `column`: the name of the hash in a row of the certificate."""
    chain = certificate.read_chain(path.parent / CERTIFICATE)
    held = {} if chain is None else {step: row[column] for step, row in chain.rows.items() if step}
    differing = next((step for step in hashes if step in held and held[step] != hashes[step]), None)
    if differing is None:
        return None
    return (
        f"{path}: what it has of step {differing} is not what was recorded ({CERTIFICATE}); isobit "
        f"verify {path.parent} says what else is not"
    )


def row_at(path: Path, offset: int) -> tuple[dict[str, Any], int] | None:
    """Return the row of metrics.jsonl that begins at the byte `offset`, and the byte at which it
    ends; None if no whole row begins there."""
    if not path.is_file():
        return None
    with path.open("rb") as file:
        file.seek(offset)
        line = next_line(file)
        try:
            return None if line is None else (metric_row(line), file.tell())
        except BadRow:
            return None
