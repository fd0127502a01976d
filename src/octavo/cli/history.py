"""``octavo bench history``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from octavo.cli import options as opt
from octavo.cli.bench_output import RESULTS, Out, command_line, reporter, write_json
from octavo.cli.errors import USAGE, CommandError, plainly
from octavo.weights.hub import DEFAULT_MODEL


def history(  # noqa: PLR0913  (each argument is an option of the command)
    model: opt.Model = DEFAULT_MODEL,
    data: Annotated[
        Path, typer.Option(metavar="FILE", help="Chats: a JSON list of what was said by turns, a line each.")
    ] = Path("conversations.jsonl"),
    sections: Annotated[
        str, typer.Option(metavar="NAMES", help="Which to run, separated by commas: restart, kills.")
    ] = "restart,kills",
    conversations: Annotated[int, typer.Option(min=1, help="Dialogues that go on after the restart.")] = 16,
    tokens: Annotated[int, typer.Option(min=1, help="Length of each.")] = 4096,
    kills: Annotated[int, typer.Option(min=1, help="Kills at random moments.")] = 200,
    kv_cache_memory: opt.KVCacheMemory = "1GiB",
    kv_dtype: opt.KVDtype = "float32",
    out: Out = RESULTS,
    threads: opt.Threads = None,
) -> None:
    """Dialogues across a restart, by way of --cache-dir.

    restart: the time to the first token of the next turn after kill -9, from disk and computed again. kills:
    a server that is killed while it writes; it must open its store every time and answer as a cold one does.
    """
    from octavo.bench import history as bench
    from octavo.bench.own_process import sigterm_unwinds
    from octavo.engine.build import read_tokenizer
    from octavo.engine.resources import usable_cpus
    from octavo.weights import hub
    from octavo.weights.load import open_checkpoint

    names = tuple(name.strip() for name in sections.split(","))
    for name in names:
        if name not in bench.SECTIONS:
            raise CommandError(
                f"{name!r:.60} is not a section; these are: {', '.join(bench.SECTIONS)}", USAGE
            )
    written = out / "history_restart.json"

    def save(so_far: dict[str, Any]) -> None:
        write_json(written, {"command": command_line()} | so_far)

    with plainly(), sigterm_unwinds():
        out.mkdir(parents=True, exist_ok=True)
        settings = bench.Settings(
            model=model,
            data=data,
            conversations=conversations,
            tokens=tokens,
            kills=kills,
            sections=names,
            options=(
                f"--threads={threads or usable_cpus()}",
                f"--kv-cache-memory={kv_cache_memory}",
                f"--kv-dtype={kv_dtype}",
            ),
        )
        result = bench.run(
            settings,
            read_tokenizer(open_checkpoint(hub.resolve(model))),
            report=reporter(),
            save=save,
        )
    for line in _lines(result):
        print(line)
    print(f"written: {written}")
    raise typer.Exit(0 if result["passed"] else 1)


def _lines(result: dict[str, Any]) -> list[str]:
    lines = list(result["faults"])
    if "restart" in result:
        row = result["restart"]
        warm, cold = (row[name]["first_token_s"]["median"] for name in ("from_disk", "computed_again"))
        lines.append(
            f"next turn of {row['conversations']} dialogues: first token after {warm:.3f} s from disk, "
            f"{cold:.3f} s computed again: {row['times_sooner']} times sooner, goal {row['goal']:g} "
            f"{'met' if row['met'] else 'missed'}; {row['same_answers']} answers are the same to the bit"
        )
    if "kills" in result:
        row = result["kills"]
        lines.append(
            f"{row['kills']} kills: opened {row['opened']} times, {row['answers_compared']} answers, "
            f"{row['disk_cached_tokens']} of their tokens from disk, {row['damaged']} records damaged"
        )
    return lines
