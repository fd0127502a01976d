"""``octavo bench scaling``: decode steps of 1 to 128 streams over 128 to 8k tokens of context, beside what
the machine allows, and what scheduling costs.

A step is ``forward`` and ``logits`` of one new token a stream; sampling and text are not in it. Contexts are
not computed: blocks are filled with random K and V once, and no two streams share one. Steps of a cell read
the same K and V again, as decoding does, so cells small enough live in part in the processor's caches and can
beat a bound that is made from the speed of memory.
"""

from __future__ import annotations

import gc
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from octavo.attention.backend import AttentionBackend
from octavo.batch import ForwardBatch
from octavo.bench import scaling_report
from octavo.bench.machine import machine, torch_threads, versions
from octavo.bench.scheduling import measure_scheduling
from octavo.cache.kv_cache import KVCache, bytes_per_block
from octavo.config import EngineConfig, ModelConfig
from octavo.engine.build import load, read_config
from octavo.engine.resources import available_memory
from octavo.kernels import native
from octavo.kernels.api import AttentionSpec
from octavo.kernels.linear import PackedLinear, StoredMatrix
from octavo.kernels.native import ThreadPool
from octavo.models.native import NativeDecoder
from octavo.weights import hub
from octavo.weights.load import open_checkpoint

STREAMS = (1, 2, 4, 8, 16, 32, 64, 128)
CONTEXTS = (128, 1024, 2048, 4096, 8192)
WEIGHTS = ("auto", "float32")
BLOCK_SIZE = 16
#: Tokens of context that all streams of a cell may hold together.
TOKEN_BUDGET = 262_144
#: Of the free memory, what the KV pool may take; weights and buffers need some too.
MEMORY_SHARE = 0.75
#: A cell is timed for this long, or MAX_STEPS, but never for fewer than MIN_STEPS.
CELL_SECONDS, MIN_STEPS, MAX_STEPS = 1.0, 3, 15
#: What is read to measure memory: far more than a processor's caches hold.
READ_BYTES = 1 << 30

QUICK_STREAMS, QUICK_CONTEXTS, QUICK_BUDGET = (1, 2, 4), (32, 64), 128
TINY = ModelConfig(
    architecture="llama",
    vocab_size=256,
    hidden_size=64,
    intermediate_size=128,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    max_position_embeddings=64,
    tie_word_embeddings=True,
)


@dataclass(frozen=True, slots=True)
class Cell:
    """One step's shape: ``streams`` sequences whose new token is the last of ``context``."""

    streams: int
    context: int

    @property
    def tokens(self) -> int:
        return self.streams * self.context

    @property
    def blocks(self) -> int:
        return self.streams * -(-self.context // BLOCK_SIZE)


@dataclass(frozen=True, slots=True)
class Speeds:
    """What the machine does at best: bytes read and floating-point operations a second."""

    bytes_per_s: float
    flop_per_s: float


@dataclass(frozen=True, slots=True)
class Work:
    """What one step cannot avoid: each weight and each key and value read once, each product made once."""

    weight_bytes: int
    kv_bytes: int
    flop: int

    def bound(self, speeds: Speeds) -> tuple[float, str]:
        """Seconds that the step takes at least, and what sets them: "memory" or "compute"."""
        memory = (self.weight_bytes + self.kv_bytes) / speeds.bytes_per_s
        compute = self.flop / speeds.flop_per_s
        return max((memory, "memory"), (compute, "compute"))


def work(cell: Cell, config: ModelConfig, *, weight_bytes: int, num_weights: int) -> Work:
    """``num_weights`` numbers in ``weight_bytes`` bytes are multiplied with each stream's row.

    A multiplication and an addition count as two. Attention makes two products of every query head with
    every key and value. Sliding windows are not taken off.
    """
    kv_token = bytes_per_token(config)
    attention = 4 * cell.tokens * config.num_layers * config.num_heads * config.head_dim
    return Work(weight_bytes, cell.tokens * kv_token, 2 * cell.streams * num_weights + attention)


def bytes_per_token(config: ModelConfig) -> int:
    """K and V of one token in all layers, float32."""
    return bytes_per_block(
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        block_size=1,
        head_dim=config.head_dim,
        kv_dtype="float32",
    )


def grid(
    streams: Sequence[int],
    contexts: Sequence[int],
    *,
    token_budget: int,
    memory_tokens: int,
    max_context: int,
) -> tuple[list[Cell], list[dict[str, Any]]]:
    """The cells to measure, and those to skip, each with a reason."""
    cells, skipped = [], []
    for cell in (Cell(s, c) for c in contexts for s in streams):
        held = cell.blocks * BLOCK_SIZE
        if cell.context > max_context:
            reason = f"the model knows {max_context:,} positions"
        elif held > token_budget:
            reason = f"{held:,} tokens are more than the budget of {token_budget:,}"
        elif held > memory_tokens:
            reason = f"{held:,} tokens are more than memory holds now, {memory_tokens:,}"
        else:
            cells.append(cell)
            continue
        skipped.append({"streams": cell.streams, "context": cell.context, "reason": reason})
    return cells, skipped


def decode_batch(cell: Cell, vocab_size: int) -> ForwardBatch:
    """One new token a stream at position ``context - 1``; stream i has the i-th run of blocks."""
    each = cell.blocks // cell.streams
    table = torch.arange(cell.blocks, dtype=torch.int32).view(cell.streams, each)
    last = cell.context - 1
    return ForwardBatch(
        token_ids=torch.arange(cell.streams) % vocab_size,
        positions=torch.full((cell.streams,), last),
        slot_mapping=table[:, -1].to(torch.int64) * BLOCK_SIZE + last % BLOCK_SIZE,
        block_table=table,
        seq_lens=torch.full((cell.streams,), cell.context, dtype=torch.int32),
        cu_seqlens_q=torch.arange(cell.streams + 1, dtype=torch.int32),
        logits_rows=torch.arange(cell.streams),
    )


def make_cache(config: ModelConfig, num_blocks: int) -> KVCache:
    """A pool whose every row is written. The same noise is repeated: only the number of bytes matters."""
    cache = KVCache(
        num_layers=config.num_layers,
        num_blocks=num_blocks,
        num_kv_heads=config.num_kv_heads,
        block_size=BLOCK_SIZE,
        head_dim=config.head_dim,
    )
    noise = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0))
    for tensor in (cache.key, cache.value):
        flat = tensor.view(-1)
        for start in range(0, flat.numel(), noise.numel()):
            piece = flat[start : start + noise.numel()]
            piece.copy_(noise[: piece.numel()])
    return cache


def time_steps(step: Callable[[], object]) -> list[float]:
    """Seconds of each step, the first left out."""
    step()
    seconds: list[float] = []
    while len(seconds) < MIN_STEPS or (len(seconds) < MAX_STEPS and sum(seconds) < CELL_SECONDS):
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    return seconds


def measure_cells(
    decoder: NativeDecoder, cache: KVCache, cells: Sequence[Cell], report: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Times of each cell's steps, with the work that they cannot avoid."""
    config = decoder.config
    matrices = decoder.step_matrices()
    weight_bytes = sum(matrix.bytes for matrix in matrices)
    num_weights = sum(matrix.outputs * matrix.inputs for matrix in matrices)
    spec = AttentionSpec(
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        block_size=BLOCK_SIZE,
        kv_dtype=torch.float32,
        device="cpu",
    )
    attention = AttentionBackend("fused", spec, decoder.pool)
    rows = []
    for cell in cells:
        batch = decode_batch(cell, config.vocab_size)

        def step(batch: ForwardBatch = batch) -> torch.Tensor:
            return decoder.logits(decoder.forward(batch, cache, attention), batch.logits_rows)

        seconds = time_steps(step)
        needs = work(cell, config, weight_bytes=weight_bytes, num_weights=num_weights)
        median = statistics.median(seconds)
        rows.append(
            {
                "streams": cell.streams,
                "context": cell.context,
                "ms": median * 1e3,
                "ms_all": [s * 1e3 for s in seconds],
                "tokens_per_s": cell.streams / median,
                "weight_bytes": needs.weight_bytes,
                "kv_bytes": needs.kv_bytes,
                "flop": needs.flop,
            }
        )
        report(f"{cell.streams} streams x {cell.context} tokens: {median * 1e3:.1f} ms a step")
    return rows


def add_bounds(row: dict[str, Any], speeds: Speeds) -> dict[str, Any]:
    """``row`` with its bound and the share of the bound's speed that was reached."""
    seconds, limit = Work(row["weight_bytes"], row["kv_bytes"], row["flop"]).bound(speeds)
    return row | {
        "bound_ms": seconds * 1e3,
        "bound_tokens_per_s": row["streams"] / seconds,
        "limited_by": limit,
        "share_of_bound": seconds * 1e3 / row["ms"],
    }


def measure_read(cache: KVCache, pool: ThreadPool, rounds: int) -> list[float]:
    """Bytes a second of each plain read of the pool's first ``READ_BYTES``."""
    memory = cache.key.view(-1)[: READ_BYTES // 4]
    seconds = []
    for i in range(rounds + 1):
        start = time.perf_counter()
        native.read_memory(memory, pool)
        if i:
            seconds.append(time.perf_counter() - start)
    return [memory.nbytes / s for s in seconds]


def measure_products(pool: ThreadPool, rounds: int, size: int) -> dict[str, list[float]]:
    """FLOP/s: torch's ``size``^3 matmul, and our linear on a quarter of the rows."""
    a, b = torch.randn(size, size), torch.randn(size, size)
    linear = PackedLinear(size, {"w": size}, pool)
    linear.pack("w", StoredMatrix.of(b))
    x = a[: size // 4]
    calls: dict[str, tuple[Callable[[], object], int]] = {
        "matmul": (partial(torch.matmul, a, b), size),
        "linear": (partial(linear, x), x.shape[0]),
    }
    speeds: dict[str, list[float]] = {name: [] for name in calls}
    for i in range(rounds + 1):
        for name, (call, rows) in calls.items():
            start = time.perf_counter()
            call()
            if i:
                speeds[name].append(2 * rows * size * size / (time.perf_counter() - start))
    return speeds


class Machine:
    """The machine's own speeds, taken before, between and after the cells; the best of each counts.

    The best, because the bound must hold even if neighbours slowed some of the readings down.
    """

    def __init__(self, cache: KVCache, pool: ThreadPool, *, quick: bool) -> None:
        self._cache, self._pool, self._quick = cache, pool, quick
        self.readings: dict[str, list[float]] = {"read": [], "matmul": [], "linear": []}

    def measure(self) -> None:
        rounds = 2 if self._quick else 5
        self.readings["read"] += measure_read(self._cache, self._pool, rounds)
        for name, values in measure_products(self._pool, rounds, 128 if self._quick else 2048).items():
            self.readings[name] += values

    @property
    def best(self) -> Speeds:
        return Speeds(max(self.readings["read"]), max(self.readings["matmul"] + self.readings["linear"]))


def tiny_decoder(pool: ThreadPool) -> NativeDecoder:
    """Random float32 weights of a very small Llama."""
    generator = torch.Generator().manual_seed(0)
    decoder = NativeDecoder(TINY, pool)
    for name, shape in decoder.expected_weights().items():
        decoder.load_weight(name, torch.randn(shape, generator=generator) * 0.05)
    return decoder


def run(
    model: str,
    *,
    threads: int,
    command: str,
    token_budget: int = TOKEN_BUDGET,
    quick: bool = False,
    report: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Measure everything; nothing is written. ``quick`` takes a tiny random model and few cells (tests).

    Raises ValueError for a model that cannot be loaded, an encoder, or when no cell can be measured.
    """
    if threads < 1:
        raise ValueError(f"threads must be at least 1, got {threads}")
    if token_budget < 1:
        raise ValueError(f"token_budget must be at least 1, got {token_budget}")
    checkpoint = None if quick else open_checkpoint(hub.resolve(model))
    config = TINY if checkpoint is None else read_config(checkpoint)
    budget = min(token_budget, QUICK_BUDGET) if quick else token_budget
    cells, skipped = grid(
        QUICK_STREAMS if quick else STREAMS,
        QUICK_CONTEXTS if quick else CONTEXTS,
        token_budget=budget,
        memory_tokens=int(available_memory() * MEMORY_SHARE) // bytes_per_token(config),
        max_context=config.max_position_embeddings,
    )
    if not cells:
        raise ValueError(f"nothing can be measured: {skipped[0]['reason']}")
    # Alone first: the garbage collector would walk a loaded model's objects too.
    scheduling = measure_scheduling(quick=quick, report=report)
    pool = ThreadPool(threads)
    runs: dict[str, list[dict[str, Any]]] = {}
    with torch_threads(threads), torch.inference_mode():
        cache = make_cache(config, max(cell.blocks for cell in cells))
        speeds = Machine(cache, pool, quick=quick)
        speeds.measure()
        if checkpoint is None:
            runs["float32"] = measure_cells(tiny_decoder(pool), cache, cells, report)
            speeds.measure()
        else:
            for weights in WEIGHTS:
                report(f"loading weights as {weights}")
                options = EngineConfig(model=model, weights=weights, num_threads=threads)
                decoder = load(checkpoint, options).decoder
                assert isinstance(decoder, NativeDecoder)
                runs[weights] = measure_cells(decoder, cache, cells, report)
                del decoder
                gc.collect()
                speeds.measure()
    best = speeds.best
    return {
        "bench": "scaling",
        "command": command,
        "model": "tiny, random" if quick else Path(model).name,
        "threads": threads,
        "isa": native.isa(),
        "machine": machine(),
        "versions": versions(),
        "block_size": BLOCK_SIZE,
        "token_budget": budget,
        "kv_bytes_per_token": bytes_per_token(config),
        "speeds": {
            "read_bytes": min(READ_BYTES, cache.key.nbytes),
            "read_gb_per_s": best.bytes_per_s / 1e9,
            "gflop_per_s": best.flop_per_s / 1e9,
            "readings_per_s": speeds.readings,
        },
        "weights": {name: [add_bounds(row, best) for row in rows] for name, rows in runs.items()},
        "skipped": skipped,
        "scheduling": scheduling,
    }


def bench_scaling(
    model: str,
    *,
    threads: int,
    command: str,
    token_budget: int = TOKEN_BUDGET,
    output: Path = Path("benchmarks/results"),
    quick: bool = False,
    console: Console | None = None,
) -> dict[str, Any]:
    """What the command line calls: measure, print, and write ``scaling.json`` and ``scaling.png``."""
    console = console or Console()
    with console.status("measuring") as status:
        result = run(
            model,
            threads=threads,
            command=command,
            token_budget=token_budget,
            quick=quick,
            report=status.update,
        )
    scaling_report.show(result, console)
    output.mkdir(parents=True, exist_ok=True)
    (output / "scaling.json").write_text(json.dumps(result, indent=1) + "\n")
    scaling_report.plot(result, output / "scaling.png")
    console.print(f"written: {output / 'scaling.json'}, {output / 'scaling.png'}")
    return result
