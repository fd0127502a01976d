"""The prefix cache's second tier: sealed blocks on disk, saved by a thread of its own. Free of torch.

Two sides meet at a bounded queue. The engine's thread *notes* the blocks that a step sealed, hands in
copies of their rows, and reads what an earlier process left. The writer's thread commits what is queued, one
transaction a batch. Nothing here ever waits for the disk to take a block: one that finds no room in the
queue is noted again after the next step, and not saved when its request ends before there is room.
"""

from __future__ import annotations

import atexit
import logging
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import lmdb

from octavo.cache.chain import NO_BLOCK, TOKEN_BYTES, Chain, compact_key, summary_key
from octavo.cache.disk_store import DamagedRecordError, DiskStore, Record
from octavo.kernels.history_layout import last_block

log = logging.getLogger("octavo")

#: Rows that may wait in memory for the disk.
QUEUE_BYTES = 128 * 1024**2


@dataclass(frozen=True, slots=True)
class SealedBlock:
    """A block whose rows are to be saved, as long as ``block`` holds them, a compact block if ``compact``."""

    digest: bytes
    parent: bytes
    tokens: bytes
    num_tokens: int
    block: int
    compact: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskStats:
    """Where the store stands: ``blocks`` in it and the bytes of its file; the rest only rises.

    ``unsaved`` are blocks of requests that ended before the queue had room, and blocks that the disk did not
    take or that had no room in the store;
    ``damaged`` are records that were not what they say, and were computed again.
    """

    blocks: int
    file_bytes: int
    loaded: int
    saved: int
    unsaved: int
    damaged: int
    evicted: int


@dataclass(frozen=True, slots=True)
class _Put:
    record: Record


@dataclass(frozen=True, slots=True)
class _Touch:
    digest: bytes


@dataclass(frozen=True, slots=True)
class _Forget:
    digest: bytes


@dataclass(frozen=True, slots=True)
class _Clear:
    pass


_Item = _Put | _Touch | _Forget | _Clear


def _digest_of(item: _Put | _Forget) -> bytes:
    return item.record.digest if isinstance(item, _Put) else item.digest


class DiskCache:
    """What the scheduler and the engine know of the store.

    ``block_size`` is in tokens; ``row_bytes`` is what one block's rows take; ``origin``, 8 bytes, names the
    engine's fingerprint in listings. With ``window_blocks`` there are compact forms, of ``compact_bytes``
    each, and a block that so many others follow is kept in that form alone, unless a prefix is likely to end
    near it. All but the writer's loop is for the engine's thread.
    """

    def __init__(
        self,
        store: DiskStore,
        *,
        block_size: int,
        row_bytes: int,
        compact_bytes: int = 0,
        window_blocks: int | None = None,
        origin: bytes = bytes(8),
        queue_bytes: int = QUEUE_BYTES,
    ) -> None:
        self._store = store
        self._token_bytes = block_size * TOKEN_BYTES
        self._block_size = block_size
        self._row_bytes, self._compact_bytes = row_bytes, compact_bytes
        self._window = window_blocks
        self._origin = origin
        self._max_queued = max(1, queue_bytes // row_bytes)
        self._sealed: list[SealedBlock] = []
        self._struck: list[bytes] = []
        self._snapshot: lmdb.Transaction[memoryview] | None = None
        self._loaded = self._damaged = self._left = 0
        self._saved = self._refused = 0  # the writer's

        self._wake = threading.Condition()
        self._queue: deque[_Item] = deque()
        #: Digests that wait for their transaction: to be saved, and to be struck out.
        self._pending: set[bytes] = set()
        self._forgotten: set[bytes] = set()
        #: What the writer commits right now.
        self._batch: list[_Item] = []
        self._stopping = self._failing = False
        if store.unreadable:
            log.warning("%s: %d entries of the index are unreadable", store.folder, len(store.unreadable))
        self._thread = threading.Thread(target=self._run, name="octavo-disk", daemon=True)
        self._thread.start()
        # A script that just ends has its last blocks saved all the same.
        atexit.register(self.close)

    def holds(self, digest: bytes) -> bool:
        """Whether a block is saved or is about to be."""
        if digest in self._pending:
            return True
        return digest in self._store.index.entries and digest not in self._forgotten

    # ---- reading

    def fetch(
        self, root: bytes, digests: Sequence[bytes], packed: bytes | bytearray, index: int, *, compact: bool
    ) -> memoryview | None:
        """Rows of block ``index`` of a chain, as stored or ``compact``, verified; None if they are not saved.

        ``digests`` are those of the chain's blocks, ``root`` that of its beginning and ``packed`` its tokens.
        The view lives until :meth:`end_reading`. What is damaged is not held any more.
        """
        digest, parent = digests[index], digests[index - 1] if index else root
        key, parent = (compact_key(digest), compact_key(parent)) if compact else (digest, parent)
        if not self.can_fetch(digest, compact=compact):
            return None
        tokens = bytes(packed[index * self._token_bytes : (index + 1) * self._token_bytes])
        rows = self._read(key, parent, tokens, self._compact_bytes if compact else self._row_bytes)
        self._loaded += rows is not None
        return rows

    def fetch_summary(
        self, digests: Sequence[bytes], packed: bytes | bytearray, level: int, unit: int
    ) -> memoryview | None:
        """As :meth:`fetch`, a summary of a chain's blocks."""
        index = last_block(level, unit)
        if not self.can_fetch_summary(digests, level, unit):
            return None
        tokens = bytes(packed[index * self._token_bytes : (index + 1) * self._token_bytes])
        key, parent = summary_key(digests[index], level), compact_key(digests[index])
        rows = self._read(key, parent, tokens, self._compact_bytes)
        self._loaded += rows is not None
        return rows

    def can_fetch(self, digest: bytes, *, compact: bool) -> bool:
        """Whether the block ``digest`` is saved in this form, as far as the index tells."""
        return self._is_saved(compact_key(digest) if compact else digest)

    def can_fetch_summary(self, digests: Sequence[bytes], level: int, unit: int) -> bool:
        """As :meth:`can_fetch`, a summary of the chain's blocks."""
        return self._is_saved(summary_key(digests[last_block(level, unit)], level))

    def _is_saved(self, key: bytes) -> bool:
        return key in self._store.index.entries and key not in self._forgotten

    def _read(self, digest: bytes, parent: bytes, tokens: bytes, num_bytes: int) -> memoryview | None:
        if self._snapshot is None:
            self._snapshot = self._store.snapshot()
        try:
            record = self._store.read(self._snapshot, digest)
            if record is None:  # committed after the snapshot was taken, or given up before it
                return None
            if record[:2] != (parent, tokens):
                raise DamagedRecordError("it holds other tokens")
            if len(record[2]) != num_bytes:
                raise DamagedRecordError(f"it holds {len(record[2])} bytes of rows, not {num_bytes}")
        except (DamagedRecordError, lmdb.Error) as error:
            self._damaged += 1
            log.warning(
                "%s: block %s is damaged: %s; it is computed again",
                self._store.folder,
                digest.hex()[:16],
                error,
            )
            self._forgotten.add(digest)
            self._queue_up(_Forget(digest))
            return None
        return record[2]

    def end_reading(self) -> None:
        """The rows that were fetched have been copied, or are not wanted any more."""
        snapshot, self._snapshot = self._snapshot, None
        if snapshot is not None:
            snapshot.abort()

    # ---- saving

    def note(self, chain: Chain, root: bytes) -> None:
        """Note the blocks that stand for a chain and are not saved yet, in order, as far as there is room."""
        compact = self._note_form(
            chain, root, range(chain.num_saved_compact, chain.num_compact), compact=True
        )
        chain.num_saved_compact = max(chain.num_saved_compact, compact)
        stored = self._note_form(chain, root, range(chain.num_saved, len(chain.path)), compact=False)
        chain.num_saved = max(chain.num_saved, stored)
        if self._window is not None:
            # The chain's own end guards the window before it and one block more.
            self._strike(chain, min(chain.num_saved_compact, chain.num_saved - self._window - 1))

    def _note_form(self, chain: Chain, root: bytes, missing: range, *, compact: bool) -> int:
        """Note blocks in one form; returns how many of the chain's are saved in it now, or 0."""
        used, end = None, 0
        for index in missing:
            node, digest = chain.path[index], chain.digests[index]
            key = compact_key(digest) if compact else digest
            block = node.compact if compact else node.block
            if self.holds(key):
                used = key
            elif len(self._pending) + len(self._sealed) >= self._max_queued:
                break
            elif block != NO_BLOCK:
                parent = chain.digests[index - 1] if index else root
                parent = compact_key(parent) if compact else parent
                num_tokens = (index + 1) * self._block_size
                self._sealed.append(SealedBlock(key, parent, node.tokens, num_tokens, block, compact))
            end = index + 1
        if used is not None:
            self._queue_up(_Touch(used))
        return end

    def note_summaries(self, chain: Chain, summaries: Mapping[tuple[int, int], int]) -> None:
        """Note the summaries, (level, unit) -> compact block, that the chain reads and are not saved yet."""
        for (level, unit), block in summaries.items():
            index = last_block(level, unit)
            if index >= len(chain.path):
                continue
            key = summary_key(chain.digests[index], level)
            if self.holds(key):
                continue
            if len(self._pending) + len(self._sealed) >= self._max_queued:
                return
            node, parent = chain.path[index], compact_key(chain.digests[index])
            num_tokens = (index + 1) * self._block_size
            self._sealed.append(SealedBlock(key, parent, node.tokens, num_tokens, block, compact=True))
        chain.num_saved_summarised = chain.num_summarised

    def _strike(self, chain: Chain, end: int) -> None:
        """What is saved in compact form and was left by the window is not kept as stored any more, where no
        prefix is likely to end near it: it is struck out after what was noted is saved."""
        for index in range(max(chain.num_struck, chain.num_compact_at_start), end):
            digest = chain.digests[index]
            if chain.path[index].guards == 0 and self.holds(digest):
                self._struck.append(digest)
            chain.num_struck = index + 1

    def leave(self, chain: Chain) -> None:
        """A request gives up its chain: what found no room in the queue is not saved."""
        self._left += len(chain.path) - chain.num_saved
        chain.num_saved = chain.num_saved_compact = chain.num_struck = chain.num_saved_summarised = 0

    def take_sealed(self) -> list[SealedBlock]:
        """What was noted since the last call; to be handed in before a block of them is given out again."""
        sealed, self._sealed = self._sealed, []
        return sealed

    def put(self, sealed: SealedBlock, rows: bytes | memoryview) -> None:
        """Queue a block for saving; ``rows`` is a copy of its own."""
        record = Record(sealed.digest, sealed.parent, sealed.tokens, sealed.num_tokens, rows, sealed.compact)
        self._pending.add(sealed.digest)
        self._queue_up(_Put(record))

    def strike_out(self) -> None:
        """Queue what is not to be kept any more, after all that was handed in."""
        for digest in self._struck:
            self._pending.discard(digest)
            self._forgotten.add(digest)
            self._queue_up(_Forget(digest))
        self._struck = []

    def start_over(self) -> None:
        """Forget what was noted, after a step that was cut short anywhere; what is queued will be saved."""
        self._sealed, self._struck = [], []
        self.end_reading()
        with self._wake:
            puts = [item for item in (*self._batch, *self._queue) if isinstance(item, _Put)]
            self._pending = {item.record.digest for item in puts} - self._forgotten

    def _queue_up(self, item: _Item) -> None:
        with self._wake:
            self._queue.append(item)
            self._wake.notify_all()

    # ---- the writer's thread

    def _run(self) -> None:
        while True:
            with self._wake:
                while not self._queue and not self._stopping:
                    self._wake.wait()
                if not self._queue:
                    return
                self._batch = self._next_batch()
            self._commit(self._batch)
            with self._wake:
                self._pending.difference_update(
                    item.record.digest for item in self._batch if isinstance(item, _Put)
                )
                self._forgotten.difference_update(
                    item.digest for item in self._batch if isinstance(item, _Forget)
                )
                self._batch = []
                self._wake.notify_all()

    def _next_batch(self) -> list[_Item]:
        batch: list[_Item] = []
        size = 0
        while self._queue and (not batch or size < self._store.batch_bytes):
            item = self._queue.popleft()
            size += self._row_bytes if isinstance(item, _Put) else 0
            batch.append(item)
        return batch

    def _commit(self, batch: Sequence[_Item]) -> None:
        # Of a block that comes up twice the last word counts.
        last = {_digest_of(item): item for item in batch if isinstance(item, _Put | _Forget)}
        records = [item.record for item in last.values() if isinstance(item, _Put)]
        touches = [item.digest for item in batch if isinstance(item, _Touch)]
        removals = [item.digest for item in last.values() if isinstance(item, _Forget)]
        try:
            if any(
                isinstance(item, _Clear) for item in batch
            ):  # it comes first: what was before it is dropped
                self._store.clear()
            saved = self._store.commit(records, touches, removals, self._origin)
        except (lmdb.Error, OSError) as error:
            self._refused += len(records)
            if not self._failing:
                log.warning("%s does not take more blocks: %s; serving goes on", self._store.folder, error)
            self._failing = True
        else:
            self._saved += saved
            self._refused += len(records) - saved
            self._failing = self._failing and not saved

    # ---- looking in, and the end

    def flush(self) -> None:
        """Wait until all that was queued is committed."""
        with self._wake:
            while (self._queue or self._batch) and self._thread.is_alive():
                self._wake.wait(0.1)

    def clear(self) -> None:
        """Forget everything, here and on disk, and wait until it is done."""
        self._sealed = []
        with self._wake:
            self._queue.clear()
            self._pending.clear()
            self._queue.append(_Clear())
            self._wake.notify_all()
        self.flush()
        self._forgotten.clear()

    def close(self) -> None:
        """Save what is queued and give the folder free; a no-op when that was done."""
        with self._wake:
            if self._stopping:
                return
            self._stopping = True
            self._wake.notify_all()
        self._thread.join()
        self.end_reading()
        self._store.close()
        atexit.unregister(self.close)

    @property
    def stats(self) -> DiskStats:
        return DiskStats(
            blocks=len(self._store.index.entries),
            file_bytes=self._store.file_bytes,
            loaded=self._loaded,
            saved=self._saved,
            unsaved=self._left + self._refused,
            damaged=self._damaged,
            evicted=self._store.num_evictions,
        )
