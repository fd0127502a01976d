"""What converting published models to fewer heads costs in quality: pooled, aligned, fitted.

Each case is measured on the last fifth of a text, none of which was fitted to: the perplexity of a decoder,
the cosine of an encoder's vectors to the original's, and the relative squared error of each layer's attention
output.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.table import Table

from octavo.bench.machine import machine, torch_threads, versions
from octavo.convert.recover import Recovery
from octavo.convert.run import Options, Progress, compute
from octavo.weights import hub
from octavo.weights.hub import DEFAULT_MODEL


@dataclass(frozen=True, slots=True)
class Case:
    """One conversion. ``window`` and ``tokens`` are those of ``octavo.convert.run.Options``."""

    model: str
    compress_rate: int
    window: int
    tokens: int


CASES = (
    Case("minilm", 2, 128, 32_768),
    Case("minilm", 4, 128, 32_768),
    Case(DEFAULT_MODEL, 3, 256, 16_384),
)


def scaled(scale: int) -> tuple[Case, ...]:
    """The cases with so many times fewer tokens, but at least a window."""
    return tuple(replace(case, tokens=max(case.window, case.tokens // scale)) for case in CASES)


#: Keys that a query keeps; a decoder attends to all of them.
TOPK = 64


def run(
    text: Path,
    *,
    cases: tuple[Case, ...] = CASES,
    recovery: Recovery,
    threads: int,
    found: dict[str, Any] | None,
    progress: Progress,
    save: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    """Convert every case in memory; ``save`` is given the result so far after each.

    ``found`` is an earlier result: its cases are kept where text, fitting and the case itself are the same.
    Raises ValueError for a text that is too short.
    """
    words = text.read_text(encoding="utf-8")
    done: list[dict[str, Any]] = []
    whole = {
        "bench": "conversion",
        "text": text.name,
        "recovery": asdict(recovery),
        "threads": threads,
        "machine": machine(),
        "versions": versions(),
        "cases": done,
    }
    same = found is not None and all(found.get(key) == whole[key] for key in ("bench", "text", "recovery"))
    known = found["cases"] if found is not None and same else []
    with torch_threads(threads):
        for case in cases:
            told = asdict(replace(case, model=Path(case.model).name))
            kept = [report for report in known if report["case"] == told]
            if kept:
                done.append(kept[0])
                continue
            options = Options(
                compress_rate=case.compress_rate,
                topk=TOPK,
                text=words,
                recovery=recovery,
                window=case.window,
                tokens=case.tokens,
            )
            result = compute(Path(hub.resolve(case.model)), options, progress).report
            done.append(
                {**result, "model": told["model"], "case": told, "aligned_no_worse": no_worse(result)}
            )
            save(whole)
    save(whole)
    return whole


def no_worse(report: dict[str, Any]) -> bool:
    """Whether aligned pooling lost no more than mean pooling, in the end metric."""
    steps = {step["step"]: step for step in report["steps"]}
    mean, aligned = steps["mean-pooled"], steps["aligned"]
    if "perplexity" in mean:
        return bool(aligned["perplexity"] <= mean["perplexity"])
    return bool(aligned["cosine"] >= mean["cosine"])


def table(result: dict[str, Any]) -> Table:
    """A line for each step of each case."""
    made = Table("model", "rate", "heads", "K and V", "step", "perplexity", "cosine", "layer error")
    for case in result["cases"]:
        (heads, left), (kv_heads, kv_left) = case["num_heads"], case["num_kv_heads"]
        for step in case["steps"]:
            plain = step["step"].startswith("original")
            made.add_row(
                case["model"],
                str(case["compress_rate"]),
                str(heads if plain else left),
                str(kv_heads if plain else kv_left),
                step["step"],
                f"{step['perplexity']:.2f}" if "perplexity" in step else "",
                f"{step['cosine']:.4f}" if "cosine" in step else "",
                f"{step['layer_error']:.4f}",
            )
    return made
