"""Every backend against the readable reference, and the reference against float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.kernels import api

from .paged import Case, build, exact, oracle, pool, run

FAST = [name for name in api.BACKENDS if name != "reference"]
WITH_LSE = [name for name in FAST if name != "sdpa"]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Mixed batches: decodes, chunks after a prefix and whole prompts, with spans crossed or not."""
    lengths = st.one_of(st.integers(1, 40), st.integers(250, 262), st.integers(500, 530))
    seqs = []
    for n in draw(st.lists(lengths, min_size=1, max_size=4)):
        q_len = draw(st.one_of(st.just(1), st.integers(1, min(n, 40)), st.just(min(n, 60))))
        seqs.append((q_len, n))
    num_kv_heads, group = draw(st.sampled_from([(1, 1), (2, 1), (1, 3), (2, 3), (1, 8), (3, 2)]))
    return Case(
        seqs=tuple(seqs),
        num_heads=num_kv_heads * group,
        num_kv_heads=num_kv_heads,
        head_dim=draw(st.sampled_from([32, 40, 64, 80])),
        block_size=draw(st.sampled_from([1, 4, 16, 32, 256])),
        kv_dtype=draw(st.sampled_from([torch.float32, torch.float16])),
        window=draw(st.one_of(st.none(), st.integers(1, 300))),
        seed=draw(st.integers(0, 100)),
    )


@settings(max_examples=25, deadline=None)
@given(case=cases())
def test_backends_agree_with_reference(case: Case) -> None:
    """NaN lies in every unused slot, so a finite result also shows that none was read."""
    paged = build(case)
    want, want_lse = oracle(paged)
    for name in FAST:
        got, _ = run(name, paged)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
    paged = build(case.with_(need_lse=True))
    for name in WITH_LSE:
        got, lse = run(name, paged)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
        torch.testing.assert_close(lse, want_lse, rtol=1e-5, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("name", api.BACKENDS)
@pytest.mark.parametrize("head_dim", [64, 256])
def test_float64_bound(name: str, head_dim: int) -> None:
    """Errors stay within a few float32 roundings of the true value, over several spans."""
    case = Case(seqs=((1, 900), (30, 700)), head_dim=head_dim, need_lse=name != "sdpa")
    paged = build(case)
    want, want_lse = exact(paged)
    out, lse = run(name, paged)
    assert (out.double() - want).abs().max() < 2e-6
    if lse is not None:
        assert (lse.double() - want_lse).abs().max() < 2e-6


@pytest.mark.parametrize("name", api.BACKENDS)
def test_large_scores(name: str) -> None:
    """Scores of some hundreds: the softmax is nearly one key, and nothing overflows."""
    case = Case(seqs=((5, 300),))
    paged = build(case)
    kv = paged.kv._replace(scale=20.0)
    kernel = api.get(name)
    out, _ = kernel.attend(paged.q, kv, kernel.plan(paged.meta, case.spec, pool(1)))
    assert out.isfinite().all()
    q, k, v = (x.double() for x in case.tokens(0))
    scores = torch.einsum("qhd,khd->hqk", q[295:], k.repeat_interleave(3, 1)) * 20.0
    scores = scores.masked_fill(torch.arange(295, 300)[:, None] < torch.arange(300), float("-inf"))
    assert scores.max() > 300
    want = torch.einsum("hqk,khd->qhd", torch.softmax(scores, -1), v.repeat_interleave(3, 1))
    # A float32 score of 500 is off by up to 500 * 2^-24 * a few, and so is the log of its weight.
    assert (out.double() - want).abs().max() < 1e-3


@pytest.mark.parametrize("name", api.BACKENDS)
def test_w06_window_of_8_over_9_tokens(name: str) -> None:
    """Each token sees itself and the 7 before it: token 8 must not see token 0, token 7 must."""
    case = Case(seqs=((9, 9),), window=8)
    paged = build(case)
    base, _ = run(name, paged)
    block = paged.meta.block_table[0, 0]
    kv = paged.kv._replace(value=paged.kv.value.clone())
    kv.value[block, :, 0] += 1.0
    kernel = api.get(name)
    moved, _ = kernel.attend(paged.q, kv, kernel.plan(paged.meta, case.spec, pool(1)))
    changed = (moved - base).abs().amax(dim=(1, 2)) > 1e-4
    assert changed.tolist() == [True] * 8 + [False]


def test_is_causal_by_start_pos_is_wrong_after_a_prefix() -> None:
    """A chunk of 5 after 7 cached keys: the backends agree, ``is_causal=(start_pos == 0)`` does not."""
    case = Case(seqs=((5, 12),))
    paged = build(case)
    want, _ = exact(paged)
    for name in FAST:
        torch.testing.assert_close(run(name, paged)[0].double(), want, rtol=1e-5, atol=1e-5)
    q, k, v = case.tokens(0)
    q, k, v = (x.transpose(0, 1) for x in (q[7:], k.repeat_interleave(3, 1), v.repeat_interleave(3, 1)))
    start_pos = 7
    sees_future = F.scaled_dot_product_attention(q, k, v, is_causal=start_pos == 0).transpose(0, 1)
    top_left = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1)
    error = (sees_future.double() - want).abs().amax(dim=(1, 2))
    assert (error[:-1] > 1e-2).all()  # every row but the last sees its own future
    assert error[-1] < 1e-5
    assert (
        (top_left.double() - want).abs().amax(dim=(1, 2)) > 1e-2
    ).all()  # the triangle at the wrong corner


@pytest.mark.parametrize("name", WITH_LSE)
def test_two_halves_merge_by_lse(name: str) -> None:
    """exp(lse) are the weights: attention over A and over B, merged by them, is attention over both."""
    n = 600
    case = Case(seqs=((1, n),), need_lse=True)
    q, k, v = case.tokens(0)
    whole, whole_lse = run(name, build(case))
    parts = []
    for part in (slice(0, 350), slice(350, n)):
        size = part.stop - part.start
        paged = build(case.with_(seqs=((1, size),)))
        for b in range(-(-size // 16)):
            block, to = paged.meta.block_table[0, b], min(size, (b + 1) * 16)
            for cache, x in ((paged.kv.key, k[part]), (paged.kv.value, v[part])):
                cache[block, :, : to - b * 16] = x[b * 16 : to].transpose(0, 1)
        kernel = api.get(name)
        parts.append(kernel.attend(q[-1:], paged.kv, kernel.plan(paged.meta, paged.case.spec, pool(1))))
    (out_a, lse_a), (out_b, lse_b) = parts
    lse = torch.logaddexp(lse_a, lse_b)
    merged = out_a * (lse_a - lse).exp()[..., None] + out_b * (lse_b - lse).exp()[..., None]
    torch.testing.assert_close(merged, whole, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse, whole_lse, rtol=1e-5, atol=1e-5)


def test_sdpa_says_that_it_cannot_return_lse() -> None:
    spec = Case(seqs=((1, 1),), need_lse=True).spec
    assert "log-sum-exp" in (api.get("sdpa").why_not(spec) or "")
    for name in WITH_LSE:
        assert api.get(name).why_not(spec) is None


def test_lse_only_when_asked() -> None:
    paged = build(Case(seqs=((1, 20),)))
    for name in FAST:
        assert run(name, paged)[1] is None
