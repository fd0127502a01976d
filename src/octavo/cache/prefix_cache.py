"""Which written blocks can serve another request that starts with the same tokens. Free of torch.

The cache is a forest, one tree for each salt and attention policy. A node is a block whose rows are
written; its place in the tree is the chain of blocks before it (see :class:`~octavo.cache.forest.Forest`).
The cache holds no reference counts of block tables (the pool does): it counts the chains that pass through a
node.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from octavo.cache import prefix_checks
from octavo.cache.chain import (
    NO_BLOCK,
    TOKEN_BYTES,
    Chain,
    Match,
    Node,
    Reach,
    num_used,
    num_with_compact,
    pack,
    readable,
    run_ends,
    sha256,
)
from octavo.cache.forest import Forest
from octavo.cache.spare import Spare
from octavo.cache.summaries import Summaries, Summary
from octavo.cache.unused_leaves import UnusedLeaves
from octavo.kernels.history_layout import first_kept, layout

#: Share of the pool that blocks which were hit may claim before the oldest of them age out.
PROTECTED_SHARE = 0.8


class Evicted(NamedTuple):
    """Blocks that hold nothing any more: one as stored, or ``NO_BLOCK``, and compact ones."""

    block: int
    compact: tuple[int, ...]


class PrefixCache:
    """Digests, the tree of cached blocks, and the order in which they are given up.

    Eviction takes unused leaves only, blocks that were never hit before those that were (see
    :class:`~octavo.cache.unused_leaves.UnusedLeaves`). Operations on one block cost O(log n) in the number
    of cached blocks.

    With ``window_blocks`` old history is read in compact form: a query in block i reads the blocks before
    i - window_blocks so, and the others as stored. A hit then ends only where all that is read as stored is
    there, and of blocks that have both forms the stored one is freed before any block is forgotten, first
    where no prefix is likely to end near it (see :class:`~octavo.cache.spare.Spare`). With ``budget_blocks``
    the oldest of that is read in summaries, which are cached with the last block they stand for (see
    :class:`~octavo.cache.summaries.Summaries`).
    """

    def __init__(
        self,
        *,
        block_size: int,
        num_blocks: int,
        fingerprint: str,
        enabled: bool = True,
        window_blocks: int | None = None,
        budget_blocks: int | None = None,
        hash_function: Callable[[bytes], bytes] = sha256,
    ) -> None:
        self.block_size = block_size
        self.enabled = enabled
        #: Blocks as stored that are read by nobody.
        self.num_evictable = 0
        self.num_evictions = 0
        self.window_blocks = window_blocks
        self.budget_blocks = budget_blocks
        self._fingerprint = fingerprint
        self._hash = hash_function
        self._max_protected = int(PROTECTED_SHARE * num_blocks)
        self._clock = 0
        self.forest = Forest(block_size)
        self._forget_all()

    def _forget_all(self) -> None:
        self.forest.clear()
        self._by_block: dict[int, Node] = {}
        self._by_compact: dict[int, Node] = {}
        self._leaves = UnusedLeaves(self._max_protected)
        self._spare = Spare(self.window_blocks)
        self.summaries = Summaries()
        self.num_evictable = self._num_idle_compact = 0

    @property
    def num_evictable_compact(self) -> int:
        """Compact blocks that are read by nobody, summaries too."""
        return self._num_idle_compact + self.summaries.num_idle

    def __len__(self) -> int:
        """Cached blocks, used or not."""
        return len(self.forest.by_key)

    def holds(self, block: int) -> bool:
        """True when the block is cached as stored, so that its rows must be kept."""
        return block in self._by_block

    def holds_compact(self, compact: int) -> bool:
        """As :meth:`holds`, for a compact block, a summary or not."""
        return compact in self._by_compact or self.summaries.holds(compact)

    def blocks(self) -> list[int]:
        """The blocks cached as stored, used or not."""
        return list(self._by_block)

    def compact_blocks(self) -> list[int]:
        """The cached compact blocks, summaries too, used or not."""
        return [*self._by_compact, *self.summaries.blocks()]

    def parents(self) -> dict[int, int]:
        """Cached block -> the block before it in its tree, -1 for the first."""
        return {
            block: node.parent.block if node.parent is not None else NO_BLOCK
            for block, node in self._by_block.items()
        }

    # ---- a request's chain

    def chain(self, token_ids: Sequence[int], salt: str, policy: str = "") -> Chain:
        """Start a chain. Raises ValueError for a token id that does not fit 32 bits."""
        return Chain(salt, bytearray(pack(token_ids)), policy, broken=not self.enabled)

    def digests(self, chain: Chain) -> list[bytes]:
        """The digests of all full blocks of the chain; hashes only what is new."""
        digests, size = chain.digests, self.forest.block_bytes
        for start in range(len(digests) * size, len(chain.packed) - size + 1, size):
            parent = digests[-1] if digests else self.root_digest(chain)
            digests.append(self._hash(parent + bytes(chain.packed[start : start + size])))
        return digests

    def root_digest(self, chain: Chain) -> bytes:
        """What stands before a chain's first block: fingerprint, policy and salt."""
        fingerprint, name = self._fingerprint.encode(), chain.root_name
        return self._hash(len(fingerprint).to_bytes(8, "big") + fingerprint + name)

    # ---- match (pure), commit (once)

    def match(self, chain: Chain) -> Match:
        """The longest cached prefix of a chain that can be read, less than all of it. Changes nothing."""
        nodes = self.forest.known(chain)
        node = nodes[-1] if nodes else self.forest.roots.get(chain.root_name)
        if node is None:
            return Match()
        count, num_compact, summarised = self._reach(nodes)
        if count < len(nodes):
            return Match(nodes[:count], None, 0, num_compact, nodes, summarised)
        start, limit = len(nodes) * self.block_size, chain.num_tokens - 1
        end = min(start + self.block_size, limit)
        wanted = bytes(chain.packed[start * TOKEN_BYTES : end * TOKEN_BYTES])
        tail, rows = self.forest.longest_common(node, wanted)
        return Match(nodes, tail, rows, num_compact, nodes, summarised)

    def _reach(self, nodes: Sequence[Node]) -> Reach:
        """How much of a path of nodes can be reused."""
        if self.window_blocks is None:
            return Reach(len(nodes), 0)  # all are there as stored

        def is_stored(index: int) -> bool:
            return nodes[index].block != NO_BLOCK

        if self.budget_blocks is None:
            end = num_with_compact(nodes)
            return readable(len(nodes), is_stored, lambda start: end, self.window_blocks)
        ends = run_ends([node.compact != NO_BLOCK for node in nodes])

        def has_layout(count: int) -> bool:
            there = (self.summaries.of_path(nodes, level, unit) for level, unit in layout(count))
            return ends[0] > 0 and all(there)

        return readable(
            len(nodes), is_stored, ends.__getitem__, self.window_blocks, self.budget_blocks, has_layout
        )

    @staticmethod
    def _is(node: Node, parent: Node, tokens: bytes | bytearray) -> bool:
        """A digest is only a hint: equal tokens under the same parent are the proof."""
        return node.parent is parent and node.tokens == tokens

    def commit(self, chain: Chain, match: Match, *, hit: bool) -> None:
        """Use what was matched. ``hit`` False (a resume) protects nothing."""
        self._clock += 1
        clock, nodes = self._clock, match.nodes
        stored, compact = self.num_idle(match)
        self.num_evictable -= stored
        self._num_idle_compact -= compact
        if nodes:
            self._leaves.remove(nodes[-1])  # what is above it is no leaf
        for node in nodes[: match.num_compact]:
            node.compact_users += 1
            node.last_used = clock
        for node in nodes[match.num_compact :]:
            node.stored_users += 1
            node.last_used = clock
        self._spare.update(nodes[match.num_compact :])
        if hit:
            self._leaves.protect(nodes)
        chain.path, chain.num_compact = list(nodes), match.num_compact
        if self.budget_blocks is not None:
            self._commit_summaries(chain, match)
        if match.tail is not None:
            # Copied, not used; and not protected either: one common token is no proof of worth.
            self._touch(match.tail)

    def _commit_summaries(self, chain: Chain, match: Match) -> None:
        """What is read in summaries is not read in compact form."""
        for node in match.nodes[1 : first_kept(match.num_summarised)]:
            node.compact_users -= 1
            node.summary_users += 1
            node.was_summarised = True
        for node in match.nodes:
            self.summaries.update(node)
        chain.num_summarised = match.num_summarised
        for level, unit in layout(match.num_summarised):
            self.summaries.use(match.nodes, level, unit)

    def num_idle(self, match: Match) -> tuple[int, int]:
        """How many blocks that are read of a match count as evictable: as stored, and compact."""
        nodes, num_compact = match.nodes, match.num_compact
        if self.window_blocks is None:  # whoever uses a block reads it as stored
            return len(nodes) - num_used(nodes), 0
        stored = sum(node.stored_users == 0 for node in nodes[num_compact:])
        if self.budget_blocks is None:
            return stored, max(0, num_with_compact(nodes) - num_used(nodes))
        compact = sum(node.is_idle and node.compact != NO_BLOCK for node in match.read)
        return stored, compact

    def _before_use(self, node: Node) -> None:
        if node.users == 0:
            self._leaves.remove(node)
        node.last_used = self._clock

    def _before_read(self, node: Node) -> None:
        """Before a chain that did not read a node, in whatever form, reads it."""
        if node.is_idle and node.compact != NO_BLOCK:
            self._num_idle_compact -= 1

    def _use_stored(self, node: Node) -> None:
        self.num_evictable -= node.stored_users == 0
        node.stored_users += 1
        self._spare.update([node])

    def _touch(self, node: Node) -> None:
        queued = node.queue_key is not None
        self._leaves.remove(node)
        node.last_used = self._clock
        if queued:
            self._enqueue(node)

    # ---- registering what was written

    def extend(self, chain: Chain, block: int) -> int:
        """Register the chain's next full block, whose rows are all written in ``block``.

        Returns the block that stands for it from now on: another one when another request wrote the
        same rows before; the caller then puts that one in the block table and gives up ``block``.
        So whoever uses a node also uses all nodes above it. A hash collision breaks the chain:
        nothing more of it is registered.
        """
        node = self._extend(chain, block, NO_BLOCK)
        if node is None:
            return block
        if node.block == NO_BLOCK:
            node.block = block
            self._by_block[block] = node
            self.num_evictable += 1
        self._before_read(node)
        self._use_stored(node)
        self.summaries.update(node)
        return node.block

    def extend_compact(self, chain: Chain, compact: int) -> int:
        """As :meth:`extend`, for a block that the chain has in compact form alone, as all before it."""
        node = self._extend(chain, NO_BLOCK, compact)
        if node is None:
            return compact
        self._before_read(node)
        node.compact_users += 1
        if node.compact == NO_BLOCK:
            self._set_compact(node, compact)
        self.summaries.update(node)
        chain.num_compact += 1
        return node.compact

    def extend_summarised(self, chain: Chain) -> None:
        """As :meth:`extend`, for a block that the chain reads in a summary alone."""
        node = self._extend(chain, NO_BLOCK, NO_BLOCK)
        if node is not None:
            node.was_summarised = True
            node.summary_users += 1
            self.summaries.update(node)
            chain.num_compact += 1

    def _extend(self, chain: Chain, block: int, compact: int) -> Node | None:
        """The node of the chain's next full block, a new one with these forms; None for a hash collision."""
        index, size = len(chain.path), self.forest.block_bytes
        digest = self.digests(chain)[index]
        tokens = bytes(chain.packed[index * size : (index + 1) * size])
        parent = chain.path[-1] if chain.path else self.forest.root(chain)
        node = self.forest.by_digest.get(digest)
        if node is None:
            node = self._insert(parent, tokens, block, digest, compact)
        elif not self._is(node, parent, tokens):
            chain.broken = True
            self.forest.drop_childless_root(parent)
            return None
        self._clock += 1
        self._before_use(node)
        chain.path.append(node)
        return node

    def compacted(self, chain: Chain, compact: int) -> int:
        """Take the compact form of the next of the chain's blocks that it reads as stored, written in
        ``compact``; from now on the chain reads that.

        Returns the compact block that stands for it, another one where there was one before; the caller then
        gives up ``compact``.
        """
        node = chain.path[chain.num_compact]
        if node.compact == NO_BLOCK:
            self._set_compact(node, compact)
        chain.num_compact += 1
        node.stored_users -= 1
        node.compact_users += 1
        self.num_evictable += node.stored_users == 0
        self._spare.update([node])
        return node.compact

    def summarised(self, chain: Chain, count: int) -> None:
        """The chain reads the ``count`` blocks behind its first in summaries from now on."""
        for node in chain.path[max(1, first_kept(chain.num_summarised)) : first_kept(count)]:
            node.was_summarised = True
            node.compact_users -= 1
            node.summary_users += 1
            self._num_idle_compact += node.is_idle and node.compact != NO_BLOCK
            self.summaries.update(node)
        chain.num_summarised = count

    def _set_compact(self, node: Node, compact: int) -> None:
        node.compact = compact
        self._by_compact[compact] = node
        self._spare.update([node])

    def release(self, chain: Chain, tail_block: int | None, tail_rows: int) -> None:
        """End the chain's use of its nodes; cache its last, partly filled block as a tail.

        ``tail_rows`` rows of ``tail_block`` are written. The tail is left out if a sibling already
        begins with its tokens. The chain can start again from :meth:`match`.
        """
        self._clock += 1
        if tail_block is not None and tail_rows and not chain.broken:
            parent = chain.path[-1] if chain.path else self.forest.root(chain)
            start = len(chain.path) * self.forest.block_bytes
            tokens = bytes(chain.packed[start : start + tail_rows * TOKEN_BYTES])
            if not self.forest.has_child(parent, tokens):
                tail = self._insert(parent, tokens, tail_block, b"")
                tail.last_used = self._clock
                self._enqueue(tail)
        clock, nodes = self._clock, chain.path
        ended = Match(nodes, num_compact=chain.num_compact, num_summarised=chain.num_summarised)
        for node in nodes[1 : first_kept(chain.num_summarised)]:
            node.summary_users -= 1
            node.compact_users += 1
        for node in nodes[: chain.num_compact]:
            node.compact_users -= 1
            node.last_used = clock
        for node in nodes[chain.num_compact :]:
            node.stored_users -= 1
            node.last_used = clock
        self._spare.update(nodes[chain.num_compact :])
        stored, compact = self.num_idle(ended)
        self.num_evictable += stored
        self._num_idle_compact += compact
        if self.budget_blocks is not None:
            for node in nodes:
                self.summaries.update(node)
        if nodes:
            self._enqueue(nodes[-1])  # a parent is queued only once nothing hangs below it
        chain.path, chain.num_compact, chain.num_summarised = [], 0, 0
        chain.broken = not self.enabled

    def _insert(
        self, parent: Node, tokens: bytes, block: int, digest: bytes, compact: int = NO_BLOCK
    ) -> Node:
        """Add a node below ``parent``, which the chain uses, so that it is in no queue."""
        node, old = self.forest.add(parent, tokens, block, digest, compact)
        if old is not None:
            # A tail that the new block begins with is of no more use: it goes first.
            self._leaves.remove(old)
            old.last_used = 0
            self._enqueue(old)
        if block != NO_BLOCK:
            self._by_block[block] = node
            self.num_evictable += 1
        if compact != NO_BLOCK:
            self._by_compact[compact] = node
            self._num_idle_compact += 1
        self._spare.children_changed(parent, parent.num_children - 1)
        self._spare.added(node)
        return node

    # ---- giving up

    def evict(self, *, compact: bool = False) -> Evicted | None:
        """Forget what is worth least and return its blocks; None if all are used.

        That is the stored form of a block that has both, which frees no ``compact`` one; or a compact block
        that summaries have taken the place of; or an unused leaf, which may have one form only: so what was
        wanted may take more than one call.
        """
        self._clock = self._leaves.age_out(self._clock)
        if compact and len(self.summaries):
            evicted = Evicted(NO_BLOCK, (self._free_superseded(),))
        elif not compact and len(self._spare) and (self._spare.unguarded or not len(self._leaves)):
            node = self._spare.first()
            evicted = Evicted(node.block, ())
            del self._by_block[node.block]
            node.block = NO_BLOCK
            self.num_evictable -= 1
            self._spare.update([node])
        elif len(self._leaves):
            evicted = self._remove(self._leaves.first())
        else:
            return None
        self.num_evictions += 1
        return evicted

    def clear(self) -> None:
        """Forget everything. The caller drops every chain's path and breaks it."""
        self._forget_all()

    def _enqueue(self, node: Node) -> None:
        if node.users or node.num_children or node.parent is None:
            return
        if node.block == NO_BLOCK:
            # No prefix can end here any more.
            self._leaves.unprotect(node)
            node.last_used = 0
        self._leaves.add(node)

    def _free_superseded(self) -> int:
        form = self.summaries.first()
        if isinstance(form, Summary):
            self.summaries.forget(form)
            return form.block
        self._num_idle_compact -= 1
        block, form.compact = form.compact, NO_BLOCK
        del self._by_compact[block]
        self.summaries.update(form)
        self._spare.update([form])
        return block

    def _remove(self, node: Node) -> Evicted:
        self._leaves.remove(node)
        self._leaves.unprotect(node)
        self._spare.removed(node)
        evicted = Evicted(node.block, tuple(self._forget_compact(node)))
        if node.block != NO_BLOCK:
            del self._by_block[node.block]
            self.num_evictable -= 1
        parent = self.forest.remove(node)
        self._spare.children_changed(parent, parent.num_children + 1)
        self._enqueue(parent)
        return evicted

    def _forget_compact(self, node: Node) -> list[int]:
        """The compact blocks of a node that is removed."""
        blocks = []
        if node.compact != NO_BLOCK:
            blocks.append(node.compact)
            del self._by_compact[node.compact]
            node.compact = NO_BLOCK
            self._num_idle_compact -= 1
            self.summaries.update(node)
        for summary in self.summaries.of(node):
            blocks.append(summary.block)
            self.summaries.forget(summary)
        return blocks

    def check_invariants(self, chains: Iterable[Chain]) -> None:
        """Raise AssertionError unless tree, digests, counts and queues agree (for tests)."""
        prefix_checks.check(self, chains)
