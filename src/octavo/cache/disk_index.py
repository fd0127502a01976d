"""What a disk store holds, and in which order it is given up. Free of torch."""

from __future__ import annotations

import heapq
from collections import Counter
from dataclasses import dataclass


@dataclass(slots=True)
class IndexEntry:
    """A stored block.

    ``size`` is in bytes of the file; ``num_tokens`` counts from the chain's start to the block's end;
    ``last_used`` is in milliseconds since 1970; ``origin`` names the fingerprint that it belongs to.
    ``compact``: it is the block's compact form.
    """

    parent: bytes
    size: int
    num_tokens: int
    last_used: int
    origin: bytes
    compact: bool = False


class DiskIndex:
    """The stored blocks by digest; the least recently used leaf goes first, so a chain keeps its beginning.

    Whoever uses a block uses those before it: a block that becomes a leaf counts as used when its last child
    was. Operations cost O(log n).
    """

    def __init__(self) -> None:
        self.entries: dict[bytes, IndexEntry] = {}
        self.num_bytes = 0
        self._children: Counter[bytes] = Counter()
        #: (last used, digest) of leaves; an item whose block has changed since is skipped when it comes up.
        self._leaves: list[tuple[int, bytes]] = []

    def add(self, digest: bytes, entry: IndexEntry) -> None:
        """Book a block, in place of the one with the same digest if there is one."""
        if digest in self.entries:
            self.remove(digest)
        self.entries[digest] = entry
        self.num_bytes += entry.size
        self._children[entry.parent] += 1
        self._offer(digest)

    def touch(self, digest: bytes, now: int) -> None:
        """A block was used."""
        entry = self.entries[digest]
        entry.last_used = max(entry.last_used, now)
        self._offer(digest)

    def remove(self, digest: bytes) -> IndexEntry:
        """Strike a block out, whether or not others follow it."""
        entry = self.entries.pop(digest)
        self.num_bytes -= entry.size
        self._children[entry.parent] -= 1
        if not self._children[entry.parent]:
            del self._children[entry.parent]
        parent = self.entries.get(entry.parent)
        if parent is not None:
            parent.last_used = max(parent.last_used, entry.last_used)
            self._offer(entry.parent)
        return entry

    def first(self) -> bytes | None:
        """The block to give up next; None when there is none."""
        while self._leaves:
            last_used, digest = self._leaves[0]
            entry = self.entries.get(digest)
            if entry is not None and entry.last_used == last_used and digest not in self._children:
                return digest
            heapq.heappop(self._leaves)
        return None

    def leaves(self) -> list[bytes]:
        """The blocks that none follows: one a chain."""
        return [digest for digest in self.entries if digest not in self._children]

    def _offer(self, digest: bytes) -> None:
        if digest not in self._children:
            heapq.heappush(self._leaves, (self.entries[digest].last_used, digest))
