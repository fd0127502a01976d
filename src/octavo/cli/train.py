"""``octavo train``: fine-tune an encoder into a classifier."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from octavo.cli import options as opt
from octavo.cli.errors import USAGE, CommandError, plainly

DATA = "Data"
ATTENTION = "Attention"
LOOP = "Training"
#: As ``octavo.training.settings`` has them; kept here so that --help needs nothing else.
KINDS = ("mha", "linformer", "c2psa")


def train(  # noqa: PLR0913  (each argument is an option of the command)
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="An encoder: a name such as minilm, a folder of safetensors, or a hub name."
        ),
    ],
    data: Annotated[
        Path,
        typer.Option(
            metavar="PATH",
            help="A TSV file whose header has label, text and, for pairs, text2; or a folder of a GLUE task.",
            rich_help_panel=DATA,
        ),
    ],
    out: Annotated[
        Path,
        typer.Option(
            metavar="FOLDER",
            help="Where the model is written: a new folder, or that of an interrupted run, which goes on.",
        ),
    ],
    task: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Task of a folder: CoLA, SST-2, MRPC, STS-B, QQP, MNLI, QNLI, RTE; else its name says it.",
            rich_help_panel=DATA,
        ),
    ] = None,
    held_out: Annotated[
        float,
        typer.Option(
            metavar="SHARE", help="Share of a TSV file's rows that is only measured on.", rich_help_panel=DATA
        ),
    ] = 0.1,
    regression: Annotated[
        bool,
        typer.Option("--regression", help="Labels of a TSV file are numbers.", rich_help_panel=DATA),
    ] = False,
    max_tokens: Annotated[
        int, typer.Option(help="Texts are cut to so many tokens in training.", rich_help_panel=DATA)
    ] = 128,
    attention: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="mha, linformer or c2psa in the place of the checkpoint's standard attention.",
            rich_help_panel=ATTENTION,
        ),
    ] = None,
    compress_rate: Annotated[
        int | None,
        typer.Option(
            help="c2psa: heads that share one projection, at first aligned and pooled; "
            "by default 2 up to 8 heads, else 4.",
            rich_help_panel=ATTENTION,
        ),
    ] = None,
    topk: Annotated[
        int | None,
        typer.Option(help="c2psa: keys that a query attends to; by default 64.", rich_help_panel=ATTENTION),
    ] = None,
    projected_len: Annotated[
        int | None,
        typer.Option(
            help="linformer: rows that keys and values are projected to; by default 64.",
            rich_help_panel=ATTENTION,
        ),
    ] = None,
    checkpoint: Annotated[
        bool,
        typer.Option(
            help="Compute attention again in the backward pass instead of keeping it: "
            "less memory, more time, the same numbers.",
            rich_help_panel=ATTENTION,
        ),
    ] = True,
    epochs: Annotated[int, typer.Option(help="Times that every row is seen.", rich_help_panel=LOOP)] = 3,
    max_steps: Annotated[
        int | None,
        typer.Option(metavar="STEPS", help="End after so many batches at most.", rich_help_panel=LOOP),
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Rows of a step.", rich_help_panel=LOOP)] = 32,
    lr: Annotated[
        float, typer.Option(metavar="RATE", help="Highest learning rate of AdamW.", rich_help_panel=LOOP)
    ] = 5e-5,
    warmup: Annotated[
        float,
        typer.Option(
            metavar="SHARE",
            help="Share of the steps in which the rate rises; then it falls to 0, both linearly.",
            rich_help_panel=LOOP,
        ),
    ] = 0.1,
    weight_decay: Annotated[
        float, typer.Option(help="AdamW's, on matrices alone.", rich_help_panel=LOOP)
    ] = 0.01,
    max_grad_norm: Annotated[
        float, typer.Option(help="Longer gradients are cut to this length.", rich_help_panel=LOOP)
    ] = 1.0,
    dropout: Annotated[
        float | None,
        typer.Option(
            metavar="SHARE",
            help="Share of attention weights and of features dropped; by default the checkpoint's.",
            rich_help_panel=LOOP,
        ),
    ] = None,
    seed: Annotated[
        int, typer.Option(help="Decides split, order, dropout and new weights.", rich_help_panel=LOOP)
    ] = 0,
    save_every: Annotated[
        int,
        typer.Option(
            metavar="STEPS",
            help="How often the run is saved to go on from, and after each epoch; three times the model.",
            rich_help_panel=LOOP,
        ),
    ] = 200,
    device: Annotated[str, typer.Option(help="Where it runs: cpu, or cuda.", rich_help_panel=LOOP)] = "cpu",
    threads: opt.Threads = None,
) -> None:
    """Fine-tune an encoder (BERT, RoBERTa, DistilBERT) into a classifier.

    The folder that is written is a model like any other: `LLM(FOLDER).classify(texts)`. A run that was
    stopped goes on when the same command is given again, and ends with the same weights. A bad row of the
    data stops the run with its line number.
    """
    if attention is not None and attention not in KINDS:
        raise CommandError(f"--attention must be one of {', '.join(KINDS)}, got {attention!r:.100}", USAGE)
    with plainly():
        from octavo.bench.machine import torch_threads
        from octavo.engine.resources import usable_cpus
        from octavo.training.data import read_data
        from octavo.training.run import in_words
        from octavo.training.run import train as run
        from octavo.training.settings import AttentionChoice, TrainSettings

        choice = AttentionChoice(
            kind=attention, compress_rate=compress_rate, topk=topk, projected_len=projected_len
        )
        settings = TrainSettings(
            epochs=epochs,
            batch_size=batch_size,
            lr=lr,
            warmup=warmup,
            weight_decay=weight_decay,
            max_grad_norm=max_grad_norm,
            dropout=dropout,
            seed=seed,
            max_tokens=max_tokens,
            max_steps=max_steps,
            checkpoint_attention=checkpoint,
            save_every=save_every,
            device=device,
        )
        examples = read_data(data, held_out=held_out, seed=seed, regression=regression, task=task)
        with torch_threads(threads or usable_cpus()):
            report = run(model, examples, out, settings, choice, say=_say)
    print(f"{in_words(report['measured'][-1])}\nwritten: {out}")


def _say(line: str) -> None:
    """A line above the progress bar, if there is one."""
    from tqdm import tqdm

    tqdm.write(line, file=sys.stderr)
