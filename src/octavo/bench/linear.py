"""``octavo bench linear``: what the native linear layers cost, by weight type and number of rows.

All linear layers of a model, as the decoder calls them: Q, K and V as one product, gate and up as one.
MKL (through ``torch.nn.functional.linear``), a plain read of memory and a large product take their turns
within each round, so that ratios hold even when the machine's speed drifts.
"q8_0/int8" is q8_0 with activations in int8: its GFLOP/s count the same products, which are integers there.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table

from octavo.bench.machine import machine, torch_threads, versions
from octavo.kernels import native
from octavo.kernels.linear import PackedLinear, StoredMatrix, WeightMemory, int8_types, weight_formats
from octavo.kernels.native import ThreadPool

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
#: Bytes that a plain read reads: more than any cache holds.
READ_BYTES = 256 << 20
#: A torch call's threads spin for a while after it and would take a core from whoever comes next.
SETTLE_SECONDS = 0.03
MKL, READ, PEAK = "mkl", "read", "peak"


@dataclass(frozen=True, slots=True)
class Shape:
    """One product of ``inputs`` columns, its parts one below the other, ``count`` times in the model."""

    inputs: int
    parts: tuple[int, ...]
    count: int

    @property
    def num_weights(self) -> int:
        return self.inputs * sum(self.parts) * self.count


@dataclass(frozen=True, slots=True)
class Model:
    name: str
    shapes: tuple[Shape, ...]
    types: tuple[str, ...]
    #: Elements a side of the square product that stands for the machine's peak.
    peak_size: int = 1024

    @property
    def num_weights(self) -> int:
        return sum(shape.num_weights for shape in self.shapes)


SMOLLM2 = Model(
    "SmolLM2-135M",
    (
        Shape(576, (576, 192, 192), 30),
        Shape(576, (576,), 30),
        Shape(576, (1536, 1536), 30),
        Shape(1536, (576,), 30),
        Shape(576, (49152,), 1),
    ),
    ("f32", "f16", "bf16", "q8_0", "q5_0", "q4_1", "q4_0", "q8_0/int8", "q4_1/int8"),
)
#: Its sizes are multiples of 256, which Q4_K and Q6_K need.
GENERIC = Model(
    "hidden 2048",
    (
        Shape(2048, (2048, 512, 512), 2),
        Shape(2048, (2048,), 2),
        Shape(2048, (5632, 5632), 2),
        Shape(5632, (2048,), 2),
    ),
    ("f32", "f16", "q8_0", "q6_k", "q4_k", "q4_1", "q8_0/int8", "q4_k/int8", "q4_1/int8"),
)
TINY = Model(
    "tiny",
    (Shape(256, (64, 32), 2), Shape(512, (40,), 1)),
    (*weight_formats(), *(f"{kind}/int8" for kind in int8_types())),
    64,
)


def stored(kind: str, outputs: int, inputs: int) -> StoredMatrix:
    """Numbers of no meaning that are neither huge, nor subnormal, nor NaN: they could be slower."""
    generator = torch.Generator().manual_seed(0)
    form = weight_formats()[kind]
    if form.block_size == 1:
        dtype = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[kind]
        values = torch.randn(outputs * inputs, generator=generator).to(dtype)
        return StoredMatrix(kind, outputs, inputs, values.view(torch.uint8))
    num_bytes = outputs * inputs // form.block_size * form.block_bytes
    # As float16 any two such bytes are between 0.008 and 0.12.
    data = torch.randint(32, 48, (num_bytes,), dtype=torch.uint8, generator=generator)
    return StoredMatrix(kind, outputs, inputs, data)


def native_layers(model: Model, kind: str, pool: ThreadPool, isa: str) -> list[PackedLinear]:
    """Every layer of the model in memory of its own, in the order in which they are called."""
    layers, memory = [], WeightMemory()
    kind, _, activations = kind.partition("/")
    for shape in model.shapes:
        matrices = {str(i): stored(kind, outputs, shape.inputs) for i, outputs in enumerate(shape.parts)}
        for _ in range(shape.count):
            sizes = {name: matrix.outputs for name, matrix in matrices.items()}
            layer = PackedLinear(shape.inputs, sizes, pool, isa, int8=activations == "int8", memory=memory)
            for name, matrix in matrices.items():
                layer.pack(name, matrix)
            layers.append(layer)
    return layers


def mkl_weights(model: Model) -> list[torch.Tensor]:
    return [torch.randn(sum(s.parts), s.inputs) for s in model.shapes for _ in range(s.count)]


def time_interleaved(calls: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each call in each round, the calls taking turns; the first round is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for i in range(rounds + 1):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            if i:
                seconds[name].append(time.perf_counter() - start)
            if name in (MKL, PEAK):
                time.sleep(SETTLE_SECONDS)
    return seconds


def on_huge_pages(num_bytes: int) -> torch.Tensor:
    """Memory that was written, on huge pages where the system has them, as the packed weights are."""
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a system without them refuses
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8).fill_(1)


def measure(model: Model, pool: ThreadPool, isa: str, rows: tuple[int, ...], rounds: int) -> dict[str, Any]:
    """Milliseconds of all layers of ``model`` at each number of rows, beside MKL and the machine's limits."""
    layers = {kind: native_layers(model, kind, pool, isa) for kind in model.types}
    weights = mkl_weights(model)
    memory = on_huge_pages(READ_BYTES)
    square = torch.randn(model.peak_size, model.peak_size)
    bytes_of = {kind: sum(w.bytes for layer in layers[kind] for w in layer.weights) for kind in layers}

    def ours(kind: str, x: dict[int, torch.Tensor]) -> None:
        for layer in layers[kind]:
            layer(x[layer.inputs])

    def theirs(x: dict[int, torch.Tensor]) -> None:
        for weight in weights:
            F.linear(x[weight.shape[1]], weight)

    cases = []
    for count in rows:
        x = {shape.inputs: torch.randn(count, shape.inputs) for shape in model.shapes}
        calls: dict[str, Callable[[], object]] = {kind: partial(ours, kind, x) for kind in layers}
        calls[READ] = partial(native.read_memory, memory, pool)
        calls[MKL] = partial(theirs, x)
        calls[PEAK] = partial(torch.mm, square, square)
        times = time_interleaved(calls, rounds)
        median = {name: statistics.median(seconds) for name, seconds in times.items()}
        read = READ_BYTES / median[READ]
        peak = 2 * model.peak_size**3 / median[PEAK]
        case: dict[str, Any] = {"rows": count, "read_gb_per_s": read / 1e9, "peak_gflop_per_s": peak / 1e9}
        flop = 2 * count * model.num_weights
        for name in (*layers, MKL):
            num_bytes = bytes_of.get(name, 4 * model.num_weights)
            case[name] = {
                "ms": median[name] * 1e3,
                "ms_all": [s * 1e3 for s in times[name]],
                "gb_per_s": num_bytes / median[name] / 1e9,
                "gflop_per_s": flop / median[name] / 1e9,
                "share_of_read": num_bytes / median[name] / read,
                "share_of_peak": flop / median[name] / peak,
                "mkl_over_this": median[MKL] / median[name],
            }
        cases.append(case)
    return {
        "name": model.name,
        "num_weights": model.num_weights,
        "types": list(model.types),
        "bytes": bytes_of,
        "cases": cases,
    }


def run(
    *, threads: int, command: str, rounds: int = 5, quick: bool = False, isa: str = "auto"
) -> dict[str, Any]:
    """Measure everything; nothing is printed or written. ``quick`` takes tiny shapes (tests)."""
    if threads < 1:
        raise ValueError(f"threads must be at least 1, got {threads}")
    if rounds < 1:
        raise ValueError(f"rounds must be at least 1, got {rounds}")
    pool = ThreadPool(threads)
    with torch_threads(threads), torch.inference_mode():
        return {
            "bench": "linear",
            "command": command,
            "threads": threads,
            "isa": native.isa() if isa == "auto" else isa,
            "machine": machine(),
            "versions": versions(),
            "rounds": rounds,
            "models": [
                measure(model, pool, isa, (1, 8) if quick else ROWS, rounds)
                for model in ((TINY,) if quick else (SMOLLM2, GENERIC))
            ],
        }


def show(result: dict[str, Any], console: Console) -> None:
    """A table a model: milliseconds of every type, and how near float32 comes to its bounds."""
    for model in result["models"]:
        table = Table(
            title=f"milliseconds for all linear layers of {model['name']}, "
            f"{model['num_weights'] / 1e6:.0f} M weights "
            f"({result['isa']}, {result['threads']} threads, {result['machine']['cpu']})"
        )
        table.add_column("rows", justify="right")
        for name in (*model["types"], "MKL f32", "MKL / f32", "read", "peak"):
            table.add_column(name, justify="right")
        for case in model["cases"]:
            table.add_row(
                str(case["rows"]),
                *(_cell(case[kind], case["rows"]) for kind in model["types"]),
                f"{case[MKL]['ms']:.1f}",
                f"{case['f32']['mkl_over_this']:.2f}x",
                f"{case['read_gb_per_s']:.0f} GB/s",
                f"{case['peak_gflop_per_s']:.0f} GFLOP/s",
            )
        console.print(table)
    console.print(
        "In brackets: share of the machine's read bandwidth up to 4 rows, of the peak product from 8 on."
    )


def _cell(entry: dict[str, Any], rows: int) -> str:
    return f"{entry['ms']:.1f} ({entry['share_of_read' if rows <= 4 else 'share_of_peak']:.0%})"


def plot(result: dict[str, Any], path: Path) -> None:
    """GFLOP/s over rows, a line a type, with the roofline of float32."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    models = result["models"]
    figure, all_axes = plt.subplots(
        1, len(models), figsize=(6.5 * len(models), 5), layout="constrained", squeeze=False
    )
    for axes, model in zip(all_axes[0], models, strict=True):
        rows = [case["rows"] for case in model["cases"]]
        for kind in model["types"]:
            axes.plot(
                rows, [case[kind]["gflop_per_s"] for case in model["cases"]], marker="o", ms=3, label=kind
            )
        axes.plot(rows, [case[MKL]["gflop_per_s"] for case in model["cases"]], "k--", label="MKL f32")
        bounds = [
            min(case["peak_gflop_per_s"], case["rows"] * case["read_gb_per_s"] / 2) for case in model["cases"]
        ]
        axes.plot(rows, bounds, color="0.6", lw=3, zorder=0, label="bound of f32")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel("rows")
        axes.set_ylabel("GFLOP/s")
        axes.set_title(model["name"])
        axes.legend(fontsize=7)
    figure.suptitle(
        f"Linear layers, {result['threads']} threads, {result['isa']}, {result['machine']['cpu']}"
    )
    figure.savefig(path, dpi=150)
    plt.close(figure)


def bench_linear(
    *,
    threads: int,
    command: str,
    output: Path = Path("benchmarks/results"),
    rounds: int = 5,
    quick: bool = False,
    isa: str = "auto",
    console: Console | None = None,
) -> dict[str, Any]:
    """What the command line calls: measure, print, and write ``linear.json`` and ``linear.png``."""
    console = console or Console()
    with console.status("measuring linear layers"):
        result = run(threads=threads, command=command, rounds=rounds, quick=quick, isa=isa)
    show(result, console)
    output.mkdir(parents=True, exist_ok=True)
    (output / "linear.json").write_text(json.dumps(result, indent=1) + "\n")
    plot(result, output / "linear.png")
    console.print(f"written: {output / 'linear.json'}, {output / 'linear.png'}")
    return result
