"""``octavo bench topk quality``: the perplexity of a text when attention keeps few keys, beside dense.

The text is cut into windows that do not overlap. A policy attends to all of a window, prompt style; its
second half is scored, and keys are counted over all layers, heads and rows of that half, those of dense
layers included. A token's score is a function of the tokens before it, so one pass over a window also scores
the shorter ones that begin with it. Differences from dense attention are taken window by window.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from octavo.bench.machine import machine, versions
from octavo.bench.topk_policies import BANDS, DENSE, HISTORIES, MODES, Lab, Policy, policies
from octavo.engine.engine import Engine
from octavo.request import AttnTopkReport, SamplingParams

#: Goals: at most so many percent of the keys cost at most so many percent of perplexity, at every window.
GOALS = ((5.0, 1.0), (3.0, 2.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """``tokens``: how much of the text each length scores and reads, in whole windows, at least one."""

    modes: tuple[str, ...] = ("exact", "streaming", "window")
    topks: tuple[int, ...] = (64, 128, 256)
    dense_layers: tuple[int, ...] = (0, 1)
    windows: tuple[int, ...] = (2048, 4096, 8192)
    tokens: int = 8192


@dataclass(frozen=True, slots=True)
class Scored:
    """A window's mean loss a token in nats, and what attention kept in its second half.

    ``dropped_mass`` is a bound of its mean, None where the policy tells none; ``summary_mass`` what fell on
    summaries of old history over all of the pass, None where none were read.
    """

    loss: float
    kept_share: float
    dropped_mass: float | None
    summary_mass: float | None = None


def run(
    model: str,
    text: Path,
    settings: Settings,
    *,
    threads: int | None,
    found: dict[str, Any] | None,
    report: Callable[[str], None],
    save: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    """Score every policy at every length; ``save`` gets the result after each policy.

    Rows of ``found``, an earlier result, are kept where model, text and tokens are the same. Raises
    ValueError for a text that is too short and for policies that the engine has not.
    """
    todo = policies(settings.modes, settings.topks, settings.dense_layers)
    lab = Lab(
        model, max_model_len=max(settings.windows), step_tokens=step_tokens(settings.windows), threads=threads
    )
    layers = lab.model_config.num_layers
    ids = lab.tokenizer.encode(text.read_text(encoding="utf-8"))
    if len(ids) < max(settings.windows):
        raise ValueError(f"{text.name} has {len(ids)} tokens, less than a window of {max(settings.windows)}")
    known = _known_rows(found, model, text, settings)
    result: dict[str, Any] = {
        "bench": "topk_quality",
        "model": Path(model).name,
        "text": text.name,
        "settings": asdict(settings),
        "layers": layers,
        "machine": machine(),
        "versions": versions(),
        "rows": [],
    }
    rows: dict[tuple[str, int], dict[str, Any]] = {}
    for policy in todo:
        wanted = [window for window in settings.windows if (policy.name, window) not in known]
        made = _rows(lab, policy, ids, wanted, settings.tokens) if wanted else {}
        for window in settings.windows:
            rows[policy.name, window] = made.get(window) or known[policy.name, window]
        for window, row in made.items():
            report(f"{policy.name}, {window} tokens: loss {row['loss']:.4f}")
        # Behind them those that this run has not come to, or was not asked for: a run may be cut short.
        result["rows"] = [*rows.values(), *(row for key, row in known.items() if key not in rows)]
        compare(result["rows"])
        save(result)
    result["goals"] = goals(result["rows"])
    save(result)
    return result


def step_tokens(windows: Sequence[int]) -> int:
    """Tokens of an engine step, so that every half window is a whole number of steps."""
    step = min(512, min(windows) // 2)
    for window in windows:
        if window < 2 or window % (2 * step):
            raise ValueError(f"windows must be whole multiples of {2 * max(step, 1)} tokens, got {window}")
    return step


def _known_rows(
    found: dict[str, Any] | None, model: str, text: Path, settings: Settings
) -> dict[tuple[str, int], dict[str, Any]]:
    if found is None or found.get("bench") != "topk_quality":
        return {}
    same = (found["model"], found["text"], found["settings"]["tokens"])
    if same != (Path(model).name, text.name, settings.tokens):
        return {}
    return {(row["policy"], row["window"]): row for row in found["rows"] if row["window"] in settings.windows}


def passes(windows: Sequence[int], tokens: int) -> list[tuple[int, list[int]]]:
    """Where windows begin in so many tokens, and the lengths of those that begin there, the longest last.

    At least one of each length, whatever ``tokens``.
    """
    begun: dict[int, list[int]] = {}
    for window in sorted(windows):
        for i in range(max(1, tokens // window)):
            begun.setdefault(i * window, []).append(window)
    return sorted(begun.items())


def _rows(
    lab: Lab, policy: Policy, ids: Sequence[int], windows: Sequence[int], tokens: int
) -> dict[int, dict[str, Any]]:
    """The row of each length; the seconds are those of all together."""
    engine, num_layers = lab.engine(policy), lab.model_config.num_layers
    began = time.perf_counter()
    scored: dict[int, list[Scored]] = {window: [] for window in windows}
    for start, lengths in passes(windows, min(tokens, len(ids))):
        found = score(engine, policy, ids[start : start + lengths[-1]], lengths, num_layers)
        for window, one in found.items():
            scored[window].append(one)
    seconds = time.perf_counter() - began
    return {window: _row(policy, window, scored[window]) | {"seconds": seconds} for window in windows}


def _row(policy: Policy, window: int, scored: Sequence[Scored]) -> dict[str, Any]:
    loss = statistics.fmean(s.loss for s in scored)
    told = [s.dropped_mass for s in scored if s.dropped_mass is not None]
    return {
        "policy": policy.name,
        "mode": policy.mode,
        "topk": policy.topk,
        "dense_layers": list(policy.dense_layers),
        "window": window,
        "losses": [s.loss for s in scored],
        "loss": loss,
        "perplexity": math.exp(loss),
        "kept_percent": 100 * statistics.fmean(s.kept_share for s in scored),
        "dropped_mass_mean": statistics.fmean(told) if told else None,
    }


def score(
    engine: Engine, policy: Policy, ids: Sequence[int], windows: Sequence[int], num_layers: int
) -> dict[int, Scored]:
    """The second half of each of ``windows``, which all begin as ``ids`` does, the longest being all of it.

    Every half is a whole number of steps (see :func:`step_tokens`).
    """
    engine.reset_prefix_cache()
    engine.add_request(ids, SamplingParams(temperature=0, max_tokens=0, prompt_logprobs=0))
    computed = engine.metrics.computed_tokens
    reports = {0: engine.metrics.attn_topk}
    output = None
    while engine.has_unfinished():
        outputs = engine.step()
        output = outputs[0] if outputs else output
        reports[engine.metrics.computed_tokens - computed] = engine.metrics.attn_topk
    if output is None or output.error is not None or output.prompt_logprobs is None:
        raise RuntimeError(f"a window was not scored: {output and output.error}")
    losses = [
        -logprobs[token].logprob if logprobs else math.nan  # of the first, which nothing goes before
        for token, logprobs in zip(ids, output.prompt_logprobs, strict=True)
    ]
    found = {}
    for window in windows:
        half = window // 2
        kept, dropped = _kept(policy, (reports[half], reports[window]), window, num_layers)
        mass = None if output.history is None else output.history.mean_mass
        found[window] = Scored(statistics.fmean(losses[half:window]), kept, dropped, mass)
    return found


def _kept(
    policy: Policy, reports: tuple[AttnTopkReport, AttnTopkReport], num_tokens: int, num_layers: int
) -> tuple[float, float | None]:
    """The share of keys that the second half kept, over all layers, and its mean dropped mass.

    ``reports``: the engine's after the first half and after the second.
    """
    if policy.keeps_all:
        return 1.0, None
    if policy.mode in BANDS:
        assert policy.topk is not None
        seen = range(num_tokens // 2 + 1, num_tokens + 1)
        return sum(min(policy.topk, n) for n in seen) / sum(seen), None
    before, after = reports
    rows, visible = after.rows - before.rows, after.visible_keys - before.visible_keys
    dropped = after.mean_dropped_mass * after.rows - before.mean_dropped_mass * before.rows
    # The report covers the layers that are not dense.
    dense = visible * len(policy.dense_layers) / (num_layers - len(policy.dense_layers))
    return (after.kept_keys - before.kept_keys + dense) / (visible + dense), max(0.0, dropped / rows)


def compare(rows: Sequence[dict[str, Any]]) -> None:
    """Add to each row what it loses against dense attention at the same length."""
    dense = {row["window"]: row["losses"] for row in rows if row["mode"] == DENSE}
    for row in rows:
        change = [ours - theirs for ours, theirs in zip(row["losses"], dense[row["window"]], strict=True)]
        row["change_percent"] = 100 * math.expm1(statistics.fmean(change))
        spread = statistics.stdev(change) if len(change) > 1 else None
        row["change_stderr"] = None if spread is None else 100 * spread / math.sqrt(len(change))


def goals(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each goal with the policies that meet it at every length that was measured."""
    windows = {row["window"] for row in rows}
    by_name: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by_name.setdefault(row["policy"], []).append(row)
    made = []
    for keys, loss in GOALS:
        met = [
            name
            for name, own in by_name.items()
            if {row["window"] for row in own} == windows
            and all(row["kept_percent"] <= keys and row["change_percent"] <= loss for row in own)
        ]
        goal = f"at most {keys:g}% of the keys cost at most {loss:g}% of perplexity at every length"
        made.append({"goal": goal, "met": bool(met), "by": met})
    return made


def table(result: dict[str, Any]) -> Table:
    """A line for each policy and length."""
    made = Table("policy", "tokens", "keys kept", "perplexity", "change", "dropped mass")
    for row in result["rows"]:
        error = row["change_stderr"]
        dropped = row["dropped_mass_mean"]
        made.add_row(
            row["policy"],
            f"{row['window']:,}",
            f"{row['kept_percent']:.1f}%",
            f"{row['perplexity']:.3f}",
            f"{row['change_percent']:+.2f}%" + ("" if error is None else f" ± {error:.2f}"),
            "" if dropped is None else f"{dropped:.3f}",
        )
    return made


#: A line of each mode; dashed where layers are dense.
COLORS = {mode: f"C{i}" for i, mode in enumerate([*MODES, *BANDS, *HISTORIES])}


def draw(result: dict[str, Any], path: Path) -> None:
    """For each length, what is lost by the share of keys kept: one line a mode."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    windows = sorted({row["window"] for row in result["rows"]})
    figure, panels = plt.subplots(
        1,
        len(windows),
        figsize=(4.2 * len(windows) + 2, 4.2),
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    for axes, window in zip(panels[0], windows, strict=True):
        lines: dict[str, list[tuple[float, float]]] = {}
        for row in result["rows"]:
            if row["window"] == window and row["mode"] != DENSE:
                layers = ", ".join(map(str, row["dense_layers"]))
                label = row["mode"] + (f", layers {layers} dense" if layers else "")
                lines.setdefault(label, []).append((row["kept_percent"], row["change_percent"]))
        for label, points in lines.items():
            mode, _, layers = label.partition(", ")
            color, style = COLORS[mode], "--" if layers else "-"
            axes.plot(
                *zip(*sorted(points), strict=True), style, color=color, marker="o", markersize=4, label=label
            )
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_yscale("symlog", linthresh=1)
        axes.axhline(0, color="grey", linewidth=0.8)
        axes.set_title(f"windows of {window:,} tokens")
        axes.set_xlabel("keys kept, % (all layers, heads, rows)")
        axes.grid(visible=True, alpha=0.3)
    panels[0][0].set_ylabel("perplexity against dense, %")
    handles, labels = panels[0][-1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", fontsize=8)
    figure.savefig(path, dpi=120)
    plt.close(figure)
