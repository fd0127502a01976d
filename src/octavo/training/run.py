"""One run from a model and its examples to a folder, or on from where it was stopped."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tqdm import tqdm

from octavo.tokenizer.encoder import EncoderTokenizer
from octavo.training import state
from octavo.training.data import Example, LabelledData
from octavo.training.loop import History, Item, Trainer, evaluate, progress_of, targets_of
from octavo.training.metrics import check_installed
from octavo.training.output import write_model
from octavo.training.settings import AttentionChoice, TrainSettings
from octavo.training.start import Start, start_from
from octavo.weights import hub
from octavo.weights.hf import SINGLE
from octavo.weights.load import Checkpoint, open_checkpoint

Say = Callable[[str], None]
#: Steps whose mean loss a progress bar shows.
SHOWN = 50


def train(
    model: str | Path,
    data: LabelledData,
    out: Path | None,
    settings: TrainSettings,
    choice: AttentionChoice,
    *,
    say: Say,
    progress: bool = True,
) -> dict[str, Any]:
    """Fine-tune ``model`` on ``data`` and write it to ``out``; returns the report, which ``out`` holds too.

    The same call on a folder with the state of an interrupted run goes on where that stopped, and ends with
    the same weights to the bit as if nothing had happened, on the same machine and threads. ``out`` None
    writes nothing. Raises ValueError for a folder with anything else in it, for a state of another run, and
    for a model, data or settings that do not fit.
    """
    check_installed()
    checkpoint = open_checkpoint(hub.resolve(model))
    run_id = _run_id(checkpoint, data, settings, choice)
    found = None if out is None else _open_out(out, checkpoint, run_id)
    start = start_from(checkpoint, data.labels, choice, settings)
    for note in start.notes:
        say(note)
    tokenizer = EncoderTokenizer(checkpoint.path)
    train_items = _encode("train", data.train, tokenizer, start, settings, say)
    evaluation = {
        name: _encode(name, examples, tokenizer, start, settings, say)
        for name, examples in data.evaluation.items()
    }
    trainer = Trainer(start.encoder, train_items, settings)
    history, first = History(), 0
    if found is not None and out is not None:
        first = found["step"]
        history = History(found["losses"], found["measured"])
        state.restore(out, start.encoder, trainer.optimizer, first)
        say(f"going on after step {first} of {trainer.total}")

    def after(step: int) -> None:
        """Measure at the end of an epoch, then save."""
        ends = step == trainer.total or step % trainer.steps_per_epoch == 0
        if ends:
            measured = {
                name: evaluate(start.encoder, items, data.metrics, settings.device)
                for name, items in evaluation.items()
            }
            history.measured.append(measured)
            say(f"step {step} of {trainer.total}: {in_words(measured)}")
        if out is not None and step < trainer.total and (ends or step % settings.save_every == 0):
            saved = progress_of(step, history) | {"run": run_id}
            state.save(out, start.encoder, trainer.optimizer, saved)

    # None: a bar on a terminal only.
    with tqdm(total=trainer.total, initial=first, unit="step", disable=None if progress else True) as bar:
        for step, loss in trainer.steps(first):
            history.losses.append(loss)
            after(step)
            bar.set_postfix_str(_shown(history, data.metrics[0]), refresh=False)
            bar.update()
    report = _report(data, settings, start, trainer, history) | {"model": checkpoint.path.name}
    if out is not None:
        write_model(checkpoint.path, out, start.encoder, start.metadata, report)
        state.remove(out)
    return report


def in_words(measured: dict[str, dict[str, float]]) -> str:
    """ "held out: accuracy 0.912, f1_macro 0.911"."""
    return "; ".join(
        f"{name}: " + ", ".join(f"{metric} {value:.4f}" for metric, value in values.items())
        for name, values in measured.items()
    )


def _shown(history: History, metric: str) -> str:
    words = f"loss {statistics.fmean(history.losses[-SHOWN:]):.3f}"
    if history.measured:
        words += f", {metric} {next(iter(history.measured[-1].values()))[metric]:.4f}"
    return words


def _run_id(
    checkpoint: Checkpoint, data: LabelledData, settings: TrainSettings, choice: AttentionChoice
) -> dict[str, str]:
    """What makes a run this run; ``save_every`` and the device may change on the way."""
    told = asdict(settings) | asdict(choice)
    parts = {name: json.dumps(value) for name, value in told.items() if name not in ("save_every", "device")}
    return parts | {"model": checkpoint.fingerprint(), "data": data.digest()}


def _open_out(out: Path, checkpoint: Checkpoint, run_id: dict[str, str]) -> dict[str, Any] | None:
    """Make the folder, or find how far the run got in it."""
    if out.resolve() == checkpoint.path.resolve():
        raise ValueError("the trained model cannot be written into the folder of the one that it starts from")
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file: --out must be a folder")
    out.mkdir(parents=True, exist_ok=True)
    if (out / SINGLE).exists():
        raise ValueError(f"{out} holds a finished model: choose another folder, or remove it")
    found = state.read_progress(out)
    if found is None:
        if others := sorted(path.name for path in out.iterdir() if not path.name.endswith(".new")):
            raise ValueError(f"{out} is not empty ({others[0]}): choose a new folder")
        return None
    known = found.get("run", {})
    if changed := [name for name in run_id if known.get(name) != run_id[name]]:
        raise ValueError(
            f"{out} holds an interrupted run with another {changed[0]}: give the same, or choose a new folder"
        )
    return found


def _encode(
    name: str,
    examples: Sequence[Example],
    tokenizer: EncoderTokenizer,
    start: Start,
    settings: TrainSettings,
    say: Say,
) -> list[Item]:
    config = start.config
    most = config.max_tokens if settings.max_tokens is None else min(settings.max_tokens, config.max_tokens)
    encoded, cut = [], 0
    for example in examples:
        try:
            item = tokenizer.encode(example.text, max_tokens=config.max_tokens, truncate=True)
            if len(item.ids) > most:
                item = tokenizer.encode(example.text, max_tokens=most, truncate=True)
        except ValueError as error:
            raise ValueError(f"{name}: the example {example.text!r:.80} is no input: {error}") from None
        if max(item.ids) >= config.vocab_size:
            raise ValueError(
                f"the tokenizer gives token {max(item.ids)}, the model knows {config.vocab_size}"
            )
        cut += len(item.ids) == most
        encoded.append(item)
    if cut:
        say(f"{name}: {cut} of {len(encoded)} texts have {most} tokens or more; what is longer is cut there")
    targets = targets_of(config, [example.label for example in examples])
    return [Item(*pair) for pair in zip(encoded, targets, strict=True)]


def _report(
    data: LabelledData, settings: TrainSettings, start: Start, trainer: Trainer, history: History
) -> dict[str, Any]:
    attention = {
        "compress_rate": start.config.compress_rate,
        "topk": start.config.topk,
        "projected_len": start.config.projected_len,
    }
    return {
        "data": data.name,
        "labels": list(data.labels),
        "rows": {"train": len(data.train)} | {name: len(rows) for name, rows in data.evaluation.items()},
        "attention": {name: value for name, value in attention.items() if value is not None} or "mha",
        "parameters": sum(p.numel() for p in start.encoder.parameters()),
        "attention_parameters": sum(
            parameter.numel() for name, parameter in start.encoder.named_parameters() if ".attention." in name
        ),
        "settings": asdict(settings),
        "steps": trainer.total,
        "first_loss": history.losses[0],
        "last_loss": statistics.fmean(history.losses[-SHOWN:]),
        "measured": history.measured,
    }
