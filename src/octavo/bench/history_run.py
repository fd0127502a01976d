"""``octavo bench history``: its sections, one after the other."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from octavo.bench import (
    history,
    history_budget,
    history_host,
    history_memory,
    history_pressure,
    history_quality,
    history_turns,
)
from octavo.bench.machine import machine, versions
from octavo.config import EngineConfig
from octavo.engine import build
from octavo.engine.resources import usable_cpus
from octavo.weights import hub
from octavo.weights.load import open_checkpoint

SECTIONS = ("memory", "host", "turns", "quality", "budget", "restart", "kills", "pressure")

Section = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Conversations of ``tokens`` tokens are counted; those of ``together_tokens`` tokens are run together in
    a pool of ``together_memory``."""

    tokens: int = 8192
    together_tokens: int = 2048
    together_memory: str = "128MiB"


@dataclass(frozen=True, slots=True, kw_only=True)
class Turns:
    """``lengths`` of dialogues, within the model's context; ``long`` ones are a random model's, if any."""

    lengths: tuple[int, ...] = (2048, 4096, 8192)
    long: tuple[int, ...] = (8192, 16384, 32768)
    rounds: int = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """``restart`` is also what ``kills`` takes its settings from."""

    model: str
    data: Path
    text: Path
    sections: tuple[str, ...]
    memory: Memory
    turns: Turns
    quality: history_quality.Settings
    restart: history.Settings
    pressure: history_pressure.Settings
    threads: int | None = None


def check_sections(names: tuple[str, ...]) -> None:
    """Raises ValueError for a section that there is not, and for none."""
    for name in names:
        if name not in SECTIONS:
            raise ValueError(f"{name!r:.60} is not a section; these are: {', '.join(SECTIONS)}")
    if not names:
        raise ValueError(f"name a section: {', '.join(SECTIONS)}")


def run(
    settings: Settings,
    *,
    command: str,
    earlier: dict[str, Any],
    report: Callable[[str], None],
    save: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    """Runs the sections in the order of ``SECTIONS``.

    ``save`` gets the result so far: the new sections beside those of ``earlier``, each with its own command,
    model and machine. A section's ``faults`` should be empty.

    Raises ValueError for settings that do not fit the model, the chats or the text.
    """
    check_sections(settings.sections)
    result = {"bench": "history"} | {name: earlier[name] for name in SECTIONS if name in earlier}
    about = {"command": command, "model": Path(settings.model).name, "machine": machine()}
    about |= {"versions": versions()}
    for name in SECTIONS:
        if name in settings.sections:

            def keep(section: Section, name: str = name) -> None:
                result[name] = about | section
                save(result)

            keep(_RUN[name](settings, earlier.get(name, {}), report, keep))
    return result


def faults(result: dict[str, Any]) -> list[str]:
    """Of all sections."""
    return [fault for name in SECTIONS for fault in result.get(name, {}).get("faults", ())]


def _load(settings: Settings) -> build.LoadedModel:
    config = EngineConfig(model=settings.model, num_threads=settings.threads)
    return build.load(open_checkpoint(hub.resolve(settings.model)), config)


def _memory(
    settings: Settings, found: Section, report: Callable[[str], None], save: Callable[[Section], None]
) -> Section:
    memory, loaded = settings.memory, _load(settings)
    sizes = history_memory.sizes(loaded.config, memory.tokens)
    section: Section = {
        "text": settings.text.name,
        "settings": asdict(memory) | {"pool_bytes": history_memory.POOL_BYTES},
        "sizes": sizes,
        "goals": history_memory.goals(sizes, memory.tokens),
    }
    save(section)
    section["together"] = history_memory.all_together(
        loaded,
        loaded.tokenizer.encode(settings.text.read_text(encoding="utf-8")),
        tokens=memory.together_tokens,
        memory=memory.together_memory,
        threads=settings.threads,
        report=report,
    )
    section["faults"] = [fault for row in section["together"] for fault in row.pop("faults")]
    return section


def _host(
    settings: Settings, found: Section, report: Callable[[str], None], save: Callable[[Section], None]
) -> Section:
    tokenizer = build.read_tokenizer(open_checkpoint(hub.resolve(settings.model)))
    text = settings.text.read_text(encoding="utf-8")
    return {"text": settings.text.name, **history_host.measure(settings.turns.lengths, tokenizer, text)}


def _turns(
    settings: Settings, found: Section, report: Callable[[str], None], save: Callable[[Section], None]
) -> Section:
    turns, threads, loaded = settings.turns, settings.threads, _load(settings)
    section: Section = {"data": settings.data.name, "settings": asdict(turns) | {"threads": threads}}
    chats = history.dialogues(history.read_texts(settings.data), loaded.tokenizer, turns.lengths)
    histories = [
        history_turns.History.of(chat.messages, tokens, loaded.tokenizer)
        for tokens, chat in zip(turns.lengths, chats, strict=True)
    ]
    found = history_turns.measure(loaded, histories, rounds=turns.rounds, threads=threads, report=report)
    history_turns.add_bytes(found["rows"], loaded.config)
    section |= {"next_turn": found}
    save(section)
    if turns.long:
        found = history_turns.measure_long(
            loaded.config,
            turns.long,
            rounds=turns.rounds,
            threads=threads or usable_cpus(),
            report=report,
        )
        history_turns.add_bytes(found["rows"], loaded.config)
        section |= {"next_turn_random_model": found}
    return section


def _quality(
    settings: Settings, found: Section, report: Callable[[str], None], save: Callable[[Section], None]
) -> Section:
    return history_quality.run(
        settings.model,
        settings.text,
        settings.quality,
        threads=settings.threads,
        found=found,
        report=report,
        save=save,
    )


def _budget(
    settings: Settings, found: Section, report: Callable[[str], None], save: Callable[[Section], None]
) -> Section:
    quality = settings.quality
    return history_budget.run(
        settings.model,
        settings.text,
        quality.windows,
        quality.tokens,
        threads=settings.threads,
        report=report,
        save=save,
    )


def _restart(
    settings: Settings, found: Section, report: Callable[[str], None], save: Callable[[Section], None]
) -> Section:
    about = {"data": settings.data.name, "server_options": list(settings.restart.options)}
    tokenizer = build.read_tokenizer(open_checkpoint(hub.resolve(settings.model)))
    texts = history.read_texts(settings.data)
    with tempfile.TemporaryDirectory(prefix="octavo-history-") as folder:
        return about | history.restart(settings.restart, texts, tokenizer, Path(folder), report)


def _kills(
    settings: Settings, found: Section, report: Callable[[str], None], save: Callable[[Section], None]
) -> Section:
    about = {"data": settings.data.name, "server_options": list(settings.restart.options)}
    tokenizer = build.read_tokenizer(open_checkpoint(hub.resolve(settings.model)))
    texts = history.read_texts(settings.data)
    random.Random(settings.restart.seed).shuffle(texts)
    section: Section = {}
    with tempfile.TemporaryDirectory(prefix="octavo-history-") as folder:
        kills = history.Kills(settings.restart, texts, tokenizer, Path(folder))
        for row in kills.rows(report):
            section = about | row | {"faults": kills.faults}
            save(section)
    return section


def _pressure(
    settings: Settings, found: Section, report: Callable[[str], None], save: Callable[[Section], None]
) -> Section:
    checkpoint = open_checkpoint(hub.resolve(settings.model))
    about = {"data": settings.data.name, "server_options": list(settings.pressure.options)}
    return about | history_pressure.run(
        settings.pressure,
        history.read_texts(settings.data),
        build.read_tokenizer(checkpoint),
        build.read_config(checkpoint),
        report,
    )


_RUN: dict[str, Callable[[Settings, Section, Callable[[str], None], Callable[[Section], None]], Section]] = {
    "memory": _memory,
    "host": _host,
    "turns": _turns,
    "quality": _quality,
    "budget": _budget,
    "restart": _restart,
    "kills": _kills,
    "pressure": _pressure,
}
