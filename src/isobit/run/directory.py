"""A run directory: its files and its lock.

`format.txt` (the number of this layout of files), `config.yaml`, `machine.json` (the hardware and
versions used), `resolved.json` (what the config's `auto` came to), `rollouts_from.txt` (the run
whose rollouts it learns from, if it samples none),
`inputs.json` (hashes of the files that it reads), `metrics.jsonl` (an object a step),
`completions.jsonl.gz` (an object a completion: `completions.py`), `quantization.jsonl` (an object
every few steps: the weights by layer and tensor), `certificate.jsonl` (a chain of hashes:
`certificate.py`), `checkpoints/`. A resumed run cuts these files back to where its checkpoint was
made, so that they end as if it had never stopped. Left out: what is in a checkpoint
(`training/saving/checkpoint.py`) and how it becomes atomic (`checkpoints.py`).
"""

import errno
import fcntl
import hashlib
import json
import os
import shutil
import stat
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from isobit.data.foreign import BadJson, exists, parse_json, read_bytes, reason_of
from isobit.errors import IsobitError, RunFailed
from isobit.run import checkpoints, durable, metrics
from isobit.run.certificate import CERTIFICATE
from isobit.run.completions import COMPLETIONS, HELD_OUT, pack
from isobit.run.format import FORMAT, FORMAT_NOW, check_format
from isobit.run.rows import (
    MOST_STEPS,
    Say,
    kept_until,
    metric_row,
    quantization_row,
    read_rows,
    warn,
)

CONFIG = "config.yaml"
METRICS = "metrics.jsonl"
QUANTIZATION = "quantization.jsonl"
CHECKPOINTS = "checkpoints"
REPORT = "report.html"
MACHINE = "machine.json"
RESOLVED = "resolved.json"
INPUTS = "inputs.json"
ROLLOUTS_FROM = "rollouts_from.txt"
NOTHING_WRITTEN = {METRICS: 0, COMPLETIONS: 0, HELD_OUT: 0, QUANTIZATION: 0, CERTIFICATE: 0}
"""The lengths, in bytes, of the files that grow, for a new run."""
LOCK, BEST = ".lock", "best"
_MOST_BYTES = 1 << 24
_OF_ITS_BEGINNING = (CONFIG, MACHINE, RESOLVED, INPUTS)
REWARDS_LOG, ENVIRONMENTS_LOG = "rewards.log", "environments.log"
"""The output of reward functions and of environments; these files grow over a resume."""


class Lock:
    """A lock on a run directory, so that no second process works on it; `called`: the word for
    another kind of directory in errors. Raises IsobitError if another process has the lock, or if
    the directory cannot be written."""

    def __init__(self, directory: Path, called: str = "run directory") -> None:
        self._path = directory / LOCK
        try:
            self._file = _own_file(self._path, os.O_WRONLY | os.O_CREAT)
        except OSError as error:
            raise IsobitError(f"cannot write into {called} {directory}: {error.strerror}") from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.close()
            raise IsobitError(f"{called} {directory} is in use by another process") from None

    @property
    def holds(self) -> bool:
        """Whether the directory is still the one that was locked: it may be moved, or removed, and
        a relative path leads elsewhere when the current directory changes."""
        try:
            return os.path.samestat(os.fstat(self._file.fileno()), self._path.stat())
        except OSError:
            return False

    def close(self) -> None:
        """Release the lock, so that other processes may work on the directory."""
        self._file.close()


def in_use(directory: Path) -> bool:
    """Return whether a process holds the run's lock."""
    try:
        with _own_file(directory / LOCK, os.O_RDONLY) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # there is none, or nothing that a run made
        return False
    return False


def _own_file(path: Path, flags: int) -> IO[bytes]:
    """Open a file of a run: a regular file, not a link, since a directory from elsewhere could have
    a link to another file in its place. Raises OSError."""
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "it is a link; a run writes into files of its own") from None
        raise
    mode = "rb" if flags == os.O_RDONLY else "ab" if flags & os.O_APPEND else "wb"
    file = open(descriptor, mode)  # noqa: SIM115
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        file.close()
        raise OSError(0, f"{path.name} is not a regular file")
    return file


class RunDirectory:
    """An open run directory, locked against a second process. Use as a context manager."""

    def __init__(
        self,
        directory: Path,
        offsets: Mapping[str, int],
        config_text: str | None = None,
        lock: Lock | None = None,
    ) -> None:
        """Open the files that grow, each cut to the length in `offsets`, in bytes. `config_text`
        replaces the contents of `config.yaml`, since a resumed run may be longer. `lock`: the lock,
        if it was taken before; it is released with the files."""
        self.directory = directory
        self._lock = lock or Lock(directory)
        if config_text is not None:  # first: without its config nothing has begun
            try:
                durable.write_text(directory / FORMAT, f"{FORMAT_NOW}\n")
                durable.write_text(directory / CONFIG, config_text)
            except OSError as error:
                raise IsobitError(
                    f"cannot write into run directory {directory}: {error.strerror}"
                ) from None
        self._files = {name: _open_at(directory / name, offset) for name, offset in offsets.items()}
        self._rows = kept_until(directory / METRICS, MOST_STEPS)[1]

    @staticmethod
    def create(
        directory: Path, config_text: str, rollouts_from: Path | None = None
    ) -> "RunDirectory":
        """Create the directory of a new run, which may learn from the rollouts of another run.
        Raises IsobitError if the directory exists and holds anything but a run that has learned
        nothing."""
        refuse_existing(directory)
        lock = None
        try:
            durable.make_directory(directory)
            if exists(directory / CONFIG):  # of a run that ended before its first step
                lock = Lock(directory)
                for name in _OF_ITS_BEGINNING:
                    (directory / name).unlink(missing_ok=True)
                for name in (BEST, CHECKPOINTS):
                    shutil.rmtree(directory / name, ignore_errors=True)
            (directory / ROLLOUTS_FROM).unlink(
                missing_ok=True
            )  # of one that was killed before it had begun
            if rollouts_from is not None:  # before the config, with which the run has begun
                durable.write_text(directory / ROLLOUTS_FROM, f"{rollouts_from.absolute()}\n")
            return RunDirectory(directory, NOTHING_WRITTEN, config_text, lock)
        except OSError as error:
            raise IsobitError(
                f"cannot create run directory {directory}: {error.strerror}"
            ) from None

    def __enter__(self) -> "RunDirectory":
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            with suppress(OSError):  # what a full disk did not take was said when it was written
                file.close()
        self._lock.close()

    def record_machine(self, facts: Mapping[str, object]) -> list[str]:
        """Record the backend and the versions that compute the run. Returns a warning if those with
        which the run began are not known. Raises IsobitError if the run would go on with other
        bits: with another `backend`, order of sums, or format."""
        path = self.directory / MACHINE
        recorded = object_in(path)
        if recorded is None or "backend" not in recorded:
            missing = (
                []
                if recorded is None
                else [f"warning: {path} cannot be read: what the run began on is not known"]
            )
            self.write_object(MACHINE, facts)
            return missing
        if recorded["backend"] != facts["backend"]:
            raise IsobitError(
                f"run {self.directory} was computed by the {recorded['backend']} backend, and here "
                f"it would go on by {facts['backend']}, which rounds in other places; resume it "
                "where the former works"
            )
        if recorded.get("order") != facts.get("order"):
            raise IsobitError(
                f"run {self.directory} added its products in the order {recorded.get('order')}, "
                f"and here it would go on in {facts.get('order')}, with other bits; "
                "resume it with the version of isobit that began it"
            )
        formats, began = facts.get("formats", {}), recorded.get("formats", {})
        assert isinstance(formats, dict)
        for name, was in began.items() if isinstance(began, dict) else ():
            if formats.get(name, was) != was:
                raise IsobitError(
                    f"run {self.directory} began with {name} {was}, and under the same "
                    "precision this version of "
                    f"isobit has {formats[name]}; resume it with the version that began it"
                )
        return []

    def write_object(self, name: str, values: Mapping[str, object]) -> None:
        """Write a small file of JSON, which replaces the file of that name."""
        self._replace(name, json.dumps(values, indent=1) + "\n")

    @property
    def checkpoints(self) -> Path:
        return self.directory / CHECKPOINTS

    def written(self) -> dict[str, Any]:
        """Return the lengths of the files that grow, for a checkpoint's state: `rows`, the number
        of rows of metrics.jsonl, whose times have no fixed length, and `offsets`, the bytes of the
        other files."""
        offsets = {name: file.tell() for name, file in self._files.items() if name != METRICS}
        return {"rows": self._rows, "offsets": offsets}

    def flush(self) -> None:
        """Flush the files that grow to the disk, before a checkpoint relies on them."""
        self._require_here()
        try:
            for file in self._files.values():
                os.fsync(file.fileno())
            durable.flush(self.directory)
        except OSError as error:
            raise self._cannot_write(self.directory, error) from None

    def write_metrics(self, values: Mapping[str, float]) -> None:
        metrics.check(values)
        self._write(METRICS, [metrics.plain(values)])
        self._rows += 1

    def write_completions(self, rows: Iterable[Mapping[str, Any]]) -> str | None:
        """Append the completions of a step; called once for each step. Returns the SHA-256 of their
        lines, None for no rows."""
        digest = hashlib.sha256()
        member = pack(rows, digest)
        self._append(COMPLETIONS, member)
        return digest.hexdigest() if member else None

    def write_held_out(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append the completions of an evaluation of held-out prompts."""
        self._append(HELD_OUT, pack(rows))

    def write_certificate(self, row: Mapping[str, Any]) -> str:
        """Append the row of a step to the certificate. Returns the row's hash."""
        self._write(CERTIFICATE, [row])
        return str(row["hash"])

    def write_quantization(self, step: int, tensors: Mapping[str, Any]) -> None:
        self._write(QUANTIZATION, [{"step": step, "tensors": tensors}])

    def _write(self, name: str, rows: Iterable[Mapping[str, Any]]) -> None:
        self._append(
            name, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
        )

    def _require_here(self) -> None:
        """Raise RunFailed if the directory was moved, so that a checkpoint would be written to
        another place than the open files."""
        if not self._lock.holds:
            raise RunFailed(
                f"run directory {self.directory} was moved or removed while the run worked, or the "
                "current directory was changed; what it had recorded is where it is now; go on "
                "there with: isobit train --resume DIR"
            )

    def _append(self, name: str, content: bytes) -> None:
        self._require_here()
        file = self._files[name]
        try:
            file.write(content)
            file.flush()
        except OSError as error:
            raise self._cannot_write(self.directory / name, error) from None

    def _replace(self, name: str, text: str) -> None:
        try:
            durable.write_text(self.directory / name, text)
        except OSError as error:
            raise self._cannot_write(self.directory / name, error) from None

    def _cannot_write(self, path: Path, error: OSError) -> RunFailed:
        return RunFailed(
            f"cannot write {path}: {error.strerror}; go on with: isobit train --resume "
            f"{self.directory}"
        )


class FollowedDirectory(RunDirectory):
    """The directory of a run whose files another process writes: nothing is written, and nothing
    locked."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._files = {}
        self._rows = 0

    def __exit__(self, *_: object) -> None:
        pass

    def record_machine(self, facts: Mapping[str, object]) -> list[str]:
        return []

    def flush(self) -> None:
        pass

    def _append(self, name: str, content: bytes) -> None:
        pass

    def _replace(self, name: str, text: str) -> None:
        pass


def refuse_existing(directory: Path) -> None:
    """Raise IsobitError if the directory is occupied (`occupied`); the message for a run says how
    to go on with it."""
    if state := occupied(directory):
        again = (
            f", or go on with it: isobit train --resume {directory}" if state == "is a run" else ""
        )
        raise IsobitError(
            f"run directory {directory} exists and {state}; choose another (--out, or "
            f"run.dir=...){again}"
        )


def occupied(directory: Path) -> str | None:
    """Return in words what a directory for something new holds already; None if it is missing or
    empty, or holds a run that ended before its first step."""
    if not directory.exists():
        return None
    if not directory.is_dir():
        return "is a file"
    if (directory / CONFIG).is_file():
        return None if _learned_nothing(directory) else "is a run"
    if (directory / "config.json").is_file():
        return "is a model"
    files = (CONFIG, ROLLOUTS_FROM, FORMAT)
    begun = {
        LOCK,
        ROLLOUTS_FROM,
        FORMAT,
        *(f".{name}.partial" for name in files),
    }  # and no further: nothing is lost
    return "is not empty" if any(path.name not in begun for path in directory.iterdir()) else None


def _learned_nothing(directory: Path) -> bool:
    """Return whether a run on which no process works has no step, and no checkpoint of a step."""
    names = (path.name for path in (directory / CHECKPOINTS).glob("step-*"))
    if in_use(directory) or any(name != "step-000000" for name in names):
        return False
    path, completions_ = directory / METRICS, directory / COMPLETIONS
    if exists(completions_) and completions_.stat().st_size:
        return False
    return not exists(path) or kept_until(path, MOST_STEPS) == kept_until(path, 0)


def rollouts_from(directory: Path) -> Path | None:
    """Return the directory of the run whose rollouts a run learns from; None if the run samples its
    own rollouts. Raises IsobitError if that is recorded but cannot be read."""
    path = directory / ROLLOUTS_FROM
    if not exists(path):
        return None
    try:
        return Path(read_bytes(path, 1 << 16).decode("utf-8").rstrip("\n"))
    except (OSError, UnicodeDecodeError) as error:
        raise IsobitError(f"{path}: cannot be read: {reason_of(error)}") from None


def began_by(directory: Path) -> dict[str, Any]:
    """Return the backend and versions that compute a run, as `RunDirectory.record_machine` recorded
    them when it began; empty if they are not known."""
    return object_in(directory / MACHINE) or {}


def object_in(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in a file: an empty one if the file holds something else or cannot be
    read; None without a file."""
    try:
        value = parse_json(read_bytes(path, _MOST_BYTES).decode("utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError, BadJson):
        return {}
    return value if isinstance(value, dict) else {}


def _open_at(path: Path, offset: int) -> IO[bytes]:
    try:
        file = _own_file(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    except OSError as error:
        raise IsobitError(f"cannot write {path}: {error.strerror}") from None
    if file.seek(0, 2) < offset:
        file.close()
        raise IsobitError(
            f"{path} is shorter than its checkpoint says ({offset} bytes): it was changed"
        )
    file.truncate(offset)
    file.seek(offset)
    return file


def read_jsonl(path: Path, say: Say = warn) -> Iterator[dict[str, Any]]:
    """Yield the rows of metrics.jsonl, or of quantization.jsonl. Lines that are not rows are left
    out; at the end `say` is called with a line about them. Raises IsobitError if the file does not
    exist or cannot be read."""
    return read_rows(path, quantization_row if path.name == QUANTIZATION else metric_row, say)


def require_run(directory: Path) -> None:
    """Raise IsobitError unless this is the directory of a run, in a format that this version reads.
    All code that opens a run calls this first."""
    if not (exists(directory / CONFIG) and (directory / CONFIG).is_file()):
        raise IsobitError(f"{directory} is not a run directory: it has no {CONFIG}")
    check_format(directory)


def newest_checkpoint(
    directory: Path,
    problem: checkpoints.Problem | None = None,
    ranks: checkpoints.Ranks = checkpoints.ONE,
) -> Path:
    """Return the newest checkpoint of a run that is whole and in which `problem` finds no problem.
    The first rank names newer checkpoints on stderr."""
    path, warnings = checkpoints.newest(directory / CHECKPOINTS, problem, ranks)
    for warning in warnings if ranks.rank == 0 else []:
        print(f"isobit: {warning}", file=sys.stderr)
    return path


def model_directory(path: Path, best: bool = False) -> Path:
    """Return the newest checkpoint, or the `best` model, if `path` is a run directory; else the
    path itself, a Hugging Face directory. Raises IsobitError for a run without the one asked
    for."""
    if not (path / CONFIG).is_file():
        return path
    require_run(path)
    if not best:
        return newest_checkpoint(path)
    if not (path / BEST).is_dir():
        raise IsobitError(f"{path} has no best model: its evaluation is off, or keep_best is")
    if (problem := checkpoints.damage(path / BEST)) is not None:
        raise IsobitError(
            f"{path / BEST} is damaged ({problem}); take the newest checkpoint: leave out --best"
        )
    return path / BEST
