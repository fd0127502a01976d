"""The header of a GGUF file, read by a parser that trusts nothing.

Layout (little endian): magic, version u32, tensor count u64, metadata count u64, the metadata, one
record for each tensor, padding to ``general.alignment``, then the data. Every count, length, dimension
and offset is checked against the file's size before anything of that size is made, so a hostile file
costs milliseconds and a few kilobytes.
"""

from __future__ import annotations

import math
import mmap
import stat
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from octavo.weights.errors import WeightsError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MIN_BYTES = 24
DEFAULT_ALIGNMENT = 32
MAX_DIMS = 4
MAX_NESTING = 4
MAX_KEY_BYTES = 65535
# A one-byte item becomes an eight-byte list entry or more, so the file's size alone is too weak a bound.
# The largest vocabularies in use have 0.3 million tokens, with three arrays of that length.
MAX_ITEMS = 1 << 23


class GGMLType(NamedTuple):
    """A storage type: rows are cut into blocks of ``block_size`` values in ``block_bytes`` bytes."""

    name: str
    block_size: int
    block_bytes: int


GGML_TYPES = {
    0: GGMLType("F32", 1, 4),
    1: GGMLType("F16", 1, 2),
    2: GGMLType("Q4_0", 32, 18),
    3: GGMLType("Q4_1", 32, 20),
    6: GGMLType("Q5_0", 32, 22),
    7: GGMLType("Q5_1", 32, 24),
    8: GGMLType("Q8_0", 32, 34),
    12: GGMLType("Q4_K", 256, 144),
    13: GGMLType("Q5_K", 256, 176),
    14: GGMLType("Q6_K", 256, 210),
    30: GGMLType("BF16", 1, 2),
}

# Known by name only, for a better message.
_OTHER_TYPES = {
    9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64",
    28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_U64 = struct.Struct("<Q")

Scalar = int | float | bool | str
Value = Scalar | list[Any]


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies. ``shape`` is in torch's order, rows first; ``offset`` is from the file's start."""

    name: str
    shape: tuple[int, ...]
    ggml_type: str
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """What a GGUF header says: metadata by key and tensors by name, both in the file's order."""

    path: Path
    metadata: dict[str, Value]
    tensors: dict[str, TensorInfo]


class _Reader:
    """A cursor over the mapped file; every step is checked against its end."""

    def __init__(self, data: mmap.mmap, path: Path):
        self.data = data
        self.size = len(data)
        self.path = path
        self.pos = 0
        self.items_left = MAX_ITEMS

    def error(self, what: str) -> WeightsError:
        what = what if len(what) <= 400 else what[:400] + "..."  # names may be 64 KiB long
        return WeightsError(f"{self.path.name} is not a usable GGUF file: {what}")

    def claim(self, num_bytes: int, what: str) -> int:
        """Position before and advance by ``num_bytes``, which must lie within the file."""
        start = self.pos
        if num_bytes > self.size - start:
            raise self.error(
                f"{what} needs {num_bytes} bytes at offset {start}, but the file ends at {self.size}"
            )
        self.pos = start + num_bytes
        return start

    def u32(self, what: str) -> int:
        return int.from_bytes(self.data[self.claim(4, what) : self.pos], "little")

    def u64(self, what: str) -> int:
        return int.from_bytes(self.data[self.claim(8, what) : self.pos], "little")

    def count(self, what: str, min_bytes: int) -> int:
        """A u64 count of items that take at least ``min_bytes`` bytes each."""
        count = self.u64(what)
        if count * min_bytes > self.size - self.pos:
            raise self.error(
                f"{what} is {count}, more than the {self.size - self.pos} bytes that are left can hold"
            )
        self.items_left -= count
        if self.items_left < 0:
            raise self.error(f"{what} is {count}, and a header may hold at most {MAX_ITEMS} items")
        return count

    def text(self, raw: bytes, what: str) -> str:
        try:
            return raw.decode()
        except UnicodeDecodeError:
            raise self.error(f"{what} is not UTF-8") from None

    def string(self, what: str, max_bytes: int | None = None) -> str:
        length = self.u64(f"the length of {what}")
        if max_bytes is not None and length > max_bytes:
            raise self.error(f"{what} is {length} bytes long, at most {max_bytes} are allowed")
        start = self.claim(length, what)
        return self.text(self.data[start : self.pos], what)

    def strings(self, count: int, what: str) -> list[str]:
        # The hot loop of the header: 100,000 vocabulary entries and merges.
        data, pos, size = self.data, self.pos, self.size
        unpack = _U64.unpack_from
        raw: list[bytes] = []
        for i in range(count):
            start = pos + 8
            pos = start + unpack(data, pos)[0] if start <= size else size + 1
            if pos > size:
                raise self.error(f"item {i} of {what} runs past the end of the file at {size}")
            raw.append(data[start:pos])
        self.pos = pos
        try:
            return [item.decode() for item in raw]
        except UnicodeDecodeError:
            raise self.error(f"an item of {what} is not UTF-8") from None

    def value(self, type_id: int, what: str, depth: int = 0) -> Value:
        if type_id == _STRING:
            return self.string(what)
        if type_id == _ARRAY:
            return self.array(what, depth + 1)
        code = _SCALARS.get(type_id)
        if code is None:
            raise self.error(f"{what} has the unknown value type {type_id}")
        scalar: Scalar
        (scalar,) = struct.unpack_from("<" + code, self.data, self.claim(struct.calcsize("<" + code), what))
        return scalar

    def array(self, what: str, depth: int) -> list[Any]:
        if depth > MAX_NESTING:
            raise self.error(f"{what} nests arrays deeper than {MAX_NESTING}")
        item_type = self.u32(f"the item type of {what}")
        if item_type in _SCALARS:
            code = _SCALARS[item_type]
            width = struct.calcsize("<" + code)
            count = self.count(f"the length of {what}", width)
            return list(struct.unpack_from(f"<{count}{code}", self.data, self.claim(count * width, what)))
        count = self.count(f"the length of {what}", 8)
        if item_type == _STRING:
            return self.strings(count, what)
        return [self.value(item_type, what, depth) for _ in range(count)]


def read_header(path: str | Path) -> GGUFFile:
    """Read the metadata and the tensor table of a GGUF file, versions 2 and 3, little endian.

    Raises WeightsError, in one sentence, for a file that is missing, truncated, hostile or of a kind that is
    not supported.
    """
    path = Path(path)
    try:
        # Asked before opening, because opening a pipe waits for its writer.
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise WeightsError(f"{path.name} is not a regular file")
        if status.st_size < MIN_BYTES:
            raise WeightsError(
                f"{path.name} is not a usable GGUF file: it has {status.st_size} bytes, "
                f"a header has at least {MIN_BYTES}"
            )
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _parse(_Reader(data, path))
    except OSError as error:
        raise WeightsError(f"cannot read {path.name}: {error.strerror}") from None


def _parse(reader: _Reader) -> GGUFFile:
    magic = reader.data[reader.claim(4, "the magic") : 4]
    if magic != MAGIC:
        raise reader.error(f"it starts with {magic!r}, not {MAGIC!r}")
    version = reader.u32("the version")
    if version and version & 0xFFFF == 0:
        raise reader.error("it is big endian, only little endian is supported")
    if version not in VERSIONS:
        raise reader.error(f"its version is {version}, supported are {VERSIONS[0]} and {VERSIONS[1]}")
    num_tensors = reader.u64("the tensor count")
    num_metadata = reader.count("the metadata count", 8 + 1 + 4 + 1)

    metadata: dict[str, Value] = {}
    for _ in range(num_metadata):
        key = reader.string("a metadata key", MAX_KEY_BYTES)
        if key in metadata:
            raise reader.error(f"the metadata key {key!r} appears twice")
        metadata[key] = reader.value(reader.u32(f"the type of {key!r}"), repr(key))

    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    # bool is an int in Python, hence type() and not isinstance().
    if type(alignment) is not int or not 0 < alignment <= reader.size or alignment & (alignment - 1):
        raise reader.error(
            f"general.alignment is {alignment!r}, it must be a power of two within the file's size"
        )

    # The tensor count comes before the metadata in the file; its records come after, so it is checked here.
    if num_tensors * (8 + 1 + 4 + 8 + 4 + 8) > reader.size - reader.pos:
        raise reader.error(
            f"the tensor count is {num_tensors}, more than the {reader.size - reader.pos} bytes left can hold"
        )
    records: dict[str, TensorInfo] = {}
    for _ in range(num_tensors):
        record = _tensor_record(reader, alignment)
        if record.name in records:
            raise reader.error(f"the tensor {record.name!r} appears twice")
        records[record.name] = record

    data_start = -(-reader.pos // alignment) * alignment
    tensors: dict[str, TensorInfo] = {}
    for name, record in records.items():
        offset = data_start + record.offset
        if offset + record.num_bytes > reader.size:
            raise reader.error(
                f"tensor {name!r} of shape {list(record.shape)} takes {record.num_bytes} bytes "
                f"at offset {offset}, but the file ends at {reader.size}"
            )
        tensors[name] = TensorInfo(name, record.shape, record.ggml_type, offset, record.num_bytes)
    return GGUFFile(path=reader.path, metadata=metadata, tensors=tensors)


def _tensor_record(reader: _Reader, alignment: int) -> TensorInfo:
    """One row of the tensor table; its offset still counts from the start of the data."""
    name = reader.string("a tensor name", MAX_KEY_BYTES)
    num_dims = reader.u32(f"the number of dimensions of {name!r}")
    if not 1 <= num_dims <= MAX_DIMS:
        raise reader.error(f"tensor {name!r} has {num_dims} dimensions, 1 to {MAX_DIMS} are allowed")
    # The file lists the fastest dimension first.
    shape = tuple(reader.u64(f"a dimension of {name!r}") for _ in range(num_dims))[::-1]
    type_id = reader.u32(f"the type of {name!r}")
    offset = reader.u64(f"the offset of {name!r}")
    kind = GGML_TYPES.get(type_id)
    if kind is None:
        known = ", ".join(t.name for t in GGML_TYPES.values())
        type_name = _OTHER_TYPES.get(type_id, "unknown")
        raise reader.error(f"tensor {name!r} has the type {type_name} ({type_id}), supported are {known}")
    if 0 in shape or shape[-1] % kind.block_size:
        raise reader.error(
            f"tensor {name!r} has shape {list(shape)}: no dimension may be 0, "
            f"and a row of {kind.name} is a multiple of {kind.block_size}"
        )
    if offset % alignment:
        raise reader.error(f"tensor {name!r} starts at {offset}, not a multiple of the alignment {alignment}")
    return TensorInfo(name, shape, kind.name, offset, math.prod(shape) // kind.block_size * kind.block_bytes)
