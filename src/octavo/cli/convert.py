"""``octavo convert``: a checkpoint with fewer heads out of one with many."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from octavo.cli import options as opt
from octavo.cli.errors import USAGE, CommandError, plainly

FITTING = "Fitting to a text"


def convert(  # noqa: PLR0913  (each argument is an option of the command)
    model: opt.Model,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A folder that is empty or not there yet.")],
    compress_rate: Annotated[
        str, typer.Option(metavar="RATE", help="How many heads become one: a divisor of the heads, or auto.")
    ] = "auto",
    topk: Annotated[
        int, typer.Option(min=1, help="How many keys a query keeps; encoders use it, decoders attend to all.")
    ] = 64,
    method: Annotated[
        str,
        typer.Option(
            callback=opt.one_of("aligned", "mean"),
            metavar="NAME",
            help="aligned chooses the groups and turns their heads first, mean averages neighbours.",
        ),
    ] = "aligned",
    distill: Annotated[
        Path | None,
        typer.Option(metavar="TEXT", help="Fit the heads to this file's text.", rich_help_panel=FITTING),
    ] = None,
    steps: Annotated[int, typer.Option(min=0, help="Steps of Adam a layer.", rich_help_panel=FITTING)] = 60,
    tokens: Annotated[
        int, typer.Option(min=1, help="Tokens of the text at most.", rich_help_panel=FITTING)
    ] = 16_384,
    window: Annotated[
        int, typer.Option(min=8, help="Tokens that are attended to at once.", rich_help_panel=FITTING)
    ] = 256,
    learning_rate: Annotated[
        float, typer.Option(help="Adam's, at the start.", rich_help_panel=FITTING)
    ] = 1e-3,
    seed: Annotated[int, typer.Option(min=0, rich_help_panel=FITTING)] = 0,
    threads: opt.Threads = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as one JSON object.")] = False,
) -> None:
    """Turn an MHA or GQA checkpoint into a C2PSA one with fewer heads, a folder that `octavo run` takes.

    Heads are grouped, turned towards each other where that changes nothing, and pooled. With --distill their
    weights are then fitted, layer by layer, to what the original computes on a text, and the quality is
    measured on the text's last fifth.
    """
    if not 0 < learning_rate < 1:
        raise CommandError(f"--learning-rate must be above 0 and below 1, got {learning_rate}", USAGE)
    rate = _rate(compress_rate)
    with plainly():
        import torch

        from octavo.convert.recover import Recovery
        from octavo.convert.run import Options, convert
        from octavo.engine.resources import usable_cpus
        from octavo.weights import hub

        torch.set_num_threads(threads or usable_cpus())
        options = Options(
            compress_rate=rate,
            topk=topk,
            method="mean" if method == "mean" else "aligned",
            text=None if distill is None else _text(distill),
            recovery=Recovery(steps=steps, learning_rate=learning_rate, seed=seed),
            window=window,
            tokens=tokens,
        )
        report = convert(Path(hub.resolve(model)), out, options, bar)
    print(json.dumps(report) if as_json else "\n".join(summary(report)))


def bar(what: str, steps: int) -> Callable[[], None]:
    """A progress bar of so many steps on a terminal; returns what moves it on."""
    from tqdm import tqdm

    shown = tqdm(total=steps, desc=what, disable=None, dynamic_ncols=True)

    def step_done() -> None:
        shown.update()
        if shown.n >= steps:
            shown.close()

    return step_done


def summary(report: dict[str, Any]) -> list[str]:
    """The report in lines: what came out, and a line for each step that was measured."""
    (heads, left), (kv_heads, kv_left) = report["num_heads"], report["num_kv_heads"]
    before, after = report["attention_weights"]
    lines = [
        f"{report['model']}: {heads} heads over {kv_heads} K and V heads become {left} over {kv_left} "
        f"(compress_rate {report['compress_rate']}, topk {report['topk']})",
        f"attention weights: {before:,} become {after:,}",
    ]
    for method, errors in report["pooling_error"].items():
        lines.append(f"lost by pooling, {method}: {sum(errors) / len(errors):.4f} of the heads' energy")
    for step in report.get("steps", []):
        metrics = (f"{key} {step[key]:.4f}" for key in ("perplexity", "cosine") if key in step)
        lines.append(f"{step['step']}: {', '.join(metrics)}, layer error {step['layer_error']:.4f}")
    return lines


def _rate(text: str) -> int | Literal["auto"]:
    """Whether it divides the heads is known once the model was read."""
    if text == "auto":
        return "auto"
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise typer.BadParameter(f"--compress-rate must be a divisor of the heads or auto, got {text!r:.40}")
    return int(text)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not UTF-8 text") from None
