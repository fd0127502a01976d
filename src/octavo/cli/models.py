"""``octavo pull`` and ``octavo models``."""

from __future__ import annotations

from typing import Annotated

import typer

from octavo.cli.errors import plainly


def pull(
    name: Annotated[str, typer.Argument(help="A name from `octavo models`, or a hub name.")],
) -> None:
    """Download a model's weights into the cache, check them, and print where they are."""
    from octavo.weights import hub

    with plainly():
        print(hub.pull(name))


def models() -> None:
    """List the models that octavo knows by name."""
    from rich.console import Console
    from rich.table import Table

    from octavo.weights import hub

    table = Table("name", "source", "size", "licence", "pulled", box=None, pad_edge=False)
    for name, model in hub.MODELS.items():
        table.add_row(
            name, model.source, f"{model.size / 1e6:,.0f} MB", model.licence, "yes" if model.pulled else "-"
        )
    Console(soft_wrap=True).print(table)
