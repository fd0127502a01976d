"""Linear layers on weights in their stored bits; the law of their arithmetic is in ``csrc/linear.h``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from octavo.kernels.native import ThreadPool, _native

WeightMemory = _native.WeightMemory


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """How checkpoints store a type: ``block_size`` values of a row in ``block_bytes`` bytes.

    ``int8``: whether it can be multiplied with activations in 8 bits.
    """

    block_size: int
    block_bytes: int
    int8: bool


def weight_formats() -> dict[str, WeightFormat]:
    """Every type that there is a kernel for, by name."""
    return {form[0]: WeightFormat(*form[1:]) for form in _native.weight_formats()}


def int8_types() -> list[str]:
    """The types that can be multiplied with activations in 8 bits."""
    return [name for name, form in weight_formats().items() if form.int8]


@dataclass(frozen=True, slots=True)
class StoredMatrix:
    """A matrix ``[outputs, inputs]`` as a checkpoint stores it: rows dense, one after the other.

    ``type`` is a name of ``weight_formats()``, such as "f32", "bf16" or "q4_1"; ``data`` ``[num_bytes]``
    uint8 may alias a file's pages. ``expanded``: the model keeps its values in float32 instead of these bits.
    """

    type: str
    outputs: int
    inputs: int
    data: torch.Tensor
    expanded: bool = False

    @property
    def kept(self) -> str:
        """The type that the model keeps it in."""
        return "f32" if self.expanded else self.type

    @classmethod
    def of(cls, tensor: torch.Tensor) -> StoredMatrix:
        """The float32 values of ``tensor`` ``[outputs, inputs]``."""
        values = tensor.detach().to(torch.float32).contiguous()
        return cls("f32", values.shape[0], values.shape[1], values.view(-1).view(torch.uint8))


def pack(stored: StoredMatrix, pool: ThreadPool, memory: WeightMemory) -> _native.PackedWeight:
    """The matrix in the kernels' order, its data read once.

    Raises ValueError for an unknown type, inputs that the type cannot hold, or data of a wrong size.
    """
    weight = _native.PackedWeight(stored.kept, stored.outputs, stored.inputs, memory)
    form = weight_formats()[stored.type]
    num_bytes = stored.outputs * stored.inputs // form.block_size * form.block_bytes
    data = stored.data
    if data.dtype != torch.uint8 or data.dim() != 1 or not data.is_contiguous() or data.numel() != num_bytes:
        raise ValueError(
            f"a {stored.type} matrix {[stored.outputs, stored.inputs]} must be {num_bytes} contiguous bytes, "
            f"got {data.dtype} {list(data.shape)}"
        )
    if stored.expanded:
        weight.pack_expanded(stored.type, data.data_ptr(), pool)
    else:
        weight.pack_rows(data.data_ptr(), 0, stored.outputs, pool)
    return weight


class PackedLinear:
    """``y = x W^T (+ bias) (+ residual)``, W being several matrices of one input, one below the other.

    Every part is packed once and is not readable as a matrix any more. ``int8``: x is rounded to 8 bits a
    value, by the law of ``csrc/linear_int8.h``, if all parts are of types that have a kernel for it.
    ``memory``: what the products of a model share, so that they lie one after the other in the order in which
    they are packed.
    """

    def __init__(
        self,
        inputs: int,
        outputs: dict[str, int],
        pool: ThreadPool,
        isa: str = "auto",
        *,
        int8: bool = False,
        memory: WeightMemory | None = None,
    ) -> None:
        self.inputs = inputs
        self.parts = outputs
        self.outputs = sum(outputs.values())
        self.pool = pool
        self._isa = isa
        self._int8 = int8
        self._memory = WeightMemory() if memory is None else memory
        self._packed: dict[str, _native.PackedWeight] = {}

    def pack(self, part: str, stored: StoredMatrix) -> None:
        """Raises ValueError for a part that there is not, one that is there already, or a wrong shape."""
        if part not in self.parts or part in self._packed:
            raise ValueError(f"{part!r} is not a part that is waited for")
        if (stored.outputs, stored.inputs) != (self.parts[part], self.inputs):
            raise ValueError(
                f"{part} must be {[self.parts[part], self.inputs]}, got {[stored.outputs, stored.inputs]}"
            )
        self._packed[part] = pack(stored, self.pool, self._memory)

    @property
    def weights(self) -> list[_native.PackedWeight]:
        """The parts in order."""
        return [self._packed[part] for part in self.parts]

    def __call__(
        self, x: torch.Tensor, bias: torch.Tensor | None = None, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        """``x`` ``[rows, inputs]`` float32, ``bias`` ``[outputs]``; ``residual`` ``[rows, outputs]``."""
        out = torch.empty(x.shape[0], self.outputs)
        self.prepare(x, out, bias, residual)()
        return out

    def prepare(
        self,
        x: torch.Tensor,
        out: torch.Tensor,
        bias: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
    ) -> Callable[[], None]:
        """The native call that fills ``out`` ``[rows, outputs]``. It holds addresses: keep the tensors."""
        return partial(
            _native.linear,
            weights=self.weights,
            x=x.data_ptr(),
            rows=x.shape[0],
            x_stride=x.stride(0),
            bias=0 if bias is None else bias.data_ptr(),
            residual=0 if residual is None else residual.data_ptr(),
            out=out.data_ptr(),
            out_stride=self.outputs,
            int8=self._int8,
            pool=self.pool,
            isa=self._isa,
        )
