"""The same requests through Octavo and through its peers, in one run on one machine.

Every row (an engine on one form of the weights, see :mod:`octavo.bench.variants`) and workload runs in
a fresh process, in the row's environment. All get the same token ids, the same number of threads and
weights written from one checkpoint, and decode greedily past the end token. Before every repeat what an
engine has cached of prompts is forgotten.
"""

from __future__ import annotations

import compileall
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from octavo.bench import goals, own_process, variants, workloads
from octavo.bench.machine import machine, versions
from octavo.bench.variants import OURS, Variant
from octavo.bench.workloads import Workload

METRICS = {"tok_s": "tok/s", "prefill_tok_s": "prefill tok/s", "decode_tok_s": "decode tok/s"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What to run. ``options`` go to Octavo's ``LLM``; ``scale`` above 1 shrinks every workload.

    ``ours`` and ``against`` name rows or families of ``variants.VARIANTS``. A run that takes longer than
    ``limit_s`` is stopped.
    """

    model: str
    text: Path
    keys: Sequence[str]
    threads: int
    peers_dir: Path
    ours: Sequence[str] = (OURS,)
    against: Sequence[str] = ("transformers",)
    repeats: int = 3
    peer_repeats: int = 3
    limit_s: int = 120
    scale: int = 1
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("threads", "repeats", "peer_repeats", "limit_s", "scale"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not self.rows:
            raise ValueError("name at least one row of octavo or one peer")

    @property
    def rows(self) -> list[Variant]:
        """Ours first. Raises ValueError for an unknown name."""
        return variants.choose(self.ours, ours=True) + variants.choose(self.against, ours=False)


def run(
    settings: Settings, command: str, report: Callable[[str], None], save: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """Measure everything; ``save`` is called after each row, so that a stopped run keeps its part.

    Returns the report that is written as JSON. A row that cannot run is in it with the reason.
    """
    from octavo.bench.handover import Handover

    # What runs from its sources may be compiled at every start; an installed package, as every peer, is not.
    compileall.compile_dir(Path(__file__).parents[1], quiet=2)
    made = workloads.make(settings.keys, token_ids(settings.model, settings.text), settings.scale)
    handover = Handover(settings.model, settings.peers_dir)
    result: dict[str, Any] = {
        "bench": "throughput",
        "command": command,
        "model": Path(settings.model).name,
        "text": settings.text.name,
        "scale": settings.scale,
        "threads": settings.threads,
        "limit_s": settings.limit_s,
        "octavo_options": settings.options,
        "machine": machine(),
        "versions": versions(),
        "rows": {row.name: {"weights": row.weights, "options": row.options} for row in settings.rows},
        "missing": {},
        "workloads": {},
    }
    ready: list[tuple[Variant, Path, Path]] = []
    for row in settings.rows:
        try:
            python = variants.python_of(row.family, settings.peers_dir)
            report(f"{row.name}: its weights")
            ready.append((row, python, handover.path(row.file)))
        except (ValueError, ImportError) as error:
            result["missing"][row.name] = str(error)
            report(f"{row.name}: {error}")
    for workload in made:
        engines: dict[str, dict[str, Any]] = {}
        for row, python, model in ready:
            repeats = settings.repeats if row.family == OURS else settings.peer_repeats
            report(f"{workload.key}: {row.name}, {workload.title}, {repeats} times")
            measured = _measure(settings, workload, row, python, model)
            engines[row.name] = measured
            report(f"{workload.key}: {row.name}, {_in_words(measured)}")
            result["workloads"][workload.key] = summarise(workload, engines)
            save(result)
    return result


def token_ids(model: str, text: Path) -> list[int]:
    """The ids of the whole text under the model's tokenizer."""
    from octavo.engine.build import read_tokenizer
    from octavo.weights import hub
    from octavo.weights.load import open_checkpoint

    tokenizer = read_tokenizer(open_checkpoint(hub.resolve(model)))
    return tokenizer.encode(text.read_text(encoding="utf-8"))


def _measure(
    settings: Settings, workload: Workload, row: Variant, python: Path, model: Path
) -> dict[str, Any]:
    ours = row.family == OURS
    job = {
        "engine": row.engine,
        "model": str(model),
        "threads": settings.threads,
        "repeats": settings.repeats if ours else settings.peer_repeats,
        "turns": workload.turns,
        "new_tokens": workload.new_tokens,
        "options": row.options | (settings.options if ours else {}),
    }
    return own_process.measure(python, job, settings.limit_s, _environment(settings, row, os.environ))


def _environment(settings: Settings, row: Variant, inherited: Mapping[str, str]) -> dict[str, str]:
    environment = dict(inherited) | {"OMP_NUM_THREADS": str(settings.threads), "HF_HUB_OFFLINE": "1"}
    if variants.FAMILIES[row.family].folder is not None:
        environment.pop("PYTHONPATH", None)  # a peer's environment is its own
        # What a peer compiles or keeps lies beside it, not in the user's home.
        environment["XDG_CACHE_HOME"] = str((settings.peers_dir / "cache").resolve())
    preload = variants.preload_of(row.family, settings.peers_dir)
    return environment | ({"LD_PRELOAD": preload} if preload else {})


def _in_words(measured: dict[str, Any]) -> str:
    if "failed" in measured:
        return f"failed: {measured['failed']}"
    if "stopped_s" in measured:
        return f"stopped after {measured['stopped_s']} s"
    return ", ".join(f"{each['timings']['total_s']:.2f} s" for each in measured["runs"])


def summarise(workload: Workload, measured: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Each row's medians or what stopped it, how far its tokens agree with ours, and the goals."""
    engines = {name: _engine(found) for name, found in measured.items()}
    for name, engine in engines.items():
        beside = _reference(name, engines)
        if beside is not None and "median" in engine:
            mine, theirs = (measured[each]["runs"][-1]["token_ids"] for each in (beside, name))
            engine["tokens"] = {"beside": beside} | compare_ids(mine, theirs)
    return {
        "title": workload.title,
        "prompt_tokens": workload.num_prompt_tokens,
        "new_tokens": workload.num_new_tokens,
        "engines": engines,
        "goals": goals.judge(workload.key, engines, workload.num_new_tokens),
    }


def _engine(found: dict[str, Any]) -> dict[str, Any]:
    if "failed" in found:
        return {"failed": found["failed"]}
    runs = [each["timings"] for each in found["runs"]]
    start = {key: found[key] for key in ("load_s", "start_up_s", "load_peak_bytes", "versions")}
    if "stopped_s" in found:
        peaks = [each["peak_bytes"] for each in found["runs"]] + [found["peak_bytes"]]
        return start | {"stopped_s": found["stopped_s"], "runs": runs, "peak_bytes": max(peaks)}
    return start | {
        "repeats": len(runs),
        "median": {metric: statistics.median(run[metric] for run in runs) for metric in runs[0]},
        "runs": runs,
        "peak_bytes": max(each["peak_bytes"] for each in found["runs"]),
        "notes": found["runs"][-1]["notes"],
    }


def _reference(name: str, engines: dict[str, dict[str, Any]]) -> str | None:
    """The row of ours whose tokens another's are held against: of the same weights, else the first."""
    ours = [each for each in engines if variants.VARIANTS[each].family == OURS and "median" in engines[each]]
    same = [each for each in ours if variants.VARIANTS[each].weights == variants.VARIANTS[name].weights]
    chosen = (same or ours or [name])[0]
    return None if chosen == name else chosen


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
