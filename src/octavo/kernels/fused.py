"""Native attention straight over the block table: scores never reach memory, nothing is gathered.

A row's result depends on its query and the keys it sees, to the bit: not on chunks, the batch, the
block size, where blocks lie, or ``pool``. How, is told in ``csrc/span_kernel.inl``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from octavo.kernels import paged_checks as checks
from octavo.kernels.api import AttentionMeta, AttentionSpec, KVLayer, Recall
from octavo.kernels.native import ThreadPool, _native

NAME = "octavo::fused_attention"


class Plan(NamedTuple):
    """One step's native plan and the facts that every layer's tensors are checked against."""

    native: _native.AttentionPlan
    spec: AttentionSpec
    history_window: int | None


def why_not(spec: AttentionSpec) -> str | None:
    """See ``octavo.kernels.api.Kernel.why_not``."""
    return checks.why_not(spec)


def plan(
    meta: AttentionMeta,
    spec: AttentionSpec,
    pool: ThreadPool,
    *,
    share: bool = True,
    isa: str = "auto",
    left_out: torch.Tensor | None = None,
) -> Plan:
    """Check and copy the step's integers. The plan serves one ``attend`` at a time.

    Sequences whose block tables start with the same blocks read these together, span by whole span;
    ``share`` False forbids that (tests, benches), which changes no bit of any result. ``isa`` "avx2" or
    "portable" forces the kernels (tests). ``left_out`` [num_seqs] int32: the rows of sequences with a number
    above 0 are not computed. Raises ValueError, in one sentence, for metadata that cannot be right.
    """
    batch = checks.batch(meta, spec)
    if left_out is not None:
        checks.check_ints("left_out", left_out, (meta.seq_lens.shape[0],))
    native = _native.AttentionPlan(
        batch=batch,
        topk=0 if left_out is None else left_out.data_ptr(),
        shape=checks.shape_of(spec),
        share=share,
        pool=pool,
        isa=isa,
    )
    return Plan(native, spec, meta.history_window)


def attend(
    q: torch.Tensor,
    kv: KVLayer,
    plan: Plan,
    out: torch.Tensor | None = None,
    *,
    mass: torch.Tensor | None = None,
    recall: Recall | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """See ``octavo.kernels.api.Kernel.attend``.

    ``q`` may be a view whose tokens are apart (a slice of a joint projection); a token's heads must
    be contiguous. ``out`` takes the result where the plan leaves sequences out: their rows stay as they are.
    Raises ValueError for tensors that do not fit the plan.
    """
    native, spec, history_window = plan
    checks.check_layer(q, kv, native.num_tokens, spec)
    if out is None:
        out = torch.empty((native.num_tokens, spec.num_heads, spec.head_dim))
    else:
        checks.check_rows("out", out, (native.num_tokens, spec.num_heads, spec.head_dim))
    if mass is not None and (
        mass.dtype != torch.float32 or mass.shape != out.shape[:2] or not mass.is_contiguous()
    ):
        raise ValueError(
            f"mass must be {list(out.shape[:2])} float32, contiguous; got {checks.describe(mass)}"
        )
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
        checks.compact_of_step(kv, history_window, spec),
        mass.data_ptr() if mass is not None else 0,
        checks.recall(recall, kv, native.num_seqs) if recall is not None else None,
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
    if key.dim() != 4 or key.dtype not in checks.KV_DTYPES:
        shape = "[num_blocks, num_kv_heads, block_size, head_dim]"
        raise ValueError(f"key must be {shape}, float32 or float16; got {checks.describe(key)}")
    num_blocks, num_kv_heads, block_size, head_dim = key.shape
    checks.check_cache("key", key, key.shape[1:], key.dtype)
    checks.check_cache("value", value, key.shape[1:], key.dtype)
    if value.shape[0] != num_blocks:
        raise ValueError(f"key has {num_blocks} blocks but value has {value.shape[0]}")
    num_tokens = slot_mapping.shape[0]
    checks.check_rows("k", k, (num_tokens, num_kv_heads, head_dim))
    checks.check_rows("v", v, (num_tokens, num_kv_heads, head_dim))
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
        shape=checks.native_shape(num_kv_heads, num_kv_heads, head_dim, block_size, key.dtype),
        isa="auto",
    )
