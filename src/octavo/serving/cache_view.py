"""``/v1/cache``: the KV pool block by block, as the page draws it. Never a token of anybody's prompt."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

from octavo.engine.engine import Engine


def look(engine: Engine, salt: str | None) -> bytes:
    """JSON of the pool (in the engine's thread).

    ``salt``: the caller's; labels of requests under other salts are left out. None shows all.

    Lists with one item a block: ``refs`` (block tables that hold it), ``cached`` (1: the prefix cache can
    match it) and ``parent`` (the cached block before it in the tree of prefixes, -1 for none).
    """
    stats, metrics, view = engine.scheduler_stats, engine.metrics, engine.cache_view()
    queries = metrics.prefix_queries
    return msgspec.json.encode(
        {
            "block_size": view.block_size,
            "num_blocks": len(view.refs),
            "blocks": {"free": stats.free_blocks, "cached": stats.cached_blocks, "used": stats.used_blocks},
            "requests": {"running": stats.num_running, "waiting": stats.num_waiting},
            "prefix_cache": {
                "queries": queries,
                "hits": metrics.prefix_hits,
                "hit_rate": metrics.prefix_hits / queries if queries else 0.0,
                "evictions": metrics.num_evictions,
            },
            "tokens": {
                "prompt": metrics.prompt_tokens,
                "generated": metrics.generation_tokens,
                "computed": metrics.computed_tokens,
            },
            "refs": view.refs,
            "cached": [int(cached) for cached in view.cached],
            "parent": view.parents,
            "tables": [_table(owner.label, owner.salt, owner.blocks, salt) for owner in view.owners],
        }
    )


def _table(label: str, salt: str, blocks: list[int], viewer: str | None) -> dict[str, Any]:
    mine = viewer is None or salt == viewer or salt.startswith(f"{viewer}:")
    return {
        "request": label if mine else None,
        "tenant": hashlib.sha256(salt.encode("utf-8", "replace")).hexdigest()[:8],
        "blocks": blocks,
    }
