"""The scan's certificates and the kept sets, on rows that were made to break them.

A grid is one sequence's keys, and many queries at positions within it, all through the plane of the whole
sequence: so the span that holds a query is complete in the cache while it is open to the query.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.kernels import paged

from octavo.kernels import api, topk_paged

HEADS, KV_HEADS, DIM = 4, 2, 32
Keys = Callable[[torch.Tensor], torch.Tensor]


def _ties(k: torch.Tensor) -> torch.Tensor:
    """Few values a dimension, so that many scores are equal."""
    return k.sign() * (k.abs() > 0.5)


def _equal(k: torch.Tensor) -> torch.Tensor:
    return k[:1].expand_as(k).clone()


def _constant_spans(k: torch.Tensor) -> torch.Tensor:
    return k[::16].repeat_interleave(16, 0)[: len(k)]


def _outliers(k: torch.Tensor) -> torch.Tensor:
    k = k.clone()
    k[::37] *= 1000.0
    return k


def _sink(k: torch.Tensor) -> torch.Tensor:
    """A large common part: residuals are small beside it."""
    return k + 50.0 * k[:1]


def _non_finite(k: torch.Tensor) -> torch.Tensor:
    k = k.clone()
    k[40, 0, 3], k[90, 1, 0], k[200, 0, 1] = float("nan"), float("inf"), -float("inf")
    return k


KINDS: dict[str, Keys] = {
    "random": lambda k: k,
    "ties": _ties,
    "equal": _equal,
    "zero": torch.zeros_like,
    "constant spans": _constant_spans,
    "outliers": _outliers,
    "sink": _sink,
    "huge": lambda k: k * 1e36,
    "beyond float16": lambda k: k * 1e5,
    "denormal": lambda k: k * 1e-41,
    "tiny": lambda k: k * 1e-7,
    "non-finite": _non_finite,
}
FLOAT32_ONLY = {"huge", "beyond float16", "denormal"}


class Grid:
    """``num_keys`` keys of one kind and ``num_seqs`` sequences of 1 to 4 queries that end among them."""

    def __init__(self, kind: str, dtype: torch.dtype, *, num_keys: int, num_seqs: int, seed: int) -> None:
        g = torch.Generator().manual_seed(seed)
        self.k = KINDS[kind](torch.randn(num_keys, KV_HEADS, DIM, generator=g)).to(dtype)
        v = torch.randn(num_keys, KV_HEADS, DIM, generator=g).to(dtype)
        blocks = num_keys // 16
        self.spec = api.AttentionSpec(
            num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM, block_size=16, kv_dtype=dtype, device="cpu"
        )
        key, value = (x.view(blocks, 16, KV_HEADS, DIM).transpose(1, 2).contiguous() for x in (self.k, v))
        self.kv = api.KVLayer(key, value, DIM**-0.5, planes=topk_paged.empty_planes(blocks, self.spec))
        self._seal(num_keys)
        queries = torch.randint(1, 5, (num_seqs,), generator=g)
        ends = torch.randint(4, num_keys + 1, (num_seqs,), generator=g)
        table = torch.arange(blocks, dtype=torch.int32).expand(num_seqs, blocks).contiguous()
        starts = torch.cat([torch.zeros(1, dtype=torch.int64), queries.cumsum(0)]).int()
        self.meta = api.AttentionMeta(table, ends.int(), starts)
        seq = torch.repeat_interleave(torch.arange(num_seqs), queries)
        self.position = ends[seq] - queries[seq] + torch.arange(len(seq)) - starts[:-1][seq]
        self.seq_len = ends[seq]
        self.q = torch.randn(len(seq), HEADS, DIM, generator=g) * torch.rand(len(seq), 1, 1, generator=g) * 4

    def _seal(self, num_keys: int) -> None:
        table = torch.arange(num_keys // 16, dtype=torch.int32)[None]
        ints = torch.tensor([num_keys], dtype=torch.int32), torch.tensor([0, num_keys], dtype=torch.int32)
        rows = torch.zeros(num_keys, HEADS, DIM)
        budget = topk_paged.policies([topk_paged.Policy.of(num_keys)])
        plan = topk_paged.plan(api.AttentionMeta(table, *ints), budget, self.spec, paged.pool(1))
        topk_paged.attend(rows, self.kv, plan, rows.clone())

    def run(self, topk: int, *, plane: bool = True) -> tuple[torch.Tensor, topk_paged.Details, torch.Tensor]:
        budgets = topk_paged.policies([topk_paged.Policy.of(topk)] * len(self.meta.seq_lens))
        plan = topk_paged.plan(self.meta, budgets, self.spec, paged.pool(1))
        out, report = (
            torch.zeros_like(self.q),
            torch.zeros(len(budgets), len(topk_paged.Report._fields), dtype=torch.float64),
        )
        kv = self.kv if plane else self.kv._replace(planes=None)
        details = topk_paged.attend(self.q, kv, plan, out, report, details=True)
        assert details is not None
        return out, details, report

    def scores(self, head: int) -> torch.Tensor:
        """``[rows, keys]`` by the shortest code; one head."""
        keys = self.k[:, head // (HEADS // KV_HEADS)].contiguous()
        return topk_paged.scan_bounds(self.q[:, head].contiguous(), keys, DIM**-0.5)[2]

    def kept(self, scores: torch.Tensor, topk: int) -> torch.Tensor:
        """The definition for all rows at once: ``[rows, keys]`` bool."""
        place = torch.arange(scores.shape[1])
        visible = place <= self.position[:, None]
        others = place <= self.position[:, None] - topk // 2
        bits = (scores + 0.0).view(torch.int32)
        order = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long().masked_fill(scores.isnan(), 2**31)
        order = order.masked_fill(~others, -(2**40))
        rank = torch.sort(order, dim=1, descending=True, stable=True).indices.argsort(dim=1)
        return (others & (rank < topk - topk // 2)) | (visible & ~others)


def check(grid: Grid, topk: int) -> tuple[int, int]:
    """Kept sets equal, bits with and without the plane too, and no bound too low; (rows, rescored)."""
    out, details, report = grid.run(topk)
    plain, _, _ = grid.run(topk, plane=False)
    assert torch.equal(out.view(torch.int32), plain.view(torch.int32)), "the plane changes a result"
    rows = grid.seq_len > topk
    for head in range(HEADS):
        scores = grid.scores(head)
        kept = grid.kept(scores, topk)
        got = torch.zeros(len(kept), kept.shape[1] + 1, dtype=torch.bool)
        got.scatter_(
            1, torch.where(details.position[:, head] < 0, kept.shape[1], details.position[:, head]).long(), 1
        )
        assert torch.equal(got[rows, :-1], kept[rows]), f"head {head}: kept sets differ"
        hidden = torch.arange(kept.shape[1]) > grid.position[:, None]
        weights = torch.softmax(scores.double().masked_fill(hidden, float("-inf")), dim=1)
        dropped = weights.masked_fill(kept, 0.0).sum(1)
        known = rows & ~dropped.isnan()
        assert (dropped[known] <= details.dropped[known, head].double() + 1e-12).all(), "a bound is too low"
    return int(rows.sum()) * HEADS, int(report[:, 3].sum())


CASES = [
    (kind, dtype)
    for kind in KINDS
    for dtype in (torch.float32, torch.float16)
    if dtype == torch.float32 or kind not in FLOAT32_ONLY
]


@pytest.mark.parametrize(("kind", "dtype"), CASES)
def test_kept_sets_on_rows_made_to_break_them(kind: str, dtype: torch.dtype) -> None:
    for topk, seed in ((1, 0), (16, 1), (64, 2)):
        rows, rescored = check(Grid(kind, dtype, num_keys=768, num_seqs=60, seed=seed), topk)
        assert rows > 400
        assert rescored > 0
        if kind in ("random", "sink"):
            assert rescored < 4 * topk * rows, "the scan decides next to nothing"


@pytest.mark.slow
def test_a_million_rows() -> None:
    rows = seed = 0
    while rows < 1_000_000:
        kind, dtype = CASES[seed % len(CASES)]
        rows += check(Grid(kind, dtype, num_keys=1024, num_seqs=1000, seed=seed), (8, 32, 64, 128)[seed % 4])[
            0
        ]
        seed += 1


@pytest.mark.parametrize("isa", ["auto", "portable"])
@pytest.mark.parametrize(("kind", "dtype"), CASES)
def test_no_certificate_is_violated(kind: str, dtype: torch.dtype, isa: str) -> None:
    g = torch.Generator().manual_seed(3)
    for dim in (32, 64, 256):
        keys = KINDS[kind](torch.randn(320, KV_HEADS, dim, generator=g)).to(dtype)[:, 0].contiguous()
        for size in (1e-40, 1e-6, 1.0, 30.0, 1e20, 1e37):
            q = torch.randn(20, dim, generator=g) * size
            for tail in (False, True):
                value, bound, score = topk_paged.scan_bounds(q, keys, dim**-0.5, tail=tail, isa=isa)
                known = bound.isfinite() & value.isfinite()
                error = (score.double() - value.double()).abs()
                assert (error <= bound.double())[known].all(), (dim, size)
                if kind in ("random", "sink", "equal") and 1e-6 <= size <= 30.0:
                    assert known.all(), "nothing may be unknown here"


def test_a_query_that_is_not_finite_is_scored_in_full() -> None:
    q = torch.randn(3, DIM)
    q[0, 0], q[1, 0] = float("nan"), float("inf")
    value, bound, _ = topk_paged.scan_bounds(q, torch.randn(32, DIM), DIM**-0.5)
    for row in (0, 1):
        assert not ((value + bound)[row] < float("inf")).any(), "an upper bound that excludes something"
    assert bound[2].isfinite().all()


def test_scores_are_near_float64() -> None:
    """A score is one chain of fp32 multiply-adds and a product: it is off by gamma_D |q| |k| at most."""
    g = torch.Generator().manual_seed(5)
    for dim in (32, 64, 256):
        q, k = torch.randn(50, dim, generator=g), torch.randn(160, dim, generator=g)
        scale = dim**-0.5
        score = topk_paged.scan_bounds(q, k, scale)[2].double()
        exact = q.double() @ k.double().T * scale
        products = q.double().abs() @ k.double().abs().T * scale
        assert ((score - exact).abs() <= (dim + 2) * 2.0**-24 * products * 1.001).all()


def test_the_plane_takes_at_most_0_3_of_float16() -> None:
    for dim in (64, 128, 256):
        assert topk_paged.record_bytes(dim) <= 0.3 * 16 * 2 * 2 * dim
