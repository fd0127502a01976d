"""What compact history costs in quality, beside exact history: perplexity, and a sentence to be found again.

Both are the benches of top-k attention (:mod:`octavo.bench.topk_quality`, :mod:`octavo.bench.topk_needle`)
with compact history in place of few keys: the same text, windows, sentence and questions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.bench import topk_needle, topk_quality
from octavo.bench.topk_policies import DENSE, HISTORIES

#: Perplexity may rise by so many percent, at every length of window.
GOALS = {"compact-int8": 0.2, "compact-int4": 1.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """``windows`` and ``tokens`` as of the perplexity bench; ``lengths`` of texts with a sentence in them, if
    there are to be any."""

    windows: tuple[int, ...] = (2048, 4096, 8192)
    tokens: int = 8192
    lengths: tuple[int, ...] = (2048, 4096, 8000)


def run(
    model: str,
    text: Path,
    settings: Settings,
    *,
    threads: int | None,
    found: dict[str, Any],
    report: Callable[[str], None],
    save: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    """``save`` gets the result so far; rows of ``found``, an earlier one, are kept if they measure the same.

    Raises ValueError as the two benches do.
    """
    modes = tuple(HISTORIES)
    result: dict[str, Any] = {}

    def keep(part: str) -> Callable[[dict[str, Any]], None]:
        return lambda so_far: save(result | {part: so_far})

    result["perplexity"] = topk_quality.run(
        model,
        text,
        topk_quality.Settings(
            modes=modes, topks=(), dense_layers=(), windows=settings.windows, tokens=settings.tokens
        ),
        threads=threads,
        found=found.get("perplexity"),
        report=report,
        save=keep("perplexity"),
    )
    result["perplexity"]["goals"] = perplexity_goals(result["perplexity"]["rows"])
    if settings.lengths:
        result["needle"] = topk_needle.run(
            model,
            text,
            topk_needle.Settings(modes=modes, topks=(), lengths=settings.lengths),
            threads=threads,
            found=found.get("needle"),
            report=report,
            save=keep("needle"),
        )
        result["needle"]["goals"] = needle_goals(result["needle"]["rows"])
    save(result)
    return result


def perplexity_goals(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each form of history, its worst change over the windows against its goal."""
    made = []
    for mode, percent in GOALS.items():
        worst = max(row["change_percent"] for row in rows if row["mode"] == mode)
        made.append(
            {
                "goal": f"{mode}: perplexity within {percent:g}% of exact history at every length",
                "value": worst,
                "met": worst <= percent,
            }
        )
    return made


def needle_goals(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Whether the wording is a fair question, and for each form of history what the answers lose."""
    wording = topk_needle.goals(rows)[0]
    made = [{name: wording[name] for name in ("goal", "met")}]
    dense = next(row for row in rows if row["mode"] == DENSE)
    for row in rows:
        if row["mode"] == DENSE:
            continue
        made.append(
            {
                "goal": f"{row['policy']}: every answer that exact history finds",
                "value": f"{row['kept_of_dense']} of {dense['found']}",
                "met": row["kept_of_dense"] == dense["found"],
            }
        )
        made.append(
            {
                "goal": f"{row['policy']}: mean loss of the right answer at most {topk_needle.GOAL_LOSS} nat",
                "value": row["mean_loss_nats"],
                "met": row["mean_loss_nats"] <= topk_needle.GOAL_LOSS,
            }
        )
    return made
