"""The tables of a server's state: sessions, runs, sampling clients and requests, read and written
one transaction at a time, from any thread.

A tenant sees only its own rows, as if there were no others. A tenant is known by its token: where
the lines of a file of tokens change places, each tenant still has its own rows.
"""

import json
import logging
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from isobit.data.foreign import BadJson, parse_json
from isobit.errors import IsobitError, RunFailed, brief
from isobit.serve.requests import BadRequest
from isobit.serve.state.database import open_database
from isobit.serve.state.reserve import Reserve
from isobit.serve.state.rows import (
    Answer,
    Checkpoint,
    StoredRequest,
    StoredRun,
    StoredSampler,
    StoredSession,
    Taken,
    checked_row,
)

_Row = TypeVar("_Row", StoredSession, StoredRun, StoredSampler, Checkpoint)
_TABLES: Mapping[type, str] = {
    StoredSession: "sessions",
    StoredRun: "runs",
    StoredSampler: "samplers",
    Checkpoint: "checkpoints",
}
MOST_RUNS, MOST_ANSWERS, MOST_REQUEST_BYTES = 4096, 256, 1 << 30
"""The most runs of a tenant; the most answers that are kept of a run, besides those that clients
may ask for again; the most bytes of a run's requests that are in no kept state of it, which bounds
the data of one step."""
_HEAVY = 4  # a run whose requests have more than 1/4 of these bytes is kept at its next step
_TOLD_SECONDS = 60.0  # between two lines of the log on a full disk
_LOG = logging.getLogger("isobit.serve")


class Store:
    """The rows of an open database, with the methods that read and write them."""

    def __init__(self, folder: Path, owners: Mapping[str, str], model: str = "") -> None:
        self.folder, self.model = folder, model
        self._owners, self._tenants = owners, {owner: name for name, owner in owners.items()}
        self._guard = threading.RLock()
        self._late: dict[tuple[str, int], Answer] = {}  # answers that the disk has not taken
        self._connection, self._lock = open_database(folder)
        self._reserve = Reserve(folder)
        self._tell_next = 0.0  # by the monotonic clock

    def close(self) -> None:
        """Close the database, so that another server may open it."""
        with self._guard:
            self._connection.close()
            self._lock.close()

    # sessions and sampling clients

    def add_session(self, session: StoredSession) -> None:
        """Add a session: a client has begun."""
        with self._transaction():
            self._insert(session)

    def session(self, name: str) -> StoredSession | None:
        """Return the session of an id; None: there is none, or it has ended."""
        return self._first(StoredSession, "id = ?", name)

    def sessions(self, tenant: str, limit: int, offset: int) -> list[StoredSession]:
        """Return at most `limit` sessions of a tenant from the `offset`-th on, the newest first."""
        order = "tenant = ? ORDER BY created DESC, id LIMIT ? OFFSET ?"
        return self._all(StoredSession, order, self._owner(tenant), limit, offset)

    def end_session(self, name: str) -> None:
        """Delete a session with its sampling clients, and end its runs, whose unsaved weights are
        dropped. Checkpoints stay."""
        with self._transaction() as run:
            run("DELETE FROM sessions WHERE id = ?", name)
            for (run_id,) in run("SELECT id FROM runs WHERE session = ? AND live", name).fetchall():
                self.end_run(run_id)

    def add_sampler(self, sampler: StoredSampler) -> StoredSampler:
        """Add a sampling client to its session, and return it; where the session has one of this
        number already, return that one."""
        with self._transaction():
            where = "session = ? AND number = ?"
            known = self._first(StoredSampler, where, sampler.session, sampler.number)
            if known is None:
                self._insert(sampler)
        return known or sampler

    def sampler(self, name: str) -> StoredSampler | None:
        """Return the sampling client of an id; None: there is none, or its session has ended."""
        return self._first(StoredSampler, "id = ?", name)

    def samplers(self, session: str) -> list[StoredSampler]:
        """Return the sampling clients of a session, in the order of their numbers."""
        return self._all(StoredSampler, "session = ? ORDER BY number", session)

    @property
    def num_of_other_models(self) -> int:
        """The number of runs of another model than this server's to which requests may come."""
        with self._guard:
            return self._count("runs", "live AND model NOT IN ('', ?)", self.model)

    def adopt(self) -> None:
        """Mark live runs and sampling clients of which no model is known, as they are older than
        `check_model`, as of this server's model: they have gone on with it."""
        with self._transaction() as execute:
            execute("UPDATE runs SET model = ? WHERE live AND model = ''", self.model)
            execute("UPDATE samplers SET model = ? WHERE model = ''", self.model)

    def check_model(self, row: StoredRun | StoredSampler) -> None:
        """Raise IsobitError for a run or a sampling client of another model than this server's. One
        that is older than this check passes: its model is not known."""
        if row.model not in ("", self.model):
            raise IsobitError(
                f"it is of another model, whose weights have the SHA-256 {row.model[:12]}..., and "
                f"this one's have {self.model[:12]}..."
            )

    # runs and their requests

    def add_run(self, run: StoredRun) -> StoredRun:
        """Add a training run, and return it; where its session has one of this number already,
        return that one. Raises BadRequest (429) where the tenant has too many runs."""
        with self._transaction() as execute:
            known = self._first(StoredRun, "session = ? AND number = ?", run.session, run.number)
            if known is not None:
                return known
            (count,) = execute(
                "SELECT count(*) FROM runs WHERE tenant = ?", self._owner(run.tenant)
            ).fetchone()
            if count >= MOST_RUNS:
                raise BadRequest(
                    f"{count:,} training runs are kept, which is the most; delete checkpoints of "
                    "old ones",
                    status=429,
                )
            self._insert(run)
        return run

    def run(self, name: str) -> StoredRun | None:
        """Return the run of an id; None: there is none."""
        return self._first(StoredRun, "id = ?", name)

    def runs(self, tenant: str, limit: int, offset: int) -> tuple[list[StoredRun], int]:
        """Return (at most `limit` runs of a tenant from the `offset`-th on, the newest first; how
        many runs the tenant has)."""
        owner = self._owner(tenant)
        order = "tenant = ? ORDER BY created DESC, id LIMIT ? OFFSET ?"
        with self._guard:
            rows = self._all(StoredRun, order, owner, limit, offset)
            return rows, self._count("runs", "tenant = ?", owner)

    def runs_of(self, session: str) -> list[StoredRun]:
        """Return the runs of a session, in the order of their numbers."""
        return self._all(StoredRun, "session = ? ORDER BY number", session)

    def end_run(self, run: str) -> None:
        """End a run, which takes no more requests: drop its requests and the state that was kept
        last, and the run itself if it has no checkpoint."""
        with self._transaction() as execute:
            execute("UPDATE runs SET live = 0 WHERE id = ?", run)
            execute("DELETE FROM requests WHERE run = ?", run)
            execute("DELETE FROM checkpoints WHERE run = ? AND kind = 'present'", run)
            execute(
                "DELETE FROM runs WHERE id = ? AND id NOT IN (SELECT run FROM checkpoints)", run
            )

    def accept(
        self, run: str, number: int, kind: str, body: bytes, *, always: bool = False
    ) -> None:
        """Write a request to a run to the disk, so that it can be done again after a kill. A second
        request of the same number is the same request. Raises BadRequest (429) where the run's
        requests have too many bytes, unless this one is taken `always`; RunFailed where the disk
        takes no more."""
        with self._transaction() as execute:
            new = execute(
                "INSERT OR IGNORE INTO requests SELECT ?, ?, ?, ?, NULL, NULL, NULL "
                "WHERE EXISTS (SELECT 1 FROM runs WHERE id = ? AND live)",
                *(run, number, kind, body, run),
            ).rowcount
            if new and not always and (size := self.request_bytes(run)) > MOST_REQUEST_BYTES:
                raise BadRequest(
                    f"with this one the requests of run {run} that are in no saved state have "
                    f"{size:,} bytes, and {MOST_REQUEST_BYTES:,} is the most that one step may be "
                    "made of; call optim_step first, or send fewer data before it",
                    status=429,
                )
            execute("UPDATE runs SET requested = ? WHERE id = ?", time.time(), run)

    def request_bytes(self, run: str) -> int:
        """Return the bytes of a run's requests that are in no kept state of it."""
        with self._guard:
            statement = "SELECT coalesce(sum(length(body)), 0) FROM requests WHERE run = ?"
            (size,) = self._run(statement, run).fetchone()
        return int(size)

    def is_heavy(self, run: str) -> bool:
        """Tell whether a run's requests have enough bytes that the run is to be kept after a
        step."""
        return self.request_bytes(run) * _HEAVY > MOST_REQUEST_BYTES

    def answer(self, run: str, number: int, answer: Answer) -> None:
        """Write the answer of a request, unless its run has ended. An answer that the disk does not
        take is written with a later one: until then the request is on the disk without it, and the
        next server does the request again."""
        with self._guard:
            self._late[run, number] = answer
            try:
                with self._transaction():
                    self._write_late()
            except RunFailed:
                return
            self._late.clear()

    def _write_late(self) -> None:
        for (run, number), answer in self._late.items():
            self._write_answer(run, number, answer)

    def _write_answer(self, run: str, number: int, answer: Answer) -> None:
        self._run(
            "UPDATE requests SET status = ?, media_type = ?, answer = ? "
            "WHERE run = ? AND number = ?",
            *(answer.status, answer.media_type, answer.body, run, number),
        )

    def requests(self, run: str) -> dict[int, Taken]:
        """Return a run's requests that are kept, without their bodies, by number in ascending
        order: those that came after the state that was kept last, and older ones, which have
        answers."""
        with self._guard:
            statement = "SELECT number, kind, status IS NOT NULL FROM requests WHERE run = ?"
            rows = self._run(f"{statement} ORDER BY number", run).fetchall()
        return {number: Taken(kind, bool(answered)) for number, kind, answered in rows}

    def request(self, run: str, number: int) -> StoredRequest | None:
        """Return the kept request of a number to a run; None: there is none, or the run has
        ended."""
        with self._guard:
            row = self._run(
                "SELECT kind, body, status, media_type, answer FROM requests "
                "WHERE run = ? AND number = ?",
                *(run, number),
            ).fetchone()
        if row is None:
            return None
        kind, body, status, media, answer = row
        stored_answer = None if status is None else Answer(status, media, answer)
        return StoredRequest(run, number, kind, body, stored_answer)

    # rows

    @contextmanager
    def _transaction(self) -> Iterator[Callable[..., sqlite3.Cursor]]:
        """Open a transaction, or stay in the one that is open: at its end all that was done in it
        is on the disk, or nothing. Raises RunFailed where the disk takes no more, and BadRequest
        (410) for a row that belongs to one that was deleted."""
        with self._guard:
            if self._connection.in_transaction:
                yield self._run
                return
            try:
                self._run("BEGIN IMMEDIATE")
                yield self._run
                self._run("COMMIT")
            except sqlite3.IntegrityError:  # a row names one that is not there
                raise BadRequest("what this belongs to has ended", status=410) from None
            except sqlite3.OperationalError as error:
                raise self._no_room(brief(error, 200)) from None
            finally:
                if self._connection.in_transaction:
                    with suppress(sqlite3.Error):
                        self._run("ROLLBACK")

    def _no_room(self, reason: str) -> RunFailed:
        """Return the error that tells a tenant that the disk takes no more; log it with the folder,
        at most once in `_TOLD_SECONDS`."""
        if time.monotonic() > self._tell_next:
            self._tell_next = time.monotonic() + _TOLD_SECONDS
            _LOG.warning("--state %s: the disk takes no more: %s", self.folder, reason)
        return RunFailed(f"the server could not write this to its disk: {reason}; ask again later")

    def _run(self, statement: str, *values: Any) -> sqlite3.Cursor:
        return self._connection.execute(statement, values)

    def _owner(self, tenant: str) -> str:
        return self._owners.get(tenant, tenant)

    def _insert(self, row: StoredSession | StoredRun | StoredSampler | Checkpoint) -> None:
        values = dict(vars(row))
        if "tenant" in values:
            values["tenant"] = self._owner(values["tenant"])
        if "model" in values:
            values["model"] = self.model
        for key in ("metadata", "targets"):
            if key in values:
                values[key] = json.dumps(values[key], sort_keys=True)
        names = ", ".join(values)
        marks = ", ".join("?" * len(values))
        self._run(f"INSERT INTO {_TABLES[type(row)]} ({names}) VALUES ({marks})", *values.values())

    def _count(self, table: str, where: str, *values: Any) -> int:
        (count,) = self._run(f"SELECT count(*) FROM {table} WHERE {where}", *values).fetchone()
        return int(count)

    def _first(self, kind: type[_Row], where: str, *values: Any) -> _Row | None:
        rows = self._all(kind, where, *values)
        return rows[0] if rows else None

    def _all(self, kind: type[_Row], where: str, *values: Any) -> list[_Row]:
        """Return the rows of a table that fit `where`, as values. Raises IsobitError for a row that
        no server has written."""
        with self._guard:
            cursor = self._run(f"SELECT * FROM {_TABLES[kind]} WHERE {where}", *values)
            names = [column[0] for column in cursor.description]
            rows = [dict(zip(names, row)) for row in cursor.fetchall()]
        return [self._made(kind, row) for row in rows]

    def _made(self, kind: type[_Row], row: dict[str, Any]) -> _Row:
        try:
            for key in ("metadata", "targets"):
                if key in row:
                    row[key] = parse_json(row[key])
            for key in ("live", "optimizer"):
                if key in row:
                    row[key] = bool(row[key])
            if "tenant" in row:
                row["tenant"] = self._tenants.get(row["tenant"], row["tenant"])
            return checked_row(kind(**row))
        except (BadJson, ValueError, BadRequest) as error:
            raise IsobitError(
                f"--state {self.folder}: table {_TABLES[kind]} has a row that no server writes, "
                f"{brief(row.get('id'), 80)!r}: {brief(error, 200)}"
            ) from None
