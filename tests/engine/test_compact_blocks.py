"""Blocks with two forms: a hit is lawful only where all that its next query reads is there as it reads it."""

from __future__ import annotations

import pytest
from fake_model import FakeModel, add, build, prompt_of

from octavo.engine.blocks import PoolShape
from octavo.request import Request

SIZE, WINDOW = 4, 12


def compact_model(**options) -> FakeModel:
    given = {"block_size": SIZE, "num_blocks": 40, "num_compact": 60, "window": WINDOW, "budget": 16}
    return build(**given | options)


def longest_lawful_hit(model: FakeModel, tokens: list[int], most: int) -> int:
    """By the definition, over the cached blocks of one conversation."""
    cache = model.scheduler._blocks.cache
    nodes = []
    chain = cache.chain(tokens, "")
    for digest in cache.digests(chain):
        if digest not in cache.forest.by_digest:
            break
        nodes.append(cache.forest.by_digest[digest])
    tails = [n for n in cache.forest.by_key.values() if not n.digest]
    best = 0
    for length in range(1, most + 1):
        whole, rows = divmod(length, SIZE)
        partial = nodes[whole : whole + 1] or [t for t in tails if nodes and t.parent is nodes[-1]]
        if whole > len(nodes) or (rows and not any(n.block >= 0 for n in partial)):
            continue
        read_compact = sum((block + 1) * SIZE <= length - WINDOW for block in range(whole))
        if any(
            all(n.compact >= 0 for n in nodes[:split]) and all(n.block >= 0 for n in nodes[split:whole])
            for split in range(read_compact + 1)
        ):
            best = length
    return best


def forms(model: FakeModel) -> tuple[int, int]:
    cache = model.scheduler._blocks.cache
    return len(cache.blocks()), len(cache.compact_blocks())


@pytest.mark.parametrize("budget", [1, 3, 16, 200])
def test_a_block_is_compacted_once_and_in_order_when_the_window_has_left_it(budget: int) -> None:
    model = compact_model(num_blocks=60, budget=budget)
    request = add(model, prompt_of(70), max_tokens=50)
    model.run()
    last = 70 + 50 - 2  # the last token sampled is never computed
    assert model.compactions[request.id] == list(range((last - WINDOW) // SIZE))


def test_a_step_of_an_answer_compacts_one_block_at_most_however_long_the_history() -> None:
    for length in (40, 160):
        model = compact_model(num_blocks=60)
        request = add(model, prompt_of(length), max_tokens=41)
        steps = [share.compactions for output in model.run() for share in output.scheduled]
        answer = steps[-40:]
        assert max(map(len, answer)) == 1
        assert sum(map(len, answer)) == 40 // SIZE
        assert request.finished


def test_two_requests_with_one_prefix_compact_it_once() -> None:
    model = compact_model()
    prompt = prompt_of(61)
    first = add(model, prompt, max_tokens=1)
    model.run()
    made = len(model.compactions[first.id])
    again = [add(model, [*prompt, n], max_tokens=20) for n in range(3)]
    model.run()
    for request in again:
        assert request.num_cached_tokens == 61 - 61 % SIZE + 61 % SIZE
        assert min(model.compactions[request.id]) >= made


@pytest.mark.parametrize("others", [0, 3, 8, 12])
def test_a_fork_at_every_depth_is_as_long_as_is_lawful(others: int) -> None:
    hits = []
    for depth in range(1, 58):
        model = compact_model()
        base = prompt_of(50)
        talk = add(model, base, max_tokens=8)
        model.run()
        tokens = talk.token_ids[:-1]
        for _ in range(others):
            add(model, prompt_of(8), max_tokens=2)
        model.run()
        allowed = longest_lawful_hit(model, tokens, min(depth, len(tokens)))
        fork = add(model, [*tokens[:depth], 7], max_tokens=3)
        model.run()
        assert fork.num_cached_tokens == allowed
        hits.append(allowed)
    assert hits[-1] == 57, "the end of a turn keeps its window"
    if others == 0:
        assert hits == list(range(1, 58)), "nothing was given up"
    if others == 12:
        assert min(hits[20:40]) < 20, "what was given up was not missed"


def test_what_no_prefix_is_likely_to_need_is_freed_first() -> None:
    model = compact_model(num_blocks=24)
    long = add(model, prompt_of(70), max_tokens=2)
    model.run()
    kept = [add(model, prompt_of(6), max_tokens=2) for _ in range(3)]
    model.run()
    kept += [add(model, prompt_of(9), max_tokens=2) for _ in range(4)]
    model.run()  # of the long one's blocks those far from its end go, and no turn's end
    assert longest_lawful_hit(model, long.token_ids, 40) < 40
    for talk in (long, *kept):
        end = len(talk.token_ids) - 1
        assert longest_lawful_hit(model, talk.token_ids, end) == end


def test_a_hit_that_is_shortened_says_why_and_makes_the_blocks_whole_again() -> None:
    model = compact_model(num_blocks=16)
    talk = add(model, prompt_of(90), max_tokens=2)
    model.run()
    tokens = talk.token_ids
    fork = [*tokens[:24], 5]
    assert longest_lawful_hit(model, tokens, 24) < 24
    first = add(model, fork, max_tokens=1)
    model.run()
    assert "24 tokens of the prefix are cached" in (first.cache_miss_reason or "")
    second = add(model, [*fork[:-1], 6], max_tokens=1)
    model.run()
    assert second.num_cached_tokens == 24, "the blocks that were computed again have both forms"
    assert second.num_compact_tokens == (24 - WINDOW) // SIZE * SIZE


def test_the_pools_hold_by_far_more_than_blocks_as_stored_alone() -> None:
    model = compact_model(num_blocks=16, num_compact=40, max_model_len=1000)
    request: Request = add(model, prompt_of(120), max_tokens=30)
    model.run()
    assert request.finish_reason == "length"
    assert request.num_tokens == 150
    assert request.num_preemptions == 0
    assert forms(model)[0] <= 16


@pytest.mark.parametrize(
    ("shape", "capacity"),
    [
        (PoolShape(4, 10), 40),
        (PoolShape(4, 3, 9, 12), 12),
        (PoolShape(4, 4, 9, 12), 16),
        (PoolShape(4, 5, 9, 12), 52),
    ],
)
def test_the_longest_sequence_is_computed_and_one_token_more_is_refused(shape, capacity) -> None:
    assert shape.capacity == capacity
    model = build(
        block_size=shape.block_size, num_blocks=shape.num_blocks, num_compact=shape.num_compact,
        window=shape.window, budget=16,
    )  # fmt: skip
    request = add(model, prompt_of(capacity), max_tokens=5)
    model.run()
    assert request.num_tokens == capacity + 1
    with pytest.raises(ValueError, match="more than the whole KV pool holds"):
        add(model, prompt_of(capacity + 1))


@pytest.mark.parametrize(("window", "compact"), [(6, 4), (0, 4), (8, 0)])
def test_pools_that_cannot_be_are_refused(window: int, compact: int) -> None:
    with pytest.raises(ValueError, match=r"history_window must be a multiple|num_compact_blocks must be"):
        compact_model(window=window, num_compact=compact)
