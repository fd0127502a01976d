"""C2PSA: multi-head attention with projections shared by groups of heads, and top-k sparsity."""

from __future__ import annotations

from typing import Literal

import torch

from octavo.kernels.topk import topk_attention
from octavo.nn.attention import Attention, Heads, head_dim_of
from octavo.nn.kv_cache import KVCache


def resolve_compress_rate(num_heads: int, compress_rate: int | Literal["auto"]) -> int:
    """How many heads share one projection.

    "auto" is the largest divisor of ``num_heads`` up to 2 (at most 8 heads) or 4 (more). Raises
    ValueError, with the divisors, for a rate that does not divide ``num_heads``.
    """
    divisors = [r for r in range(1, num_heads + 1) if num_heads % r == 0]
    if compress_rate == "auto":
        return max(r for r in divisors if r <= (2 if num_heads <= 8 else 4))
    if not isinstance(compress_rate, int) or isinstance(compress_rate, bool) or compress_rate not in divisors:
        allowed = ", ".join(str(r) for r in divisors)
        raise ValueError(
            f"compress_rate must be 'auto' or divide num_heads={num_heads} ({allowed}), got {compress_rate!r}"
        )
    return compress_rate


class C2PSA(Attention):
    """Attention with ``num_heads / compress_rate`` heads, each over its ``topk`` best keys.

    Heads that share their Q, K and V projections give the same output, so sharing is attention with fewer
    heads: Q, K and V have 1/compress_rate of the parameters, and ``out_proj`` brings the
    features back to ``d_model``. Which keys are kept, and ``recent``, ``normalize`` and ``grad_threshold``:
    see ``octavo.topk_attention``. ``dropout`` is the share of kept weights that are dropped in training.

    In training the module is checkpointed (``checkpoint=False``: keep everything for the backward
    pass). Raises ValueError for settings that do not fit.
    """

    # What torch's encoder layers ask of their self_attn before they choose a path of their own.
    batch_first = True
    in_proj_bias = None
    _qkv_same_embed_dim = False

    def __init__(  # noqa: PLR0913  (the module's settings, all but the first two by name or default)
        self,
        d_model: int,
        num_heads: int,
        compress_rate: int | Literal["auto"] = "auto",
        topk: int = 64,
        causal: bool = False,
        *,
        recent: int | None = None,
        normalize: str | None = None,
        grad_threshold: float = 0.0,
        bias: bool = True,
        checkpoint: bool = True,
        dropout: float = 0.0,
    ) -> None:
        head_dim = head_dim_of(d_model, num_heads)
        groups = num_heads // resolve_compress_rate(num_heads, compress_rate)
        super().__init__(
            d_model,
            Heads(groups, groups, head_dim),
            causal=causal,
            bias=bias,
            checkpoint=checkpoint,
            dropout=dropout,
        )
        self.compress_rate = num_heads // groups
        self.topk, self.recent, self.normalize = topk, recent, normalize
        self.grad_threshold = grad_threshold
        # Settings that cannot be right are refused here, not at the first call.
        one = torch.zeros(1, 1, 1, 1, device="cpu")
        self.attend(one, one, one, None, causal)

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, padding: torch.Tensor | None, causal: bool
    ) -> torch.Tensor:
        """See ``Attention.attend``."""
        return topk_attention(
            q,
            k,
            v,
            self.topk,
            causal=causal,
            recent=self.recent,
            key_padding_mask=padding,
            normalize=self.normalize,
            grad_threshold=self.grad_threshold,
            dropout_p=self.dropout_now,
        )

    def forward(  # type: ignore[override]  # noqa: PLR0913  (torch.nn.MultiheadAttention's own signature)
        self,
        x: torch.Tensor | None = None,
        key: torch.Tensor | None = None,
        value: torch.Tensor | None = None,
        key_padding_mask: torch.Tensor | None = None,
        need_weights: bool = False,
        attn_mask: torch.Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
        *,
        query: torch.Tensor | None = None,
        cache: KVCache | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, None]:
        """``module(x, key_padding_mask=, cache=)`` as every module here, or torch's own call.

        With ``key`` and ``value`` it is the call of ``torch.nn.MultiheadAttention(batch_first=True)``
        and returns ``(out, None)``: there are no n x n weights to return. ``query`` is that call's name for
        ``x``; ``is_causal`` makes this call causal, and ``attn_mask`` may then say so too. Raises ValueError
        for another mask, and for ``need_weights``.
        """
        x = query if x is None else x
        if x is None:
            raise ValueError("C2PSA needs x, as the first argument or as query=")
        if (key is None) != (value is None):
            raise ValueError("key and value are given together or not at all")
        if attn_mask is not None and not is_causal:
            raise ValueError("C2PSA takes no attn_mask: use causal=True, is_causal=True or key_padding_mask")
        if need_weights:
            raise ValueError("C2PSA never has the n x n weights that need_weights=True asks for")
        causal = self.causal or is_causal
        if key is None or value is None:
            return self.run((x, x, x), key_padding_mask, cache=cache, causal=causal)
        if cache is not None:
            raise ValueError("a KV cache is for self-attention: leave key and value out")
        return self.run((x, key, value), key_padding_mask, cache=None, causal=causal), None
