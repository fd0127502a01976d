"""Which KV blocks are free and how many block tables hold each of the others. Free of torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence


class BlockPool:
    """Block ids, reference counts and the free list; every operation is O(1) a block.

    A block is in one of three states: *free* (on the free list), *used* (in one block table or
    more: its reference count is the number of them) or *kept* (in no block table, but its rows
    are kept for the prefix cache, which gives it back with :meth:`reclaim`).
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be at least 1, got {num_blocks}")
        self.num_blocks = num_blocks
        self.refs = [0] * num_blocks
        # Reversed, so that a fresh pool hands out 0, 1, 2, ...
        self._free = list(range(num_blocks - 1, -1, -1))
        self._num_kept = 0

    @property
    def num_free(self) -> int:
        """Blocks on the free list."""
        return len(self._free)

    @property
    def num_kept(self) -> int:
        """Blocks in no block table whose rows are kept."""
        return self._num_kept

    @property
    def num_used(self) -> int:
        """Blocks in at least one block table."""
        return self.num_blocks - len(self._free) - self._num_kept

    def allocate(self) -> int:
        """Take a free block into one block table. Raises RuntimeError when none is free."""
        if not self._free:
            raise RuntimeError("no free block: reclaim one first")
        block = self._free.pop()
        self.refs[block] = 1
        return block

    def share(self, *blocks: int) -> None:
        """Put used or kept blocks into one more block table."""
        refs = self.refs
        for block in blocks:
            before = refs[block]
            refs[block] = before + 1
            if before == 0:
                self._num_kept -= 1

    def release(self, *blocks: int, keep: bool) -> None:
        """Take blocks out of one block table; those out of their last one are kept or become free."""
        refs = self.refs
        for block in blocks:
            before = refs[block]
            if before == 0:
                raise RuntimeError(f"block {block} is in no block table")
            refs[block] = before - 1
            if before == 1:
                if keep:
                    self._num_kept += 1
                else:
                    self._free.append(block)

    def reclaim(self, block: int) -> None:
        """Turn a kept block into a free one."""
        if self.refs[block]:
            raise RuntimeError(f"block {block} is still in {self.refs[block]} block tables")
        self._num_kept -= 1
        self._free.append(block)

    def check_invariants(self, block_tables: Iterable[Sequence[int]], kept: Iterable[int]) -> None:
        """Raise AssertionError unless the books agree with the block tables (for tests).

        ``kept`` are the blocks that the prefix cache holds; some of them may be used as well.
        """
        entries = Counter(block for table in block_tables for block in table)
        assert [entries[b] for b in range(self.num_blocks)] == self.refs, "refs differ from the block tables"
        free, idle = set(self._free), {b for b in kept if self.refs[b] == 0}
        assert len(free) == len(self._free), "a block is twice on the free list"
        assert not free & entries.keys(), "a free block is in a block table"
        assert not free & idle, "a free block is kept"
        assert len(idle) == self._num_kept, "the number of kept blocks is wrong"
        assert len(free) + len(idle) + len(entries) == self.num_blocks, "a block is in no state"
