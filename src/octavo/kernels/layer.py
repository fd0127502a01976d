"""A decoder layer in two native calls, with attention between them, or many layers in one call; the law is in
``csrc/layer.h``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from octavo.kernels import paged_checks as checks
from octavo.kernels.api import AttentionSpec, KVLayer
from octavo.kernels.linear import PackedLinear
from octavo.kernels.native import ThreadPool, _native

Workspace = _native.Workspace


class NormWeights(NamedTuple):
    """RMSNorm, or LayerNorm where ``center``: ``(x - mean) / sqrt(variance + eps) * weight + bias``.

    ``weight`` and ``bias`` are contiguous float32 vectors of the length of a row.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    eps: float
    center: bool

    def native(self) -> _native.Norm:
        """Holds addresses: these tensors must outlive it."""
        bias = 0 if self.bias is None else self.bias.data_ptr()
        return _native.Norm(weight=self.weight.data_ptr(), bias=bias, eps=self.eps, center=self.center)


class LayerShape(NamedTuple):
    """``activation`` is "silu", "gelu" or "gelu_tanh"; a ``gated`` MLP is ``down(act(gate(x)) * up(x))``.

    ``int8``: as for ``PackedLinear``, of every product.
    """

    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    gated: bool
    activation: str
    int8: bool = False


class Step:
    """The tensors of one step that all layers share: ``x`` ``[rows, hidden]`` is the residual stream.

    Raises ValueError for a slot outside the cache or a position outside the rope tables, which have
    ``num_positions`` rows.
    """

    def __init__(
        self,
        shape: LayerShape,
        positions: torch.Tensor,
        slot_mapping: torch.Tensor,
        kv: KVLayer,
        num_positions: int,
    ) -> None:
        rows = positions.shape[0]
        for name, ints in (("positions", positions), ("slot_mapping", slot_mapping)):
            _check_ints(name, ints, rows)
        num_blocks, num_kv_heads, block_size, head_dim = kv.key.shape
        if (num_kv_heads, head_dim) != (shape.num_kv_heads, shape.head_dim):
            raise ValueError(
                f"the cache has {num_kv_heads} heads of {head_dim}, "
                f"the layer {shape.num_kv_heads} of {shape.head_dim}"
            )
        self.rows = rows
        self.positions = positions
        self.x = torch.empty(rows, shape.hidden)
        self.qkv = torch.empty(rows, shape.num_heads + 2 * shape.num_kv_heads, shape.head_dim)
        self.q = self.qkv[:, : shape.num_heads]
        self._slots = slot_mapping
        self.native = _native.Step(
            rows=rows,
            x=self.x.data_ptr(),
            qkv=self.qkv.data_ptr(),
            positions=positions.data_ptr(),
            num_positions=num_positions,
            slots=slot_mapping.data_ptr(),
            num_blocks=num_blocks,
            shape=_native.Shape(
                num_heads=shape.num_heads,
                num_kv_heads=num_kv_heads,
                head_dim=head_dim,
                block_size=block_size,
                half=kv.key.dtype == torch.float16,
            ),
        )


class NativeLayer:
    """The weights of one layer, by role, and what is done with them.

    ``projections`` has "qkv", "o", "gate_up" and "down", each with its bias ``[outputs]`` or None; ``norms``
    any of "input_norm", "q_norm", "k_norm", "attention_post_norm", "mlp_norm" and "mlp_post_norm".
    """

    def __init__(
        self,
        shape: LayerShape,
        projections: dict[str, tuple[PackedLinear, torch.Tensor | None]],
        norms: dict[str, NormWeights],
        isa: str = "auto",
    ) -> None:
        self._kept = (projections, norms)  # the native layer has their addresses
        self.native = _native.Layer(**shape._asdict(), isa=isa)
        for role, (linear, bias) in projections.items():
            self.native.set_projection(role, linear.weights, 0 if bias is None else bias.data_ptr())
        for role, norm in norms.items():
            self.native.set_norm(role, norm.native())
        self.before_attention = self.native.before_attention
        self.after_attention = self.native.after_attention


class LayerCaches:
    """The caches of a model's layers, checked once for the steps of an engine's life.

    Raises ValueError for one that does not fit ``spec``, or has not as many blocks as the first.
    """

    def __init__(self, layers: Sequence[KVLayer], spec: AttentionSpec) -> None:
        for kv in layers:
            checks.check_kv(kv, spec)
            if kv.key.shape != layers[0].key.shape:
                raise ValueError(f"a layer has {kv.key.shape[0]} blocks, the first {layers[0].key.shape[0]}")
        self.layers = layers  # the native ones have their addresses
        self.spec = spec
        self.native = [
            _native.LayerCache(
                key=kv.key.data_ptr(),
                value=kv.value.data_ptr(),
                scale=kv.scale,
                window=kv.window or 0,
                compact=checks.NO_COMPACT if spec.value_bits is None else checks.compact_layer(kv, spec),
            )
            for kv in layers
        ]


def run_layers(
    layers: Sequence[NativeLayer],
    caches: LayerCaches,
    ropes: list[int],
    step: Step,
    plan: _native.AttentionPlan,
    workspace: _native.Workspace,
    pool: ThreadPool,
) -> None:
    """The layers one after the other on ``step.x``, each with the plan's attention, in one call.

    ``plan`` is of all rows of the step, by the caches' ``spec``; ``ropes`` are addresses of tables, or 0.
    Raises ValueError for a plan that is not.
    """
    out = torch.empty(step.rows, caches.spec.num_heads, caches.spec.head_dim)
    _native.run_layers(
        layers=[layer.native for layer in layers],
        caches=caches.native,
        ropes=ropes,
        step=step.native,
        plan=plan,
        attention=out.data_ptr(),
        workspace=workspace,
        pool=pool,
    )


def embed(
    tokens: PackedLinear,
    ids: torch.Tensor,
    scale: float,
    places: PackedLinear | None,
    step: Step,
    workspace: _native.Workspace,
    pool: ThreadPool,
    isa: str = "auto",
) -> None:
    """Rows ``ids`` ``[rows]`` int64 of the embedding into ``step.x``, times ``scale``, plus ``places``.

    Raises ValueError for an id or a position that has no row.
    """
    _check_ints("token_ids", ids, step.rows)
    _native.embed(
        tokens=tokens.weights[0],
        ids=ids.data_ptr(),
        scale=scale,
        places=None if places is None else places.weights[0],
        positions=step.positions.data_ptr(),
        rows=step.rows,
        x=step.x.data_ptr(),
        workspace=workspace,
        pool=pool,
        isa=isa,
    )


def logits(
    norm: NormWeights,
    head: PackedLinear,
    x: torch.Tensor,
    rows: torch.Tensor,
    workspace: _native.Workspace,
    pool: ThreadPool,
    isa: str = "auto",
    int8: bool = False,
) -> torch.Tensor:
    """``head(norm(x[rows]))``: ``x`` ``[n, hidden]`` float32, each row contiguous; ``rows`` ``[m]`` int64
    -> ``[m, vocab]``. ``int8``: as for ``PackedLinear``.

    Raises ValueError for a row that ``x`` does not have.
    """
    if x.dtype != torch.float32 or x.dim() != 2 or x.shape[1] != head.inputs or x.stride(1) != 1:
        raise ValueError(f"x must be [rows, {head.inputs}] float32, each row contiguous, got {list(x.shape)}")
    count = rows.shape[0]
    _check_ints("rows", rows, count)
    out = torch.empty(count, head.outputs)
    _native.logits(
        norm=norm.native(),
        head=head.weights[0],
        x=x.data_ptr(),
        x_stride=x.stride(0),
        x_rows=x.shape[0],
        take=rows.data_ptr(),
        rows=count,
        out=out.data_ptr(),
        int8=int8,
        workspace=workspace,
        pool=pool,
        isa=isa,
    )
    return out


def _check_ints(name: str, x: torch.Tensor, rows: int) -> None:
    if x.dtype != torch.int64 or x.device.type != "cpu" or x.shape != (rows,) or not x.is_contiguous():
        raise ValueError(
            f"{name} must be [{rows}] int64, contiguous, on the CPU, got {list(x.shape)} {x.dtype}"
        )
