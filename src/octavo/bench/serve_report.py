"""Tables and plot of the server's bench."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.table import Table

LOADS = {"rates": "chats a second", "streams": "chats at once", "shares": "share of the system prompt"}


def tables(result: dict[str, Any]) -> Iterator[Table]:
    """A table for each section."""
    for name, title in LOADS.items():
        if name in result:
            yield _load_table(name, title, result)
    if "http" in result:
        row = result["http"]
        table = Table(title=f"{row['streams']} streams of {row['new_tokens']} tokens")
        for column in ("offline tok/s", "HTTP tok/s", "cost", "event loop, CPU", "same answers"):
            table.add_column(column, justify="right")
        speeds = (f"{row['offline_tokens_per_s']:.1f}", f"{row['http_tokens_per_s']:.1f}")
        loop = f"{row['event_loop_us_per_token']:.0f} us a token, {row['event_loop_cpu_share']:.1%}"
        table.add_row(*speeds, f"{row['cost']:.1%}", loop, "yes" if row["same_answers"] else "NO")
        yield table
    if "long" in result:
        yield _long_table(result["long"])


def _load_table(name: str, title: str, result: dict[str, Any]) -> Table:
    table = Table(title=f"{result['model']}: milliseconds as p50 / p95 / p99")
    columns = (title, "turns", "first token", "between tokens", "tok/s", "turns/s", "good turns/s", "cached")
    for column in columns:
        table.add_column(column, justify="right")
    for row in result[name]:
        table.add_row(
            f"{row[name]:g}",
            f"{row['turns_ended']} of {row['turns_begun']}",
            _three(row["time_to_first_token_ms"]),
            _three(row["inter_token_ms"]),
            f"{row['output_tokens_per_s']:.1f}",
            f"{row['turns_per_s']:.2f}",
            f"{row['good_turns_per_s']:.2f}",
            "-" if row["cached_share"] is None else f"{row['cached_share']:.0%}",
        )
    return table


def _long_table(rows: list[dict[str, Any]]) -> Table:
    first = rows[0]
    table = Table(
        title=f"a prompt of {first['prompt_tokens']} tokens into {first['streams']} answers; "
        "gaps in milliseconds as p50 / p95 / p99"
    )
    columns = (
        "--step-ms",
        "before",
        "during",
        "p99 goal",
        "met",
        "prefill tok/s",
        "alone",
        "answers",
    )
    for column in columns:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            str(row["step_ms"]),
            _three(row["before_ms"]),
            _three(row["during_ms"]),
            f"{row['goal_ms']:.0f}",
            "yes" if row["met"] else "no",
            f"{row['prefill_tokens_per_s']:.0f}",
            f"{row['alone_prefill_tokens_per_s']:.0f}",
            f"{row['tokens_per_s_before']:.0f} to {row['tokens_per_s_during']:.0f} tok/s",
        )
    return table


def _three(values: dict[str, float | None]) -> str:
    return " / ".join("-" if values[p] is None else f"{values[p]:.0f}" for p in ("p50", "p95", "p99"))


def plot(result: dict[str, Any], path: Path) -> bool:
    """Latencies and throughput of each load, a column each. False, and nothing drawn, without one."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import LogLocator, NullFormatter

    names = [name for name in LOADS if name in result]
    if not names:
        return False
    figure, axes = plt.subplots(
        3, len(names), figsize=(4.6 * len(names), 9), squeeze=False, layout="constrained"
    )
    latencies = {"time_to_first_token_ms": "to the first token, ms", "inter_token_ms": "between tokens, ms"}
    for column, name in enumerate(names):
        rows = result[name]
        xs = [f"{row[name]:g}" for row in rows]
        for line, (key, label) in enumerate(latencies.items()):
            for p in ("p50", "p95", "p99"):
                axes[line][column].plot(xs, [row[key][p] for row in rows], marker="o", label=p)
            axes[line][column].set_yscale("log")
            axes[line][column].yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes[line][column].yaxis.set_major_formatter("{x:g}")
            axes[line][column].yaxis.set_minor_formatter(NullFormatter())
            axes[line][column].grid(axis="y", alpha=0.3)
            axes[line][column].set_ylabel(label)
        last = axes[2][column]
        last.plot(xs, [row["output_tokens_per_s"] for row in rows], marker="o", color="black")
        last.set_ylabel("tokens/s (black)")
        last.set_ylim(bottom=0)
        turns = last.twinx()
        for key, marker in (("turns_per_s", "s--"), ("good_turns_per_s", "^:")):
            label = key.replace("_per_s", "/s").replace("_", " ")
            turns.plot(xs, [row[key] for row in rows], marker, label=label)
        turns.set_ylim(bottom=0)
        turns.set_ylabel("turns/s")
        turns.legend(fontsize=8)
        last.set_xlabel(LOADS[name])
    axes[0][0].legend(fontsize=8)
    figure.suptitle(f"octavo serve, {result['model']}")
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return True
