"""What an attention costs in quality: one encoder, fine-tuned on one task with each attention in turn.

All get the same rows, steps, batches and learning rate. A seed decides which fifth of the rows is held out,
the order of the rest, dropout and what is random in the weights, for all alike; so differences are taken seed
by seed, which takes out how hard a split is. Their standard error is that of the mean of those differences.

C2PSA with fewer heads starts from a converted model, as ``octavo convert --distill`` makes it: its heads are
aligned, pooled and fitted layer by layer to the texts that are trained on, without their labels.
"""

from __future__ import annotations

import math
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rich.table import Table

from octavo.bench.machine import machine, torch_threads, versions
from octavo.convert.recover import Recovery
from octavo.convert.run import Options, convert
from octavo.nn.c2psa import resolve_compress_rate
from octavo.training.data import LabelledData, read_tsv, split
from octavo.training.run import train
from octavo.training.settings import AttentionChoice, TrainSettings
from octavo.training.start import start_from
from octavo.weights import hub
from octavo.weights.load import open_checkpoint

HELD_OUT = 0.2
METRIC = "accuracy"
#: Goals in points of accuracy: the most that C2PSA may lose against MHA by compress_rate.
GOALS = {1: 0.3, 4: 1.5}
MHA, LINFORMER = "mha", "linformer"


@dataclass(frozen=True, slots=True, kw_only=True)
class QualitySettings:
    """``rows`` None takes all. ``rates`` and ``topks`` are crossed.

    ``recovery_steps`` of Adam a layer, at ``recovery_lr``, and ``recovery_tokens`` of text fit fewer heads.
    """

    steps: int = 200
    seeds: int = 3
    rows: int | None = None
    batch_size: int = 32
    lr: float = 1e-4
    max_tokens: int = 64
    rates: tuple[int, ...] = (1, 2, 4)
    topks: tuple[int, ...] = (8, 32)
    projected_len: int = 32
    recovery_steps: int = 60
    recovery_lr: float = 1e-3
    recovery_tokens: int = 16_384
    threads: int = 1

    def __post_init__(self) -> None:
        names = ("steps", "seeds", "batch_size", "max_tokens", "projected_len", "recovery_tokens", "threads")
        for name in names:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.rows is not None and self.rows < 10:
            raise ValueError(f"rows must be at least 10, got {self.rows}")


class Variant(NamedTuple):
    """An attention by its name in tables."""

    name: str
    choice: AttentionChoice


def variants(settings: QualitySettings) -> list[Variant]:
    """MHA first, which the others are compared with."""
    c2psa = [
        Variant(f"c2psa r={rate} k={topk}", AttentionChoice(kind="c2psa", compress_rate=rate, topk=topk))
        for rate in settings.rates
        for topk in settings.topks
    ]
    linformer = AttentionChoice(kind="linformer", projected_len=settings.projected_len)
    return [Variant(MHA, AttentionChoice(kind="mha")), Variant(LINFORMER, linformer), *c2psa]


def run(
    model: str,
    data: Path,
    settings: QualitySettings,
    *,
    found: dict[str, Any] | None,
    report: Callable[[str], None],
    save: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    """Train every variant with every seed; ``save`` gets the result after each run.

    ``found`` is an earlier result: its runs are kept where model, data and settings, but for the number of
    seeds, are the same. The last result says ``complete``. Raises ValueError for rows or a model that cannot
    be trained.
    """
    examples = read_tsv(data)
    if settings.rows is not None and settings.rows < len(examples):
        examples = tuple(random.Random(0).sample(examples, settings.rows))
    result: dict[str, Any] = {
        "bench": "quality",
        "model": Path(model).name,
        "data": data.name,
        "rows": len(examples),
        "held_out": HELD_OUT,
        "metric": METRIC,
        "settings": asdict(settings) | {"rates": list(settings.rates), "topks": list(settings.topks)},
        "machine": machine(),
        "versions": versions(),
        "runs": [],
        "complete": False,
    }
    _check(model, settings)
    known = _known_runs(found, result)
    todo = [(seed, variant) for seed in range(settings.seeds) for variant in variants(settings)]
    with tempfile.TemporaryDirectory() as folder:
        for number, (seed, variant) in enumerate(todo, 1):
            done = known.get((variant.name, seed))
            if done is None:
                labelled = split(examples, data.stem, HELD_OUT, seed)
                start = _start(model, labelled, settings, variant, Path(folder) / f"seed-{seed}")
                done = {"variant": variant.name, "seed": seed}
                done |= _run_one(start, labelled, settings, variant, seed)
                report(f"run {number} of {len(todo)}: {variant.name}, seed {seed}: {done[METRIC]:.4f}")
            result["runs"].append(done)
            save(result)
    result["summary"] = summary(result["runs"], settings)
    result["goals"] = goals(result["summary"], settings)
    result["complete"] = True
    save(result)
    return result


def _check(model: str, settings: QualitySettings) -> None:
    """An attention that does not fit the model is refused before the first run, not after an hour."""
    checkpoint = open_checkpoint(hub.resolve(model))
    for variant in variants(settings):
        rate = variant.choice.compress_rate or 1
        if rate == 1:
            plain = start_from(checkpoint, ("0", "1"), variant.choice, TrainSettings())
        else:
            resolve_compress_rate(plain.config.num_heads, rate)


def _known_runs(
    found: dict[str, Any] | None, result: dict[str, Any]
) -> dict[tuple[str, int], dict[str, Any]]:
    def what(of: dict[str, Any]) -> tuple[Any, ...]:
        told = {name: value for name, value in of["settings"].items() if name not in ("seeds", "threads")}
        return of["model"], of["data"], of["rows"], told

    if found is None or found.get("bench") != "quality" or what(found) != what(result):
        return {}
    return {(run["variant"], run["seed"]): run for run in found["runs"]}


def _start(
    model: str, data: LabelledData, settings: QualitySettings, variant: Variant, folder: Path
) -> str | Path:
    """The checkpoint that a run starts from; a conversion is made once in ``folder`` for all budgets."""
    rate = variant.choice.compress_rate or 1
    if rate == 1:
        return model
    made = folder / f"rate-{rate}"
    if not made.exists():
        folder.mkdir(exist_ok=True)
        options = Options(
            compress_rate=rate,
            topk=max(settings.topks),
            text=" ".join(
                row.text if isinstance(row.text, str) else " ".join(row.text) for row in data.train
            ),
            recovery=Recovery(steps=settings.recovery_steps, learning_rate=settings.recovery_lr),
            window=settings.max_tokens,
            tokens=settings.recovery_tokens,
        )
        with torch_threads(settings.threads):
            convert(Path(hub.resolve(model)), made, options, lambda what, steps: lambda: None)
    return made


def _run_one(
    model: str | Path, data: LabelledData, settings: QualitySettings, variant: Variant, seed: int
) -> dict[str, Any]:
    per_epoch = math.ceil(len(data.train) / settings.batch_size)
    told = TrainSettings(
        epochs=math.ceil(settings.steps / per_epoch),
        max_steps=settings.steps,
        batch_size=settings.batch_size,
        lr=settings.lr,
        max_tokens=settings.max_tokens,
        seed=seed,
        # The same numbers either way, and sooner.
        checkpoint_attention=False,
    )
    began = time.perf_counter()
    with torch_threads(settings.threads):
        made = train(model, data, None, told, variant.choice, say=lambda line: None)
    last = made["measured"][-1]["held out"]
    return {
        METRIC: last[METRIC],
        "f1_macro": last["f1_macro"],
        "last_loss": made["last_loss"],
        "attention_parameters": made["attention_parameters"],
        "seconds": time.perf_counter() - began,
    }


def summary(runs: Sequence[dict[str, Any]], settings: QualitySettings) -> dict[str, dict[str, Any]]:
    """By variant, in points: the mean, its spread over seeds, and the difference from MHA seed by seed."""
    points = {(run["variant"], run["seed"]): 100 * run[METRIC] for run in runs}
    made = {}
    for variant in variants(settings):
        own = [points[variant.name, seed] for seed in range(settings.seeds)]
        change = [points[variant.name, seed] - points[MHA, seed] for seed in range(settings.seeds)]
        spread = _stdev(change)
        parameters = next(r["attention_parameters"] for r in runs if r["variant"] == variant.name)
        made[variant.name] = {
            "mean": statistics.fmean(own),
            "stdev": _stdev(own),
            "change": statistics.fmean(change),
            "change_stderr": None if spread is None else spread / math.sqrt(len(change)),
            "attention_parameters": parameters,
        }
    return made


def goals(found: dict[str, dict[str, Any]], settings: QualitySettings) -> list[dict[str, Any]]:
    """Each goal with what was found; of several budgets of keys the largest counts."""
    topk = max(settings.topks)
    made = []
    for rate, most in GOALS.items():
        name = f"c2psa r={rate} k={topk}"
        if name in found:
            loss = -found[name]["change"]
            made.append({"goal": f"{name} loses at most {most} points", "found": loss, "met": loss <= most})
            if rate > 1:
                lead = found[name]["mean"] - found[LINFORMER]["mean"]
                made.append({"goal": f"{name} is not below linformer", "found": lead, "met": lead >= 0})
    return made


def _stdev(values: Sequence[float]) -> float | None:
    return statistics.stdev(values) if len(values) > 1 else None


def table(result: dict[str, Any]) -> Table:
    """A line for each attention."""
    made = Table("attention", "accuracy (%)", "change (points)", "attention parameters")
    for name, row in result["summary"].items():
        spread = "" if row["stdev"] is None else f" ± {row['stdev']:.2f}"
        error = "" if row["change_stderr"] is None else f" ± {row['change_stderr']:.2f}"
        change = "" if name == MHA else f"{row['change']:+.2f}{error}"
        made.add_row(name, f"{row['mean']:.2f}{spread}", change, f"{row['attention_parameters']:,}")
    return made
