"""The native extension, and the threads that its kernels run on."""

from __future__ import annotations

import torch

try:
    from octavo import _native as _native
except ImportError as error:
    raise ImportError("octavo's native extension is missing: run pip install .") from error

ThreadPool = _native.ThreadPool


def isa() -> str:
    """The instruction set that "auto" picks on this machine: "avx512", "avx2" or "portable"."""
    return _native.isa()


def runs(name: str) -> bool:
    """Whether this machine and this build have an instruction set, by name."""
    return name in _native.isas()


def read_memory(tensor: torch.Tensor, pool: ThreadPool) -> int:
    """Read every byte once, to measure how fast that goes; the value only keeps the reads alive."""
    return _native.read_memory(tensor.data_ptr(), tensor.nbytes, pool)
