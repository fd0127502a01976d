"""``octavo bench topk``: what top-k attention costs in decode, beside dense ``fused`` attention, and how fast
the whole engine then is (:mod:`octavo.bench.topk_engine`).

Shape of SmolLM2-135M: 9 query heads, 3 KV heads of 64. The variants take turns within a round, so that their
ratios hold even when the machine's speed drifts, and walk over several layers' caches, as a model does.
Keys and queries are drawn at random around a mean of each head that is as long as two deviations: the
scan's time depends on them only by how many keys it cannot decide, which is reported.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from octavo.attn_rule import AttnRule
from octavo.bench import topk_engine
from octavo.bench.attention import (
    BLOCK_SIZE,
    HEAD_DIM,
    NUM_HEADS,
    NUM_KV_HEADS,
    NUM_LAYERS,
    time_interleaved,
)
from octavo.bench.machine import machine, versions
from octavo.cache.kv_cache import DTYPES, KVCache, PlaneSet
from octavo.kernels import api, fused, topk_paged
from octavo.kernels.native import ThreadPool

CACHE_BYTES = 400 << 20
#: Keys that are missing to a whole span.
OPEN = 8
QUICK = (1024,)
LENGTHS = (1024, 4096, 16384, 32768)
BATCHES = (1, 8)


@dataclass(frozen=True, slots=True)
class Case:
    """``batch`` sequences that decode one token each over ``keys`` keys, K and V in ``kv_dtype``."""

    batch: int
    keys: int
    kv_dtype: str

    @property
    def kv_bytes(self) -> int:
        """K and V of one layer."""
        element = DTYPES[self.kv_dtype].itemsize
        return 2 * self.batch * self.keys * NUM_KV_HEADS * HEAD_DIM * element


def policies(topk: int) -> dict[str, topk_paged.Policy]:
    """What is measured beside dense attention."""
    of = topk_paged.Policy.of
    return {
        "exact": of(topk),
        "exact_tail": of(topk, tail=True),
        "fast": of(topk, fast=True),
        "fast_tail": of(topk, fast=True, tail=True),
        "auto": topk_paged.Policy(*AttnRule.of("auto", "exact", True)),
    }


class Step:
    """A case's tensors and plans."""

    def __init__(self, case: Case, topk: int, pool: ThreadPool) -> None:
        generator = torch.Generator().manual_seed(0)
        self.num_layers = max(1, min(NUM_LAYERS, CACHE_BYTES // case.kv_bytes))
        blocks = case.keys // BLOCK_SIZE
        self.cache = KVCache(
            num_layers=self.num_layers,
            num_blocks=case.batch * blocks,
            num_kv_heads=NUM_KV_HEADS,
            block_size=BLOCK_SIZE,
            head_dim=HEAD_DIM,
            kv_dtype=case.kv_dtype,
            planes=PlaneSet(range(self.num_layers), tail=True, fast=True),
        )
        self.spec = api.AttentionSpec(
            num_heads=NUM_HEADS,
            num_kv_heads=NUM_KV_HEADS,
            head_dim=HEAD_DIM,
            block_size=BLOCK_SIZE,
            kv_dtype=DTYPES[case.kv_dtype],
            device="cpu",
        )
        mean = torch.randn(NUM_KV_HEADS, 1, HEAD_DIM, generator=generator)
        for layer in range(self.num_layers):
            key, value = self.cache.layer(layer)
            key.copy_(torch.randn(key.shape, generator=generator) + 2 * mean)
            value.copy_(torch.randn(value.shape, generator=generator))
        table = torch.arange(case.batch * blocks, dtype=torch.int32).view(case.batch, blocks)
        seq_lens = torch.full((case.batch,), case.keys, dtype=torch.int32)
        starts = torch.arange(case.batch + 1, dtype=torch.int32)
        self.meta = api.AttentionMeta(table, seq_lens, starts)
        self.q = torch.randn(case.batch, NUM_HEADS, HEAD_DIM, generator=generator)
        self.out = torch.empty_like(self.q)
        self._seal(case, pool)
        # The last span is open, as in 15 steps of 16.
        self.meta = self.meta._replace(seq_lens=seq_lens - OPEN)
        self.dense = fused.plan(self.meta, self.spec, pool)
        self.ways = {
            name: topk_paged.plan(self.meta, topk_paged.policies([policy] * case.batch), self.spec, pool)
            for name, policy in policies(topk).items()
        }
        # Of a step that completes a span: what it adds is not in `ways`.
        budget = topk_paged.policies([topk_paged.Policy.of(case.keys)] * case.batch)
        self.seal = topk_paged.plan(self.meta._replace(seq_lens=seq_lens), budget, self.spec, pool)
        self.report = torch.zeros(case.batch, len(topk_paged.Report._fields), dtype=torch.float64)

    def _seal(self, case: Case, pool: ThreadPool) -> None:
        """Write the planes, as prefill would: a step that computes every key and leaves no row to top-k."""
        starts = torch.arange(case.batch + 1, dtype=torch.int32) * case.keys
        budgets = topk_paged.policies([topk_paged.Policy.of(case.keys)] * case.batch)
        plan = topk_paged.plan(self.meta._replace(cu_seqlens_q=starts), budgets, self.spec, pool)
        rows = torch.empty(NUM_HEADS, HEAD_DIM).expand(case.batch * case.keys, -1, -1)
        for layer in range(self.num_layers):
            topk_paged.attend(rows, self.kv(layer), plan, rows)

    def kv(self, layer: int) -> api.KVLayer:
        return api.KVLayer(*self.cache.layer(layer), HEAD_DIM**-0.5, planes=self.cache.layer_planes(layer))

    def run_dense(self) -> None:
        for layer in range(self.num_layers):
            fused.attend(self.q, self.kv(layer), self.dense, self.out)

    def run_way(self, name: str) -> None:
        for layer in range(self.num_layers):
            topk_paged.attend(self.q, self.kv(layer), self.ways[name], self.out, self.report)

    def run_seal(self) -> None:
        for layer in range(self.num_layers):
            topk_paged.attend(self.q, self.kv(layer), self.seal, self.out)


def measure(case: Case, topk: int, pool: ThreadPool, rounds: int) -> dict[str, Any]:
    """Median microseconds a layer of dense and each way, bytes read a layer, and keys exact rescored a row.

    Writing the plane, which one step of 16 does, is measured apart and added as a sixteenth.
    """
    step = Step(case, topk, pool)
    calls: dict[str, Callable[[], None]] = {"dense": step.run_dense, "seal": step.run_seal}
    calls |= {name: partial(step.run_way, name) for name in step.ways}
    times = time_interleaved(calls, rounds)
    us = {name: statistics.median(seconds) / step.num_layers * 1e6 for name, seconds in times.items()}
    dense_bytes = 2 * step.dense.native.keys_read * HEAD_DIM * DTYPES[case.kv_dtype].itemsize
    found = {}
    for name, plan in step.ways.items():
        step.report.zero_()
        step.run_way(name)
        report = sum((topk_paged.Report(*row) for row in step.report.tolist()), topk_paged.Report())
        found[f"{name}_us"] = us[name] + us["seal"] / topk_paged.RECORD_KEYS
        found[f"{name}_bytes"] = plan.native.bytes_read
        if name == "exact":
            found["rescored_per_row"] = report.rescored / report.rows
            found["mean_dropped_mass"] = report.dropped_sum / report.rows
    return {
        **asdict(case),
        "layers": step.num_layers,
        "dense_us": us["dense"],
        "seal_us": us["seal"],
        "dense_bytes": dense_bytes,
        **found,
        "all_us": {k: [s / step.num_layers * 1e6 for s in v] for k, v in times.items()},
    }


def run(*, threads: int, topk: int, rounds: int, quick: bool) -> dict[str, Any]:
    """Every length and batch in both types; dense float32 and float16 stand side by side in each."""
    pool = ThreadPool(threads)
    rows = []
    for batch in BATCHES[:1] if quick else BATCHES:
        for keys in QUICK if quick else LENGTHS:
            pair = {t: measure(Case(batch, keys, t), topk, pool, rounds) for t in ("float32", "float16")}
            for row in pair.values():
                for name in policies(topk):
                    row[f"{name}_speedup_over_float16"] = pair["float16"]["dense_us"] / row[f"{name}_us"]
                rows.append(row)
    return {"threads": threads, "attn_topk": topk, "rounds": rounds, "rows": rows}


def show(result: dict[str, Any], console: Console) -> None:
    table = Table(
        title=f"Decode attention, attn_topk={result['attn_topk']}, {result['threads']} threads, a layer"
    )
    ways = list(policies(result["attn_topk"]))
    for name in ("batch", "keys", "K and V", "dense us", *ways, "rescored a row"):
        table.add_column(name, justify="right")
    for row in result["rows"]:
        table.add_row(
            str(row["batch"]),
            str(row["keys"]),
            row["kv_dtype"],
            f"{row['dense_us']:.0f}",
            *(_cell(row, name) for name in ways),
            f"{row['rescored_per_row']:.0f}",
        )
    console.print(table)
    console.print("Each way: microseconds, times dense float16, share of dense's bytes (same type).")


def _cell(row: dict[str, Any], name: str) -> str:
    speedup, share = row[f"{name}_speedup_over_float16"], row[f"{name}_bytes"] / row["dense_bytes"]
    return f"{row[f'{name}_us']:.0f}, {speedup:.2f}x, {share:.2f}"


def show_engine(rows: list[dict[str, Any]], console: Console) -> None:
    names = list(dict.fromkeys(row["way"] for row in rows))
    table = Table(title="The whole engine, one stream: tokens a second (times dense float16)")
    for name in ("keys", *names):
        table.add_column(name, justify="right")
    for keys in dict.fromkeys(row["keys"] for row in rows):
        speed = {row["way"]: row["tok_s"] for row in rows if row["keys"] == keys}
        table.add_row(f"{keys:,}", *(f"{speed[n]:.1f} ({speed[n] / speed['dense']:.2f})" for n in names))
    console.print(table)


def draw(result: dict[str, Any], path: Path) -> None:
    """Times dense float16's speed by the number of keys: attention alone, by batch, and the whole engine."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    batches = list(dict.fromkeys(row["batch"] for row in result["rows"]))
    count = len(batches) + bool(result["engine"])
    figure, panels = plt.subplots(
        1, count, figsize=(4.6 * count, 4.2), sharey=True, squeeze=False, layout="constrained"
    )
    for axes, batch in zip(panels[0], batches, strict=False):
        rows = [row for row in result["rows"] if (row["batch"], row["kv_dtype"]) == (batch, "float16")]
        for name in policies(result["attn_topk"]):
            points = [row[f"{name}_speedup_over_float16"] for row in rows]
            axes.plot([row["keys"] for row in rows], points, marker="o", markersize=4, label=name)
        axes.set_title(f"attention, batch {batch}")
    for name in dict.fromkeys(row["way"] for row in result["engine"]):
        dense = {row["keys"]: row["tok_s"] for row in result["engine"] if row["way"] == "dense"}
        rows = [row for row in result["engine"] if row["way"] == name]
        points = [row["tok_s"] / dense[row["keys"]] for row in rows]
        panels[0][-1].plot([row["keys"] for row in rows], points, marker="o", markersize=4, label=name)
        panels[0][-1].set_title("the whole engine, one stream")
    for axes in panels[0]:
        axes.set_xscale("log", base=2)
        axes.axhline(1, color="grey", linewidth=0.8)
        axes.set_xlabel("keys")
        axes.grid(visible=True, alpha=0.3)
        axes.legend(fontsize=8)
    panels[0][0].set_ylabel("times dense float16")
    figure.savefig(path, dpi=120)
    plt.close(figure)


@dataclass(frozen=True, slots=True)
class Settings:
    """What to measure. ``model`` runs whole; None leaves that out. ``quick``: 1,024 keys, batch 1."""

    topk: int
    rounds: int
    threads: int
    model: str | None
    quick: bool


def bench_topk(settings: Settings, *, command: str, output: Path, console: Console) -> dict[str, Any]:
    """What the command line calls: measure, print, and write ``topk.json`` and ``topk.png``."""
    topk, rounds, threads, quick = settings.topk, settings.rounds, settings.threads, settings.quick
    with console.status("measuring top-k attention"):
        result = run(threads=threads, topk=topk, rounds=rounds, quick=quick)
    result |= {"command": command, "load_average": os.getloadavg()[0], "model": None, "engine": []}
    result |= {"machine": machine(), "versions": versions()}
    show(result, console)
    if settings.model is not None:
        lengths = QUICK if quick else LENGTHS
        result["model"] = Path(settings.model).name
        result["engine"] = topk_engine.measure(
            settings.model, lengths, topk=topk, rounds=rounds, threads=threads, report=console.print
        )
        show_engine(result["engine"], console)
    (output / "topk.json").write_text(json.dumps(result, indent=1) + "\n")
    draw(result, output / "topk.png")
    console.print(f"written: {output / 'topk.json'} and topk.png")
    return result
