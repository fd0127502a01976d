"""The throughput bench's table and plot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.table import Table

from octavo.bench.throughput import METRICS, OURS


def rows(result: dict[str, Any]) -> list[tuple[str, str, str, float]]:
    """(workload, metric, peer or "", goal) for every number worth a line: those with a goal."""
    return [
        (key, metric, peer, workload["goals"][metric])
        for key, workload in result["workloads"].items()
        for metric in workload["goals"]
        for peer in (workload["comparisons"] or {"": None})
    ]


def table(result: dict[str, Any]) -> Table:
    """Speeds, the ratio beside its goal, memory, and how far the tokens agree."""
    made = Table(
        "workload", "measure", "octavo", "peer", "ratio", "goal", "peak memory", "same tokens", "repeats"
    )
    for column in made.columns[2:6]:
        column.justify = "right"
    for key, metric, peer, goal in rows(result):
        workload = result["workloads"][key]
        ours = workload["engines"][OURS]
        cells = [f"{key}: {workload['title']}", METRICS[metric], f"{ours['median'][metric]:.1f}"]
        if peer:
            theirs, comparison = workload["engines"][peer], workload["comparisons"][peer]
            ratio, tokens = comparison["speed"][metric], comparison["tokens"]
            cells += [
                f"{peer} {theirs['median'][metric]:.1f}",
                f"[{'green' if ratio >= goal else 'red'}]{ratio:.2f}x[/]",
                f"{goal}x",
                f"{_mib(ours)} / {_mib(theirs)}",
                f"{tokens['share_before_divergence']:.0%}",
                f"{ours['repeats']} / {theirs['repeats']}",
            ]
        else:
            cells += ["-", "-", f"{goal}x", _mib(ours), "-", f"{ours['repeats']}"]
        made.add_row(*cells)
    return made


def _mib(engine: dict[str, Any]) -> str:
    return f"{engine['peak_bytes'] / 2**20:,.0f} MiB"


def plot(result: dict[str, Any], path: Path) -> None:
    """Octavo's speed as a multiple of each peer's, with the goals as black ticks, on a log axis."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    compared = [row for row in rows(result) if row[2]]
    figure, axes = plt.subplots(figsize=(1.6 + 1.5 * max(len(compared), 1), 4.8), layout="constrained")
    for x, (key, metric, peer, goal) in enumerate(compared):
        workload = result["workloads"][key]
        ratio = workload["comparisons"][peer]["speed"][metric]
        axes.bar(x, ratio, width=0.6, color="#2a7f62" if ratio >= goal else "#c9704b", zorder=2)
        axes.plot([x - 0.4, x + 0.4], [goal, goal], color="black", linewidth=2, zorder=3)
        speeds = " / ".join(f"{workload['engines'][e]['median'][metric]:.1f}" for e in (OURS, peer))
        axes.annotate(
            f"{ratio:.2f}x\n{speeds}",
            (x, max(ratio, goal)),
            ha="center",
            va="bottom",
            fontsize=8,
            xytext=(0, 4),
            textcoords="offset points",
        )
    axes.axhline(1.0, color="grey", linewidth=1, linestyle="--", zorder=1)
    axes.set_xticks(
        range(len(compared)),
        [f"({key}) {METRICS[metric]}\nvs {peer}" for key, metric, peer, _ in compared],
        fontsize=8,
    )
    axes.set_yscale("log")
    ratios = [
        result["workloads"][key]["comparisons"][peer]["speed"][metric] for key, metric, peer, _ in compared
    ]
    axes.set_ylim(min([0.5, *(ratio / 2 for ratio in ratios)]), max([12.0, *(2 * ratio for ratio in ratios)]))
    axes.set_ylabel("speed of octavo / speed of the peer")
    axes.set_title(
        f"{result['model']}, float32, {result['threads']} threads, {result['machine']['cpu']} (black: goal)",
        fontsize=9,
    )
    figure.savefig(path, dpi=130)
    plt.close(figure)
