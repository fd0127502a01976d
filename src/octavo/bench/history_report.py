"""What ``octavo bench history`` found, in lines and in one plot."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def lines(result: dict[str, Any]) -> list[str]:
    """A line for each result and each goal of the sections that there are."""
    made: list[str] = []
    if "memory" in result:
        made += _memory(result["memory"])
    if "host" in result:
        made += _goals(result["host"]["goals"])
    if "turns" in result:
        made += _turns(result["turns"])
    if "quality" in result:
        made += _quality(result["quality"])
    if "budget" in result:
        made += [_budget(row) for row in result["budget"]["rows"] if row["share"]]
    if "restart" in result:
        row = result["restart"]
        warm, cold = (row[name]["first_token_s"]["median"] for name in ("from_disk", "computed_again"))
        made.append(
            f"next turn of {row['conversations']} dialogues: first token after {warm:.3f} s from disk, "
            f"{cold:.3f} s computed again: {row['times_sooner']} times sooner, goal {row['goal']:g} "
            f"{_met(row)}; {row['same_answers']} answers are the same to the bit"
        )
    if "kills" in result:
        row = result["kills"]
        made.append(
            f"{row['kills']} kills: opened {row['opened']} times, {row['answers_compared']} answers, "
            f"{row['disk_cached_tokens']} of their tokens from disk, {row['damaged']} records damaged"
        )
    if "pressure" in result:
        row = result["pressure"]
        made.append(
            f"a quarter of {row['conversations']} conversations of {row['tokens']} tokens in the pool, "
            f"{row['minutes']:g} minutes: {row['answers_compared']} answers compared, "
            f"{row.get('preemptions')} preemptions, {row.get('evictions')} evictions, "
            f"{len(row['faults'])} faults"
        )
    return made


def _budget(row: dict[str, Any]) -> str:
    error = row["change_stderr"]
    return (
        f"{row['policy']}, {row['tokens']:,} of {row['length']:,} tokens: perplexity "
        f"{row['change_percent']:+.2f}%" + ("" if error is None else f" ± {error:.2f}")
    )


def _met(row: dict[str, Any]) -> str:
    return "met" if row["met"] else "missed"


def _goals(goals: list[dict[str, Any]]) -> list[str]:
    made = []
    for goal in goals:
        value = goal.get("value")
        told = f"{value:.3f}" if isinstance(value, float) else value
        made.append(f"{goal['goal']}: {_met(goal)}" + ("" if value is None else f" ({told})"))
    return made


def _memory(section: dict[str, Any]) -> list[str]:
    made = [
        f"{row['way']}: {row['conversations']} conversations of {row['tokens']} tokens at once in "
        f"{row['memory']}, {row['preemptions']} preemptions"
        for row in section["together"]
    ]
    return made + _goals(section["goals"])


def _turns(section: dict[str, Any]) -> list[str]:
    made: list[str] = []
    for part in ("next_turn", "next_turn_random_model"):
        found = section.get(part, {"rows": [], "missing": {}})
        for row in found["rows"]:
            made.append(
                f"{row['way']}, {row['tokens']} tokens"
                + (f", turn {row['turn']}" if "turn" in row else ", random model")
                + f": first token after {row['first_token_s']:.3f} s, {row['tokens_per_s']:.1f} tokens/s, "
                f"{row['bytes_per_token']:.0f} bytes a token"
            )
        made += [f"{name}: not measured: {why}" for name, why in found["missing"].items()]
    return made


def _quality(section: dict[str, Any]) -> list[str]:
    made = []
    for row in section["perplexity"]["rows"]:
        made.append(
            f"{row['policy']}, windows of {row['window']}: perplexity {row['perplexity']:.3f} "
            f"({row['change_percent']:+.3f}%)"
        )
    for part in ("perplexity", "needle"):
        made += _goals(section.get(part, {}).get("goals", []))
    return made


def draw(result: dict[str, Any], path: Path) -> bool:
    """What a turn costs, and what a token of history takes, against the dialogue's length. False: there is
    nothing to draw."""
    section = result.get("turns", {})
    parts = [(name, section[name]) for name in ("next_turn", "next_turn_random_model") if name in section]
    if not parts:
        return False
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(
        1, 1 + len(parts), figsize=(5 * (1 + len(parts)), 4.4), layout="constrained"
    )
    answer = section["next_turn"]["answer_tokens"]
    ways = list(dict.fromkeys(row["way"] for _, found in parts for row in found["rows"]))
    colours = {way: f"C{i}" for i, way in enumerate(ways)}
    titles = {"next_turn": section["model"], "next_turn_random_model": "random weights, same shape"}
    for axes, (name, found) in zip(panels, parts, strict=False):
        for way in ways:
            rows = [row for row in found["rows"] if row["way"] == way]
            seconds = [row["first_token_s"] + (answer - 1) / row["tokens_per_s"] for row in rows]
            if rows:
                axes.plot([row["tokens"] for row in rows], seconds, "o-", color=colours[way], label=way)
        axes.set_title(titles[name], fontsize=10)
        axes.set_ylabel(f"seconds of the next turn, {answer} tokens said")
        axes.set_ylim(bottom=0)
    all_rows = [row for _, found in parts for row in found["rows"]]
    for way in ways:
        points = sorted(
            {(row["tokens"], row["bytes_per_token"] / 1000) for row in all_rows if row["way"] == way}
        )
        panels[-1].plot(*zip(*points, strict=True), "o-", color=colours[way], label=way)
    panels[-1].set_title("memory", fontsize=10)
    panels[-1].set_ylabel("kB a token of history, window included")
    panels[-1].set_ylim(bottom=0)
    for axes in panels:
        ticks = sorted({int(x) for line in axes.get_lines() for x in line.get_xdata()})
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [f"{tick / 1024:g}k" for tick in ticks])
        axes.set_xlabel("tokens of the dialogue")
        axes.grid(visible=True, alpha=0.3)
    panels[0].legend(fontsize=8)
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return True
