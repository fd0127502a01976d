"""``octavo cache``: looks after a folder that ``octavo serve --cache-dir`` fills."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from octavo.cache.chain import compact_key
from octavo.cli import options as opt
from octavo.cli.errors import FAILURE, USAGE, CommandError, plainly

if TYPE_CHECKING:
    from octavo.cache.disk_index import DiskIndex
    from octavo.cache.disk_store import DiskStore

app = typer.Typer(
    help="Look after the folder of octavo serve --cache-dir, while no server has it.",
    no_args_is_help=True,
)

DAY_MS = 24 * 3600 * 1000

Folder = Annotated[Path, typer.Argument(metavar="DIR", help="The folder that was given as --cache-dir.")]


@contextmanager
def _opened(folder: Path) -> Iterator[DiskStore]:
    import lmdb

    from octavo.cache.disk_store import MIN_BYTES, DiskStore

    file = folder / "data.mdb"
    with plainly():
        if not file.is_file():
            raise CommandError(f"{folder} is no cache folder: it has no data.mdb")
        # As large as it is: looking gives nothing up.
        store = DiskStore(folder, max(MIN_BYTES, 2 * file.stat().st_size))
        try:
            yield store
        except lmdb.Error as error:
            raise CommandError(f"the cache in {folder} cannot be read: {error}") from error
        finally:
            store.close()


@app.command("ls")
def ls(folder: Folder) -> None:
    """A line for every stored conversation: when it was last used, its tokens and what it takes.

    A conversation's size counts all its blocks, those that it shares with others too.
    """
    from rich.console import Console
    from rich.table import Table

    from octavo.engine.resources import format_size

    with _opened(folder) as store:
        table = Table(
            "last used", "tokens", "blocks", "size", "engine", "last block", box=None, pad_edge=False
        )
        index = store.index
        for digest in sorted(_ends(index), key=lambda leaf: -index.entries[leaf].last_used):
            entry = index.entries[digest]
            blocks, size = _chain(index, digest)
            day = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(entry.last_used / 1000))
            names = (entry.origin.hex()[:8], digest.hex()[:16])
            table.add_row(day, f"{entry.num_tokens:,}", str(blocks), format_size(size), *names)
    console = Console() if sys.stdout.isatty() else Console(width=200)
    console.print(table)


def _chain(index: DiskIndex, digest: bytes) -> tuple[int, int]:
    """Blocks and bytes from a chain's start, or from a gap in it, to ``digest``.

    Where a block is not there as stored, its compact form counts.
    """
    blocks = size = 0
    entry = index.entries.get(digest)
    while entry is not None:
        blocks, size = blocks + 1, size + entry.size
        as_stored = index.entries.get(entry.parent)
        entry = as_stored or index.entries.get(compact_key(entry.parent))
    return blocks, size


def _ends(index: DiskIndex) -> list[bytes]:
    """The last block of every chain."""
    return [leaf for leaf in index.leaves() if not index.entries[leaf].compact]


@app.command("stats")
def stats(folder: Folder) -> None:
    """How much is stored, for how many conversations and engines."""
    from octavo.engine.resources import format_size

    with _opened(folder) as store:
        entries = store.index.entries
        print(f"conversations: {len(_ends(store.index))}")
        print(f"blocks: {len(entries)}")
        print(f"compact forms of blocks: {sum(entry.compact for entry in entries.values())}")
        print(f"size of the blocks: {format_size(store.index.num_bytes)}")
        print(f"size of the file: {format_size(store.file_bytes)}")
        print(f"engines (a model with its settings): {len({entry.origin for entry in entries.values()})}")
        if store.unreadable:
            print(f"unreadable entries: {len(store.unreadable)}")


@app.command("verify")
def verify(folder: Folder) -> None:
    """Read every record and check it; names those that are damaged. Exit code 1 if there are any.

    A damaged record is never served: it is computed again and replaced. prune --damaged removes them.
    """
    with _opened(folder) as store:
        damaged = list(store.verify())
        for digest, how in damaged:
            print(f"{digest.hex()[:16]}: {how}")
        num_blocks, unreadable = len(store.index.entries), len(store.unreadable)
    print(f"{num_blocks} blocks read, {len(damaged)} damaged, {unreadable} unreadable entries")
    if damaged or unreadable:
        raise typer.Exit(FAILURE)


@app.command("prune")
def prune(
    folder: Folder,
    size: Annotated[
        str | None,
        typer.Option(callback=opt.check_size, metavar="SIZE", help="Keep no more than this, such as 5GiB."),
    ] = None,
    days: Annotated[
        float | None, typer.Option(min=0, help="Give up what was not used for so many days.")
    ] = None,
    damaged: Annotated[bool, typer.Option("--damaged", help="Give up records that are damaged.")] = False,
) -> None:
    """Give up stored blocks, the least recently used first, and make the file smaller."""
    from octavo.engine.resources import format_size, parse_size

    if size is None and days is None and not damaged:
        raise CommandError("say what to give up: --size, --days or --damaged", USAGE)
    with _opened(folder) as store:
        before = len(store.index.entries)
        now = time.time_ns() // 1_000_000
        store.prune(
            parse_size(size) if size is not None else sys.maxsize,
            unused_since=0 if days is None else now - int(days * DAY_MS),
            removals=[*store.unreadable, *(digest for digest, _ in store.verify())] if damaged else [],
        )
        left = len(store.index.entries)
        print(f"{before - left} of {before} blocks given up; the file takes {format_size(store.file_bytes)}")
