"""The tree of cached blocks on its own; blocks are just numbers here."""

from __future__ import annotations

import itertools
import random

import pytest

from octavo.cache.chain import Chain, Match, Node, sha256
from octavo.cache.explain import explain
from octavo.cache.prefix_cache import PrefixCache


def make(**kwargs: object) -> PrefixCache:
    options: dict[str, object] = {"block_size": 4, "num_blocks": 100, "fingerprint": "f", **kwargs}
    return PrefixCache(**options)  # type: ignore[arg-type]


_blocks = itertools.count()


def run(
    cache: PrefixCache,
    tokens: list[int],
    salt: str = "",
    written: int | None = None,
    others: tuple[Chain, ...] = (),
) -> Chain:
    """A request that matches, writes ``written`` tokens and is still there; block ids are fresh."""
    chain = cache.chain(tokens, salt)
    cache.commit(chain, cache.match(chain), hit=True)
    while (len(chain.path) + 1) * cache.block_size <= (len(tokens) if written is None else written):
        if chain.broken:
            break
        cache.extend(chain, next(_blocks))
    cache.check_invariants([chain, *others])
    return chain


def serve(cache: PrefixCache, tokens: list[int], salt: str = "", others: tuple[Chain, ...] = ()) -> None:
    """A request from start to end; all its tokens are written."""
    chain = run(cache, tokens, salt, others=others)
    rows = len(tokens) - len(chain.path) * cache.block_size
    cache.release(chain, next(_blocks) if rows else None, rows)
    cache.check_invariants(others)


def serve_within(cache: PrefixCache, limit: int, tokens: list[int]) -> None:
    """A request in a pool of ``limit`` blocks."""
    missing = -(-len(tokens) // cache.block_size) - hit(cache, tokens) // cache.block_size
    while len(cache) + missing > limit:
        assert cache.evict() is not None
    serve(cache, tokens)


def hit(cache: PrefixCache, tokens: list[int], salt: str = "") -> int:
    match = cache.match(cache.chain(tokens, salt))
    return len(match.nodes) * cache.block_size + match.tail_rows


def test_p05_a_hit_is_token_granular() -> None:
    cache = make(block_size=16)
    shared = list(range(20))
    serve(cache, [*shared, 100, 101, 102])
    match = cache.match(cache.chain([*shared, 200, 201], ""))
    assert (len(match.nodes), match.tail_rows) == (1, 4)
    # Within a full block that follows, too.
    serve(cache, list(range(40)))
    match = cache.match(cache.chain([*range(30), 200, 201], ""))
    assert (len(match.nodes), match.tail_rows) == (1, 14)


def test_the_longest_of_many_siblings_is_found() -> None:
    rng = random.Random(1)
    cache = make(block_size=8, num_blocks=2000)
    prompts = [[rng.randrange(3) for _ in range(rng.randrange(1, 8))] for _ in range(300)]
    for prompt in prompts:
        serve(cache, prompt)
    for _ in range(300):
        wanted = [rng.randrange(3) for _ in range(8)]
        best = max(
            next((i for i, (a, b) in enumerate(zip(p, wanted, strict=False)) if a != b), min(len(p), 7))
            for p in prompts
        )
        assert hit(cache, wanted) == min(best, 7)


def test_s05_at_least_one_token_is_computed() -> None:
    cache = make(block_size=16)
    serve(cache, list(range(16)))
    assert hit(cache, list(range(16))) == 15
    assert hit(cache, list(range(17))) == 16
    assert hit(cache, [0]) == 0


def test_match_is_pure() -> None:
    cache = make()
    serve(cache, list(range(10)))
    before = (len(cache), cache.num_evictable, cache._clock, list(cache._leaves.probation))
    for tokens in (list(range(10)), [0, 1, 9], [7], list(range(40))):
        cache.match(cache.chain(tokens, ""))
        cache.match(cache.chain(tokens, "unknown salt"))
    assert (len(cache), cache.num_evictable, cache._clock, list(cache._leaves.probation)) == before


def test_a_block_is_matched_only_when_it_was_registered() -> None:
    cache = make()
    chain = run(cache, list(range(12)), written=7)
    assert hit(cache, list(range(12))) == 4
    cache.extend(chain, next(_blocks))
    assert hit(cache, list(range(12))) == 8


@pytest.mark.parametrize("value", [b"", b"constant"])
def test_p02_a_collision_is_a_miss(value: bytes) -> None:
    cache = make(hash_function=lambda data: value)
    first, second = [1, 2, 3, 4, 5, 6, 7, 8, 9], [5, 6, 7, 8, 1, 2, 3, 4, 9]
    serve(cache, first)
    assert hit(cache, second) == 0
    serve(cache, second)
    assert hit(cache, second) == 0, "nothing is registered over a collision"
    assert hit(cache, first) == 4, "the first block is really the same"
    # The same tokens in the same place under another parent, or another salt, are not the same.
    assert hit(cache, [9, 9, 9, 9, 1, 2, 3, 4, 0]) == 0
    assert hit(cache, first, salt="other") == 0


def test_p02_every_digest_is_verified_by_parent_too() -> None:
    # All blocks collide with each other, unless their tokens differ.
    cache = make(hash_function=lambda data: data[-16:])
    serve(cache, [1, 1, 1, 1, 2, 2, 2, 2])
    assert hit(cache, [2, 2, 2, 2, 5]) == 0
    assert hit(cache, [1, 1, 1, 1, 2, 2, 2, 2, 5]) == 8


def test_p03_salts_share_nothing() -> None:
    cache = make()
    tokens = list(range(10))
    serve(cache, tokens, salt="a")
    assert hit(cache, tokens, salt="a") == 9
    for salt in ("", "b", "aa"):
        assert hit(cache, tokens, salt=salt) == 0
        chain = cache.chain(tokens, salt)
        assert explain(cache, chain, cache.match(chain)).startswith("no cached block starts with this prefix")


@pytest.mark.parametrize("other", [("g", ""), ("f", "x"), ("", "f"), ("ff", "")])
def test_p06_the_fingerprint_is_part_of_every_digest(other: tuple[str, str]) -> None:
    tokens = list(range(12))
    fingerprint, salt = other
    cache, changed = make(fingerprint="f"), make(fingerprint=fingerprint)
    ours = cache.digests(cache.chain(tokens, ""))
    theirs = changed.digests(changed.chain(tokens, salt))
    assert not set(ours) & set(theirs)


def test_hashing_is_incremental() -> None:
    calls = []

    def counting(data: bytes) -> bytes:
        calls.append(len(data))
        return sha256(data)

    cache = make(hash_function=counting)
    chain = cache.chain(list(range(40)), "")
    cache.match(chain)
    cache.match(chain)
    cache.digests(chain)
    assert len(calls) == 11, "ten blocks and the root, once"
    for token in range(8):
        chain.append(token)
        cache.digests(chain)
    assert len(calls) == 13
    assert max(calls) < 64


def test_what_is_cached_is_not_hashed_again() -> None:
    calls = []

    def counting(data: bytes) -> bytes:
        calls.append(data)
        return sha256(data)

    cache, cold = make(hash_function=counting), make()
    serve(cache, list(range(400)))
    calls.clear()
    chain = cache.chain(list(range(404)), "")
    cache.match(chain)
    assert not calls
    assert cache.digests(chain) == cold.digests(cold.chain(list(range(404)), ""))
    assert len(calls) == 1, "the one block that is new"


@pytest.mark.parametrize("value", [None, b"constant"])
def test_the_way_down_is_found_wherever_ways_part(value: bytes | None) -> None:
    rng = random.Random(3)
    cache = make(block_size=2, num_blocks=9000, hash_function=sha256 if value is None else lambda data: value)
    prompts: list[list[int]] = [[]]
    found = 0
    for _ in range(120):
        stem = rng.choice(prompts)
        prompts.append([*stem[: rng.randrange(len(stem) + 1)], *(rng.randrange(2) for _ in range(90))])
        serve(cache, prompts[-1])
        for _ in range(rng.randrange(30)):
            cache.evict()  # the ways that were added last are not always there
        wanted = [*rng.choice(prompts)[: rng.randrange(91)], 0, 1, 0]
        chain, path = cache.chain(wanted, ""), list[Node]()
        nodes = {(node.parent, node.tokens): node for node in cache.forest.by_key.values()}
        node = cache.forest.roots.get(chain.root_name)
        for start in range(0, (len(wanted) - 1) // 2 * 8, 8):
            node = nodes.get((node, bytes(chain.packed[start : start + 8])))
            if node is None:
                break
            path.append(node)
        assert cache.forest.known(chain) == path
        found = max(found, len(path))
    assert cache.num_evictions > 100
    assert found > (40 if value is None else 0)


def test_p04_what_is_generated_is_found_again() -> None:
    cache = make()
    chain = run(cache, list(range(6)), written=4)
    for token in (50, 51, 52, 53):
        chain.append(token)
    cache.extend(chain, next(_blocks))
    cache.release(chain, next(_blocks), 1)  # the last sampled token was never written
    assert hit(cache, [*range(6), 50, 51, 52, 53, 60, 61]) == 9


def evicted(cache: PrefixCache) -> int | None:
    gone = cache.evict()
    return None if gone is None else gone.block


def test_a_tail_gives_way_to_what_it_begins() -> None:
    cache = make()
    serve(cache, [1, 2])
    serve(cache, [1])  # covered: not registered
    assert len(cache) == 1
    tail_block = cache.blocks()[0]
    serve(cache, [9, 9, 9])
    serve(cache, [1, 2, 3, 4])
    assert evicted(cache) == tail_block, "the short tail is of no more use and goes first"


def test_the_same_block_written_twice_is_kept_once() -> None:
    cache = make()
    one, two = run(cache, [0, 1, 2, 3, 4], written=0), run(cache, [0, 1, 2, 3, 5], written=0)
    first = cache.extend(one, 1000)
    assert first == 1000
    assert cache.extend(two, 1001) == 1000
    assert not cache.holds(1001)
    cache.check_invariants([one, two])
    cache.release(one, None, 0)
    assert cache.num_evictable == 0
    cache.release(two, None, 0)
    assert cache.num_evictable == 1


def test_eviction_is_leaf_first_and_spares_what_is_used() -> None:
    cache = make()
    chain = run(cache, list(range(8)))
    used = {node.block for node in chain.path}
    serve(cache, [*range(8), 20, 21, 22, 23, 30], others=(chain,))
    serve(cache, [40] * 9, others=(chain,))
    parents: dict[int, int] = {
        node.block: node.parent.block for node in cache._by_block.values() if node.parent is not None
    }
    gone: list[int] = []
    while (block := evicted(cache)) is not None:
        assert not any(parents[b] == block for b in cache.blocks()), "a parent went before its child"
        gone.append(block)
        cache.check_invariants([chain])
    assert set(cache.blocks()) == used
    cache.release(chain, None, 0)
    assert {evicted(cache), evicted(cache)} == used
    assert cache.evict() is None
    assert not cache.forest.roots


def test_the_least_recently_used_goes_first() -> None:
    cache = make()
    for start in (0, 100, 200):
        serve(cache, list(range(start, start + 4)))
    first = cache.blocks()[0]
    chain = cache.chain([0, 1, 2, 3, 9], "")
    cache.commit(chain, cache.match(chain), hit=False)  # a resume: used, but not a hit
    cache.release(chain, None, 0)
    assert evicted(cache) != first
    assert evicted(cache) != first
    assert evicted(cache) == first


def test_a_tail_that_was_copied_counts_as_used() -> None:
    cache = make()
    serve(cache, [1, 2, 3])
    serve(cache, [5, 6, 7])
    chain = cache.chain([1, 2, 3, 9], "")
    cache.commit(chain, cache.match(chain), hit=True)
    cache.release(chain, None, 0)
    cache.check_invariants([])
    cache.evict()
    assert hit(cache, [1, 2, 3, 9]) == 3
    assert hit(cache, [5, 6, 7, 9]) == 0


def test_p07_a_burst_of_one_off_prompts_keeps_the_hot_prefix() -> None:
    rng = random.Random(0)
    cache = make(block_size=16, num_blocks=64)
    system = [rng.randrange(1000) for _ in range(40 * 16)]

    serve_within(cache, 64, [*system, 1])
    serve_within(cache, 64, [*system, 2])
    # The hits protect 40 blocks of 64: below the cap of 80%.
    for _ in range(1000):
        # They begin alike, so each copies a few rows: that must not make favourites of them.
        serve_within(cache, 64, [system[0], system[1], *(rng.randrange(1000) for _ in range(60))])
    assert hit(cache, [*system, 3]) == len(system)


def test_an_old_favourite_ages_out() -> None:
    cache = make(block_size=4, num_blocks=20)

    def favourite(start: int) -> list[int]:
        return list(range(start, start + 16))

    for n in range(10):
        for _ in range(2):
            serve_within(cache, 20, [*favourite(100 * n), 7])
        assert cache._leaves.num_protected <= 20
    assert hit(cache, [*favourite(900), 8]) == 16
    assert hit(cache, [*favourite(0), 8]) == 0


def test_what_is_new_has_a_chance_beside_favourites() -> None:
    cache = make(block_size=4, num_blocks=20)
    favourites = [[100 * n + i for i in range(4)] for n in range(19)]
    for favourite in favourites:
        serve(cache, favourite)
        chain = cache.chain([*favourite, 7], "")
        cache.commit(chain, cache.match(chain), hit=True)
        cache.release(chain, None, 0)
    assert cache._leaves.num_protected == 19, "more than the cap of 16"
    for new in ([1, 1, 1, 1], [2, 2, 2, 2], [3, 3, 3, 3]):
        serve_within(cache, 20, new)
    # The oldest favourites gave way, so the new ones live long enough to be hit.
    assert hit(cache, [2, 2, 2, 2, 0]) == 4
    assert hit(cache, [*favourites[0], 0]) == 0
    assert hit(cache, [*favourites[-1], 0]) == 4


def test_clear_forgets_everything() -> None:
    cache = make()
    serve(cache, list(range(9)), salt="a")
    assert cache.blocks()
    cache.clear()
    assert cache.blocks() == []
    assert len(cache) == cache.num_evictable == 0
    assert hit(cache, list(range(9)), salt="a") == 0
    cache.check_invariants([])


def test_disabled_keeps_and_matches_nothing() -> None:
    cache = make(enabled=False)
    chain = cache.chain(list(range(9)), "")
    assert chain.broken
    assert cache.match(chain) == Match()
    cache.release(chain, 0, 3)
    assert len(cache) == 0
    assert explain(cache, chain, Match()) == "prefix caching is off"


@pytest.mark.parametrize("token", [-1, 2**32, 1.5, None])
def test_a_token_id_that_cannot_be_is_refused(token: object) -> None:
    with pytest.raises(ValueError, match="whole numbers between 0 and"):
        make().chain([1, token], "")  # type: ignore[list-item]


@pytest.mark.parametrize("salt", ["", "é", "\ud800", "a\0b"])
def test_any_string_is_a_salt(salt: str) -> None:
    cache = make()
    serve(cache, list(range(9)), salt=salt)
    assert hit(cache, list(range(9)), salt=salt) == 8
    while cache.evict() is not None:
        pass
    assert not cache.forest.roots


def test_p09_the_reason_names_the_first_token_that_is_computed() -> None:
    cache = make(block_size=16)
    serve(cache, list(range(40)))
    reasons = {
        (*range(37), 99, 98): "token 37 differs from what is cached",
        (*range(32), 99, 98): "token 32 differs from what is cached",
        (*range(40), 99, 98): "nothing cached continues this prefix: token 40 is the first computed",
        (99, 98): "no cached block starts with this prefix: token 0 is the first computed",
        tuple(range(40)): "the whole prompt is cached; its last token (39) is always computed",
        tuple(range(33)): "the whole prompt is cached; its last token (32) is always computed",
        (0,): "the prompt is one token (0), which is always computed",
    }
    for tokens, reason in reasons.items():
        chain = cache.chain(list(tokens), "")
        assert explain(cache, chain, cache.match(chain)) == reason
