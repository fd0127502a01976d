"""From float32 to GGML's Q8_0 and Q4_1, the bits that the ``gguf`` package gives.

Both choose codes in float32, and round scale and offset to float16 afterwards. That is the formats' custom,
and what other tools write.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.weights.gguf import GGML_TYPES

BLOCK = 32
_BLOCK_BYTES = {kind.name.lower(): kind.block_bytes for kind in GGML_TYPES.values()}
# Blocks per call, so that the temporaries stay in the cache.
_CHUNK_BLOCKS = 4096

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]


def quantize(values: Tensor, kind: str) -> Tensor:
    """float32 ``[outputs, inputs]``, ``inputs`` a multiple of 32 -> uint8 ``[outputs, bytes of a row]``.

    ``kind`` is one of QUANTIZERS. Raises ValueError for values whose scale float16 cannot hold.
    """
    source = values.contiguous().numpy().reshape(-1, BLOCK)
    out = np.empty((len(source), _BLOCK_BYTES[kind]), np.uint8)
    for start in range(0, len(source), _CHUNK_BLOCKS):
        with np.errstate(over="ignore", invalid="ignore"):
            scales = QUANTIZERS[kind](
                source[start : start + _CHUNK_BLOCKS], out[start : start + _CHUNK_BLOCKS]
            )
        if not np.isfinite(scales).all():
            raise ValueError(f"it holds values that {kind} cannot scale")
    return torch.from_numpy(out.reshape(values.shape[0], -1))


def _scale(steps: Floats) -> tuple[Floats, Any]:
    """float32 and float16 [n, 1]: what the values are multiplied by, and the step as it is stored."""
    inverse = np.zeros_like(steps)
    np.divide(np.float32(1), steps, out=inverse, where=steps != 0)
    return inverse, steps.astype(np.float16)


def _q8_0(values: Floats, out: Bytes) -> Any:
    inverse, stored = _scale(np.abs(values).max(axis=1, keepdims=True) / np.float32(127))
    scaled = values * inverse
    # Halves away from zero; numpy's own rounding takes them to the even neighbour.
    whole = np.trunc(scaled)
    scaled -= whole
    scaled *= 2
    whole += np.trunc(scaled, out=scaled)
    out[:, :2] = stored.view(np.uint8)
    out[:, 2:] = whole.astype(np.int8).view(np.uint8)
    return stored


def _q4_1(values: Floats, out: Bytes) -> Any:
    least = values.min(axis=1, keepdims=True)
    inverse, stored = _scale((values.max(axis=1, keepdims=True) - least) / np.float32(15))
    codes = np.minimum((values - least) * inverse + np.float32(0.5), 15).astype(np.uint8)
    out[:, 0:2] = stored.view(np.uint8)
    out[:, 2:4] = least.astype(np.float16).view(np.uint8)
    out[:, 4:] = codes[:, :16] | (codes[:, 16:] << 4)
    return np.maximum(stored, np.abs(least.astype(np.float16)))


QUANTIZERS: dict[str, Callable[[Floats, Bytes], Any]] = {"q8_0": _q8_0, "q4_1": _q4_1}
