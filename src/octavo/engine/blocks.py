"""The blocks of requests: the pools, the requests' tables, what the prefix cache keeps. Free of torch."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from octavo.cache.block_pool import BlockPool
from octavo.cache.chain import NO_BLOCK, Match, num_with_compact
from octavo.cache.prefix_cache import Evicted, PrefixCache
from octavo.engine.disk_prefix import LoadedRows
from octavo.engine.step import BlockCopy, BlockLoad
from octavo.engine.waiting import Entry
from octavo.request import Request, empty_table


class PoolShape(NamedTuple):
    """``num_blocks`` as stored. With ``window``, in tokens, a query at position p reads the blocks that lie
    wholly before p - window in compact form, from ``num_compact`` of them."""

    block_size: int
    num_blocks: int
    num_compact: int = 0
    window: int | None = None

    @property
    def window_blocks(self) -> int | None:
        return None if self.window is None else self.window // self.block_size

    @property
    def capacity(self) -> int:
        """Tokens of the longest sequence that can be computed."""
        if self.window is None or self.num_blocks * self.block_size <= self.window + self.block_size:
            return self.num_blocks * self.block_size
        return (self.num_compact + 1) * self.block_size + self.window

    def check(self) -> None:
        """Raises ValueError, in one sentence, for numbers that cannot be."""
        if self.window is None:
            return
        if self.window < self.block_size or self.window % self.block_size:
            raise ValueError(
                f"history_window must be a multiple of the block size {self.block_size}, got {self.window}"
            )
        if self.num_compact < 1:
            raise ValueError(f"num_compact_blocks must be at least 1, got {self.num_compact}")


class Room(NamedTuple):
    """Numbers of blocks, as stored and compact."""

    stored: int
    compact: int

    def plus(self, other: Room) -> Room:
        return Room(self.stored + other.stored, self.compact + other.compact)

    def within(self, other: Room) -> bool:
        return self.stored <= other.stored and self.compact <= other.compact


class Blocks:
    """Gives blocks to requests and takes them back.

    A request's ``block_table`` has its blocks as stored, ``NO_BLOCK`` where they are not read so any more,
    and its ``compact_table`` the compact forms of the first of them. A step that is the first to read a block
    in compact form makes that form (:meth:`compactions`); after it the request gives up the stored one.
    """

    def __init__(
        self, shape: PoolShape, step_tokens: int, new_cache: Callable[[int | None], PrefixCache]
    ) -> None:
        shape.check()
        self.shape = shape
        self._new_cache = new_cache
        self._size = shape.block_size
        #: Blocks as stored that one request has at most, in a step that computes ``step_tokens`` of it.
        self._peak = shape.num_blocks
        if shape.window_blocks is not None:
            self._peak = min(self._peak, shape.window_blocks + step_tokens // self._size + 3)
        self._forget_all(new_cache(shape.window_blocks))

    def _forget_all(self, cache: PrefixCache) -> None:
        self.stored = BlockPool(self.shape.num_blocks)
        self.compact = BlockPool(max(1, self.shape.num_compact))
        self.cache = cache

    def start_over(self) -> None:
        """Forget all tables and all that is cached."""
        cache = self._new_cache(self.shape.window_blocks)
        cache.num_evictions = self.cache.num_evictions
        self._forget_all(cache)

    def num_compact(self, position: int) -> int:
        """Blocks that a query at ``position`` reads in compact form."""
        if self.shape.window is None:
            return 0
        return max(0, (position - self.shape.window) // self._size)

    # ---- taking

    def cover(self, entry: Entry, end: int) -> int:
        """Take blocks so that tokens before ``end`` can be computed; returns how far they can."""
        table, compact = entry.request.block_table, entry.request.compact_table
        while len(table) * self._size < end:
            block = self.take()
            if block is None:
                end = len(table) * self._size
                break
            table.append(block)
        if self.shape.window is None:
            return end
        while len(compact) < self.num_compact(end - 1):
            block = self._cached_compact(entry, len(compact))
            if block != NO_BLOCK:
                self.compact.share(block)
            elif (block := self._take_compact()) == NO_BLOCK:
                return min(end, (len(compact) + 1) * self._size + self.shape.window)
            compact.append(block)
        return end

    def take(self) -> int | None:
        """A block as stored, of its own, or None when all are in use."""
        while self.stored.num_free == 0:
            evicted = self.cache.evict()
            if evicted is None:
                return None
            self._reclaim(evicted)
        return self.stored.allocate()

    def _take_compact(self) -> int:
        while self.compact.num_free == 0:
            evicted = self.cache.evict(compact=True)
            if evicted is None:
                return NO_BLOCK
            self._reclaim(evicted)
        return self.compact.allocate()

    @staticmethod
    def _cached_compact(entry: Entry, index: int) -> int:
        """The compact form of the request's block that another request made."""
        path = entry.chain.path
        return path[index].compact if index < len(path) else NO_BLOCK

    def _reclaim(self, evicted: Evicted) -> None:
        if evicted.block != NO_BLOCK:
            self.stored.reclaim(evicted.block)
        if evicted.compact != NO_BLOCK:
            self.compact.reclaim(evicted.compact)

    def compactions(self, entry: Entry, end: int) -> tuple[tuple[int, int], ...]:
        """Pairs of a stored and a compact block to be made of it by a step that computes up to ``end``."""
        table, compact = entry.request.block_table, entry.request.compact_table
        return tuple(
            (table[index], compact[index])
            for index in range(entry.num_compacted, self.num_compact(end - 1))
            if self._cached_compact(entry, index) == NO_BLOCK
        )

    # ---- a request's way

    def start(self, entry: Entry, match: Match, *, hit: bool) -> None:
        """Give the request what was matched, but for a tail."""
        request, count = entry.request, match.num_compact
        stored = [node.block for node in match.nodes[count:]]
        compact = [node.compact for node in match.nodes[:count]]
        self.stored.share(*stored)
        self.compact.share(*compact)
        request.block_table = array("i", [NO_BLOCK]) * count + array("i", stored)
        request.compact_table = array("i", compact)
        self.cache.commit(entry.chain, match, hit=hit)
        entry.num_written, entry.num_compacted = len(match.nodes) * self._size, count
        entry.chain.num_compact_at_start = count

    def load(self, entry: Entry, loads: Iterable[LoadedRows]) -> list[BlockLoad]:
        """Take blocks for the rows that follow what was matched, compact ones first."""
        request, steps = entry.request, []
        for rows, compact in loads:
            own = self._take_compact() if compact else self.take()
            assert own is not None, "admission made sure of room"
            assert own != NO_BLOCK, "admission made sure of room"
            if compact:
                request.compact_table.append(own)
            request.block_table.append(NO_BLOCK if compact else own)
            steps.append(BlockLoad(own, rows, compact))
        entry.num_compacted = entry.chain.num_compact_at_start = len(request.compact_table)
        return steps

    def copy_tail(self, request: Request, match: Match) -> BlockCopy | None:
        """Take a block for the rows of the match's tail, which is to be copied there."""
        assert match.tail is not None
        source, own = match.tail.block, self.take()
        assert own is not None, "admission made sure of room"
        request.block_table.append(own)
        # The source itself may have been evicted for this; then its rows are in place already.
        return None if own == source else BlockCopy(source, own, match.tail_rows)

    def register(self, entry: Entry) -> list[bytes]:
        """Make the blocks that were filled matchable; returns their digests.

        A block that another request wrote too is given up for that one's.
        """
        chain, table, compact = entry.chain, entry.request.block_table, entry.request.compact_table
        size, filled = self._size, []
        while not chain.broken and (len(chain.path) + 1) * size <= entry.num_written:
            index = len(chain.path)
            if index < entry.num_compacted:
                self._keep_compact(entry, index, self.cache.extend_compact(chain, compact[index]))
                filled.append(chain.digests[index])
                continue
            standing = self.cache.extend(chain, table[index])
            if standing != table[index]:
                self.stored.share(standing)
                self.stored.release(table[index], keep=False)
                table[index] = standing
            filled.append(chain.digests[index])
        return filled

    def give_up_stored(self, entry: Entry) -> None:
        """What the last written token read in compact form is not read as stored any more."""
        chain, table, compact = entry.chain, entry.request.block_table, entry.request.compact_table
        count = max(entry.num_compacted, self.num_compact(entry.num_written - 1))
        for index in range(entry.num_compacted, count):
            if index < len(chain.path):
                self._keep_compact(entry, index, self.cache.compacted(chain, compact[index]))
            self.stored.release(table[index], keep=self.cache.holds(table[index]))
            table[index] = NO_BLOCK
        entry.num_compacted = count

    def _keep_compact(self, entry: Entry, index: int, standing: int) -> None:
        compact = entry.request.compact_table
        if standing != compact[index]:
            self.compact.share(standing)
            self.compact.release(compact[index], keep=False)
            compact[index] = standing

    def give_up(self, entry: Entry) -> None:
        """Take all blocks of a request back; what is written stays cached."""
        request, full = entry.request, len(entry.chain.path)
        table, rows = request.block_table, entry.num_written - full * self._size
        has_tail, full_compact = rows > 0 and not entry.chain.broken, entry.chain.num_compact
        self.cache.release(entry.chain, table[full] if has_tail else None, rows)
        # What the chain was made of is cached; of the blocks behind it, its tail at most.
        self.stored.release(*table[entry.num_compacted : full], keep=True)
        for block in table[max(entry.num_compacted, full) :]:
            self.stored.release(block, keep=self.cache.holds(block))
        self.compact.release(*request.compact_table[:full_compact], keep=True)
        for block in request.compact_table[full_compact:]:
            self.compact.release(block, keep=self.cache.holds_compact(block))
        request.block_table, request.compact_table = empty_table(), empty_table()
        entry.num_written = entry.num_compacted = 0

    def reset(self, running: Iterable[Entry]) -> None:
        """Forget all that is cached; ``running`` requests keep their blocks, uncached."""
        stored, compact = self.cache.blocks(), self.cache.compact_blocks()
        self.cache.clear()
        for pool, blocks in ((self.stored, stored), (self.compact, compact)):
            for block in blocks:
                if pool.refs[block] == 0:
                    pool.reclaim(block)
        for entry in running:
            chain = entry.chain
            chain.path, chain.num_compact, chain.broken = [], 0, True
            chain.num_saved = chain.num_saved_compact = chain.num_struck = 0

    # ---- room

    def held(self, entry: Entry) -> Room:
        """Blocks in the request's tables."""
        request = entry.request
        return Room(len(request.block_table) - entry.num_compacted, len(request.compact_table))

    def still_takes(self, entry: Entry) -> Room:
        """Blocks that a running request takes for its tokens, and one more if it goes on beyond them."""
        request, held = entry.request, self.held(entry)
        needed = -(-request.num_tokens // self._size)
        grows = entry.last_position > needed * self._size
        stored = min(needed - entry.num_compacted, self._peak) - held.stored
        last = request.num_tokens - 1 + grows * self._size
        return Room(max(0, stored) + grows, max(0, self.num_compact(last) - held.compact))

    def takes_to_start(self, entry: Entry, match: Match) -> Room:
        """Blocks that a waiting request takes for its tokens, beside what was matched."""
        needed = -(-entry.request.num_tokens // self._size) - match.num_compact
        shared = len(match.nodes) - match.num_compact
        compact = self.num_compact(entry.request.num_tokens - 1) - num_with_compact(match.nodes)
        return Room(min(needed, self._peak) - shared, max(0, compact))

    def available(self, match: Match) -> Room:
        """Blocks that can be taken while what was matched is kept."""
        stored, compact = self.cache.num_idle(match.nodes, match.num_compact)
        return Room(
            self.stored.num_free + self.cache.num_evictable - stored,
            self.compact.num_free + self.cache.num_evictable_compact - compact,
        )

    def check_invariants(self, entries: Sequence[Entry]) -> None:
        """Raise AssertionError unless pools, tables and cache agree (for tests)."""
        for entry in entries:
            table, compact = entry.request.block_table, entry.request.compact_table
            assert entry.num_compacted <= len(compact)
            assert all(block == NO_BLOCK for block in table[: entry.num_compacted])
            assert NO_BLOCK not in table[entry.num_compacted :]
            assert entry.chain.num_compact == min(entry.num_compacted, len(entry.chain.path))
            assert len(entry.chain.path) * self._size <= entry.num_written, "matched before written"
        stored = [e.request.block_table[e.num_compacted :] for e in entries]
        self.stored.check_invariants(stored, self.cache.blocks())
        tables = [e.request.compact_table for e in entries]
        self.compact.check_invariants(tables, self.cache.compact_blocks())
        assert self.stored.num_kept == self.cache.num_evictable, "a kept block can never be evicted"
        stored_too = {n.compact for e in entries for n in e.chain.path[e.chain.num_compact :]} - {NO_BLOCK}
        in_tables = {block for table in tables for block in table}
        unread = len(stored_too - in_tables)  # of blocks that are in use as stored
        assert self.compact.num_kept == self.cache.num_evictable_compact + unread
        self.cache.check_invariants([entry.chain for entry in entries])
