"""``octavo bench topk needle``: is a sentence in a long text still found when attention keeps few keys?

A sentence is put at ten depths into texts of several lengths. The text ends with a question about it; a
second turn asks for something else that the sentence says, which a cache that evicts by the first question
cannot know. For each cell: the greedy answer, and the log-probability of the right one, token by token as if
each had been said (teacher-forced). The second turn follows the right answer, not the model's, so that all
policies are asked the same.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from octavo.bench.machine import machine, versions
from octavo.bench.topk_policies import DENSE, Lab, Policy, policies
from octavo.engine.engine import Engine
from octavo.request import RequestOutput, SamplingParams

#: What is hidden, and the turns: how a question ends, and what must follow.
NEEDLE = (
    "\n\nRemember this: the best thing to eat in Lisbon is a pancake with lemon. Remember this: the best "
    "season to visit Lisbon is autumn.\n\n"
)
TURNS = (
    ("\n\nRemember this: the best thing to eat in Lisbon is", " a pancake with lemon"),
    (". Remember this: the best season to visit Lisbon is", " autumn"),
)
DEPTHS = 10
#: Goals: dense finds the needle in so many of 30 cells; the mean loss of the right answer's log-probability.
GOAL_FOUND, GOAL_LOSS = 20 / 30, 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    modes: tuple[str, ...] = ("exact", "streaming")
    topks: tuple[int, ...] = (64, 256)
    dense_layers: tuple[int, ...] = ()
    lengths: tuple[int, ...] = (2048, 4096, 8000)


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
    """Ask every policy in every cell; ``save`` gets the result after each.

    Rows of ``found``, an earlier result, are kept where model, text, lengths and wording are the same. Raises
    ValueError for a text that is too short and for policies that the engine has not.
    """
    todo = policies(settings.modes, settings.topks, settings.dense_layers)
    lab = Lab(model, max_model_len=max(settings.lengths) + 1, threads=threads)
    encode = lab.tokenizer.encode
    filler = encode(text.read_text(encoding="utf-8"))
    if len(filler) < max(settings.lengths):
        raise ValueError(f"{text.name} has {len(filler)} tokens, less than a text of {max(settings.lengths)}")
    parts = Parts(encode(NEEDLE), [(encode(ask), encode(answer)) for ask, answer in TURNS])
    result: dict[str, Any] = {
        "bench": "topk_needle",
        "model": Path(model).name,
        "text": text.name,
        "settings": asdict(settings),
        "needle": NEEDLE,
        "turns": TURNS,
        "machine": machine(),
        "versions": versions(),
        "rows": [],
    }
    known = _known_rows(found, result)
    rows: dict[str, dict[str, Any]] = {}
    for policy in todo:
        row = known.get(policy.name)
        if row is None:
            row = _row(lab.engine(policy), policy, filler, parts, settings.lengths)
            report(f"{policy.name}: {row['found']} of {row['asked']} answers, {row['seconds']:.0f} s")
        rows[policy.name] = row
        # Behind them those that this run has not come to, or was not asked for: a run may be cut short.
        result["rows"] = [*rows.values(), *(row for name, row in known.items() if name not in rows)]
        compare(result["rows"])
        save(result)
    result["goals"] = goals(result["rows"])
    save(result)
    return result


def _known_rows(found: dict[str, Any] | None, result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    def what(of: dict[str, Any]) -> tuple[Any, ...]:
        turns = [list(turn) for turn in of["turns"]]
        return of["model"], of["text"], list(of["settings"]["lengths"]), of["needle"], turns

    if found is None or found.get("bench") != "topk_needle" or what(found) != what(result):
        return {}
    return {row["policy"]: row for row in found["rows"]}


@dataclass(frozen=True, slots=True)
class Parts:
    """Token ids: what is hidden, and (question, answer) of each turn."""

    needle: list[int]
    turns: list[tuple[list[int], list[int]]]

    @property
    def num_tokens(self) -> int:
        return len(self.needle) + sum(len(ask) + len(answer) for ask, answer in self.turns)

    def context(self, filler: Sequence[int], length: int, depth: int) -> list[int]:
        """The text with the needle in it, so long that with all turns it has ``length`` tokens."""
        size = length - self.num_tokens
        at = size * depth // (DEPTHS - 1)
        return [*filler[:at], *self.needle, *filler[at:size]]


def _row(
    engine: Engine, policy: Policy, filler: Sequence[int], parts: Parts, lengths: Sequence[int]
) -> dict[str, Any]:
    began = time.perf_counter()
    cells: list[dict[str, Any]] = []
    for length in lengths:
        # The deepest first: the others find what comes before their needle in the prefix cache.
        for depth in reversed(range(DEPTHS)):
            ids = parts.context(filler, length, depth)
            cells.append({"length": length, "depth": depth, "turns": _ask(engine, ids, parts)})
    asked = [turn for cell in cells for turn in cell["turns"]]
    return {
        "policy": policy.name,
        "mode": policy.mode,
        "topk": policy.topk,
        "dense_layers": list(policy.dense_layers),
        "cells": cells,
        "asked": len(asked),
        "found": sum(turn["right"] for turn in asked),
        "found_by_turn": [sum(cell["turns"][i]["right"] for cell in cells) for i in range(len(parts.turns))],
        "seconds": time.perf_counter() - began,
    }


def _ask(engine: Engine, context: Sequence[int], parts: Parts) -> list[dict[str, Any]]:
    ids, turns = list(context), []
    for ask, answer in parts.turns:
        ids = ids + ask
        said = greedy(engine, ids, len(answer))
        turns.append({"right": said == answer, "logprob": logprob_of(engine, ids, answer)})
        ids = ids + answer
    return turns


def greedy(engine: Engine, ids: Sequence[int], num_tokens: int) -> list[int]:
    """The most probable continuation, token by token."""
    output = _answer(engine, ids, SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True))
    return output.outputs[0].token_ids


def logprob_of(engine: Engine, ids: Sequence[int], answer: Sequence[int]) -> float:
    """The log-probability of ``answer`` after ``ids``, in nats.

    A bias makes the engine say each token; log-probabilities are those of the model before any bias. Unlike
    those of a prompt they leave the prefix cache in use, so that a cell costs a few tokens.
    """
    total = 0.0
    for i, token in enumerate(answer):
        bias = {token: 100.0}
        params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, logprobs=0, logit_bias=bias)
        (choice,) = _answer(engine, [*ids, *answer[:i]], params).outputs
        if choice.token_ids != [token] or choice.logprobs is None:
            raise RuntimeError(f"the engine said {choice.token_ids} where a bias of 100 asks for {token}")
        total += choice.logprobs[0][token].logprob
    return total


def _answer(engine: Engine, ids: Sequence[int], params: SamplingParams) -> RequestOutput:
    engine.add_request(ids, params)
    output = None
    while engine.has_unfinished():
        output = next(iter(engine.step()), output)
    if output is None or output.error is not None:
        raise RuntimeError(f"a question was not answered: {output and output.error}")
    return output


def compare(rows: Sequence[dict[str, Any]]) -> None:
    """Add to each row: how many of dense attention's right answers it gives too, and what it loses."""
    dense = next(row for row in rows if row["mode"] == DENSE)
    theirs = [turn for cell in dense["cells"] for turn in cell["turns"]]
    for row in rows:
        ours = [turn for cell in row["cells"] for turn in cell["turns"]]
        pairs = list(zip(ours, theirs, strict=True))
        row["kept_of_dense"] = sum(our["right"] and their["right"] for our, their in pairs)
        row["mean_loss_nats"] = statistics.fmean(their["logprob"] - our["logprob"] for our, their in pairs)
        row["worst_loss_nats"] = max(their["logprob"] - our["logprob"] for our, their in pairs)


def goals(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Whether the wording is a fair question, and which policies answer it as dense attention does."""
    dense = next(row for row in rows if row["mode"] == DENSE)
    least = GOAL_FOUND * len(dense["cells"])
    made = [
        {
            "goal": f"dense attention answers {least:.0f} of {len(dense['cells'])} cells in each turn",
            "met": min(dense["found_by_turn"]) >= least,
            "by": [DENSE],
        }
    ]
    others = [row for row in rows if row["mode"] != DENSE]
    same = [row["policy"] for row in others if row["kept_of_dense"] == dense["found"]]
    near = [row["policy"] for row in others if row["mean_loss_nats"] <= GOAL_LOSS]
    made.append({"goal": "every answer that dense attention finds", "met": bool(same), "by": same})
    made.append(
        {"goal": f"mean loss of the right answer at most {GOAL_LOSS} nat", "met": bool(near), "by": near}
    )
    return made


def table(result: dict[str, Any]) -> Table:
    """A line for each policy."""
    made = Table("policy", "right", "by turn", "of dense's", "mean loss (nats)", "worst loss")
    dense = next(row for row in result["rows"] if row["mode"] == DENSE)
    for row in result["rows"]:
        made.add_row(
            row["policy"],
            f"{row['found']} of {row['asked']}",
            ", ".join(map(str, row["found_by_turn"])),
            f"{row['kept_of_dense']} of {dense['found']}",
            f"{row['mean_loss_nats']:+.3f}",
            f"{row['worst_loss_nats']:+.3f}",
        )
    return made


def draw(result: dict[str, Any], path: Path) -> None:
    """Policies by cells: what the right answer's log-probability loses against dense, both turns."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.colors import SymLogNorm

    rows = result["rows"]
    dense = next(row for row in rows if row["mode"] == DENSE)
    num_turns = len(result["turns"])
    figure, panels = plt.subplots(
        num_turns, 1, figsize=(10, 1.2 + 0.34 * num_turns * len(rows)), squeeze=False, layout="constrained"
    )
    for i, axes in enumerate(panels[:, 0]):
        values = [
            [
                a["turns"][i]["logprob"] - b["turns"][i]["logprob"]
                for a, b in zip(dense["cells"], row["cells"], strict=True)
            ]
            for row in rows
        ]
        image = axes.imshow(values, aspect="auto", norm=SymLogNorm(0.1, vmin=-10, vmax=10), cmap="coolwarm")
        axes.set_yticks(range(len(rows)), [row["policy"] for row in rows], fontsize=8)
        axes.set_title(f"turn {i + 1}", fontsize=9)
        axes.set_xticks(range(0, len(dense["cells"]), DEPTHS), result["settings"]["lengths"])
    panels[-1, 0].set_xlabel("cells: tokens of the text, and within them depth from the end to the start")
    figure.colorbar(image, ax=panels[:, 0], label="loss of the right answer, nats")
    figure.savefig(path, dpi=120)
    plt.close(figure)
