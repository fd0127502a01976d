"""What a budget for history costs in quality: perplexity beside StreamingLLM and a plain window of the same
bytes.

The text and the windows are those of :mod:`octavo.bench.topk_quality`: the second half of each is scored. A
budget is a share of the window's tokens; the last ``WINDOW`` of it are as stored, the rest compact with int8
values, and what is older is read as summaries. The other two keep float16 K and V of as many tokens as take
the same bytes, StreamingLLM the first 4 among them.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from octavo.bench.topk_policies import BUDGETS, DENSE, WINDOW, Lab, Policy
from octavo.bench.topk_quality import Scored, passes, score, step_tokens
from octavo.config import CacheConfig, EngineConfig, ModelConfig
from octavo.engine import resources
from octavo.kernels.history_layout import GROUP

#: Shares of a window's tokens.
SHARES = (4, 8)
#: The least budget in tokens.
LEAST = WINDOW + GROUP**2


def run(
    model: str,
    text: Path,
    windows: Sequence[int],
    tokens: int,
    *,
    threads: int | None,
    report: Callable[[str], None],
    save: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    """Score every policy at every length; ``save`` gets the result after each. Raises ValueError for a text
    that is too short."""
    lab = Lab(model, max_model_len=max(windows), step_tokens=step_tokens(windows), threads=threads)
    ids = lab.tokenizer.encode(text.read_text(encoding="utf-8"))
    if len(ids) < max(windows):
        raise ValueError(f"{text.name} has {len(ids)} tokens, less than a window of {max(windows)}")
    result: dict[str, Any] = {"text": text.name, "tokens": tokens, "window": WINDOW, "rows": []}
    dense = _score(lab, Policy(DENSE), ids, windows, tokens)
    for length in windows:
        result["rows"].append(_row(Policy(DENSE), length, None, dense[length], dense[length]))
        for share in SHARES:
            budget = length // share
            if budget < LEAST:
                report(f"{length} tokens: a budget of {budget} is less than {LEAST}, the least there is")
                continue
            for policy in policies(lab.model_config, budget):
                began = time.perf_counter()
                scored = _score(lab, policy, ids, (length,), tokens)[length]
                row = _row(policy, length, share, scored, dense[length])
                result["rows"].append(row)
                report(
                    f"{policy.name}, {length} tokens: perplexity {row['change_percent']:+.2f}%, "
                    f"{time.perf_counter() - began:.0f} s"
                )
                save(result)
    return result


def policies(config: ModelConfig, budget: int) -> list[Policy]:
    """What is compared at a budget of so many tokens."""
    same_bytes = budget_bytes(config, budget) // token_bytes(config)
    return [Policy(mode, budget) for mode in BUDGETS] + [
        Policy(mode, same_bytes) for mode in ("streaming", "window")
    ]


def token_bytes(config: ModelConfig) -> int:
    """Of float16 K and V, all layers together."""
    return 2 * 2 * config.num_layers * config.num_kv_heads * config.head_dim


def budget_bytes(config: ModelConfig, budget: int) -> int:
    """What a conversation of any length takes with this budget and a window in float16, all summaries of the
    model's longest included."""
    cache = CacheConfig(kv_dtype="float16", history="compact", history_window=WINDOW, history_budget=budget)
    return resources.sequence_bytes(
        EngineConfig(model="", cache=cache), config, config.max_position_embeddings
    )


def _score(
    lab: Lab, policy: Policy, ids: Sequence[int], windows: Sequence[int], tokens: int
) -> dict[int, list[Scored]]:
    engine, layers = lab.engine(policy), lab.model_config.num_layers
    scored: dict[int, list[Scored]] = {window: [] for window in windows}
    for start, lengths in passes(windows, min(tokens, len(ids))):
        found = score(engine, policy, ids[start : start + lengths[-1]], lengths, layers)
        for window, one in found.items():
            scored[window].append(one)
    return scored


def _row(
    policy: Policy, length: int, share: int | None, scored: Sequence[Scored], dense: Sequence[Scored]
) -> dict[str, Any]:
    change = [own.loss - theirs.loss for own, theirs in zip(scored, dense, strict=True)]
    spread = statistics.stdev(change) if len(change) > 1 else None
    mass = [own.summary_mass for own in scored if own.summary_mass is not None]
    return {
        "policy": policy.mode,
        "length": length,
        "share": share,
        "tokens": policy.topk,
        "losses": [own.loss for own in scored],
        "perplexity": math.exp(statistics.fmean(own.loss for own in scored)),
        "change_percent": 100 * math.expm1(statistics.fmean(change)),
        "change_stderr": None if spread is None else 100 * spread / math.sqrt(len(change)),
        "summary_mass": statistics.fmean(mass) if mass else None,
    }
