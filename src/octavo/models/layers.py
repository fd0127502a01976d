"""The parts of a decoder layer. Everything is packed, ``[num_tokens, ...]``, and inference only.

Projections that read the same input are one matrix (q, k and v; gate and up), because a matrix
product of few rows costs by the call. A checkpoint's tensors are copied into their part of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from octavo.attention.backend import AttentionBackend
from octavo.batch import ForwardBatch
from octavo.cache.kv_cache import KVCache
from octavo.config import ModelConfig
from octavo.kernels.api import KVLayer
from octavo.models import parts
from octavo.models.rope import Rotation, rotate

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}


class Slot(NamedTuple):
    """Where one tensor of a checkpoint goes: a view of a parameter that ``shape`` broadcasts to.

    ``offset`` is added once on loading, for norms that multiply by (1 + w).
    """

    view: torch.Tensor
    shape: tuple[int, ...]
    offset: float = 0.0

    def load(self, tensor: torch.Tensor) -> None:
        self.view.copy_(tensor)
        if self.offset:
            self.view.add_(self.offset)


@dataclass(frozen=True, slots=True)
class Step:
    """What all layers of one step share; ``plan`` is the attention backend's.

    ``turns`` of each layer are those of ``octavo.kernels.compact.summarise``.
    """

    batch: ForwardBatch
    kv_cache: KVCache
    attention: AttentionBackend
    plan: Any
    turns: list[torch.Tensor | None]


def parameter(*shape: int, device: str) -> nn.Parameter:
    """An uninitialised float32 parameter: a checkpoint fills it, so nothing is drawn or cleared first."""
    return nn.Parameter(torch.empty(shape, dtype=torch.float32, device=device), requires_grad=False)


class Linear(nn.Module):
    """``x @ weight.T + bias``: projections of one input, ``weight`` ``[sum(outputs), inputs]``."""

    def __init__(self, part: parts.Part, *, device: str) -> None:
        super().__init__()
        self.outputs = part.outputs
        rows = sum(part.outputs.values())
        self.weight = parameter(rows, part.inputs, device=device)
        self.bias = parameter(rows, device=device) if part.bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)

    def slots(self) -> Iterator[tuple[str, Slot]]:
        first = 0
        for name, rows in self.outputs.items():
            for kind, whole in (("weight", self.weight), ("bias", self.bias)):
                if whole is not None:
                    view = whole[first : first + rows]
                    yield f"{name}.{kind}", Slot(view, tuple(view.shape))
            first += rows


class Norm(nn.Module):
    """RMSNorm or LayerNorm (``config.norm``) over the last dimension."""

    def __init__(self, config: ModelConfig, name: str, *, device: str) -> None:
        super().__init__()
        self.name = name
        self.eps = config.norm_eps
        self.offset = config.norm_weight_offset
        self.shape = (config.hidden_size,)
        self.weight = parameter(*self.shape, device=device)
        self.bias = parameter(*self.shape, device=device) if config.norm == "layer" else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.bias is None:
            return F.rms_norm(x, self.shape, self.weight, self.eps)
        return F.layer_norm(x, self.shape, self.weight, self.bias, self.eps)

    def slots(self) -> Iterator[tuple[str, Slot]]:
        yield f"{self.name}.weight", Slot(self.weight, self.shape, self.offset)
        if self.bias is not None:
            yield f"{self.name}.bias", Slot(self.bias, self.shape)


class HeadNorm(nn.Module):
    """RMSNorm of every query and key head, with one weight for all query heads and one for all key heads."""

    def __init__(self, config: ModelConfig, *, device: str) -> None:
        super().__init__()
        self.names = list(parts.head_norms(config).values())
        self.eps = config.norm_eps
        self.offset = config.norm_weight_offset
        self.shape = (config.head_dim,)
        # One row a head, so that q and k are scaled in one product.
        self.counts = (config.num_heads, config.num_kv_heads)
        self.weight = parameter(sum(self.counts), config.head_dim, device=device)

    def forward(self, qk: torch.Tensor) -> torch.Tensor:
        """``qk`` and the result are ``[num_tokens, num_heads + num_kv_heads, head_dim]``."""
        return F.rms_norm(qk, self.shape, None, self.eps) * self.weight

    def slots(self) -> Iterator[tuple[str, Slot]]:
        for name, view in zip(self.names, torch.split(self.weight, list(self.counts)), strict=True):
            yield f"{name}.weight", Slot(view, self.shape, self.offset)


class Attention(nn.Module):
    """Projections, optional head norm and rotation; the attention itself is the backend's."""

    def __init__(self, config: ModelConfig, layer: int, *, device: str) -> None:
        super().__init__()
        self.layer = layer
        self.num_heads = config.num_heads
        self.num_kv_heads = config.num_kv_heads
        self.head_dim = config.head_dim
        self.scale = config.softmax_scale
        self.window = config.window(layer)
        projections = parts.projections(config)
        self.qkv_proj = Linear(projections["qkv"], device=device)
        self.head_norm = HeadNorm(config, device=device) if config.qk_norm else None
        self.o_proj = Linear(projections["o"], device=device)

    def forward(self, x: torch.Tensor, step: Step, rotation: Rotation | None) -> torch.Tensor:
        qkv = self.qkv_proj(x).view(-1, self.num_heads + 2 * self.num_kv_heads, self.head_dim)
        qk, v = qkv[:, : -self.num_kv_heads], qkv[:, -self.num_kv_heads :]
        if self.head_norm is not None:
            qk = self.head_norm(qk)
        if rotation is not None:
            qk = rotate(qk, rotation)
        k = qk[:, self.num_heads :]
        step.attention.write(step.kv_cache, self.layer, k, v, step.batch.slot_mapping)
        kv = KVLayer(
            *step.kv_cache.layer(self.layer),
            self.scale,
            self.window,
            step.kv_cache.layer_planes(self.layer),
            step.kv_cache.layer_compact(self.layer),
            step.turns[self.layer],
            self.layer,
        )
        out = step.attention.run(qk[:, : self.num_heads], kv, step.plan)
        projected: torch.Tensor = self.o_proj(out.reshape(-1, self.num_heads * self.head_dim))
        return projected


class MLP(nn.Module):
    """``down(act(gate(x)) * up(x))``, or ``down(act(up(x)))`` where there is no gate."""

    def __init__(self, config: ModelConfig, *, device: str) -> None:
        super().__init__()
        self.gated = config.gated_mlp
        self.activation = ACTIVATIONS[config.activation]
        projections = parts.projections(config)
        self.gate_up_proj = Linear(projections["gate_up"], device=device)
        self.down_proj = Linear(projections["down"], device=device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner: torch.Tensor = self.gate_up_proj(x)
        if self.gated:
            gate, up = inner.chunk(2, dim=-1)
            inner = self.activation(gate).mul_(up)
        else:
            inner = self.activation(inner)
        down: torch.Tensor = self.down_proj(inner)
        return down


class DecoderLayer(nn.Module):
    """One layer: each half is normed, computed and added to the residual stream.

    With ``post_norms`` (Gemma 3) each half is normed before it is added too.
    """

    def __init__(self, config: ModelConfig, layer: int, *, device: str) -> None:
        super().__init__()
        norms = {role: Norm(config, name, device=device) for role, name in parts.norms(config).items()}
        self.input_norm, self.mlp_norm = norms["input_norm"], norms["mlp_norm"]
        self.attention_post_norm = norms.get("attention_post_norm")
        self.mlp_post_norm = norms.get("mlp_post_norm")
        self.attention = Attention(config, layer, device=device)
        self.mlp = MLP(config, device=device)

    def forward(self, x: torch.Tensor, step: Step, rotation: Rotation | None) -> torch.Tensor:
        """``x`` and the result are ``[num_tokens, hidden]``; ``x`` is changed in place."""
        out = self.attention(self.input_norm(x), step, rotation)
        x += out if self.attention_post_norm is None else self.attention_post_norm(out)
        out = self.mlp(self.mlp_norm(x))
        x += out if self.mlp_post_norm is None else self.mlp_post_norm(out)
        return x

    def slots(self) -> Iterator[tuple[str, Slot]]:
        """Canonical names within the layer, and where their tensors go."""
        for module in self.modules():
            if module is not self and isinstance(module, Linear | Norm | HeadNorm):
                yield from module.slots()
