"""Attention over summaries: the reference's numbers, by the same laws as over keys."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.kernels import api, compact, fused, reference, topk_paged
from octavo.kernels.history_layout import first_kept, layout
from octavo.kernels.native import _native

from .paged import Case, Paged, build, empty_compact, oracle, pool, run
from .test_fused_exact import _Fixed, chunked, results, same

WINDOW, BUDGET = 64, 320  # 20 blocks; a group is summarised every 256 tokens from position 336 on
BASE = Case(seqs=((700, 700),), need_lse=True, history_window=WINDOW, history_budget=BUDGET)
ISAS = [isa for isa in ("avx2", "portable") if isa in _native.isas()]
FORMS = [(dtype, bits) for dtype in (torch.float32, torch.float16) for bits in (8, 4)]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("dtype", "bits"), FORMS)
@pytest.mark.parametrize(("heads", "dim"), [((6, 2), 64), ((7, 1), 40)])
def test_it_equals_the_reference(
    heads: tuple[int, int], dim: int, dtype: torch.dtype, bits: int, isa: str
) -> None:
    case = BASE.with_(
        # From no group to nine, some with a boundary between the queries.
        seqs=((1, 330), (30, 350), (1, 1200), (5, 1620), (1, 2500), (600, 700)),
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=dim,
        kv_dtype=dtype,
        value_bits=bits,
    )
    paged = build(case)
    out, lse = fused.attend(paged.q, paged.kv, fused.plan(paged.meta, case.spec, pool(2), isa=isa))
    want, want_lse = oracle(paged)
    assert want.isfinite().all()
    torch.testing.assert_close(out, want, atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(lse, want_lse, atol=1e-5, rtol=1e-5)


def test_summaries_are_read() -> None:
    """Each entry that is spoilt spoils the rows that read it."""
    case = BASE.with_(seqs=((400, 700),))
    paged = build(case)
    assert paged.meta.summary_table is not None
    assert paged.kv.compact is not None
    for level, unit, block in paged.meta.summary_table[0].tolist():
        if level < 0:
            continue
        kept = paged.kv.compact.value[block].clone()
        paged.kv.compact.value[block] = 255
        out, _ = run("fused", paged)
        paged.kv.compact.value[block] = kept
        spoilt = out.flatten(1).isnan().any(1)
        assert spoilt.tolist() == [(level, unit) in layout(case.summarised(p)) for p in range(300, 700)]
        assert spoilt.any()


@pytest.mark.parametrize("number", [0, 1, 7, 16, 64, 80, 85, 320, 1344, 5440, 5456, 5460])
@pytest.mark.parametrize("bits", [8, pytest.param(4, marks=pytest.mark.slow)])
def test_a_long_history(number: int, bits: int) -> None:
    """Only what is read is there: block 0, summaries, the budget's blocks. 340 groups have 16 summaries."""
    position = BUDGET + 16 * number + 7  # in the block with so many summarised
    case = BASE.with_(seqs=((3, position + 1),), value_bits=bits, num_heads=4)
    assert case.summarised(position) == number
    paged = only_what_is_read(case)
    native = fused.plan(paged.meta, case.spec, pool(1))
    out, lse = fused.attend(paged.q, paged.kv, native)
    want, want_lse = oracle(paged)
    assert want.isfinite().all()
    torch.testing.assert_close(out, want, atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(lse, want_lse, atol=1e-5, rtol=1e-5)
    kept = first_kept(number) * 16
    entries = 16 * (1 + len(layout(number))) - (-number) % 16
    keys = position + 1 if number == 0 else entries + position + 1 - kept
    assert native.native.keys_read == keys * case.num_kv_heads
    for threads in (2, 16):
        again = fused.attend(paged.q, paged.kv, fused.plan(paged.meta, case.spec, pool(threads)))
        assert torch.equal(again[0], out)


def only_what_is_read(case: Case) -> Paged:
    """A step of one sequence, whose queries lie in one block: random blocks, and NaN in all others."""
    (q_len, n), number = case.seqs[0], case.summarised(case.seqs[0][1] - 1)
    assert case.summarised(n - q_len) == number
    g = torch.Generator().manual_seed(n)
    kept, num_compact, num_blocks = first_kept(number), case.compact_blocks(n - 1), -(-n // 16)
    needed = [0, *range(max(1, kept), num_compact)]
    units = layout(number)
    free = (torch.randperm(len(needed) + len(units) + 40, generator=g) + 1).tolist()
    stored = list(range(case.compact_blocks(n - q_len), num_blocks))
    shape = (len(stored) + len(free) + 1, case.num_kv_heads, 16, case.head_dim)
    key, value = (torch.randn(shape, generator=g).to(case.kv_dtype) for _ in range(2))
    kv = api.KVLayer(key, value, case.scale, case.window, compact=empty_compact(case, len(free) + 1))
    compact_table = torch.zeros(1, num_compact, dtype=torch.int32)
    for b in needed:
        compact_table[0, b] = free.pop()
    rows = [(*unit, free.pop()) for unit in units] or [(-1, -1, -1)]
    used = [*compact_table[0, needed].tolist(), *(block for _, _, block in rows if block >= 0)]
    compact.seal(kv, torch.tensor([[i, i] for i in used], dtype=torch.int32), pool(1))
    block_table = torch.zeros(1, num_blocks, dtype=torch.int32)
    first = len(free) + len(used) + 1
    block_table[0, stored] = torch.arange(first, first + len(stored), dtype=torch.int32)
    key[:first], value[:first] = float("nan"), float("nan")
    meta = api.AttentionMeta(
        block_table,
        torch.tensor([n], dtype=torch.int32),
        torch.tensor([0, q_len], dtype=torch.int32),
        compact_table,
        case.history_window,
        torch.tensor([rows], dtype=torch.int32),
        case.history_budget,
    )
    return Paged(case, torch.randn(q_len, case.num_heads, case.head_dim, generator=g), kv, meta)


@pytest.mark.parametrize("size", [1, 7, 64, 300])
@pytest.mark.parametrize("bits", [8, 4])
def test_chunk_size_changes_nothing(size: int, bits: int) -> None:
    case = BASE.with_(seqs=((1000, 1000),), value_bits=bits, num_heads=4)
    if size == 1:
        case = case.with_(seqs=((640, 640),))
    n = case.seqs[0][1]
    sizes = [size] * (n // size) + ([n % size] if n % size else [])
    assert same(chunked(case, sizes), results(case))


@settings(max_examples=15, deadline=None)
@given(
    cuts=st.sets(st.integers(1, 899), max_size=6),
    form=st.sampled_from(FORMS),
    group=st.sampled_from([1, 3, 7]),
    budget=st.sampled_from([272, 320, 512]),
)
def test_any_split_changes_nothing(
    cuts: set[int], form: tuple[torch.dtype, int], group: int, budget: int
) -> None:
    case = BASE.with_(
        seqs=((900, 900),),
        num_heads=group,
        num_kv_heads=1,
        kv_dtype=form[0],
        value_bits=form[1],
        history_window=16,
        history_budget=budget,
    )
    edges = [0, *sorted(cuts), 900]
    sizes = [b - a for a, b in pairwise(edges)]
    assert same(chunked(case, sizes), results(case))


@pytest.mark.parametrize(("dtype", "bits"), FORMS)
def test_batch_threads_and_placement_change_nothing(dtype: torch.dtype, bits: int) -> None:
    seqs = ((1, 300), (33, 617), (1, 1), (256, 856), (2, 337), (1, 1800))
    case = BASE.with_(seqs=seqs, kv_dtype=dtype, value_bits=bits)
    out, lse = results(case)
    for num_threads in (1, 2, 3, 16):
        assert same(results(case, num_threads=num_threads, placement=num_threads), (out, lse))
    for pad in (0.0, 3e4):
        assert same(results(case, pad=pad), (out, lse))  # type: ignore[arg-type]  # a float
    at = 0
    for s, (q_len, _) in enumerate(seqs):
        one = results(case.with_(seqs=tuple((q_len if i == s else 0, m) for i, (_, m) in enumerate(seqs))))
        assert torch.equal(one[0], out[at : at + q_len])
        assert torch.equal(one[1], lse[at : at + q_len])
        at += q_len


def test_portable_equals_avx2() -> None:
    case = BASE.with_(seqs=((1, 600), (20, 900), (120, 700)))
    paged = build(case)
    got = [fused.attend(paged.q, paged.kv, fused.plan(paged.meta, case.spec, pool(1), isa=i)) for i in ISAS]
    for other in got[1:]:
        assert same(got[0], other)  # type: ignore[arg-type]  # lse is asked for


def test_within_the_budget_nothing_changes() -> None:
    """To the bit: rows up to the last block of the budget, also in a chunk with others."""
    case = BASE.with_(seqs=((700, 700),))
    want = results(case.with_(history_budget=None))
    got = results(case)
    last = BUDGET + 16
    assert case.summarised(last - 1) == 0
    assert case.summarised(last) == 1
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a[:last], b[:last])
        assert not (a[last:] == b[last:]).flatten(1).all(1).any()


@pytest.mark.parametrize("window", [1, 50, BUDGET - 256])
def test_a_layer_with_a_short_window_ignores_summaries(window: int) -> None:
    case = BASE.with_(seqs=((700, 700), (1, 900)), window=window)
    want, _ = results(case.with_(history_budget=None))
    got, _ = results(case)
    assert torch.equal(got, want)
    torch.testing.assert_close(got, oracle(build(case))[0], atol=1e-5, rtol=1e-5)


def test_a_window_is_long_or_short() -> None:
    case = BASE.with_(seqs=((700, 700),))
    assert same(results(case.with_(window=700)), results(case))
    for window in (BUDGET - 255, 699):
        paged = build(case.with_(window=window))
        with pytest.raises(
            ValueError, match=f"window of {window} tokens hides part of what sequence 0 reads"
        ):
            run("fused", paged)
        with pytest.raises(ValueError, match=f"window of {window} tokens hides part"):
            oracle(paged)
    # Nothing is summarised yet: any window is as ever.
    case = BASE.with_(seqs=((300, 330),), window=200)
    assert same(results(case), results(case.with_(history_budget=None)))


def test_equal_tokens_give_the_same_as_compact_blocks() -> None:
    """Where a summary's tokens are equal the logarithm of their number is exact. 6 groups: levels 1, 0, 0."""
    n = 1 + 16 * (6 * 16 + 20)
    case = BASE.with_(seqs=((1, n),))
    assert layout(case.summarised(n - 1)) == [(1, 0), (0, 4), (0, 5)]
    q, k, v = case.tokens(0)
    for x in (k, v):
        for start, stop in ((1, 65), (65, 81), (81, 97)):
            x[16 * start : 16 * stop] = x[16 * start].half().float()
    got = results(_Fixed(case, q, k, v))
    want = results(_Fixed(case.with_(history_budget=None), q, k, v))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("threads", [1, 3])
def test_mass_is_added(threads: int) -> None:
    case = BASE.with_(seqs=((1, 330), (40, 350), (1, 2500)), head_dim=64)
    paged = build(case)
    start = torch.rand(42, case.num_heads)
    got, want = start.clone(), start.clone()
    native = fused.plan(paged.meta, case.spec, pool(threads))
    out, _ = fused.attend(paged.q, paged.kv, native, mass=got)
    assert torch.equal(out, run("fused", paged)[0])
    reference.attend(paged.q, paged.kv, paged.meta, mass=want)
    torch.testing.assert_close(got, want, atol=1e-6, rtol=0)
    share = want - start
    assert not share[:27].any()  # no groups there
    assert (share[27:] > 0.01).all()
    # What block 0 and the others have is the rest, by hand for one row.
    fused.attend(paged.q, paged.kv, native, mass=got)
    torch.testing.assert_close(got - start, 2 * share, atol=2e-6, rtol=0)
    with pytest.raises(ValueError, match="mass must be"):
        fused.attend(paged.q, paged.kv, native, mass=got[:5])


def test_mass_of_a_long_history() -> None:
    """Over two partials of summaries."""
    case = BASE.with_(seqs=((3, BUDGET + 256 * 341 + 8),))
    paged = only_what_is_read(case)
    got, want = torch.zeros(3, case.num_heads), torch.zeros(3, case.num_heads)
    fused.attend(paged.q, paged.kv, fused.plan(paged.meta, case.spec, pool(1)), mass=got)
    reference.attend(paged.q, paged.kv, paged.meta, mass=want)
    assert (want > 0.9).all()
    torch.testing.assert_close(got, want, atol=1e-6, rtol=0)


def test_entries_weigh_what_they_stand_for() -> None:
    """All keys 0: every token weighs the same, so the mass is the share of tokens."""
    n = 1 + 16 * (6 * 16 + 20)
    case = BASE.with_(seqs=((1, n),))
    q, k, v = case.tokens(0)
    paged = build(_Fixed(case, q, torch.zeros_like(k), v))
    mass = torch.zeros(1, case.num_heads)
    _, lse = fused.attend(paged.q, paged.kv, fused.plan(paged.meta, case.spec, pool(1)), mass=mass)
    assert lse is not None
    torch.testing.assert_close(lse, torch.full_like(lse, math.log(n)))
    torch.testing.assert_close(mass, torch.full_like(mass, 6 * 256 / n))


def test_a_step_names_what_is_missing() -> None:
    case = BASE.with_(seqs=((1, 300), (10, 1700)))
    paged = build(case)
    table = paged.meta.summary_table
    assert table is not None
    assert layout(case.summarised(1699)) == [(1, 0), (0, 4), (0, 5)]

    def plan(meta: api.AttentionMeta, spec: api.AttentionSpec = case.spec) -> fused.Plan:
        return fused.plan(meta, spec, pool(1))

    def without(level: int, unit: int) -> torch.Tensor:
        rest = table.clone()
        rest[(table[..., 0] == level) & (table[..., 1] == unit)] = -1
        return rest

    below = table.clone()
    below[1, 0, 2] = -5
    meta = paged.meta
    for wrong, message in (
        (meta._replace(summary_table=without(1, 0)), "sequence 1 reads the summary of level 1, unit 0, but"),
        (meta._replace(summary_table=without(0, 5)), "sequence 1 reads the summary of level 0, unit 5, but"),
        (meta._replace(summary_table=below), "a summary in compact block -5, which is negative"),
        (meta._replace(summary_table=None), "needs a summary_table"),
        (meta._replace(summary_table=table.long()), "summary_table must be"),
        (meta._replace(history_budget=WINDOW + 240), r"at least history_window \+ 256 \(320\), got 304"),
        (meta._replace(history_budget=BUDGET + 8), "multiple of 16"),
        (meta._replace(history_window=None), "needs a history_window"),
    ):
        with pytest.raises(ValueError, match=message):
            plan(wrong)
    with pytest.raises(ValueError, match="block_size of 16, got 32"):
        plan(meta, replace(case.spec, block_size=32))
    beyond = table.clone()
    beyond[1, 0, 2] = 9999
    with pytest.raises(ValueError, match="summary_table holds block 9999"):
        fused.attend(paged.q, paged.kv, plan(meta._replace(summary_table=beyond)))


def test_it_goes_with_dense_attention_only() -> None:
    case = BASE.with_(seqs=((1, 300),))
    meta = build(case).meta
    some, none = (topk_paged.policies([topk_paged.Policy.of(topk)]) for topk in (64, 0))
    with pytest.raises(ValueError, match="a history_budget goes with dense attention"):
        topk_paged.plan(meta, some, case.spec, pool(1))
    topk_paged.plan(meta, none, case.spec, pool(1))
