"""Where and with what a number was made; every bench writes it beside its results."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("octavo", "torch", "transformers", "tokenizers", "numpy")


def machine() -> dict[str, Any]:
    """The processor, its cores and its memory."""
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    names = [line.split(":", 1)[1].strip() for line in info.splitlines() if line.startswith("model name")]
    flags = next((line.split() for line in info.splitlines() if line.startswith("flags")), [])
    return {
        "cpu": names[0] if names else platform.processor(),
        "cpus": os.cpu_count(),
        "isa": [flag for flag in ("avx2", "fma", "f16c", "avx512f") if flag in flags],
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": platform.system(),
        "python": platform.python_version(),
        "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY"),
    }


def versions() -> dict[str, str | None]:
    """Installed versions, None where a package is not installed."""
    found: dict[str, str | None] = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


@contextmanager
def torch_threads(threads: int) -> Iterator[None]:
    """torch on so many threads, meanwhile."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
