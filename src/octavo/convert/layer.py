"""One attention layer as a differentiable function of its heads."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.convert.heads import LayerHeads
from octavo.kernels.topk import topk_attention
from octavo.models.rope import Rotation, rotate


@dataclass(frozen=True, slots=True)
class Attend:
    """How a layer attends, beside its heads.

    ``scale`` multiplies q . k. ``rotation`` is that of positions 0, 1, ... where positions are rotary,
    ``window`` the keys that a query sees at most, itself included. ``topk`` keys are kept of more, or all
    where it is None.
    """

    scale: float
    causal: bool
    rotation: Rotation | None = None
    window: int | None = None
    topk: int | None = None


def context(heads: LayerHeads, x: Tensor, how: Attend) -> Tensor:
    """What the heads read: ``x`` ``[b, n, inputs]`` -> ``[b, n, num_heads * head_dim]``."""
    q, k, v = (_project(stack, x) for stack in (heads.q, heads.k, heads.v))
    if how.rotation is not None:
        q, k = rotate(q, how.rotation), rotate(k, how.rotation)
    q, k, v = (each.transpose(1, 2) for each in (q, k, v))
    repeats = heads.counts.repeats
    if repeats > 1:
        k, v = (each.repeat_interleave(repeats, dim=1) for each in (k, v))
    n = x.shape[1]
    if how.topk is not None and how.topk < n:
        # Its scale is head_dim ** -0.5.
        q = q * (how.scale * heads.head_dim**0.5)
        out = topk_attention(q.contiguous(), k.contiguous(), v.contiguous(), how.topk, causal=how.causal)
    elif how.window is not None and how.window < n:
        far = torch.ones(n, n, dtype=torch.bool, device=x.device).tril(-how.window)
        seen = torch.ones_like(far).tril() & ~far
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=how.scale)
    else:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=how.causal, scale=how.scale)
    return out.transpose(1, 2).flatten(2)


def project_out(heads: LayerHeads, read: Tensor) -> Tensor:
    """The output projection of ``context``: ``[b, n, hidden]``."""
    return F.linear(read, heads.o.transpose(0, 1).flatten(1), heads.o_bias)


def attention(heads: LayerHeads, x: Tensor, how: Attend) -> Tensor:
    """The whole layer, ``x`` and the result ``[b, n, hidden]``."""
    return project_out(heads, context(heads, x, how))


def _project(stack: Tensor, x: Tensor) -> Tensor:
    """``[b, n, heads, head_dim]``."""
    rows = stack.flatten(0, 1)
    return F.linear(x, rows[:, :-1], rows[:, -1]).view(*x.shape[:2], *stack.shape[:2])
