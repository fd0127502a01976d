"""What of a request's prefix comes from memory, and what from disk. Free of torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from octavo.cache.chain import NO_BLOCK, Chain, Match, Node, Reach, readable, run_ends
from octavo.cache.disk_cache import DiskCache
from octavo.cache.prefix_cache import PrefixCache
from octavo.kernels.history_layout import first_kept, last_block, layout


class LoadedRows(NamedTuple):
    """Rows of a block that an earlier process left, as stored or ``compact``; None for a block that is read
    in a summary alone."""

    rows: memoryview | None
    compact: bool


class DiskPrefix(NamedTuple):
    """A prefix of which ``match`` is in memory and ``loads`` follow, in order; and the ``summaries``,
    ((level, unit), rows), that memory has not."""

    match: Match
    loads: list[LoadedRows]
    summaries: list[tuple[tuple[int, int], memoryview]]


class _Sources(NamedTuple):
    """How a prefix can be read, and how many of its blocks come from memory."""

    reach: Reach
    in_memory: int


def longest(chain: Chain, cache: PrefixCache, disk: DiskCache, match: Match) -> DiskPrefix:
    """The longest prefix that can be read with what is on disk; ``match`` itself where that adds nothing.

    Whole blocks only, and less than all of the chain's tokens. Views live until the disk's ``end_reading``.
    """
    digests = cache.digests(chain)[: (chain.num_tokens - 1) // cache.block_size]
    if len(match.nodes) == len(match.known) and not _any_form(disk, digests[len(match.known) :][:1]):
        return DiskPrefix(match, [], [])
    while True:
        sources = _sources(digests, cache, match.known, disk)
        if sources is None:
            return DiskPrefix(match, [], [])
        count, num_compact, summarised = sources.reach
        if count * cache.block_size <= _num_tokens(match, cache.block_size):
            return DiskPrefix(match, [], [])
        loads: list[LoadedRows] = []
        for index in range(sources.in_memory, count):
            compact, rows = index < num_compact, None
            if not 0 < index < first_kept(summarised):
                rows = disk.fetch(cache.root_digest(chain), digests, chain.packed, index, compact=compact)
                if rows is None:
                    break
            loads.append(LoadedRows(rows, compact))
        else:
            nodes = match.known[: sources.in_memory]
            summaries: list[tuple[tuple[int, int], memoryview]] = []
            for pair in layout(summarised):
                if cache.summaries.of_path(nodes, *pair) is None:
                    rows = disk.fetch_summary(digests, chain.packed, *pair)
                    if rows is None:
                        index = last_block(*pair)
                        break
                    summaries.append((pair, rows))
            else:
                num_compact = min(num_compact, len(nodes))
                own = Match(nodes, None, 0, num_compact, match.known, summarised)
                return DiskPrefix(own, loads, summaries)
        # Damaged, or not there yet or any more: what is before it may still be read.
        digests = digests[:index]


def _any_form(disk: DiskCache, digests: Sequence[bytes]) -> bool:
    return any(disk.can_fetch(d, compact=False) or disk.can_fetch(d, compact=True) for d in digests)


def _num_tokens(match: Match, block_size: int) -> int:
    return len(match.nodes) * block_size + match.tail_rows


def _sources(
    digests: Sequence[bytes], cache: PrefixCache, nodes: Sequence[Node], disk: DiskCache
) -> _Sources | None:
    in_memory = len(nodes)
    while True:
        stored, compact = [], []
        for index, digest in enumerate(digests):
            known = nodes[index : index + 1] if index < in_memory else []
            stored.append(any(_has(n, compact=False) for n in known) or disk.can_fetch(digest, compact=False))
            compact.append(any(_has(n, compact=True) for n in known) or disk.can_fetch(digest, compact=True))
            if not (known or stored[-1] or compact[-1]):
                break

        ends, path = run_ends(compact), nodes[:in_memory]

        def has_layout(count: int, ends: list[int] = ends, path: Sequence[Node] = path) -> bool:
            return ends[0] > 0 and all(
                cache.summaries.of_path(path, level, unit) is not None
                or (last_block(level, unit) < len(digests) and disk.can_fetch_summary(digests, level, unit))
                for level, unit in layout(count)
            )

        reach = readable(
            len(stored),
            stored.__getitem__,
            ends.__getitem__,
            cache.window_blocks,
            cache.budget_blocks,
            has_layout,
        )
        # From the first block that memory has not as it is read, all must come from disk.
        count, first = reach.num_blocks, reach.num_blocks
        hollow = range(1, first_kept(reach.num_summarised))
        for index in range(count):
            in_form = index < in_memory and (
                index in hollow or _has(nodes[index], compact=index < reach.num_compact)
            )
            if not in_form:
                first = index
                break
        if all(
            disk.can_fetch(digests[i], compact=i < reach.num_compact)
            for i in range(first, count)
            if i not in hollow
        ):
            return _Sources(reach, first)
        if first == in_memory:
            return None
        in_memory = first


def _has(node: Node, *, compact: bool) -> bool:
    return (node.compact if compact else node.block) != NO_BLOCK
