"""The fused kernel's law: a row depends on its query and its visible keys alone, to the bit."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo import _native
from octavo.kernels import api, fused, native

from .paged import Case, Paged, build, oracle, pool, run

BASE = Case(seqs=((700, 700),), need_lse=True)


def results(case: Case, **kwargs: int) -> tuple[torch.Tensor, torch.Tensor]:
    num_threads = kwargs.pop("num_threads", 1)
    out, lse = run("fused", build(case, **kwargs), num_threads)
    assert lse is not None
    assert out.isfinite().all()
    return out, lse


def same(a: tuple[torch.Tensor, ...], b: tuple[torch.Tensor, ...]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def chunked(case: Case, sizes: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """The whole prompt of a one-sequence case, computed in chunks of these sizes."""
    q, k, v = case.tokens(0)
    outs, at = [], 0
    for size in sizes:
        at += size
        part = build(_Fixed(case.with_(seqs=((size, at),)), q[:at], k[:at], v[:at]))
        outs.append(fused.attend(part.q, part.kv, fused.plan(part.meta, case.spec, pool(1))))
    assert at == case.seqs[0][1]
    return torch.cat([o for o, _ in outs]), torch.cat([x for _, x in outs if x is not None])


class _Fixed(Case):
    """A case whose one sequence has these tokens, not random ones."""

    def __init__(self, case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        super().__init__(**{f: getattr(case, f) for f in Case.__dataclass_fields__})
        object.__setattr__(self, "_tokens", (q, k, v))

    def tokens(self, s: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self._tokens  # type: ignore[attr-defined,no-any-return]


@pytest.mark.parametrize("size", [1, 7, 16, 64, 256, 300])
@pytest.mark.parametrize("window", [None, 100, 400])
def test_chunk_size_changes_nothing(size: int, window: int | None) -> None:
    case = BASE.with_(window=window)
    n = case.seqs[0][1]
    sizes = [size] * (n // size) + ([n % size] if n % size else [])
    assert same(chunked(case, sizes), results(case))


@settings(max_examples=15, deadline=None)
@given(cuts=st.sets(st.integers(1, 329), max_size=8), half=st.booleans(), group=st.sampled_from([1, 3, 7]))
def test_any_split_changes_nothing(cuts: set[int], half: bool, group: int) -> None:
    case = Case(
        seqs=((330, 330),),
        num_heads=2 * group,
        kv_dtype=torch.float16 if half else torch.float32,
        need_lse=True,
    )
    edges = [0, *sorted(cuts), 330]
    sizes = [b - a for a, b in pairwise(edges)]
    assert same(chunked(case, sizes), results(case))


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("seqs", [((1, 2000),), ((1, 700), (64, 300), (1, 1), (200, 1000)), ((600, 600),)])
def test_threads_change_nothing(seqs: tuple[tuple[int, int], ...], kv_dtype: torch.dtype) -> None:
    case = BASE.with_(seqs=seqs, kv_dtype=kv_dtype)
    one = results(case)
    for num_threads in (2, 3, 16):
        for _ in range(3):
            assert same(results(case, num_threads=num_threads), one)


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 6, 7])
@pytest.mark.parametrize("block_size", [4, 16, 64])
def test_kv_heads_together_or_apart(group: int, kv_dtype: torch.dtype, block_size: int) -> None:
    """One thread takes all KV heads of a decoding sequence at once (if each serves up to 6), 16 one each."""
    seqs = ((1, 1500), (1, 1023), (3, 700), (1, 257))
    for num_kv_heads, head_dim, window in ((5, 40, None), (2, 64, 300)):
        case = BASE.with_(seqs=seqs, kv_dtype=kv_dtype, num_kv_heads=num_kv_heads, head_dim=head_dim)
        case = case.with_(num_heads=group * num_kv_heads, block_size=block_size, window=window)
        want = results(case)
        for num_threads in (2, 16):
            assert same(results(case, num_threads=num_threads), want)


@pytest.mark.parametrize("block_size", [1, 2, 8, 32, 64, 128, 256])
@pytest.mark.parametrize("seqs", [((1, 700),), ((90, 700),)])
def test_block_size_and_placement_change_nothing(block_size: int, seqs: tuple[tuple[int, int], ...]) -> None:
    case = BASE.with_(seqs=seqs)
    want = results(case)
    for placement in (0, 1, 2):
        assert same(results(case.with_(block_size=block_size), placement=placement), want)


def test_batch_changes_nothing() -> None:
    seqs = ((1, 300), (33, 517), (1, 1), (256, 256), (2, 513), (1, 1025))
    case = BASE.with_(seqs=seqs)
    out, lse = results(case)
    at = 0
    for s, (q_len, n) in enumerate(seqs):
        alone = build(_Fixed(case.with_(seqs=((q_len, n),)), *case.tokens(s)), placement=9)
        got, got_lse = fused.attend(alone.q, alone.kv, fused.plan(alone.meta, case.spec, pool(2)))
        assert torch.equal(got, out[at : at + q_len])
        assert got_lse is not None
        assert torch.equal(got_lse, lse[at : at + q_len])
        at += q_len


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.float16])
def test_portable_equals_avx2(kv_dtype: torch.dtype) -> None:
    """Both run the same statements, so they agree to the bit; where the CPU has AVX2 it is chosen."""
    case = BASE.with_(seqs=((1, 300), (20, 290), (3, 5)), window=200, head_dim=40, kv_dtype=kv_dtype)
    paged = build(case)
    plan = fused.plan(paged.meta, case.spec, pool(1), isa="portable")
    assert plan.native.isa == "portable"
    portable = fused.attend(paged.q, paged.kv, plan)
    plan = fused.plan(paged.meta, case.spec, pool(1))
    assert plan.native.isa == native.isa()
    assert same(portable, fused.attend(paged.q, paged.kv, plan))  # type: ignore[arg-type]


def test_garbage_in_unused_slots_changes_nothing() -> None:
    seqs = ((1, 300), (40, 290), (3, 5))
    for window in (None, 50):
        case = BASE.with_(seqs=seqs, window=window)
        want = results(case, pad=0.0)
        for pad in (float("nan"), float("inf"), 3e38):
            assert same(results(case, pad=pad), want)


def test_a_later_token_cannot_reach_an_earlier_row() -> None:
    """Infinite K and V of the last token spoil its own row only, though all rows share a tile."""
    case = BASE.with_(seqs=((20, 280),))
    clean, spoilt = build(case), build(case)
    block = spoilt.meta.block_table[0, 279 // 16]
    spoilt.kv.key[block, :, 279 % 16] = float("inf")
    spoilt.kv.value[block, :, 279 % 16] = float("inf")
    plan = fused.plan(clean.meta, case.spec, pool(1))
    want, got = (fused.attend(p.q, p.kv, plan)[0] for p in (clean, spoilt))
    assert torch.equal(got[:-1], want[:-1])
    assert not got[-1].isfinite().any()


def test_a_key_before_the_window_is_never_read() -> None:
    """Blocks that left the window may be recycled: their content does not matter."""
    case = BASE.with_(seqs=((1, 700),), window=64)
    paged = build(case)
    want = fused.attend(paged.q, paged.kv, fused.plan(paged.meta, case.spec, pool(1)))
    for b in range((700 - 64) // 16):
        paged.kv.key[paged.meta.block_table[0, b]] = float("nan")
        paged.kv.value[paged.meta.block_table[0, b]] = float("nan")
    assert same(want, fused.attend(paged.q, paged.kv, fused.plan(paged.meta, case.spec, pool(1))))  # type: ignore[arg-type]


def test_nan_in_a_visible_key_is_not_hidden() -> None:
    case = BASE.with_(seqs=((1, 40),))
    paged = build(case)
    paged.kv.key[paged.meta.block_table[0, 0], :, 3] = float("nan")
    assert fused.attend(paged.q, paged.kv, fused.plan(paged.meta, case.spec, pool(1)))[0].isnan().all()


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("isa", ["auto", "portable"])
@pytest.mark.parametrize(("seq_len", "overflowed"), [(700, 256), (700, 1), (257, 256), (40, 40), (700, 700)])
def test_a_span_of_scores_that_overflowed_weighs_nothing(
    isa: str, num_threads: int, seq_len: int, overflowed: int
) -> None:
    """K of -inf, as float16 stores what is below its range, in all keys that a span shows or in some."""
    case = BASE.with_(seqs=((1, seq_len),), need_lse=True)
    paged = build(case)
    paged = replace(paged, q=paged.q.abs() + 0.1)
    for p in range(overflowed):
        paged.kv.key[paged.meta.block_table[0, p // 16], :, p % 16] = float("-inf")
    out, lse = fused.attend(paged.q, paged.kv, fused.plan(paged.meta, case.spec, pool(num_threads), isa=isa))
    want, want_lse = oracle(paged)
    torch.testing.assert_close(out, want, equal_nan=True, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse, want_lse, equal_nan=True, atol=1e-5, rtol=1e-5)


def test_a_view_of_a_joint_projection_is_read_in_place() -> None:
    case = BASE.with_(seqs=((30, 90),))
    paged = build(case)
    joint = torch.randn(30, 10, 32)
    joint[:, :6] = paged.q
    plan = fused.plan(paged.meta, case.spec, pool(1))
    want, _ = fused.attend(paged.q, paged.kv, plan)
    assert torch.equal(fused.attend(joint[:, :6], paged.kv, plan)[0], want)


def test_a_plan_serves_layers_with_and_without_a_window() -> None:
    case = BASE.with_(seqs=((1, 700), (50, 500)))
    paged = build(case)
    plan = fused.plan(paged.meta, case.spec, pool(2))
    for window in (None, 64, None, 300):
        want = run("fused", build(case.with_(window=window)))
        got = fused.attend(paged.q, paged.kv._replace(window=window), plan)
        assert same(got, want)  # type: ignore[arg-type]


@pytest.mark.parametrize("isa", ["portable", "auto"])
def test_exp_is_within_two_ulp(isa: str) -> None:
    x = torch.cat([torch.linspace(-87.33, 0, 200_001), -torch.logspace(-30, 1.9, 20_001), torch.zeros(1)])
    out = torch.empty_like(x)
    _native.exp(x.data_ptr(), x.numel(), out.data_ptr(), isa)
    want = x.double().exp()
    ulp = 2.0 ** (torch.frexp(want)[1].double() - 24)
    assert ((out.double() - want).abs() / ulp).max() < 2.0
    assert out[-1] == 1.0
    assert (out <= 1.0).all()


def test_exp_at_the_edges() -> None:
    x = torch.tensor([float("-inf"), -1e30, -88.0, -87.4, float("nan"), -0.0])
    out = torch.empty_like(x)
    _native.exp(x.data_ptr(), x.numel(), out.data_ptr(), "auto")
    assert out[:4].tolist() == [0.0] * 4
    assert out[4].isnan()
    assert out[5] == 1.0


def test_span_is_the_contract_s() -> None:
    assert _native.SPAN == api.SPAN


def test_one_plan_in_two_threads_is_served_in_turn() -> None:
    """Layers share a plan's memory, so a second caller waits; it must not spoil the first."""
    import threading

    case = BASE.with_(seqs=((200, 900),))
    paged: Paged = build(case)
    plan = fused.plan(paged.meta, case.spec, pool(1))
    want, _ = fused.attend(paged.q, paged.kv, plan)
    bad: list[int] = []

    def work() -> None:
        for i in range(10):
            if not torch.equal(fused.attend(paged.q, paged.kv, plan)[0], want):
                bad.append(i)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not bad
