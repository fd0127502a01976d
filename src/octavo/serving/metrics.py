"""The engine's counters for Prometheus, under our names and under those that vLLM's dashboards expect."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from octavo.cache.disk_cache import DiskStats
from octavo.engine.metrics import EngineMetrics, Histogram
from octavo.engine.step import SchedulerStats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything at one moment, taken between two steps."""

    engine: EngineMetrics
    scheduler: SchedulerStats
    num_open: int
    draining: bool
    disk: DiskStats | None = None


@dataclass(frozen=True, slots=True)
class EncoderSnapshot:
    """An encoder at one moment."""

    tokens: int
    texts: int
    step_time: Histogram
    num_open: int
    draining: bool


def render(snapshot: Snapshot | EncoderSnapshot, model: str) -> bytes:
    """The text that Prometheus reads."""
    registry = CollectorRegistry(auto_describe=False)
    if isinstance(snapshot, Snapshot):
        registry.register(_EngineCollector(snapshot, model))
    else:
        registry.register(_EncoderCollector(snapshot, model))
    return generate_latest(registry)


class _Families:
    """Families with the model's name on them."""

    def __init__(self, model: str) -> None:
        self._model = model

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, text, labels=["model_name"])
        family.add_metric([self._model], value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(name, text, labels=["model_name"])
        family.add_metric([self._model], value)
        return family

    def _histogram(self, name: str, text: str, histogram: Histogram) -> Metric:
        buckets, so_far = [], 0
        bounds = [*map(str, histogram.bounds), "+Inf"]
        for bound, count in zip(bounds, histogram.counts, strict=True):
            so_far += count
            buckets.append((bound, so_far))
        family = HistogramMetricFamily(name, text, labels=["model_name"])
        family.add_metric([self._model], buckets, histogram.total)
        return family


class _EncoderCollector(_Families, Collector):
    def __init__(self, snapshot: EncoderSnapshot, model: str) -> None:
        super().__init__(model)
        self._snapshot = snapshot

    def collect(self) -> Iterable[Metric]:
        it = self._snapshot
        yield self._gauge("octavo:calls_open", "Calls that clients wait for.", it.num_open)
        yield self._gauge("octavo:draining", "1 while the server shuts down.", int(it.draining))
        yield self._counter("octavo:prompt_tokens", "Tokens of embedded texts.", it.tokens)
        yield self._counter("octavo:texts", "Embedded texts.", it.texts)
        yield self._histogram("octavo:step_seconds", "Seconds a forward pass.", it.step_time)


class _EngineCollector(_Families, Collector):
    def __init__(self, snapshot: Snapshot, model: str) -> None:
        super().__init__(model)
        self._snapshot = snapshot

    def collect(self) -> Iterable[Metric]:
        yield from self._shared("octavo")
        yield from self._shared("vllm")
        engine, stats = self._snapshot.engine, self._snapshot.scheduler
        topk, history = engine.attn_topk, engine.history
        gauges = {
            "kv_blocks_free": ("Free KV blocks.", stats.free_blocks),
            "kv_blocks_cached": (
                "KV blocks that no request holds, kept for the prefix cache.",
                stats.cached_blocks,
            ),
            "kv_blocks_used": ("KV blocks in the tables of requests.", stats.used_blocks),
            "compact_blocks_free": ("Free compact blocks.", stats.free_compact_blocks),
            "compact_blocks_cached": (
                "Compact blocks that no request holds, kept for the prefix cache.",
                stats.cached_compact_blocks,
            ),
            "compact_blocks_used": ("Compact blocks in the tables of requests.", stats.used_compact_blocks),
            "sequences_open": ("Sequences that clients wait for.", self._snapshot.num_open),
            "draining": ("1 while the server shuts down.", int(self._snapshot.draining)),
            "attn_topk_worst_dropped_mass": (
                "The largest bound of the softmax mass that a row of top-k attention left out, 0 to 1.",
                topk.worst_dropped_mass,
            ),
            "history_worst_summary_mass": (
                "The largest share of a token's attention that fell on summaries of old history, 0 to 1.",
                history.worst_mass,
            ),
        }
        for name, (text, value) in gauges.items():
            yield self._gauge(f"octavo:{name}", text, value)
        counters = {
            "computed_tokens": (
                "Tokens that went through the model, recomputed ones included.",
                engine.computed_tokens,
            ),
            "evictions": ("Cached blocks that were given up.", engine.num_evictions),
            "steps": ("Engine steps.", engine.num_steps),
            "history_summary_rows": ("Computed tokens that read summaries of old history.", history.rows),
            "history_summary_mass": (
                "Shares of attention that fell on summaries, summed over these tokens.",
                engine.history_mass,
            ),
            "attn_topk_rows": ("Rows (query, head, layer) of top-k attention.", topk.rows),
            "attn_topk_visible_keys": ("Keys that these rows saw.", topk.visible_keys),
            "attn_topk_kept_keys": ("Keys that these rows kept.", topk.kept_keys),
            "attn_topk_dropped_mass": (
                "Sum over rows of the bound of the softmax mass on keys not kept; divide by the rows.",
                engine.attn_topk_dropped_mass,
            ),
            "attn_topk_bytes_read": (
                "Bytes of K, V and planes that top-k attention read while decoding.",
                topk.bytes_read,
            ),
            "attn_topk_dense_bytes": (
                "Bytes that dense attention would have read instead.",
                topk.dense_bytes,
            ),
        }
        for name, (text, value) in counters.items():
            yield self._counter(f"octavo:{name}", text, value)
        yield self._histogram("octavo:step_seconds", "Seconds an engine step.", engine.step_time)
        if self._snapshot.disk is not None:
            yield from self._disk(self._snapshot.disk, engine.disk_hits)

    def _disk(self, disk: DiskStats, hits: int) -> Iterator[Metric]:
        yield self._gauge("octavo:disk_blocks", "KV blocks in the store on disk.", disk.blocks)
        yield self._gauge("octavo:disk_file_bytes", "Bytes of the store's file.", disk.file_bytes)
        counters = {
            "disk_hits": ("Prompt tokens found on disk; prefix_cache_hits counts them too.", hits),
            "disk_blocks_loaded": ("Blocks read from disk.", disk.loaded),
            "disk_blocks_saved": ("Blocks written to disk.", disk.saved),
            "disk_blocks_unsaved": ("Blocks that found no room in the queue or on disk.", disk.unsaved),
            "disk_blocks_damaged": ("Records on disk that were not what they say.", disk.damaged),
            "disk_blocks_evicted": ("Blocks given up on disk.", disk.evicted),
        }
        for name, (text, value) in counters.items():
            yield self._counter(f"octavo:{name}", text, value)

    def _shared(self, prefix: str) -> Iterator[Metric]:
        engine, stats = self._snapshot.engine, self._snapshot.scheduler
        total = stats.free_blocks + stats.cached_blocks + stats.used_blocks
        yield self._gauge(f"{prefix}:num_requests_running", "Sequences that run.", stats.num_running)
        yield self._gauge(f"{prefix}:num_requests_waiting", "Sequences that wait.", stats.num_waiting)
        yield self._gauge(
            f"{prefix}:kv_cache_usage_perc",
            "Share of the KV blocks in use, 0 to 1.",
            stats.used_blocks / total,
        )
        counters = {
            "prefix_cache_queries": ("Prompt tokens looked up in the prefix cache.", engine.prefix_queries),
            "prefix_cache_hits": ("Prompt tokens found in the prefix cache.", engine.prefix_hits),
            "prompt_tokens": ("Tokens of admitted prompts.", engine.prompt_tokens),
            "generation_tokens": ("Sampled tokens.", engine.generation_tokens),
            "num_preemptions": ("Preemptions.", engine.num_preemptions),
        }
        for name, (text, value) in counters.items():
            yield self._counter(f"{prefix}:{name}", text, value)
        histograms = {
            "time_to_first_token_seconds": ("Seconds to the first token.", engine.time_to_first_token),
            "inter_token_latency_seconds": ("Seconds between two tokens.", engine.inter_token),
            "e2e_request_latency_seconds": ("Seconds from arrival to the end.", engine.end_to_end),
        }
        for name, (text, histogram) in histograms.items():
            yield self._histogram(f"{prefix}:{name}", text, histogram)
        success = CounterMetricFamily(
            f"{prefix}:request_success",
            "Choices that ended, by reason.",
            labels=["model_name", "finished_reason"],
        )
        for reason in ("stop", "length", "abort", "error"):
            success.add_metric([self._model, reason], engine.finished.get(reason, 0))
        yield success
