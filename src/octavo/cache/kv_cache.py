"""The tensors of the paged KV cache."""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from octavo.kernels import compact, topk_paged
from octavo.kernels.api import CompactKV, TopkPlanes

#: Bytes of a huge page, on most systems.
HUGE_PAGE = 2 * 1024**2

DTYPES = {"float32": torch.float32, "float16": torch.float16}


class PlaneSet(NamedTuple):
    """What there is beside K and V as stored.

    ``layers`` have planes for top-k attention: the scan plane, with ``tail`` and ``fast`` more. There are
    ``compact_blocks`` compact blocks, whose values have ``value_bits`` bits, 8 or 4.
    """

    layers: Sequence[int] = ()
    tail: bool = False
    fast: bool = False
    compact_blocks: int = 0
    value_bits: int = 8


NO_PLANES = PlaneSet()


class Place(NamedTuple):
    """An address or offset of block 0 in layer 0, and bytes from one block and from one layer to the next."""

    start: int
    block: int
    layer: int


class KVCache:
    """K and V of every layer, in blocks.

    ``key`` and ``value`` are each ``[num_layers, num_blocks, num_kv_heads, block_size, head_dim]``.
    The layers of ``planes`` also have those of top-k attention (shapes in ``TopkPlanes``), which the
    attention kernel fills: the scan plane, with ``tail`` the means of the values, with ``fast`` the bounds of
    the keys. Beside them lie the compact blocks, with ids of their own. Which block belongs to whom is the
    block pool's business; this class only moves rows.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_blocks: int,
        num_kv_heads: int,
        block_size: int,
        head_dim: int,
        kv_dtype: str = "float32",
        device: str = "cpu",
        planes: PlaneSet = NO_PLANES,
    ) -> None:
        if kv_dtype not in DTYPES:
            raise ValueError(f"kv_dtype must be one of {', '.join(DTYPES)}, got {kv_dtype!r}")
        shape = (num_layers, num_blocks, num_kv_heads, block_size, head_dim)
        # zeros, not empty: a masked key's weight is exactly 0, but 0 * (garbage NaN) would not be.
        self.key = _lazy_zeros(shape, DTYPES[kv_dtype]).to(device)
        self.value = _lazy_zeros(shape, DTYPES[kv_dtype]).to(device)
        self.block_size = block_size
        self._layers = list(zip(self.key.unbind(), self.value.unbind(), strict=True))
        spans = (len(planes.layers), num_blocks, num_kv_heads, block_size // topk_paged.RECORD_KEYS)
        #: Of all layers that have planes, [layers, ...].
        self.planes: TopkPlanes | None = None
        if planes.layers:
            self.planes = TopkPlanes(
                _lazy_zeros((*spans, topk_paged.record_bytes(head_dim)), torch.uint8),
                _lazy_zeros((*spans, head_dim), torch.float16) if planes.tail else None,
                _lazy_zeros((*spans, topk_paged.bounds_bytes(head_dim)), torch.uint8)
                if planes.fast
                else None,
            )
        self._layer_planes = {layer: self._planes_of(i) for i, layer in enumerate(planes.layers)}
        kept = (self.key, self.value, *(self.planes or ()))
        #: All that holds blocks, ``[layers, num_blocks, ...]`` each.
        self._parts = [part for part in kept if part is not None]
        self.block_bytes = sum(part.nbytes // num_blocks for part in self._parts)
        #: Of all layers; the means and bounds of those that have planes.
        self.compact: CompactKV | None = None
        if planes.compact_blocks:
            own = (planes.compact_blocks, num_kv_heads, block_size // compact.RECORD_KEYS)
            value_bytes = compact.value_record_bytes(head_dim, planes.value_bits)
            planed, bounds_bytes = (len(planes.layers), *own), topk_paged.bounds_bytes(head_dim)
            self.compact = CompactKV(
                _lazy_zeros((num_layers, *own, compact.key_record_bytes(head_dim)), torch.uint8),
                _lazy_zeros((num_layers, *own, value_bytes), torch.uint8),
                _lazy_zeros((*planed, head_dim), torch.float16) if planes.layers and planes.tail else None,
                _lazy_zeros((*planed, bounds_bytes), torch.uint8) if planes.layers and planes.fast else None,
            )
        planed_as = {layer: i for i, layer in enumerate(planes.layers)}
        self._layer_compact = [self._compact_of(i, planed_as.get(i)) for i in range(num_layers)]
        self._compact_parts = [part for part in self.compact or () if part is not None]
        self.compact_block_bytes = sum(part[:, 0].nbytes for part in self._compact_parts)

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of one layer, each ``[num_blocks, num_kv_heads, block_size, head_dim]``."""
        return self._layers[index]

    def layer_planes(self, index: int) -> TopkPlanes | None:
        """The planes of one layer, or None."""
        return self._layer_planes.get(index)

    def _planes_of(self, own: int) -> TopkPlanes | None:
        if self.planes is None:
            return None
        scan, mean_value, bounds = self.planes
        return TopkPlanes(
            scan[own],
            None if mean_value is None else mean_value[own],
            None if bounds is None else bounds[own],
        )

    def layer_compact(self, index: int) -> CompactKV | None:
        """The compact blocks of one layer, or None."""
        return self._layer_compact[index]

    def _compact_of(self, index: int, own: int | None) -> CompactKV | None:
        """Of layer ``index``, which has the planes number ``own``, if any."""
        if self.compact is None:
            return None
        key, value, mean_value, bounds = self.compact
        return CompactKV(
            key[index],
            value[index],
            None if mean_value is None or own is None else mean_value[own],
            None if bounds is None or own is None else bounds[own],
        )

    def compact_places(self) -> tuple[Place, Place]:
        """Where the keys and the values of compact blocks lie in memory."""
        assert self.compact is not None
        key, value = self.compact[:2]
        return _place(key), _place(value)

    def compact_row_places(self) -> tuple[Place, Place]:
        """Where they lie within the rows of one block that :meth:`read_compact` gives."""
        key, value = self.compact_places()
        num_blocks = self._compact_parts[0].shape[1]
        layers = len(self._layers)
        return Place(0, 0, key.layer // num_blocks), Place(layers * key.block, 0, value.layer // num_blocks)

    @property
    def plane_bytes(self) -> int:
        """Bytes of all planes."""
        return sum(plane.nbytes for plane in self.planes or () if plane is not None)

    def write(self, index: int, k: torch.Tensor, v: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        """Store this step's rows in layer ``index``.

        ``k`` and ``v`` are ``[num_tokens, num_kv_heads, head_dim]``; rows whose slot in ``slot_mapping``
        ``[num_tokens]`` int64 is -1 are padding and are not written.
        """
        rows = slot_mapping >= 0
        slots = slot_mapping[rows]
        block, offset = slots // self.block_size, slots % self.block_size
        self.key[index][block, :, offset] = k[rows].to(self.key.dtype)
        self.value[index][block, :, offset] = v[rows].to(self.value.dtype)

    def copy_rows(self, src: int, dst: int, num_rows: int) -> None:
        """Copy the first ``num_rows`` positions of block ``src`` to block ``dst``, in every layer."""
        for cache in (self.key, self.value):
            cache[:, dst, :, :num_rows] = cache[:, src, :, :num_rows]
        # A span that is not whole is written anew when it is completed.
        whole = num_rows // topk_paged.RECORD_KEYS
        for plane in self.planes or ():
            if plane is not None:
                plane[:, dst, :, :whole] = plane[:, src, :, :whole]

    def read_block(self, block: int) -> memoryview:
        """A copy of all that a block holds, ``block_bytes`` of it: K of every layer, V, and the planes."""
        return _read(self._parts, block)

    def write_block(self, block: int, rows: memoryview) -> None:
        """Fill a block with what :meth:`read_block` gave for one."""
        _write(self._parts, block, rows)

    def read_compact(self, block: int) -> memoryview:
        """As :meth:`read_block`, ``compact_block_bytes`` of a compact block."""
        return _read(self._compact_parts, block)

    def write_compact(self, block: int, rows: memoryview) -> None:
        """Fill a compact block with what :meth:`read_compact` gave for one."""
        _write(self._compact_parts, block, rows)


def _place(part: torch.Tensor) -> Place:
    return Place(part.data_ptr(), part[0, 0].nbytes, part[0].nbytes)


def _read(parts: list[torch.Tensor], block: int) -> memoryview:
    """A copy of one block of all ``parts`` ``[layers, num_blocks, ...]``, one after the other."""
    rows = torch.empty(sum(part[:, block].nbytes for part in parts), dtype=torch.uint8)
    for place, part in zip(_split(parts, rows), parts, strict=True):
        place.copy_(part[:, block])
    return rows.numpy().data


def _write(parts: list[torch.Tensor], block: int, rows: memoryview) -> None:
    staged = torch.empty(sum(part[:, block].nbytes for part in parts), dtype=torch.uint8)
    staged.numpy()[:] = np.frombuffer(rows, dtype=np.uint8)
    for place, part in zip(_split(parts, staged), parts, strict=True):
        part[:, block] = place


def _split(parts: list[torch.Tensor], rows: torch.Tensor) -> list[torch.Tensor]:
    """The places of one block's ``parts`` within ``rows`` [bytes] uint8, without a copy."""
    places, start = [], 0
    for part in parts:
        shape = part.shape[:1] + part.shape[2:]
        end = start + math.prod(shape) * part.itemsize
        places.append(rows[start:end].view(part.dtype).view(shape))
        start = end
    return places


def _lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros ``[layers, ...]`` whose memory the system hands out page by page, as blocks are first written.

    Huge pages where the system has them: a block is about as large as a plain page, so reading a
    sequence's blocks would otherwise miss the address cache at every one of them. Not at the start of a
    layer, so that a few short sequences, whose blocks are the first ones, take no more than they fill.
    """
    size = math.prod(shape) * dtype.itemsize
    # Anonymous memory that is not private lies in a file of the system's, which has no huge pages by default.
    memory = mmap.mmap(-1, max(1, size), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a system without huge pages refuses; nothing else depends on it
            _advise(memory, size, shape[0])
    return torch.frombuffer(memory, dtype=dtype, count=math.prod(shape)).view(shape)


def _advise(memory: mmap.mmap, size: int, num_layers: int) -> None:
    """Huge pages for each layer's part of the memory, but for its first."""
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    for layer in range(num_layers):
        start = -(-(layer * size // num_layers + HUGE_PAGE) // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (layer + 1) * size // num_layers
        if start < end:
            memory.madvise(mmap.MADV_HUGEPAGE, start, end - start)


def bytes_per_block(
    *,
    num_layers: int,
    num_kv_heads: int,
    block_size: int,
    head_dim: int,
    kv_dtype: str,
    planes: PlaneSet = NO_PLANES,
) -> int:
    """Bytes that one block takes over all layers, K, V and planes together."""
    span = topk_paged.record_bytes(head_dim) + _span_bytes(head_dim, planes)
    rows = 2 * num_layers * num_kv_heads * block_size * head_dim * DTYPES[kv_dtype].itemsize
    return rows + len(planes.layers) * num_kv_heads * (block_size // topk_paged.RECORD_KEYS) * span


def bytes_per_compact_block(
    *,
    num_layers: int,
    num_kv_heads: int,
    block_size: int,
    head_dim: int,
    planes: PlaneSet,
) -> int:
    """Bytes that one compact block takes over all layers, its means and bounds included."""
    span = compact.key_record_bytes(head_dim) + compact.value_record_bytes(head_dim, planes.value_bits)
    planed = len(planes.layers) * _span_bytes(head_dim, planes)
    return num_kv_heads * (block_size // compact.RECORD_KEYS) * (num_layers * span + planed)


def _span_bytes(head_dim: int, planes: PlaneSet) -> int:
    """Bytes of a span's mean of values and bounds of keys, if there are any."""
    return 2 * head_dim * planes.tail + topk_paged.bounds_bytes(head_dim) * planes.fast
