"""One view of every checkpoint: (HF name, tensor), whatever the file; and the copy into a module."""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from octavo.weights import gguf_names, hf
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

    def fingerprint(self) -> str:
        """SHA-256 over the content of everything that defines the model; changes whenever that does."""
        if isinstance(self.source, GGUFFile):
            return _sha256(self.path)
        digest = hashlib.sha256(_sha256(self.path / "config.json").encode())
        for file in self.source.files:
            digest.update(_sha256(file).encode())
        # Which tensor is read from which file is the index's word, and not in the files.
        placed = (f"{name}\n{file.name}\n" for name, file in self.source.tensor_files.items())
        digest.update("".join(placed).encode())
        return digest.hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


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


def load_into(
    module: nn.Module, checkpoint: Checkpoint, *, tied: bool, canonical: Canonical | None = None
) -> None:
    """Fill every parameter of the module from the checkpoint, by name.

    canonical: (HF name, tensor) -> the (parameter name, tensor) pairs it stands for; by default itself.
    tied: the config says that the output projection is the embedding. Then a missing lm_head.weight is the
    embedding, an equal one is used, and a different one is an error.
    A parameter on the meta device is replaced by the tensor itself; any other is copied into. A float tensor
    of another dtype takes the parameter's (float16 and bfloat16 are upcast), with one line in the log.

    Raises WeightsError that names tensors that are missing, not in the module, or of the wrong shape.
    """
    parameters = dict(module.named_parameters(remove_duplicate=False))
    loaded: set[str] = set()
    extra: list[str] = []
    converted: Counter[tuple[torch.dtype, torch.dtype]] = Counter()
    head: Tensor | None = None
    for name, tensor in _canonical_tensors(checkpoint, canonical):
        if name in loaded:
            raise WeightsError(f"{checkpoint.path.name} has two tensors for {name!r}")
        if name == LM_HEAD and tied:
            head = tensor
        elif name not in parameters:
            extra.append(name)
        else:
            _check(name, parameters[name], tensor)
            if tensor.dtype != parameters[name].dtype:
                converted[tensor.dtype, parameters[name].dtype] += 1
            _assign(module, name, parameters[name], tensor, aliased=checkpoint.kind == "hf")
            loaded.add(name)
    if tied and EMBEDDING in loaded:
        _tie(module, head)
        loaded.add(LM_HEAD)
    _check_complete(checkpoint, [name for name in parameters if name not in loaded], extra)
    for (stored, used), count in converted.items():
        log.warning(
            "%s: %d tensors stored as %s are used as %s",
            checkpoint.path.name, count, _dtype_name(stored), _dtype_name(used),
        )  # fmt: skip


class Target(Protocol):
    """A model that knows its weights by canonical names and copies each into place."""

    def expected_weights(self) -> dict[str, tuple[int, ...]]: ...

    def load_weight(self, name: str, tensor: Tensor) -> None: ...


def load_model(target: Target, checkpoint: Checkpoint, *, tied: bool, canonical: Canonical) -> None:
    """As :func:`load_into`, for a model whose parameters are laid out in its own way.

    A tied model expects no lm_head.weight; one that the checkpoint brings must equal the embedding.
    """
    expected = target.expected_weights()
    loaded: set[str] = set()
    extra: list[str] = []
    converted: Counter[torch.dtype] = Counter()
    to_compare: dict[str, Tensor] = {}
    with torch.no_grad():
        for name, tensor in _canonical_tensors(checkpoint, canonical):
            if name in loaded:
                raise WeightsError(f"{checkpoint.path.name} has two tensors for {name!r}")
            if tied and name in (EMBEDDING, LM_HEAD):
                to_compare[name] = tensor
            if name not in expected:
                if not (tied and name == LM_HEAD):
                    extra.append(name)
                continue
            _check_shape(name, expected[name], tensor)
            converted[tensor.dtype] += 1
            target.load_weight(name, tensor)
            loaded.add(name)
    if len(to_compare) == 2 and not torch.equal(to_compare[LM_HEAD], to_compare[EMBEDDING]):
        raise WeightsError(
            f"the config ties {LM_HEAD} to {EMBEDDING}, but the checkpoint holds two different tensors"
        )
    _check_complete(checkpoint, [name for name in expected if name not in loaded], extra)
    for stored, count in converted.items():
        if stored != torch.float32:
            log.warning(
                "%s: %d tensors stored as %s are used as float32",
                checkpoint.path.name, count, _dtype_name(stored),
            )  # fmt: skip


def _canonical_tensors(checkpoint: Checkpoint, canonical: Canonical | None) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in checkpoint.tensors():
        if name.endswith(_NOT_PARAMETERS):
            continue
        if canonical is None:
            yield name, tensor
        else:
            yield from canonical(name, tensor)


def _check(name: str, parameter: nn.Parameter, tensor: Tensor) -> None:
    _check_shape(name, parameter.shape, tensor)


def _check_shape(name: str, shape: Sequence[int], tensor: Tensor) -> None:
    if tuple(tensor.shape) != tuple(shape):
        raise WeightsError(
            f"tensor {name!r} has shape {list(tensor.shape)} in the checkpoint and {list(shape)} in the model"
        )
    if tensor.dtype not in _FLOATS:
        allowed = ", ".join(_dtype_name(dtype) for dtype in _FLOATS)
        raise WeightsError(
            f"tensor {name!r} is stored as {_dtype_name(tensor.dtype)}, supported are {allowed}"
        )


def _assign(module: nn.Module, name: str, parameter: nn.Parameter, tensor: Tensor, *, aliased: bool) -> None:
    """Copy; or where the parameter has no memory yet, hand the tensor over (a copy if it aliases a file)."""
    if parameter.is_meta:
        own = tensor.to(parameter.dtype, copy=aliased).contiguous()
        _replace(module, name, nn.Parameter(own, requires_grad=parameter.requires_grad))
    else:
        with torch.no_grad():
            parameter.copy_(tensor)


def _replace(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    owner, _, attribute = name.rpartition(".")
    setattr(module.get_submodule(owner), attribute, parameter)


def _tie(module: nn.Module, head: Tensor | None) -> None:
    """Make the embedding the output projection too; a stored projection must be equal to it."""
    embedding = module.get_parameter(EMBEDDING)
    if head is not None:
        _check(LM_HEAD, embedding, head)
        if not torch.equal(head.to(embedding), embedding):
            raise WeightsError(
                f"the config ties {LM_HEAD} to {EMBEDDING}, but the checkpoint holds two different tensors"
            )
    if LM_HEAD in dict(module.named_parameters(remove_duplicate=False)):
        _replace(module, LM_HEAD, embedding)


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
