"""In which order the cached blocks that nobody uses and none follow are given up. Free of torch."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from octavo.cache.chain import Node
from octavo.cache.sorted_keys import SortedKeys


class UnusedLeaves:
    """A segmented LRU: nodes on *probation* go before those that are *protected*, as they were hit.

    Within each the least recently used goes first. When more than ``max_protected`` nodes are protected, used
    ones too, the oldest of these here return to probation.
    """

    def __init__(self, max_protected: int) -> None:
        self.probation: SortedKeys[tuple[int, int]] = SortedKeys()
        self._protected: SortedKeys[tuple[int, int]] = SortedKeys()
        self._nodes: dict[int, Node] = {}
        self._max_protected = max_protected
        self.num_protected = 0

    def __len__(self) -> int:
        return len(self._nodes)

    def first(self) -> Node:
        """The leaf that is worth least. Raises IndexError when there is none."""
        queue = self.probation if len(self.probation) else self._protected
        return self._nodes[queue.first()[1]]

    def add(self, node: Node) -> None:
        node.queue_key = (node.last_used, node.serial)
        (self._protected if node.protected else self.probation).add(node.queue_key)
        self._nodes[node.serial] = node

    def remove(self, node: Node) -> None:
        """Take a node out, if it is here."""
        if node.queue_key is not None:
            (self._protected if node.protected else self.probation).remove(node.queue_key)
            del self._nodes[node.serial]
            node.queue_key = None

    def protect(self, path: Sequence[Node]) -> None:
        """Of a path from a root whose nodes are not here: they were hit.

        Only leaves are unprotected, so above a protected node all are.
        """
        first = bisect_left(path, True, key=lambda node: not node.protected)
        for node in path[first:]:
            node.protected = True
        self.num_protected += len(path) - first

    def unprotect(self, node: Node) -> None:
        """Of a node that is not here."""
        self.num_protected -= node.protected
        node.protected = False

    def age_out(self, clock: int) -> int:
        """Return the oldest to probation, as used after ``clock``; returns the clock after that."""
        while self.num_protected > self._max_protected and len(self._protected):
            node = self._nodes[self._protected.first()[1]]
            self.remove(node)
            self.unprotect(node)
            clock += 1
            node.last_used = clock
            self.add(node)
        return clock

    def check_invariants(self, nodes: list[Node]) -> None:
        """Raise AssertionError unless exactly the unused leaves of ``nodes`` are here (for tests)."""
        for node in nodes:
            leaf = node.users == 0 and node.num_children == 0
            assert (node.queue_key is not None) == leaf, "the queues hold exactly the unused leaves"
            above = node.parent if node.parent is not None and node.parent.parent is not None else node
            assert above.protected or not node.protected, "protected below one that is not"
        assert self.num_protected == sum(node.protected for node in nodes)
        assert len(self._nodes) == len(self.probation) + len(self._protected)
