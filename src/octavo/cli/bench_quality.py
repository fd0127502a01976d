"""The commands of ``octavo bench`` about what attention and weights cost in quality, and C2PSA's in all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

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


def perplexity(
    model: opt.Model = DEFAULT_MODEL,
    text: Annotated[Path, typer.Option(metavar="FILE", help="The text that is scored.")] = TEXT,
    weights: Annotated[
        str,
        typer.Option(
            metavar="NAMES",
            help="Ways of keeping the weights, by commas; q8_0/int8 has activations in int8 too. "
            "The first is the measure.",
        ),
    ] = "float32,q8_0,q4_1",
    window: Annotated[int, typer.Option(min=2, help="Tokens of a window; its second half is scored.")] = 2048,
    max_windows: Annotated[
        int | None, typer.Option(min=1, help="Score no more than this many windows.")
    ] = None,
    out: Out = RESULTS,
    threads: opt.Threads = None,
) -> None:
    """What it costs in quality to quantise a model at load, or its activations.

    Needs a checkpoint of float weights for q8_0 and q4_1, such as a folder of safetensors.
    """
    from octavo.bench import perplexity as bench

    with plainly():
        out.mkdir(parents=True, exist_ok=True)
        result = bench.run(
            model,
            [name.strip() for name in weights.split(",") if name.strip()],
            text,
            window=window,
            max_windows=max_windows,
            options={"num_threads": threads, "kv_cache_memory": "1GiB"},
            report=reporter(),
        )
        write_json(out / "perplexity.json", {"command": command_line()} | result)
    console().print(bench.table(result))
    print(f"written: {out / 'perplexity.json'}")


def quality(  # noqa: PLR0913  (each argument is an option of the command)
    data: Annotated[
        Path, typer.Option(metavar="FILE", help="A TSV file of labelled texts: label, text, maybe text2.")
    ],
    out: Annotated[
        Path,
        typer.Option(
            "--out",
            metavar="JSON",
            help="Where the result goes; the runs that it holds already are not run again.",
        ),
    ] = RESULTS / "quality.json",
    model: Annotated[str, typer.Option(metavar="MODEL", help="The encoder that is fine-tuned.")] = "minilm",
    steps: Annotated[int, typer.Option(min=1, help="Steps of each run.")] = 200,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each attention.")] = 3,
    rows: Annotated[int | None, typer.Option(min=10, help="Rows of the file, drawn at random.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Rows of a step.")] = 32,
    lr: Annotated[float, typer.Option(metavar="RATE", help="Highest learning rate, for all.")] = 1e-4,
    rates: Annotated[str, typer.Option(metavar="NUMBERS", help="compress_rate of C2PSA.")] = "1,2,4",
    topks: Annotated[str, typer.Option(metavar="NUMBERS", help="topk of C2PSA.")] = "8,32",
    projected_len: Annotated[int, typer.Option(min=1, help="Rows of Linformer's keys and values.")] = 32,
    recovery_steps: Annotated[
        int, typer.Option(min=0, help="Steps of Adam a layer that fit fewer heads to the texts.")
    ] = 60,
    threads: opt.Threads = None,
) -> None:
    """What an attention costs in quality: MHA, Linformer and C2PSA fine-tuned on the same rows.

    A fifth of the rows is held out. Runs with all rows and three seeds take one or two hours on two cores.
    """
    from octavo.bench import quality as bench
    from octavo.engine.resources import usable_cpus

    with plainly():
        settings = bench.QualitySettings(
            steps=steps,
            seeds=seeds,
            rows=rows,
            batch_size=batch_size,
            lr=lr,
            rates=numbers(rates),
            topks=numbers(topks),
            projected_len=projected_len,
            recovery_steps=recovery_steps,
            threads=threads or usable_cpus(),
        )
        out.parent.mkdir(parents=True, exist_ok=True)
        result = bench.run(
            model,
            data,
            settings,
            found=json.loads(out.read_text(encoding="utf-8")) if out.is_file() else None,
            report=reporter(),
            save=lambda so_far: write_json(out, {"command": command_line()} | so_far),
        )
    console().print(bench.table(result))
    for goal in result["goals"]:
        print(f"{goal['goal']}: {goal['found']:+.2f}, {'met' if goal['met'] else 'missed'}")
    print(f"written: {out}")


def conversion(
    text: Annotated[
        Path, typer.Option(metavar="FILE", help="Fitted to, but for its last fifth, which is measured on.")
    ] = TEXT,
    out: Annotated[
        Path,
        typer.Option(metavar="JSON", help="Where the result goes; the cases that it holds already are kept."),
    ] = RESULTS / "conversion.json",
    steps: Annotated[int, typer.Option(min=0, help="Steps of Adam a layer.")] = 60,
    learning_rate: Annotated[float, typer.Option(min=1e-8, max=1.0, help="Adam's, at the start.")] = 1e-3,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    scale: Annotated[int, typer.Option(min=1, help="So many times fewer tokens of text.")] = 1,
    threads: opt.Threads = None,
) -> None:
    """What converting models to fewer heads costs: mean-pooled, aligned, and fitted to a text.

    SmolLM2 at rate 3 and MiniLM at rates 2 and 4; takes some minutes.
    """
    from octavo.bench import conversion as bench
    from octavo.cli.convert import bar
    from octavo.convert.recover import Recovery
    from octavo.engine.resources import usable_cpus

    with plainly():
        out.parent.mkdir(parents=True, exist_ok=True)
        result = bench.run(
            text,
            cases=bench.scaled(scale),
            recovery=Recovery(steps=steps, learning_rate=learning_rate, seed=seed),
            threads=threads or usable_cpus(),
            found=json.loads(out.read_text(encoding="utf-8")) if out.is_file() else None,
            progress=bar,
            save=lambda so_far: write_json(out, {"command": command_line()} | so_far),
        )
    console().print(bench.table(result))
    print(f"written: {out}")


def c2psa(
    sections: Annotated[
        str, typer.Option(metavar="NAMES", help="times, memory, or sections by name, separated by commas.")
    ] = "times,memory",
    rounds: Annotated[int, typer.Option(min=1, help="Timed rounds; the attentions take turns in each.")] = 5,
    memory_limit: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="What would need more is fitted, not run; half of the free memory by default.",
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="Where memory is measured: cpu, cuda or cuda:N.")] = "cpu",
    quick: Annotated[bool, typer.Option("--quick", help="Tiny shapes, to see that it runs.")] = False,
    out: Out = RESULTS,
    threads: opt.Threads = None,
) -> None:
    """What C2PSA costs beside standard, grouped-query and Linformer attention.

    times: batch-time, length-time, heads. memory: batch-memory, length-memory, bert, each number from a fresh
    process. Sections that are not asked for stay as they are in the JSON.
    """
    from octavo.bench import c2psa as bench
    from octavo.bench import c2psa_report
    from octavo.bench.c2psa_variants import MEMORIES, QUICK, TIMES, C2psaSettings
    from octavo.engine.resources import available_memory, parse_size, usable_cpus

    file, groups = out / "c2psa.json", {"times": TIMES, "memory": MEMORIES}
    with plainly():
        settings = C2psaSettings(
            sections=tuple(s for name in names(sections) for s in groups.get(name, (name,))),
            threads=threads or usable_cpus(),
            memory_limit=available_memory() // 2 if memory_limit is None else parse_size(memory_limit),
            rounds=rounds,
            device=device,
            **QUICK if quick else {},
        )
        out.mkdir(parents=True, exist_ok=True)
        result = bench.run(
            settings,
            command=command_line(),
            found=json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None,
            report=reporter(),
            save=lambda so_far: write_json(file, so_far),
        )
        written = [file]
        if c2psa_report.plot(result, out / "c2psa.png"):
            written.append(out / "c2psa.png")
    for table in c2psa_report.tables(result):
        console().print(table)
    for goal in result["goals"]:
        print(f"{goal['goal']}: {goal['found']:.3f}, {'met' if goal['met'] else 'missed'}")
    print(f"written: {', '.join(map(str, written))}")
