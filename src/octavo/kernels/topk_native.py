"""Top-k attention on the CPU in C++ (``csrc/topk_modules.cpp``), computed in float32.

A row's result depends on its query and its visible keys, to the bit: not on the batch, the padding, the
other queries or the number of threads.
"""

from __future__ import annotations

import functools
import os

import torch
import torch.nn.functional as F

from octavo.kernels.native import ThreadPool, _native
from octavo.kernels.topk_spec import Kept, TopkSpec, empty_heads


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    key_padding_mask: torch.Tensor | None,
    spec: TopkSpec,
    *,
    save: bool,
    isa: str = "auto",
) -> tuple[torch.Tensor, Kept]:
    """The output, shaped and typed as ``q``, and what its backward pass needs. Arguments are checked already.

    ``isa`` "avx2" or "portable" forces the kernels (tests).
    """
    padded = [_rows(x) for x in (q, k, v)]
    out = empty_heads(padded[0])
    kept = Kept.empty(q, spec.topk, save=save)
    padding = None if key_padding_mask is None else key_padding_mask.contiguous()
    _native.topk_forward(
        shape=_shape(padded[0], padded[1], spec),
        q=_address(padded[0]),
        k=_address(padded[1]),
        v=_address(padded[2]),
        padding=0 if padding is None else padding.data_ptr(),
        out=_address(out),
        lse=kept.lse.data_ptr(),
        index=kept.position.data_ptr() if save else 0,
        weight=kept.weight.data_ptr() if save else 0,
        pool=_pool(torch.get_num_threads(), os.getpid()),
        isa=isa,
    )
    return _like(out, q), kept


def backward(
    out_grad: torch.Tensor,
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    kept: Kept,
    spec: TopkSpec,
    grad_threshold: float,
    *,
    isa: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of q, k and v from that of the output. ``spec.recent`` and ``.causal`` do not matter."""
    q, k, v = (_rows(x) for x in qkv)
    out_grad = _rows(out_grad)
    q_grad, k_grad, v_grad = empty_heads(q), empty_heads(k).zero_(), empty_heads(v).zero_()
    index, weight = kept.position.contiguous(), kept.weight.contiguous()
    _native.topk_backward(
        shape=_shape(q, k, spec._replace(recent=0, causal=False)),
        q=_address(q),
        k=_address(k),
        v=_address(v),
        out_grad=_address(out_grad),
        index=index.data_ptr(),
        weight=weight.data_ptr(),
        threshold=grad_threshold,
        q_grad=_address(q_grad),
        k_grad=_address(k_grad),
        v_grad=_address(v_grad),
        pool=_pool(torch.get_num_threads(), os.getpid()),
        isa=isa,
    )
    return _like(q_grad, qkv[0]), _like(k_grad, qkv[1]), _like(v_grad, qkv[2])


@functools.cache
def _pool(num_threads: int, process: int) -> ThreadPool:
    """As many threads as torch's setting says; of this process, since a forked one has none of its parent's.

    A function of tensors has nowhere to carry a pool: torch's operators share theirs in the same way.
    """
    return ThreadPool(num_threads)


def _rows(x: torch.Tensor) -> torch.Tensor:
    """float32 rows that are dense and a multiple of 8 long: what is added is 0 and changes no score."""
    x = x.float()
    if x.shape[-1] % 8:
        return F.pad(x, (0, -x.shape[-1] % 8))
    return x if x.stride(-1) == 1 else x.contiguous()


def _like(x: torch.Tensor, original: torch.Tensor) -> torch.Tensor:
    if x.shape == original.shape and x.dtype == original.dtype:
        return x
    out = empty_heads(original)
    return out.copy_(x[..., : original.shape[-1]])


def _shape(q: torch.Tensor, k: torch.Tensor, spec: TopkSpec) -> _native.TopkShape:
    return _native.TopkShape(
        batch=q.shape[0],
        num_heads=q.shape[1],
        num_kv_heads=k.shape[1],
        num_queries=q.shape[2],
        num_keys=k.shape[2],
        head_dim=q.shape[3],
        topk=spec.topk,
        recent=spec.recent,
        causal=spec.causal,
        l2=spec.l2,
        scale=spec.scale,
    )


def _address(x: torch.Tensor) -> tuple[int, int, int, int]:
    return x.data_ptr(), *x.stride()[:3]  # type: ignore[return-value]  # four dimensions
