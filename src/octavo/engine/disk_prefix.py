"""What of a request's prefix comes from memory, and what from disk. Free of torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from octavo.cache.chain import NO_BLOCK, Chain, Match, Node, readable
from octavo.cache.disk_cache import DiskCache
from octavo.cache.prefix_cache import PrefixCache


class LoadedRows(NamedTuple):
    """Rows of a block that an earlier process left, as stored or ``compact``."""

    rows: memoryview
    compact: bool


class DiskPrefix(NamedTuple):
    """A prefix of which ``match`` is in memory and ``loads`` follow, in order."""

    match: Match
    loads: list[LoadedRows]


class _Sources(NamedTuple):
    """How a prefix can be read: ``num_blocks``, the first ``num_compact`` of them compact, and the first
    ``in_memory`` from memory."""

    num_blocks: int
    num_compact: int
    in_memory: int


def longest(chain: Chain, cache: PrefixCache, disk: DiskCache, match: Match) -> DiskPrefix:
    """The longest prefix that can be read with what is on disk; ``match`` itself where that adds nothing.

    Whole blocks only, and less than all of the chain's tokens. Views live until the disk's ``end_reading``.
    """
    digests = cache.digests(chain)[: (chain.num_tokens - 1) // cache.block_size]
    if len(match.nodes) == len(match.known) and not _any_form(disk, digests[len(match.known) :][:1]):
        return DiskPrefix(match, [])
    while True:
        sources = _sources(digests, match.known, disk, cache.window_blocks)
        if sources is None or sources.num_blocks * cache.block_size <= _num_tokens(match, cache.block_size):
            return DiskPrefix(match, [])
        loads: list[LoadedRows] = []
        for index in range(sources.in_memory, sources.num_blocks):
            compact = index < sources.num_compact
            rows = disk.fetch(cache.root_digest(chain), digests, chain.packed, index, compact=compact)
            if rows is None:
                break
            loads.append(LoadedRows(rows, compact))
        else:
            nodes = match.known[: sources.in_memory]
            num_compact = min(sources.num_compact, len(nodes))
            return DiskPrefix(Match(nodes, num_compact=num_compact, known=match.known), loads)
        # Damaged, or not there yet or any more: what is before it may still be read.
        digests = digests[:index]


def _any_form(disk: DiskCache, digests: Sequence[bytes]) -> bool:
    return any(disk.can_fetch(d, compact=False) or disk.can_fetch(d, compact=True) for d in digests)


def _num_tokens(match: Match, block_size: int) -> int:
    return len(match.nodes) * block_size + match.tail_rows


def _sources(
    digests: Sequence[bytes], nodes: Sequence[Node], disk: DiskCache, window_blocks: int | None
) -> _Sources | None:
    in_memory = len(nodes)
    while True:
        stored, compact = [], []
        for index, digest in enumerate(digests):
            known = nodes[index : index + 1] if index < in_memory else []
            stored.append(any(_has(n, compact=False) for n in known) or disk.can_fetch(digest, compact=False))
            compact.append(any(_has(n, compact=True) for n in known) or disk.can_fetch(digest, compact=True))
            if not (stored[-1] or compact[-1]):
                break
        first_without = compact.index(False) if False in compact else len(compact)
        count, num_compact = readable(len(stored), stored.__getitem__, first_without, window_blocks)
        # From the first block that memory has not as it is read, all must come from disk.
        first = count
        for index in range(count):
            if index >= in_memory or not _has(nodes[index], compact=index < num_compact):
                first = index
                break
        if all(disk.can_fetch(digests[i], compact=i < num_compact) for i in range(first, count)):
            return _Sources(count, num_compact, first)
        if first == in_memory:
            return None
        in_memory = first


def _has(node: Node, *, compact: bool) -> bool:
    return (node.compact if compact else node.block) != NO_BLOCK
