"""Compact history: what its records hold, and attention over them by the same laws as over stored keys."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.kernels import api, compact, fused, reference
from octavo.kernels.native import _native

from .paged import Case, Paged, build, empty_compact, oracle, pool, run
from .test_fused_exact import chunked, results, same
from .test_shared import Tree, attend, share, trees

BASE = Case(seqs=((700, 700),), need_lse=True, history_window=128)
ISAS = [isa for isa in ("avx2", "portable") if isa in _native.isas()]
FORMS = [(dtype, bits) for dtype in (torch.float32, torch.float16) for bits in (8, 4)]


# What a record holds.


def sealed(key: torch.Tensor, value: torch.Tensor, bits: int, isa: str = "auto") -> api.CompactKV:
    """``key`` and ``value`` ``[blocks, kv_heads, block_size, d]``; block i in compact block i."""
    blocks, kv_heads, block_size, d = key.shape
    case = Case(
        seqs=(), num_kv_heads=kv_heads, head_dim=d, block_size=block_size, history_window=16, value_bits=bits
    )
    kv = api.KVLayer(key, value, 1.0, compact=empty_compact(case, blocks))
    pairs = torch.arange(blocks, dtype=torch.int32)[:, None].expand(-1, 2).contiguous()
    compact.seal(kv, pairs, pool(1), isa=isa)
    assert kv.compact is not None
    return kv.compact


def expanded(key: torch.Tensor, value: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What is read in place of ``key`` and ``value``, in their shape."""
    blocks, kv_heads, block_size, d = key.shape
    both = reference.expand_compact(sealed(key, value, bits), torch.arange(blocks), d)
    k, v = (x.view(kv_heads, blocks, block_size, d).transpose(0, 1) for x in both)
    return k, v


def steps(high: torch.Tensor, codes: int) -> torch.Tensor:
    """The scale for a range: a float16 that is no smaller than range / codes, and the next one at most."""
    exact = high.double() / codes
    return exact * (1 + 2.0**-10) + 2.0**-24


@pytest.mark.parametrize(("dtype", "bits"), FORMS)
@pytest.mark.parametrize("size", [1e-8, 1e-4, 1.0, 300.0])
@pytest.mark.parametrize("dim", [40, 64, 80, 128])
def test_nothing_is_off_by_more_than_half_a_step(
    dtype: torch.dtype, bits: int, size: float, dim: int
) -> None:
    g = torch.Generator().manual_seed(1)
    key, value = (
        (torch.randn(3, 2, 32, dim, generator=g) * size + offset * size).to(dtype) for offset in (5.0, 0.5)
    )
    k, v = expanded(key, value, bits)
    spans = key.double().unflatten(2, (2, 16))
    middle = (spans.amin(3, keepdim=True) + spans.amax(3, keepdim=True)) / 2
    off_middle = (spans - middle).abs() + middle.abs() * 2.0**-10 + 2.0**-23  # the middle is kept in float16
    # A key's scale is a normal float16.
    step = steps(off_middle.amax(-1, keepdim=True), 127).clamp(min=2.0**-14)
    round_off = 2.0**-23 * (spans.abs() + step)
    assert ((k.double().unflatten(2, (2, 16)) - spans).abs() <= step * 0.5 + round_off).all()
    exact = value.double()
    if bits == 8:
        step = steps(exact.abs().amax(-1, keepdim=True), 127)
    else:
        low, high = exact.amin(-1, keepdim=True), exact.amax(-1, keepdim=True)
        step = steps(high - low + low.abs() * 2.0**-10 + 2.0**-24, 15)
    assert ((v.double() - exact).abs() <= step * 0.5 + 2.0**-23 * (exact.abs() + step)).all()


@pytest.mark.parametrize("bits", [8, 4])
def test_zeros_and_constants_are_kept_as_they_are(bits: int) -> None:
    for number in (0.0, 0.5, -3.0):
        x = torch.full((1, 1, 16, 32), number)
        k, v = expanded(x, x, bits)
        assert torch.equal(k, x)
        assert torch.allclose(v, x, rtol=2.0**-10, atol=0.0)
    assert torch.equal(
        expanded(torch.zeros(1, 1, 16, 32), torch.zeros(1, 1, 16, 32), bits)[1].abs().max(), torch.tensor(0.0)
    )


@pytest.mark.parametrize(("dtype", "bits"), FORMS)
def test_instruction_sets_make_the_same_records(dtype: torch.dtype, bits: int) -> None:
    g = torch.Generator().manual_seed(2)
    key, value = ((torch.randn(4, 2, 64, 80, generator=g) * 3).to(dtype) for _ in range(2))
    value[0, 0, 3] = 0.0
    value[0, 1, 5, 2] = float("inf")
    key[1, 0, 20, 7] = float("nan")
    one = sealed(key, value, bits, ISAS[0])
    for isa in ISAS:
        other = sealed(key, value, bits, isa)
        assert torch.equal(one.key, other.key)
        assert torch.equal(one.value, other.value)


@pytest.mark.parametrize(("dtype", "bits"), FORMS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_cannot_be_held_is_nan_and_nothing_else_is(dtype: torch.dtype, bits: int, bad: float) -> None:
    g = torch.Generator().manual_seed(3)
    key, value = (torch.randn(1, 1, 32, 64, generator=g).to(dtype) for _ in range(2))
    want_k, want_v = expanded(key, value, bits)
    value[0, 0, 3, 5] = bad
    key[0, 0, 20, 7] = bad
    k, v = expanded(key, value, bits)
    assert v[0, 0, 3].isnan().all()
    assert k[0, 0, 20].isnan().all()
    v[0, 0, 3], k[0, 0, 20] = want_v[0, 0, 3], want_k[0, 0, 20]
    assert torch.equal(v, want_v)
    assert torch.equal(k[0, 0, :16], want_k[0, 0, :16])
    # What the others of its record are taken from may lie elsewhere without it.
    assert (k - want_k).abs().max() < 0.05


@pytest.mark.parametrize("bits", [8, 4])
def test_beyond_float16_is_nan(bits: int) -> None:
    x = torch.full((1, 1, 16, 32), 1e8)
    x[..., ::2] = -1e8
    k, v = expanded(x, x, bits)
    assert k.isnan().all()
    assert v.isnan().all()


def test_a_compact_block_is_small() -> None:
    """Against K and V in float16; head_dim 64."""
    stored = 16 * 64 * 2 * 2
    for bits, most in ((8, 0.57), (4, 0.45)):
        record = compact.key_record_bytes(64) + compact.value_record_bytes(64, bits)
        assert record <= most * stored


def test_sealing_names_what_is_wrong() -> None:
    paged = build(BASE.with_(seqs=((1, 300),)))
    kv, wrong = paged.kv, torch.tensor([[0, 999]], dtype=torch.int32)
    assert kv.compact is not None
    before = kv.compact.key.clone()
    for pairs, message in (
        (wrong, "compact block 999, allowed are 0 to"),
        (wrong.flip(1), "block 999, allowed are 0 to"),
        (-wrong, "compact block -999"),
        (wrong.long(), "pairs must be"),
    ):
        with pytest.raises(ValueError, match=message):
            compact.seal(kv, pairs, pool(1))
    assert torch.equal(kv.compact.key, before)
    with pytest.raises(ValueError, match="no compact blocks"):
        compact.seal(kv._replace(compact=None), wrong, pool(1))
    with pytest.raises(ValueError, match="8 or 4 bits, got 5"):
        compact.value_record_bytes(64, 5)


# Attention over them.


def window_edges(window: int) -> list[int]:
    """Numbers of keys whose last query stands where a block leaves the window, or nearly."""
    return [window + off for off in (0, 1, 15, 16, 17, 18, 31, 32, 33)]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("dtype", "bits"), FORMS)
@pytest.mark.parametrize(("heads", "dim"), [((6, 2), 64), ((4, 4), 80), ((7, 1), 128), ((2, 2), 40)])
def test_it_equals_the_reference(
    heads: tuple[int, int], dim: int, dtype: torch.dtype, bits: int, isa: str
) -> None:
    case = BASE.with_(
        seqs=((1, 700), (40, 330), (1, 129), (3, 145), (290, 290)),
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
    torch.testing.assert_close(out, want, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse, want_lse, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("block_size", [16, 32, 256])
@pytest.mark.parametrize("window", [None, 100, 150, 400])
@pytest.mark.parametrize("history_window", [16, 128, 512])
def test_window_edges(history_window: int, window: int | None, block_size: int) -> None:
    """A query reads whole blocks before its window in compact form, and no other keys."""
    lengths = [*window_edges(history_window), *window_edges(history_window + block_size - 16)]
    case = BASE.with_(
        seqs=tuple((min(q, n), n) for n in lengths for q in (1, 20)),
        window=window,
        history_window=history_window,
        block_size=block_size,
    )
    paged = build(case)
    out, lse = run("fused", paged)
    want, want_lse = oracle(paged)
    assert want.isfinite().all()
    torch.testing.assert_close(out, want, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse, want_lse, atol=1e-5, rtol=1e-5)
    row = 0
    for s, (q_len, n) in enumerate(case.seqs):
        seen = [case.compact_blocks(p) for p in range(n - q_len, n)]
        if not any(seen):
            plain = Paged(
                case.with_(history_window=None),
                paged.q[row : row + q_len],
                paged.kv,
                api.AttentionMeta(
                    paged.meta.block_table[s : s + 1],
                    paged.meta.seq_lens[s : s + 1],
                    torch.tensor([0, q_len], dtype=torch.int32),
                ),
            )
            assert torch.equal(run("fused", plain)[0], out[row : row + q_len])
        row += q_len


def test_compact_is_not_exact() -> None:
    """That the records are read shows: each of them changed changes the rows that it is compact for."""
    case = BASE.with_(seqs=((100, 300),))
    paged = build(case)
    want, _ = run("fused", paged)
    for b in range(case.compact_blocks(299)):
        kv = build(case).kv
        assert kv.compact is not None
        assert paged.meta.compact_table is not None
        kv.compact.value[paged.meta.compact_table[0, b]] = 255
        got, _ = run("fused", replace(paged, kv=kv))
        changed = (got != want).flatten(1).any(1) | got.flatten(1).isnan().any(1)
        assert changed.tolist() == [case.compact_blocks(p) > b for p in range(200, 300)]


@pytest.mark.parametrize("size", [1, 7, 16, 64, 300])
@pytest.mark.parametrize("window", [None, 200, 400])
@pytest.mark.parametrize("bits", [8, 4])
def test_chunk_size_changes_nothing(size: int, window: int | None, bits: int) -> None:
    case = BASE.with_(window=window, value_bits=bits)
    n = case.seqs[0][1]
    sizes = [size] * (n // size) + ([n % size] if n % size else [])
    assert same(chunked(case, sizes), results(case))


@settings(max_examples=15, deadline=None)
@given(
    cuts=st.sets(st.integers(1, 599), max_size=6),
    form=st.sampled_from(FORMS),
    group=st.sampled_from([1, 3, 7]),
    history_window=st.sampled_from([16, 48, 256]),
)
def test_any_split_changes_nothing(
    cuts: set[int], form: tuple[torch.dtype, int], group: int, history_window: int
) -> None:
    case = BASE.with_(
        seqs=((600, 600),),
        num_heads=2 * group,
        kv_dtype=form[0],
        value_bits=form[1],
        history_window=history_window,
    )
    edges = [0, *sorted(cuts), 600]
    sizes = [b - a for a, b in pairwise(edges)]
    assert same(chunked(case, sizes), results(case))


@pytest.mark.parametrize(("dtype", "bits"), FORMS)
@pytest.mark.parametrize("seqs", [((1, 2000),), ((1, 700), (64, 300), (1, 1), (200, 1000)), ((600, 600),)])
def test_threads_and_placement_change_nothing(
    seqs: tuple[tuple[int, int], ...], dtype: torch.dtype, bits: int
) -> None:
    case = BASE.with_(seqs=seqs, kv_dtype=dtype, value_bits=bits)
    one = results(case)
    for num_threads in (2, 3, 16):
        assert same(results(case, num_threads=num_threads, placement=num_threads), one)
    for pad in (0.0, float("inf"), 3e4):
        assert same(results(case, pad=pad), one)  # type: ignore[arg-type]  # a float, as build takes it


@pytest.mark.parametrize("block_size", [16, 64, 256])
def test_a_block_size_changes_only_what_is_compact(block_size: int) -> None:
    """Where whole blocks of both sizes lie before the window, the row's bits are the same."""
    case = BASE.with_(seqs=((300, 700),), history_window=64)
    want, _ = results(case)
    got, _ = results(case.with_(block_size=block_size))
    other = case.with_(block_size=block_size)
    alike = [case.compact_blocks(p) * 16 == other.compact_blocks(p) * block_size for p in range(400, 700)]
    assert any(alike)
    assert torch.equal(got[alike], want[alike])


def test_batch_changes_nothing() -> None:
    seqs = ((1, 300), (33, 517), (1, 1), (256, 256), (2, 513), (1, 1025))
    case = BASE.with_(seqs=seqs)
    out, lse = results(case)
    at = 0
    for s, (q_len, n) in enumerate(seqs):
        one = results(case.with_(seqs=tuple((q_len if i == s else 0, m) for i, (_, m) in enumerate(seqs))))
        assert torch.equal(one[0], out[at : at + q_len]), n
        assert torch.equal(one[1], lse[at : at + q_len])
        at += q_len


@pytest.mark.parametrize(("dtype", "bits"), FORMS)
def test_portable_equals_avx2(dtype: torch.dtype, bits: int) -> None:
    seqs = ((1, 300), (20, 290), (3, 5), (2, 600))
    case = BASE.with_(seqs=seqs, window=250, head_dim=40, kv_dtype=dtype, value_bits=bits)
    paged = build(case)
    got = [fused.attend(paged.q, paged.kv, fused.plan(paged.meta, case.spec, pool(1), isa=i)) for i in ISAS]
    for other in got[1:]:
        assert same(got[0], other)  # type: ignore[arg-type]  # lse is asked for


def test_nan_in_a_compact_key_reaches_the_rows_that_read_it() -> None:
    case = BASE.with_(seqs=((100, 300),))
    want = oracle(build(case))[0]
    paged = build(case)
    assert paged.kv.compact is not None
    assert paged.meta.compact_table is not None
    block = int(paged.meta.compact_table[0, 7])
    paged.kv.compact.value[block, :, 0, 16 * 32 + 2 * 5 : 16 * 32 + 2 * 6] = 255  # the scale of its key 5
    got, _ = run("fused", paged)
    spoilt = torch.tensor([case.compact_blocks(p) > 7 for p in range(200, 300)])
    assert got[spoilt].isnan().all()
    torch.testing.assert_close(got[~spoilt], want[~spoilt], atol=1e-5, rtol=1e-5)


@settings(max_examples=60, deadline=None)
@given(
    tree=trees(),
    num_threads=st.integers(1, 3),
    history_window=st.sampled_from([16, 160, 256, 512]),
    bits=st.sampled_from([8, 4]),
)
def test_sharing_changes_no_bit(tree: Tree, num_threads: int, history_window: int, bits: int) -> None:
    block_size = max(16, tree.block_size)
    case = tree.with_(history_window=history_window, value_bits=bits, block_size=block_size)
    private = build(case)
    shared = share(private)
    want = attend(private)
    assert want[0].isfinite().all()
    assert same(attend(shared, num_threads)[:2], want[:2])
    assert same(attend(shared, num_threads, share=False)[:2], want[:2])


@pytest.mark.parametrize("num_threads", [1, 2])
def test_compact_spans_in_common_are_read_once(num_threads: int) -> None:
    """32 sequences at one place read 1,024 keys in common, 528 to 576 of them in compact form."""
    case = Tree(
        seqs=((1, 1024 + 64),) * 32,
        forks=((0, 0), *((0, 1024),) * 31),
        need_lse=True,
        history_window=512,
    )
    shared = share(build(case))
    got = attend(shared, num_threads)
    assert same(got[:2], attend(shared, num_threads, share=False)[:2])
    assert got[2] == 2 * (1024 + 32 * 64)


def test_sequences_at_other_places_share_what_is_compact_for_both() -> None:
    """At 1,100 and 1,300: compact are 576 and 784 keys, so the first two spans are read once."""
    case = Tree(seqs=((1, 1101), (1, 1301)), forks=((0, 0), (0, 1024)), need_lse=True, history_window=512)
    private = build(case)
    got = attend(share(private))
    assert same(got[:2], attend(private)[:2])
    assert got[2] == 2 * (1101 + 1301 - 512)


def test_a_step_with_history_names_what_is_missing() -> None:
    case = BASE.with_(seqs=((1, 300),))
    paged = build(case)
    assert paged.meta.compact_table is not None
    table = paged.meta.compact_table

    def plan(meta: api.AttentionMeta, spec: api.AttentionSpec = case.spec) -> fused.Plan:
        return fused.plan(meta, spec, pool(1))

    for meta, message in (
        (paged.meta._replace(compact_table=None), "needs a compact_table"),
        (paged.meta._replace(history_window=100), "multiple of 16, at least 16, got 100"),
        (paged.meta._replace(compact_table=table.long()), "compact_table must be"),
        (paged.meta._replace(compact_table=table[:, :5].contiguous()), "reads 10 blocks in compact form"),
        (paged.meta._replace(compact_table=table - 1000), "which is negative"),
    ):
        with pytest.raises(ValueError, match=message):
            plan(meta)
    with pytest.raises(ValueError, match="needs a spec with value_bits"):
        plan(paged.meta, replace(case.spec, value_bits=None))
    with pytest.raises(ValueError, match="has no compact history"):
        fused.attend(paged.q, paged.kv._replace(compact=None), plan(paged.meta))
    with pytest.raises(ValueError, match="compact blocks"):
        fused.attend(paged.q, paged.kv, plan(paged.meta._replace(compact_table=table + 1000)))
    for name in ("loop", "bmm", "sdpa"):
        reason = api.get(name).why_not(replace(case.spec, need_lse=False))
        assert reason is not None
        assert "compact history" in reason
