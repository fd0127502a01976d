"""The throughput bench's tables and plot."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.table import Table

from octavo.bench.throughput import METRICS
from octavo.bench.variants import OURS, VARIANTS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MEASURES = METRICS | {"peak_bytes": "peak memory"}
#: Colours by family; a family's rows get lighter one after the other.
COLOURS = {
    OURS: "#1b7f5c",
    "transformers": "#8d6e63",
    "openvino": "#3f6fb5",
    "llama.cpp": "#c9704b",
    "vllm": "#8e63a8",
}


def tables(result: dict[str, Any]) -> list[Table]:
    """What each row did on each workload, the goals, and the rows that did not run, with the reason."""
    made = [_measured(result), _goals(result)]
    reasons = not_run(result)
    if reasons:
        missing = Table("did not run", "on", "why")
        for name, where, reason in reasons:
            missing.add_row(name, where, escape(reason))
        made.append(missing)
    return made


def not_run(result: dict[str, Any]) -> list[tuple[str, str, str]]:
    """(row, workloads, reason) of what is not installed or failed; the same reason is named once."""
    reasons: dict[tuple[str, str], list[str]] = {
        (name, reason): ["all"] for name, reason in result["missing"].items()
    }
    for key, workload in result["workloads"].items():
        for name, engine in workload["engines"].items():
            if "failed" in engine:
                reasons.setdefault((name, engine["failed"]), []).append(key)
    return [(name, ", ".join(keys), reason) for (name, reason), keys in reasons.items()]


def _measured(result: dict[str, Any]) -> Table:
    made = Table("workload", "row", "tok/s", "prefill", "decode", "wall", "start-up", "peak", "same tokens")
    for column in made.columns[2:]:
        column.justify = "right"
        column.no_wrap = True
    for key, workload in result["workloads"].items():
        for number, (name, engine) in enumerate(workload["engines"].items()):
            title = f"{key}: {workload['title']}" if number == 0 else ""
            made.add_row(title, name, *_cells(engine), end_section=number + 1 == len(workload["engines"]))
    return made


def _cells(engine: dict[str, Any]) -> list[str]:
    if "failed" in engine:
        return ["[red]failed[/]"]
    if "stopped_s" in engine:
        wall = f"> {engine['stopped_s']} s"
        return ["-", "-", "-", wall, f"{engine['start_up_s']:.1f} s", _mib(engine["peak_bytes"]), "-"]
    median, tokens = engine["median"], engine.get("tokens")
    speeds = [f"{median[metric]:.1f}" if metric in median else "-" for metric in METRICS]
    return [
        *speeds,
        f"{median['total_s']:.2f} s",
        f"{engine['start_up_s']:.1f} s",
        _mib(engine["peak_bytes"]),
        f"{tokens['share_before_divergence']:.0%}" if tokens else "-",
    ]


def _goals(result: dict[str, Any]) -> Table:
    made = Table("goal on", "measure", "ours", "against", "ratio", "goal", "met")
    for column in made.columns[4:6]:
        column.justify = "right"
    for key, workload in result["workloads"].items():
        for row in workload["goals"]:
            memory = row["measure"] == "peak_bytes"
            ratio = "-" if row["ratio"] is None else f"{'> ' if row['bound'] else ''}{row['ratio']:.2f}x"
            made.add_row(
                key,
                MEASURES[row["measure"]],
                row["ours"],
                row["peer"],
                ratio,
                "+ 300 MB" if memory else f"{row['goal']}x",
                _met(row),
            )
    return made


def _met(row: dict[str, Any]) -> str:
    if row["met"] is None:
        return f"cannot be said: {row.get('why', 'the peer was stopped before the goal could be told')}"
    return "[green]yes[/]" if row["met"] else "[red]no[/]"


def _mib(num_bytes: float) -> str:
    return f"{num_bytes / 2**20:,.0f} MiB"


def panels(result: dict[str, Any]) -> list[tuple[str, str]]:
    """(workload, metric) of each panel of the plot: prefill and decode where a workload tells them apart
    and is about both, which is where the prompt outweighs the answer."""
    made = []
    for key, workload in result["workloads"].items():
        medians = [each["median"] for each in workload["engines"].values() if "median" in each]
        apart = any("decode_tok_s" in each for each in medians)
        if apart and workload["prompt_tokens"] > 8 * workload["new_tokens"]:
            made += [(key, "prefill_tok_s"), (key, "decode_tok_s")]
        else:
            made.append((key, "tok_s"))
    return made


def plot(result: dict[str, Any], path: Path) -> None:
    """A panel for each workload and speed, one for peak memory; a bar for each row, longest is fastest."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    chosen = panels(result)
    names = [
        name
        for name in result["rows"]
        if any(name in workload["engines"] for workload in result["workloads"].values())
    ]
    columns = min(3, len(chosen) + 1)
    lines = -(-(len(chosen) + 1) // columns)
    height = lines * (0.8 + 0.29 * max(len(names), 1)) + 0.5
    figure, grid = plt.subplots(
        lines, columns, figsize=(4.9 * columns, height), layout="constrained", squeeze=False
    )
    axes = list(grid.flat)
    for panel, (key, metric) in zip(axes, chosen, strict=False):
        workload = result["workloads"][key]
        bars = [_speed_bar(workload["engines"].get(name), metric) for name in names]
        title = workload["title"].partition(", shrunk")[0]  # the figure's own title says so
        _bars(panel, names, bars, f"({key}) {title}\n{METRICS[metric]}")
    memory = axes[len(chosen)]
    peaks = {name: _peak(result, name) for name in names}
    bars = [(peak / 2**20, f"{peak / 2**20:,.0f}" if peak else "did not run") for peak in peaks.values()]
    _bars(memory, names, bars, "peak memory, the most of all workloads\nMiB (shorter is better)")
    for unused in axes[len(chosen) + 1 :]:
        unused.set_visible(False)
    figure.suptitle(
        f"{result['model']}, {result['threads']} threads, {result['machine']['cpu']}"
        + (f", workloads shrunk {result['scale']} times" if result["scale"] > 1 else ""),
        fontsize=10,
    )
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _peak(result: dict[str, Any], name: str) -> int:
    """The most memory that a row took on any workload; 0 where it never ran."""
    engines = [workload["engines"].get(name, {}) for workload in result["workloads"].values()]
    return max(int(engine.get("peak_bytes", 0)) for engine in engines)


def _speed_bar(engine: dict[str, Any] | None, metric: str) -> tuple[float, str]:
    """A bar's length and the words beside it."""
    if engine is None or "failed" in engine:
        return 0.0, "did not run"
    if "stopped_s" in engine:
        return 0.0, f"> {engine['stopped_s']} s"
    value = engine["median"][metric]
    return value, f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def _lighter(colour: str, share: float) -> tuple[float, ...]:
    """A colour, ``share`` of the way to white."""
    channels = (int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5))
    return tuple(channel + (1 - channel) * share for channel in channels)


def _bars(axes: Axes, names: list[str], bars: list[tuple[float, str]], title: str) -> None:
    longest = max((length for length, _ in bars), default=0) or 1.0
    shades: dict[str, int] = {}
    for place, (name, (length, words)) in enumerate(zip(names, bars, strict=True)):
        family = VARIANTS[name].family
        shade = shades[family] = shades.get(family, -1) + 1
        axes.barh(place, length, height=0.72, color=_lighter(COLOURS[family], 0.18 * shade), zorder=2)
        axes.text(length + longest * 0.015, place, words, va="center", fontsize=8)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, longest * 1.18)
    axes.tick_params(axis="x", labelsize=7)
    axes.grid(axis="x", color="#dddddd", linewidth=0.6, zorder=0)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.set_title(title, fontsize=9, loc="left")
