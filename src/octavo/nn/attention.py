"""What the attention modules share: projections, masks, the cache, checkpointing, one forward."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from octavo.nn.kv_cache import KVCache


class Heads(NamedTuple):
    """How many heads a module computes, and how wide each is."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


def head_dim_of(d_model: int, num_heads: int) -> int:
    """``d_model / num_heads``. Raises ValueError unless it is a whole number."""
    if num_heads < 1 or d_model < 1 or d_model % num_heads:
        raise ValueError(f"num_heads must divide d_model, got num_heads={num_heads} and d_model={d_model}")
    return d_model // num_heads


class Attention(nn.Module):
    """Q, K and V projections, one attention that a subclass defines, and the output projection."""

    def __init__(
        self, d_model: int, heads: Heads, *, causal: bool, bias: bool, checkpoint: bool, dropout: float
    ) -> None:
        super().__init__()
        if not 0.0 <= dropout < 1.0:
            raise ValueError(f"dropout must be at least 0 and less than 1, got {dropout}")
        self.d_model, self.causal, self.checkpoint = d_model, causal, checkpoint
        self.dropout = dropout
        self.num_heads, self.num_kv_heads, self.head_dim = heads
        self.q_proj = nn.Linear(d_model, self.num_heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(d_model, self.num_kv_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(d_model, self.num_kv_heads * self.head_dim, bias=bias)
        self.out_proj = nn.Linear(self.num_heads * self.head_dim, d_model, bias=bias)

    @property
    def dropout_now(self) -> float:
        """The share of attention weights that this call drops: none outside training."""
        return self.dropout if self.training else 0.0

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, padding: torch.Tensor | None, causal: bool
    ) -> torch.Tensor:
        """``q`` ``[b, h, n, d]`` over ``k`` and ``v`` ``[b, h_kv, m, d]``, the result shaped as ``q``.

        ``padding`` ``[b, m]``: True = no key. If ``causal``, the last query stands at the last key.
        """
        raise NotImplementedError

    def forward(
        self,
        x: torch.Tensor,
        *,
        key_padding_mask: torch.Tensor | None = None,
        cache: KVCache | None = None,
    ) -> torch.Tensor:
        """Self-attention of ``x`` ``[b, n, d_model]``; the result is shaped as ``x``.

        ``key_padding_mask`` ``[b, n]``: True (or -inf in a float mask) marks padding, as in torch's own
        module. With ``cache``, ``x`` and the mask are the tokens after those that the cache holds.
        Raises ValueError for shapes that do not fit.
        """
        return self.run((x, x, x), key_padding_mask, cache=cache, causal=self.causal)

    def run(
        self,
        qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        key_padding_mask: torch.Tensor | None,
        *,
        cache: KVCache | None,
        causal: bool,
    ) -> torch.Tensor:
        """Attention from and over what is given, checkpointed in training."""
        query, key, value = qkv
        for name, x in (("x", query), ("key", key), ("value", value)):
            if x.dim() != 3 or x.shape[2] != self.d_model:
                raise ValueError(f"{name} must be [b, n, {self.d_model}], got {list(x.shape)}")
        if key.shape != value.shape or key.shape[0] != query.shape[0]:
            shapes = f"{list(query.shape)}, {list(key.shape)} and {list(value.shape)}"
            raise ValueError(
                f"x, key and value must agree in batch and key and value in length, got {shapes}"
            )
        if cache is not None and not causal:
            raise ValueError(
                "a KV cache needs causal=True: without it earlier tokens would have to see later ones"
            )
        padding = padding_of(key_padding_mask, key)
        if self.checkpoint and self.training and torch.is_grad_enabled() and cache is None:
            out: torch.Tensor = checkpoint(
                self._compute, query, key, value, padding, None, causal, use_reentrant=False
            )
            return out
        return self._compute(query, key, value, padding, cache, causal)

    def packed(self, x: torch.Tensor, runs: tuple[tuple[int, int], ...]) -> torch.Tensor:
        """Self-attention of many sequences that lie one behind the other in ``x`` ``[num_tokens, d_model]``.

        ``runs`` lists (sequences, tokens of each) in that order, so nothing is padded; the result is shaped
        as ``x``. Checkpointed in training as any other call.
        """
        if self.checkpoint and self.training and torch.is_grad_enabled():
            out: torch.Tensor = checkpoint(self._compute_packed, x, runs, use_reentrant=False)
            return out
        return self._compute_packed(x, runs)

    def _compute_packed(self, x: torch.Tensor, runs: tuple[tuple[int, int], ...]) -> torch.Tensor:
        sizes = [count * length for count, length in runs]
        parts = (p(x).split(sizes) for p in (self.q_proj, self.k_proj, self.v_proj))
        outs = []
        for (count, length), q, k, v in zip(runs, *parts, strict=True):
            shape = (count, length, -1, self.head_dim)
            q, k, v = (t.view(shape).transpose(1, 2) for t in (q, k, v))
            out = self.attend(q, k, v, None, self.causal)
            outs.append(out.transpose(1, 2).reshape(count * length, -1))
        merged: torch.Tensor = self.out_proj(torch.cat(outs))
        return merged

    def _compute(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        padding: torch.Tensor | None,
        cache: KVCache | None,
        causal: bool,
    ) -> torch.Tensor:
        q = self._split(self.q_proj(query), self.num_heads)
        k = self._split(self.k_proj(key), self.num_kv_heads)
        v = self._split(self.v_proj(value), self.num_kv_heads)
        if cache is not None:
            k, v, padding = cache.append(k, v, padding)
        out = self.attend(q, k, v, padding, causal)
        merged: torch.Tensor = self.out_proj(out.transpose(1, 2).flatten(2))
        return merged

    def _split(self, x: torch.Tensor, num_heads: int) -> torch.Tensor:
        return x.view(x.shape[0], x.shape[1], num_heads, self.head_dim).transpose(1, 2)


def padding_of(mask: torch.Tensor | None, key: torch.Tensor) -> torch.Tensor | None:
    """A padding mask of torch's kinds as bool, True = padding; ``key`` is ``[b, m, d_model]``.

    A float mask may hold 0 and -inf alone: anything else would be a bias to the scores. Raises ValueError
    (inside torch.compile values cannot be looked at, and anything but -inf counts as 0).
    """
    if mask is None:
        return None
    if mask.shape != key.shape[:2]:
        raise ValueError(f"key_padding_mask must be {list(key.shape[:2])}, got {list(mask.shape)}")
    if mask.dtype == torch.bool:
        return mask
    if not mask.is_floating_point():
        raise ValueError(f"key_padding_mask must be bool (True = padding) or float (-inf), got {mask.dtype}")
    padding = mask == float("-inf")
    if not torch.compiler.is_compiling() and bool(((mask != 0) & ~padding).any()):
        raise ValueError("a float key_padding_mask may hold 0 and -inf only")
    return padding
