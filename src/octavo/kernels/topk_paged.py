"""Top-k attention over the paged cache, in C++ (``csrc/topk_paged.cpp``), exactly by its definition.

Of a row's visible keys the last floor(k / 2) are kept, and of the others the k - floor(k / 2) with the
highest scores, ties to the lowest position; with k or fewer visible keys it is dense attention. A score is
the number of one fixed-order dot product, the same in prefill and in decode. So a row's result depends on
its query and the keys it sees, to the bit: not on chunks, the batch, the block size, where blocks lie, the
plane, or ``pool``.

The *scan plane* holds an approximation of every complete span of 16 keys, in int8, and bounds of its error.
With few queries it is read in place of K, and only keys that may be among the winners are scored from K.

The *tail*: what a row did not keep of a span of 16 enters as one term, by the mean of its keys and of its
values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from octavo.kernels import paged_checks as checks
from octavo.kernels.api import AttentionMeta, AttentionSpec, KVLayer, TopkPlanes
from octavo.kernels.native import ThreadPool, _native

#: Positions per record of the plane; a block holds a whole number of them.
RECORD_KEYS: int = _native.RECORD_KEYS


class Policy(NamedTuple):
    """How one sequence's rows are attended to; a row of a step's ``policies``.

    ``topk`` keys are kept, 0 is dense; ``recent`` of them are the last visible ones. With ``tail`` 1 what is
    not kept enters by the means of its spans of 16. With ``fast`` 1 only keys of the spans that rank highest
    compete. ``least`` above 0 keeps, beside the recent keys, those that have at least this many millionths of
    the row's softmax where it sees 8,192 keys or more, and 8192 / n times as many where it sees n, down to
    1,024; and no more than ``topk``; see :meth:`adaptive`.
    """

    topk: int
    recent: int
    tail: int = 0
    fast: int = 0
    least: int = 0

    @classmethod
    def of(cls, topk: int, *, tail: bool = False, fast: bool = False) -> Policy:
        """With half of the keys recent."""
        return cls(topk, topk // 2, int(tail), int(fast))

    @classmethod
    def adaptive(cls, least: int, recent: int, *, tail: bool = True) -> Policy:
        """As many keys as have ``least`` millionths of the softmax: fewer than a million over ``least``."""
        return cls(recent + 1_000_000 // least, recent, int(tail), 0, least)


class Plan(NamedTuple):
    """One step's native plan and the facts that every layer's tensors are checked against."""

    native: _native.TopkPlan
    spec: AttentionSpec
    num_seqs: int
    history_window: int | None


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


def bounds_bytes(head_dim: int) -> int:
    """Bytes that the bounds of 16 keys of one KV head take, with fast mode."""
    return _native.bounds_bytes(head_dim)


def empty_planes(
    num_blocks: int, spec: AttentionSpec, *, tail: bool = False, fast: bool = False
) -> TopkPlanes:
    """The planes of one layer: zeros, in the shapes of :class:`TopkPlanes`."""
    spans = (num_blocks, spec.num_kv_heads, spec.block_size // RECORD_KEYS)
    scan = torch.zeros(*spans, record_bytes(spec.head_dim), dtype=torch.uint8)
    mean_value = torch.zeros(*spans, spec.head_dim, dtype=torch.float16) if tail else None
    bounds = torch.zeros(*spans, bounds_bytes(spec.head_dim), dtype=torch.uint8) if fast else None
    return TopkPlanes(scan, mean_value, bounds)


def policies(each: Sequence[Policy]) -> torch.Tensor:
    """A step's policies as :func:`plan` takes them: ``[num_seqs, 5]`` int32."""
    return torch.tensor(each, dtype=torch.int32).reshape(len(each), len(Policy._fields))


def dense_now(meta: AttentionMeta, policies: torch.Tensor) -> torch.Tensor:
    """``[num_seqs]`` int32, 0 where every row of the step keeps all that it sees.

    That is up to ``topk`` keys, and where the budget is adaptive up to ``recent``.
    """
    topk, all_kept = policies[:, 0], torch.where(policies[:, 4] > 0, policies[:, 1], policies[:, 0])
    return torch.where(meta.seq_lens > all_kept, topk, torch.zeros_like(topk))


def plan(
    meta: AttentionMeta, policies: torch.Tensor, spec: AttentionSpec, pool: ThreadPool, *, isa: str = "auto"
) -> Plan:
    """Check and copy the step's integers. The plan serves one ``attend`` at a time.

    ``policies`` ``[num_seqs, 5]`` int32 holds a :class:`Policy` a sequence. Rows of sequences that are dense,
    and that :func:`dense_now` tells, are another kernel's; what these write to the planes is done here.
    """
    reason = why_not(spec)
    if reason is not None:
        raise ValueError(reason)
    batch = checks.batch(meta, spec)
    num_seqs = meta.seq_lens.shape[0]
    checks.check_ints("policies", policies, (num_seqs, _native.POLICY_COLUMNS))
    if meta.history_budget is not None and bool((policies[:, 0] > 0).any()):
        raise ValueError("a history_budget goes with dense attention, but a sequence has a budget of keys")
    native = _native.TopkPlan(
        batch=batch, policies=policies.data_ptr(), shape=checks.shape_of(spec), pool=pool, isa=isa
    )
    return Plan(native, spec, num_seqs, meta.history_window)


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

    ``kv.planes`` None scores every visible key. With planes, the spans of 16 that the step's keys complete
    are written to them first. ``report`` [num_seqs, len(Report)] float64 is added to. Raises ValueError for
    tensors that do not fit the plan, and for planes that a policy needs and that are not there.
    """
    native, spec, num_seqs, history_window = plan
    checks.check_layer(q, kv, native.num_tokens, spec)
    checks.check_rows("out", out, (native.num_tokens, spec.num_heads, spec.head_dim))
    if kv.planes is not None:
        _check_planes(kv.planes, kv.key.shape[0], spec)
    if report is not None and (
        report.dtype != torch.float64 or report.shape != (num_seqs, len(Report._fields))
        or not report.is_contiguous()
    ):  # fmt: skip
        raise ValueError(f"report must be [{num_seqs}, {len(Report._fields)}] float64, contiguous")
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
        planes=tuple(0 if x is None else x.data_ptr() for x in kv.planes or (None, None, None)),
        report=0 if report is None else report.data_ptr(),
        position=0 if found is None else found.position.data_ptr(),
        dropped=0 if found is None else found.dropped.data_ptr(),
        compact=checks.compact_of_step(kv, history_window, spec),
    )
    return found


def _check_planes(planes: TopkPlanes, num_blocks: int, spec: AttentionSpec) -> None:
    spans = (spec.num_kv_heads, spec.block_size // RECORD_KEYS)
    for name, plane, wanted, dtype in (
        ("scan", planes.scan, (record_bytes(spec.head_dim),), torch.uint8),
        ("mean_value", planes.mean_value, (spec.head_dim,), torch.float16),
        ("bounds", planes.bounds, (bounds_bytes(spec.head_dim),), torch.uint8),
    ):
        if plane is None:
            continue
        checks.check_cache(name, plane, (*spans, *wanted), dtype)
        if plane.shape[0] != num_blocks:
            raise ValueError(f"key has {num_blocks} blocks but {name} has {plane.shape[0]}")


def scan_bounds(
    q: torch.Tensor, key: torch.Tensor, scale: float, *, tail: bool = False, isa: str = "auto"
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What the scan says of ``key`` ``[16 n, d]``, float32 or float16, for the rows ``q`` ``[m, d]`` (tests);
    ``tail``: where planes serve the tail too.

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
        tail=tail,
        out=(value.data_ptr(), bound.data_ptr(), score.data_ptr()),
        isa=isa,
    )
    return value, bound, score
