"""What history takes in memory, and how many long conversations a pool holds: counted, and once run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from octavo.bench.topk_policies import HISTORIES
from octavo.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from octavo.engine import build, resources
from octavo.engine.build import LoadedModel
from octavo.request import SamplingParams

#: A compact token may take so much of a float16 token's bytes.
GOAL_BYTES = {"compact-int8": 0.57, "compact-int4": 0.45}
#: Times as many conversations as with float16; against float32 it must be twice that.
GOAL_CONVERSATIONS = {"compact-int8": 1.65, "compact-int4": 2.0}
#: The pool that conversations are counted in.
POOL_BYTES = 4 << 30
#: Tokens that each conversation says while all of them run.
SAID = 64


@dataclass(frozen=True, slots=True)
class Way:
    """A way to keep history: options of the cache, and a budget of keys (0: dense attention)."""

    cache: dict[str, Any]
    attn_topk: int = 0

    def config(self, model: str, *, threads: int | None = None, **cache: Any) -> EngineConfig:
        """An engine's that keeps history so; ``cache`` are more options of the cache."""
        return EngineConfig(
            model=model,
            cache=replace(CacheConfig(), **self.cache, **cache),
            num_threads=threads,
            attn_topk=self.attn_topk,
        )


#: The way in which what is older than 1,024 tokens is read as summaries.
BUDGET = "compact-int8, budget 1k"
#: Compact history keeps its window in float16, so that like is compared with like.
WAYS = {
    "float32": Way({"kv_dtype": "float32"}),
    "float16": Way({"kv_dtype": "float16"}),
    **{name: Way({"kv_dtype": "float16"} | options) for name, options in HISTORIES.items()},
    BUDGET: Way({"kv_dtype": "float16", "history_budget": 1024} | HISTORIES["compact-int8"]),
    "compact-int8, top-k": Way({"kv_dtype": "float16"} | HISTORIES["compact-int8"], attn_topk=128),
}
#: Counted only: the same with a window in float32, which is what an engine has without kv_dtype.
COUNTED = WAYS | {f"{name}, float32 window": Way(options) for name, options in HISTORIES.items()}


def sizes(config: ModelConfig, tokens: int) -> list[dict[str, Any]]:
    """For each way: bytes of a token as stored and in compact form, all layers together, and how many
    conversations of ``tokens`` tokens ``POOL_BYTES`` hold, window included, by the engine's own count."""
    rows = []
    for name, way in COUNTED.items():
        wanted = way.config("", kv_cache_memory=POOL_BYTES)
        limits = SchedulerConfig(max_model_len=tokens)
        resolved, _ = resources.resolve(replace(wanted, scheduler=limits), config, 2 * POOL_BYTES)
        stored, compact = resources.BlockSizes.of(resolved, config)
        size = resolved.cache.block_size
        rows.append(
            {
                "way": name,
                "stored_bytes": stored / size,
                "compact_bytes": compact / size if compact else None,
                "conversations": resources.num_sequences(resolved, tokens),
            }
        )
    return rows


def goals(rows: Sequence[dict[str, Any]], tokens: int) -> list[dict[str, Any]]:
    """Every goal about memory, with its value."""
    by = {row["way"]: row for row in rows}
    made = []
    for name, share in GOAL_BYTES.items():
        value = by[name]["compact_bytes"] / by["float16"]["stored_bytes"]
        goal = f"{name}: a compact token takes at most {share:.0%} of float16's bytes"
        made.append({"goal": goal, "value": value, "met": value <= share})
    for name, times in GOAL_CONVERSATIONS.items():
        for other, least in (("float16", times), ("float32", 2 * times)):
            value = by[name]["conversations"] / by[other]["conversations"]
            goal = f"{name}: {least:g} times {other}'s conversations of {tokens:,} tokens"
            made.append({"goal": goal, "value": value, "met": value >= least})
    return made


def run_together(
    name: str, loaded: LoadedModel, text_ids: Sequence[int], *, tokens: int, memory: str, threads: int | None
) -> dict[str, Any]:
    """As many conversations of ``tokens`` tokens as ``memory`` holds by the engine's own count, all at once.

    They share nothing. ``faults`` says what should not have been. Raises ValueError when it holds none.
    """
    prompt = tokens - SAID
    config = WAYS[name].config("", threads=threads, kv_cache_memory=memory)
    limits = SchedulerConfig(max_model_len=tokens)
    engine = build.assemble(replace(config, scheduler=limits), loaded)
    count = int(resources.num_sequences(engine.config, tokens))
    if count < 1:
        raise ValueError(f"{memory} of K and V hold no conversation of {tokens} tokens")
    params = SamplingParams(temperature=0, max_tokens=SAID, ignore_eos=True)
    for number in range(count):
        start = number * prompt
        ids = [text_ids[(start + i) % len(text_ids)] for i in range(prompt - 1)]
        engine.add_request([number, *ids], params)
    most, ended = 0, 0
    while engine.has_unfinished():
        ended += sum(output.finished and output.error is None for output in engine.step())
        most = max(most, engine.scheduler_stats.num_running)
    stats = engine.scheduler_stats
    faults = []
    if stats.preemptions:
        faults.append(f"{name}: {stats.preemptions} preemptions among {count} conversations that should fit")
    if ended != count or most != count:
        faults.append(f"{name}: of {count} conversations {most} ran at once and {ended} were answered")
    return {
        "way": name,
        "tokens": tokens,
        "memory": memory,
        "stored_blocks": engine.config.cache.num_blocks,
        "compact_blocks": engine.config.cache.num_compact_blocks,
        "conversations": count,
        "ran_at_once": most,
        "preemptions": stats.preemptions,
        "faults": faults,
    }


def all_together(
    loaded: LoadedModel,
    text_ids: Sequence[int],
    *,
    tokens: int,
    memory: str,
    threads: int | None,
    report: Callable[[str], None],
) -> list[dict[str, Any]]:
    """:func:`run_together` for float16 and each form of compact history."""
    rows = []
    for name in ("float16", *HISTORIES):
        row = run_together(name, loaded, text_ids, tokens=tokens, memory=memory, threads=threads)
        report(f"{name}: {row['conversations']} conversations of {tokens} tokens at once in {memory}")
        rows.append(row)
    return rows
