"""``octavo bench history``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo.cli import options as opt
from octavo.cli.bench_output import (
    CHATS,
    RESULTS,
    TEXT,
    Chats,
    Out,
    command_line,
    names,
    numbers,
    reporter,
    write_json,
)
from octavo.cli.errors import USAGE, CommandError, plainly
from octavo.weights.hub import DEFAULT_MODEL

if TYPE_CHECKING:
    from octavo.bench.history_run import Settings


def history(  # noqa: PLR0913  (each argument is an option of the command)
    model: opt.Model = DEFAULT_MODEL,
    data: Chats = CHATS,
    text: Annotated[
        Path, typer.Option(metavar="FILE", help="What perplexity is measured on, and needles lie in.")
    ] = TEXT,
    sections: Annotated[
        str,
        typer.Option(
            metavar="NAMES",
            help="Which to run: memory, host, turns, quality, budget, restart, kills, pressure.",
        ),
    ] = "memory,host,turns,restart",
    lengths: Annotated[
        str, typer.Option(metavar="NUMBERS", help="All but the last three: tokens of a dialogue or a text.")
    ] = "2048,4096,8192",
    long: Annotated[
        str, typer.Option(metavar="NUMBERS", help="turns: tokens over a random model; none for not.")
    ] = "8192,16384,32768",
    conversations: Annotated[
        int, typer.Option(min=1, help="restart, pressure: how many dialogues there are.")
    ] = 16,
    tokens: Annotated[int, typer.Option(min=512, help="restart, pressure: the length of each.")] = 4096,
    kills: Annotated[int, typer.Option(min=1, help="Kills at random moments.")] = 200,
    minutes: Annotated[float, typer.Option(min=0.01, help="How long the small pool is pressed.")] = 20.0,
    history: opt.History = "exact",
    kv_cache_memory: opt.KVCacheMemory = "1GiB",
    kv_dtype: opt.KVDtype = "float32",
    out: Out = RESULTS,
    threads: opt.Threads = None,
) -> None:
    """Long dialogues: what their history takes and costs, and that it outlives the process.

    memory: how many conversations a pool holds with exact and compact history. host: the work of a turn
    beside the model. turns: the time of the next turn. quality: perplexity and a sentence to be found again.
    budget: perplexity where the oldest history is read as summaries.
    restart: the next turn after kill -9, from disk and computed again. kills: a server that is killed while
    it writes. pressure: a pool that holds a quarter of the live history. The last three run a server with
    --history, --kv-dtype and, but for pressure, --kv-cache-memory.
    """
    from octavo.bench import history as bench
    from octavo.bench import history_pressure, history_quality, history_report, history_run
    from octavo.bench.own_process import sigterm_unwinds
    from octavo.engine.resources import usable_cpus

    written = out / "history.json"
    with plainly(USAGE):
        history_run.check_sections(chosen := tuple(names(sections)))
    with plainly(), sigterm_unwinds():
        server = (f"--threads={threads or usable_cpus()}",)
        kept = (f"--kv-cache-memory={kv_cache_memory}", f"--kv-dtype={kv_dtype}", f"--history={history}")
        sizes = numbers(lengths)
        settings: Settings = history_run.Settings(
            model=model,
            data=data,
            text=text,
            sections=chosen,
            threads=threads,
            memory=history_run.Memory(tokens=max(sizes)),
            turns=history_run.Turns(lengths=sizes, long=() if long == "none" else numbers(long)),
            quality=history_quality.Settings(
                windows=sizes, lengths=tuple(min(n, 8000) for n in sizes), tokens=max(sizes)
            ),
            restart=bench.Settings(
                model=model,
                conversations=conversations,
                tokens=tokens,
                kills=kills,
                options=(*server, *kept),
            ),
            pressure=history_pressure.Settings(
                model=model,
                minutes=minutes,
                conversations=conversations,
                tokens=tokens,
                options=server,
                history=history,
                kv_dtype=kv_dtype,
            ),
        )
        out.mkdir(parents=True, exist_ok=True)
        result = history_run.run(
            settings,
            command=command_line(),
            earlier=_earlier(written),
            report=reporter(),
            save=lambda so_far: write_json(written, so_far),
        )
        drawn = "turns" in chosen and history_report.draw(result, written.with_suffix(".png"))
    asked = {name: result[name] for name in chosen}
    broken = history_run.faults(asked)
    for line in broken + history_report.lines(asked):
        print(line)
    print(f"written: {written}" + (f" and {written.with_suffix('.png').name}" if drawn else ""))
    raise typer.Exit(1 if broken else 0)


def _earlier(path: Path) -> dict[str, Any]:
    """What an earlier run wrote; nothing where there is none. Raises CommandError for what is no result."""
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        found = None
    if not isinstance(found, dict) or found.get("bench") != "history":
        raise CommandError(f"{path} is no result of bench history: move it away, or name another --out")
    return found
