"""What becomes of a checkpoint's matrices: the meaning of the option ``weights``."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import torch
from torch import Tensor

from octavo.config import WEIGHTS
from octavo.kernels.linear import StoredMatrix
from octavo.weights.errors import WeightsError
from octavo.weights.quantize import BLOCK, QUANTIZERS, quantize
from octavo.weights.stored import BlockTensor, Weight, float32, kind_of

#: Storage types that the linear kernels read, by the names they have in checkpoints.
KERNELS = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"} | {
    kind: kind for kind in ("q8_0", "q4_0", "q4_1", "q5_0", "q4_k", "q6_k")
}
_FLOATS = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
#: Looked up by position and never multiplied: nothing is gained by fewer bits.
_KEPT = "model.embed_positions.weight"


class Converter:
    """Turns weights as a checkpoint has them into those that the model keeps, and counts changes.

    weights: one of ``octavo.config.WEIGHTS``. "auto" keeps every matrix as stored; a type without a kernel
    becomes float16, float64 becomes float32.
    """

    def __init__(self, weights: str) -> None:
        if weights not in WEIGHTS:
            raise ValueError(f"weights must be one of {', '.join(WEIGHTS)}, got {weights!r:.100}")
        self._weights = weights
        self.changed: Counter[tuple[str, str]] = Counter()

    def note(self, weight: Weight) -> None:
        """Count a weight that will be used as float32."""
        if kind_of(weight) != "float32":
            self.changed[kind_of(weight), "float32"] += 1

    def tensor(self, weight: Weight) -> Tensor:
        """The float32 values; what is not multiplied as a matrix is always kept so."""
        self.note(weight)
        return float32(weight)

    def matrix(self, name: str, weight: Weight) -> StoredMatrix:
        """The bits that the kernels will read, of the checkpoint's own pages where nothing changes.

        Raises WeightsError for a matrix that cannot be kept in the type that was asked for.
        """
        kind = kind_of(weight)
        wanted = self._wanted(name, kind)
        transposed = isinstance(weight, BlockTensor) and weight.transposed
        if wanted == kind and not transposed:
            return _as_is(weight)
        if wanted == "float32" and kind in KERNELS and not transposed:
            matrix = replace(_as_is(weight), expanded=True)  # each panel in native code, as it is packed
        elif wanted in QUANTIZERS:
            matrix = _quantized(name, weight, wanted)
        else:
            matrix = _as_is(_rounded(name, weight, wanted))
        if wanted != kind:
            self.changed[kind, wanted] += 1
        return matrix

    def lines(self) -> list[str]:
        """What was changed, a clause for each pair of types."""
        return [f"{n} tensors stored as {kind} are used as {to}" for (kind, to), n in self.changed.items()]

    def _wanted(self, name: str, kind: str) -> str:
        if self._weights == "auto" or (name == _KEPT and self._weights in QUANTIZERS):
            if kind in KERNELS:
                return kind
            return "float32" if kind == "float64" else "float16"
        if self._weights in QUANTIZERS and kind != self._weights and kind.startswith("q"):
            raise WeightsError(
                f"weights={self._weights!r} would round {name!r} a second time, which is stored as {kind}: "
                "use 'auto', 'float32', 'float16' or 'bfloat16'"
            )
        return self._weights


def _as_is(weight: Weight) -> StoredMatrix:
    if isinstance(weight, BlockTensor):
        return weight.matrix()
    data = weight.contiguous()
    return StoredMatrix(KERNELS[kind_of(data)], data.shape[0], data.shape[1], data.view(-1).view(torch.uint8))


def _rounded(name: str, weight: Weight, wanted: str) -> Tensor:
    values = float32(weight)
    rounded = values.to(_FLOATS.get(wanted, torch.float32)).contiguous()
    if wanted == "float16" and (torch.isinf(rounded) & ~torch.isinf(values)).any():
        raise WeightsError(f"{name!r} has values beyond float16: use weights='bfloat16' or 'float32'")
    return rounded


def _quantized(name: str, weight: Weight, wanted: str) -> StoredMatrix:
    outputs, inputs = weight.shape
    if inputs % BLOCK:
        raise WeightsError(f"{name!r} has rows of {inputs} values; {wanted} needs a multiple of {BLOCK}")
    try:
        rows = quantize(float32(weight), wanted)
    except ValueError as error:
        raise WeightsError(f"{name!r} cannot be kept as {wanted}: {error}") from None
    return StoredMatrix(wanted, outputs, inputs, rows.view(-1))
