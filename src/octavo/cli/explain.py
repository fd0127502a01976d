"""``octavo run --explain``: which positions of its context an answer's attention read, layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from octavo.cli.errors import CommandError
from octavo.request import AttnReadReport, AttnTopkReport

if TYPE_CHECKING:
    from octavo.request import RequestOutput

#: From which share of a cell's keys on, and the sign for it.
SHADES = ((0.5, "█"), (0.2, "▓"), (0.05, "▒"), (0.0, "░"))
NOTHING = "·"
MIN_COLUMNS = 16


def heat_map(reads: AttnReadReport, columns: int) -> list[str]:
    """One line a layer, at most ``columns`` signs: position goes from left to right, and a sign stands for
    the mean share of its spans."""
    num_spans = len(reads.share[0])
    per_cell = -(-num_spans // max(1, columns))
    return [
        "".join(_sign(layer[at : at + per_cell]) for at in range(0, num_spans, per_cell))
        for layer in reads.share
    ]


def _sign(shares: Sequence[float]) -> str:
    mean = sum(shares) / len(shares)
    if not any(shares):
        return NOTHING
    return next(sign for least, sign in SHADES if mean >= least)


def explain(output: RequestOutput | None, console: Console, plot: Path | None) -> None:
    """Print the heat map of an answer and what it left out, and write it to ``plot`` as PNG."""
    if output is None or output.attn_reads is None or output.attn_topk is None:
        console.print("Nothing to explain: the answer has no token that top-k attention read for.")
        return
    reads, report = output.attn_reads, output.attn_topk
    lines = heat_map(reads, max(MIN_COLUMNS, console.width - 10))
    cell = -(-len(reads.share[0]) // len(lines[0])) * reads.span
    console.print(f"Read for this answer, by layer and position ({cell} positions a sign):", markup=False)
    for layer, line in enumerate(lines):
        console.print(f"layer {layer:>2}  {line}", markup=False, highlight=False, no_wrap=True)
    legend = " ".join(f"{sign} from {least:.0%}" for least, sign in reversed(SHADES))
    console.print(f"{NOTHING} nothing, {legend} of what its queries and heads see", highlight=False)
    console.print(summary(report), highlight=False)
    if plot is not None:
        draw(reads, plot)
        console.print(f"written: {plot}", markup=False, highlight=False)


def summary(report: AttnTopkReport) -> str:
    """One line: keys kept, mass dropped, bytes read, prompt and answer together."""
    kept = report.kept_keys / report.visible_keys if report.visible_keys else 1.0
    mean, worst = report.mean_dropped_mass, report.worst_dropped_mass
    parts = [
        f"kept {kept:.1%} of the keys, prompt and answer",
        f"dropped mass at most {mean:.3f} on average, {worst:.3f} at worst",
    ]
    if report.dense_bytes:
        parts.append(
            f"read {report.bytes_read / report.dense_bytes:.0%} of dense attention's bytes in decode"
        )
    return " · ".join(parts)


def check_plot(plot: Path | None) -> None:
    """Refuse, before anything is computed, a plot that could not be written."""
    if plot is None:
        return
    if plot.suffix.lower() != ".png":
        raise CommandError(f"--plot writes a PNG: give it a name that ends in .png, not {plot.name}")
    if not plot.absolute().parent.is_dir():
        raise CommandError(f"--plot: there is no folder {plot.parent}")
    try:
        import matplotlib  # noqa: F401  (only to see that it is there)
    except ImportError:
        raise CommandError("--plot needs matplotlib: pip install 'octavo[bench]'") from None


def draw(reads: AttnReadReport, plot: Path) -> None:
    """Layers upwards, positions to the right; the colour is the share read."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.colors import PowerNorm

    num_layers, end = len(reads.share), len(reads.share[0]) * reads.span
    figure, axes = plt.subplots(figsize=(9, 0.6 + 0.16 * max(num_layers, 12)), layout="constrained")
    image = axes.imshow(
        reads.share,
        aspect="auto",
        origin="lower",
        interpolation="nearest",
        extent=(0, end, -0.5, num_layers - 0.5),
        norm=PowerNorm(0.5, vmin=0, vmax=1),
        cmap="magma",
    )
    axes.set_xlabel("position in the context")
    axes.set_ylabel("layer")
    axes.set_title("Keys that the answer's attention read")
    figure.colorbar(image, label="share of what its queries and heads see")
    figure.savefig(plot, dpi=120)
    plt.close(figure)
