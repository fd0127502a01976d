"""``octavo bench topk``: what top-k attention costs in decode, and in what the model still knows."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import typer

from octavo.cli import options as opt
from octavo.cli.bench_output import (
    RESULTS,
    TEXT,
    Out,
    command_line,
    console,
    names,
    numbers,
    reporter,
    write_json,
)
from octavo.cli.errors import plainly
from octavo.weights.hub import DEFAULT_MODEL

app = typer.Typer(help="Top-k attention: time in decode (without a command), quality, needle.")

Text = Annotated[Path, typer.Option(metavar="FILE", help="The text that is read.")]
Modes = Annotated[
    str,
    typer.Option(metavar="NAMES", help="Any of exact, tail, fast, fast+tail, auto, lean, streaming, window."),
]
Topks = Annotated[str, typer.Option(metavar="NUMBERS", help="Budgets of keys.")]
DenseLayers = Annotated[
    str,
    typer.Option(metavar="LAYERS", help="Run each mode also with these layers dense; none for not."),
]
Lengths = Annotated[str, typer.Option(metavar="NUMBERS", help="Tokens of a text.")]
Fresh = Annotated[
    bool, typer.Option("--fresh", help="Measure all again, also what the result file holds already.")
]


@app.callback(invoke_without_command=True)
def topk(
    ctx: typer.Context,
    attn_topk: Annotated[int, typer.Option(min=1, help="Keys kept for each query and head.")] = 128,
    rounds: Annotated[int, typer.Option(min=1, help="Timed rounds; dense and exact take turns.")] = 7,
    quick: Annotated[bool, typer.Option("--quick", help="1,024 keys only, for a quick look.")] = False,
    engine: Annotated[
        bool, typer.Option(help="Also tokens a second of the whole engine on the default model.")
    ] = True,
    out: Out = RESULTS,
    threads: opt.Threads = None,
) -> None:
    """What top-k attention costs in decode beside dense attention: time, bytes read, tokens a second."""
    from octavo.bench.topk import Settings, bench_topk
    from octavo.engine.resources import usable_cpus

    if ctx.invoked_subcommand is not None:
        return
    with plainly():
        out.mkdir(parents=True, exist_ok=True)
        bench_topk(
            Settings(attn_topk, rounds, threads or usable_cpus(), DEFAULT_MODEL if engine else None, quick),
            command=command_line(),
            output=out,
            console=console(),
        )


@app.command("quality")
def quality(  # noqa: PLR0913  (each argument is an option of the command)
    model: opt.Model = DEFAULT_MODEL,
    text: Text = TEXT,
    modes: Modes = "exact,streaming,window",
    topks: Topks = "64,128,256",
    dense_layers: DenseLayers = "0,1",
    windows: Lengths = "2048,4096,8192",
    tokens: Annotated[int, typer.Option(min=2, help="How much of the text each length reads.")] = 8192,
    out: Out = RESULTS,
    fresh: Fresh = False,
    threads: opt.Threads = None,
) -> None:
    """What few keys cost in perplexity, beside StreamingLLM and plain windows.

    The second half of windows of a text is scored.

    Rows that the result file holds already are kept. For a quick look: --windows 2048 --topks 64.
    """
    from octavo.bench import topk_quality as bench

    def measure(**common: Any) -> dict[str, Any]:
        settings = bench.Settings(
            modes=tuple(names(modes)),
            topks=numbers(topks),
            dense_layers=_layers(dense_layers),
            windows=numbers(windows),
            tokens=tokens,
        )
        return bench.run(model, text, settings, threads=threads, **common)

    _run(bench, measure, out / "topk_quality.json", fresh)


@app.command("needle")
def needle(  # noqa: PLR0913  (each argument is an option of the command)
    model: opt.Model = DEFAULT_MODEL,
    text: Text = TEXT,
    modes: Modes = "exact,streaming",
    topks: Topks = "64,256",
    dense_layers: DenseLayers = "none",
    lengths: Lengths = "2048,4096,8000",
    out: Out = RESULTS,
    fresh: Fresh = False,
    threads: opt.Threads = None,
) -> None:
    """Does the model still find a sentence in a long text? Ten depths, two turns, beside dense attention.

    Rows that the result file holds already are kept. For a quick look: --lengths 2048 --topks 64.
    """
    from octavo.bench import topk_needle as bench

    def measure(**common: Any) -> dict[str, Any]:
        settings = bench.Settings(
            modes=tuple(names(modes)),
            topks=numbers(topks),
            dense_layers=_layers(dense_layers),
            lengths=numbers(lengths),
        )
        return bench.run(model, text, settings, threads=threads, **common)

    _run(bench, measure, out / "topk_needle.json", fresh)


def _layers(text: str) -> tuple[int, ...]:
    return () if text == "none" else opt.parse_layers(text)


def _run(bench: ModuleType, measure: Callable[..., dict[str, Any]], path: Path, fresh: bool) -> None:
    with plainly():
        path.parent.mkdir(parents=True, exist_ok=True)
        known = path.is_file() and not fresh
        result = measure(
            found=json.loads(path.read_text(encoding="utf-8")) if known else None,
            report=reporter(),
            save=lambda so_far: write_json(path, {"command": command_line()} | so_far),
        )
        bench.draw(result, path.with_suffix(".png"))
    console().print(bench.table(result))
    for goal in result["goals"]:
        print(f"{goal['goal']}: {'met by ' + ', '.join(goal['by']) if goal['met'] else 'missed'}")
    print(f"written: {path} and {path.with_suffix('.png').name}")
