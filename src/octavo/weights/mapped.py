"""A checkpoint's file in the address space: tensors are views of pages that can be let go one by one."""

from __future__ import annotations

import mmap
from pathlib import Path

import torch
from torch import Tensor

from octavo.weights.errors import WeightsError


class MappedFile:
    """The bytes of a file. Views live as long as somebody holds them, the mapping as long as its views."""

    def __init__(self, path: Path) -> None:
        self._name = path.name
        try:
            with path.open("rb") as file:
                # A private mapping may be written to, which torch asks of a buffer; nobody does.
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as error:  # ValueError: an empty file
            reason = getattr(error, "strerror", None) or str(error)
            raise WeightsError(f"cannot read {path.name}: {reason}") from None

    def view(self, offset: int, num_bytes: int) -> Tensor:
        """uint8 ``[num_bytes]``, nothing copied. Raises WeightsError where the file has become too short."""
        if offset + num_bytes > len(self._map):
            raise WeightsError(f"{self._name} has changed since it was opened")
        if num_bytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(self._map, dtype=torch.uint8, count=num_bytes, offset=offset)

    def release(self, offset: int, num_bytes: int) -> None:
        """Take the pages of a range out of this process; who reads them again gets them from the file."""
        if num_bytes == 0:
            return
        first = offset // mmap.PAGESIZE * mmap.PAGESIZE
        self._map.madvise(mmap.MADV_DONTNEED, first, offset + num_bytes - first)


def typed(data: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Bytes as a tensor, copied only where they are not aligned."""
    if data.data_ptr() % dtype.itemsize:
        data = data.clone()
    return data.view(dtype).view(shape)
