"""The chosen attention kernel: planned once a step, run once a layer."""

from __future__ import annotations

from typing import Any

import torch

from octavo.batch import ForwardBatch
from octavo.kernels import api


class AttentionBackend:
    """One attention kernel, chosen by name; refuses at construction what it cannot serve."""

    def __init__(self, name: str, spec: api.AttentionSpec, num_threads: int = 1) -> None:
        self.name = name
        self.spec = spec
        self.num_threads = num_threads
        self._kernel = api.get(name)
        reason = self._kernel.why_not(spec)
        if reason is not None:
            raise ValueError(f"attention={name!r} cannot serve this model: {reason}")

    def plan(self, batch: ForwardBatch) -> Any:
        """What this step's layers share. Call once a step."""
        meta = api.AttentionMeta(batch.block_table, batch.seq_lens, batch.cu_seqlens_q)
        return self._kernel.plan(meta, self.spec, self.num_threads)

    def run(self, q: torch.Tensor, layer: api.KVLayer, plan: Any) -> torch.Tensor:
        """Attention of one layer; ``q`` and the result are ``[num_tokens, num_heads, head_dim]``."""
        out, _ = self._kernel.attend(q, layer, plan)
        return out
