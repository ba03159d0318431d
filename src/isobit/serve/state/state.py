"""A server's state: its tables, and a folder of weights for each checkpoint.

A checkpoint is written under a temporary name, hashed, flushed, renamed, and only then named in the
tables, in one transaction with all other changes of the same request; so a kill at any moment
leaves the state before it or after it (tests/serve/test_kills.py). When a server begins, folders
that no row names are removed, and rows without a folder are dropped. A checkpoint whose files are
not those that were written is refused.

Steps that are not in a checkpoint are not lost either: requests to a run are kept until a state of
the run that includes them is, and can be done again (`requests`, `keep_present`). Left out: the
contents of a checkpoint, which `write(folder)` writes.
"""

import logging
import secrets
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from isobit.errors import IsobitError, brief
from isobit.run import checkpoints as folders
from isobit.run.durable import make_directory
from isobit.serve.requests import BadRequest
from isobit.serve.state.database import FILE, WEIGHTS, make_private
from isobit.serve.state.reserve import making_room
from isobit.serve.state.rows import (
    Answer,
    Checkpoint,
    CheckpointName,
    Kind,
    StoredRun,
    StoredSampler,
    StoredSession,
    checked_name,
)
from isobit.serve.state.store import MOST_ANSWERS, Store

_MANIFEST = "manifest.json"
MOST_CHECKPOINTS, DISK_PART = 4096, 0.8
"""The most checkpoints of a tenant; the part of the disk that checkpoints of all tenants may take,
in equal shares. The rest is for the states that the server keeps of runs."""
Write = Callable[[Path], None]
_LOG = logging.getLogger("isobit.serve")


class State(Store):
    """An open state. Methods may be called from any thread; those that write a checkpoint take as
    long as their `write`, without a lock."""

    def __init__(
        self,
        folder: Path,
        owners: Mapping[str, str] | None = None,
        most_bytes: int | None = None,
        most_checkpoints: int = MOST_CHECKPOINTS,
        every: int = 10,
        model: str = "",
        drops: bool = False,
    ) -> None:
        """`owners`: the tables' names of tenants, by the names that requests have for them;
        `most_bytes`: of a tenant's checkpoints, None: its share of the disk's present room;
        `every`: the most optimizer steps of a run that are computed again after a kill; `model`:
        the identity of the model (`identity.py`); `drops`: rows without their folders, and
        runs that cannot go on, may be dropped. Raises IsobitError for a folder that is not a state,
        that others may enter, or that is in use, and for rows without their folders, unless it
        `drops` them."""
        _check_tables(make_private(folder))
        super().__init__(folder, owners or {}, model)
        self.drops = drops
        self._most_checkpoints = most_checkpoints
        self.every = every
        self._weights = folder / WEIGHTS
        self._writing = set[str]()  # ids of folders that no row names yet
        self._pinned = dict[str, str]()  # by run: a checkpoint that it has loaded, and not kept
        try:
            make_directory(self._weights)
            self._weights.chmod(0o700)
            self._check_rows()
            self._tidy()
            self._most_bytes = self._share() if most_bytes is None else most_bytes
        except BaseException:
            self.close()
            raise

    # checkpoints

    def save(
        self,
        run: str,
        kind: Kind,
        name: str,
        write: Write,
        *,
        optimizer: bool = False,
        ttl: float | None = None,
        overwrite: bool = False,
        metadata: Mapping[str, str] | None = None,
        weights: str = "",
        answer: Callable[[Checkpoint], tuple[int, Answer]] | None = None,
        sampler: Callable[[Checkpoint], StoredSampler] | None = None,
    ) -> Checkpoint:
        """Keep the files that `write(folder)` writes as a run's checkpoint, of these `weights`, and
        return it. In the same transaction the (number, answer) of the request for it is written,
        and a `sampler` added. Raises BadRequest for a name that is taken or is not valid, and for
        lack of room; RunFailed where the disk takes no more."""
        checked_name(name)
        self._check_free(run, kind, name, overwrite, 1)
        checkpoint = self._written(run, kind, name, write, optimizer, ttl, metadata or {}, weights)
        try:
            with self._transaction() as execute:
                self._check_free(run, kind, name, overwrite, checkpoint.bytes)
                execute(
                    "DELETE FROM checkpoints WHERE run = ? AND kind = ? AND name = ?",
                    *(run, kind, name),
                )
                self._insert(checkpoint)
                if answer is not None:
                    self._write_answer(run, *answer(checkpoint))
                if sampler is not None:
                    self._insert(sampler(checkpoint))
        finally:
            self._writing.discard(checkpoint.id)
            self._tidy()
        return checkpoint

    def keep_present(
        self, run: str, number: int, write: Write, answer: Answer | None = None, weights: str = ""
    ) -> None:
        """Keep the state of a run after its request `number`, weights and optimizer, in the place
        of the state that was kept before, and the request's answer; requests up to it need not be
        done again. Call it where no gradients wait: after `optim_step` or `load_weights`. Raises
        RunFailed where the disk takes no more."""
        checkpoint = self._written(run, "present", "present", write, True, None, {}, weights)
        try:
            with self._transaction() as execute:
                execute("DELETE FROM checkpoints WHERE run = ? AND kind = 'present'", run)
                self._insert(checkpoint)
                execute("UPDATE runs SET applied = ? WHERE id = ?", number, run)
                self._write_late()
                if answer is not None:
                    self._write_answer(run, number, answer)
                execute("UPDATE requests SET body = x'' WHERE run = ? AND number <= ?", run, number)
                execute(
                    "DELETE FROM requests WHERE run = ? AND number <= ?", run, number - MOST_ANSWERS
                )
            self._pinned.pop(run, None)
        finally:
            self._writing.discard(checkpoint.id)
            self._tidy()

    def pin(self, run: str, checkpoint: str) -> None:
        """Hold a checkpoint that a run has loaded until the run is kept or ends, so that the run
        can load it again after a kill."""
        with self._guard:
            self._pinned[run] = checkpoint

    def present(self, run: str) -> Checkpoint | None:
        """Return the state of a run that was kept last; None: none is kept."""
        return self._first(Checkpoint, "run = ? AND kind = 'present'", run)

    def checkpoint(self, tenant: str, path: str | CheckpointName) -> Checkpoint:
        """Return a tenant's checkpoint by its `tinker://` path. Raises BadRequest (404) where there
        is none."""
        name = CheckpointName.parse(path) if isinstance(path, str) else path
        self.drop_expired()
        run = self.run(name.run)
        saved = self._first(
            Checkpoint, "run = ? AND kind = ? AND name = ?", name.run, name.kind, name.name
        )
        if saved is None or run is None or run.tenant != tenant:
            shown = Checkpoint("", name.run, name.kind, name.name, 0, "", False, 0.0).path
            raise BadRequest(f"no checkpoint {brief(shown, 300)}", "path", 404)
        return saved

    def loadable(self, tenant: str, path: str) -> Checkpoint:
        """Return a tenant's checkpoint whose weights this server's model can load. Raises as
        `checkpoint`, and BadRequest for an adapter of another model."""
        saved = self.checkpoint(tenant, path)
        run = self.run(saved.run)
        try:
            if run is not None and run.rank is not None:
                self.check_model(run)
        except IsobitError as error:
            raise BadRequest(f"{saved.path}: {error}", "path") from None
        return saved

    def live_runs(self) -> list[StoredRun]:
        """Return the runs to which requests may come, the oldest first."""
        return self._all(StoredRun, "live ORDER BY created")

    def all_sessions(self) -> list[StoredSession]:
        """Return the sessions that have not ended, the oldest first."""
        return self._all(StoredSession, "true ORDER BY created")

    def by_id(self, checkpoint: str) -> Checkpoint | None:
        """Return the checkpoint of an id, of any kind, as a sampling client names its snapshot;
        None: there is none."""
        return self._first(Checkpoint, "id = ?", checkpoint)

    def checkpoints(
        self, tenant: str, run: str | None = None, limit: int = -1, offset: int = 0
    ) -> tuple[list[Checkpoint], int]:
        """Return (at most `limit` checkpoints that a tenant, or one run of it, has saved, from the
        `offset`-th on, the newest first; how many there are)."""
        self.drop_expired()
        where = (
            "kind IN ('training', 'sampler', 'external') AND run IN "
            "(SELECT id FROM runs WHERE tenant = ?"
        )
        values: list[object] = [self._owner(tenant)]
        if run is not None:
            where, values = where + " AND id = ?", [*values, run]
        where += ")"
        order = f"{where} ORDER BY created DESC, id LIMIT ? OFFSET ?"
        with self._guard:
            rows = self._all(Checkpoint, order, *values, limit, offset)
            return rows, self._count("checkpoints", where, *values)

    def folder_of(self, checkpoint: Checkpoint) -> Path:
        """Return the folder of a checkpoint, whose files are checked to be those that were written.
        Raises IsobitError for others, and BadRequest (404) for a checkpoint that was deleted."""
        folder = self._weights / checkpoint.id
        problem = "it is no folder" if folder.is_symlink() else folders.damage(folder)
        if problem is None and _digest(folder) != checkpoint.digest:
            problem = f"{_MANIFEST} is not the one that was written"
        if problem is not None:
            if self.by_id(checkpoint.id) is None:
                raise deleted(checkpoint)
            raise IsobitError(f"checkpoint {checkpoint.path} is damaged: {problem}")
        return folder

    def set_ttl(self, tenant: str, path: str | CheckpointName, ttl: float | None) -> None:
        """Let a checkpoint be dropped after `ttl` seconds, None: never. Raises as `checkpoint`."""
        saved = self.checkpoint(tenant, path)
        with self._transaction() as execute:
            expires = None if ttl is None else time.time() + ttl
            execute("UPDATE checkpoints SET expires = ? WHERE id = ?", expires, saved.id)

    @making_room
    def delete(self, tenant: str, path: str | CheckpointName) -> None:
        """Drop a checkpoint. Raises as `checkpoint`, and BadRequest where a run still needs it."""
        saved = self.checkpoint(tenant, path)
        self._check_unpinned(saved)
        with self._transaction() as execute:
            execute("DELETE FROM checkpoints WHERE id = ?", saved.id)
            self._forget_empty()
        self._tidy()

    @making_room
    def drop_expired(self) -> None:
        """Drop the checkpoints that have expired and that no run needs."""
        with self._guard:
            held = [*self._pinned.values()]
            where, now = f"expires <= ? AND id NOT IN ({', '.join('?' * len(held))})", time.time()
            if not self._count("checkpoints", where, now, *held):
                return
            with self._transaction() as execute:
                execute(f"DELETE FROM checkpoints WHERE {where}", now, *held)
                self._forget_empty()
        self._tidy()

    @making_room
    def end_session(self, name: str) -> None:
        """End a session as `Store.end_session`, and drop the snapshots, which have no path, of its
        sampling clients."""
        with self._transaction() as execute:
            execute(
                "DELETE FROM checkpoints WHERE kind = 'snapshot' AND id IN "
                "(SELECT snapshot FROM samplers WHERE session = ?)",
                name,
            )
            super().end_session(name)
        self._tidy()

    @making_room
    def drop_sampler(self, name: str) -> None:
        """Drop a sampling client, and its snapshot, which has no path."""
        with self._transaction() as execute:
            execute(
                "DELETE FROM checkpoints WHERE kind = 'snapshot' AND id IN "
                "(SELECT snapshot FROM samplers WHERE id = ?)",
                name,
            )
            execute("DELETE FROM samplers WHERE id = ?", name)
        self._tidy()

    @making_room
    def end_run(self, run: str) -> None:
        """End a run as `Store.end_run`, and remove its folders."""
        super().end_run(run)
        self._pinned.pop(run, None)
        if not self._connection.in_transaction:
            self._tidy()

    @property
    def tenants(self) -> int:
        """The number of tenants, which share the disk; at least 1."""
        return max(len(self._owners), 1)

    def _share(self) -> int:
        """Return how many bytes a tenant's checkpoints may have on this disk."""
        (held,) = self._run("SELECT coalesce(sum(bytes), 0) FROM checkpoints").fetchone()
        free = shutil.disk_usage(self._weights).free
        return int(DISK_PART * (free + held) / self.tenants)

    # what keeps folders and rows together

    def _check_free(self, run: str, kind: Kind, name: str, overwrite: bool, size: int) -> None:
        """Raise BadRequest unless a run's tenant may save `size` bytes by this name, in the place
        of the checkpoint that has the name."""
        entry = self.run(run)
        if entry is None:
            raise BadRequest(f"no training run {brief(run)}", status=404)
        old = self._first(Checkpoint, "run = ? AND kind = ? AND name = ?", run, kind, name)
        if old is not None and not overwrite:
            raise BadRequest(
                f"checkpoint {name!r} is there already; choose another name, or set overwrite",
                "path",
                409,
            )
        if old is not None:
            self._check_unpinned(old)
        owned, owner = ("run IN (SELECT id FROM runs WHERE tenant = ?)", self._owner(entry.tenant))
        if self._count("checkpoints", owned, owner) - (old is not None) >= self._most_checkpoints:
            raise BadRequest(
                f"a tenant may have {self._most_checkpoints:,} checkpoints; delete some", status=429
            )
        with self._guard:
            statement = f"SELECT coalesce(sum(bytes), 0) FROM checkpoints WHERE {owned}"
            (held,) = self._run(statement, owner).fetchone()
        held, share = held - (0 if old is None else old.bytes), self._most_bytes
        if held + size > share:
            raise BadRequest(
                f"your checkpoints have {held:,} bytes, what your runs are kept as among them, and "
                f"{size:,} more do not fit in your share of the disk, {share:,}; delete checkpoints "
                "of yours, or unload runs",
                status=429,
            )

    def _check_unpinned(self, checkpoint: Checkpoint) -> None:
        """Raise BadRequest for a checkpoint without which a run could not go on."""
        if checkpoint.id in self._pinned.values():
            raise BadRequest(
                f"{checkpoint.path}: a run was loaded from it, and could not be kept since; call "
                "optim_step, or unload the run, first",
                "path",
            )

    def _written(
        self,
        run: str,
        kind: Kind,
        name: str,
        write: Write,
        optimizer: bool,
        ttl: float | None,
        metadata: Mapping[str, str],
        weights: str,
    ) -> Checkpoint:
        """Write a checkpoint's folder to the disk, and return the row for it, which is not in the
        table yet. Raises RunFailed where the disk takes no more."""
        self.drop_expired()
        made, now = secrets.token_hex(16), time.time()
        folder = self._weights / made
        with self._guard:
            self._writing.add(made)
        try:
            folders.replace(folder, write)
            size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
            digest = _digest(folder)
        except BaseException as error:
            self._writing.discard(made)
            shutil.rmtree(folder, ignore_errors=True)
            if isinstance(error, (OSError, IsobitError)) and not isinstance(error, BadRequest):
                raise self._no_room(_reason(error)) from None
            raise
        expires = None if ttl is None else now + ttl
        return Checkpoint(
            *(made, run, kind, name, size, digest, optimizer, now, expires),
            *(dict(metadata), weights),
        )

    def _forget_empty(self) -> None:
        """Delete the runs that have ended and have no checkpoints."""
        self._run("DELETE FROM runs WHERE NOT live AND id NOT IN (SELECT run FROM checkpoints)")

    def _check_rows(self) -> None:
        """Raise IsobitError for a row that no server has written, and for a checkpoint without a
        folder, unless the state `drops` it; then a run whose kept state is dropped ends."""
        self._all(StoredSession, "true")
        self._all(StoredRun, "true")
        self._all(StoredSampler, "true")
        gone = [
            row.id
            for row in self._all(Checkpoint, "true")
            if (self._weights / row.id).is_symlink() or not (self._weights / row.id).is_dir()
        ]
        if gone and not self.drops:
            raise IsobitError(
                f"--state {self.folder}: the folders of {len(gone):,} checkpoints are gone, such as "
                f"{WEIGHTS}/{gone[0]}; put them back, or drop them, and the runs that need them, "
                "with --drop-runs"
            )
        with self._transaction() as execute:
            for name in gone:
                execute("DELETE FROM checkpoints WHERE id = ?", name)
            lost = execute(
                "SELECT id FROM runs WHERE live AND applied >= 0 AND id NOT IN "
                "(SELECT run FROM checkpoints WHERE kind = 'present')"
            )
            for (name,) in lost.fetchall() if self.drops else ():
                Store.end_run(self, name)
            self._forget_empty()

    def _tidy(self) -> None:
        """Remove folders that no row names, without the lock. The folders are listed before the ids
        of those that are being written are read; the next call removes those that cannot be removed
        now."""
        with suppress(OSError):
            there = list(self._weights.iterdir())
            with self._guard:
                rows = self._run("SELECT id FROM checkpoints").fetchall()
                needed = {name for (name,) in rows} | self._writing
                needed |= {f".writing-{name}" for name in self._writing}
            for path in there:
                if path.name in needed:
                    continue
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink(missing_ok=True)
        self._reserve.hold()


def _check_tables(folder: Path) -> None:
    """Raise IsobitError for weights without the tables that name them: they would be removed as
    folders that no row names."""
    weights = folder / WEIGHTS
    if not (folder / FILE).exists() and weights.is_dir() and any(weights.iterdir()):
        raise IsobitError(
            f"--state {folder}: {WEIGHTS} has checkpoints, and {FILE}, which names them, is gone; "
            "put it back, or give another folder"
        )


def deleted(checkpoint: Checkpoint) -> BadRequest:
    """Return the error for a checkpoint that was deleted during a request."""
    return BadRequest(f"{checkpoint.path} was deleted", "path", 404)


def _digest(folder: Path) -> str:
    return folders.file_digest(folder / _MANIFEST)


def _reason(error: BaseException) -> str:
    """Return why the disk has not taken weights, without a path, since tenants read it."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    if cause is None:
        _LOG.warning("weights could not be written: %s", error)
    return "its log says why" if cause is None else cause.strerror or type(cause).__name__
