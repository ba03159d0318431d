"""Rows of a server's tables as values, and the names of checkpoints.

A checkpoint is `tinker://RUN/weights/NAME`, `tinker://RUN/sampler_weights/NAME` or
`tinker://RUN/external_weights/NAME`. Names are looked up in a table and never become part of a
file's path.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeVar

from isobit.errors import brief
from isobit.serve.requests import BadRequest

Kind = Literal["training", "sampler", "external", "snapshot", "present"]
"""The kind of a checkpoint: saved by a client for training, for sampling or to take away; or kept
by the server: the weights of a sampling client that was given no name (snapshot), and the last kept
state of a run (present)."""
SEGMENTS: Mapping[str, Kind] = {
    "weights": "training",
    "sampler_weights": "sampler",
    "external_weights": "external",
}
_NAMES: Mapping[Kind, str] = {kind: segment for segment, kind in SEGMENTS.items()}
_RUN, _NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9:._-]{0,127}"), re.compile(r"[\w-][\w.-]{0,99}")
_HASH, _LONGEST = re.compile(r"[0-9a-f]{64}"), 1 << 16
SCHEME = "tinker://"
_Row = TypeVar("_Row")


@dataclass(frozen=True)
class StoredSession:
    """A client's session, with the metadata that the client gives."""

    id: str
    tenant: str
    created: float
    metadata: Mapping[str, str] = field(default_factory=dict)
    display_name: str | None = None


@dataclass(frozen=True)
class StoredSampler:
    """A sampling client: its `number` in its session, the `base` and `path` that it asked for, and
    as `snapshot` the id of the checkpoint that the server keeps for it where it was given no path.
    `model`: as of a run."""

    id: str
    tenant: str
    session: str
    number: int
    base: str
    path: str | None = None
    snapshot: str | None = None
    model: str = ""


@dataclass(frozen=True)
class StoredRun:
    """A training run. `rank`: of its adapter, None: the whole model is trained; `targets`: which
    parts are trained, by `train_attn`, `train_mlp` and `train_unembed`; `applied`: the number of
    the last request that is in the kept state of the run, -1: none; `live`: requests may come;
    `model`: the identity of the model (`identity.py`), which the state fills in, empty: not
    known."""

    id: str
    tenant: str
    session: str
    number: int
    base: str
    rank: int | None
    seed: int
    targets: Mapping[str, bool]
    created: float
    requested: float
    metadata: Mapping[str, str] = field(default_factory=dict)
    applied: int = -1
    live: bool = True
    model: str = ""


@dataclass(frozen=True)
class Checkpoint:
    """Weights that are kept, in a folder named by their `id`. `bytes`: of all files of the folder;
    `digest`: SHA-256 of the list of their SHA-256; `expires`: seconds since 1970, None: never;
    `weights`: of a model that is trained whole, the name of these weights (`Snapshots.present`)."""

    id: str
    run: str
    kind: Kind
    name: str
    bytes: int
    digest: str
    optimizer: bool
    created: float
    expires: float | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    weights: str = ""

    @property
    def path(self) -> str:
        """The checkpoint's `tinker://` path, by which clients name it."""
        return f"{SCHEME}{self.run}/{_NAMES.get(self.kind, self.kind)}/{self.name}"


@dataclass(frozen=True)
class Answer:
    """An HTTP response that can be given again unchanged."""

    status: int
    media_type: str
    body: bytes


class Taken(NamedTuple):
    """A request to a run without its body: its kind, and whether it has an answer."""

    kind: str
    answered: bool


@dataclass(frozen=True)
class StoredRequest:
    """A request to a run, which does its requests in the order of their `number`; `body`: as it
    came."""

    run: str
    number: int
    kind: str
    body: bytes
    answer: Answer | None = None


@dataclass(frozen=True)
class CheckpointName:
    """A checkpoint's name in a client's request: run, kind and name."""

    run: str
    kind: Kind
    name: str

    @property
    def checkpoint_id(self) -> str:
        """The checkpoint's name within its run, such as `weights/NAME`."""
        return f"{_NAMES[self.kind]}/{self.name}"

    @staticmethod
    def parse(path: str) -> "CheckpointName":
        """Parse a path such as `tinker://RUN/weights/NAME`. Raises BadRequest for anything else."""
        run, slash, rest = path.removeprefix(SCHEME).partition("/")
        if not path.startswith(SCHEME) or not slash or not _RUN.fullmatch(run):
            raise BadRequest(
                f"{brief(path, 200)}: expected tinker://RUN/weights/NAME, "
                "tinker://RUN/sampler_weights/NAME or tinker://RUN/external_weights/NAME",
                "path",
            )
        return CheckpointName.within(run, rest)

    @staticmethod
    def within(run: str, checkpoint_id: str) -> "CheckpointName":
        """Parse the name of a checkpoint of a run, such as `weights/NAME`. Raises BadRequest for
        anything else."""
        if not _RUN.fullmatch(run):
            raise BadRequest(f"no training run {brief(run)}", status=404)
        segment, _, name = checkpoint_id.partition("/")
        if segment not in SEGMENTS:
            raise BadRequest(
                f"{brief(checkpoint_id, 200)}: expected weights/NAME, sampler_weights/NAME or "
                "external_weights/NAME",
                "checkpoint_id",
            )
        return CheckpointName(run, SEGMENTS[segment], checked_name(name))


def checked_name(name: str) -> str:
    """Return a name that a client gives a checkpoint. Raises BadRequest for one that is not
    valid."""
    if not _NAME.fullmatch(name) or not name.isascii() or ".." in name:
        raise BadRequest(
            f"checkpoint {brief(name, 120)!r}: expected a name of at most 100 letters, digits, "
            "'.', '-' and '_', without '..'",
            "path",
        )
    return name


def checked_row(row: _Row) -> _Row:
    """Return a row of a table. Raises ValueError or BadRequest for one that no server has
    written."""
    values: Mapping[str, Any] = vars(row)
    for key, kind in (("metadata", str), ("targets", bool)):
        table = values.get(key, {})
        if not isinstance(table, dict) or not all(type(v) is kind for v in table.values()):
            raise ValueError(f"{key} is no table of {kind.__name__}")
    for key in ("id", "run", "session", "tenant", "base"):
        if not 0 < len(values.get(key, "-")) <= _LONGEST:
            raise ValueError(f"{key} is empty, or too long")
    if isinstance(row, StoredRun) and not _RUN.fullmatch(row.id):
        raise ValueError("its id is none")
    if isinstance(row, Checkpoint):
        checked_name(row.name)
        if not _HASH.fullmatch(row.digest):
            raise ValueError("its digest is no SHA-256")
    return row
