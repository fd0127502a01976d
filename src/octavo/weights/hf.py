"""Hugging Face folders: config.json and safetensors, single or sharded.

A safetensors file is a u64 header length, a JSON header and the data. The header and every size and offset in
it are checked against the file's size; then the file is mapped, and a tensor is a view of its pages.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch import Tensor

from octavo.weights.errors import WeightsError
from octavo.weights.mapped import MappedFile, typed

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MAX_JSON_BYTES = 32 << 20

_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


@dataclass(frozen=True, slots=True)
class Entry:
    """Where a tensor lies in a safetensors file; ``offset`` is from the file's start."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


Header = dict[str, Entry]


@dataclass(frozen=True, slots=True)
class HFFolder:
    """A checked folder: its config, and for each tensor the file that holds it and its place there."""

    path: Path
    config: dict[str, Any]
    tensor_files: dict[str, Path]
    entries: Header

    @property
    def files(self) -> tuple[Path, ...]:
        """The weight files, each once, in the order of first use."""
        return tuple(dict.fromkeys(self.tensor_files.values()))

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) one by one, as stored. A tensor aliases the file's pages: copy it to keep it.

        The pages leave this process when the next tensor is asked for.
        """
        for file in self.files:
            data = MappedFile(file)
            for name, holder in self.tensor_files.items():
                if holder == file:
                    entry = self.entries[name]
                    raw = data.view(entry.offset, entry.num_bytes)
                    yield name, typed(raw, _DTYPES[entry.dtype], entry.shape)
                    data.release(entry.offset, entry.num_bytes)


def open_folder(path: Path) -> HFFolder:
    """Check a folder's config, index and safetensors headers; no tensor is read.

    Raises WeightsError for a folder without config.json or safetensors, and for any damaged file.
    """
    config = read_json(path / "config.json")
    if (path / INDEX).exists():
        return HFFolder(path, config, *_from_index(path))
    file = _single_file(path)
    header = read_safetensors_header(file)
    return HFFolder(path, config, dict.fromkeys(header, file), header)


def _single_file(path: Path) -> Path:
    found = sorted(path.glob("*.safetensors"))
    if path / SINGLE in found:
        return path / SINGLE
    if len(found) == 1:
        return found[0]
    if found:
        raise WeightsError(
            f"{path.name} holds {len(found)} safetensors files "
            f"and neither {SINGLE} nor {INDEX} to say which to read"
        )
    pickles = sorted(p.name for p in path.iterdir() if p.suffix in _PICKLES)
    if pickles:
        raise WeightsError(
            f"{path.name} holds only a pickle checkpoint ({pickles[0]}), "
            "which can run any code when it is loaded: convert it to safetensors or GGUF"
        )
    raise WeightsError(f"{path.name} holds no safetensors file; a folder of them or a .gguf file is needed")


def _from_index(path: Path) -> tuple[dict[str, Path], Header]:
    """The index is the authority: files and tensors that it does not name are ignored."""
    weight_map = read_json(path / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise WeightsError(f"{INDEX} has no weight_map")
    headers: dict[str, Header] = {}
    tensor_files: dict[str, Path] = {}
    entries: Header = {}
    for name, file_name in weight_map.items():
        if not isinstance(file_name, str) or Path(file_name).name != file_name:
            raise WeightsError(
                f"{INDEX} places {name!r} in {file_name!r}, which is not the name of a file in the folder"
            )
        if file_name not in headers:
            headers[file_name] = read_safetensors_header(path / file_name)
        if name not in headers[file_name]:
            raise WeightsError(f"{INDEX} places {name!r} in {file_name}, which does not hold it")
        tensor_files[name] = path / file_name
        entries[name] = headers[file_name][name]
    return tensor_files, entries


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a small file."""
    try:
        if not path.is_file():
            raise WeightsError(f"{path.parent.name} has no {path.name}")
        if path.stat().st_size > MAX_JSON_BYTES:
            raise WeightsError(
                f"{path.name} has {path.stat().st_size} bytes, at most {MAX_JSON_BYTES} are allowed"
            )
        return _json_object(path.read_bytes(), path.name)
    except OSError as error:
        raise WeightsError(f"cannot read {path.name}: {error.strerror}") from None


def _json_object(raw: bytes, what: str) -> dict[str, Any]:
    def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            raise WeightsError(f"{what} repeats a key of an object")
        return result

    try:
        value = json.loads(raw, object_pairs_hook=without_duplicates)
    except WeightsError:
        raise
    except RecursionError:
        raise WeightsError(f"{what} nests too deeply") from None
    except ValueError as error:  # not JSON, not UTF-8, or a number of thousands of digits
        raise WeightsError(f"{what} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise WeightsError(f"{what} is not a JSON object")
    return value


def read_safetensors_header(path: Path) -> Header:
    """Every tensor's place by name, after checking that it lies within the file."""
    try:
        # Asked before opening, because opening a pipe waits for its writer.
        if not path.is_file():
            raise WeightsError(f"{path.parent.name} has no {path.name}")
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > size - 8:
                raise WeightsError(
                    f"{path.name} is not a usable safetensors file: its header claims {length} bytes, "
                    f"the file has {size}"
                )
            if length > MAX_JSON_BYTES:
                raise WeightsError(
                    f"{path.name} has a header of {length} bytes, at most {MAX_JSON_BYTES} are allowed"
                )
            header = _json_object(file.read(length), f"the header of {path.name}")
    except OSError as error:
        raise WeightsError(f"cannot read {path.name}: {error.strerror}") from None
    header.pop("__metadata__", None)
    return {name: _checked(name, entry, (8 + length, size), path.name) for name, entry in header.items()}


def _checked(name: str, entry: Any, data: tuple[int, int], file_name: str) -> Entry:
    """``data`` is where the file's data begins and ends."""
    data_bytes = data[1] - data[0]
    where = f"tensor {name[:200]!r} in {file_name}"
    fields = entry if isinstance(entry, dict) else {}
    dtype, shape, offsets = fields.get("dtype"), fields.get("shape"), fields.get("data_offsets")
    if not (_is_sizes(shape) and _is_sizes(offsets) and len(offsets) == 2):
        raise WeightsError(f"{where} has no valid shape and data_offsets")
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise WeightsError(f"{where} has the dtype {dtype!r}, supported are {', '.join(_DTYPES)}")
    begin, end = offsets
    if not begin <= end <= data_bytes:
        raise WeightsError(f"{where} claims the bytes {begin} to {end} of {data_bytes}")
    # At most 8 dimensions, so that the product stays a small number.
    if len(shape) > 8 or math.prod(shape) * _DTYPES[dtype].itemsize != end - begin:
        raise WeightsError(
            f"{where} of shape {shape[:8]} and dtype {dtype} does not fit its {end - begin} bytes"
        )
    return Entry(dtype, tuple(shape), data[0] + begin, end - begin)


def _is_sizes(value: Any) -> TypeGuard[list[int]]:
    # type() and not isinstance(): true is an int in Python.
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 1 << 63 for item in value)
