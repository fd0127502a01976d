"""Matrices of a checkpoint in their stored bits, and what is done to them whole rows at a time."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.kernels.linear import StoredMatrix
from octavo.weights.quants import dequantize


@dataclass(frozen=True, slots=True)
class BlockTensor:
    """A matrix in one of GGML's block types.

    ``kind`` is the type's name, such as "q4_1"; ``rows`` uint8 ``[outputs, bytes of a row]`` may alias a
    file's pages. ``transposed`` says that the matrix is meant as ``[inputs, outputs]``, while the bits stay
    those of its transpose. The methods are those that a tensor has.
    """

    kind: str
    rows: Tensor
    inputs: int
    transposed: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        shape = (self.rows.shape[0], self.inputs)
        return shape[::-1] if self.transposed else shape

    def dim(self) -> int:
        return 2

    def t(self) -> BlockTensor:
        return BlockTensor(self.kind, self.rows, self.inputs, not self.transposed)

    def chunk(self, chunks: int) -> tuple[BlockTensor, ...]:
        """Pieces of whole rows."""
        size = -(-self.rows.shape[0] // chunks)
        return tuple(self.narrow(0, first, size) for first in range(0, self.rows.shape[0], size))

    def narrow(self, dim: int, first: int, count: int) -> BlockTensor:
        """Rows ``first`` to ``first + count``. ValueError where they are no whole blocks."""
        if dim != 0 or self.transposed:
            raise ValueError(f"a {self.kind} matrix can be cut into whole rows only")
        return BlockTensor(self.kind, self.rows[first : first + count], self.inputs)

    def expand(self) -> Tensor:
        """The values as float32, in memory of their own; of a transposed matrix, a view."""
        values = torch.from_numpy(
            dequantize(self.kind, self.rows.numpy().reshape(-1), (self.rows.shape[0], self.inputs))
        )
        return values.t() if self.transposed else values

    def matrix(self) -> StoredMatrix:
        """The stored bits as they are. Only for a matrix that is not transposed."""
        assert not self.transposed
        return StoredMatrix(self.kind, self.rows.shape[0], self.inputs, self.rows.reshape(-1))


#: As a checkpoint has it: a tensor of a float type, or blocks.
Weight = Tensor | BlockTensor


def kind_of(weight: Weight) -> str:
    """The storage type as messages name it: "float16", "q4_1"."""
    return weight.kind if isinstance(weight, BlockTensor) else str(weight.dtype).removeprefix("torch.")


def float32(weight: Weight) -> Tensor:
    """The values as float32; a tensor that has them already is returned as it is."""
    return weight.expand() if isinstance(weight, BlockTensor) else weight.to(torch.float32)


def equal(one: Weight, other: Weight, rows: int = 1024) -> bool:
    """Whether two matrices hold the same values; at most ``rows`` rows are expanded at a time."""
    for first in range(0, one.shape[0], rows):
        count = min(rows, one.shape[0] - first)
        a, b = one.narrow(0, first, count), other.narrow(0, first, count)
        if not _same_bits(a, b) and not torch.equal(float32(a), float32(b)):
            return False
    return True


def _same_bits(one: Weight, other: Weight) -> bool:
    if isinstance(one, BlockTensor) and isinstance(other, BlockTensor):
        return one.kind == other.kind and torch.equal(one.rows, other.rows)
    return False
