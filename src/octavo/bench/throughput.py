"""The same requests through Octavo and through its peers, in one run on one machine.

Every engine and workload runs in a fresh process (see :mod:`octavo.bench.worker`). All engines get the
same token ids and the same float32 weights, use the same number of threads and decode greedily past
the end token. Octavo's prefix cache is emptied before every repeat.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from octavo.bench import workloads
from octavo.bench.machine import machine, versions
from octavo.bench.workloads import Workload

#: Rows of ``octavo.bench.engines.ENGINES``; that module imports torch.
OURS = "octavo"
PEERS = ("transformers",)
METRICS = {"tok_s": "tok/s", "prefill_tok_s": "prefill tok/s", "decode_tok_s": "decode tok/s"}
#: Workloads on which a static batch takes about a minute: repeated ``slow_peer_repeats`` times.
SLOW_FOR_PEERS = frozenset("cd")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What to run. ``options`` go to Octavo's ``LLM``; ``scale`` above 1 shrinks every workload."""

    model: str
    text: Path
    keys: Sequence[str]
    threads: int
    peers: Sequence[str] = PEERS
    repeats: int = 3
    peer_repeats: int = 3
    slow_peer_repeats: int = 3
    scale: int = 1
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("threads", "repeats", "peer_repeats", "slow_peer_repeats", "scale"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for peer in self.peers:
            if peer not in PEERS:
                raise ValueError(f"peers are {', '.join(PEERS)}, got {peer!r}")

    def repeats_of(self, engine: str, key: str) -> int:
        if engine == OURS:
            return self.repeats
        return self.slow_peer_repeats if key in SLOW_FOR_PEERS else self.peer_repeats


def run(
    settings: Settings, command: str, report: Callable[[str], None], save: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """Measure everything; ``save`` is called after each workload, so that a stopped run keeps its part.

    Returns the report that is written as JSON. Raises ValueError when an engine fails.
    """
    made = workloads.make(settings.keys, token_ids(settings.model, settings.text), settings.scale)
    result: dict[str, Any] = {
        "bench": "throughput",
        "command": command,
        "model": Path(settings.model).name,
        "text": settings.text.name,
        "scale": settings.scale,
        "threads": settings.threads,
        "octavo_options": settings.options,
        "machine": machine(),
        "versions": versions(),
        "workloads": {},
    }
    for workload in made:
        measured = {}
        for engine in (OURS, *settings.peers):
            repeats = settings.repeats_of(engine, workload.key)
            report(f"{workload.key}: {engine}, {workload.title}, {repeats} times")
            measured[engine] = _in_own_process(settings, workload, engine, repeats)
        result["workloads"][workload.key] = summarise(workload, measured)
        save(result)
    return result


def token_ids(model: str, text: Path) -> list[int]:
    """The ids of the whole text under the model's tokenizer."""
    from octavo.engine.build import read_tokenizer
    from octavo.weights import hub
    from octavo.weights.load import open_checkpoint

    tokenizer = read_tokenizer(open_checkpoint(hub.resolve(model)))
    return tokenizer.encode(text.read_text(encoding="utf-8"))


def _in_own_process(settings: Settings, workload: Workload, engine: str, repeats: int) -> dict[str, Any]:
    job = {
        "engine": engine,
        "model": settings.model,
        "threads": settings.threads,
        "repeats": repeats,
        "workload": workload.to_json(),
        "options": settings.options if engine == OURS else {},
    }
    child = subprocess.run(
        [sys.executable, "-m", "octavo.bench.worker"],
        input=json.dumps(job),
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": str(settings.threads)},
        check=False,
    )
    where = f"{engine} on workload {workload.key}"
    if child.returncode != 0:
        lines = child.stderr.strip().splitlines()
        raise ValueError(f"{where} failed ({child.returncode}): {lines[-1] if lines else 'nothing was said'}")
    measured: dict[str, Any] = json.loads(child.stdout)
    if "error" in measured:
        raise ValueError(f"{where} failed: {measured['error']}")
    return measured


def summarise(workload: Workload, measured: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Medians of each engine, and how Octavo compares with each peer."""
    engines = {}
    for name, result in measured.items():
        runs = result["runs"]
        engines[name] = {
            "repeats": len(runs),
            "median": {metric: statistics.median(r[metric] for r in runs) for metric in runs[0]},
            "runs": runs,
            "load_s": result["load_s"],
            "peak_bytes": result["peak_bytes"],
            "load_peak_bytes": result["load_peak_bytes"],
            "notes": result["notes"],
        }
    comparisons = {}
    for peer in measured:
        if peer == OURS:
            continue
        ours, theirs = engines[OURS]["median"], engines[peer]["median"]
        comparisons[peer] = {
            "speed": {metric: ours[metric] / theirs[metric] for metric in METRICS if metric in ours},
            "memory": engines[OURS]["peak_bytes"] / engines[peer]["peak_bytes"],
            "tokens": compare_ids(measured[OURS]["token_ids"], measured[peer]["token_ids"]),
        }
    return {
        "title": workload.title,
        "prompt_tokens": workload.num_prompt_tokens,
        "new_tokens": workload.num_new_tokens,
        "goals": workload.goals,
        "engines": engines,
        "comparisons": comparisons,
    }


def compare_ids(ours: list[list[int]], theirs: list[list[int]]) -> dict[str, Any]:
    """How far two engines' tokens agree.

    ``share_before_divergence`` counts, of all tokens, those before their chat's first difference (after
    it the two continue different texts); ``first_divergence`` is the earliest position of one, or None.
    """
    agreed, positions = 0, []
    for a, b in zip(ours, theirs, strict=True):
        same = next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), None)
        agreed += len(a) if same is None else same
        if same is not None:
            positions.append(same)
    return {
        "chats_equal": len(ours) - len(positions),
        "chats": len(ours),
        "share_before_divergence": agreed / sum(map(len, ours)),
        "first_divergence": min(positions, default=None),
    }
