"""``octavo bench``: the measurements that the project's claims stand on."""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo.cli import options as opt
from octavo.cli.errors import USAGE, plainly
from octavo.weights.hub import DEFAULT_MODEL

if TYPE_CHECKING:
    from rich.console import Console

app = typer.Typer(
    help="Measure attention, linear layers and throughput; each prints a table, writes JSON and draws a plot."
)

RESULTS = Path("benchmarks/results")
TEXT = Path("benchmarks/data/moby-dick-300k.txt")

Out = Annotated[Path, typer.Option(metavar="FOLDER", help="Where the JSON and the plot go.")]


@app.command("attention")
def attention(
    rounds: Annotated[int, typer.Option(min=1, help="Timed rounds; the backends take turns in each.")] = 7,
    quick: Annotated[bool, typer.Option("--quick", help="Small shapes, for a quick look.")] = False,
    out: Out = RESULTS,
    threads: opt.Threads = None,
) -> None:
    """What each attention backend costs, at decode and at prefill.

    Times, operators per layer, intermediates, and how near fused comes to the memory's own speed.
    """
    from octavo.bench.attention import bench_attention
    from octavo.engine.resources import usable_cpus

    # torch's profiler reports its own comings and goings on stderr.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    with plainly():
        out.mkdir(parents=True, exist_ok=True)
        bench_attention(
            threads=threads or usable_cpus(),
            command=command_line(),
            output=out,
            rounds=rounds,
            quick=quick,
            console=_console(),
        )


@app.command("linear")
def linear(
    rounds: Annotated[int, typer.Option(min=1, help="Timed rounds; types and MKL take turns in each.")] = 5,
    quick: Annotated[bool, typer.Option("--quick", help="Tiny shapes, for a quick look.")] = False,
    isa: Annotated[
        str, typer.Option(metavar="NAME", help="Instruction set: auto, avx512, avx2 or portable.")
    ] = "auto",
    out: Out = RESULTS,
    threads: opt.Threads = None,
) -> None:
    """What linear layers cost, by weight type and number of rows, beside MKL.

    Times of all linear layers of a model, and how near they come to the machine's read bandwidth and peak.
    """
    from octavo.bench.linear import bench_linear
    from octavo.engine.resources import usable_cpus

    with plainly():
        out.mkdir(parents=True, exist_ok=True)
        bench_linear(
            threads=threads or usable_cpus(),
            command=command_line(),
            output=out,
            rounds=rounds,
            quick=quick,
            isa=isa,
            console=_console(),
        )


@app.command("throughput")
def throughput(  # noqa: PLR0913  (each argument is an option of the command)
    model: opt.Model = DEFAULT_MODEL,
    text: Annotated[Path, typer.Option(metavar="FILE", help="The text that prompts are cut from.")] = TEXT,
    workloads: Annotated[
        str, typer.Option(metavar="KEYS", help="Which to run, separated by commas.")
    ] = "a,b,c,d,e",
    peers: Annotated[
        str, typer.Option(metavar="NAMES", help="Engines to compare with, separated by commas, or none.")
    ] = "transformers",
    repeats: Annotated[int, typer.Option(min=1, help="Runs of octavo; the median counts.")] = 3,
    peer_repeats: Annotated[int, typer.Option(min=1, help="Runs of each peer.")] = 3,
    slow_peer_repeats: Annotated[
        int, typer.Option(min=1, help="Runs of each peer on c and d, which take it about a minute each.")
    ] = 3,
    scale: Annotated[
        int, typer.Option(min=1, help="Divide lengths and numbers of chats by this, for a quick look.")
    ] = 1,
    out: Out = RESULTS,
    threads: opt.Threads = None,
    attention: opt.Attention = "fused",
    kv_dtype: opt.KVDtype = "float32",
    kv_cache_memory: opt.KVCacheMemory = "2GiB",
    block_size: opt.BlockSize = 16,
) -> None:
    """The same requests through octavo and through transformers.

    a: 1 stream. b: 32 requests. c: 32 with a long shared prefix. d: 8 chats of 6 turns. e: one long prompt.

    Each engine and workload runs in a process of its own, greedy, with the same float32 weights.
    """
    from rich.console import Console

    from octavo.bench import throughput as bench
    from octavo.bench import throughput_report
    from octavo.engine.resources import usable_cpus

    console = Console(stderr=True, soft_wrap=True)
    with plainly(USAGE):
        settings = bench.Settings(
            model=model,
            text=text,
            keys=[key.strip() for key in workloads.split(",") if key.strip()],
            threads=threads or usable_cpus(),
            peers=[] if peers == "none" else [peer.strip() for peer in peers.split(",")],
            repeats=repeats,
            peer_repeats=peer_repeats,
            slow_peer_repeats=slow_peer_repeats,
            scale=scale,
            options={
                "attention": attention,
                "kv_dtype": kv_dtype,
                "kv_cache_memory": kv_cache_memory,
                "block_size": block_size,
            },
        )
    with plainly():
        out.mkdir(parents=True, exist_ok=True)
        result = bench.run(
            settings,
            command_line(),
            report=lambda line: console.print(line, style="dim", markup=False),
            save=lambda so_far: write_json(out / "throughput.json", so_far),
        )
        throughput_report.plot(result, out / "throughput.png")
    _console().print(throughput_report.table(result))
    print(f"written: {out / 'throughput.json'}, {out / 'throughput.png'}")


def _console() -> Console:
    """A pipe has no width: tables must not be cut there."""
    from rich.console import Console

    return Console() if sys.stdout.isatty() else Console(width=180)


def command_line() -> str:
    """The command as it was typed, paths cut to their last part so that a result names no machine."""
    words = []
    for word in sys.argv[1:]:
        option, equals, value = word.partition("=")
        if equals and option.startswith("--"):
            words.append(f"{option}={_last_part(value)}")
        else:
            words.append(_last_part(word))
    return shlex.join(["octavo", *words])


def _last_part(word: str) -> str:
    return Path(word).name if Path(word).is_absolute() else word


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
