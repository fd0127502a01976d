"""``octavo bench``: the measurements that the project's claims stand on."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from octavo.cli import bench_history, bench_quality, bench_topk
from octavo.cli import options as opt
from octavo.cli.bench_output import (
    CHATS,
    RESULTS,
    TEXT,
    Chats,
    Out,
    command_line,
    console,
    names,
    reporter,
    write_json,
)
from octavo.cli.errors import USAGE, plainly
from octavo.weights.hub import DEFAULT_MODEL

app = typer.Typer(
    help="Measure attention, linear layers, scaling, throughput, serving, quality: a table and JSON each."
)

PEERS = Path(".peers")

app.command("perplexity")(bench_quality.perplexity)
app.command("quality")(bench_quality.quality)
app.command("conversion")(bench_quality.conversion)
app.command("c2psa")(bench_quality.c2psa)
app.command("history")(bench_history.history)
app.add_typer(bench_topk.app, name="topk")


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
            console=console(),
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
            console=console(),
        )


@app.command("step")
def step(
    model: opt.Model = DEFAULT_MODEL,
    weights: Annotated[
        str,
        typer.Option(
            metavar="NAMES",
            help="Ways of keeping the weights, by commas; auto/int8 has activations in int8 too.",
        ),
    ] = "auto,auto/int8,float16,float32",
    context: Annotated[int, typer.Option(min=1, help="Tokens of the prompt.")] = 128,
    steps: Annotated[int, typer.Option(min=1, help="Steps that are timed.")] = 64,
    out: Out = RESULTS,
    threads: opt.Threads = None,
) -> None:
    """What a step of one stream spends in linear layers, in attention, and outside both.

    Needs a checkpoint of float weights for q8_0 and q4_1, such as a folder of safetensors.
    """
    from octavo.bench import step as bench
    from octavo.engine.resources import usable_cpus

    with plainly():
        out.mkdir(parents=True, exist_ok=True)
        result = bench.run(
            model,
            names(weights),
            context=context,
            steps=steps,
            threads=threads or usable_cpus(),
            report=reporter(),
        )
        write_json(out / "step.json", {"command": command_line()} | result)
    console().print(bench.table(result))
    print(f"written: {out / 'step.json'}")


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
            console=console(),
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
    from octavo.bench import throughput as bench
    from octavo.bench import throughput_report
    from octavo.engine.resources import usable_cpus

    with plainly(USAGE):
        settings = bench.Settings(
            model=model,
            text=text,
            keys=names(workloads),
            threads=threads or usable_cpus(),
            peers_dir=peers_dir,
            ours=names(ours),
            against=names(against),
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
            report=reporter(),
            save=lambda so_far: write_json(out / "throughput.json", so_far),
        )
        throughput_report.plot(result, out / "throughput.png")
    for table in throughput_report.tables(result):
        console().print(table)
    print(f"written: {out / 'throughput.json'}, {out / 'throughput.png'}")


@app.command("serve")
def serve(
    model: opt.Model = DEFAULT_MODEL,
    data: Chats = CHATS,
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
    Sections of the same model that are in serve.json already, and are not measured now, stay there.
    """
    from octavo.bench import serve as bench
    from octavo.bench import serve_report
    from octavo.bench.own_process import sigterm_unwinds
    from octavo.engine.resources import usable_cpus

    with plainly(USAGE):
        bench.check_sections(chosen := names(sections))
        settings = bench.Settings(
            model=model,
            data=data,
            seconds=seconds,
            repeats=repeats,
            sections=tuple(chosen),
            options=("--threads", str(threads or usable_cpus())),
            **bench.QUICK if quick else {},
        )
    with plainly(), sigterm_unwinds():
        out.mkdir(parents=True, exist_ok=True)
        earlier = bench.read_earlier(path := out / "serve.json")
        result = bench.run(
            settings,
            report=reporter(),
            save=lambda so_far: write_json(path, bench.joined(earlier, so_far, command_line())),
        )
        drawn = serve_report.plot(bench.joined(earlier, result, command_line()), out / "serve.png")
    for table in serve_report.tables(result):
        console().print(table)
    print(f"written: {path}" + f", {out / 'serve.png'}" * drawn)


@app.command("soak")
def soak(
    model: opt.Model = DEFAULT_MODEL,
    data: Chats = CHATS,
    minutes: Annotated[float, typer.Option(min=0.01, help="How long clients come.")] = 10.0,
    clients: Annotated[int, typer.Option(min=1, help="Clients at a time.")] = 24,
    out: Out = RESULTS,
) -> None:
    """Mixed traffic, clients that hang up and clients that send rubbish; then what is left of it.

    Fails when a block is lost, memory grew, an answer at temperature 0 is not the offline engine's, a call
    got anything but what it should, or a restart after a kill takes more than 5 seconds.
    """
    from octavo.bench import soak as bench
    from octavo.bench.own_process import sigterm_unwinds

    with plainly(), sigterm_unwinds():
        out.mkdir(parents=True, exist_ok=True)
        result = bench.run(
            bench.Settings(model=model, data=data, minutes=minutes, num_clients=clients),
            report=reporter(),
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
