"""The folder of a server's state and the tables in it, opened with checks that refuse files of
other users or programs.

The folder is this user's alone (mode 700), and one server's at a time. Tables are strict; the file
must have the tables of this version, no others, and be whole. Commits are on the disk before they
are answered (write-ahead log, `synchronous=FULL`).
"""

import os
import sqlite3
import stat
from pathlib import Path

from isobit.data.foreign import reason_of
from isobit.errors import IsobitError, brief
from isobit.run.directory import Lock
from isobit.run.durable import make_directory
from isobit.run.own_folder import replaceable

VERSION, _APPLICATION = 4, 0x15B17
FILE, WEIGHTS = "state.sqlite", "weights"
_OLDEST_SQLITE = (3, 37, 0)  # strict tables
_TABLES = """
CREATE TABLE sessions (
  id TEXT PRIMARY KEY, tenant TEXT NOT NULL, created REAL NOT NULL, metadata TEXT NOT NULL,
  display_name TEXT
) STRICT;
CREATE TABLE runs (
  id TEXT PRIMARY KEY, tenant TEXT NOT NULL, session TEXT NOT NULL, number INTEGER NOT NULL,
  base TEXT NOT NULL, rank INTEGER, seed INTEGER NOT NULL, targets TEXT NOT NULL,
  created REAL NOT NULL, requested REAL NOT NULL, metadata TEXT NOT NULL,
  applied INTEGER NOT NULL, live INTEGER NOT NULL CHECK (live IN (0, 1)), UNIQUE (session, number)
) STRICT;
CREATE TABLE checkpoints (
  id TEXT PRIMARY KEY CHECK (length(id) = 32 AND id NOT GLOB '*[^0-9a-f]*'),
  run TEXT NOT NULL REFERENCES runs (id) ON DELETE CASCADE,
  kind TEXT NOT NULL CHECK (kind IN ('training', 'sampler', 'external', 'snapshot', 'present')),
  name TEXT NOT NULL, bytes INTEGER NOT NULL CHECK (bytes >= 0), digest TEXT NOT NULL,
  optimizer INTEGER NOT NULL CHECK (optimizer IN (0, 1)), created REAL NOT NULL, expires REAL,
  metadata TEXT NOT NULL, weights TEXT NOT NULL, UNIQUE (run, kind, name)
) STRICT;
CREATE TABLE samplers (
  id TEXT PRIMARY KEY, tenant TEXT NOT NULL,
  session TEXT NOT NULL REFERENCES sessions (id) ON DELETE CASCADE, number INTEGER NOT NULL,
  base TEXT NOT NULL, path TEXT, snapshot TEXT, UNIQUE (session, number)
) STRICT;
CREATE TABLE requests (
  run TEXT NOT NULL REFERENCES runs (id) ON DELETE CASCADE, number INTEGER NOT NULL,
  kind TEXT NOT NULL, body BLOB NOT NULL, status INTEGER, media_type TEXT, answer BLOB,
  PRIMARY KEY (run, number)
) STRICT;
"""
_SINCE_3 = """
ALTER TABLE runs ADD COLUMN model TEXT NOT NULL DEFAULT '';
ALTER TABLE samplers ADD COLUMN model TEXT NOT NULL DEFAULT '';
"""
"""The columns that a state of version 3 lacks; there the model of runs and sampling clients is not
known."""


def make_private(folder: Path) -> Path:
    """Make a folder of this user's alone, unless it exists, and return it. Raises IsobitError for
    one that other users may enter or replace, for one of another user, and for a path that is not a
    folder."""
    try:
        make_directory(folder, 0o700)
        status = folder.lstat()
    except (OSError, ValueError) as error:
        raise IsobitError(f"--state {folder}: cannot be made: {reason_of(error)}") from None
    if not stat.S_ISDIR(status.st_mode):
        raise IsobitError(f"--state {folder}: expected a folder, and no link to one")
    if status.st_uid != os.getuid():
        raise IsobitError(f"--state {folder}: it belongs to another user")
    if status.st_mode & 0o077:
        raise IsobitError(f"--state {folder}: others may enter it; run chmod 700 {folder}")
    if (at := replaceable(folder)) is not None:
        raise IsobitError(
            f"--state {folder}: others may put another folder in its place, at {at}; choose one in "
            "a folder that only you may write"
        )
    return folder


def open_database(folder: Path) -> tuple[sqlite3.Connection, Lock]:
    """Open the tables in a private folder, and make them in an empty one; return the connection and
    the lock that keeps other servers out. Raises IsobitError where another server has the lock, and
    for a file that is not a state of this version."""
    if sqlite3.sqlite_version_info < _OLDEST_SQLITE:
        raise IsobitError(
            f"--state needs SQLite {'.'.join(map(str, _OLDEST_SQLITE))} or newer; this Python has "
            f"{sqlite3.sqlite_version}"
        )
    lock = Lock(folder, "state")
    try:
        for name in (FILE, f"{FILE}-wal", f"{FILE}-journal", WEIGHTS):
            _check_own(folder / name, name == WEIGHTS)
        connection = sqlite3.connect(
            folder / FILE, isolation_level=None, check_same_thread=False, timeout=1
        )
        try:
            _begin(connection, folder)
        except BaseException:
            connection.close()
            raise
    except sqlite3.Error as error:
        lock.close()
        raise IsobitError(
            f"--state {folder}: {FILE} cannot be read: {brief(error, 200)}; give another folder, "
            "or the last copy of this one"
        ) from None
    except OSError as error:
        lock.close()
        raise IsobitError(f"--state {folder}: {reason_of(error)}") from None
    except BaseException:
        lock.close()
        raise
    return connection, lock


def _check_own(path: Path, directory: bool) -> None:
    """Raise IsobitError for a path that is not a file, or a folder, of this user. A path that does
    not exist passes."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return
    right = stat.S_ISDIR(status.st_mode) if directory else stat.S_ISREG(status.st_mode)
    if not right or status.st_uid != os.getuid() or (not directory and status.st_nlink != 1):
        noun = "folder" if directory else "file"
        raise IsobitError(f"--state {path.parent}: {path.name} is no {noun} of this server's own")


def _begin(connection: sqlite3.Connection, folder: Path) -> None:
    for pragma in (
        "trusted_schema=OFF",
        "cell_size_check=ON",
        "locking_mode=EXCLUSIVE",
        "journal_mode=WAL",
        "synchronous=FULL",
        "foreign_keys=ON",
        "secure_delete=OFF",
    ):
        connection.execute(f"PRAGMA {pragma}").fetchall()
    if not _schema(connection) and not _number(connection, "user_version"):
        connection.executescript(
            f"BEGIN IMMEDIATE; {_TABLES} {_SINCE_3} PRAGMA application_id={_APPLICATION}; "
            f"PRAGMA user_version={VERSION}; COMMIT;"
        )
    version = _number(connection, "user_version")
    if _number(connection, "application_id") != _APPLICATION:
        raise IsobitError(f"--state {folder}: {FILE} is no state of a server")
    if version == 3 and _schema(connection) == _expected(_TABLES):
        connection.executescript(f"BEGIN IMMEDIATE; {_SINCE_3} PRAGMA user_version=4; COMMIT;")
        version = 4
    if version != VERSION:
        raise IsobitError(
            f"--state {folder}: its version is {version}, and this isobit reads {VERSION}; give "
            "another folder, or the isobit that wrote it"
        )
    if _schema(connection) != _expected(_TABLES + _SINCE_3):
        raise IsobitError(f"--state {folder}: {FILE} has other tables than a server makes")
    (problem,) = connection.execute("PRAGMA integrity_check(1)").fetchone()
    if problem != "ok" or connection.execute("PRAGMA foreign_key_check").fetchone():
        raise IsobitError(f"--state {folder}: {FILE} is damaged: {brief(problem, 200)}")


def _schema(connection: sqlite3.Connection) -> list[tuple[str, ...]]:
    return connection.execute(
        "SELECT type, name, tbl_name, coalesce(sql, '') FROM sqlite_schema ORDER BY type, name"
    ).fetchall()


def _expected(statements: str) -> list[tuple[str, ...]]:
    """Return the schema of the tables that some statements make."""
    model = sqlite3.connect(":memory:")
    try:
        model.executescript(statements)
        return _schema(model)
    finally:
        model.close()


def _number(connection: sqlite3.Connection, pragma: str) -> int:
    (value,) = connection.execute(f"PRAGMA {pragma}").fetchone()
    return int(value)
