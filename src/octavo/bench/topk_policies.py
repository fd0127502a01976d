"""What the quality benches of attention compare: policies of the engine, and two of other people.

A policy of the engine is one row of ``MODES`` or ``HISTORIES``, the options that it sets; the engine itself
runs it. The others are a mask over positions, computed in torch over the engine's own cache:

- ``streaming`` (Xiao et al., "Efficient Streaming Language Models with Attention Sinks"): the first 4 tokens
  and the most recent k - 4. Keys keep the positions they were rotated by, which within a model's context is
  where it was trained; the paper counts positions inside the cache, for texts beyond it.
- ``window``: the most recent k.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from octavo.attention.backend import AttentionBackend, Step
from octavo.batch import ForwardBatch
from octavo.config import HISTORY_VALUES, CacheConfig, EngineConfig, SchedulerConfig
from octavo.engine import build
from octavo.engine.engine import Engine
from octavo.kernels.api import AttentionSpec, KVLayer
from octavo.kernels.native import ThreadPool
from octavo.weights import hub
from octavo.weights.load import open_checkpoint

#: By name: what a mode sets beside its budget. "auto" and "lean" have budgets of their own.
MODES: dict[str, dict[str, Any]] = {
    "exact": {},
    "tail": {"attn_topk_tail": True},
    "fast": {"attn_topk_mode": "fast"},
    "fast+tail": {"attn_topk_mode": "fast", "attn_topk_tail": True},
    "auto": {"attn_topk": "auto"},
    "lean": {"attn_topk": "lean"},
}
#: By name: what a mode sets of the cache. Every key is read, the older ones in compact form.
HISTORIES: dict[str, dict[str, Any]] = {
    f"compact-{values}": {"history": "compact", "history_values": values} for values in HISTORY_VALUES
}
#: Tokens that are read as stored where history has a budget, and the share of a row's mass from which on a
#: summary is recalled.
WINDOW, RECALL = 128, 0.005
#: By name: what a mode sets of the cache beside its budget.
BUDGETS: dict[str, dict[str, Any]] = {
    "budget": {},
    "budget, plain means": {"history_mean": "plain"},
    "budget, recall": {"history_recall": RECALL},
}
#: By name: the first tokens that are kept beside the recent ones.
BANDS = {"streaming": 4, "window": 0}
DENSE = "dense"


@dataclass(frozen=True, slots=True)
class Policy:
    """``topk`` None: the mode has no number of its own. ``dense_layers`` keep every key."""

    mode: str
    topk: int | None = None
    dense_layers: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        words = [self.mode] if self.topk is None else [self.mode, str(self.topk)]
        return " ".join(
            words + ([f"dense {','.join(map(str, self.dense_layers))}"] if self.dense_layers else [])
        )

    @property
    def is_band(self) -> bool:
        return self.mode in BANDS

    @property
    def keeps_all(self) -> bool:
        """Whether every key is read, in whatever form."""
        return self.mode == DENSE or self.mode in HISTORIES or self.mode in BUDGETS

    @property
    def options(self) -> dict[str, Any]:
        """What the engine is started with."""
        if self.keeps_all or self.is_band:
            return {}
        return {"attn_topk": self.topk} | MODES[self.mode] | {"dense_layers": self.dense_layers}


def policies(modes: Sequence[str], topks: Sequence[int], dense_layers: tuple[int, ...] = ()) -> list[Policy]:
    """Dense first, then each mode with each budget, those of the engine also with ``dense_layers``.

    Raises ValueError for a mode that there is not, or that this engine has no option for.
    """
    made = [Policy(DENSE)]
    known = set(inspect.signature(EngineConfig).parameters)
    for mode in modes:
        if mode in HISTORIES:
            made.append(Policy(mode))
            continue
        if mode not in MODES and mode not in BANDS:
            raise ValueError(f"modes are {', '.join([*MODES, *HISTORIES, *BANDS])}, got {mode!r}")
        missing = sorted(MODES.get(mode, {}).keys() - known)
        if missing:
            raise ValueError(f"mode {mode!r} needs the option {missing[0]}, which this engine has not")
        own = MODES.get(mode, {}).get("attn_topk")
        for topk in (None,) if own is not None else topks:
            if mode in BANDS and topk is not None and topk <= BANDS[mode]:
                raise ValueError(f"{mode} needs a budget above {BANDS[mode]}, got {topk}")
            made.append(Policy(mode, topk))
            if dense_layers and mode in MODES:
                made.append(Policy(mode, topk, dense_layers))
    return made


class Lab:
    """One loaded model, and engines over it, one at a time."""

    def __init__(
        self, model: str, *, max_model_len: int, step_tokens: int = 512, threads: int | None = None
    ) -> None:
        self._config = EngineConfig(
            model=model,
            cache=CacheConfig(kv_cache_memory="2GiB"),
            scheduler=SchedulerConfig(
                max_num_seqs=1, max_model_len=max_model_len, max_num_batched_tokens=step_tokens
            ),
            num_threads=threads,
        )
        self._loaded = build.load(open_checkpoint(hub.resolve(model)), self._config)
        self.model_config = self._loaded.config
        self.tokenizer = self._loaded.tokenizer
        if max_model_len > self.model_config.max_position_embeddings:
            raise ValueError(
                f"the longest text of the bench takes {max_model_len} tokens, "
                f"the model's context holds {self.model_config.max_position_embeddings}"
            )

    def engine(self, policy: Policy) -> Engine:
        """An engine with an empty cache that attends by ``policy``."""
        cache = replace(self._config.cache, **HISTORIES.get(policy.mode, {}))
        if policy.mode in BUDGETS:
            compact = HISTORIES["compact-int8"] | {"history_window": WINDOW, "history_budget": policy.topk}
            cache = replace(cache, **compact, **BUDGETS[policy.mode])
        config = replace(self._config, cache=cache, **policy.options)
        if not policy.is_band:
            return build.assemble(config, self._loaded)
        assert policy.topk is not None
        spec = build.attention_spec(config, self.model_config)
        band = BandAttention(spec, self._loaded.pool, BANDS[policy.mode], policy.topk)
        return build.assemble(config, self._loaded, attention=band)


class BandAttention(AttentionBackend):
    """The first ``sinks`` keys and the last ones, ``kept`` together, in torch; one sequence at a time."""

    def __init__(self, spec: AttentionSpec, pool: ThreadPool, sinks: int, kept: int) -> None:
        super().__init__("sdpa", spec, pool)
        self.sinks = sinks
        self.recent = kept - sinks

    def _attention(self, batch: ForwardBatch, cu_seqlens_q: torch.Tensor) -> Any:
        """Blocks and positions of the keys that any query reads, and who reads which."""
        if batch.num_seqs != 1:
            raise ValueError(f"a band serves one sequence at a time, got {batch.num_seqs}")
        end, num_queries = int(batch.seq_lens[0]), int(cu_seqlens_q[1])
        positions = torch.arange(end - num_queries, end)
        start = max(self.sinks, end - num_queries - self.recent + 1)
        keys = torch.cat([torch.arange(min(self.sinks, end)), torch.arange(start, end)])
        behind = positions[:, None] - keys
        seen = (behind >= 0) & ((behind < self.recent) | (keys < self.sinks))
        return batch.block_table[0].long(), keys, seen

    def run(self, q: torch.Tensor, layer: KVLayer, step: Step) -> torch.Tensor:
        """As in the base class; ``step`` is what :meth:`plan` gave."""
        table, keys, seen = step.attention
        size = layer.key.shape[2]
        key, value = (
            x[table[keys // size], :, keys % size].float().transpose(0, 1) for x in (layer.key, layer.value)
        )
        # A batch of one, with every head's keys: torch is three times as fast then as with enable_gqa.
        key, value = (x.repeat_interleave(q.shape[1] // x.shape[0], 0)[None] for x in (key, value))
        out = F.scaled_dot_product_attention(
            q.transpose(0, 1)[None], key, value, attn_mask=seen, scale=layer.scale
        )
        return out[0].transpose(0, 1).contiguous()
