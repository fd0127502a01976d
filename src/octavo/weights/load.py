"""One view of every checkpoint: (HF name, tensor), whatever the file; and the way into a model."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from octavo.kernels.linear import StoredMatrix
from octavo.weights import gguf_names, hf
from octavo.weights.convert import Converter
from octavo.weights.digest import sha256_of
from octavo.weights.errors import WeightsError
from octavo.weights.gguf import GGUFFile, TensorInfo, read_header
from octavo.weights.mapped import MappedFile, typed
from octavo.weights.quants import dequantize
from octavo.weights.stored import BlockTensor, Weight, equal, float32, kind_of

log = logging.getLogger("octavo")

EMBEDDING = "model.embed_tokens.weight"
LM_HEAD = "lm_head.weight"
# Tables and masks that old checkpoints saved beside the weights; a model computes them itself.
_NOT_PARAMETERS = (".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")

_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_GGUF_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

Canonical = Callable[[str, Weight], Iterable[tuple[str, Weight]]]


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

    def weights(self) -> Iterator[tuple[str, Weight]]:
        """(HF name, weight as stored), one at a time, so that no second copy of the model exists.

        They are in HF's layout: rotary rows in HF's order, Gemma's norm weights without the 1 that GGUF
        adds. Most alias the file's pages, which leave this process when the next is asked for: copy one to
        keep it.
        """
        if isinstance(self.source, hf.HFFolder):
            return self.source.tensors()
        return _gguf_weights(self.source)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """As ``weights``, with GGUF's blocks expanded to float32."""
        for name, weight in self.weights():
            yield name, float32(weight) if isinstance(weight, BlockTensor) else weight

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


def _gguf_weights(file: GGUFFile) -> Iterator[tuple[str, Weight]]:
    data = MappedFile(file.path)
    for name, info in file.tensors.items():
        weight = _gguf_weight(info, data.view(info.offset, info.num_bytes))
        hf_name = gguf_names.hf_name(file, name)
        yield hf_name, gguf_names.hf_layout(file, hf_name, weight)
        data.release(info.offset, info.num_bytes)


def _gguf_weight(info: TensorInfo, raw: Tensor) -> Weight:
    if info.ggml_type in _GGUF_DTYPES:
        return typed(raw, _GGUF_DTYPES[info.ggml_type], info.shape)
    if len(info.shape) == 2:
        return BlockTensor(info.ggml_type.lower(), raw.view(info.shape[0], -1), info.shape[1])
    return torch.from_numpy(dequantize(info.ggml_type, raw.numpy(), info.shape))


class Target(Protocol):
    """A model that knows its weights by canonical names and copies each into place."""

    def expected_weights(self) -> dict[str, tuple[int, ...]]:
        """Canonical name -> shape of every weight that a checkpoint must bring."""
        ...

    def load_weight(self, name: str, weight: Tensor) -> None:
        """Copy one of them, of any float dtype."""
        ...


class StoredTarget(Protocol):
    """A model that keeps matrices in their storage type."""

    def expected_weights(self) -> dict[str, tuple[int, ...]]:
        """As for Target."""
        ...

    def load_weight(self, name: str, weight: Tensor | StoredMatrix) -> None:
        """Copy one of them: a matrix as StoredMatrix, everything else as a float32 tensor."""
        ...


def load_model(
    target: Target, checkpoint: Checkpoint, *, tied: bool, canonical: Canonical | None = None
) -> None:
    """Give the target every weight it expects, each exactly once and in its shape, as tensors.

    canonical: (HF name, weight) -> the (canonical name, weight) pairs it stands for; by default itself.
    tied: the config says that the output projection is the embedding, so the target expects no
    lm_head.weight; one that the checkpoint brings must be equal to the embedding.
    Weights that are not float32 are used as if they were, with one line in the log for each type.

    Raises WeightsError that names weights that are missing, not in the model, or of the wrong shape.
    """
    converter = Converter("float32")

    def give(name: str, weight: Weight) -> None:
        converter.note(weight)
        # A tensor of another float type is expanded while it is copied.
        target.load_weight(name, weight.expand() if isinstance(weight, BlockTensor) else weight)

    with torch.no_grad(), _one_thread():
        _load(target.expected_weights(), checkpoint, give, tied=tied, canonical=canonical)
    _report(checkpoint, converter)


def load_stored(
    target: StoredTarget,
    checkpoint: Checkpoint,
    weights: str,
    *,
    tied: bool,
    canonical: Canonical | None = None,
) -> None:
    """As load_model, with matrices in the storage type that ``weights`` says, one of octavo.config.WEIGHTS.

    A matrix whose type does not change is never copied on the way: the target reads the file's pages, which
    leave this process after it.
    """
    converter = Converter(weights)

    def give(name: str, weight: Weight) -> None:
        matrix = weight.dim() == 2
        target.load_weight(name, converter.matrix(name, weight) if matrix else converter.tensor(weight))

    with torch.no_grad(), _one_thread():
        _load(target.expected_weights(), checkpoint, give, tied=tied, canonical=canonical)
    _report(checkpoint, converter)


def _load(
    expected: dict[str, tuple[int, ...]],
    checkpoint: Checkpoint,
    give: Callable[[str, Weight], None],
    *,
    tied: bool,
    canonical: Canonical | None,
) -> None:
    loaded: set[str] = set()
    extra: list[str] = []
    # Both are held until the end only where there is something to compare.
    compared = {EMBEDDING, LM_HEAD} if tied and LM_HEAD in checkpoint.names else set()
    held: dict[str, Weight] = {}
    for name, weight in _canonical_weights(checkpoint, canonical):
        if name in loaded:
            raise WeightsError(f"{checkpoint.path.name} has two tensors for {name!r}")
        if name in compared:
            held[name] = weight
        if name in expected:
            _check(name, expected[name], weight)
            give(name, weight)
            loaded.add(name)
        elif name not in compared:
            extra.append(name)
    _check_complete(checkpoint, [name for name in expected if name not in loaded], extra)
    if held:
        _check_tie(held[EMBEDDING], held[LM_HEAD])


def _report(checkpoint: Checkpoint, converter: Converter) -> None:
    for line in converter.lines():
        log.warning("%s: %s", checkpoint.path.name, line)


@contextmanager
def _one_thread() -> Iterator[None]:
    """A copy is limited by memory: more threads gain nothing, and lose much where the CPUs are shared."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _canonical_weights(checkpoint: Checkpoint, canonical: Canonical | None) -> Iterator[tuple[str, Weight]]:
    for name, weight in checkpoint.weights():
        if name.endswith(_NOT_PARAMETERS):
            continue
        if canonical is None:
            yield name, weight
        else:
            yield from canonical(name, weight)


def _check(name: str, shape: tuple[int, ...], weight: Weight) -> None:
    if tuple(weight.shape) != tuple(shape):
        raise WeightsError(
            f"tensor {name!r} has shape {list(weight.shape)} in the checkpoint and {list(shape)} in the model"
        )
    if isinstance(weight, Tensor) and weight.dtype not in _FLOATS:
        allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in _FLOATS)
        raise WeightsError(f"tensor {name!r} is stored as {kind_of(weight)}, supported are {allowed}")


def _check_tie(embedding: Weight, head: Weight) -> None:
    _check(LM_HEAD, tuple(embedding.shape), head)
    if not equal(embedding, head):
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
