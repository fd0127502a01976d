"""A server over a small encoder, in a thread."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from encoder_checkpoint import checkpoint, load, write_sentence_files
from http_server import Running

from octavo.serving.server import ServerOptions


class Parts:
    """What :class:`Running` looks into."""

    def __init__(self, folder: Path) -> None:
        checkpoint(folder, "bert")
        write_sentence_files(folder, "mean", True)
        self.engine = load(folder)


def start(folder: Path, **options: Any) -> Running:
    """Serves the model "small", whose files are written into ``folder``."""
    return Running(Parts(folder), ServerOptions(models=("small",), **options))
