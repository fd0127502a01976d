"""Top-k attention over the paged cache against its definition, and a row's result against how it was cut."""

from __future__ import annotations

import itertools

import pytest
import torch
from tests.kernels import paged
from tests.kernels.paged import Case, Paged

from octavo.kernels import api, fused, reference, topk_paged
from octavo.kernels.topk_paged import Policy

BITS = {torch.float32: torch.int32, torch.float16: torch.int16}
ISAS = ["auto", "avx2", "portable"]


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.int32)


def with_plane(p: Paged) -> Paged:
    """With a plane in which every span was sealed that the case's keys complete."""
    spec, case = p.case.spec, p.case
    planes = topk_paged.empty_planes(p.kv.key.shape[0], spec, tail=True, fast=True)
    kv = p.kv._replace(planes=planes)
    # As if every key came in one chunk; only the plane is wanted.
    everything = paged.build(case.with_(seqs=tuple((n, n) for _, n in case.seqs)))
    starts = torch.tensor([0] + [n for _, n in case.seqs]).cumsum(0).int()
    meta = api.AttentionMeta(p.meta.block_table, p.meta.seq_lens, starts)
    plan = topk_paged.plan(meta, alike(Policy.of(1), len(case.seqs)), spec, paged.pool(1))
    topk_paged.attend(everything.q, kv, plan, torch.empty_like(everything.q))
    return Paged(case, p.q, kv, p.meta)


def alike(policy: Policy, num_seqs: int) -> torch.Tensor:
    return topk_paged.policies([policy] * num_seqs)


def run(
    p: Paged, policy: int | Policy, *, threads: int = 1, isa: str = "auto"
) -> tuple[torch.Tensor, topk_paged.Details, topk_paged.Report]:
    """All sequences under one policy, those that are dense now by ``fused``, as the backend does."""
    policy = Policy.of(policy) if isinstance(policy, int) else policy
    budgets = alike(policy, len(p.case.seqs))
    out = torch.full_like(p.q, float("nan"))
    dense = fused.plan(
        p.meta, p.case.spec, paged.pool(threads), isa=isa, left_out=topk_paged.dense_now(p.meta, budgets)
    )
    fused.attend(p.q, p.kv, dense, out)
    plan = topk_paged.plan(p.meta, budgets, p.case.spec, paged.pool(threads), isa=isa)
    report = torch.zeros(len(budgets), len(topk_paged.Report._fields), dtype=torch.float64)
    details = topk_paged.attend(p.q, p.kv, plan, out, report, details=True)
    assert details is not None
    total = sum((topk_paged.Report(*row) for row in report.tolist()), topk_paged.Report())
    return out, details, total


def rows_of(case: Case):
    """(row of q, head, sequence, position, first visible key)."""
    row = 0
    for s, (q_len, n) in enumerate(case.seqs):
        for position in range(n - q_len, n):
            first = 0 if case.window is None else max(0, position - case.window + 1)
            for head in range(case.num_heads):
                yield row, head, s, position, first
            row += 1


def check_against_the_definition(p: Paged, topk: int, *, tail: bool = False, **kw) -> topk_paged.Report:
    """Kept sets equal; outputs close to float64; no dropped mass above its bound. Returns the report."""
    case = p.case
    out, details, report = run(p, Policy.of(topk, tail=tail), **kw)
    group = case.num_heads // case.num_kv_heads
    tokens = [case.tokens(s) for s in range(len(case.seqs))]
    scores: dict[tuple[int, int], torch.Tensor] = {}
    visible = kept = 0
    for row, head, s, position, first in rows_of(case):
        q, k, v = tokens[s]
        kv_head = head // group
        if (s, head) not in scores:
            q_len, n = case.seqs[s]
            keys = torch.nn.functional.pad(k[:, kv_head], (0, 0, 0, -n % 16)).contiguous()
            queries = q[n - q_len :, head].contiguous()
            scores[s, head] = topk_paged.scan_bounds(queries, keys, case.scale)[2]
        q_len, n = case.seqs[s]
        seen = scores[s, head][position - (n - q_len), first : position + 1]
        expected = reference.topk_row(seen, v[first : position + 1, kv_head].float(), first, topk)
        where = f"row {row}, head {head}, position {position}"
        if n > topk:
            got = details.position[row, head]
            assert got[got >= 0].tolist() == expected.position.tolist(), where
        result = expected.out
        if tail:
            seen_k, seen_v = (x[: position + 1, kv_head].float() for x in (k, v))
            result = reference.tail_row(
                q[position, head], seen_k, seen_v, expected.position, first, case.scale
            )
        if result.isfinite().all():
            torch.testing.assert_close(out[row, head].double(), result, atol=2e-5, rtol=1e-4, msg=where)
            bound = details.dropped[row, head].item()
            assert expected.dropped <= bound + 1e-12, f"{where}: dropped {expected.dropped}, bound {bound}"
        visible += position + 1 - first
        kept += len(expected.position)
    assert (report.visible, report.kept) == (visible, kept)
    return report


SEQS = ((1, 300), (5, 40), (70, 333), (1, 17), (3, 700))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("topk", [1, 2, 7, 64])
def test_it_keeps_what_the_definition_keeps(isa: str, kv_dtype: torch.dtype, topk: int) -> None:
    case = Case(SEQS, kv_dtype=kv_dtype)
    check_against_the_definition(paged.build(case), topk, isa=isa)
    report = check_against_the_definition(with_plane(paged.build(case)), topk, isa=isa)
    assert report.rescored > 0, "nothing was scanned"


@pytest.mark.parametrize("window", [1, 50, 65, 300, 512])
def test_sliding_windows(window: int) -> None:
    case = Case(((1, 900), (40, 600), (2, 30)), window=window)
    for p in (paged.build(case), with_plane(paged.build(case))):
        check_against_the_definition(p, 64)
    few = with_plane(paged.build(Case(((1, 600), (3, 90)), window=window)))
    check_against_the_definition(few, 20, tail=True)


@pytest.mark.parametrize("block_size", [16, 32, 256])
def test_block_sizes(block_size: int) -> None:
    case = Case(((1, 800), (2, 515)), block_size=block_size, num_heads=4, num_kv_heads=1, head_dim=64)
    check_against_the_definition(with_plane(paged.build(case)), 32)


@pytest.mark.parametrize(("isa", "topk"), [("auto", 7), ("portable", 1), ("auto", 64)])
def test_the_tail_is_what_the_oracle_makes_of_the_rest(isa: str, topk: int) -> None:
    small = (1, 300), (5, 40), (12, 333), (1, 17)
    for case in (Case(small, kv_dtype=torch.float16), Case(((1, 800), (2, 515)), block_size=64, head_dim=64)):
        p = with_plane(paged.build(case))
        check_against_the_definition(p, topk, tail=True, isa=isa)
        assert not torch.equal(run(p, Policy.of(topk, tail=True))[0], run(p, topk)[0])


def test_a_span_without_a_mean_has_no_tail() -> None:
    """What overflows float16's mean: the rest of the span counts as it does without the tail."""
    p = with_plane(paged.build(Case(((1, 400),))))
    q, k, v = p.case.tokens(0)
    for x, at in ((k, 40), (v, 90)):
        huge = [q.clone(), k.clone(), v.clone()]
        huge[1 if x is k else 2][at, :, 3] = -1e7
        got = run(_of(p, q[-1:], huge[1], huge[2]), Policy.of(8, tail=True))[0]
        assert got.isfinite().all()
        for head in range(p.case.num_heads):
            seen = [h[:, head // 3] for h in huge[1:]]
            kept = reference.topk_row(p.case.scale * (seen[0] @ q[-1, head]), seen[1], 0, 8).position
            expected = reference.tail_row(q[-1, head], *seen, kept, 0, p.case.scale)
            torch.testing.assert_close(got[0, head].double(), expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (Policy.of(8, tail=True), "the tail, which needs the planes of means"),
        (Policy.of(8, fast=True), "the fast mode, which needs the plane of bounds"),
        (Policy.adaptive(1000, 16)._replace(fast=1), "cannot be had in fast mode"),
        (Policy(8, 9), "recent keys of a budget must be from 0 to the budget"),
    ],
)
def test_what_a_policy_needs(policy: Policy, message: str) -> None:
    p = with_plane(paged.build(Case(((1, 400),))))
    assert p.kv.planes is not None
    bare = Paged(p.case, p.q, p.kv._replace(planes=api.TopkPlanes(p.kv.planes.scan)), p.meta)
    with pytest.raises(ValueError, match=message):
        run(bare, policy)


def rows_with_scores(p: Paged):
    """Of each row where it is, its q, and the K, V, values, bounds and scores that it sees."""
    case = p.case
    for row, head, s, position, first in rows_of(case):
        q, k, v = case.tokens(s)
        kv_head = head // (case.num_heads // case.num_kv_heads)
        seen_k, seen_v = (x[: position + 1, kv_head] for x in (k, v))
        keys = torch.nn.functional.pad(seen_k, (0, 0, 0, -len(seen_k) % 16)).contiguous()
        found = topk_paged.scan_bounds(q[position, head][None].contiguous(), keys, case.scale, tail=True)
        value, bound, score = (x[0, : position + 1] for x in found)
        yield (row, head, position, first), q[position, head], seen_k, seen_v, value, bound, score


@pytest.mark.parametrize(("recent", "window"), [(16, None), (5, None), (16, 300), (40, 75)])
def test_an_adaptive_budget_keeps_what_the_oracle_keeps(recent: int, window: int | None) -> None:
    case = Case(
        ((1, 1500), (6, 333), (1, 30)), kv_dtype=torch.float16, window=window, num_heads=4, num_kv_heads=2
    )
    p = with_plane(paged.build(case))
    for least in (125, 1000):
        out, details, report = run(p, Policy.adaptive(least, recent))
        kept = 0
        for (row, head, position, first), q, k, v, value, bound, score in rows_with_scores(p):
            told = score.clone()
            whole, own = -(-first // 16) * 16, position // 16 * 16
            told[whole:own] = torch.where(bound.isfinite(), value, score)[whole:own]
            wanted, unsure = reference.adaptive_kept(told[first:], first, recent, least)
            got = details.position[row, head]
            # Of a sequence that is dense in this step nothing is told.
            got = got[got >= 0] if case.seqs[-1][1] > recent or position >= recent else wanted
            assert set(got.tolist()) ^ set(wanted.tolist()) <= set(unsure.tolist())
            kept += len(got)
            result = reference.tail_row(q, k.float(), v.float(), got.long(), first, case.scale)
            torch.testing.assert_close(out[row, head].double(), result, atol=2e-5, rtol=1e-4)
            mass = torch.softmax(score[first:].double(), 0)
            dropped = 1 - mass[got.long() - first].sum().item()
            assert dropped <= details.dropped[row, head].item() + 1e-12
        assert report.kept == kept < report.visible


@pytest.mark.parametrize(("topk", "window"), [(32, None), (7, None), (32, 400), (1, 90)])
def test_fast_mode_looks_where_the_oracle_looks(topk: int, window: int | None) -> None:
    case = Case(
        ((1, 900), (6, 433), (1, 30)), kv_dtype=torch.float16, window=window, num_heads=4, num_kv_heads=2
    )
    p = with_plane(paged.build(case))
    out, details, _ = run(p, Policy.of(topk, fast=True))
    with_tail = run(p, Policy.of(topk, fast=True, tail=True))[0]
    missed = 0
    for (row, head, position, first), q, k, v, _, _, score in rows_with_scores(p):
        if position + 1 - first <= topk:
            continue
        competes = reference.fast_spans(q, k.float(), first, topk)
        seen = torch.nonzero(competes)[:, 0]
        expected = reference.topk_row(score[seen], v[seen].float(), 0, topk)
        wanted = seen[expected.position]
        got = details.position[row, head]
        assert got[got >= 0].tolist() == wanted.tolist()
        torch.testing.assert_close(out[row, head].double(), expected.out, atol=2e-5, rtol=1e-4)
        result = reference.tail_row(q, k.float(), v.float(), wanted, first, case.scale)
        torch.testing.assert_close(with_tail[row, head].double(), result, atol=2e-5, rtol=1e-4)
        missed += int((competes[first:] == 0).sum())
        assert details.dropped[row, head] == 1.0 or bool(competes[first:].all())
    assert missed > 0


def test_where_nothing_is_known_an_adaptive_budget_asks_the_scores() -> None:
    """Keys beyond float16's range, and a query that the scan cannot bound."""
    p = with_plane(paged.build(Case(((1, 400),))))
    q, k, v = p.case.tokens(0)
    huge = k.clone()
    huge[40, :, 3] = -1e7
    for scale in (1.0, 1e-30):
        got, details, _ = run(_of(p, q[-1:] * scale, huge, v), Policy.adaptive(500, 16, tail=False))
        for head in range(p.case.num_heads):
            scores = p.case.scale * (huge[:, head // 3].double() @ (q[-1, head] * scale).double())
            wanted, _ = reference.adaptive_kept(scores, 0, 16, 500)
            kept = details.position[0, head]
            assert kept[kept >= 0].tolist() == wanted.tolist()
            expected = torch.softmax(scores[wanted], 0) @ v[wanted, head // 3].double()
            torch.testing.assert_close(got[0, head].double(), expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("window", [None, 40])
def test_with_k_or_fewer_visible_keys_it_is_dense_to_the_bit(
    kv_dtype: torch.dtype, window: int | None
) -> None:
    """k - 1, k and k + 1 visible keys, in rows of one tile and in decode; also k over several spans."""
    for k, seqs in (
        (64, ((70, 70), (1, 63), (1, 64), (1, 65), (3, 66))),
        (600, ((1, 599), (1, 600), (620, 620))),
    ):
        case = Case(seqs, kv_dtype=kv_dtype, window=window)
        sealed = with_plane(paged.build(case))
        ways = [(paged.build(case), Policy.of(k)), (sealed, Policy.of(k)), (sealed, Policy.of(k, tail=True))]
        ways += [(sealed, Policy.of(k, fast=True)), (sealed, Policy.adaptive(1_000_000, k, tail=False))]
        for p, policy in ways:
            dense = paged.run("fused", p)[0]
            out = run(p, policy)[0]
            same = (bits(out) == bits(dense)).flatten(1).all(1)
            for row, _, _, position, first in rows_of(case):
                if position + 1 - first <= k:
                    assert same[row]
            if window is None:
                assert not same.all(), "k + 1 keys drop one"


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.float16])
def test_bytes_are_counted_where_reading_is_what_costs(kv_dtype: torch.dtype) -> None:
    """Few queries: what the plan read, and each visible key once for dense attention. Chunks: nothing."""
    case = Case(((1, 900),), kv_dtype=kv_dtype, head_dim=64)
    dense_bytes = 2 * 900 * case.num_kv_heads * 64 * kv_dtype.itemsize
    p = with_plane(paged.build(case))
    report = run(p, 64)[2]
    plan = topk_paged.plan(p.meta, alike(Policy.of(64), 1), case.spec, paged.pool(1))
    topk_paged.attend(p.q, p.kv, plan, torch.empty_like(p.q))
    assert (report.bytes, report.dense_bytes) == (plan.native.bytes_read, dense_bytes)
    assert 0 < report.bytes < dense_bytes
    # Threads cut one long scan: each part's reading counts, in every layer anew.
    long = with_plane(paged.build(case.with_(seqs=((1, 5000),))))
    plan = topk_paged.plan(long.meta, alike(Policy.of(64), 1), case.spec, paged.pool(3))
    report = torch.zeros(1, len(topk_paged.Report._fields), dtype=torch.float64)
    for layers in (1, 2):
        topk_paged.attend(long.q, long.kv, plan, torch.empty_like(long.q), report)
        assert topk_paged.Report(*report[0].tolist()).bytes == layers * plan.native.bytes_read
    least = case.num_kv_heads * topk_paged.record_bytes(64) * ((5000 - 64) // 16)
    assert plan.native.bytes_read > least
    # It keeps all: both read the same.
    report = run(p, 900)[2]
    assert (report.bytes, report.dense_bytes) == (dense_bytes, dense_bytes)
    # A window hides the rest from dense attention too.
    report = run(with_plane(paged.build(case.with_(window=400))), 64)[2]
    assert report.dense_bytes == 2 * 400 * case.num_kv_heads * 64 * kv_dtype.itemsize
    report = run(with_plane(paged.build(case.with_(seqs=((70, 900),)))), 64)[2]
    assert report.rows > 0
    assert (report.bytes, report.dense_bytes) == (0, 0)


WAYS = {
    "exact": Policy.of(48),
    "tail": Policy.of(6, tail=True),
    "adaptive": Policy.adaptive(500, 16),
    "adaptive with few recent": Policy.adaptive(1250, 5, tail=False),
    "fast": Policy.of(32, fast=True),
    "fast with tail": Policy.of(6, fast=True, tail=True),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_row_is_the_same_in_any_chunk_batch_place_and_thread(way: str) -> None:
    case = Case(((1500, 1500),), head_dim=64, num_heads=6, num_kv_heads=2)
    whole = with_plane(paged.build(case))
    expected = run(whole, WAYS[way], threads=2)[0]
    cuts = ((1, 1500), (1, 777), (1, 1025), (2, 640), (4, 1333), (5, 1400), (100, 1200), (17, 257))
    ways = list(itertools.product((0, 1), ISAS))
    for i, (q_len, n) in enumerate(cuts):
        part = case.with_(seqs=((q_len, n),))
        for placement, isa in ways if way == "exact" else [ways[i % len(ways)]]:
            p = with_plane(paged.build(part, placement=placement))
            # The tokens of the case do not depend on how many there are.
            q, k, v = case.tokens(0)
            got = run(_of(p, q[n - q_len : n], k[:n], v[:n]), WAYS[way], isa=isa)[0]
            assert torch.equal(bits(got), bits(expected[n - q_len : n])), (q_len, n, isa)


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("head_dim", [40, 64])
def test_every_instruction_set_says_the_same(kv_dtype: torch.dtype, head_dim: int) -> None:
    """Not the answers alone: also which keys were in doubt, and the bound of what was dropped."""
    case = Case(
        ((1, 3000), (3, 1100), (1, 470)), head_dim=head_dim, kv_dtype=kv_dtype, num_heads=10, num_kv_heads=2
    )
    p = with_plane(paged.build(case))
    for policy in WAYS.values():
        for threads in (1, 2):
            expected = run(p, policy, threads=threads, isa="portable")
            for isa in ("avx2", "auto"):
                out, details, report = run(p, policy, threads=threads, isa=isa)
                assert torch.equal(bits(out), bits(expected[0])), (policy, isa)
                assert torch.equal(details.position, expected[1].position), (policy, isa)
                assert torch.equal(bits(details.dropped), bits(expected[1].dropped)), (policy, isa)
                assert report == expected[2], (policy, isa)


def _of(p: Paged, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Paged:
    """The same places with other tokens in them, sealed again."""
    bs = p.case.block_size
    for b in range(-(-len(k) // bs)):
        block, part = int(p.meta.block_table[0, b]), slice(b * bs, min(len(k), (b + 1) * bs))
        p.kv.key[block, :, : part.stop - part.start] = k[part].transpose(0, 1)
        p.kv.value[block, :, : part.stop - part.start] = v[part].transpose(0, 1)
    kv = p.kv._replace(planes=topk_paged.empty_planes(p.kv.key.shape[0], p.case.spec, tail=True, fast=True))
    meta = p.meta._replace(cu_seqlens_q=torch.tensor([0, len(k)], dtype=torch.int32))
    plan = topk_paged.plan(meta, alike(Policy.of(1), 1), p.case.spec, paged.pool(1))
    everything = torch.zeros(len(k), *q.shape[1:])
    topk_paged.attend(everything, kv, plan, everything.clone())
    return Paged(p.case, q.contiguous(), kv, p.meta)


@pytest.mark.parametrize("window", [None, 3000])
@pytest.mark.parametrize("alike_keys", [False, True])
def test_a_scan_that_threads_share_finds_the_same(window: int | None, alike_keys: bool) -> None:
    """One sequence is cut along its keys; where keys are nearly equal, scores decide and not bounds."""
    case = Case(((2, 6000),), num_heads=4, num_kv_heads=2, window=window)
    p = paged.build(case)
    q, k, v = case.tokens(0)
    if alike_keys:
        k = k[:1] + 1e-6 * k
    p = _of(p, q[-2:], k, v)
    expected, alone, report = run(p, 64)
    for threads in (2, 3):
        out, details, cut = run(p, 64, threads=threads)
        assert torch.equal(bits(out), bits(expected))
        for policy in (Policy.of(64, tail=True), Policy.adaptive(250, 16), Policy.of(64, fast=True)):
            assert torch.equal(bits(run(p, policy, threads=threads)[0]), bits(run(p, policy)[0]))
        assert torch.equal(details.position, alone.position)
        assert cut.kept == report.kept
        for (row, head, position, first), *_, score in _scored(case, q, k, v):
            kept = details.position[row, head].long() - first
            dropped = 1 - torch.softmax(score[first : position + 1].double(), 0)[kept].sum()
            assert dropped <= details.dropped[row, head] + 1e-12
            assert alike_keys or details.dropped[row, head] < 1


def _scored(case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor):
    for row, head, _, position, first in rows_of(case):
        kv_head = head // (case.num_heads // case.num_kv_heads)
        keys = k[:, kv_head].contiguous()
        yield (
            (row, head, position, first),
            topk_paged.scan_bounds(q[position, head][None], keys, case.scale)[2][0],
        )
