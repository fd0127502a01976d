"""What a storage type, and 8-bit activations, cost in quality: perplexity under one model in several ways.

The text is cut into windows that do not overlap. Every window is computed alone and its second half scored,
so each scored token has at least half a window before it. The difference between two types is taken window by
window, which takes out how hard each window is; its standard error is that of the mean of those differences.
"""

from __future__ import annotations

import math
import resource
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.table import Table

from octavo.bench.machine import machine, versions
from octavo.config import WEIGHTS
from octavo.llm import LLM
from octavo.request import SamplingParams


def run(
    model: str,
    weights: Sequence[str],
    text: Path,
    *,
    window: int,
    max_windows: int | None,
    options: dict[str, Any],
    report: Callable[[str], None],
) -> dict[str, Any]:
    """Score ``text`` once for each of ``weights``; the first is what the others are compared with.

    "q8_0/int8" is q8_0 with activations in int8. ``options`` go to LLM. Raises ValueError for a text of less
    than one window, or weights that the model cannot be kept in.
    """
    ways = {name: way(name) for name in weights}
    found: dict[str, dict[str, Any]] = {}
    for name, (kept, activations) in ways.items():
        llm = LLM(
            model,
            weights=kept,
            activations=activations,
            enable_prefix_caching=False,
            max_num_seqs=1,
            max_model_len=window + 1,
            **options,
        )
        say = partial(_say, report, name)
        losses = _losses(llm, text, window, max_windows, say)
        found[name] = {"window_losses": losses}
        del llm
        first = next(iter(found.values()))["window_losses"]
        found[name] |= _summary(losses, first)
        report(f"{name}: perplexity {found[name]['perplexity']:.4f} over {len(losses)} windows")
    return {
        "bench": "perplexity",
        "model": Path(model).name,
        "text": text.name,
        "window": window,
        "scored": window // 2,
        "options": options,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "machine": machine(),
        "versions": versions(),
        "weights": found,
    }


def way(name: str) -> tuple[str, str]:
    """Weights and activations. Raises ValueError for a name of neither form."""
    kept, slash, activations = name.partition("/")
    if kept not in WEIGHTS or (slash and activations != "int8"):
        raise ValueError(f"weights are {', '.join(WEIGHTS)}, or one of them and /int8, got {name!r}")
    return kept, activations or "float32"


def _say(report: Callable[[str], None], name: str, line: str) -> None:
    report(f"{name}: {line}")


def _losses(
    llm: LLM, text: Path, window: int, max_windows: int | None, report: Callable[[str], None]
) -> list[float]:
    """Mean loss a token, in nats, of the second half of every window."""
    ids = llm.tokenizer.encode(text.read_text(encoding="utf-8"))
    starts = range(0, len(ids) - window + 1, window)[:max_windows]
    if not starts:
        raise ValueError(f"{text.name} has {len(ids)} tokens, less than one window of {window}")
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    losses = []
    for done, start in enumerate(starts):
        piece = ids[start : start + window]
        (output,) = llm.generate(piece, params, use_tqdm=False)
        assert output.prompt_logprobs is not None
        scored = zip(piece[window // 2 :], output.prompt_logprobs[window // 2 :], strict=True)
        losses.append(-statistics.fmean(logprobs[token].logprob for token, logprobs in scored if logprobs))
        report(f"window {done + 1} of {len(starts)}")
    return losses


def _summary(losses: list[float], first: list[float]) -> dict[str, Any]:
    differences = [ours - theirs for ours, theirs in zip(losses, first, strict=True)]
    spread = statistics.stdev(differences) if len(differences) > 1 else math.nan
    return {
        "perplexity": math.exp(statistics.fmean(losses)),
        "loss": statistics.fmean(losses),
        "loss_change": statistics.fmean(differences),
        "loss_change_stderr": None if math.isnan(spread) else spread / math.sqrt(len(differences)),
        "perplexity_change_percent": 100 * math.expm1(statistics.fmean(differences)),
    }


def table(result: dict[str, Any]) -> Table:
    """A line for each way of keeping the weights."""
    made = Table("weights", "perplexity", "change", "loss change (nats a token)", "windows")
    for name, row in result["weights"].items():
        error = row["loss_change_stderr"]
        made.add_row(
            name,
            f"{row['perplexity']:.4f}",
            f"{row['perplexity_change_percent']:+.2f}%",
            f"{row['loss_change']:+.5f}" + ("" if error is None else f" ± {error:.5f}"),
            str(len(row["window_losses"])),
        )
    return made
