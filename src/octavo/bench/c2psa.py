"""``octavo bench c2psa``: what C2PSA costs beside standard, grouped-query and Linformer attention.

Whole modules with their projections, of BERT-base's shape. Times: the variants take turns within a round, so
that their ratios hold even when the machine's speed drifts. Memory: ``octavo.bench.c2psa_memory``, each
number from a process of its own. A section's result stands beside those of other calls in one JSON.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from octavo.bench import c2psa_memory
from octavo.bench.attention import time_interleaved
from octavo.bench.c2psa_report import goals
from octavo.bench.c2psa_variants import SDPA, C2psaSettings, Shape, variants
from octavo.bench.machine import machine, torch_threads, versions
from octavo.nn.attention import Attention

#: Calls that take longer are timed in one round behind a warm-up.
LONG_S = 1.0


def run(
    settings: C2psaSettings,
    *,
    command: str,
    found: dict[str, Any] | None,
    report: Callable[[str], None],
    save: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    """Measure the sections that are asked for; ``save`` gets the result after each.

    ``found`` is an earlier result: its other sections stay, each with the command that made it.
    """
    kept = found["sections"] if found is not None and found.get("bench") == "c2psa" else {}
    result: dict[str, Any] = {
        "bench": "c2psa",
        "shape": asdict(settings.shape),
        "parameters": parameters(settings),
        "sections": dict(kept),
    }
    for name in settings.sections:
        report(f"section {name}")
        with torch_threads(settings.threads):
            rows = _SECTIONS[name](settings, report)
        result["sections"][name] = {
            "command": command,
            "threads": settings.threads,
            "device": settings.device,
            "machine": machine(),
            "versions": versions(),
            "length": settings.length,
            "rows": rows,
        }
        result["goals"] = goals(result)
        save(result)
    return result


def parameters(settings: C2psaSettings) -> dict[str, dict[str, int]]:
    """By variant: the parameters of the Q, K and V projections, and all."""
    found = {}
    for variant in variants(settings):
        module = variant.make(settings.shape, settings.length)
        projections = (module.q_proj, module.k_proj, module.v_proj)
        found[variant.name] = {
            "qkv": sum(p.numel() for projection in projections for p in projection.parameters()),
            "all": sum(p.numel() for p in module.parameters()),
        }
    return found


def batch_time(settings: C2psaSettings, report: Callable[[str], None]) -> list[dict[str, Any]]:
    """Forward milliseconds at each batch."""
    rows = []
    for batch in settings.batches:
        rows += _times(settings, batch, settings.length)
        report(f"batch {batch} of {settings.length} tokens")
    return rows


def length_time(settings: C2psaSettings, report: Callable[[str], None]) -> list[dict[str, Any]]:
    """Forward milliseconds at each length, batch 1."""
    rows = []
    for length in settings.lengths:
        rows += _times(settings, 1, length)
        report(f"{length} tokens")
    return rows


def _times(settings: C2psaSettings, batch: int, length: int) -> list[dict[str, Any]]:
    x = torch.randn(batch, length, settings.shape.d_model, generator=torch.Generator().manual_seed(0))
    calls: dict[str, Callable[[], object]] = {}
    for variant in variants(settings):
        if variant.materialise and needs(settings.shape, batch, length) > settings.memory_limit:
            continue
        calls[variant.name] = partial(variant.make(settings.shape, length).eval(), x)
    with torch.inference_mode():
        once = time_interleaved({SDPA: calls[SDPA]}, 1)[SDPA][0]
        times = time_interleaved(calls, settings.rounds if once < LONG_S else 1)
    return [
        {"variant": name, "batch": batch, "length": length, **_summary(seconds)}
        for name, seconds in times.items()
    ]


def needs(shape: Shape, batch: int, length: int) -> int:
    """Bytes of materialised attention's scores in a forward pass: before, scaled and as weights."""
    return 3 * 4 * batch * shape.num_heads * length * length


def heads(settings: C2psaSettings, report: Callable[[str], None]) -> list[dict[str, Any]]:
    """Milliseconds of every head alone and of all at once, from its projections to what it read."""
    x = torch.randn(1, settings.length, settings.shape.d_model, generator=torch.Generator().manual_seed(0))
    calls: dict[str, Callable[[], object]] = {}
    for variant in variants(settings):
        module = variant.make(settings.shape, settings.length).eval()
        if module.num_kv_heads == module.num_heads:
            for head in range(module.num_heads):
                calls[f"{variant.name}|{head}"] = partial(read, module, x, head, 1)
            calls[f"{variant.name}|all"] = partial(read, module, x, 0, module.num_heads)
    with torch.inference_mode():
        times = time_interleaved(calls, settings.rounds)
    rows: dict[str, dict[str, Any]] = {}
    for name, seconds in times.items():
        variant_name, _, head_name = name.partition("|")
        row = rows.setdefault(variant_name, {"variant": variant_name, "heads_ms": []})
        if head_name == "all":
            row["together_ms"] = statistics.median(seconds) * 1e3
        else:
            row["heads_ms"].append(statistics.median(seconds) * 1e3)
    for row in rows.values():
        row["one_by_one_ms"] = sum(row["heads_ms"])
    report(f"heads of {settings.length} tokens")
    return list(rows.values())


def read(module: Attention, x: torch.Tensor, first: int, count: int) -> torch.Tensor:
    """What ``count`` heads from ``first`` on read: ``x`` ``[b, n, d_model]`` to ``[b, count, n, head_dim]``.

    For modules with a K and V head to each query head.
    """
    rows = slice(first * module.head_dim, (first + count) * module.head_dim)
    q, k, v = (
        F.linear(x, p.weight[rows], p.bias[rows]).view(*x.shape[:2], count, -1).transpose(1, 2)
        for p in (module.q_proj, module.k_proj, module.v_proj)
    )
    return module.attend(q, k, v, None, False)


def _summary(seconds: Sequence[float]) -> dict[str, Any]:
    return {"ms": statistics.median(seconds) * 1e3, "ms_all": [s * 1e3 for s in seconds]}


_SECTIONS: dict[str, Callable[[C2psaSettings, Callable[[str], None]], list[dict[str, Any]]]] = {
    "batch-time": batch_time,
    "length-time": length_time,
    "heads": heads,
    "batch-memory": c2psa_memory.batch_memory,
    "length-memory": c2psa_memory.length_memory,
    "bert": c2psa_memory.bert_memory,
}
