"""Sealed blocks in one file, by their chain digest. Knows bytes only; free of torch.

The file is an LMDB database: memory-mapped, and a copy-on-write tree, so that whatever moment a process or
a machine ends at, the last transaction that was on the disk is what the next one finds. A record is believed
only if its checksum says so.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import struct
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import lmdb

from octavo.cache.chain import TOKEN_BYTES, compact_key
from octavo.cache.disk_index import DiskIndex, IndexEntry

MAGIC, VERSION = b"OCTB", 1
#: magic, version, SHA-256 of the key and all that follows it, parent, bytes of tokens, bytes of rows.
_HEADER = struct.Struct(">4sI32s32sII")
_CHECKED_FROM = struct.calcsize(">4sI32s")
#: What an entry of a compact form ends with.
COMPACT = b"c"
#: An entry of the index on disk: parent, origin, last used, bytes in the file, tokens.
_ENTRY = struct.Struct(">32s8sQII")
DIGEST_BYTES = 32
_BLOCKS, _ENTRIES = b"blocks", b"entries"
#: Bytes that LMDB's trees take for a record beside its own pages, generously.
TREE_BYTES = 512
#: What one transaction writes at most, unless one record alone is more.
BATCH_BYTES = 32 * 1024**2
#: The least that a store may be bounded to.
MIN_BYTES = 1024**2


@dataclass(frozen=True, slots=True)
class Record:
    """A sealed block. ``tokens`` are its packed token ids, ``rows`` its K, V and planes as they lie in
    memory; ``num_tokens`` counts from the chain's start to the block's end. A ``compact`` form goes by
    another digest, and follows compact forms only."""

    digest: bytes
    parent: bytes
    tokens: bytes
    num_tokens: int
    rows: bytes | memoryview
    compact: bool = False

    @property
    def is_first(self) -> bool:
        """Whether the chain begins with it."""
        return self.num_tokens * TOKEN_BYTES == len(self.tokens)


class DamagedRecordError(Exception):
    """A record is not what was stored under its digest. The text says how it is seen."""


def encode(record: Record) -> bytes:
    """The value that is stored under ``record.digest``."""
    rows = memoryview(record.rows)
    lengths = struct.pack(">II", len(record.tokens), rows.nbytes)
    checksum = hashlib.sha256(record.digest + record.parent + lengths + record.tokens)
    checksum.update(rows)
    head = MAGIC + VERSION.to_bytes(4, "big") + checksum.digest() + record.parent + lengths
    return b"".join((head, record.tokens, rows))


def decode(digest: bytes, value: memoryview) -> tuple[bytes, bytes, memoryview]:
    """(parent, tokens, rows) of a stored value; ``rows`` is a view of it. Raises DamagedRecordError."""
    if len(value) < _HEADER.size:
        raise DamagedRecordError("it is too short")
    magic, version, checksum, parent, num_tokens, num_rows = _HEADER.unpack_from(value)
    if (magic, version) != (MAGIC, VERSION):
        raise DamagedRecordError("it is no record of this version")
    if len(value) != _HEADER.size + num_tokens + num_rows:
        raise DamagedRecordError("its length is not what it says")
    actual = hashlib.sha256(digest)
    actual.update(value[_CHECKED_FROM:])
    if actual.digest() != checksum:
        raise DamagedRecordError("its checksum does not fit")
    start = _HEADER.size
    return parent, bytes(value[start : start + num_tokens]), value[start + num_tokens :]


class DiskStore:
    """One folder, one process: the folder is locked while the store is open.

    ``max_bytes`` bounds the file. Reading and committing may be done by one thread each.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        """Open or make the store. Raises ValueError, in one sentence, when that cannot be."""
        if max_bytes < MIN_BYTES:
            raise ValueError(f"a store on disk needs at least {MIN_BYTES} bytes, got {max_bytes}")
        self.folder = folder
        self.max_bytes = max_bytes
        self.batch_bytes = min(BATCH_BYTES, max_bytes // 16)
        self.num_evictions = 0
        self._clock = 0
        #: Keys of the index's entries that were unreadable when the store was opened.
        self.unreadable: list[bytes] = []
        self._lock = _lock(folder)
        try:
            self._open()
            if self.file_bytes > max_bytes:
                self.prune(self.room)
        except BaseException:
            self._lock.close()
            raise

    def _open(self) -> None:
        self._env = _open_environment(self.folder, self.max_bytes)
        try:
            self._blocks, self._entries = _databases(self._env, self.folder)
            self.index = self._read_index()
        except BaseException:
            self._env.close()
            raise

    def close(self) -> None:
        """Give the folder free; a no-op when that was done."""
        self._env.close()
        self._lock.close()

    @property
    def file_bytes(self) -> int:
        """Bytes of the file on disk."""
        return (self.folder / "data.mdb").stat().st_size

    @property
    def room(self) -> int:
        """Bytes that records may take together: pages that a transaction frees can be used by later ones
        only, and those of a reader's snapshot later still."""
        return self.max_bytes - 3 * self.batch_bytes - MIN_BYTES // 8

    def _read_index(self) -> DiskIndex:
        index = DiskIndex()
        self.unreadable = []
        with self._env.begin(db=self._entries) as transaction:
            for digest, value in transaction.cursor():
                fields, mark = value[: _ENTRY.size], value[_ENTRY.size :]
                if len(digest) != DIGEST_BYTES or len(fields) != _ENTRY.size or mark not in (b"", COMPACT):
                    self.unreadable.append(digest)
                    continue
                parent, origin, last_used, size, num_tokens = _ENTRY.unpack(fields)
                entry = IndexEntry(parent, size, num_tokens, last_used, origin, mark == COMPACT)
                index.add(digest, entry)
                self._clock = max(self._clock, last_used)
        return index

    # ---- reading

    def snapshot(self) -> lmdb.Transaction[memoryview]:
        """A state to read from; what was read stays as it is until the snapshot is aborted."""
        snapshot: lmdb.Transaction[memoryview] = self._env.begin(db=self._blocks, buffers=True)
        return snapshot

    def read(
        self, snapshot: lmdb.Transaction[memoryview], digest: bytes
    ) -> tuple[bytes, bytes, memoryview] | None:
        """(parent, tokens, rows) of a record, ``rows`` a view that lives as long as the snapshot; None where
        there is none. Raises DamagedRecordError."""
        value = snapshot.get(digest)
        return None if value is None else decode(digest, value)

    def verify(self) -> Iterator[tuple[bytes, str]]:
        """Every digest whose record is damaged or missing, and how that is seen; reads the whole file."""
        snapshot = self.snapshot()
        try:
            for digest, entry in self.index.entries.items():
                try:
                    found = self.read(snapshot, digest)
                except DamagedRecordError as error:
                    yield digest, str(error)
                    continue
                if found is None:
                    yield digest, "it is missing"
                elif found[0] != entry.parent:
                    yield digest, "it follows another block than the index says"
        finally:
            snapshot.abort()

    # ---- writing

    def commit(
        self,
        puts: Iterable[Record],
        touches: Iterable[bytes] = (),
        removals: Iterable[bytes] = (),
        origin: bytes = bytes(8),
    ) -> int:
        """One transaction: strike out, save, and give up what no longer has room. All or nothing.

        No digest is both in ``puts`` and in ``removals``. Returns how many of ``puts`` are in the store
        afterwards; one whose chain has a gap before it is not, since nobody would ever come to it. Raises
        lmdb.Error or OSError when the disk does not take it; then the store is as before.
        """
        # A clock that stands still or goes back must not put the new before the old.
        now = self._clock = max(self._clock + 1, time.time_ns() // 1_000_000)
        values = {record.digest: (record, encode(record)) for record in puts}
        try:
            for part in (8, 4, 2, 1):
                try:
                    return self._write(values, list(touches), list(removals), origin, now)
                except lmdb.MapFullError:
                    # Free pages that do not lie side by side hold no record: more room. What a transaction
                    # frees can be used by the one after the next.
                    self.index = self._read_index()
                    self.shrink(self.index.num_bytes - self.index.num_bytes // part)
                    self.shrink(self.index.num_bytes - 1)
            return self._write(values, list(touches), list(removals), origin, now)
        except BaseException:
            self.index = self._read_index()
            raise

    def _write(
        self,
        values: dict[bytes, tuple[Record, bytes]],
        touches: list[bytes],
        removals: list[bytes],
        origin: bytes,
        now: int,
    ) -> int:
        index = self.index
        with self._env.begin(write=True) as transaction:
            # What is struck out may be what another record follows, and then its compact form is there.
            for digest, (record, value) in sorted(values.items(), key=lambda item: not item[1][0].compact):
                before = {record.parent, record.parent if record.compact else compact_key(record.parent)}
                if not record.is_first and not before & index.entries.keys():
                    continue
                size = _file_bytes(len(value))
                entry = IndexEntry(record.parent, size, record.num_tokens, now, origin, record.compact)
                index.add(digest, entry)
            for digest in removals:
                self._delete(transaction, digest)
            for digest in touches:
                if digest in index.entries:
                    index.touch(digest, now)
            self._evict(transaction, self.room)
            for digest, (_, value) in values.items():
                if digest in index.entries:
                    transaction.put(digest, value, db=self._blocks)
            for digest in (*values, *touches):
                booked = index.entries.get(digest)
                if booked is not None:
                    transaction.put(digest, _pack(booked), db=self._entries)
        return len(values.keys() & index.entries.keys())

    def clear(self) -> None:
        """Give up everything; the file keeps its size. Raises lmdb.Error or OSError."""
        with self._env.begin(write=True) as transaction:
            transaction.drop(self._blocks, delete=False)
            transaction.drop(self._entries, delete=False)
        self.index = DiskIndex()

    def shrink(self, num_bytes: int) -> None:
        """Give up blocks until the rest takes no more than ``num_bytes``."""
        with self._env.begin(write=True) as transaction:
            self._evict(transaction, num_bytes)

    def _evict(self, transaction: lmdb.Transaction[bytes], num_bytes: int) -> None:
        while self.index.num_bytes > num_bytes and (digest := self.index.first()) is not None:
            parent = self.index.entries[digest].parent
            self._delete(transaction, digest)
            self.num_evictions += 1
            if parent in self.index.entries:  # it may have inherited a time of use
                transaction.put(parent, _pack(self.index.entries[parent]), db=self._entries)

    def _delete(self, transaction: lmdb.Transaction[bytes], digest: bytes) -> None:
        if digest in self.index.entries:
            self.index.remove(digest)
        transaction.delete(digest, db=self._blocks)
        transaction.delete(digest, db=self._entries)

    def prune(self, max_bytes: int, unused_since: int = 0, removals: Iterable[bytes] = ()) -> None:
        """Give up ``removals``, what was last used before ``unused_since`` (milliseconds since 1970) and then
        the least recently used down to ``max_bytes``, and make the file as small as what is left.

        Needs as much free space beside it as what is left takes. Raises OSError or lmdb.Error.
        """
        with self._env.begin(write=True) as transaction:
            for digest in removals:
                self._delete(transaction, digest)
            while (oldest := self.index.first()) is not None:
                if self.index.entries[oldest].last_used >= unused_since:
                    break
                self._delete(transaction, oldest)
                self.num_evictions += 1
            self._evict(transaction, max_bytes)
        fresh = self.folder / "compact"
        fresh.mkdir(exist_ok=True)
        copy = fresh / "data.mdb"
        copy.unlink(missing_ok=True)
        try:
            self._env.copy(str(fresh), compact=True)
            with copy.open("rb") as file:
                os.fsync(file.fileno())
            self._env.close()
            copy.replace(self.folder / "data.mdb")
        finally:
            copy.unlink(missing_ok=True)
            fresh.rmdir()
        self._open()


def _pack(entry: IndexEntry) -> bytes:
    fields = _ENTRY.pack(entry.parent, entry.origin, entry.last_used, entry.size, entry.num_tokens)
    return fields + COMPACT if entry.compact else fields


def _file_bytes(length: int) -> int:
    """What a value of ``length`` bytes takes in the file: whole pages of its own."""
    page = os.sysconf("SC_PAGE_SIZE")
    return -(-(length + 16) // page) * page + TREE_BYTES


def record_bytes(token_bytes: int, row_bytes: int) -> int:
    """What a record takes in the file."""
    return _file_bytes(_HEADER.size + token_bytes + row_bytes)


def _lock(folder: Path) -> IO[str]:
    path = folder / "owner"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # it holds what people wrote
        file = path.open("a+", encoding="utf-8")
    except OSError as error:
        raise ValueError(f"the cache folder {folder} cannot be written: {error.strerror}") from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.seek(0)
        owner = file.read().strip() or "unknown"
        file.close()
        raise ValueError(
            f"the cache folder {folder} is in use by process {owner}: one process at a time may have it"
        ) from None
    file.truncate(0)
    file.write(str(os.getpid()))
    file.flush()
    return file


def _open_environment(folder: Path, max_bytes: int) -> lmdb.Environment:
    page = os.sysconf("SC_PAGE_SIZE")
    file = folder / "data.mdb"
    if file.is_file() and file.stat().st_size > max_bytes:
        max_bytes += file.stat().st_size  # giving blocks up takes pages too; then the file is made smaller
    try:
        # metasync off: a machine that fails may lose the last transaction, never more and never half of one.
        environment = lmdb.open(
            str(folder), map_size=max_bytes // page * page, max_dbs=2, metasync=False, mode=0o600
        )
    except (lmdb.Error, OSError) as error:
        raise ValueError(f"the cache in {folder} cannot be opened: {error}") from None
    # Past the end of a file that was cut short, reading would end the process.
    wanted = (environment.info()["last_pgno"] + 1) * environment.stat()["psize"]
    actual = file.stat().st_size
    if actual < wanted and environment.info()["last_txnid"] > 0:
        environment.close()
        raise ValueError(
            f"the cache in {folder} was cut short, {actual} bytes where {wanted} should be: remove the folder"
        )
    return environment


def _databases(environment: lmdb.Environment, folder: Path) -> tuple[Any, Any]:
    with environment.begin() as transaction:
        names = {bytes(name) for name, _ in transaction.cursor()}
    if names - {_BLOCKS, _ENTRIES}:
        raise ValueError(f"the folder {folder} holds a database of something else: choose another one")
    try:
        return environment.open_db(_BLOCKS), environment.open_db(_ENTRIES)
    except (lmdb.Error, OSError) as error:
        raise ValueError(f"the cache in {folder} cannot be opened: {error}") from None
