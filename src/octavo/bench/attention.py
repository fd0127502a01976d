"""``octavo bench attention``: what each attention backend costs, at decode and at prefill.

Shape of SmolLM2-135M: 9 query heads, 3 KV heads of 64. Backends take turns within a round, so that
their ratios hold even when the machine's speed drifts. Consecutive calls walk over several layers'
caches, as a model does: a cache that fits a processor's would flatter every number.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity, profile

from octavo.bench.machine import machine, torch_threads, versions
from octavo.cache.kv_cache import KVCache
from octavo.kernels import api, fused, native
from octavo.kernels.native import ThreadPool

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 9, 3, 64, 16
NUM_LAYERS = 30
#: Layers' caches are made until they hold this many bytes together (or there are NUM_LAYERS); a quarter
#: of it where keys are shared, because most backends read these once a sequence.
CACHE_BYTES = 400 << 20
BACKENDS = ("loop", "bmm", "sdpa", "fused")
#: ``fused`` told to read each sequence's keys apart, for the cases with shared ones.
APART = "fused_apart"

#: Products and softmax, by the operator's name in a profile.
ATTENTION_OPERATORS = frozenset(
    {
        "aten::mm",
        "aten::bmm",
        "aten::baddbmm",
        "aten::_softmax",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_attention_math",
        fused.NAME,
    }
)
#: Operators that only make a tensor's header or ask the allocator; they move no data.
BOOKKEEPING = frozenset(
    f"aten::{name}"
    for name in (
        "empty",
        "empty_like",
        "empty_strided",
        "resize_",
        "view",
        "view_as",
        "as_strided",
        "_reshape_alias",
        "reshape",
        "_unsafe_view",
        "unsafe_view",
        "transpose",
        "permute",
        "expand",
        "select",
        "slice",
        "squeeze",
        "unsqueeze",
        "flatten",
        "unflatten",
        "narrow",
        "detach",
        "alias",
        "t",
        "to",
        "_to_copy",
        "resolve_conj",
        "resolve_neg",
        "contiguous",
        "lift_fresh",
        "result_type",
        "chunk",
        "split",
    )
)


@dataclass(frozen=True, slots=True)
class Case:
    """``batch`` sequences of ``keys`` keys each, of which the last ``queries`` are this step's.

    The first ``shared`` keys of all sequences lie in the same blocks.
    """

    kind: str
    batch: int
    queries: int
    keys: int
    shared: int = 0

    @property
    def kv_bytes(self) -> int:
        """K and V of one layer, each read once."""
        return 2 * (self.shared + self.batch * (self.keys - self.shared)) * NUM_KV_HEADS * HEAD_DIM * 4

    @property
    def name(self) -> str:
        if self.kind == "decode":
            return f"decode {self.batch} x {self.keys}"
        if self.kind == "shared":
            return f"shared {self.batch} x {self.keys - self.shared} after {self.shared}"
        return f"prefill {self.queries} after {self.keys - self.queries}"


FULL = (
    *(Case("decode", batch, 1, keys) for batch in (1, 8, 32) for keys in (256, 1024, 8192)),
    Case("prefill", 1, 512, 512),
    Case("prefill", 1, 512, 2560),
    Case("shared", 32, 1, 1088, 1024),
    Case("shared", 32, 1, 8320, 8192),
)
QUICK = (
    Case("decode", 1, 1, 256),
    Case("decode", 4, 1, 256),
    Case("prefill", 1, 64, 128),
    Case("shared", 4, 1, 320, 256),
)


@dataclass(frozen=True)
class Step:
    """A case's tensors: one query, some layers' caches, one plan a backend."""

    q: torch.Tensor
    cache: KVCache
    plans: dict[str, Any]

    @property
    def num_layers(self) -> int:
        return self.cache.key.shape[0]

    def attend(self, name: str, layer: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        kv = api.KVLayer(*self.cache.layer(layer), HEAD_DIM**-0.5)
        return api.get("fused" if name == APART else name).attend(self.q, kv, self.plans[name])

    def read(self, pool: ThreadPool) -> None:
        """Read the K and V of all layers in order, and do nothing with them: the memory's own speed."""
        for tensor in (self.cache.key, self.cache.value):
            native.read_memory(tensor, pool)


def prepare(case: Case, pool: ThreadPool, num_layers: int | None = None) -> Step:
    """Random tensors for ``case``; each sequence's blocks lie in a row, as a fresh pool gives them."""
    if num_layers is None:
        budget = CACHE_BYTES // 4 if case.shared else CACHE_BYTES
        num_layers = max(1, min(NUM_LAYERS, budget // case.kv_bytes))
    generator = torch.Generator().manual_seed(0)
    blocks = -(-case.keys // BLOCK_SIZE)
    common = case.shared // BLOCK_SIZE
    num_blocks = common + case.batch * (blocks - common)
    cache = KVCache(
        num_layers=num_layers,
        num_blocks=num_blocks,
        num_kv_heads=NUM_KV_HEADS,
        block_size=BLOCK_SIZE,
        head_dim=HEAD_DIM,
    )
    for tensor in (cache.key, cache.value):
        tensor.normal_(generator=generator)
    own = torch.arange(common, num_blocks, dtype=torch.int32).view(case.batch, blocks - common)
    meta = api.AttentionMeta(
        torch.cat([torch.arange(common, dtype=torch.int32).expand(case.batch, common), own], dim=1),
        torch.full((case.batch,), case.keys, dtype=torch.int32),
        torch.arange(case.batch + 1, dtype=torch.int32) * case.queries,
    )
    spec = api.AttentionSpec(
        num_heads=NUM_HEADS,
        num_kv_heads=NUM_KV_HEADS,
        head_dim=HEAD_DIM,
        block_size=BLOCK_SIZE,
        kv_dtype=torch.float32,
        device="cpu",
    )
    q = torch.randn(case.batch * case.queries, NUM_HEADS, HEAD_DIM, generator=generator)
    plans = {name: api.get(name).plan(meta, spec, pool) for name in BACKENDS}
    if case.shared:
        plans[APART] = fused.plan(meta, spec, pool, share=False)
    return Step(q, cache, plans)


#: The threads of torch's last call go on looking for work for a while, on the cores that the next one needs.
SETTLE_S = 0.02


def time_interleaved(calls: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each call in each round, the calls taking turns; the first round is not counted.

    In its turn a call is made twice and the second is timed: our own threads sleep while the others'
    settle, and waking them and the CPUs costs up to a millisecond and a half. Steps of an engine follow
    each other.
    """
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for i in range(rounds + 1):
        for name, call in calls.items():
            time.sleep(SETTLE_S)
            call()
            start = time.perf_counter()
            call()
            if i:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def measure_case(case: Case, pool: ThreadPool, rounds: int) -> dict[str, Any]:
    """Median milliseconds a layer of each backend, GB/s of K and V, and whether outputs agree.

    A plain read of the same memory takes its turn in every round: what a backend's GB/s is held against.
    """
    step = prepare(case, pool)
    count = step.num_layers

    def all_layers(name: str) -> None:
        for layer in range(count):
            step.attend(name, layer)

    calls: dict[str, Callable[[], object]] = {name: partial(all_layers, name) for name in step.plans}
    times = time_interleaved(calls | {"read": partial(step.read, pool)}, rounds)
    read = statistics.median(times.pop("read")) / count
    want = step.attend("loop", 0)[0]
    row: dict[str, Any] = {
        **asdict(case),
        "name": case.name,
        "layers": count,
        "kv_bytes": case.kv_bytes,
        "read_gb_per_s": case.kv_bytes / read / 1e9,
    }
    for name, seconds in times.items():
        median = statistics.median(seconds) / count
        row[name] = {
            "ms": median * 1e3,
            "ms_all": [s / count * 1e3 for s in seconds],
            "gb_per_s": case.kv_bytes / median / 1e9,
            "share_of_read": read / median,
            "max_difference_from_loop": (step.attend(name, 0)[0] - want).abs().max().item(),
        }
        if case.kind == "prefill":
            pairs = sum(range(case.keys - case.queries + 1, case.keys + 1))
            row[name]["gflop_per_s"] = 4 * pairs * NUM_HEADS * HEAD_DIM / median / 1e9
        if name in ("fused", APART):
            row[name]["bytes_read"] = 2 * step.plans[name].native.keys_read * HEAD_DIM * 4
    return row


def count_operators(call: Callable[[], object]) -> dict[str, int]:
    """Operators that do work in one call: attention products and softmax, and everything else.

    An operator is counted once, whatever it calls inside; bookkeeping (views, allocation) is not.
    """
    call()
    with profile(activities=[ProfilerActivity.CPU]) as prof:
        call()
    counts = {"attention": 0, "other": 0}

    def visit(event: Any) -> bool:
        """Count what works in ``event``; True when anything did."""
        if event.name in ATTENTION_OPERATORS:
            counts["attention"] += 1
            return True
        worked = [visit(child) for child in event.cpu_children]
        if any(worked) or event.name in BOOKKEEPING or not event.name.startswith("aten::"):
            return any(worked)
        counts["other"] += 1
        return True

    for event in prof.events():
        if event.cpu_parent is None:
            visit(event)
    return counts


def allocated_bytes(call: Callable[[], object]) -> int:
    """Bytes that one call asks torch's allocator for, its result among them."""
    call()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        call()
    return sum(max(0, event.self_cpu_memory_usage) for event in prof.events())


def measure_operators(pool: ThreadPool, quick: bool) -> dict[str, Any]:
    """Operators a layer, the cost of a call that has nearly nothing to compute, and intermediates."""
    keys = 64 if quick else 1024
    steps = {batch: prepare(Case("decode", batch, 1, keys), pool, 1) for batch in (1, 8)}
    chunk = prepare(Case("prefill", 1, 32 if quick else 512, keys), pool, 1)
    tiny = prepare(Case("decode", 1, 1, BLOCK_SIZE), pool, 1)

    def repeat(name: str) -> None:
        for _ in range(20):
            tiny.attend(name, 0)

    calls = {name: partial(repeat, name) for name in BACKENDS}
    empty = time_interleaved(calls, 3 if quick else 30)
    rows: dict[str, Any] = {}
    for name in BACKENDS:
        one = count_operators(partial(steps[1].attend, name, 0))
        microseconds = statistics.median(empty[name]) / 20 * 1e6
        out_bytes = chunk.q.numel() * 4
        rows[name] = {
            "one_sequence": one,
            "batch_of_8": count_operators(partial(steps[8].attend, name, 0)),
            "us_per_call": microseconds,
            "us_per_operator": microseconds / (one["attention"] + one["other"]),
            "prefill_intermediate_bytes": allocated_bytes(partial(chunk.attend, name, 0)) - out_bytes,
        }
    # The native kernel's scratch is its own: torch's allocator does not see it.
    rows["fused"]["prefill_intermediate_bytes"] += chunk.plans["fused"].native.scratch_bytes
    return rows


def measure_bmm_beside_matmul(rounds: int) -> dict[str, Any]:
    """The same product as ``torch.bmm`` and as ``torch.matmul``, on heads viewed from ``[S, H, D]``."""
    q, k = torch.randn(512, NUM_HEADS, HEAD_DIM), torch.randn(1024, NUM_HEADS, HEAD_DIM)
    qh, kh = q.transpose(0, 1), k.transpose(0, 1).transpose(1, 2)
    calls = {"bmm": lambda: torch.bmm(qh, kh), "matmul": lambda: torch.matmul(qh, kh)}
    times = time_interleaved(calls, rounds)
    return {
        **{f"{name}_us": statistics.median(seconds) * 1e6 for name, seconds in times.items()},
        "max_difference": (torch.bmm(qh, kh) - torch.matmul(qh, kh)).abs().max().item(),
        "transposes_share_storage": qh.data_ptr() == q.data_ptr() and kh.data_ptr() == k.data_ptr(),
    }


def run(*, threads: int, command: str, rounds: int = 7, quick: bool = False) -> dict[str, Any]:
    """Measure everything; nothing is printed or written. ``quick`` takes small shapes (tests)."""
    if threads < 1:
        raise ValueError(f"threads must be at least 1, got {threads}")
    if rounds < 1:
        raise ValueError(f"rounds must be at least 1, got {rounds}")
    pool = ThreadPool(threads)
    with torch_threads(threads), torch.inference_mode():
        # glibc takes big temporaries afresh from the system until a bigger one was freed once. In a
        # process that has loaded a model that has happened; without it the gathers pay for page faults.
        torch.ones(31 << 18)
        return {
            "bench": "attention",
            "command": command,
            "threads": threads,
            "isa": native.isa(),
            "machine": machine(),
            "versions": versions(),
            "shape": {"num_heads": NUM_HEADS, "num_kv_heads": NUM_KV_HEADS, "head_dim": HEAD_DIM},
            "block_size": BLOCK_SIZE,
            "rounds": rounds,
            "cases": [measure_case(case, pool, rounds) for case in (QUICK if quick else FULL)],
            "operators": measure_operators(pool, quick),
            "bmm_beside_matmul": measure_bmm_beside_matmul(rounds),
        }


def show(result: dict[str, Any], console: Console) -> None:
    """Print the tables."""
    times = Table(title=f"milliseconds a layer ({result['threads']} threads, {result['machine']['cpu']})")
    times.add_column("case")
    for name in BACKENDS:
        times.add_column(name, justify="right")
    for title in ("loop / fused", "sdpa / fused", "fused", "plain read"):
        times.add_column(title, justify="right")
    for row in result["cases"]:
        ours = row["fused"]
        speed = f"{ours['gb_per_s']:.1f} GB/s, {ours['share_of_read']:.0%}"
        times.add_row(
            row["name"],
            *(f"{row[name]['ms']:.3f}" for name in BACKENDS),
            f"{row['loop']['ms'] / ours['ms']:.1f}x",
            f"{row['sdpa']['ms'] / ours['ms']:.1f}x",
            f"{ours['gflop_per_s']:.0f} GFLOP/s" if row["kind"] == "prefill" else speed,
            f"{row['read_gb_per_s']:.1f} GB/s",
        )
    console.print(times)
    shared = Table(
        title="fused where sequences share their first keys: milliseconds a layer, MB of K and V read"
    )
    for title in ("case", "apart", "together", "apart / together", "MB apart", "MB together"):
        shared.add_column(title, justify="left" if title == "case" else "right")
    for row in result["cases"]:
        if row["shared"]:
            apart, ours = row[APART], row["fused"]
            shared.add_row(
                row["name"],
                f"{apart['ms']:.3f}",
                f"{ours['ms']:.3f}",
                f"{apart['ms'] / ours['ms']:.1f}x",
                f"{apart['bytes_read'] / 1e6:.1f}",
                f"{ours['bytes_read'] / 1e6:.1f}",
            )
    console.print(shared)
    operators = Table(
        title="operators a layer at decode (products and softmax + the rest); MB beside a chunk's result"
    )
    for title in ("backend", "one sequence", "batch of 8", "us a call", "us an operator", "MB of scratch"):
        operators.add_column(title, justify="left" if title == "backend" else "right")
    for name, row in result["operators"].items():
        one, eight = row["one_sequence"], row["batch_of_8"]
        operators.add_row(
            name,
            f"{one['attention']} + {one['other']}",
            f"{eight['attention']} + {eight['other']}",
            f"{row['us_per_call']:.1f}",
            f"{row['us_per_operator']:.1f}",
            f"{row['prefill_intermediate_bytes'] / 1e6:.2f}",
        )
    console.print(operators)
    product = result["bmm_beside_matmul"]
    console.print(
        f"bmm {product['bmm_us']:.0f} us, matmul {product['matmul_us']:.0f} us, "
        f"largest difference {product['max_difference']:g}"
    )


def plot(result: dict[str, Any], path: Path) -> None:
    """Times of every case and backend, on a log scale."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(13, 5.5), layout="constrained")
    width = 0.8 / len(BACKENDS)
    for i, name in enumerate(BACKENDS):
        places = [case + (i - 1.5) * width for case in range(len(result["cases"]))]
        bars = axes.bar(places, [row[name]["ms"] for row in result["cases"]], width, label=name)
        if name == "fused":
            axes.bar_label(bars, [f"{row[name]['ms']:.2g}" for row in result["cases"]], fontsize=7)
            apart = {
                x: row[APART]["ms"] for x, row in zip(places, result["cases"], strict=True) if row["shared"]
            }
            axes.scatter(
                list(apart), list(apart.values()), marker="_", s=90, color="black", label="fused, each apart"
            )
    axes.set_yscale("log")
    axes.set_ylabel("ms a layer")
    axes.set_xticks(
        range(len(result["cases"])),
        [row["name"].replace(" ", "\n", 1).replace(" after", "\nafter") for row in result["cases"]],
    )
    axes.tick_params(axis="x", labelsize=7)
    axes.set_title(f"Attention backends, {result['threads']} threads, {result['machine']['cpu']}, float32")
    axes.legend()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def bench_attention(
    *,
    threads: int,
    command: str,
    output: Path = Path("benchmarks/results"),
    rounds: int = 7,
    quick: bool = False,
    console: Console | None = None,
) -> dict[str, Any]:
    """What the command line calls: measure, print, and write ``attention.json`` and ``attention.png``."""
    console = console or Console()
    with console.status("measuring attention backends"):
        result = run(threads=threads, command=command, rounds=rounds, quick=quick)
    show(result, console)
    output.mkdir(parents=True, exist_ok=True)
    (output / "attention.json").write_text(json.dumps(result, indent=1) + "\n")
    plot(result, output / "attention.png")
    console.print(f"written: {output / 'attention.json'}, {output / 'attention.png'}")
    return result
