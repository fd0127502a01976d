"""The readable float32 oracle: one query row at a time, over exactly the keys it sees."""

from __future__ import annotations

import torch

from octavo.kernels.api import AttentionMeta, AttentionSpec, KVLayer
from octavo.kernels.native import ThreadPool


def why_not(spec: AttentionSpec) -> str | None:
    """See ``octavo.kernels.api.Kernel.why_not``: it serves everything."""
    return None


def plan(meta: AttentionMeta, spec: AttentionSpec, pool: ThreadPool) -> AttentionMeta:
    """Nothing is worth computing ahead here."""
    return meta


def attend(q: torch.Tensor, kv: KVLayer, plan: AttentionMeta) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``octavo.kernels.api.Kernel.attend``; always returns the lse."""
    num_heads = q.shape[1]
    num_kv_heads, block_size = kv.key.shape[1], kv.key.shape[2]
    group = num_heads // num_kv_heads
    out = torch.empty_like(q)
    lse = torch.empty(q.shape[:2])
    starts = plan.cu_seqlens_q.tolist()
    for s, seq_len in enumerate(plan.seq_lens.tolist()):
        begin, end = starts[s], starts[s + 1]
        blocks = plan.block_table[s, : -(-seq_len // block_size)].long()
        # [blocks, kv_heads, block_size, d] -> [heads, seq_len, d]
        keys, values = (
            x[blocks].transpose(0, 1).flatten(1, 2)[:, :seq_len].float().repeat_interleave(group, dim=0)
            for x in (kv.key, kv.value)
        )
        for row in range(begin, end):
            position = seq_len - (end - row)
            first = 0 if kv.window is None else max(0, position - kv.window + 1)
            k, v = keys[:, first : position + 1], values[:, first : position + 1]
            scores = torch.einsum("hd,hnd->hn", q[row].float(), k) * kv.scale
            lse[row] = torch.logsumexp(scores, dim=-1)
            out[row] = torch.einsum("hn,hnd->hd", torch.softmax(scores, dim=-1), v)
    return out, lse
