"""Tables and plot of the scaling bench."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table


def _short(tokens: int) -> str:
    return f"{tokens // 1024}k" if tokens >= 1024 and tokens % 1024 == 0 else str(tokens)


def _axes(rows: list[dict[str, Any]]) -> tuple[list[int], list[int]]:
    """Streams and contexts that were measured, in order."""
    return sorted({row["streams"] for row in rows}), sorted({row["context"] for row in rows})


def show(result: dict[str, Any], console: Console) -> None:
    """Print the tables, and name what was skipped."""
    speeds = result["speeds"]
    for weights, rows in result["weights"].items():
        streams, contexts = _axes(rows)
        at = {(row["streams"], row["context"]): row for row in rows}
        table = Table(
            title=f"{result['model']}, weights={weights}, {result['threads']} threads: tokens/s, ms a step, "
            f"share of the bound ({speeds['read_gb_per_s']:.1f} GB/s, {speeds['gflop_per_s']:.0f} GFLOP/s)"
        )
        table.add_column("streams", justify="right")
        for context in contexts:
            table.add_column(f"{_short(context)} tokens", justify="right")
        for count in streams:
            cells = [at.get((count, context)) for context in contexts]
            table.add_row(str(count), *("skipped" if row is None else _cell(row) for row in cells))
        console.print(table)
    for row in result["skipped"]:
        console.print(f"skipped {row['streams']} x {row['context']}: {row['reason']}")
    table = Table(title="host: milliseconds of schedule() and update() a step, 64 running")
    for title in ("case", "median", "p99", "longest", "evictions", "cached blocks"):
        table.add_column(title, justify="left" if title == "case" else "right")
    for row in result["scheduling"]:
        table.add_row(
            row["name"],
            f"{row['median_ms']:.3f}",
            f"{row['p99_ms']:.3f}",
            f"{row['max_ms']:.3f}",
            f"{row['evictions']:,}",
            f"{row['cached_blocks_before']:,} to {row['cached_blocks_after']:,}",
        )
    console.print(table)


def _cell(row: dict[str, Any]) -> str:
    return f"{row['tokens_per_s']:.1f}, {row['ms']:.1f} ms, {row['share_of_bound']:.0%}"


def plot(result: dict[str, Any], path: Path) -> None:
    """Tokens/s by streams, one line a context, the bound of each dashed; a panel for each kind of weights."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    panels = result["weights"]
    figure, all_axes = plt.subplots(
        1, len(panels), figsize=(6.5 * len(panels), 5.5), sharey=True, squeeze=False, layout="constrained"
    )
    for axes, (weights, rows) in zip(all_axes[0], panels.items(), strict=True):
        streams, contexts = _axes(rows)
        for i, context in enumerate(contexts):
            line = [row for row in rows if row["context"] == context]
            xs = [row["streams"] for row in line]
            colour = plt.get_cmap("viridis")(0.9 * i / max(1, len(contexts) - 1))
            measured = [row["tokens_per_s"] for row in line]
            axes.plot(xs, measured, marker="o", markersize=4, color=colour, label=f"{_short(context)} tokens")
            axes.plot(xs, [row["bound_tokens_per_s"] for row in line], "--", linewidth=1, color=colour)
        axes.plot([], [], "--", linewidth=1, color="grey", label="bound")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(streams)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
        axes.set_xlabel("streams")
        axes.set_title(f"weights={weights}")
        axes.grid(True, which="major", alpha=0.3)
        axes.legend(title="context of a stream", fontsize=8, loc="lower right")
    all_axes[0][0].set_ylabel("tokens/s, all streams")
    speeds = result["speeds"]
    figure.suptitle(
        f"Decoding, {result['model']}, float32 K and V; "
        f"{result['threads']} threads, {result['machine']['cpu']}\n"
        f"bound: {speeds['read_gb_per_s']:.1f} GB/s read, {speeds['gflop_per_s']:.0f} GFLOP/s",
        fontsize=11,
    )
    figure.savefig(path, dpi=150)
    plt.close(figure)
