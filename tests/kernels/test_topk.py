"""Top-k attention against the dense oracle: what is kept, the output and the gradients.

Most inputs are small multiples of 1/8, so that dot products are exact in any order: then every
implementation must keep exactly the oracle's keys, and ties are frequent.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.kernels import reference, topk_native, topk_tiled
from octavo.kernels.topk import make_spec, topk_attention
from octavo.kernels.topk_spec import Kept


@dataclass(frozen=True, kw_only=True)
class Case:
    batch: int = 1
    num_heads: int = 2
    num_kv_heads: int = 2
    n: int = 5
    m: int = 5
    head_dim: int = 8
    topk: int = 3
    causal: bool = False
    recent: int | None = None
    padding: float = 0.0
    normalize: str | None = None
    levels: int = 8
    seed: int = 0


@dataclass
class Inputs:
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    mask: torch.Tensor | None
    out_grad: torch.Tensor


def inputs(case: Case, dtype: torch.dtype = torch.float32) -> Inputs:
    generator = torch.Generator().manual_seed(case.seed)

    def exact(*shape: int) -> torch.Tensor:
        return (torch.randint(-case.levels, case.levels + 1, shape, generator=generator) / 8).to(dtype)

    q = exact(case.batch, case.num_heads, case.n, case.head_dim)
    k, v = (exact(case.batch, case.num_kv_heads, case.m, case.head_dim) for _ in range(2))
    mask = torch.rand(case.batch, case.m, generator=generator) < case.padding if case.padding else None
    return Inputs(q, k, v, mask, exact(*q.shape))


Result = tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, ...]]


def run(case: Case, x: Inputs, module: Any, **isa: str) -> Result:
    """Output, kept keys as a mask and the gradients, by an implementation's own functions."""
    spec = make_spec(
        case.topk,
        case.head_dim,
        causal=case.causal,
        recent=case.recent,
        scale=None,
        normalize=case.normalize,
        num_keys=case.m,
    )
    out, kept = module.forward(x.q, x.k, x.v, x.mask, spec, save=True, **isa)
    grads = module.backward(x.out_grad, (x.q, x.k, x.v), kept, spec, 0.0, **isa)
    return out, as_mask(kept, case.m), grads


def as_mask(kept: Kept, num_keys: int) -> torch.Tensor:
    index = kept.position.long()
    used = index >= 0
    rising = (index[..., 1:] > index[..., :-1]) | ~used[..., 1:]
    assert rising.all(), "kept keys must be in order of position, unused places last"
    assert (kept.weight[~used] == 0).all()
    mask = torch.zeros(*index.shape[:3], num_keys + 1, dtype=torch.bool)
    return mask.scatter_(-1, torch.where(used, index, num_keys), True)[..., :num_keys]


def oracle(case: Case, x: Inputs, scores: torch.Tensor | None = None) -> Result:
    group = case.num_heads // case.num_kv_heads
    if scores is None:
        keys = x.k.repeat_interleave(group, dim=1)
        scores = torch.einsum("bhnd,bhmd->bhnm", x.q, keys) * case.head_dim**-0.5
    kept = reference.topk_kept(
        scores, case.topk, causal=case.causal, recent=case.recent, key_padding_mask=x.mask
    )
    leaves = [t.detach().clone().requires_grad_() for t in (x.q, x.k, x.v)]
    out = reference.topk_attention(*leaves, kept, normalize=case.normalize)
    return out.detach(), kept, torch.autograd.grad(out, leaves, x.out_grad)


IMPLEMENTATIONS: dict[str, Callable[[Case, Inputs], Result]] = {
    "tiled": lambda case, x: run(case, x, topk_tiled),
    "native": lambda case, x: run(case, x, topk_native, isa="auto"),
    "portable": lambda case, x: run(case, x, topk_native, isa="portable"),
}
each = pytest.mark.parametrize("name", list(IMPLEMENTATIONS))


def check(name: str, case: Case, scores: torch.Tensor | None = None, x: Inputs | None = None) -> None:
    x = inputs(case) if x is None else x
    got, want = IMPLEMENTATIONS[name](case, x), oracle(case, x, scores)
    assert torch.equal(got[1], want[1])
    torch.testing.assert_close(got[0], want[0], atol=1e-5, rtol=1e-5)
    for a, b in zip(got[2], want[2], strict=True):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-5)


@st.composite
def cases(draw: st.DrawFn, *, longest: int = 20) -> Case:
    num_kv_heads = draw(st.integers(1, 2))
    causal = draw(st.booleans())
    m = draw(st.integers(1, longest))
    topk = draw(st.integers(1, 24))
    return Case(
        batch=draw(st.integers(1, 2)),
        num_heads=num_kv_heads * draw(st.integers(1, 3)),
        num_kv_heads=num_kv_heads,
        n=draw(st.integers(1, m if causal else 8)),
        m=m,
        head_dim=draw(st.sampled_from([1, 4, 8, 12, 16, 40, 72])),
        topk=topk,
        causal=causal,
        recent=draw(st.none() | st.integers(0, topk)) if causal else None,
        padding=draw(st.sampled_from([0.0, 0.3, 0.9])),
        normalize=draw(st.sampled_from([None, "l2"])),
        levels=draw(st.sampled_from([0, 1, 8])),
        seed=draw(st.integers(0, 999)),
    )


@each
@settings(max_examples=60, deadline=None)
@given(case=cases())
def test_random_shapes(name: str, case: Case) -> None:
    check(name, case)


@each
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("levels", [1, 8])
@pytest.mark.parametrize(
    ("topk", "recent"), [(1, None), (2, 2), (40, None), (40, 0), (300, None), (300, 300)]
)
def test_keys_over_many_tiles(name: str, causal: bool, levels: int, topk: int, recent: int | None) -> None:
    """Several spans of scores a row, few and many distinct scores, budgets below and above a span."""
    n = 3
    case = Case(n=n, m=1100, topk=topk, levels=levels, causal=causal, recent=recent if causal else None)
    check(name, case)
    check(name, replace(case, padding=0.4))


@pytest.mark.parametrize("order", ["rising", "falling", "equal", "two values"])
@each
def test_scores_in_an_order(name: str, order: str) -> None:
    """The worst inputs of a running selection."""
    m = 900
    scores = torch.arange(m, dtype=torch.float32)
    scores = {"rising": scores, "falling": -scores, "equal": scores * 0, "two values": scores % 2}[order]
    case = Case(num_heads=1, num_kv_heads=1, n=1, m=m, head_dim=8, topk=70)
    x = inputs(case)
    x.q, x.k = torch.zeros(1, 1, 1, 8), torch.zeros(1, 1, m, 8)
    x.q[..., 0] = 1.0
    x.k[..., 0] = scores / 8
    check(name, case, x=x)


@each
def test_ties_go_to_the_lowest_position(name: str) -> None:
    case = Case(levels=0, n=4, m=600, topk=6)
    kept = IMPLEMENTATIONS[name](case, inputs(case))[1]
    assert kept[..., :6].all()
    assert kept.sum() == kept[..., :6].numel()
    kept = IMPLEMENTATIONS[name](replace(case, causal=True), inputs(case))[1]
    for i in range(4):
        assert kept[0, 0, i].nonzero().flatten().tolist() == [0, 1, 2, 594 + i, 595 + i, 596 + i]


@each
def test_both_zeros_tie(name: str) -> None:
    """-0.0 and 0.0 are equal scores."""
    case = Case(num_heads=1, num_kv_heads=1, n=1, m=40, topk=3)
    x = inputs(case)
    x.q, x.k = torch.full((1, 1, 1, 8), 1e-30), torch.zeros(1, 1, 40, 8)
    x.k[0, 0, ::2] = -1e-30
    assert IMPLEMENTATIONS[name](case, x)[1].flatten().nonzero().flatten().tolist() == [0, 1, 2]


@each
@pytest.mark.parametrize("normalize", [None, "l2"])
def test_a_row_without_a_visible_key_is_zero(name: str, normalize: str | None) -> None:
    case = Case(batch=2, n=5, m=5, padding=0.5, normalize=normalize)
    x = inputs(case)
    x.mask = torch.tensor([[True] * 5, [False] * 5])
    out, kept, grads = IMPLEMENTATIONS[name](case, x)
    assert not kept[0].any()
    assert (out[0] == 0).all()
    for grad in grads:
        assert (grad[0] == 0).all()
        assert grad.isfinite().all()
    causal = replace(case, causal=True)
    x.mask = torch.tensor([[True, True, False, False, False]] * 2)
    out = IMPLEMENTATIONS[name](causal, x)[0]
    assert (out[:, :, :2] == 0).all()
    assert (out[:, :, 2:] != 0).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("topk", [37, 38, 10_000])
def test_k_of_n_or_more_is_dense_attention(dtype: torch.dtype, causal: bool, topk: int) -> None:
    q, k, v = (torch.randn(2, 3, 37, 16, dtype=dtype) for _ in range(3))
    want = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    torch.testing.assert_close(topk_attention(q, k, v, topk, causal=causal), want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_k_of_1_copies_the_best_value(dtype: torch.dtype) -> None:
    q, k, v = (torch.randn(2, 3, 20, 8, dtype=dtype) for _ in range(3))
    best = (q @ k.mT).argmax(dim=-1)
    want = v.gather(2, best[..., None].expand(-1, -1, -1, 8))
    torch.testing.assert_close(topk_attention(q, k, v, 1), want, atol=0, rtol=0)
    # Causal at k = 1 has no recent set, so the best of 0..p.
    best = (q @ k.mT).masked_fill(torch.ones(20, 20).triu(1).bool(), -math.inf).argmax(dim=-1)
    want = v.gather(2, best[..., None].expand(-1, -1, -1, 8))
    torch.testing.assert_close(topk_attention(q, k, v, 1, causal=True), want, atol=0, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_one_token(dtype: torch.dtype) -> None:
    q, k, v = (torch.randn(1, 2, 1, 8, dtype=dtype) for _ in range(3))
    for causal in (False, True):
        torch.testing.assert_close(topk_attention(q, k, v, 4, causal=causal), v, atol=0, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_queries_and_no_keys(dtype: torch.dtype) -> None:
    q, k = torch.randn(2, 2, 3, 8, dtype=dtype), torch.randn(2, 2, 0, 8, dtype=dtype)
    q.requires_grad_()
    out = topk_attention(q, k, k, 4)
    assert torch.equal(out, torch.zeros_like(q))
    out.sum().backward()
    assert q.grad is not None
    assert (q.grad == 0).all()
    assert topk_attention(k, q, q, 4).shape == (2, 2, 0, 8)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("module", [topk_native, topk_tiled])
def test_half_inputs_are_computed_in_float32(dtype: torch.dtype, module: Any) -> None:
    case = Case(num_heads=4, n=30, m=400, head_dim=20, topk=12, causal=True)
    x = inputs(case, dtype)
    out, kept, grads = run(case, x, module)
    wide = Inputs(x.q.float(), x.k.float(), x.v.float(), None, x.out_grad.float())
    want_out, want_kept, want_grads = run(case, wide, module)
    assert torch.equal(kept, want_kept)
    for got, want in zip((out, *grads), (want_out, *want_grads), strict=True):
        assert got.dtype == dtype
        assert torch.equal(got, want.to(dtype))


@pytest.mark.parametrize("normalize", [None, "l2"])
@pytest.mark.parametrize(("causal", "recent"), [(False, None), (True, None), (True, 0), (True, 4)])
def test_gradcheck(normalize: str | None, causal: bool, recent: int | None) -> None:
    torch.manual_seed(1)
    q = torch.randn(2, 4, 5, 3, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(2, 2, 7, 3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    mask = torch.zeros(2, 7, dtype=torch.bool)
    mask[0, 2] = mask[1, :4] = True

    def attend(*qkv: torch.Tensor) -> torch.Tensor:
        return topk_attention(
            *qkv, 4, causal=causal, recent=recent, key_padding_mask=mask, normalize=normalize, scale=0.7
        )

    assert torch.autograd.gradcheck(attend, (q, k, v))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_grouped_heads_equal_repeated_keys(dtype: torch.dtype) -> None:
    case = Case(batch=2, num_heads=6, num_kv_heads=2, n=9, m=30, topk=5)
    x = inputs(case, dtype)
    got = topk_attention(x.q, x.k, x.v, 5)
    repeated = (t.repeat_interleave(3, dim=1) for t in (x.k, x.v))
    torch.testing.assert_close(got, topk_attention(x.q, *repeated, 5), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_l2_rows(dtype: torch.dtype) -> None:
    """Values of 1 make the output a row's sum of weights: 1 for one key, sqrt(k) for k equal ones."""
    k, v = torch.zeros(1, 1, 50, 8, dtype=dtype), torch.ones(1, 1, 50, 8, dtype=dtype)
    q = torch.randn(1, 1, 4, 8, dtype=dtype)
    torch.testing.assert_close(topk_attention(q, k, v, 9, normalize="l2"), torch.full_like(q, 3.0))
    torch.testing.assert_close(topk_attention(q, k, v, 1, normalize="l2"), torch.ones_like(q))
    torch.testing.assert_close(topk_attention(q, k, v, 9), torch.ones_like(q))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_grad_threshold_drops_small_score_gradients(dtype: torch.dtype) -> None:
    """With the identity for keys the query's gradient is the scores' own."""
    m = 16
    q = torch.randn(1, 1, 1, m, dtype=dtype)
    k, v = torch.eye(m, dtype=dtype)[None, None], torch.randn(1, 1, m, m, dtype=dtype)

    def gradients(threshold: float) -> list[torch.Tensor]:
        leaves = [t.clone().requires_grad_() for t in (q, k, v)]
        topk_attention(*leaves, 12, scale=0.5, grad_threshold=threshold).sum().backward()
        return [t.grad for t in leaves if t.grad is not None]

    exact = gradients(0.0)
    size = exact[0].abs() / 0.5
    threshold = float(size[size > 0].median()) * 1.0001
    dropped = size < threshold
    assert 0 < int((dropped & (size > 0)).sum()) < 12
    got = gradients(threshold)
    torch.testing.assert_close(got[0], exact[0].masked_fill(dropped, 0.0), atol=0, rtol=0)
    torch.testing.assert_close(got[1], exact[1].masked_fill(dropped[0, 0, 0][:, None], 0.0), atol=0, rtol=0)
    torch.testing.assert_close(got[2], exact[2], atol=0, rtol=0)


@each
def test_what_is_not_visible_is_never_read(name: str) -> None:
    """Padding and the future may hold anything, forward and backward."""
    case = Case(num_heads=4, n=6, m=300, topk=8, causal=True, padding=0.3)
    clean, spoilt = inputs(case), inputs(case)
    assert clean.mask is not None
    assert spoilt.mask is not None
    clean.mask[:, -1] = spoilt.mask[:, -1] = False
    for t in (spoilt.k, spoilt.v):
        t[0, :, spoilt.mask[0]] = float("nan")
        t[0, :, -1] = float("inf")
    want, got = (IMPLEMENTATIONS[name](case, x) for x in (clean, spoilt))
    assert torch.equal(got[0][:, :, :-1], want[0][:, :, :-1])
    assert torch.equal(got[1][:, :, :-1], want[1][:, :, :-1])
    assert torch.equal(got[2][0][:, :, :-1], want[2][0][:, :, :-1])
    assert not got[0][:, :, -1].isfinite().any()
    assert got[2][2].isfinite().any()


@each
def test_nan_in_a_visible_key_is_not_hidden(name: str) -> None:
    """Its score counts as the highest, also where it comes late and the places are taken."""
    case = Case(n=3, m=700, topk=4)
    # Both signs: what inf - inf gives is negative on some machines.
    for position, bits in (
        (0, 0x7FC00000),
        (300, 0x7FC00000),
        (0, -0x400000),
        (300, -0x400000),
        (699, -0x400000),
    ):
        x = inputs(case)
        x.q = x.q.abs() + 0.125
        x.k[0, :, position] = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
        out, kept, _ = IMPLEMENTATIONS[name](case, x)
        assert kept[..., position].all()
        assert out.isnan().all()


def test_native_implementations_agree_to_the_bit() -> None:
    case = Case(
        batch=2, num_heads=6, num_kv_heads=2, n=50, m=700, head_dim=40, topk=30, causal=True, padding=0.2
    )
    torch.manual_seed(3)
    x = inputs(case)
    x.q, x.k, x.v = (torch.randn_like(t) for t in (x.q, x.k, x.v))
    for normalize in (None, "l2"):
        a, b = (IMPLEMENTATIONS[n](replace(case, normalize=normalize), x) for n in ("native", "portable"))
        assert torch.equal(a[0], b[0])
        assert torch.equal(a[1], b[1])
        for p, r in zip(a[2], b[2], strict=True):
            assert torch.equal(p, r)


def native_scores(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """The native score of every pair, each computed alone: with one key the log-sum-exp is its score."""
    h, n, d = q.shape
    m = k.shape[1]
    rows = q[:, :, None].expand(h, n, m, d).reshape(-1, 1, 1, d)
    keys = k[:, None].expand(h, n, m, d).reshape(-1, 1, 1, d).contiguous()
    spec = make_spec(1, d, causal=False, recent=None, scale=None, normalize=None, num_keys=1)
    _, kept = topk_native.forward(rows, keys, keys, None, spec, save=True)
    return kept.lse.view(1, h, n, m)


@pytest.mark.parametrize("causal", [False, True])
def test_native_selects_by_its_own_scores(causal: bool) -> None:
    """Random numbers: the kept keys are the oracle's on the scores that each pair has by itself."""
    case = Case(n=20, m=600, head_dim=24, topk=50, causal=causal)
    torch.manual_seed(5)
    x = inputs(case)
    x.q, x.k, x.v = (torch.randn_like(t) for t in (x.q, x.k, x.v))
    scores = native_scores(x.q[0], x.k[0])
    check("native", case, scores=scores, x=x)
    exact = torch.einsum("bhnd,bhmd->bhnm", x.q.double(), x.k.double()) * 24**-0.5
    size = torch.einsum("bhnd,bhmd->bhnm", x.q.double().abs(), x.k.double().abs()) * 24**-0.5
    # One rounding a fused multiply-add, one for the scale, one for the product with it.
    assert ((scores - exact).abs() <= size * 26 * 2.0**-24).all()


def test_a_row_is_the_same_in_any_company() -> None:
    """To the bit: alone or in a batch, as a chunk, with another number of threads, after padding in front."""
    case = Case(batch=3, num_heads=4, num_kv_heads=2, n=40, m=500, head_dim=32, topk=24, causal=True)
    torch.manual_seed(7)
    x = inputs(case)
    x.q, x.k, x.v = (torch.randn_like(t) for t in (x.q, x.k, x.v))
    want = topk_attention(x.q, x.k, x.v, 24, causal=True)
    for b in range(3):
        for i in range(0, 40, 13):
            end = 500 - 40 + i + 1
            q, k, v = x.q[b : b + 1, :, i : i + 1], x.k[b : b + 1, :, :end], x.v[b : b + 1, :, :end]
            alone = topk_attention(q, k, v, 24, causal=True)
            assert torch.equal(alone[0, :, 0], want[b, :, i])
    pad = 77
    k, v = (F.pad(t, (0, 0, pad, 0), value=float("nan")) for t in (x.k, x.v))
    mask = torch.zeros(3, 500 + pad, dtype=torch.bool)
    mask[:, :pad] = True
    assert torch.equal(topk_attention(x.q, k, v, 24, causal=True, key_padding_mask=mask), want)


def test_threads_change_nothing() -> None:
    case = Case(num_heads=6, num_kv_heads=2, n=90, m=300, topk=10)
    torch.manual_seed(8)
    x = inputs(case)
    x.q, x.k, x.v = (torch.randn_like(t) for t in (x.q, x.k, x.v))
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results.append(IMPLEMENTATIONS["native"](case, x))
    finally:
        torch.set_num_threads(before)
    for got in results[1:]:
        assert torch.equal(got[0], results[0][0])
        for a, b in zip(got[2], results[0][2], strict=True):
            assert torch.equal(a, b)


def test_strided_inputs_are_read_in_place() -> None:
    """Slices of a joint projection, as a module makes them."""
    joint = torch.randn(2, 30, 3 * 4 * 16)
    q, k, v = joint.view(2, 30, 3, 4, 16).permute(2, 0, 3, 1, 4)
    want = topk_attention(q.contiguous(), k.contiguous(), v.contiguous(), 6)
    got = topk_attention(q, k, v, 6)
    assert torch.equal(got, want)
    assert got.transpose(1, 2).is_contiguous()
    grads = []
    for copy in (False, True):
        leaf = joint.clone().requires_grad_()
        q, k, v = leaf.view(2, 30, 3, 4, 16).permute(2, 0, 3, 1, 4)
        if copy:
            q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        (topk_attention(q, k, v, 6) ** 2).sum().backward()
        grads.append(leaf.grad)
    torch.testing.assert_close(*grads, atol=0, rtol=0)
