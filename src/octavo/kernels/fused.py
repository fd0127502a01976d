"""Native attention straight over the block table: scores never reach memory, nothing is gathered.

A row's result depends on its query and the keys it sees, to the bit: not on chunks, the batch, the
block size, where blocks lie, or ``pool``. How, is told in ``csrc/span_kernel.inl``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from octavo.kernels.api import AttentionMeta, AttentionSpec, KVLayer
from octavo.kernels.native import ThreadPool, _native

NAME = "octavo::fused_attention"
KV_DTYPES = (torch.float32, torch.float16)


class Plan(NamedTuple):
    """One step's native plan and the facts that every layer's tensors are checked against."""

    native: _native.AttentionPlan
    spec: AttentionSpec


def why_not(spec: AttentionSpec) -> str | None:
    """See ``octavo.kernels.api.Kernel.why_not``."""
    if spec.device != "cpu":
        return f"fused runs on the CPU, not on {spec.device}"
    if not 32 <= spec.head_dim <= 256 or spec.head_dim % 8:
        return f"fused needs a head_dim from 32 to 256 that is a multiple of 8, got {spec.head_dim}"
    if not 1 <= spec.block_size <= _native.SPAN or spec.block_size & (spec.block_size - 1):
        return f"fused needs a block_size that is a power of two from 1 to 256, got {spec.block_size}"
    if spec.kv_dtype not in KV_DTYPES:
        return f"fused reads K and V as float32 or float16, not {spec.kv_dtype}"
    if spec.num_kv_heads < 1 or spec.num_heads < 1 or spec.num_heads % spec.num_kv_heads:
        return f"num_heads ({spec.num_heads}) must be a multiple of num_kv_heads ({spec.num_kv_heads})"
    return None


def plan(
    meta: AttentionMeta, spec: AttentionSpec, pool: ThreadPool, *, share: bool = True, isa: str = "auto"
) -> Plan:
    """Check and copy the step's integers. The plan serves one ``attend`` at a time.

    Sequences whose block tables start with the same blocks read these together, span by whole span;
    ``share`` False forbids that (tests, benches), which changes no bit of any result. ``isa`` "avx2" or
    "portable" forces the kernels (tests). Raises ValueError, in one sentence, for
    metadata that cannot be right.
    """
    reason = why_not(spec)
    if reason is not None:
        raise ValueError(reason)
    num_seqs = meta.seq_lens.shape[0]
    _check_ints("seq_lens", meta.seq_lens, (num_seqs,))
    _check_ints("cu_seqlens_q", meta.cu_seqlens_q, (num_seqs + 1,))
    _check_ints("block_table", meta.block_table, (num_seqs, meta.block_table.shape[-1]))
    native = _native.AttentionPlan(
        block_table=meta.block_table.data_ptr(),
        seq_lens=meta.seq_lens.data_ptr(),
        cu_seqlens_q=meta.cu_seqlens_q.data_ptr(),
        num_seqs=num_seqs,
        max_blocks=meta.block_table.shape[1],
        shape=_shape(spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.block_size, spec.kv_dtype),
        share=share,
        pool=pool,
        isa=isa,
    )
    return Plan(native, spec)


def attend(q: torch.Tensor, kv: KVLayer, plan: Plan) -> tuple[torch.Tensor, torch.Tensor | None]:
    """See ``octavo.kernels.api.Kernel.attend``.

    ``q`` may be a view whose tokens are apart (a slice of a joint projection); a token's heads must
    be contiguous. Raises ValueError for tensors that do not fit the plan.
    """
    native, spec = plan
    heads = (spec.num_heads, spec.head_dim)
    _check_rows("q", q, (native.num_tokens, *heads))
    for name, cache in (("key", kv.key), ("value", kv.value)):
        _check_cache(name, cache, (spec.num_kv_heads, spec.block_size, spec.head_dim), spec.kv_dtype)
    if kv.key.shape[0] != kv.value.shape[0]:
        raise ValueError(f"key has {kv.key.shape[0]} blocks but value has {kv.value.shape[0]}")
    if kv.window is not None and kv.window < 1:
        raise ValueError(f"window must be at least 1 or None, got {kv.window}")
    out = torch.empty((native.num_tokens, *heads))
    lse = torch.empty(out.shape[:2]) if spec.need_lse else None
    args = (
        q.data_ptr(),
        q.stride(0),
        kv.key.data_ptr(),
        kv.value.data_ptr(),
        kv.key.shape[0],
        kv.scale,
        kv.window or 0,
        out.data_ptr(),
        lse.data_ptr() if lse is not None else 0,
    )
    # Outside a profile even an idle record_function costs more than the call itself.
    if torch.autograd.profiler._is_profiler_enabled:
        with torch.profiler.record_function(NAME):
            native.run(*args)
    else:
        native.run(*args)
    return out, lse


def write_kv(
    key: torch.Tensor, value: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """Store rows of one layer in its cache, rounding to float16 where the cache is.

    ``key`` and ``value`` are ``[num_blocks, num_kv_heads, block_size, head_dim]``; ``k`` and ``v``
    ``[num_tokens, num_kv_heads, head_dim]`` float32, a token's heads contiguous; ``slot_mapping``
    ``[num_tokens]`` int64, ``block * block_size + offset``, -1 to skip. Raises ValueError, before
    anything is written, for a slot outside the cache or tensors that do not fit.
    """
    if key.dim() != 4 or key.dtype not in KV_DTYPES:
        shape = "[num_blocks, num_kv_heads, block_size, head_dim]"
        raise ValueError(f"key must be {shape}, float32 or float16; got {_describe(key)}")
    num_blocks, num_kv_heads, block_size, head_dim = key.shape
    _check_cache("key", key, key.shape[1:], key.dtype)
    _check_cache("value", value, key.shape[1:], key.dtype)
    if value.shape[0] != num_blocks:
        raise ValueError(f"key has {num_blocks} blocks but value has {value.shape[0]}")
    num_tokens = slot_mapping.shape[0]
    _check_rows("k", k, (num_tokens, num_kv_heads, head_dim))
    _check_rows("v", v, (num_tokens, num_kv_heads, head_dim))
    if slot_mapping.dtype != torch.int64 or slot_mapping.dim() != 1 or not slot_mapping.is_contiguous():
        raise ValueError("slot_mapping must be a contiguous int64 vector")
    _native.write_kv(
        k=k.data_ptr(),
        k_stride=k.stride(0),
        v=v.data_ptr(),
        v_stride=v.stride(0),
        slots=slot_mapping.data_ptr(),
        num_tokens=num_tokens,
        key=key.data_ptr(),
        value=value.data_ptr(),
        num_blocks=num_blocks,
        shape=_shape(num_kv_heads, num_kv_heads, head_dim, block_size, key.dtype),
        isa="auto",
    )


def _shape(
    num_heads: int, num_kv_heads: int, head_dim: int, block_size: int, kv_dtype: torch.dtype
) -> _native.Shape:
    return _native.Shape(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        half=kv_dtype == torch.float16,
    )


def _check_ints(name: str, x: torch.Tensor, shape: tuple[int, ...]) -> None:
    if x.dtype != torch.int32 or x.device.type != "cpu" or x.shape != shape or not x.is_contiguous():
        raise ValueError(f"{name} must be {list(shape)} int32, contiguous, on the CPU; got {_describe(x)}")


def _check_rows(name: str, x: torch.Tensor, shape: tuple[int, ...]) -> None:
    """Tokens may be apart; what belongs to one token must not be."""
    right = x.dtype == torch.float32 and x.is_cpu and x.shape == shape
    if not right or not (
        x.is_contiguous() or (x.stride(2) == 1 and (shape[1] == 1 or x.stride(1) == shape[2]))
    ):
        raise ValueError(
            f"{name} must be {list(shape)} float32 on the CPU, each token contiguous; got {_describe(x)}"
        )


def _check_cache(name: str, x: torch.Tensor, block: Any, dtype: torch.dtype) -> None:
    if x.dtype != dtype or not x.is_cpu or x.shape[1:] != block or not x.is_contiguous():
        wanted = ", ".join(str(n) for n in block)
        raise ValueError(
            f"{name} must be [num_blocks, {wanted}] {dtype}, contiguous, on the CPU; got {_describe(x)}"
        )


def _describe(x: torch.Tensor) -> str:
    return f"{list(x.shape)} {x.dtype}, strides {list(x.stride())}, on {x.device}"
