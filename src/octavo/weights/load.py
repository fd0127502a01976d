"""One view of every checkpoint: (HF name, tensor), whatever the file; and the way into a model."""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from octavo.weights import gguf_names, hf
from octavo.weights.digest import sha256_of
from octavo.weights.errors import WeightsError
from octavo.weights.gguf import GGUFFile, read_header
from octavo.weights.quants import dequantize

log = logging.getLogger("octavo")

EMBEDDING = "model.embed_tokens.weight"
LM_HEAD = "lm_head.weight"
# Tables and masks that old checkpoints saved beside the weights; a model computes them itself.
_NOT_PARAMETERS = (".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")

_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)

Canonical = Callable[[str, Tensor], Iterable[tuple[str, Tensor]]]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """An opened checkpoint: checked, but no tensor read yet.

    kind: "hf" or "gguf". metadata: config.json, or the GGUF's metadata. names: every tensor's HF name.
    source: the checked folder or file, for those who need more.
    """

    path: Path
    kind: str
    metadata: dict[str, Any]
    names: tuple[str, ...]
    source: hf.HFFolder | GGUFFile

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(HF name, tensor), one at a time, so that no second copy of the model exists.

        HF tensors come as stored and may alias the file's pages; GGUF tensors come as float32, in HF's
        layout: rotary rows in HF's order, Gemma's norm weights without the 1 that GGUF adds.
        """
        return self.source.tensors() if isinstance(self.source, hf.HFFolder) else _gguf_tensors(self.source)

    @property
    def num_bytes(self) -> int:
        """Bytes of the weight files together."""
        files = [self.path] if isinstance(self.source, GGUFFile) else self.source.files
        return sum(file.stat().st_size for file in files)

    def fingerprint(self) -> str:
        """SHA-256 over the content of everything that defines the model; changes whenever that does."""
        if isinstance(self.source, GGUFFile):
            return sha256_of(self.path)
        digest = hashlib.sha256(sha256_of(self.path / "config.json").encode())
        for file in self.source.files:
            digest.update(sha256_of(file).encode())
        # Which tensor is read from which file is the index's word, and not in the files.
        placed = (f"{name}\n{file.name}\n" for name, file in self.source.tensor_files.items())
        digest.update("".join(placed).encode())
        return digest.hexdigest()


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open a folder (config.json and safetensors) or a .gguf file, checking every header.

    Raises WeightsError for what is missing, damaged or not supported.
    """
    path = Path(path)
    if path.is_dir():
        folder = hf.open_folder(path)
        return Checkpoint(path, "hf", folder.config, tuple(folder.tensor_files), folder)
    if not path.exists():
        raise WeightsError(f"there is no file or folder {path}")
    if path.suffix != ".gguf":
        raise WeightsError(f"{path.name} is neither a folder of safetensors nor a .gguf file")
    file = read_header(path)
    names = tuple(gguf_names.hf_name(file, name) for name in file.tensors)
    return Checkpoint(path, "gguf", file.metadata, names, file)


def _gguf_tensors(file: GGUFFile) -> Iterator[tuple[str, Tensor]]:
    raw = np.memmap(file.path, np.uint8, "r").view(np.ndarray)
    for name, info in file.tensors.items():
        if info.offset + info.num_bytes > raw.size:
            raise WeightsError(f"{file.path.name} has changed since it was opened")
        values = dequantize(info, raw[info.offset : info.offset + info.num_bytes])
        hf_name = gguf_names.hf_name(file, name)
        yield hf_name, torch.from_numpy(gguf_names.hf_layout(file, hf_name, values))


class Target(Protocol):
    """A model that knows its weights by canonical names and copies each into place, upcasting as needed."""

    def expected_weights(self) -> dict[str, tuple[int, ...]]:
        """Canonical name -> shape of every tensor that a checkpoint must bring."""
        ...

    def load_weight(self, name: str, tensor: Tensor) -> None:
        """Copy one of them, of any float dtype."""
        ...


def load_model(
    target: Target, checkpoint: Checkpoint, *, tied: bool, canonical: Canonical | None = None
) -> None:
    """Give the target every weight it expects, each exactly once and in its shape.

    canonical: (HF name, tensor) -> the (canonical name, tensor) pairs it stands for; by default itself.
    tied: the config says that the output projection is the embedding, so the target expects no
    lm_head.weight; one that the checkpoint brings must be equal to the embedding.
    Tensors that are not float32 (float16, bfloat16) are upcast, with one line in the log.

    Raises WeightsError that names tensors that are missing, not in the model, or of the wrong shape.
    """
    expected = target.expected_weights()
    loaded: set[str] = set()
    extra: list[str] = []
    stored: Counter[torch.dtype] = Counter()
    # Both are held until the end only where there is something to compare.
    compared = {EMBEDDING, LM_HEAD} if tied and LM_HEAD in checkpoint.names else set()
    held: dict[str, Tensor] = {}
    for name, tensor in _canonical_tensors(checkpoint, canonical):
        if name in loaded:
            raise WeightsError(f"{checkpoint.path.name} has two tensors for {name!r}")
        if name in compared:
            held[name] = tensor
        if name in expected:
            _check(name, expected[name], tensor)
            with torch.no_grad(), _one_thread():
                target.load_weight(name, tensor)
            stored[tensor.dtype] += 1
            loaded.add(name)
        elif name not in compared:
            extra.append(name)
    _check_complete(checkpoint, [name for name in expected if name not in loaded], extra)
    if held:
        _check_tie(held[EMBEDDING], held[LM_HEAD])
    for dtype, count in stored.items():
        if dtype != torch.float32:
            name = _dtype_name(dtype)
            log.warning("%s: %d tensors stored as %s are used as float32", checkpoint.path.name, count, name)


@contextmanager
def _one_thread() -> Iterator[None]:
    """A copy is limited by memory: more threads gain nothing, and lose much where the CPUs are shared."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _canonical_tensors(checkpoint: Checkpoint, canonical: Canonical | None) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in checkpoint.tensors():
        if name.endswith(_NOT_PARAMETERS):
            continue
        if canonical is None:
            yield name, tensor
        else:
            yield from canonical(name, tensor)


def _check(name: str, shape: tuple[int, ...], tensor: Tensor) -> None:
    if tuple(tensor.shape) != tuple(shape):
        raise WeightsError(
            f"tensor {name!r} has shape {list(tensor.shape)} in the checkpoint and {list(shape)} in the model"
        )
    if tensor.dtype not in _FLOATS:
        allowed = ", ".join(_dtype_name(dtype) for dtype in _FLOATS)
        raise WeightsError(
            f"tensor {name!r} is stored as {_dtype_name(tensor.dtype)}, supported are {allowed}"
        )


def _check_tie(embedding: Tensor, head: Tensor) -> None:
    _check(LM_HEAD, tuple(embedding.shape), head)
    if not torch.equal(head.float(), embedding.float()):
        raise WeightsError(
            f"the config ties {LM_HEAD} to {EMBEDDING}, but the checkpoint holds two different tensors"
        )


def _check_complete(checkpoint: Checkpoint, missing: list[str], extra: list[str]) -> None:
    reasons = []
    if missing:
        reasons.append(f"it lacks {_listed(missing)}")
        if LM_HEAD in missing:
            reasons.append(f"the config does not tie {LM_HEAD} to the embedding")
    if extra:
        reasons.append(f"the model has no {_listed(extra)}")
    if reasons:
        raise WeightsError(f"{checkpoint.path.name} does not fit the model: {'; '.join(reasons)}")


def _listed(names: list[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
