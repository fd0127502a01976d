"""Blocks as stored that are read by nobody and have a compact form: what is freed first. Free of torch.

A hit may end at L only if every block that a query at L reads as stored is there. So the stored form of a
block is worth keeping where a prefix may end within the window behind it: at a leaf, where a turn ended, or
where two continuations part. Such a node *guards* itself and the blocks of the window before it.
"""

from __future__ import annotations

from collections.abc import Iterable

from octavo.cache.chain import NO_BLOCK, Node
from octavo.cache.sorted_keys import SortedKeys


class Spare:
    """Which nodes could do without their stored form, those that nothing guards first, then the oldest.

    ``window_blocks``: so many blocks before its own a query reads as stored; None where all are, and nothing
    is ever spare. Every call costs O(window_blocks) at most, whatever else is cached.
    """

    def __init__(self, window_blocks: int | None) -> None:
        self._window = window_blocks
        self._order: SortedKeys[tuple[int, int, int]] = SortedKeys()
        self._nodes: dict[int, Node] = {}

    def __len__(self) -> int:
        return len(self._order)

    @property
    def unguarded(self) -> bool:
        """Whether there is a spare form that nothing guards."""
        return len(self._order) > 0 and self._order.first()[0] == 0

    def first(self) -> Node:
        """The node that loses least without its stored form. Raises IndexError when there is none."""
        return self._nodes[self._order.first()[2]]

    def update(self, nodes: Iterable[Node]) -> None:
        """To be called when the forms, stored users or guards of nodes have changed."""
        if self._window is not None:
            for node in nodes:
                self._update(node)

    def _update(self, node: Node) -> None:
        is_spare = node.block != NO_BLOCK and node.compact != NO_BLOCK and node.stored_users == 0
        key = (int(node.guards > 0), node.last_used, node.serial) if is_spare else None
        if key == node.spare_key:
            return
        if node.spare_key is not None:
            self._order.remove(node.spare_key)
            del self._nodes[node.serial]
        if key is not None:
            self._order.add(key)
            self._nodes[node.serial] = node
        node.spare_key = key

    def children_changed(self, node: Node, before: int) -> None:
        """To be called when a node that had ``before`` children, or is new, has ``num_children`` now."""
        if self._window is None or node.parent is None:
            return
        change = (node.num_children != 1) - (before != 1)
        if change:
            self._guard(node, change)

    def added(self, leaf: Node) -> None:
        """To be called for a new leaf."""
        if self._window is not None:
            self._guard(leaf, 1)

    def removed(self, leaf: Node) -> None:
        """To be called for a leaf that is forgotten."""
        if self._window is not None:
            self._guard(leaf, -1)
            if leaf.spare_key is not None:
                self._order.remove(leaf.spare_key)
                del self._nodes[leaf.serial]
                leaf.spare_key = None

    def _guard(self, node: Node, change: int) -> None:
        assert self._window is not None
        at: Node | None = node
        # A hit that ends within a block may read one block more than one that ends behind it.
        for _ in range(self._window + 1):
            if at is None or at.parent is None:
                return
            at.guards += change
            if (at.guards > 0) != (at.guards - change > 0):
                self._update(at)
            at = at.parent

    def check_invariants(self, nodes: list[Node]) -> None:
        """Raise AssertionError unless guards and order agree with the tree (for tests)."""
        if self._window is None:
            assert not len(self._order)
            return
        guards = {node.serial: 0 for node in nodes}
        for node in nodes:
            at: Node | None = node if node.num_children != 1 else None
            for _ in range(self._window + 1):
                if at is None or at.parent is None:
                    break
                guards[at.serial] += 1
                at = at.parent
        spare = 0
        for node in nodes:
            assert node.guards == guards[node.serial], "guards differ from the tree"
            is_spare = node.block != NO_BLOCK and node.compact != NO_BLOCK and node.stored_users == 0
            assert (node.spare_key is not None) == is_spare, "the spare forms are others"
            assert node.spare_key is None or node.spare_key[0] == (node.guards > 0)
            spare += is_spare
        assert spare == len(self._order) == len(self._nodes)
