"""Top-k attention over the paged cache, in C++ (``csrc/topk_paged.cpp``), exactly by its definition.

Of a row's visible keys the last floor(k / 2) are kept, and of the others the k - floor(k / 2) with the
highest scores, ties to the lowest position; with k or fewer visible keys it is dense attention. A score is
the number of one fixed-order dot product, the same in prefill and in decode. So a row's result depends on
its query and the keys it sees, to the bit: not on chunks, the batch, the block size, where blocks lie, the
plane, or ``pool``.

The *scan plane* holds an approximation of every complete span of 16 keys, in int8, and bounds of its error.
With few queries it is read in place of K, and only keys that may be among the winners are scored from K.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from octavo.kernels import paged_checks as checks
from octavo.kernels.api import AttentionMeta, AttentionSpec, KVLayer
from octavo.kernels.native import ThreadPool, _native

#: Positions per record of the plane; a block holds a whole number of them.
RECORD_KEYS: int = _native.RECORD_KEYS


class Plan(NamedTuple):
    """One step's native plan and the facts that every layer's tensors are checked against."""

    native: _native.TopkPlan
    spec: AttentionSpec
    topk: torch.Tensor


class Report(NamedTuple):
    """Sums over rows, a row being a query, a head and a layer; of ``dropped_max`` the largest.

    ``visible`` and ``kept`` count keys, ``rescored`` those that the scan could not decide. ``dropped`` is
    an upper bound of the softmax mass that was left out, 0 to 1 a row. ``bytes`` of K, V and plane were
    read, and ``dense_bytes`` are those of K and V that dense attention reads, each once for all heads of a
    group: both in steps of at most 4 queries of the sequence, where reading is what costs.
    """

    rows: float = 0.0
    visible: float = 0.0
    kept: float = 0.0
    rescored: float = 0.0
    dropped_sum: float = 0.0
    dropped_max: float = 0.0
    bytes: float = 0.0
    dense_bytes: float = 0.0

    def __add__(self, other: object) -> Report:
        if not isinstance(other, Report):
            return NotImplemented
        sums = Report(*(a + b for a, b in zip(self, other, strict=True)))
        return sums._replace(dropped_max=max(self.dropped_max, other.dropped_max))


class Details(NamedTuple):
    """What :func:`attend` can also tell of a layer.

    ``position`` ``[num_tokens, num_heads, max_topk]`` int32: the kept keys in rising order, then -1;
    ``dropped`` ``[num_tokens, num_heads]``: an upper bound of the dropped mass. Rows of sequences that are
    dense in this step stay -1 and 0.
    """

    position: torch.Tensor
    dropped: torch.Tensor


def why_not(spec: AttentionSpec) -> str | None:
    """One sentence why ``spec`` cannot be served, or None."""
    if spec.block_size % RECORD_KEYS:
        return f"attn_topk needs a block_size that is a multiple of {RECORD_KEYS}, got {spec.block_size}"
    return checks.why_not(spec)


def record_bytes(head_dim: int) -> int:
    """Bytes that the plane takes for 16 keys of one KV head."""
    return _native.record_bytes(head_dim)


def empty_plane(num_blocks: int, spec: AttentionSpec) -> torch.Tensor:
    """The plane of one layer: ``[num_blocks, num_kv_heads, block_size / 16, record bytes]`` uint8."""
    shape = (num_blocks, spec.num_kv_heads, spec.block_size // RECORD_KEYS, record_bytes(spec.head_dim))
    return torch.zeros(shape, dtype=torch.uint8)


def dense_now(meta: AttentionMeta, topk: torch.Tensor) -> torch.Tensor:
    """``topk`` ``[num_seqs]`` int32 with 0 where every row of the step sees no more keys than its budget."""
    return torch.where(meta.seq_lens > topk, topk, torch.zeros_like(topk))


def plan(
    meta: AttentionMeta, topk: torch.Tensor, spec: AttentionSpec, pool: ThreadPool, *, isa: str = "auto"
) -> Plan:
    """Check and copy the step's integers. The plan serves one ``attend`` at a time.

    ``topk`` ``[num_seqs]`` int32 is each sequence's budget, 0 for one that is dense. Rows of those, and of
    sequences that :func:`dense_now` tells, are another kernel's; what these write to the plane is done here.
    """
    reason = why_not(spec)
    if reason is not None:
        raise ValueError(reason)
    batch = checks.batch(meta, spec)
    checks.check_ints("topk", topk, (meta.seq_lens.shape[0],))
    native = _native.TopkPlan(
        batch=batch, topk=topk.data_ptr(), shape=checks.shape_of(spec), pool=pool, isa=isa
    )
    return Plan(native, spec, topk)


def attend(
    q: torch.Tensor,
    kv: KVLayer,
    plan: Plan,
    out: torch.Tensor,
    report: torch.Tensor | None = None,
    *,
    details: bool = False,
) -> Details | None:
    """Write the rows of the plan's sequences to ``out`` [num_tokens, num_heads, head_dim], which else stays.

    ``kv.plane`` None scores every visible key. With a plane, the spans of 16 that the step's keys complete
    are written to it first. ``report`` [num_seqs, len(Report)] float64 is added to. Raises ValueError for
    tensors that do not fit the plan.
    """
    native, spec, topk = plan
    checks.check_layer(q, kv, native.num_tokens, spec)
    checks.check_rows("out", out, (native.num_tokens, spec.num_heads, spec.head_dim))
    if kv.plane is not None:
        per_block = (spec.num_kv_heads, spec.block_size // RECORD_KEYS, record_bytes(spec.head_dim))
        checks.check_cache("plane", kv.plane, per_block, torch.uint8)
        if kv.plane.shape[0] != kv.key.shape[0]:
            raise ValueError(f"key has {kv.key.shape[0]} blocks but plane has {kv.plane.shape[0]}")
    if report is not None and (
        report.dtype != torch.float64 or report.shape != (len(topk), len(Report._fields))
        or not report.is_contiguous()
    ):  # fmt: skip
        raise ValueError(f"report must be [{len(topk)}, {len(Report._fields)}] float64, contiguous")
    found = None
    if details:
        found = Details(
            torch.full((*out.shape[:2], native.max_topk), -1, dtype=torch.int32), torch.zeros(out.shape[:2])
        )
    native.run(
        q=q.data_ptr(),
        q_stride=q.stride(0),
        key=kv.key.data_ptr(),
        value=kv.value.data_ptr(),
        num_blocks=kv.key.shape[0],
        scale=kv.scale,
        window=kv.window or 0,
        out=out.data_ptr(),
        lse=0,
        plane=0 if kv.plane is None else kv.plane.data_ptr(),
        report=0 if report is None else report.data_ptr(),
        position=0 if found is None else found.position.data_ptr(),
        dropped=0 if found is None else found.dropped.data_ptr(),
    )
    return found


def scan_bounds(
    q: torch.Tensor, key: torch.Tensor, scale: float, *, isa: str = "auto"
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What the scan says of ``key`` ``[16 n, d]``, float32 or float16, for the rows ``q`` ``[m, d]`` (tests).

    Returns, each ``[m, 16 n]`` float32: values, bounds, and the scores by the shortest code, which lie within
    the bounds of the values wherever these are finite.
    """
    value, bound, score = (torch.empty(q.shape[0], key.shape[0]) for _ in range(3))
    _native.scan_bounds(
        q=q.data_ptr(),
        num_queries=q.shape[0],
        key=key.data_ptr(),
        half=key.dtype == torch.float16,
        num_records=key.shape[0] // RECORD_KEYS,
        head_dim=q.shape[1],
        scale=scale,
        out=(value.data_ptr(), bound.data_ptr(), score.data_ptr()),
        isa=isa,
    )
    return value, bound, score
