"""The ledger's file: SQLite in WAL mode, for many processes at once, safe against a kill at any moment.

What shapes it:

* Every operation opens the file, does its work in one transaction and closes it. Nothing is held between operations, so
  a process that forks, is killed or sleeps holds nothing up.
* Writers queue on a lock file beside the ledger; the system releases it when its holder dies. SQLite's own locks stay
  in force for other programs. A damaged file is set aside under the same lock, so no writer can be writing to it.
* A commit is on the disk (synchronous=FULL) before `write` returns.
* PORTABLE_LEDGER may name any file of the user's: what is no ledger is refused before anything is opened or made, and
  only a damaged ledger is set aside.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import sqlite3
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import TypeVar

from portable import config
from portable.errors import LedgerError

APPLICATION = 0x504F5254  # "PORT": SQLite's application_id of a ledger
ANOTHER_FILE = "set PORTABLE_LEDGER to a file that you can write"
ANOTHER_PATH = "set PORTABLE_LEDGER to another path, or remove the file"
SQLITE_HEADER = b"SQLite format 3\0"
HEADER_BYTES = 100
APPLICATION_AT = 68  # where the header keeps the application_id, in four bytes (https://sqlite.org/fileformat.html)
SUFFIXES = (".sqlite", ".sqlite3", ".db")  # by which a file whose header is lost still counts as a ledger

# Step n brings a file from version n to version n + 1, in one transaction for all steps. Steps are only ever appended.
SCHEMA: tuple[str, ...] = (
    """
    CREATE TABLE verdicts (
        sequence INTEGER PRIMARY KEY AUTOINCREMENT,
        id TEXT NOT NULL UNIQUE, op TEXT NOT NULL, workload TEXT NOT NULL, signature TEXT NOT NULL,
        backend TEXT NOT NULL, provider TEXT NOT NULL, outcome TEXT NOT NULL, reason TEXT NOT NULL,
        metric TEXT NOT NULL, "limit" REAL NOT NULL,
        median_s REAL, low_s REAL, high_s REAL, baseline_s REAL,
        evidence TEXT NOT NULL, fingerprint TEXT NOT NULL, kernel_digest TEXT NOT NULL, created REAL NOT NULL
    );
    CREATE INDEX verdicts_of ON verdicts (op, backend, signature);
    CREATE TABLE decisions (
        sequence INTEGER PRIMARY KEY AUTOINCREMENT,
        op TEXT NOT NULL, signature TEXT NOT NULL, backend TEXT NOT NULL, fingerprint TEXT NOT NULL,
        provider TEXT NOT NULL, -- '' where a rollback left no decision
        verdict TEXT REFERENCES verdicts (id), why TEXT NOT NULL, created REAL NOT NULL,
        previous INTEGER REFERENCES decisions (sequence) -- what a rollback restores
    );
    CREATE INDEX decisions_of ON decisions (op, backend, signature, fingerprint);
    CREATE INDEX decisions_by ON decisions (verdict);
    CREATE TABLE quarantines (
        sequence INTEGER PRIMARY KEY AUTOINCREMENT,
        op TEXT NOT NULL, provider TEXT NOT NULL, reason TEXT NOT NULL, created REAL NOT NULL, lifted REAL
    );
    """,
)

T = TypeVar("T")
Query = Callable[[sqlite3.Connection], T]


class _Damaged(sqlite3.DatabaseError):
    """SQLite's own check found the file damaged."""


class Storage:
    """One ledger file. ``read`` and ``write`` take a function of a connection and return what it returns.

    Args:
        path: the file; it and its folder are made by the first write.
        timeout_s: how long to wait for another process before giving up.
        set_aside: whether `read` may set a damaged file aside; else it is left as it is, and refused.
    """

    def __init__(self, path: Path, timeout_s: float, set_aside: bool = True) -> None:
        self.path = path
        self.timeout_s = timeout_s
        self.set_aside = set_aside
        self._sound: tuple[int, int] | None = None  # the file that was checked: (device, inode)

    def read(self, query: Query[T]) -> T:
        """What ``query`` finds. A ledger that does not exist is empty; a damaged one is set aside and is then empty.

        Raises:
            LedgerError: the file cannot be read, is locked, is no ledger, or belongs to a newer version; it is damaged,
                and not to be set aside.
        """
        try:
            self._refuse_another_file()
            try:
                return self._attempt(query)
            except sqlite3.DatabaseError as failure:
                if not _is_damage(failure):
                    raise
                if not self.set_aside:
                    raise LedgerError(
                        f"the ledger {self.path} is damaged ({failure}); it is left as it is",
                        remedy="the next program or `portable bench` that uses it keeps it under another name and "
                        "begins a new one; or restore the file",
                    ) from failure
                if not self._writable():
                    config.logger().warning("%s is damaged and read-only (%s): it counts as empty", self.path, failure)
                    return _closing_after(query, self._nothing())
            with self._locked():
                self._set_aside_if_damaged()
            return self._attempt(query)
        except (sqlite3.Error, OSError) as failure:
            raise self._error(failure, "read") from failure

    def write(self, change: Query[T]) -> T:
        """What ``change`` returns, once its one transaction is on the disk; if it raises, nothing has changed.

        Raises:
            LedgerError: the file or its folder is read-only, the disk is full, the file stays locked longer than
                ``timeout_s``, is no ledger, or belongs to a newer version.
        """
        try:
            self._refuse_another_file()
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if not self._writable():
                raise PermissionError(errno.EACCES, "no permission to write")
            with self._locked():
                try:
                    return self._transaction(change)
                except sqlite3.DatabaseError as failure:
                    if not _is_damage(failure):
                        raise
                self._set_aside_if_damaged()
                return self._transaction(change)
        except (sqlite3.Error, OSError) as failure:
            raise self._error(failure, "write") from failure

    # Opening.

    def _refuse_another_file(self) -> None:
        """Refuse a file that was never a ledger; nothing of it changes, and nothing is made beside it.

        Raises:
            LedgerError: another program's database; or a file that is no readable database, unless its name is one's.
        """
        header = self._header()
        if header and not header.startswith(SQLITE_HEADER) and self.path.suffix not in SUFFIXES:
            raise LedgerError(f"{self.path} is not a ledger; it is left as it is", remedy=ANOTHER_PATH)
        if header.startswith(SQLITE_HEADER) and len(header) == HEADER_BYTES and not _is_ledgers(header):
            self._refuse_another_program()

    def _header(self) -> bytes:
        """How the file begins; nothing where there is none, or where it cannot be read, which is SQLite's to report."""
        if self.path.is_file():
            with contextlib.suppress(FileNotFoundError, PermissionError), self.path.open("rb") as file:
                return file.read(HEADER_BYTES)
        return b""

    def _refuse_another_program(self) -> None:
        """The same for a database whose header is not a ledger's: it may be one that is still in SQLite's log alone."""
        # immutable: SQLite makes no file beside it; with a log it has to, and a reader moves nothing out of that
        options = "mode=ro" if _beside(self.path, "-wal").exists() else "mode=ro&immutable=1"
        try:
            with closing(self._connect(f"{self.path.as_uri()}?{options}")) as db:
                self._until_free(lambda: self._check_application(db))
        except sqlite3.DatabaseError as failure:
            # a new ledger looks damaged to a reader without locks while it is first moved out of its log
            if _is_damage(failure) and self.path.suffix not in SUFFIXES and not _is_ledgers(self._header()):
                raise self._of_another_program() from failure
            # what keeps a reader out keeps `read` and `write` out too, and they say what it is

    def _attempt(self, query: Query[T]) -> T:
        return _closing_after(query, self._open_for_reading() if self.path.exists() else self._nothing())

    def _transaction(self, change: Query[T]) -> T:
        with closing(self._connect(f"{self.path.as_uri()}?mode=rwc")) as db:
            self._check(db)
            if db.execute("PRAGMA journal_mode").fetchone()[0] != "wal":
                self._until_free(lambda: db.execute("PRAGMA journal_mode = WAL"))
            self._until_free(lambda: db.execute("BEGIN IMMEDIATE"))
            try:
                upgrade(db)
                result = change(db)
                db.execute("COMMIT")
            except BaseException:
                if db.in_transaction:
                    db.execute("ROLLBACK")
                raise
            return result

    def _open_for_reading(self) -> sqlite3.Connection:
        """A connection to the file at the present schema; to a copy in memory where the file cannot be upgraded."""
        writable = self._writable()
        try:
            db = self._connect(f"{self.path.as_uri()}?mode={'rw' if writable else 'ro'}")
            try:
                version = self._until_free(lambda: self._check(db))
            except BaseException:
                db.close()
                raise
        except sqlite3.OperationalError as failure:
            if not self.path.exists():
                return self._nothing()  # another process has just set it aside
            if writable or _code(failure) not in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY):
                raise
            return self._copy()  # WAL needs files beside the ledger, which cannot be made here
        if version == len(SCHEMA):
            return db
        db.close()
        if not writable:
            return self._copy()
        self.write(lambda _: None)
        return self._open_for_reading()

    def _copy(self) -> sqlite3.Connection:
        """The ledger in memory, with what a writer has left in its log, at the present schema."""
        memory = self._connect(":memory:")
        with tempfile.TemporaryDirectory(prefix="portable-ledger-") as folder:
            copy = Path(folder) / self.path.name
            for suffix in ("", "-wal"):
                source = _beside(self.path, suffix)
                if source.exists():
                    shutil.copyfile(source, _beside(copy, suffix))
            with closing(self._connect(f"{copy.as_uri()}?mode=rw")) as db:
                self._check(db)
                db.backup(memory)
        upgrade(memory)
        return memory

    def _nothing(self) -> sqlite3.Connection:
        memory = self._connect(":memory:")
        upgrade(memory)
        return memory

    def _connect(self, uri: str) -> sqlite3.Connection:
        db = sqlite3.connect(uri, uri=True, timeout=self.timeout_s, isolation_level=None)
        try:
            db.row_factory = sqlite3.Row
            db.execute("PRAGMA synchronous = FULL")
            db.execute("PRAGMA foreign_keys = ON")
        except BaseException:
            db.close()
            raise
        return db

    def _check(self, db: sqlite3.Connection) -> int:
        """The version of the file, once it is known to be sound and a ledger that this version of portable knows."""
        version = self._check_application(db)
        if version > len(SCHEMA):
            raise LedgerError(
                f"the ledger {self.path} is of version {version}; this portable knows versions up to {len(SCHEMA)}",
                remedy="upgrade portable, or set PORTABLE_LEDGER to another file; this one is left as it is",
            )
        about = self.path.stat()
        if self._sound != (about.st_dev, about.st_ino):
            findings = [row[0] for row in db.execute("PRAGMA quick_check(3)")]
            if findings != ["ok"]:
                raise _Damaged("; ".join(findings))
            self._sound = (about.st_dev, about.st_ino)
        return version

    def _check_application(self, db: sqlite3.Connection) -> int:
        """The version of the file, once it is known to be nobody else's."""
        version: int = db.execute("PRAGMA user_version").fetchone()[0]
        application = db.execute("PRAGMA application_id").fetchone()[0]
        if application != APPLICATION and (version or db.execute("SELECT 1 FROM sqlite_master").fetchone()):
            raise self._of_another_program()
        return version

    def _of_another_program(self) -> LedgerError:
        return LedgerError(f"{self.path} is the SQLite file of another program, not a ledger", remedy=ANOTHER_PATH)

    # Locks, permissions, damage.

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        lock = os.open(_beside(self.path, "-lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            self._until_free(lambda: fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB))
            yield
        finally:
            os.close(lock)

    def _until_free(self, attempt: Callable[[], T]) -> T:
        """Repeat ``attempt`` while another process holds what it needs, for at most ``timeout_s``."""
        deadline = time.monotonic() + self.timeout_s
        pause_s = 0.001
        while True:
            try:
                return attempt()
            except (BlockingIOError, sqlite3.OperationalError) as failure:
                if not _is_locked(failure) or time.monotonic() > deadline:
                    raise
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.05)

    def _writable(self) -> bool:
        folder = os.access(self.path.parent, os.W_OK | os.X_OK)
        return folder and (not self.path.exists() or os.access(self.path, os.W_OK))

    def _set_aside_if_damaged(self) -> None:
        """Rename the file if it is damaged still: another process may have done so already. Only under the lock."""
        self._sound = None
        if not self.path.exists():
            return
        try:
            with closing(self._connect(f"{self.path.as_uri()}?mode=rw")) as db:
                self._check(db)
            return
        except sqlite3.DatabaseError as failure:
            if not _is_damage(failure):
                raise
            reason = str(failure)
        aside = _free_name(self.path)
        for suffix in ("-wal", "-shm", ""):
            with contextlib.suppress(FileNotFoundError):
                os.rename(_beside(self.path, suffix), _beside(aside, suffix))
        config.logger().warning(
            "the ledger %s is damaged (%s): it is kept as %s, and a new one is begun", self.path, reason, aside
        )

    def _error(self, failure: Exception, verb: str) -> LedgerError:
        if _is_locked(failure):
            message = f"the ledger {self.path} stayed locked for {self.timeout_s:g} s: another process is writing to it"
            return LedgerError(message, remedy="try again; if it persists, find the holder with `fuser` on that file")
        if _code(failure) == sqlite3.SQLITE_FULL or getattr(failure, "errno", None) == errno.ENOSPC:
            return LedgerError(f"the disk of the ledger {self.path} is full", remedy="make room, then try again")
        read_only = _code(failure) == sqlite3.SQLITE_READONLY or isinstance(failure, PermissionError)
        if verb == "write" and (read_only or getattr(failure, "errno", None) == errno.EROFS):
            folder_first = not os.access(_existing(self.path.parent), os.W_OK | os.X_OK)
            what = f"its folder {self.path.parent}" if folder_first else "the file"
            return LedgerError(f"the ledger {self.path} cannot be written: {what} is read-only", remedy=ANOTHER_FILE)
        name = getattr(failure, "sqlite_errorname", type(failure).__name__)
        return LedgerError(f"cannot {verb} the ledger {self.path}: {name}: {failure}", remedy=ANOTHER_FILE)


def _closing_after(query: Query[T], db: sqlite3.Connection) -> T:
    """What ``query`` returns from one consistent state of ``db``, which is then closed."""
    with closing(db):
        db.execute("BEGIN")
        return query(db)


def upgrade(db: sqlite3.Connection) -> None:
    """Bring an open ledger to the present schema, within the transaction that is open or one of its own."""
    version = db.execute("PRAGMA user_version").fetchone()[0]
    if version == len(SCHEMA):
        return
    with contextlib.nullcontext() if db.in_transaction else _own_transaction(db):
        for step in SCHEMA[version:]:
            for statement in _statements(step):
                db.execute(statement)
        db.execute(f"PRAGMA application_id = {APPLICATION}")
        db.execute(f"PRAGMA user_version = {len(SCHEMA)}")


@contextlib.contextmanager
def _own_transaction(db: sqlite3.Connection) -> Iterator[None]:
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        db.execute("ROLLBACK")
        raise
    db.execute("COMMIT")


def _statements(script: str) -> Iterator[str]:
    """The statements of a script: `executescript` would commit the transaction that they belong to."""
    statement = ""
    for piece in script.split(";"):
        statement += piece + ";"
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""


def _is_ledgers(header: bytes) -> bool:
    return header[APPLICATION_AT : APPLICATION_AT + 4] == APPLICATION.to_bytes(4, "big")


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


def _existing(folder: Path) -> Path:
    return next((p for p in (folder, *folder.parents) if p.exists()), folder)


def _free_name(path: Path) -> Path:
    """A name for a damaged file that no file has: with the time, and a number where that is taken."""
    stem = _beside(path, time.strftime(".damaged-%Y%m%dT%H%M%SZ", time.gmtime()))
    names = (stem if n == 0 else _beside(stem, f"-{n}") for n in range(10_000))
    return next(name for name in names if not name.exists())


def _code(failure: BaseException) -> int:
    """SQLite's primary result code; 0 for other errors."""
    return getattr(failure, "sqlite_errorcode", 0) & 0xFF


def _is_locked(failure: BaseException) -> bool:
    return isinstance(failure, BlockingIOError) or _code(failure) in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


def _is_damage(failure: BaseException) -> bool:
    return isinstance(failure, _Damaged) or _code(failure) in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
