"""torch's fused attention: one operator, and an explicit mask.

``is_causal=(start_pos == 0)`` would be wrong for a chunk of several tokens after a cached prefix:
False lets a token see its own future, and True aligns the triangle with the first key.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from octavo.kernels import gather
from octavo.kernels.api import AttentionMeta, AttentionSpec, KVLayer
from octavo.kernels.native import ThreadPool


def why_not(spec: AttentionSpec) -> str | None:
    """See ``octavo.kernels.api.Kernel.why_not``."""
    if spec.need_lse:
        return "sdpa cannot return the log-sum-exp: torch's scaled_dot_product_attention keeps it to itself"
    return gather.why_not(spec)


def plan(meta: AttentionMeta, spec: AttentionSpec, pool: ThreadPool) -> gather.GatherPlan:
    """Gather indices and masks. torch's own setting decides the threads, not ``pool``.

    Raises ValueError for what ``why_not`` refuses.
    """
    reason = why_not(spec)
    if reason is not None:
        raise ValueError(reason)
    return gather.plan(meta, spec)


def attend(q: torch.Tensor, kv: KVLayer, plan: gather.GatherPlan) -> tuple[torch.Tensor, None]:
    """See ``octavo.kernels.api.Kernel.attend``."""
    num_kv_heads = kv.key.shape[1]
    repeat = q.shape[1] // num_kv_heads
    out = torch.empty_like(q)
    for group in plan.groups:
        key, value = gather.keys_values(kv, group)
        result = F.scaled_dot_product_attention(
            gather.fold(q, group, num_kv_heads),
            key,
            value,
            attn_mask=group.mask(kv.window, repeat),
            scale=kv.scale,
        )
        out[group.rows] = gather.unfold(result, group)
    return out, None
