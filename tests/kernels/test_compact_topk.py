"""Top-k attention over compact history: what the oracle keeps, and the same bits however it is computed."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch

from octavo.kernels import api, reference, topk_paged
from octavo.kernels.topk_paged import Policy

from . import paged
from .paged import Case, Paged, build_stored, with_history
from .test_fused_exact import _Fixed
from .test_topk_paged import ISAS, WAYS, alike, bits, rows_of, run

BASE = Case(seqs=((1500, 1500),), num_heads=4, num_kv_heads=2, head_dim=64, history_window=256)
FORMS = [(dtype, value_bits) for dtype in (torch.float32, torch.float16) for value_bits in (8, 4)]


def prepare(case: Case, placement: int = 0, *, tail: bool = True) -> Paged:
    """With planes of the blocks that are read as stored, and compact blocks with their bounds and, for a
    ``tail``, means."""
    stored = build_stored(case, placement)
    kv = stored.kv._replace(
        planes=topk_paged.empty_planes(stored.kv.key.shape[0], case.spec, tail=tail, fast=True)
    )
    starts = torch.tensor([0] + [n for _, n in case.seqs]).cumsum(0).int()
    plan = topk_paged.plan(
        api.AttentionMeta(stored.meta.block_table, stored.meta.seq_lens, starts),
        alike(Policy.of(1), len(case.seqs)),
        case.spec,
        paged.pool(1),
    )
    everything = torch.zeros(int(starts[-1]), case.num_heads, case.head_dim)
    topk_paged.attend(everything, kv, plan, everything.clone())
    return with_history(Paged(case, stored.q, kv, stored.meta), placement)


class Row(NamedTuple):
    """A row of q and a head: where it stands, and what it sees in order of position from 0 on.

    ``k`` and ``v`` are as it reads them, ``stored`` both as they are stored; ``value`` and ``bound`` what the
    scan says of the keys, ``score`` what they score.
    """

    row: int
    head: int
    seq: int
    position: int
    first: int
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    stored: tuple[torch.Tensor, torch.Tensor]
    value: torch.Tensor
    bound: torch.Tensor
    score: torch.Tensor


def scan(q: torch.Tensor, keys: torch.Tensor, scale: float) -> list[torch.Tensor]:
    padded = torch.nn.functional.pad(keys, (0, 0, 0, -len(keys) % 16)).contiguous()
    return [x[0, : len(keys)] for x in topk_paged.scan_bounds(q[None].contiguous(), padded, scale, tail=True)]


def rows_read(p: Paged) -> Iterator[Row]:
    case = p.case
    assert p.kv.compact is not None
    assert p.meta.compact_table is not None
    tokens = [case.tokens(s) for s in range(len(case.seqs))]
    expanded = []
    for s, (_, n) in enumerate(case.seqs):
        blocks = p.meta.compact_table[s, : case.compact_blocks(n - 1)].long()
        expanded.append(reference.expand_compact(p.kv.compact, blocks, case.head_dim))
    for row, head, s, position, first in rows_of(case):
        q, k, v = tokens[s]
        kv_head = head // (case.num_heads // case.num_kv_heads)
        cut = case.compact_blocks(position) * case.block_size
        stored = k[: position + 1, kv_head].float(), v[: position + 1, kv_head].float()
        read_k, read_v = (
            torch.cat([compact[kv_head, :cut], x[cut:]])
            for compact, x in zip(expanded[s], stored, strict=True)
        )
        value, bound, _ = scan(q[position, head], k[: position + 1, kv_head], case.scale)
        score = scan(q[position, head], read_k, case.scale)[2]
        read = read_k, read_v, stored, value, bound, score
        yield Row(row, head, s, position, first, q[position, head], *read)


SEQS = ((1, 900), (4, 533), (1, 270), (30, 400))


@pytest.mark.parametrize(
    ("topk", "window", "form", "isa"),
    [
        *((32, None, form, "auto") for form in FORMS),
        (32, None, FORMS[3], "portable"),
        (7, None, FORMS[2], "auto"),
        (1, 300, FORMS[0], "auto"),
        (300, None, FORMS[3], "auto"),
        (32, 500, FORMS[1], "auto"),
    ],
)
def test_it_keeps_what_the_definition_keeps(
    topk: int, window: int | None, form: tuple[torch.dtype, int], isa: str
) -> None:
    """With 300 keys the recent ones reach into compact history."""
    dtype, value_bits = form
    case = BASE.with_(seqs=SEQS, kv_dtype=dtype, value_bits=value_bits, window=window, history_window=64)
    p = prepare(case)
    bare = Paged(case, p.q, p.kv._replace(planes=None), p.meta)
    out, details, report = run(p, topk, isa=isa)
    tail, _, _ = run(p, Policy.of(topk, tail=True), isa=isa)
    assert torch.equal(bits(run(bare, topk, isa=isa)[0]), bits(out)), "the planes change a result"
    for row in rows_read(p):
        wanted = reference.topk_row(row.score[row.first :], row.v[row.first :], row.first, topk)
        got = details.position[row.row, row.head]
        # Of a sequence that is dense in this step nothing is told.
        if case.seqs[row.seq][1] > topk:
            assert got[got >= 0].tolist() == wanted.position.tolist()
        torch.testing.assert_close(out[row.row, row.head].double(), wanted.out, atol=2e-5, rtol=1e-4)
        assert wanted.dropped <= details.dropped[row.row, row.head].item() + 1e-12
        result = reference.tail_row(row.q, row.k, row.v, wanted.position, row.first, case.scale, row.stored)
        torch.testing.assert_close(tail[row.row, row.head].double(), result, atol=2e-5, rtol=1e-4)
    assert report.kept < report.visible


@pytest.mark.parametrize("topk", [1, 32])
@pytest.mark.parametrize(("dtype", "value_bits"), FORMS)
def test_it_keeps_what_the_definition_keeps_where_no_tail_needs_means(
    dtype: torch.dtype, value_bits: int, topk: int
) -> None:
    """Records have another reference then, in compact history and in the plane alike."""
    case = BASE.with_(seqs=SEQS, kv_dtype=dtype, value_bits=value_bits, history_window=64)
    p = prepare(case, tail=False)
    out, details, _ = run(p, topk)
    for row in rows_read(p):
        wanted = reference.topk_row(row.score, row.v, 0, topk)
        got = details.position[row.row, row.head]
        assert got[got >= 0].tolist() == wanted.position.tolist()
        torch.testing.assert_close(out[row.row, row.head].double(), wanted.out, atol=2e-5, rtol=1e-4)
        assert wanted.dropped <= details.dropped[row.row, row.head].item() + 1e-12


@pytest.mark.parametrize(("recent", "window"), [(16, None), (5, 300), (100, None)])
@pytest.mark.parametrize(("dtype", "value_bits"), FORMS)
def test_an_adaptive_budget_keeps_what_the_oracle_keeps(
    recent: int, window: int | None, dtype: torch.dtype, value_bits: int
) -> None:
    case = BASE.with_(seqs=SEQS[:3], kv_dtype=dtype, value_bits=value_bits, window=window, history_window=64)
    p = prepare(case)
    out, details, _ = run(p, Policy.adaptive(500, recent))
    for row in rows_read(p):
        told = row.score.clone()
        whole, own = -(-row.first // 16) * 16, row.position // 16 * 16
        told[whole:own] = torch.where(row.bound.isfinite(), row.value, row.score)[whole:own]
        wanted, unsure = reference.adaptive_kept(told[row.first :], row.first, recent, 500)
        got = details.position[row.row, row.head]
        got = got[got >= 0]
        assert set(got.tolist()) ^ set(wanted.tolist()) <= set(unsure.tolist())
        result = reference.tail_row(row.q, row.k, row.v, got.long(), row.first, case.scale, row.stored)
        torch.testing.assert_close(out[row.row, row.head].double(), result, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(("topk", "window"), [(32, None), (7, 300)])
def test_fast_mode_looks_where_the_oracle_looks(topk: int, window: int | None) -> None:
    case = BASE.with_(seqs=SEQS[:3], kv_dtype=torch.float16, window=window, history_window=64)
    p = prepare(case)
    out, details, _ = run(p, Policy.of(topk, fast=True))
    for row in rows_read(p):
        competes = reference.fast_spans(row.q, row.stored[0], row.first, topk)
        seen = torch.nonzero(competes)[:, 0]
        expected = reference.topk_row(row.score[seen], row.v[seen], 0, topk)
        got = details.position[row.row, row.head]
        assert got[got >= 0].tolist() == seen[expected.position].tolist()
        torch.testing.assert_close(out[row.row, row.head].double(), expected.out, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("history_window", [16, 256])
@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("way", WAYS)
def test_a_row_is_the_same_in_any_chunk_batch_place_and_thread(
    way: str, block_size: int, history_window: int
) -> None:
    """Rows of one tile read different keys in compact form."""
    case = BASE.with_(
        block_size=block_size, history_window=history_window, value_bits=8 if block_size == 16 else 4
    )
    tokens = case.tokens(0)
    expected = run(prepare(case), WAYS[way], threads=2)[0]
    assert expected.isfinite().all()
    cuts = ((1, 1500), (1, 777), (1, 1025), (2, 640), (4, 1297), (5, 1400), (100, 1200), (17, 257), (3, 290))
    ways = itertools.cycle(itertools.product((0, 1), ISAS, (1, 3)))
    for (q_len, n), (placement, isa, threads) in zip(cuts, ways, strict=False):
        part = _Fixed(case.with_(seqs=((q_len, n),)), *(x[:n] for x in tokens))
        got = run(prepare(part, placement), WAYS[way], isa=isa, threads=threads)[0]
        assert torch.equal(bits(got), bits(expected[n - q_len : n])), (q_len, n, isa)


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize(("dtype", "value_bits"), FORMS)
def test_with_k_or_fewer_visible_keys_it_is_dense_to_the_bit(
    dtype: torch.dtype, value_bits: int, window: int | None
) -> None:
    k = 600
    case = BASE.with_(
        seqs=((1, 599), (1, 600), (620, 620)),
        kv_dtype=dtype,
        value_bits=value_bits,
        window=window,
        history_window=32,
    )
    p = prepare(case)
    dense = paged.run("fused", p)[0]
    policies = (
        Policy.of(k),
        Policy.of(k, tail=True),
        Policy.of(k, fast=True),
        Policy.adaptive(10**6, k, tail=False),
    )
    for policy in policies:
        same = (bits(run(p, policy)[0]) == bits(dense)).flatten(1).all(1)
        assert all(same[row] for row, _, _, position, first in rows_of(case) if position + 1 - first <= k)
        assert window is not None or not same.all()


def test_scans_decide_more_of_compact_keys() -> None:
    """Its record says what it scores, but for rounding: next to none is scored that is not kept."""
    case = BASE.with_(seqs=((1, 1500),), history_window=64)
    compact = run(prepare(case), 64)[2]
    stored = prepare(case.with_(history_window=16_000))
    assert compact.rescored < 0.9 * run(stored, 64)[2].rescored
    assert compact.bytes < run(stored, 64)[2].bytes
    assert compact.dense_bytes < 0.6 * run(stored, 64)[2].dense_bytes


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (Policy.of(8, tail=True), "the means of compact history"),
        (Policy.of(8, fast=True), "the bounds of compact history"),
    ],
)
def test_what_a_policy_needs_of_compact_history(policy: Policy, message: str) -> None:
    p = prepare(BASE.with_(seqs=((1, 400),)))
    assert p.kv.compact is not None
    bare = p.kv._replace(compact=api.CompactKV(p.kv.compact.key, p.kv.compact.value))
    with pytest.raises(ValueError, match=message):
        run(Paged(p.case, p.q, bare, p.meta), policy)
