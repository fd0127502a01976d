"""What the torch backends launch, and that their transposes copy nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch.profiler import ProfilerActivity, profile

from octavo.bench import attention as bench
from octavo.kernels import api, bmm, fused, gather

from .paged import Case, build, pool


@pytest.mark.parametrize("seqs", [((1, 300),), ((20, 300),), ((1, 300),) * 8])
def test_launches_fall_from_3h_to_3_to_1_to_1(seqs: tuple[tuple[int, int], ...]) -> None:
    case = Case(seqs=seqs)
    paged = build(case)
    counts = {}
    for name in bench.BACKENDS:
        kernel = api.get(name)
        plan = kernel.plan(paged.meta, case.spec, pool(1))
        counts[name] = bench.count_operators(lambda k=kernel, p=plan: k.attend(paged.q, paged.kv, p))
    assert {name: c["attention"] for name, c in counts.items()} == {
        "loop": 3 * case.num_heads,
        "bmm": 3,
        "sdpa": 1,
        "fused": 1,
    }
    assert counts["fused"]["other"] == 0
    assert all(c["other"] > 0 for name, c in counts.items() if name != "fused")


def test_count_operators_sees_every_kind_of_work() -> None:
    """The counter itself: views and allocations are nothing, a copy and a product are one each."""
    x = torch.randn(4, 6)
    assert bench.count_operators(lambda: x.t().unsqueeze(0).expand(2, 6, 4)) == {"attention": 0, "other": 0}
    assert bench.count_operators(lambda: x.t().contiguous()) == {"attention": 0, "other": 1}
    assert bench.count_operators(lambda: x @ x.t()) == {"attention": 1, "other": 0}
    assert bench.count_operators(lambda: torch.cat([x * 2, x])) == {"attention": 0, "other": 2}


def test_bmm_reads_the_queries_where_they_lie() -> None:
    """[S, H, D] seen as [H, S, D] is the same storage, for one query head a KV head."""
    case = Case(seqs=((20, 50),), num_heads=4, num_kv_heads=4)
    paged = build(case)
    group = gather.plan(paged.meta, case.spec).groups[0]
    folded = gather.fold(paged.q, group, 4)
    assert folded.shape == (1, 4, 20, 32)
    assert folded.data_ptr() == paged.q.data_ptr()
    assert folded.stride()[1:] == paged.q.transpose(0, 1).stride()


@pytest.mark.parametrize("batch", [1, 8])
def test_decode_folds_gqa_without_a_copy(batch: int) -> None:
    """Three query heads of a KV head are three rows against one K: nothing is repeated or copied."""
    case = Case(seqs=((1, 50),) * batch)
    paged = build(case)
    group = gather.plan(paged.meta, case.spec).groups[0]
    folded = gather.fold(paged.q, group, 2)
    assert folded.shape == (batch, 2, 3, 32)
    assert folded.data_ptr() == paged.q.data_ptr()
    key, _ = gather.keys_values(paged.kv, group)
    assert key.shape == (batch, 2, 50, 32)


def test_bmm_copies_no_head() -> None:
    """Beside its three operators: two gathers and one write of the result, whatever the heads."""
    rest = []
    for num_heads in (4, 16):
        case = Case(seqs=((20, 50),), num_heads=num_heads, num_kv_heads=num_heads)
        paged = build(case)
        plan = bmm.plan(paged.meta, case.spec, pool(1))
        rest.append(bench.count_operators(lambda p=paged, pl=plan: bmm.attend(p.q, p.kv, pl))["other"])
        with profile(activities=[ProfilerActivity.CPU]) as prof:
            bmm.attend(paged.q, paged.kv, plan)
        assert not {"aten::cat", "aten::contiguous", "aten::clone"} & {e.name for e in prof.events()}
    assert rest == [3, 3]


def test_bmm_and_matmul_are_the_same_product() -> None:
    q, k = torch.randn(20, 6, 32), torch.randn(50, 6, 32)
    qh, kh = q.transpose(0, 1), k.transpose(0, 1).transpose(1, 2)
    assert torch.equal(torch.bmm(qh, kh), torch.matmul(qh, kh))
    assert qh.data_ptr() == q.data_ptr()
    assert kh.data_ptr() == k.data_ptr()


def test_masks_are_made_once_a_step() -> None:
    case = Case(seqs=((5, 50),), window=9)
    paged = build(case)
    plan = gather.plan(paged.meta, case.spec)
    first = plan.groups[0].mask(9, 3)
    assert plan.groups[0].mask(9, 3) is first
    assert plan.groups[0].mask(None, 3) is not first


def test_decodes_of_a_batch_are_one_group() -> None:
    case = Case(seqs=((1, 50), (7, 20), (1, 3), (1, 300)))
    groups = gather.plan(build(case).meta, case.spec).groups
    assert [(g.q_len, len(g.seq_lens)) for g in groups] == [(1, 3), (7, 1)]


def test_fused_shows_in_a_profile() -> None:
    case = Case(seqs=((1, 50),))
    paged = build(case)
    plan = fused.plan(paged.meta, case.spec, pool(1))
    with profile(activities=[ProfilerActivity.CPU]) as prof:
        fused.attend(paged.q, paged.kv, plan)
    assert [e.name for e in prof.events()].count(fused.NAME) == 1


def test_bench_writes_its_table_json_and_plot(tmp_path: Path) -> None:
    console = Console(record=True, width=120)
    bench.bench_attention(
        threads=1, command="octavo bench attention", output=tmp_path, rounds=1, quick=True, console=console
    )
    result = json.loads((tmp_path / "attention.json").read_text())
    assert {"command", "machine", "versions", "isa", "threads"} <= result.keys()
    for row in result["cases"]:
        assert row["read_gb_per_s"] > 0
        for name in bench.BACKENDS:
            assert row[name]["ms"] > 0
            assert row[name]["max_difference_from_loop"] < 1e-4
    shared = next(row for row in result["cases"] if row["shared"])
    per_key = 2 * bench.NUM_KV_HEADS * bench.HEAD_DIM * 4
    assert shared["fused"]["bytes_read"] == shared["kv_bytes"] == (256 + 4 * 64) * per_key
    assert shared["fused_apart"]["bytes_read"] == 4 * 320 * per_key
    assert shared["fused_apart"]["max_difference_from_loop"] == shared["fused"]["max_difference_from_loop"]
    assert result["operators"]["loop"]["one_sequence"]["attention"] == 3 * bench.NUM_HEADS
    assert result["operators"]["bmm"]["prefill_intermediate_bytes"] > 0
    assert result["bmm_beside_matmul"]["transposes_share_storage"]
    assert (tmp_path / "attention.png").stat().st_size > 1000
    assert "27 + " in console.export_text()


def test_bench_refuses_no_threads() -> None:
    with pytest.raises(ValueError, match="threads must be at least 1, got 0"):
        bench.run(threads=0, command="octavo bench attention")
