"""Random weights as a checkpoint stores them, and their values."""

from __future__ import annotations

import gguf
import numpy as np
import torch

from octavo.kernels.linear import PackedLinear, StoredMatrix, weight_formats
from octavo.kernels.native import _native

from .paged import pool

TYPES = tuple(weight_formats())
#: Where a block's float16 scales are, in bytes.
SCALES = {"q8_0": (0,), "q4_0": (0,), "q4_1": (0, 2), "q5_0": (0,), "q4_k": (0, 2), "q6_k": (208,)}
#: Float16 scales at the borders: zeros, subnormals, the largest, and ones of full precision.
EDGES = np.array([0.0, -0.0, 2.0**-24, -(2.0**-24), 65504.0, -65504.0, 1.9990234375, -0.3332], np.float16)


def random_matrix(kind: str, outputs: int, inputs: int, seed: int = 0, scale: float = 0.05) -> StoredMatrix:
    """Every bit pattern of the packed values may come up; scales are normal times ``scale``."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((outputs, inputs), np.float32)
    if kind == "f32":
        data = values.view(np.uint8)
    elif kind == "f16":
        data = values.astype(np.float16).view(np.uint8)
    elif kind == "bf16":
        data = (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    else:
        form = weight_formats()[kind]
        data = rng.integers(0, 256, (outputs * inputs // form.block_size, form.block_bytes), np.uint8)
        for at in SCALES[kind]:
            halves = (rng.standard_normal(len(data)) * scale).astype(np.float16)
            data[:, at : at + 2] = halves.view(np.uint8).reshape(-1, 2)
    return StoredMatrix(kind, outputs, inputs, torch.from_numpy(data.reshape(-1).copy()))


def edge_matrix(kind: str, outputs: int, inputs: int) -> StoredMatrix:
    """As ``random_matrix``, with the scales that rounding could go wrong at."""
    stored = random_matrix(kind, outputs, inputs, seed=1)
    blocks = stored.data.numpy().reshape(-1, weight_formats()[kind].block_bytes)
    for i, at in enumerate(SCALES[kind]):
        halves = np.resize(np.roll(EDGES, i), len(blocks))
        blocks[:, at : at + 2] = halves.view(np.uint8).reshape(-1, 2)
    return stored


def values_of(stored: StoredMatrix) -> torch.Tensor:
    """``[outputs, inputs]`` float32 by the formulas of the ``gguf`` package."""
    kind = gguf.GGMLQuantizationType[stored.type.upper()]
    with np.errstate(all="ignore"):
        values = gguf.quants.dequantize(stored.data.numpy().reshape(stored.outputs, -1), kind)
    return torch.from_numpy(values.astype(np.float32).reshape(stored.outputs, stored.inputs))


def layer_of(*parts: StoredMatrix, threads: int = 1) -> PackedLinear:
    names = {str(i): stored.outputs for i, stored in enumerate(parts)}
    layer = PackedLinear(parts[0].inputs, names, pool(threads))
    for name, stored in zip(names, parts, strict=True):
        layer.pack(name, stored)
    return layer


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.int32)


def multiply(
    layer: PackedLinear,
    x: torch.Tensor,
    isa: str,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    *,
    int8: bool = False,
) -> torch.Tensor:
    """``layer(x)`` on an instruction set of one's choice; ``out`` may be the residual."""
    if out is None:
        out = torch.full((x.shape[0], layer.outputs), torch.nan)
    _native.linear(
        weights=layer.weights,
        x=x.data_ptr(),
        rows=x.shape[0],
        x_stride=x.stride(0),
        bias=0 if bias is None else bias.data_ptr(),
        residual=0 if residual is None else residual.data_ptr(),
        out=out.data_ptr(),
        out_stride=out.stride(0),
        int8=int8,
        pool=pool(2),
        isa=isa,
    )
    return out
