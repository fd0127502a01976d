"""Standard multi-head attention, the baseline."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from octavo.nn.attention import Attention, Heads, head_dim_of


class MultiHeadAttention(Attention):
    """Every query attends to every visible key.

    ``materialise=True`` computes the n x n scores in plain sight, False with
    ``F.scaled_dot_product_attention``. ``num_kv_heads`` below ``num_heads`` is grouped-query attention.
    ``dropout`` is the share of attention weights that are dropped in training.
    A row with no visible key gives only the output projection's bias. Raises ValueError for settings that do
    not fit.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        causal: bool = False,
        *,
        num_kv_heads: int | None = None,
        materialise: bool = False,
        bias: bool = True,
        checkpoint: bool = False,
        dropout: float = 0.0,
    ) -> None:
        head_dim = head_dim_of(d_model, num_heads)
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if num_kv_heads < 1 or num_heads % num_kv_heads:
            raise ValueError(f"num_kv_heads must divide num_heads={num_heads}, got {num_kv_heads}")
        heads = Heads(num_heads, num_kv_heads, head_dim)
        super().__init__(d_model, heads, causal=causal, bias=bias, checkpoint=checkpoint, dropout=dropout)
        self.materialise = materialise

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, padding: torch.Tensor | None, causal: bool
    ) -> torch.Tensor:
        """See ``Attention.attend``."""
        if self.num_kv_heads < self.num_heads:
            k, v = (x.repeat_interleave(self.num_heads // self.num_kv_heads, dim=1) for x in (k, v))
        square = q.shape[2] == k.shape[2]
        if not self.materialise and padding is None and (not causal or square):
            return F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout_now, is_causal=causal)
        visible = _visible(q.shape[2], k, padding, causal)
        if not self.materialise:
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=visible, dropout_p=self.dropout_now)
        else:
            scores = q @ k.mT * self.head_dim**-0.5
            if visible is not None:
                # Not -inf: a row of nothing else would have NaN for its gradient.
                scores = scores.masked_fill(~visible, torch.finfo(scores.dtype).min)
            weights = torch.softmax(scores, dim=-1).to(v.dtype)
            out = F.dropout(weights, self.dropout_now) @ v
        if padding is None or visible is None:
            return out
        # A row that sees nothing is 0 / 0 or, by the choice of a kernel, a mean of padding.
        return torch.where(visible.any(dim=-1, keepdim=True), out, 0.0)


def _visible(n: int, k: torch.Tensor, padding: torch.Tensor | None, causal: bool) -> torch.Tensor | None:
    """``[b or 1, 1, n or 1, m]`` bool, or None where everything is visible."""
    m = k.shape[2]
    visible = None if padding is None else ~padding[:, None, None]
    if causal:
        past = torch.ones(n, m, dtype=torch.bool, device=k.device).tril(m - n)
        visible = past[None, None] if visible is None else visible & past
    return visible
