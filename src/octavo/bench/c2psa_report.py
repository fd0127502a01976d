"""What ``octavo bench c2psa`` shows of its result: goals, tables and plots."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from rich.table import Table

from octavo.bench.c2psa_variants import MATERIALISED, SDPA

Row = dict[str, Any]
Show = Callable[[Row, str], str]

#: Of the published goals: the rate, the lengths of the latency goals, and what must hold.
RATE = 4
LENGTHS = (512, 4096)
MEMORY_SHARE = 1 / 6
FLATNESS = 0.10


def goals(result: dict[str, Any]) -> list[Row]:
    """Each goal that the measured sections can answer; of budgets of keys the largest counts."""
    ours = [name for name in result["parameters"] if name.startswith(f"c2psa r={RATE} ")][-1:]
    made = []
    for name in ours:
        share = result["parameters"][name]["qkv"] / result["parameters"][MATERIALISED]["qkv"]
        made.append(_goal(f"{name}: Q, K and V have exactly 75% fewer parameters", share, share == 1 / RATE))
        training = _at(result, "batch-memory", "training_bytes")
        batch = max((at[1] for at in training), default=0)
        if batch:
            share = (
                training[name, batch, _length(training)] / training[MATERIALISED, batch, _length(training)]
            )
            text = f"{name}: at most 1/6 of materialised attention's memory in training at batch {batch}"
            made.append(_goal(text, share, share <= MEMORY_SHARE))
        times = _at(result, "length-time", "ms")
        for length in LENGTHS:
            if (name, 1, length) in times:
                rivals = [key for key in times if key[2] == length and key[0].startswith(("linformer", SDPA))]
                share = times[name, 1, length] / min(times[key] for key in rivals)
                text = f"{name}: faster than sdpa and Linformer at {length:,} tokens"
                made.append(_goal(text, share, share < 1))
        made += _flatness(result, name)
    return made


def _flatness(result: dict[str, Any], name: str) -> list[Row]:
    made = []
    gradients = 4 * result["parameters"][name]["all"]
    for key, fixed, what in (
        ("forward_bytes", 0, "forward"),
        ("training_bytes", gradients, "training, beside the weights' gradients"),
    ):
        found = _at(result, "length-memory", key)
        each = [(count - fixed) / at[2] for at, count in found.items() if at[0] == name]
        if each and min(each) > 0:
            spread = max(each) / min(each) - 1
            text = f"{name}: memory per token within 10% over all lengths ({what})"
            made.append(_goal(text, spread, spread <= FLATNESS))
    return made


def _goal(text: str, found: float, met: bool) -> Row:
    return {"goal": text, "found": found, "met": met}


def _rows(result: dict[str, Any], section: str) -> list[Row]:
    rows: list[Row] = result["sections"].get(section, {}).get("rows", [])
    return rows


def _at(result: dict[str, Any], section: str, key: str) -> dict[tuple[str, int, int], float]:
    """By variant, batch and length."""
    return {(row["variant"], row["batch"], row["length"]): row[key] for row in _rows(result, section)}


def _length(found: Iterable[tuple[str, int, int]]) -> int:
    return max(length for _, _, length in found)


def tables(result: dict[str, Any]) -> list[Table]:
    """One over batches, one over lengths, the heads, and the whole model; what is fitted has a ~."""
    made = [_overview(result)]
    grids: list[tuple[str, str, str, Show]] = [
        ("ms forward, batch 1, by tokens", "length-time", "ms", _ms),
        ("KiB a token forward, batch 1, by tokens", "length-memory", "forward_bytes", _per_token),
        ("KiB a token in training, batch 1, by tokens", "length-memory", "training_bytes", _per_token),
        ("MiB to train BERT-base, by batch", "bert", "training_bytes", _mib),
    ]
    for title, section, key, show in grids:
        rows = _rows(result, section)
        if rows:
            made.append(_grid(title, rows, key, show))
    heads = _rows(result, "heads")
    if heads:
        made.append(_heads(heads))
    return made


def _overview(result: dict[str, Any]) -> Table:
    """Parameters, and time and memory at the smallest and the largest batch."""
    made = Table("attention", "Q, K, V parameters", "of MHA's", title="one attention module")
    columns: list[tuple[str, str, int, Show]] = []
    groups: list[tuple[str, str, str, Show]] = [
        ("batch-time", "ms", "ms", _ms),
        ("batch-memory", "forward_bytes", "MiB forward", _mib),
        ("batch-memory", "training_bytes", "MiB training", _mib),
    ]
    for section, key, label, show in groups:
        batches = sorted({row["batch"] for row in _rows(result, section)})
        for batch in dict.fromkeys(batches[:1] + batches[-1:]):
            made.add_column(f"{label}, batch {batch}", justify="right")
            columns.append((section, key, batch, show))
    whole = result["parameters"][MATERIALISED]["qkv"]
    for name, count in result["parameters"].items():
        cells = [name, f"{count['qkv']:,}", f"{count['qkv'] / whole:.0%}"]
        for section, key, batch, show in columns:
            rows = [r for r in _rows(result, section) if (r["variant"], r["batch"]) == (name, batch)]
            cells.append(show(rows[0], key) if rows else "")
        made.add_row(*cells)
    return made


def _grid(title: str, rows: list[Row], key: str, show: Show) -> Table:
    """A line for each variant, a column for each batch or length."""
    by = "batch" if len({row["batch"] for row in rows}) > 1 else "length"
    sizes = sorted({row[by] for row in rows})
    made = Table("attention", *(f"{size:,}" for size in sizes), title=title)
    for name in dict.fromkeys(row["variant"] for row in rows):
        found = {row[by]: show(row, key) for row in rows if row["variant"] == name}
        made.add_row(name, *(found.get(size, "") for size in sizes))
    return made


def _heads(rows: list[Row]) -> Table:
    made = Table("attention", "heads", "ms a head", "one by one", "together", "gain", title="heads")
    for row in rows:
        each = row["heads_ms"]
        made.add_row(
            row["variant"],
            str(len(each)),
            f"{min(each):.2f} to {max(each):.2f}",
            f"{row['one_by_one_ms']:.2f}",
            f"{row['together_ms']:.2f}",
            f"{row['one_by_one_ms'] / row['together_ms']:.2f}x",
        )
    return made


def _ms(row: Row, key: str) -> str:
    return f"{row[key]:,.1f}"


def _mark(row: Row, key: str) -> str:
    """Times are never fitted."""
    return "~" if key.endswith("_bytes") and row[key.replace("bytes", "fitted")] else ""


def _mib(row: Row, key: str) -> str:
    return f"{_mark(row, key)}{row[key] / 2**20:,.1f}"


def _per_token(row: Row, key: str) -> str:
    return f"{_mark(row, key)}{row[key] / 2**10 / row['length']:,.2f}"


def plot(result: dict[str, Any], path: Path) -> bool:
    """Lines over batches and lengths, bars for the heads; hollow points are fitted. False: nothing drawn."""
    panels: list[tuple[str, str, str, float, str]] = [
        ("batch-time", "ms", "batch", 1.0, "ms forward"),
        ("batch-memory", "training_bytes", "batch", 2**20, "MiB to train"),
        ("bert", "training_bytes", "batch", 2**30, "GiB to train BERT-base"),
        ("length-time", "ms", "length", 1.0, "ms forward, batch 1"),
        ("length-memory", "forward_bytes", "length", 2**20, "MiB forward, batch 1"),
    ]
    panels = [panel for panel in panels if _rows(result, panel[0])]
    heads = _rows(result, "heads")
    if not panels and not heads:
        return False
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, grid = plt.subplots(2, 3, figsize=(16, 9), layout="constrained")
    axes = list(grid.flat)
    for (section, key, by, unit, label), ax in zip(panels, axes, strict=False):
        _lines(ax, _rows(result, section), key, by, unit)
        about = result["sections"][section]
        fixed = f"{about['length']:,} tokens, " if by == "batch" else ""
        ax.set_title(f"{label} ({fixed}threads: {about['threads']})", fontsize=10)
        ax.set_xlabel(by if by == "batch" else "tokens")
    if heads:
        ax = axes[len(panels)]
        for shift, key, label in ((-0.2, "one_by_one_ms", "one by one"), (0.2, "together_ms", "together")):
            ax.bar([i + shift for i in range(len(heads))], [row[key] for row in heads], 0.4, label=label)
        ax.set_xticks(
            range(len(heads)), [row["variant"] for row in heads], rotation=40, ha="right", fontsize=7
        )
        ax.set_title("ms of all heads, batch 1", fontsize=10)
        ax.legend()
    for ax in axes[len(panels) + bool(heads) :]:
        ax.set_visible(False)
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return True


def _lines(ax: Any, rows: list[Row], key: str, by: str, unit: float) -> None:
    from matplotlib import colormaps

    ax.set_prop_cycle(color=colormaps["tab20"](range(20)))  # more lines than the default has colours
    styles = {"mha": "--", "gqa": ":", "linformer": "-."}
    for name in dict.fromkeys(row["variant"] for row in rows):
        own = [row for row in rows if row["variant"] == name]
        style = next((line for start, line in styles.items() if name.startswith(start)), "-")
        x, y = [row[by] for row in own], [row[key] / unit for row in own]
        (line,) = ax.plot(x, y, style, label=name, linewidth=1.2)
        fitted = [bool(_mark(row, key)) for row in own]
        for hollow in (False, True):
            at = [(a, b) for a, b, f in zip(x, y, fitted, strict=True) if f == hollow]
            face = "none" if hollow else line.get_color()
            if at:
                ax.scatter(
                    *zip(*at, strict=True), s=18, facecolors=face, edgecolors=line.get_color(), zorder=3
                )
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_xticks(
        sorted({row[by] for row in rows}), [f"{size:,}" for size in sorted({row[by] for row in rows})]
    )
    ax.legend(fontsize=6)
