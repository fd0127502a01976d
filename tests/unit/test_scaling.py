"""The scaling bench: what a step cannot avoid, which cells are left out, and what is written down."""

import json

import pytest
import torch

from octavo.batch import ForwardBatch
from octavo.bench import scaling, scheduling
from octavo.bench.scaling import BLOCK_SIZE, TINY, Cell, Speeds, Work
from octavo.kernels.native import ThreadPool


def test_the_bound_is_the_slower_of_memory_and_products():
    speeds = Speeds(bytes_per_s=10.0, flop_per_s=100.0)
    assert Work(weight_bytes=30, kv_bytes=20, flop=100).bound(speeds) == (5.0, "memory")
    assert Work(weight_bytes=30, kv_bytes=20, flop=900).bound(speeds) == (9.0, "compute")


def test_more_streams_read_more_keys_but_no_more_weights():
    one = scaling.work(Cell(1, 100), TINY, weight_bytes=7, num_weights=3)
    four = scaling.work(Cell(4, 100), TINY, weight_bytes=7, num_weights=3)
    # 2 layers, K and V, 2 heads of 32 float32; 4 query heads, two products of 2 operations.
    assert one == Work(7, 100 * 2 * 2 * 2 * 32 * 4, 2 * 3 + 100 * 2 * 4 * 32 * 4)
    assert (four.weight_bytes, four.kv_bytes, four.flop) == (7, 4 * one.kv_bytes, 4 * one.flop)


def test_the_weights_of_a_step_are_all_matrices_once():
    matrices = scaling.tiny_decoder(ThreadPool(1)).step_matrices()
    assert sum(m.outputs * m.inputs for m in matrices) == TINY.min_weights
    assert sum(m.bytes for m in matrices) == 4 * TINY.min_weights


def test_cells_that_do_not_fit_are_named_with_the_reason():
    cells, skipped = scaling.grid(
        (1, 2, 8), (16, 64, 128), token_budget=128, memory_tokens=100, max_context=64
    )
    assert cells == [Cell(1, 16), Cell(2, 16), Cell(1, 64)]
    reasons = {(row["streams"], row["context"]): row["reason"] for row in skipped}
    assert len(cells) + len(reasons) == 9
    assert reasons[8, 16] == reasons[2, 64] == "128 tokens are more than memory holds now, 100"
    assert reasons[8, 64] == "512 tokens are more than the budget of 128"
    assert reasons[1, 128] == "the model knows 64 positions"


def test_a_context_is_counted_in_whole_blocks():
    cells, skipped = scaling.grid((2,), (17,), token_budget=63, memory_tokens=64, max_context=64)
    assert not cells
    assert skipped[0]["reason"] == "64 tokens are more than the budget of 63"


@pytest.mark.parametrize(("streams", "context"), [(1, 1), (3, 16), (3, 17), (4, 64)])
def test_no_two_streams_share_a_block_and_each_writes_its_last_slot(streams, context):
    batch = scaling.decode_batch(Cell(streams, context), vocab_size=2)
    assert isinstance(batch, ForwardBatch)
    assert batch.block_table.unique().numel() == batch.block_table.numel() == Cell(streams, context).blocks
    last = batch.block_table[:, (context - 1) // BLOCK_SIZE] * BLOCK_SIZE + (context - 1) % BLOCK_SIZE
    assert batch.slot_mapping.tolist() == last.tolist()
    assert batch.slot_mapping.dtype == torch.int64
    assert batch.seq_lens.tolist() == [context] * streams
    assert batch.positions.tolist() == [context - 1] * streams


def test_every_row_of_the_pool_is_written():
    cache = scaling.make_cache(TINY, 3)
    assert (cache.key.abs().sum(-1) > 0).all()
    assert (cache.value.abs().sum(-1) > 0).all()


def test_a_percentile_is_one_of_the_values():
    values = [float(i) for i in range(1, 1001)]
    assert scheduling.percentile(values, 99) == 990.0
    assert scheduling.percentile(values, 100) == 1000.0
    assert scheduling.percentile([5.0], 99) == 5.0


@pytest.mark.parametrize("full", [False, True])
def test_the_queue_and_the_cache_are_as_announced_while_steps_are_timed(full):
    case = scheduling.Case("some", waiting=20, cached_blocks=200, full=full)
    row = scheduling.measure_case(case, 60)
    # A place whose request has just ended is taken in the next step.
    assert row["running"] + row["waiting_after"] == scheduling.RUNNING + 20
    assert row["cached_blocks_before"] >= 200
    assert row["finished"] > 0
    assert (row["evictions"] > 0) == full
    assert 0 < row["median_ms"] <= row["p99_ms"] <= row["max_ms"]


def test_a_quick_run_writes_a_report_and_a_plot(tmp_path):
    command = "octavo bench scaling --quick"
    scaling.bench_scaling("unused", threads=1, command=command, output=tmp_path, quick=True)
    result = json.loads((tmp_path / "scaling.json").read_text())
    assert {"command", "model", "threads", "machine", "versions", "speeds", "skipped"} <= result.keys()
    assert result["command"] == command
    assert str(tmp_path) not in json.dumps(result)
    rows = result["weights"]["float32"]
    assert [(r["streams"], r["context"]) for r in rows] == [(1, 32), (2, 32), (4, 32), (1, 64), (2, 64)]
    for row in rows:
        assert row["tokens_per_s"] == pytest.approx(row["streams"] / row["ms"] * 1e3)
        assert row["share_of_bound"] == pytest.approx(row["bound_ms"] / row["ms"])
        assert row["limited_by"] in ("memory", "compute")
    assert [(r["streams"], r["context"]) for r in result["skipped"]] == [(4, 64)]
    assert len(result["scheduling"]) == len(scheduling.QUICK)
    assert (tmp_path / "scaling.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("threads", "budget"), [(0, 1), (1, 0)])
def test_senseless_numbers_are_refused(threads, budget):
    with pytest.raises(ValueError, match="must be at least 1, got 0"):
        scaling.run("unused", threads=threads, command="", token_budget=budget, quick=True)


def test_a_budget_that_holds_nothing_is_refused():
    with pytest.raises(ValueError, match="nothing can be measured: 32 tokens are more than the budget of 8"):
        scaling.run("unused", threads=1, command="", token_budget=8, quick=True)
