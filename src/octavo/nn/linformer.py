"""Linformer attention, the low-rank baseline (arXiv 2006.04768)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from octavo.nn.attention import Attention, Heads, head_dim_of


class LinformerAttention(Attention):
    """Keys and values are projected along the sequence, to ``projected_len`` rows, before attention.

    The two projections E and F (``[projected_len, max_len]``) are shared by all heads; a sequence of n
    tokens uses their first n columns, and padding is left out of the sums. Every projected key mixes
    all positions, so there is no causal form, and a sequence is at most ``max_len`` long. ``dropout`` is
    the share of attention weights that are dropped in training. Raises ValueError for settings and lengths
    that do not fit.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        projected_len: int = 128,
        max_len: int = 512,
        causal: bool = False,
        *,
        bias: bool = True,
        checkpoint: bool = False,
        dropout: float = 0.0,
    ) -> None:
        if causal:
            raise ValueError("LinformerAttention cannot be causal: every projected key mixes all positions")
        if not 1 <= projected_len <= max_len:
            raise ValueError(f"projected_len must be between 1 and max_len ({max_len}), got {projected_len}")
        heads = Heads(num_heads, num_heads, head_dim_of(d_model, num_heads))
        super().__init__(d_model, heads, causal=False, bias=bias, checkpoint=checkpoint, dropout=dropout)
        self.projected_len, self.max_len = projected_len, max_len
        # Variance 1 / projected_len: a random projection of this kind keeps lengths (the paper, section 4).
        self.key_mix = nn.Parameter(torch.randn(projected_len, max_len) * projected_len**-0.5)
        self.value_mix = nn.Parameter(torch.randn(projected_len, max_len) * projected_len**-0.5)

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, padding: torch.Tensor | None, causal: bool
    ) -> torch.Tensor:
        """See ``Attention.attend``; ``causal`` is never True."""
        length = k.shape[2]
        if length > self.max_len:
            raise ValueError(f"LinformerAttention was built for at most {self.max_len} tokens, got {length}")
        if padding is not None:
            k, v = (x.masked_fill(padding[:, None, :, None], 0.0) for x in (k, v))
        # As a product, so that autocast chooses its type.
        k = torch.matmul(self.key_mix[:, :length], k)
        v = torch.matmul(self.value_mix[:, :length], v)
        return F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout_now)
