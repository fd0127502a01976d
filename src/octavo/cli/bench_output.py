"""What the commands of ``octavo bench`` share: where results go, and how they are shown and written."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

RESULTS = Path("benchmarks/results")
TEXT = Path("benchmarks/data/moby-dick-300k.txt")

Out = Annotated[Path, typer.Option(metavar="FOLDER", help="Where the JSON and the plot go.")]


def numbers(text: str) -> tuple[int, ...]:
    """Whole numbers separated by commas."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdigit() and 0 < int(word) < 10**9 for word in words):
        raise ValueError(f"expected whole numbers separated by commas, got {text!r:.100}")
    return tuple(int(word) for word in words)


def names(text: str) -> list[str]:
    """Names separated by commas; "none" is none."""
    names = [name.strip() for name in text.split(",")]
    return [name for name in names if name and name != "none"]


def console() -> Console:
    """A pipe has no width: tables must not be cut there."""
    from rich.console import Console

    return Console() if sys.stdout.isatty() else Console(width=180)


def reporter() -> Callable[[str], None]:
    """What is told on the way, on stderr."""
    from rich.console import Console

    console = Console(stderr=True, soft_wrap=True)
    return lambda line: console.print(line, style="dim", markup=False)


def command_line() -> str:
    """The command as it was typed, paths cut to their last part so that a result names no machine."""
    words = []
    for word in sys.argv[1:]:
        option, equals, value = word.partition("=")
        if equals and option.startswith("--"):
            words.append(f"{option}={_last_part(value)}")
        else:
            words.append(_last_part(word))
    return shlex.join(["octavo", *words])


def _last_part(word: str) -> str:
    return Path(word).name if Path(word).is_absolute() else word


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
