"""The chosen attention kernel: planned once a step, run once a layer."""

from __future__ import annotations

from typing import Any

import torch

from octavo.batch import ForwardBatch
from octavo.cache.kv_cache import KVCache
from octavo.kernels import api
from octavo.kernels.native import ThreadPool


class AttentionBackend:
    """One attention kernel, chosen by name; refuses at construction what it cannot serve."""

    def __init__(self, name: str, spec: api.AttentionSpec, pool: ThreadPool) -> None:
        self.name = name
        self.spec = spec
        self.pool = pool
        self._kernel = api.get(name)
        reason = self._kernel.why_not(spec)
        if reason is not None:
            raise ValueError(f"attention={name!r} cannot serve this model: {reason}")
        self._write_kv = getattr(self._kernel, "write_kv", None)

    def plan(self, batch: ForwardBatch) -> Any:
        """What this step's layers share. Call once a step."""
        meta = api.AttentionMeta(batch.block_table, batch.seq_lens, batch.cu_seqlens_q)
        return self._kernel.plan(meta, self.spec, self.pool)

    def write(
        self, kv_cache: KVCache, layer: int, k: torch.Tensor, v: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        """Store this step's K and V, as ``KVCache.write`` does, by the kernel if it has a writer."""
        if self._write_kv is None:
            kv_cache.write(layer, k, v, slot_mapping)
        else:
            self._write_kv(*kv_cache.layer(layer), k, v, slot_mapping)

    def run(self, q: torch.Tensor, layer: api.KVLayer, plan: Any) -> torch.Tensor:
        """Attention of one layer; ``q`` and the result are ``[num_tokens, num_heads, head_dim]``."""
        out, _ = self._kernel.attend(q, layer, plan)
        return out
