"""Top-k attention for modules: every query attends to its k best keys, forward and backward.

Scores exist for a tile of queries and keys at a time. What is kept for the backward pass are the
indices and weights of the kept keys and the log-sum-exp of each row, so memory grows as O(n k).
"""

from __future__ import annotations

import math
from typing import Any

import torch

from octavo.kernels import topk_dropout, topk_native, topk_tiled
from octavo.kernels.topk_spec import Kept, TopkSpec, empty_heads

#: float16 and bfloat16 are computed in float32.
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def topk_attention(  # noqa: PLR0913  (a public signature, as torch's scaled_dot_product_attention has)
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    topk: int,
    *,
    causal: bool = False,
    recent: int | None = None,
    key_padding_mask: torch.Tensor | None = None,
    scale: float | None = None,
    normalize: str | None = None,
    grad_threshold: float = 0.0,
    dropout_p: float = 0.0,
) -> torch.Tensor:
    """Attention of each query to the ``topk`` visible keys with the highest scores.

    ``q`` is ``[b, h, n, d]``, ``k`` and ``v`` ``[b, h_kv, m, d]``, h a multiple of h_kv (query head i
    reads KV head i // (h / h_kv)); the result is shaped as ``q``. On the CPU float32, float16 and
    bfloat16 run in C++; float64 and other devices in tiled torch.

    * Visible are the keys that ``key_padding_mask`` (``[b, m]`` bool, True = padding, as in
      ``torch.nn.MultiheadAttention``) leaves and, if ``causal``, that do not come after the query:
      the last query stands at the last key, query i at position m - n + i.
    * The last ``recent`` visible keys are always kept; None means topk // 2 if causal, else 0.
      The other places go to the highest scores, of equal ones to the lowest position.
    * A score is q.k times ``scale`` (1/sqrt(d) by default). The weights are the softmax over the kept
      keys; with ``normalize="l2"`` they are divided by their Euclidean norm instead of summing to 1,
      so that a row of k equal weights sums to sqrt(k).
    * In the backward pass gradients of scores that are smaller than ``grad_threshold`` count as 0,
      and their keys and queries are left alone.
    * ``dropout_p`` is the probability that a kept weight is dropped; the others are divided by 1 - dropout_p.
      The function does so whenever it is above 0, as ``scaled_dot_product_attention`` does.

    A row with no visible key gives 0 and passes no gradient. Raises ValueError for what does not fit.
    """
    _check(q, k, v, key_padding_mask)
    spec = make_spec(
        topk, q.shape[-1], causal=causal, recent=recent, scale=scale, normalize=normalize, num_keys=k.shape[2]
    )
    if causal and k.shape[2] < q.shape[2]:
        raise ValueError(
            f"causal attention needs at least as many keys as queries, got {k.shape[2]} and {q.shape[2]}"
        )
    if not (0.0 <= grad_threshold < math.inf):
        raise ValueError(f"grad_threshold must be a finite number of at least 0, got {grad_threshold}")
    if not 0.0 <= dropout_p < 1.0:
        raise ValueError(f"dropout_p must be at least 0 and less than 1, got {dropout_p}")
    if dropout_p > 0.0:
        if grad_threshold > 0.0:
            raise ValueError("grad_threshold and dropout_p cannot both be above 0")
        # Which keys are kept is no differentiable choice; what they weigh is computed anew, with gradients.
        with torch.no_grad():
            position = _forward(q, k, v, key_padding_mask, *spec, 0.0, True)[2]
        return topk_dropout.attend(q, k, v, position, spec, dropout_p)
    need_grad = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    out: torch.Tensor = _forward(q, k, v, key_padding_mask, *spec, grad_threshold, need_grad)[0]
    return out


def make_spec(
    topk: int,
    head_dim: int,
    *,
    causal: bool,
    recent: int | None,
    scale: float | None,
    normalize: str | None,
    num_keys: int,
) -> TopkSpec:
    """The numbers that decide a row, checked and resolved; ``topk`` no larger than there are keys."""
    if topk < 1:
        raise ValueError(f"topk must be at least 1, got {topk}")
    if normalize not in (None, "l2"):
        raise ValueError(f"normalize must be None or 'l2', got {normalize!r}")
    if recent is None:
        recent = topk // 2 if causal else 0
    if not causal and recent != 0:
        raise ValueError(f"recent keys exist only with causal=True, got recent={recent}")
    if not 0 <= recent <= topk:
        raise ValueError(f"recent must be between 0 and topk ({topk}), got {recent}")
    scale = head_dim**-0.5 if scale is None else float(scale)
    if not 0.0 < scale < math.inf:
        raise ValueError(f"scale must be a positive finite number, got {scale}")
    if topk > num_keys:
        # As many places as keys keep everything, however they are split.
        topk, recent = num_keys, min(recent, num_keys)
    return TopkSpec(topk, recent, causal, scale, normalize == "l2")


def _check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> None:
    if q.dim() != 4 or k.dim() != 4 or k.shape != v.shape or q.shape[0] != k.shape[0]:
        raise ValueError(
            "q must be [b, h, n, d] and k and v [b, h_kv, m, d], "
            f"got {list(q.shape)}, {list(k.shape)} and {list(v.shape)}"
        )
    if q.shape[3] != k.shape[3] or q.shape[3] == 0:
        raise ValueError(f"q and k must have the same head size, got {q.shape[3]} and {k.shape[3]}")
    if k.shape[1] == 0 or q.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(f"h must be a multiple of h_kv, got {q.shape[1]} and {k.shape[1]}")
    if q.dtype not in DTYPES or q.dtype != k.dtype or q.dtype != v.dtype:
        raise ValueError(
            "q, k and v must have one dtype out of float32, float64, float16 and bfloat16, "
            f"got {q.dtype}, {k.dtype} and {v.dtype}"
        )
    if q.device != k.device or q.device != v.device:
        raise ValueError(f"q, k and v must be on one device, got {q.device}, {k.device} and {v.device}")
    if mask is None:
        return
    if mask.dtype != torch.bool or mask.shape != (k.shape[0], k.shape[2]) or mask.device != k.device:
        raise ValueError(
            f"key_padding_mask must be {[k.shape[0], k.shape[2]]} bool on {k.device}, True = padding; "
            f"got {list(mask.shape)} {mask.dtype} on {mask.device}"
        )


def _native(x: torch.Tensor) -> bool:
    return x.device.type == "cpu" and x.dtype != torch.float64


# Operators of their own: torch.compile and checkpoints see two opaque calls with known shapes. The
# flat arguments are what an operator's schema can hold.
@torch.library.custom_op("octavo::topk_attention", mutates_args=())
def _forward(  # noqa: PLR0913  (an operator's schema is flat)
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    key_padding_mask: torch.Tensor | None,
    topk: int,
    recent: int,
    causal: bool,
    scale: float,
    l2: bool,
    grad_threshold: float,
    save: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    spec = TopkSpec(topk, recent, causal, scale, l2)
    with torch.autocast(q.device.type, enabled=False):
        forward = topk_native.forward if _native(q) else topk_tiled.forward
        out, kept = forward(q, k, v, key_padding_mask, spec, save=save)
    return out, kept.lse, kept.position, kept.weight


# Without types, and with as many arguments as the operator's flat schema.
@_forward.register_fake
def _(q, k, v, key_padding_mask, topk, recent, causal, scale, l2, grad_threshold, save):  # type: ignore[no-untyped-def]  # noqa: PLR0913
    kept = Kept.empty(q, topk, save=save)
    return empty_heads(q), kept.lse, kept.position, kept.weight


@torch.library.custom_op("octavo::topk_attention_backward", mutates_args=())
def _backward(  # noqa: PLR0913  (an operator's schema is flat)
    out_grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    index: torch.Tensor,
    weight: torch.Tensor,
    scale: float,
    l2: bool,
    grad_threshold: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    spec = TopkSpec(index.shape[-1], 0, False, scale, l2)
    kept = Kept(weight.new_empty(0), index, weight)
    with torch.autocast(q.device.type, enabled=False):
        backward = topk_native.backward if _native(q) else topk_tiled.backward
        return backward(out_grad, (q, k, v), kept, spec, grad_threshold)


# Without types, and with as many arguments as the operator's flat schema.
@_backward.register_fake
def _(out_grad, q, k, v, index, weight, scale, l2, grad_threshold):  # type: ignore[no-untyped-def]  # noqa: PLR0913
    return empty_heads(q), empty_heads(k), empty_heads(v)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    q, k, v, _, _, _, _, scale, l2, grad_threshold, _ = inputs
    _, _, index, weight = output
    ctx.save_for_backward(q, k, v, index, weight)
    ctx.settings = (scale, l2, grad_threshold)
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, out_grad: torch.Tensor | None, *unused: Any) -> tuple[torch.Tensor | None, ...]:
    if out_grad is None:
        return (None,) * 11
    return (*_backward(out_grad, *ctx.saved_tensors, *ctx.settings), *(None,) * 8)


_forward.register_autograd(_gradients, setup_context=_save)
