"""The blocks of requests: the pools, the requests' tables, what the prefix cache keeps. Free of torch."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from octavo.cache.block_pool import BlockPool
from octavo.cache.chain import NO_BLOCK, Match, num_with_compact
from octavo.cache.prefix_cache import Evicted, PrefixCache
from octavo.engine.disk_prefix import DiskPrefix
from octavo.engine.step import BlockCopy, BlockLoad, SummaryMade
from octavo.engine.waiting import Entry
from octavo.kernels.history_layout import FAN, GROUP, first_kept, layout, num_summarised
from octavo.request import Request, empty_table

#: A sequence as long as this is limited by the model alone.
ENDLESS = 2**31


class PoolShape(NamedTuple):
    """``num_blocks`` as stored. With ``window``, in tokens, a query at position p reads the blocks that lie
    wholly before p - window in compact form, from ``num_compact`` of them. With ``budget``, in tokens, it has
    no more blocks than that, and summaries beside them. A step computes at most ``step_tokens`` of a
    sequence."""

    block_size: int
    num_blocks: int
    num_compact: int = 0
    window: int | None = None
    budget: int | None = None
    step_tokens: int = 512

    @property
    def window_blocks(self) -> int | None:
        return None if self.window is None else self.window // self.block_size

    @property
    def budget_blocks(self) -> int | None:
        return None if self.budget is None else self.budget // self.block_size

    @property
    def capacity(self) -> int:
        """Tokens of the longest sequence that can be computed."""
        if self.window is None or self.num_blocks * self.block_size <= self.window + self.block_size:
            return self.num_blocks * self.block_size
        held = (self.num_compact + 1) * self.block_size + self.window
        if self.budget is None or held <= self.budget:
            return held
        tokens = self.budget
        while tokens < ENDLESS and self.compact_needed(2 * tokens) <= self.num_compact:
            tokens *= 2
        return tokens

    def compact_blocks(self, position: int) -> int:
        """Blocks that a query at ``position`` reads in compact form, or in summaries."""
        return 0 if self.window is None else max(0, (position - self.window) // self.block_size)

    def summarised(self, position: int) -> int:
        """Blocks that a query at ``position`` reads in summaries."""
        if self.budget_blocks is None:
            return 0
        return num_summarised(position // self.block_size, self.budget_blocks)

    def compact_needed(self, position: int) -> int:
        """Compact blocks that a sequence has at most while it grows up to ``position``."""
        needed, summarised = self.compact_blocks(position), self.summarised(position)
        if summarised == 0:
            return needed
        assert self.budget_blocks is not None
        assert self.window_blocks is not None
        step = self.step_tokens // self.block_size + 2
        made = step // GROUP + 2
        levels = layout(summarised)[0][0] + 1
        # What a step begins with stays until its end: so do the summaries that others take the place of.
        summaries = FAN * levels + 2 * made + levels
        return min(needed, 1 + self.budget_blocks - self.window_blocks + step) + summaries

    def check(self) -> None:
        """Raises ValueError, in one sentence, for numbers that cannot be."""
        if self.window is None:
            return
        if self.budget is not None:
            least = self.window + GROUP * self.block_size
            if self.budget % self.block_size or self.budget < least:
                raise ValueError(
                    f"history_budget must be a multiple of the block size {self.block_size}, "
                    f"at least {least} with a history_window of {self.window}, got {self.budget}"
                )
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
    in compact form makes that form (:meth:`compactions`); after it the request gives up the stored one. So it
    is with the ``summaries`` of the oldest compact blocks (:meth:`summaries_made`), but for the first block.
    """

    def __init__(self, shape: PoolShape, new_cache: Callable[[], PrefixCache]) -> None:
        shape.check()
        self.shape = shape
        self.capacity = shape.capacity
        self._new_cache = new_cache
        self._size = shape.block_size
        #: Blocks as stored that one request has at most, in a step that computes ``step_tokens`` of it.
        self._peak = shape.num_blocks
        if shape.window_blocks is not None:
            self._peak = min(self._peak, shape.window_blocks + shape.step_tokens // self._size + 3)
        self._forget_all(new_cache())

    def _forget_all(self, cache: PrefixCache) -> None:
        self.stored = BlockPool(self.shape.num_blocks)
        self.compact = BlockPool(max(1, self.shape.num_compact))
        self.cache = cache

    def start_over(self) -> None:
        """Forget all tables and all that is cached."""
        cache = self._new_cache()
        cache.num_evictions = self.cache.num_evictions
        self._forget_all(cache)

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
        while len(compact) < self.shape.compact_blocks(end - 1):
            block = self._cached_compact(entry, len(compact))
            if block != NO_BLOCK:
                self.compact.share(block)
            elif (block := self._take_compact()) == NO_BLOCK:
                return min(end, (len(compact) + 1) * self._size + self.shape.window)
            compact.append(block)
        return self._cover_summaries(entry, end)

    def _cover_summaries(self, entry: Entry, end: int) -> int:
        table = entry.request.summaries
        for count in range(entry.num_summarised + 1, self.shape.summarised(end - 1) + 1):
            for level, unit in layout(count):
                if (level, unit) in table:
                    continue
                block = self.cache.summaries.use(entry.chain.path, level, unit)
                if block != NO_BLOCK:
                    self.compact.share(block)
                elif (block := self._take_compact()) != NO_BLOCK:
                    entry.own_summaries.add((level, unit))
                else:
                    assert self.shape.budget_blocks is not None
                    return min(end, (self.shape.budget_blocks + count) * self._size)
                table[level, unit] = block
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
        for compact in evicted.compact:
            self.compact.reclaim(compact)

    def compactions(self, entry: Entry, end: int) -> tuple[tuple[int, int], ...]:
        """Pairs of a stored and a compact block to be made of it by a step that computes up to ``end``."""
        table, compact = entry.request.block_table, entry.request.compact_table
        return tuple(
            (table[index], compact[index])
            for index in range(entry.num_compacted, self.shape.compact_blocks(end - 1))
            if self._cached_compact(entry, index) == NO_BLOCK
        )

    def summaries_made(self, entry: Entry, end: int) -> tuple[SummaryMade, ...]:
        """The summaries to be made by a step that computes up to ``end``, in order."""
        if not entry.own_summaries:
            return ()
        table, compact = entry.request.summaries, entry.request.compact_table
        made, before = list[SummaryMade](), layout(entry.num_summarised)
        for count in range(entry.num_summarised + 1, self.shape.summarised(end - 1) + 1):
            now = layout(count)
            for level, unit in now:
                if (level, unit) in before or (level, unit) not in entry.own_summaries:
                    continue
                if level == 0:
                    first = 1 + GROUP * unit
                    sources = tuple(compact[first : first + GROUP])
                else:
                    sources = tuple(table[level - 1, FAN * unit + i] for i in range(FAN))
                made.append(SummaryMade(table[level, unit], level, sources))
            before = now
        return tuple(made)

    # ---- a request's way

    def start(self, entry: Entry, match: Match, *, hit: bool) -> None:
        """Give the request what was matched, but for a tail."""
        request, count = entry.request, match.num_compact
        stored = [node.block for node in match.nodes[count:]]
        compact = [node.compact for node in match.nodes[:count]]
        hollow = range(1, min(first_kept(match.num_summarised), count))
        compact[1 : 1 + len(hollow)] = [NO_BLOCK] * len(hollow)
        self.cache.commit(entry.chain, match, hit=hit)
        found = {
            pair: self.cache.summaries.block(match.nodes, *pair) for pair in layout(match.num_summarised)
        }
        request.summaries = {pair: block for pair, block in found.items() if block != NO_BLOCK}
        request.block_table = array("i", [NO_BLOCK]) * count + array("i", stored)
        request.compact_table = array("i", compact)
        self.stored.share(*stored)
        self.compact.share(*self._compact_held(request))
        entry.num_written, entry.num_compacted = len(match.nodes) * self._size, count
        entry.num_summarised = match.num_summarised
        entry.chain.num_compact_at_start = count

    def load(self, entry: Entry, prefix: DiskPrefix) -> list[BlockLoad]:
        """Take blocks for the rows that follow what was matched, compact ones first."""
        request, steps = entry.request, []
        for pair, rows in prefix.summaries:
            block = request.summaries[pair] = self._take_compact()
            assert block != NO_BLOCK, "admission made sure of room"
            entry.own_summaries.add(pair)
            steps.append(BlockLoad(block, rows, compact=True))
        for block_rows, compact in prefix.loads:
            if block_rows is None:
                request.compact_table.append(NO_BLOCK)
                request.block_table.append(NO_BLOCK)
                continue
            own = self._take_compact() if compact else self.take()
            assert own is not None, "admission made sure of room"
            assert own != NO_BLOCK, "admission made sure of room"
            if compact:
                request.compact_table.append(own)
            request.block_table.append(NO_BLOCK if compact else own)
            steps.append(BlockLoad(own, block_rows, compact))
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
            if 0 < index < first_kept(entry.num_summarised):
                self.cache.extend_summarised(chain)
                filled.append(chain.digests[index])
                continue
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
        count = max(entry.num_compacted, self.shape.compact_blocks(entry.num_written - 1))
        for index in range(entry.num_compacted, count):
            if index < len(chain.path):
                self._keep_compact(entry, index, self.cache.compacted(chain, compact[index]))
            self.stored.release(table[index], keep=self.cache.holds(table[index]))
            table[index] = NO_BLOCK
        entry.num_compacted = count
        self._give_up_summarised(entry, self.shape.summarised(entry.num_written - 1))

    def _give_up_summarised(self, entry: Entry, count: int) -> None:
        """The last written token read so many blocks in summaries: they themselves are not read any more."""
        if count <= entry.num_summarised and not entry.own_summaries:
            return
        chain, table, compact = entry.chain, entry.request.summaries, entry.request.compact_table
        count = max(count, entry.num_summarised)
        now = layout(count)
        for level, unit in now:
            if (level, unit) not in entry.own_summaries:
                continue
            made = table[level, unit]
            standing = self.cache.summaries.use(chain.path, level, unit, made)
            if standing != made:
                self.compact.share(standing)
                self.compact.release(made, keep=False)
                table[level, unit] = standing
            if self.cache.holds_compact(standing):
                entry.own_summaries.remove((level, unit))
        for pair in [pair for pair in table if pair not in now]:
            self._release_summary(entry, pair, superseded=True)
        self.cache.summarised(chain, count)
        for index in range(max(1, first_kept(entry.num_summarised)), first_kept(count)):
            self.compact.release(compact[index], keep=self.cache.holds_compact(compact[index]))
            compact[index] = NO_BLOCK
        entry.num_summarised = count

    def _release_summary(self, entry: Entry, pair: tuple[int, int], *, superseded: bool) -> None:
        if pair in entry.own_summaries:
            entry.own_summaries.remove(pair)
        else:
            self.cache.summaries.leave(entry.chain.path, *pair, superseded=superseded)
        block = entry.request.summaries.pop(pair)
        self.compact.release(block, keep=self.cache.holds_compact(block))

    @staticmethod
    def _compact_held(request: Request) -> list[int]:
        """All of the request's compact blocks, summaries too."""
        return [block for block in request.compact_table if block != NO_BLOCK] + list(
            request.summaries.values()
        )

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
        for pair in tuple(request.summaries):
            self._release_summary(entry, pair, superseded=False)
        self.cache.release(entry.chain, table[full] if has_tail else None, rows)
        # What the chain was made of is cached; of the blocks behind it, its tail at most.
        self.stored.release(*table[entry.num_compacted : full], keep=True)
        for block in table[max(entry.num_compacted, full) :]:
            self.stored.release(block, keep=self.cache.holds(block))
        full_compact = 0 if entry.num_summarised else full_compact
        self.compact.release(*request.compact_table[:full_compact], keep=True)
        for block in request.compact_table[full_compact:]:
            if block != NO_BLOCK:
                self.compact.release(block, keep=self.cache.holds_compact(block))
        request.block_table, request.compact_table = empty_table(), empty_table()
        entry.num_written = entry.num_compacted = entry.num_summarised = 0

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
            chain.path, chain.num_compact, chain.num_summarised, chain.broken = [], 0, 0, True
            chain.num_saved = chain.num_saved_compact = chain.num_struck = chain.num_saved_summarised = 0
            entry.own_summaries = set(entry.request.summaries)

    # ---- room

    def held(self, entry: Entry) -> Room:
        """Blocks in the request's tables."""
        request = entry.request
        compact = len(request.compact_table) - max(0, first_kept(entry.num_summarised) - 1)
        return Room(len(request.block_table) - entry.num_compacted, compact + len(request.summaries))

    def still_takes(self, entry: Entry) -> Room:
        """Blocks that a running request takes for its tokens, and one more if it goes on beyond them."""
        request, held = entry.request, self.held(entry)
        needed = -(-request.num_tokens // self._size)
        grows = entry.last_position > needed * self._size
        stored = min(needed - entry.num_compacted, self._peak) - held.stored
        last = request.num_tokens - 1 + grows * self._size
        return Room(max(0, stored) + grows, max(0, self.shape.compact_needed(last) - held.compact))

    def takes_to_start(self, entry: Entry, match: Match) -> Room:
        """Blocks that a waiting request takes for its tokens, beside what was matched."""
        needed = -(-entry.request.num_tokens // self._size) - match.num_compact
        shared = len(match.nodes) - match.num_compact
        there = num_with_compact(match.nodes)
        if match.num_summarised:
            there = sum(node.compact != NO_BLOCK for node in match.read)
            there += len(layout(match.num_summarised))
        compact = self.shape.compact_needed(entry.request.num_tokens - 1) - there
        return Room(min(needed, self._peak) - shared, max(0, compact))

    def available(self, match: Match) -> Room:
        """Blocks that can be taken while what was matched is kept."""
        stored, compact = self.cache.num_idle(match)
        compact += self.cache.summaries.num_idle_of(match)
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
        for entry in entries:
            gone = range(1, first_kept(entry.num_summarised))
            assert all((b == NO_BLOCK) == (i in gone) for i, b in enumerate(entry.request.compact_table))
            assert set(entry.request.summaries) >= set(layout(entry.num_summarised))
            assert entry.chain.num_summarised == entry.num_summarised or entry.chain.broken
        tables = [self._compact_held(e.request) for e in entries]
        self.compact.check_invariants(tables, self.cache.compact_blocks())
        assert self.stored.num_kept == self.cache.num_evictable, "a kept block can never be evicted"
        stored_too = {n.compact for e in entries for n in e.chain.path[e.chain.num_compact :]} - {NO_BLOCK}
        in_tables = {block for table in tables for block in table}
        unread = len(stored_too - in_tables)  # of blocks that are in use as stored
        assert self.compact.num_kept == self.cache.num_evictable_compact + unread
        self.cache.check_invariants([entry.chain for entry in entries])
