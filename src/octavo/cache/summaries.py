"""Summaries of old history, and the compact blocks that they have taken the place of. Free of torch.

A summary belongs to the node of the last block that it stands for. It is read until the next level's takes
its place; what has been *superseded*, a summary or a compact block, is freed before any block is forgotten,
the least recently used first, where nobody reads it. The others go with their nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from octavo.cache.chain import NO_BLOCK, Match, Node
from octavo.cache.sorted_keys import SortedKeys
from octavo.kernels.history_layout import last_block, layout

#: Of a compact block in the order of what is superseded, where a summary has its level.
_BLOCK = -1


@dataclass(slots=True, eq=False)
class Summary:
    """One that is cached: ``block`` is a compact block, ``users`` the chains that read it."""

    node: Node
    level: int
    block: int
    users: int = 0
    superseded: bool = False
    queue_key: tuple[int, int, int] | None = None


class Summaries:
    """The summaries of all nodes, and the order in which what is superseded is freed."""

    def __init__(self) -> None:
        self._by_block: dict[int, Summary] = {}
        self._of_node: dict[int, dict[int, Summary]] = {}
        self._order: SortedKeys[tuple[int, int, int]] = SortedKeys()
        self._superseded: dict[tuple[int, int, int], Summary | Node] = {}
        #: Summaries that nobody reads.
        self.num_idle = 0

    def __len__(self) -> int:
        """How many forms are superseded and read by nobody."""
        return len(self._order)

    def holds(self, block: int) -> bool:
        return block in self._by_block

    def blocks(self) -> list[int]:
        return list(self._by_block)

    def of_path(self, path: Sequence[Node], level: int, unit: int) -> Summary | None:
        """A summary of a path's blocks, if it is cached and its last block is on the path."""
        index = last_block(level, unit)
        return self._of_node.get(path[index].serial, {}).get(level) if index < len(path) else None

    def block(self, path: Sequence[Node], level: int, unit: int) -> int:
        """As :meth:`of_path`: its compact block, or ``NO_BLOCK``."""
        found = self.of_path(path, level, unit)
        return NO_BLOCK if found is None else found.block

    def num_idle_of(self, match: Match) -> int:
        """Of the summaries that are read of a match, those that nobody reads yet."""
        found = (self.of_path(match.nodes, level, unit) for level, unit in layout(match.num_summarised))
        return sum(summary is not None and summary.users == 0 for summary in found)

    def use(self, path: Sequence[Node], level: int, unit: int, made: int = NO_BLOCK) -> int:
        """A chain with this path reads a summary until :meth:`leave`.

        Returns its compact block: where none is cached, that in which it was ``made``, which is cached then
        if its last block is on the path.
        """
        summary = self.of_path(path, level, unit)
        if summary is None:
            index = last_block(level, unit)
            if made == NO_BLOCK or index >= len(path):
                return made
            summary = Summary(path[index], level, made)
            self._by_block[made] = self._of_node.setdefault(path[index].serial, {})[level] = summary
            self.num_idle += 1
        self.num_idle -= summary.users == 0
        summary.users += 1
        summary.superseded = False
        self._dequeue(summary)
        return summary.block

    def leave(self, path: Sequence[Node], level: int, unit: int, *, superseded: bool) -> None:
        """The chain reads it no more; ``superseded``: as it reads one of the next level in its place."""
        summary = self.of_path(path, level, unit)
        if summary is None:
            return
        summary.users -= 1
        self.num_idle += summary.users == 0
        summary.superseded = summary.superseded or superseded
        if summary.users == 0 and summary.superseded:
            self._enqueue(summary, (summary.node.last_used, summary.node.serial, summary.level))

    def update(self, node: Node) -> None:
        """To be called when a node's users or compact form have changed."""
        is_superseded = node.compact != NO_BLOCK and node.was_summarised and node.is_idle
        if not is_superseded:
            self._dequeue(node)
        elif node.queued_compact is None:
            self._enqueue(node, (node.last_used, node.serial, _BLOCK))

    def first(self) -> Summary | Node:
        """What is freed first: a summary, or a node of which that is the compact form. IndexError if none."""
        return self._superseded[self._order.first()]

    def forget(self, summary: Summary) -> None:
        """Of one that nobody reads: its block is given out again."""
        self.num_idle -= 1
        self._dequeue(summary)
        del self._by_block[summary.block]
        of_node = self._of_node[summary.node.serial]
        del of_node[summary.level]
        if not of_node:
            del self._of_node[summary.node.serial]

    def of(self, node: Node) -> list[Summary]:
        return list(self._of_node.get(node.serial, {}).values())

    def _enqueue(self, form: Summary | Node, key: tuple[int, int, int]) -> None:
        self._order.add(key)
        self._superseded[key] = form
        if isinstance(form, Node):
            form.queued_compact = key
        else:
            form.queue_key = key

    def _dequeue(self, form: Summary | Node) -> None:
        key = form.queued_compact if isinstance(form, Node) else form.queue_key
        if key is None:
            return
        self._order.remove(key)
        del self._superseded[key]
        if isinstance(form, Node):
            form.queued_compact = None
        else:
            form.queue_key = None

    def check_invariants(self, nodes: list[Node]) -> None:
        """Raise AssertionError unless the books agree with each other and with ``nodes`` (for tests)."""
        serials = {node.serial for node in nodes}
        queued = 0
        for node in nodes:
            superseded = node.compact != NO_BLOCK and node.was_summarised and node.is_idle
            assert (node.queued_compact is not None) == superseded, "the superseded blocks are others"
            queued += superseded
        for block, summary in self._by_block.items():
            assert summary.block == block
            assert summary.node.serial in serials, "a summary outlived its node"
            assert self._of_node[summary.node.serial][summary.level] is summary
            waits = summary.superseded and summary.users == 0
            assert (summary.queue_key is not None) == waits, "the superseded summaries are others"
            queued += waits
        assert self.num_idle == sum(summary.users == 0 for summary in self._by_block.values())
        assert queued == len(self._order) == len(self._superseded)
        assert sum(map(len, self._of_node.values())) == len(self._by_block)
