"""Whether the parts of a prefix cache agree with one another: for tests, slow. Free of torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from octavo.cache.chain import NO_BLOCK, Chain
from octavo.kernels.history_layout import first_kept

if TYPE_CHECKING:
    from octavo.cache.prefix_cache import PrefixCache


def check(cache: PrefixCache, chains: Iterable[Chain]) -> None:
    """Raise AssertionError unless tree, digests, counts and queues agree; ``chains`` are all there are."""
    forest = cache.forest
    nodes = list(forest.by_key.values())
    users: Counter[int] = Counter()
    stored_users: Counter[int] = Counter()
    summary_users: Counter[int] = Counter()
    for chain in chains:
        parent = forest.roots.get(chain.root_name)
        assert chain.num_compact <= len(chain.path)
        for index, node in enumerate(chain.path):
            assert node.parent is parent, "a path skips a node"
            users[node.serial] += 1
            stored_users[node.serial] += index >= chain.num_compact
            summary_users[node.serial] += 0 < index < first_kept(chain.num_summarised)
            if not 0 < index < first_kept(chain.num_summarised):
                assert (node.compact if index < chain.num_compact else node.block) != NO_BLOCK
            parent = node
    for key, node in forest.by_key.items():
        assert node.key == key
        hollow = node.block == NO_BLOCK and node.compact == NO_BLOCK
        assert not hollow or node.was_summarised, "a node without a block"
        assert node.block == NO_BLOCK or cache._by_block[node.block] is node
        assert node.compact == NO_BLOCK or cache._by_compact[node.compact] is node
        assert node.users == users[node.serial], "users differ from the paths"
        assert node.stored_users == stored_users[node.serial], "stored users differ from the paths"
        assert node.summary_users == summary_users[node.serial], "summary users differ from the paths"
        parent = node.parent
        assert parent is not None
        above = forest.roots.get(parent.tokens) if parent.parent is None else forest.by_key.get(parent.key)
        assert above is parent, "a parent was given up before its child"
        if parent.parent is not None:
            assert len(parent.tokens) == forest.block_bytes, "a tail has a child"
            gone = parent.compact == NO_BLOCK and not parent.was_summarised
            assert node.compact == NO_BLOCK or not gone, "compact below stored only"
        assert len(node.tokens) < forest.block_bytes or forest.by_digest[node.digest] is node
    children = Counter(node.parent.serial for node in nodes if node.parent is not None)
    for parent in [*nodes, *forest.roots.values()]:
        assert parent.num_children == children[parent.serial]
        assert parent.parent is not None or parent.num_children, "an empty tree is kept"
        assert parent.newest is None or parent.newest.parent is parent
        assert parent.newest is None or forest.by_digest[parent.newest.digest] is parent.newest
    by_compact = cache._by_compact.values()
    assert cache.num_evictable == sum(node.stored_users == 0 for node in cache._by_block.values())
    assert cache._num_idle_compact == sum(node.is_idle for node in by_compact)
    assert list(forest.children) == sorted(forest.by_key)
    assert len(cache._by_block) == sum(node.block != NO_BLOCK for node in nodes)
    assert len(cache._by_compact) == sum(node.compact != NO_BLOCK for node in nodes)
    assert len(forest.by_digest) == sum(len(node.tokens) == forest.block_bytes for node in nodes)
    cache._leaves.check_invariants(nodes)
    cache._spare.check_invariants(nodes)
    cache.summaries.check_invariants(nodes)
