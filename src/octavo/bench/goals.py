"""What Octavo is to reach on each workload, and whether it did."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

#: Peak memory may be above llama.cpp's by this much.
MEMORY_SLACK = 300 * 10**6

AS_STORED = ("q8_0", "q4_1")
LLAMA_CPP = {"fp32": "f32", "q8_0": "q8_0", "q4_1": "q4_1"}


@dataclass(frozen=True, slots=True)
class Goal:
    """``ours`` must be at least ``factor`` times as fast as ``peer``; with measure "peak_bytes" it must
    need at most ``factor`` times as much plus ``MEMORY_SLACK``."""

    workload: str
    measure: str
    ours: str
    peer: str
    factor: float


def _speed(workload: str, measure: str, peer: str, factor: float) -> Goal:
    return Goal(workload, measure, "octavo-fp32", peer, factor)


def _all_goals() -> tuple[Goal, ...]:
    goals = [
        _speed("a", "tok_s", "transformers-fp32", 1.5),
        _speed("b", "tok_s", "transformers-fp32", 1.4),
        _speed("c", "tok_s", "transformers-fp32", 8.0),
        _speed("d", "tok_s", "transformers-fp32", 2.5),
        _speed("e", "prefill_tok_s", "transformers-fp32", 1.2),
        _speed("e", "decode_tok_s", "transformers-fp32", 1.6),
        _speed("a", "tok_s", "llama.cpp-f32", 1.0),
        *(Goal("a", "tok_s", f"octavo-{kind}", f"llama.cpp-{kind}", 1.3) for kind in AS_STORED),
        _speed("b", "tok_s", "openvino-fp32", 1.15),
        _speed("c", "tok_s", "vllm-fp32", 1.5),
        _speed("d", "tok_s", "openvino-fp32", 1.4),
    ]
    for key in ("e", "e8k"):
        goals.append(_speed(key, "prefill_tok_s", "openvino-fp32", 1.0))
        goals.append(_speed(key, "decode_tok_s", "openvino-fp32", 1.4))
    # llama.cpp and OpenVINO's int8 round activations to 8 bits, so these compare like with like.
    int8 = "octavo-q8_0-int8"
    goals += [Goal("a", "tok_s", f"octavo-{kind}-int8", f"llama.cpp-{kind}", 1.3) for kind in AS_STORED]
    goals += [
        Goal("b", "tok_s", int8, "openvino-int8", 1.15),
        Goal("d", "tok_s", int8, "openvino-int8", 1.4),
        Goal("e", "prefill_tok_s", int8, "openvino-int8", 1.0),
        Goal("e", "decode_tok_s", int8, "openvino-int8", 1.4),
    ]
    for key, measures in {
        "b": ("tok_s",),
        "c": ("tok_s",),
        "d": ("tok_s",),
        "e": ("prefill_tok_s", "decode_tok_s"),
        "e8k": ("prefill_tok_s", "decode_tok_s"),
    }.items():
        goals += [
            Goal(key, measure, f"octavo-{kind}", "octavo-fp32", 1.0)
            for kind in AS_STORED
            for measure in measures
        ]
    for key in ("a", "b", "c", "d", "e", "e8k"):
        goals += [
            Goal(key, "peak_bytes", f"octavo-{ours}", f"llama.cpp-{theirs}", 1.0)
            for ours, theirs in LLAMA_CPP.items()
        ]
    return tuple(goals)


GOALS = _all_goals()


def judge(key: str, engines: dict[str, dict[str, Any]], new_tokens: int) -> list[dict[str, Any]]:
    """The goals of a workload whose two rows were both asked for, each with what came of it.

    ``ratio`` is None and ``why`` says so where a row gave no number; ``bound`` is true where the peer
    was stopped at the limit, so that the true ratio is above the one given. ``met``: True, False or
    None where that cannot be said.
    """
    judged = []
    for goal in GOALS:
        if goal.workload != key or goal.ours not in engines or goal.peer not in engines:
            continue
        ours, theirs = engines[goal.ours], engines[goal.peer]
        row = {"measure": goal.measure, "ours": goal.ours, "peer": goal.peer, "goal": goal.factor}
        judged.append(row | _outcome(goal, ours, theirs, new_tokens))
    return judged


def _outcome(goal: Goal, ours: dict[str, Any], theirs: dict[str, Any], new_tokens: int) -> dict[str, Any]:
    for name, row in ((goal.ours, ours), (goal.peer, theirs)):
        if "failed" in row:
            return _unknown(f"{name} did not run")
    if "stopped_s" in ours:
        return _unknown(f"{goal.ours} was stopped at the limit")
    if goal.measure == "peak_bytes":
        if "stopped_s" in theirs:
            return _unknown(f"{goal.peer} was stopped at the limit")
        allowed = goal.factor * theirs["peak_bytes"] + MEMORY_SLACK
        return {
            "ratio": ours["peak_bytes"] / theirs["peak_bytes"],
            "bound": False,
            "met": ours["peak_bytes"] <= allowed,
            "ours_value": ours["peak_bytes"],
            "peer_value": theirs["peak_bytes"],
        }
    mine = ours["median"][goal.measure]
    if "stopped_s" not in theirs:
        other = theirs["median"][goal.measure]
        return {
            "ratio": mine / other,
            "bound": False,
            "met": mine / other >= goal.factor,
            "ours_value": mine,
            "peer_value": other,
        }
    if goal.measure != "tok_s":
        return _unknown(f"{goal.peer} was stopped at the limit")
    ratio = mine / (new_tokens / theirs["stopped_s"])
    # A peer that is slower than the limit by an unknown factor can show a goal met, never missed.
    met = True if ratio >= goal.factor else None
    return {"ratio": ratio, "bound": True, "met": met, "ours_value": mine, "peer_value": None}


def _unknown(why: str) -> dict[str, Any]:
    return {"ratio": None, "bound": False, "met": None, "why": why, "ours_value": None, "peer_value": None}
