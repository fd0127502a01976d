"""Sequences that share blocks: the same bits as with blocks of their own, and every whole span read once."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.kernels import api, fused

from .paged import Case, Paged, build, oracle, pool

SPAN = api.SPAN
NAN = float("nan")


@dataclass(frozen=True)
class Tree(Case):
    """``forks[s]`` is (parent, keys): sequence s starts with that many keys of an earlier sequence."""

    forks: tuple[tuple[int, int], ...] = ()

    def tokens(self, s: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q, k, v = super().tokens(s)
        parent, keys = self.forks[s]
        if keys:
            _, parent_k, parent_v = self.tokens(parent)
            k[:keys], v[:keys] = parent_k[:keys], parent_v[:keys]
        return q, k, v


def share(private: Paged) -> Paged:
    """The same step with each fork's full blocks taken from its parent; the copies are spoilt."""
    case = private.case
    assert isinstance(case, Tree)
    table, key, value = private.meta.block_table.clone(), private.kv.key.clone(), private.kv.value.clone()
    for s, (parent, keys) in enumerate(case.forks):
        # What either reads in compact form alone is not there as stored.
        gone = max(case.compact_blocks(n - q_len) for q_len, n in (case.seqs[s], case.seqs[parent]))
        for b in range(gone, keys // case.block_size):
            key[table[s, b]] = value[table[s, b]] = NAN
            table[s, b] = table[parent, b]
    meta = private.meta._replace(block_table=table)
    shared = Paged(case, private.q, private.kv._replace(key=key, value=value), meta)
    return shared if case.history_window is None else share_compact(shared)


def share_compact(private: Paged) -> Paged:
    """The same with each fork's compact blocks from its parent, as far as both have them."""
    case, compact_table = private.case, private.meta.compact_table
    assert isinstance(case, Tree)
    assert compact_table is not None
    assert private.kv.compact is not None
    table = compact_table.clone()
    compact = api.CompactKV(private.kv.compact.key.clone(), private.kv.compact.value.clone())
    for s, (parent, keys) in enumerate(case.forks):
        both = (case.compact_blocks(case.seqs[i][1] - 1) for i in (s, parent))
        for b in range(min(keys // case.block_size, *both)):
            compact.key[table[s, b]] = compact.value[table[s, b]] = 255
            table[s, b] = table[parent, b]
    meta = private.meta._replace(compact_table=table)
    return Paged(case, private.q, private.kv._replace(compact=compact), meta)


def attend(
    paged: Paged, num_threads: int = 1, *, share: bool = True, isa: str = "auto"
) -> tuple[torch.Tensor, torch.Tensor, int]:
    plan = fused.plan(paged.meta, paged.case.spec, pool(num_threads), share=share, isa=isa)
    out, lse = fused.attend(paged.q, paged.kv, plan)
    assert lse is not None
    return out, lse, plan.native.keys_read


def same(a: tuple[torch.Tensor, torch.Tensor, int], b: tuple[torch.Tensor, torch.Tensor, int]) -> bool:
    return torch.equal(a[0], b[0]) and torch.equal(a[1], b[1])


def fewest_keys(paged: Paged) -> int:
    """Keys to read, for all KV heads, when whole spans with the same history are read once."""
    case = paged.case
    per_span = SPAN // case.block_size
    chains, rest = set(), 0
    for s, (_, n) in enumerate(case.seqs):
        blocks = paged.meta.block_table[s].tolist()
        chains |= {tuple(blocks[: (i + 1) * per_span]) for i in range(n // SPAN)}
        rest += n % SPAN
    return case.num_kv_heads * (len(chains) * SPAN + rest)


@st.composite
def trees(draw: st.DrawFn, max_queries: int = 40) -> Tree:
    """Forks anywhere, within a span or at its edge; decoding rows and chunks; some rows fill a tile alone."""
    near_a_span = st.builds(
        lambda spans, off: max(1, spans * SPAN + off), st.integers(0, 3), st.integers(-20, 20)
    )
    lengths = st.one_of(near_a_span, st.integers(1, 900))
    seqs: list[tuple[int, int]] = []
    forks: list[tuple[int, int]] = []
    for s in range(draw(st.integers(2, 6))):
        parent = draw(st.integers(0, s - 1)) if s else 0
        n = draw(lengths)
        shared = min(draw(lengths), n - 1, seqs[parent][1]) if s and draw(st.integers(0, 4)) else 0
        queries = draw(st.one_of(st.just(1), st.integers(0, max_queries)))
        # This step's own keys are its own, as a scheduler has it.
        seqs.append((min(queries, n - shared), n))
        forks.append((parent, shared))
    if not any(q for q, _ in seqs):
        seqs[0] = (1, seqs[0][1])
    group = draw(st.sampled_from([1, 3, 7]))
    return Tree(
        seqs=tuple(seqs),
        forks=tuple(forks),
        num_heads=2 * group,
        head_dim=draw(st.sampled_from([32, 40])),
        block_size=draw(st.sampled_from([8, 16, 256])),
        kv_dtype=draw(st.sampled_from([torch.float32, torch.float16])),
        window=draw(st.sampled_from([None, None, 1, 100, 400])),
        need_lse=True,
        seed=draw(st.integers(0, 99)),
    )


@settings(max_examples=60, deadline=None)
@given(case=trees(), num_threads=st.integers(1, 3), isa=st.sampled_from(["auto", "auto", "portable"]))
def test_sharing_changes_no_bit(case: Tree, num_threads: int, isa: str) -> None:
    private = build(case)
    shared = share(private)
    want = attend(private)
    assert want[0].isfinite().all()
    assert same(attend(shared, num_threads, isa=isa), want)
    assert same(attend(shared, num_threads, share=False), want)


@settings(max_examples=60, deadline=None)
@given(case=trees(max_queries=2), num_threads=st.integers(1, 3))
def test_every_span_is_read_once(case: Tree, num_threads: int) -> None:
    """All rows fit into one tile here, so once means once."""
    seqs = tuple((max(1, q), n) for q, n in case.seqs)
    case = case.with_(seqs=seqs, num_heads=6, window=None)
    shared = share(build(case))
    assert attend(shared, num_threads)[2] == fewest_keys(shared)
    assert attend(shared, num_threads, share=False)[2] == case.num_kv_heads * sum(n for _, n in seqs)


def family(count: int, shared: int, own: int, **changes: object) -> Tree:
    """``count`` decoding sequences with ``shared`` keys in common and ``own`` keys each."""
    case = Tree(
        seqs=((1, shared + own),) * count, forks=((0, 0), *((0, shared),) * (count - 1)), need_lse=True
    )
    return case.with_(**changes)  # type: ignore[return-value]


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_thirty_two_sequences_read_their_prompt_once(num_threads: int) -> None:
    shared = share(build(family(32, 1024, 64)))
    got = attend(shared, num_threads)
    alone = attend(shared, num_threads, share=False)
    assert same(got, alone)
    assert got[2] == 2 * (1024 + 32 * 64)
    assert alone[2] == 2 * 32 * (1024 + 64)
    torch.testing.assert_close(got[0], oracle(shared)[0], atol=1e-5, rtol=1e-5)


def test_more_rows_than_a_tile_holds_read_it_once_a_tile() -> None:
    """70 sequences of 3 rows: 32 of them fill a tile of 96 rows."""
    shared = share(build(family(70, 512, 16)))
    got = attend(shared, 2)
    assert same(got, attend(shared, 2, share=False))
    assert got[2] == 2 * (3 * 512 + 70 * 16)


def test_a_span_that_the_prefix_does_not_fill_is_each_one_s_own() -> None:
    """500 shared keys: one whole span. The other 244 are read twice, which keeps the bits."""
    shared = share(build(family(2, 500, 100)))
    assert attend(shared)[2] == 2 * (256 + 2 * 344)


def test_prompts_within_prompts() -> None:
    """Two pairs below one prefix, and a fifth sequence that left it early."""
    forks = ((0, 0), (0, 1024), (0, 512), (2, 768), (0, 256))
    case = Tree(seqs=((1, 1100), (1, 1056), (2, 800), (1, 1000), (3, 300)), forks=forks, need_lse=True)
    private = build(case)
    shared = share(private)
    for num_threads in (1, 2, 3):
        got = attend(shared, num_threads)
        assert same(got, attend(private))
        # One span of all five, one of the first four, two of the first pair and one of the second.
        own = (1100 - 1024) + (1056 - 1024) + (800 - 768) + (1000 - 768) + (300 - 256)
        assert got[2] == 2 * (256 + 256 + 512 + 256 + own)


def test_a_chunk_and_decoding_rows_share() -> None:
    case = Tree(seqs=((1, 600), (30, 542), (200, 712)), forks=((0, 0), (0, 512), (0, 512)), need_lse=True)
    private = build(case)
    got = attend(share(private), 2)
    assert same(got, attend(private))
    # The chunk of 200 fills seven tiles of 32 tokens by itself; they end at 712, 712 - 8, 712 - 40, ...
    tiles = sum(min(512 + 32 * (i + 1), 712) for i in range(7))
    assert got[2] == 2 * (512 + (600 - 512) + (542 - 512) + tiles)


def test_the_same_blocks_in_another_order_are_not_shared() -> None:
    paged = build(family(2, 0, 512, block_size=64))
    table = paged.meta.block_table.clone()
    table[1, :8] = table[0, [1, 0, 2, 3, 4, 5, 6, 7]]
    swapped = Paged(paged.case, paged.q, paged.kv, paged.meta._replace(block_table=table))
    got = attend(swapped)
    assert got[2] == 2 * 2 * 512
    torch.testing.assert_close(got[0], oracle(swapped)[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("num_threads", [1, 3])
def test_nan_reaches_only_the_rows_that_see_it(num_threads: int) -> None:
    """In a sequence's own part that sequence, in the shared part all of them, never a row before it."""
    case = Tree(seqs=((1, 600), (1, 580), (60, 300)), forks=((0, 0), (0, 512), (0, 272)), need_lse=True)
    clean = share(build(case))
    want = attend(clean, num_threads)[0]
    # The chunk stands at 240 .. 299, so key 255 in the span that all three share is before some of its rows.
    for key, seq, spoilt in (
        (590, 0, [0]),
        (550, 1, [1]),
        (300, 0, [0, 1]),
        (255, 0, [0, 1, *range(2 + 15, 62)]),
        (3, 0, list(range(62))),
    ):
        paged = share(build(case))
        for cache in (paged.kv.key, paged.kv.value):
            cache[paged.meta.block_table[seq, key // 16], :, key % 16] = NAN
        got = attend(paged, num_threads)[0]
        untouched = [r for r in range(62) if r not in spoilt]
        assert got[spoilt].isnan().all()
        assert torch.equal(got[untouched], want[untouched])


@pytest.mark.parametrize("num_threads", [1, 3])
def test_a_window_that_has_left_the_shared_spans_reads_nothing_there(num_threads: int) -> None:
    """Of four with a prefix in common two are past it: what it holds cannot reach them."""
    forks = ((0, 0), (0, 512), (0, 512), (0, 512))
    case = Tree(seqs=((1, 530), (1, 560), (1, 900), (1, 840)), forks=forks, need_lse=True, window=300)
    paged = share(build(case))
    want = attend(paged, num_threads)
    for b in range(512 // 16):
        paged.kv.key[paged.meta.block_table[0, b]] = NAN
        paged.kv.value[paged.meta.block_table[0, b]] = NAN
    got = attend(paged, num_threads)
    assert got[0][:2].isnan().all()
    assert torch.equal(got[0][2:], want[0][2:])
    # The first two see 230 and 260 of the prefix's last 282 keys; the others nothing of it.
    assert got[2] == 2 * ((512 - 230) + 18 + 48 + 300 + 300)


def test_a_plan_shares_in_layers_with_and_without_a_window() -> None:
    case = family(5, 768, 40)
    paged = share(build(case))
    plan = fused.plan(paged.meta, case.spec, pool(2))
    for window in (None, 64, None, 300):
        kv = paged.kv._replace(window=window)
        got = fused.attend(paged.q, kv, plan)
        apart = fused.attend(paged.q, kv, fused.plan(paged.meta, case.spec, pool(2), share=False))
        assert all(torch.equal(x, y) for x, y in zip(got, apart, strict=True))


@pytest.mark.parametrize("placement", range(4))
def test_families_in_turns_find_together(placement: int) -> None:
    """Two prompts, whose requests came alternately."""
    forks = ((0, 0), (1, 0), (0, 512), (1, 300), (0, 512), (1, 300))
    case = Tree(seqs=((1, 520), (1, 530)) * 3, forks=forks, need_lse=True)
    private = build(case, placement)
    got = attend(share(private))
    assert same(got, attend(private))
    assert got[2] == 2 * (512 + 3 * 8 + 256 + 3 * (530 - 256))


def test_the_last_span_is_not_shared_until_it_is_whole() -> None:
    """Even where all of its blocks are the same."""
    for n, keys in ((505, 256 + 2 * 249), (511, 256 + 2 * 255), (512, 512)):
        paged = build(family(2, 0, n))
        table = paged.meta.block_table[:1].expand(2, -1).contiguous()
        twins = Paged(paged.case, paged.q, paged.kv, paged.meta._replace(block_table=table))
        assert attend(twins)[2] == 2 * keys


@pytest.mark.parametrize("placement", range(4))
@pytest.mark.parametrize("num_threads", [1, 2])
def test_windows_that_begin_in_different_shared_spans(placement: int, num_threads: int) -> None:
    """One sees three shared spans, the other two of them, and each has a long part of its own."""
    case = Tree(seqs=((1, 2468), (1, 2800)), forks=((0, 0), (0, 768)), window=2400, need_lse=True)
    private = build(case, placement)
    got = attend(share(private), num_threads)
    assert same(got, attend(private))
    assert got[2] == 2 * ((768 - 68) + (2468 - 768) + (2800 - 768))
