"""The rows of the throughput bench: which engines, on which file of the same weights, with what options."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

OURS = "octavo"


@dataclass(frozen=True, slots=True)
class Variant:
    """One row. ``engine``: a file of ``sessions/``; ``weights``: what is compared with what;
    ``file``: what :class:`octavo.bench.handover.Handover` makes; ``options`` go to the engine."""

    name: str
    family: str
    engine: str
    weights: str
    file: str
    options: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Family:
    """A peer's environment: ``folder`` under the peers' folder, None for the project's own.

    ``preload``: libraries of the environment that the peer's own guide has loaded first.
    """

    folder: str | None
    preload: tuple[str, ...] = ()


FAMILIES = {
    OURS: Family(None),
    "transformers": Family(None),
    "openvino": Family("openvino"),
    "llama.cpp": Family("llama.cpp"),
    "vllm": Family("vllm", preload=("lib/libiomp5.so",)),
}

#: The files that Octavo reads have their weights in the type that the row is named after; "auto" keeps it.
_AS_STORED = {"weights": "auto"}
_INT8 = _AS_STORED | {"activations": "int8"}

VARIANTS = {
    variant.name: variant
    for variant in (
        Variant("octavo-fp32", OURS, "octavo", "fp32", "own-fp32"),
        Variant("octavo-q8_0", OURS, "octavo", "q8_0", "gguf-q8_0", _AS_STORED),
        Variant("octavo-q4_1", OURS, "octavo", "q4_1", "gguf-q4_1", _AS_STORED),
        Variant("octavo-q8_0-int8", OURS, "octavo", "q8_0", "gguf-q8_0", _INT8),
        Variant("octavo-q4_1-int8", OURS, "octavo", "q4_1", "gguf-q4_1", _INT8),
        Variant("transformers-fp32", "transformers", "transformers", "fp32", "hf"),
        # Its default precision follows the processor (bfloat16 where that has it): fp32 is asked for.
        Variant(
            "openvino-fp32",
            "openvino",
            "openvino",
            "fp32",
            "openvino-fp32",
            {"INFERENCE_PRECISION_HINT": "f32"},
        ),
        Variant(
            "openvino-int8",
            "openvino",
            "openvino",
            "int8",
            "openvino-int8",
            {"INFERENCE_PRECISION_HINT": "f32"},
        ),
        Variant("llama.cpp-f32", "llama.cpp", "llama_cpp", "fp32", "gguf-f32"),
        Variant("llama.cpp-q8_0", "llama.cpp", "llama_cpp", "q8_0", "gguf-q8_0"),
        Variant("llama.cpp-q4_1", "llama.cpp", "llama_cpp", "q4_1", "gguf-q4_1"),
        Variant("vllm-fp32", "vllm", "vllm", "fp32", "hf", {"dtype": "float32"}),
    )
}


def choose(names: Sequence[str], *, ours: bool) -> list[Variant]:
    """The variants that are named, one by one or by family, in the table's order.

    ``ours`` chooses among Octavo's own rows, otherwise among the peers'. Raises ValueError for a name
    that is neither.
    """
    rows = [variant for variant in VARIANTS.values() if (variant.family == OURS) == ours]
    known = list(dict.fromkeys([row.family for row in rows] + [row.name for row in rows]))
    for name in names:
        if name not in known:
            what = "rows of octavo" if ours else "peers"
            raise ValueError(f"{what} are {', '.join(known)}, got {name!r}")
    return [row for row in rows if row.family in names or row.name in names]


def python_of(family: str, peers: Path) -> Path:
    """The interpreter of a family's environment. Raises ValueError where there is none."""
    folder = FAMILIES[family].folder
    if folder is None:
        return Path(sys.executable)
    python = peers / folder / "bin" / "python"
    if not python.exists():
        raise ValueError(f"not installed: there is no {'/'.join(python.parts[-3:])} (`make peers` builds it)")
    return python


def preload_of(family: str, peers: Path) -> str:
    """LD_PRELOAD for a family's process, "" for none."""
    row = FAMILIES[family]
    found = [peers / (row.folder or "") / library for library in row.preload]
    return ":".join(str(path.resolve()) for path in found if path.exists())
