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
    help="Measure attention, linear layers, scaling, throughput, serving, quality: a table and JSON each."
)

RESULTS = Path("benchmarks/results")
TEXT = Path("benchmarks/data/moby-dick-300k.txt")
PEERS = Path(".peers")
CHATS = Path("conversations.jsonl")

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


@app.command("topk")
def topk(
    attn_topk: Annotated[int, typer.Option(min=1, help="Keys kept for each query and head.")] = 128,
    rounds: Annotated[int, typer.Option(min=1, help="Timed rounds; dense and exact take turns.")] = 7,
    quick: Annotated[bool, typer.Option("--quick", help="1,024 keys only, for a quick look.")] = False,
    out: Out = RESULTS,
    threads: opt.Threads = None,
) -> None:
    """What exact top-k attention costs in decode beside dense attention: time and bytes read."""
    from octavo.bench.topk import bench_topk
    from octavo.engine.resources import usable_cpus

    with plainly():
        out.mkdir(parents=True, exist_ok=True)
        bench_topk(
            threads=threads or usable_cpus(),
            command=command_line(),
            output=out,
            topk=attn_topk,
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


@app.command("scaling")
def scaling(
    model: opt.Model = DEFAULT_MODEL,
    token_budget: Annotated[
        int, typer.Option(min=1, metavar="TOKENS", help="Skip what holds more tokens of context together.")
    ] = 262_144,
    quick: Annotated[
        bool, typer.Option("--quick", help="A tiny random model and a few cells, to see that it runs.")
    ] = False,
    out: Out = RESULTS,
    threads: opt.Threads = None,
) -> None:
    """What more streams and longer contexts cost, beside what the machine allows.

    Decode steps of 1 to 128 streams over 128 to 8,192 tokens, and the host's cost of scheduling.
    """
    from octavo.bench.scaling import bench_scaling
    from octavo.engine.resources import usable_cpus

    with plainly():
        out.mkdir(parents=True, exist_ok=True)
        bench_scaling(
            model,
            threads=threads or usable_cpus(),
            command=command_line(),
            token_budget=token_budget,
            output=out,
            quick=quick,
            console=_console(),
        )


@app.command("throughput")
def throughput(  # noqa: PLR0913  (each argument is an option of the command)
    model: opt.Model = DEFAULT_MODEL,
    text: Annotated[Path, typer.Option(metavar="FILE", help="The text that prompts are cut from.")] = TEXT,
    workloads: Annotated[
        str, typer.Option(metavar="KEYS", help="Which to run, separated by commas.")
    ] = "a,b,c,d,e,e8k",
    ours: Annotated[
        str, typer.Option(metavar="NAMES", help="Rows of octavo: octavo for all, or such as octavo-fp32.")
    ] = "octavo",
    against: Annotated[
        str,
        typer.Option(
            metavar="NAMES",
            help="Peers: transformers, openvino, llama.cpp, vllm, or rows such as llama.cpp-q8_0; or none.",
        ),
    ] = "transformers",
    peers_dir: Annotated[
        Path, typer.Option(metavar="FOLDER", help="The peers' environments, from `make peers`, and weights.")
    ] = PEERS,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of octavo; the median counts.")] = 3,
    peer_repeats: Annotated[int, typer.Option(min=1, help="Runs of each peer.")] = 3,
    limit: Annotated[
        int,
        typer.Option(min=1, metavar="SECONDS", help="A run that takes longer is stopped."),
    ] = 120,
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
    """The same requests through octavo and through other engines.

    a: 1 stream. b: 32 requests. c: 32 with a long shared prefix. d: 8 chats of 6 turns. e, e8k: one prompt
    of 4,096 or 8,000 tokens.

    Each row and workload runs in a process of its own, greedy, with weights from the one model.
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
            keys=_names(workloads),
            threads=threads or usable_cpus(),
            peers_dir=peers_dir,
            ours=_names(ours),
            against=_names(against),
            repeats=repeats,
            peer_repeats=peer_repeats,
            limit_s=limit,
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
    for table in throughput_report.tables(result):
        _console().print(table)
    print(f"written: {out / 'throughput.json'}, {out / 'throughput.png'}")


@app.command("serve")
def serve(
    model: opt.Model = DEFAULT_MODEL,
    data: Annotated[
        Path, typer.Option(metavar="FILE", help="Chats: a JSON list of what was said by turns, a line each.")
    ] = CHATS,
    sections: Annotated[
        str, typer.Option(metavar="NAMES", help="Which to run, separated by commas.")
    ] = "rates,streams,shares,http,long",
    seconds: Annotated[float, typer.Option(min=0.1, help="Length of each load.")] = 20.0,
    repeats: Annotated[int, typer.Option(min=1, help="Turns of offline engine and server in http.")] = 3,
    quick: Annotated[bool, typer.Option("--quick", help="Two values of each, to see that it runs.")] = False,
    out: Out = RESULTS,
    threads: opt.Threads = None,
) -> None:
    """What people behind HTTP get: times to the first token, gaps between tokens, throughput, goodput.

    rates: chats that arrive at random. streams: so many chats at once. shares: how much of the system prompt
    all have in common. http: what HTTP costs beside the offline engine. long: a long prompt into 16 answers.
    """
    from rich.console import Console

    from octavo.bench import serve as bench
    from octavo.bench import serve_report
    from octavo.bench.own_process import sigterm_unwinds
    from octavo.engine.resources import usable_cpus

    console = Console(stderr=True, soft_wrap=True)
    with plainly(USAGE):
        names = _names(sections)
        bench.check_sections(names)
        settings = bench.Settings(
            model=model,
            data=data,
            seconds=seconds,
            repeats=repeats,
            sections=tuple(names),
            options=("--threads", str(threads or usable_cpus())),
            **bench.QUICK if quick else {},
        )
    with plainly(), sigterm_unwinds():
        out.mkdir(parents=True, exist_ok=True)
        result = bench.run(
            settings,
            report=lambda line: console.print(line, style="dim", markup=False),
            save=lambda so_far: write_json(out / "serve.json", {"command": command_line()} | so_far),
        )
        written = [out / "serve.json"]
        if serve_report.plot(result, out / "serve.png"):
            written.append(out / "serve.png")
    for table in serve_report.tables(result):
        _console().print(table)
    print(f"written: {', '.join(map(str, written))}")


@app.command("soak")
def soak(
    model: opt.Model = DEFAULT_MODEL,
    data: Annotated[
        Path, typer.Option(metavar="FILE", help="Chats: a JSON list of what was said by turns, a line each.")
    ] = CHATS,
    minutes: Annotated[float, typer.Option(min=0.01, help="How long clients come.")] = 10.0,
    clients: Annotated[int, typer.Option(min=1, help="Clients at a time.")] = 24,
    out: Out = RESULTS,
) -> None:
    """Mixed traffic, clients that hang up and clients that send rubbish; then what is left of it.

    Fails when a block is lost, memory grew, an answer at temperature 0 is not the offline engine's, a call
    got anything but what it should, or a restart after a kill takes more than 5 seconds.
    """
    from rich.console import Console

    from octavo.bench import soak as bench
    from octavo.bench.own_process import sigterm_unwinds

    console = Console(stderr=True, soft_wrap=True)
    with plainly(), sigterm_unwinds():
        out.mkdir(parents=True, exist_ok=True)
        result = bench.run(
            bench.Settings(model=model, data=data, minutes=minutes, num_clients=clients),
            report=lambda line: console.print(line, style="dim", markup=False),
        )
        write_json(out / "soak.json", {"command": command_line()} | result)
    for sentence in result["faults"]:
        print(sentence)
    print(
        f"{'passed' if result['passed'] else 'FAILED'}: {sum(result['calls'].values())} calls, "
        f"{result['answers_compared']} answers compared, memory {result['resident_growth']:+.1%}, "
        f"restart {result['restart_s']} s; written: {out / 'soak.json'}"
    )
    raise typer.Exit(0 if result["passed"] else 1)


@app.command("perplexity")
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
    from rich.console import Console

    from octavo.bench import perplexity as bench

    console = Console(stderr=True, soft_wrap=True)
    with plainly():
        out.mkdir(parents=True, exist_ok=True)
        result = bench.run(
            model,
            [name.strip() for name in weights.split(",") if name.strip()],
            text,
            window=window,
            max_windows=max_windows,
            options={"num_threads": threads, "kv_cache_memory": "1GiB"},
            report=lambda line: console.print(line, style="dim", markup=False),
        )
        write_json(out / "perplexity.json", {"command": command_line()} | result)
    _console().print(bench.table(result))
    print(f"written: {out / 'perplexity.json'}")


@app.command("quality")
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
    threads: opt.Threads = None,
) -> None:
    """What an attention costs in quality: MHA, Linformer and C2PSA fine-tuned on the same rows.

    A fifth of the rows is held out. Runs with all rows and three seeds take one or two hours on two cores.
    """
    from rich.console import Console

    from octavo.bench import quality as bench
    from octavo.engine.resources import usable_cpus

    console = Console(stderr=True, soft_wrap=True)
    with plainly():
        settings = bench.QualitySettings(
            steps=steps,
            seeds=seeds,
            rows=rows,
            batch_size=batch_size,
            lr=lr,
            rates=_numbers(rates),
            topks=_numbers(topks),
            projected_len=projected_len,
            threads=threads or usable_cpus(),
        )
        out.parent.mkdir(parents=True, exist_ok=True)
        result = bench.run(
            model,
            data,
            settings,
            found=json.loads(out.read_text(encoding="utf-8")) if out.is_file() else None,
            report=lambda line: console.print(line, style="dim", markup=False),
            save=lambda so_far: write_json(out, {"command": command_line()} | so_far),
        )
    _console().print(bench.table(result))
    for goal in result["goals"]:
        print(f"{goal['goal']}: {goal['found']:+.2f}, {'met' if goal['met'] else 'missed'}")
    print(f"written: {out}")


def _numbers(text: str) -> tuple[int, ...]:
    """Whole numbers separated by commas."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdigit() and 0 < int(word) < 10**9 for word in words):
        raise ValueError(f"expected whole numbers separated by commas, got {text!r:.100}")
    return tuple(int(word) for word in words)


@app.command("conversion")
def conversion(
    text: Annotated[
        Path, typer.Option(metavar="FILE", help="Fitted to, but for its last fifth, which is measured on.")
    ] = TEXT,
    out: Annotated[Path, typer.Option(metavar="JSON", help="The file that is written.")] = RESULTS
    / "conversion.json",
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
            progress=bar,
            save=lambda so_far: write_json(out, {"command": command_line()} | so_far),
        )
    _console().print(bench.table(result))
    print(f"written: {out}")


def _names(text: str) -> list[str]:
    """Names separated by commas; "none" is none."""
    names = [name.strip() for name in text.split(",")]
    return [name for name in names if name and name != "none"]


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
