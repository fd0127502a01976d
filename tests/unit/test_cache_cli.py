"""``octavo cache``: what it says of a folder, and what it does to it."""

from __future__ import annotations

import random
from pathlib import Path

import lmdb
import pytest

from octavo.cache.disk_store import DiskStore, Record
from octavo.cli.app import exit_code


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three chains of four blocks, one stored after the other; the first two share their first two blocks."""
    store = DiskStore(tmp_path / "cache", 2**24)
    for chain in range(3):
        parent = b"r" * 32
        for depth in range(4):
            owner = 0 if chain == 1 and depth < 2 else chain
            digest = bytes([owner, depth]).ljust(32, b"\1")
            rows = random.Random(f"{owner}/{depth}").randbytes(30_000)
            if digest not in store.index.entries:
                store.commit([Record(digest, parent, bytes(64), 16 * (depth + 1), rows)], origin=b"modelone")
            parent = digest
    store.close()
    return tmp_path / "cache"


def damage(folder: Path, digest: bytes) -> None:
    with lmdb.open(str(folder), max_dbs=2, map_size=2**24) as environment:
        blocks = environment.open_db(b"blocks")
        with environment.begin(write=True, db=blocks) as transaction:
            value = bytearray(transaction.get(digest))
            value[-1] ^= 1
            transaction.put(digest, bytes(value))


def test_ls_has_a_line_for_every_conversation_the_newest_first(folder, capsys):
    assert exit_code(["cache", "ls", str(folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + 3
    assert [line.split()[-1][:4] for line in lines[1:]] == ["0203", "0103", "0003"]
    assert all(line.split()[2:4] == ["64", "4"] for line in lines[1:])
    assert all("6d6f6465" in line for line in lines[1:])


def test_stats(folder, capsys):
    assert exit_code(["cache", "stats", str(folder)]) == 0
    said = capsys.readouterr().out
    assert "conversations: 3\nblocks: 10\n" in said
    assert "engines (a model with its settings): 1" in said


def test_verify_names_what_is_damaged_and_prune_removes_it(folder, capsys):
    assert exit_code(["cache", "verify", str(folder)]) == 0
    assert capsys.readouterr().out == "10 blocks read, 0 damaged, 0 unreadable entries\n"
    damage(folder, bytes([2, 3]).ljust(32, b"\1"))
    assert exit_code(["cache", "verify", str(folder)]) == 1
    said = capsys.readouterr().out
    assert "0203010101010101: its checksum does not fit\n10 blocks read, 1 damaged" in said
    assert exit_code(["cache", "prune", str(folder), "--damaged"]) == 0
    assert "1 of 10 blocks given up" in capsys.readouterr().out
    assert exit_code(["cache", "verify", str(folder)]) == 0


def test_prune_keeps_what_was_used_last(folder, capsys):
    before = (folder / "data.mdb").stat().st_size
    assert exit_code(["cache", "prune", str(folder), "--size", "140kB"]) == 0
    assert "6 of 10 blocks given up" in capsys.readouterr().out
    assert (folder / "data.mdb").stat().st_size < before
    store = DiskStore(folder, 2**24)
    assert {digest[0] for digest in store.index.entries} == {2}
    store.close()
    assert exit_code(["cache", "prune", str(folder), "--days", "1"]) == 0
    assert "0 of 4 blocks given up" in capsys.readouterr().out
    assert exit_code(["cache", "prune", str(folder), "--days", "0"]) == 0
    assert "4 of 4 blocks given up" in capsys.readouterr().out


def test_looking_changes_nothing(folder):
    store = DiskStore(folder, 2**24)
    entries = dict(store.index.entries)
    store.close()
    for command in ("ls", "stats", "verify"):
        assert exit_code(["cache", command, str(folder)]) == 0
    store = DiskStore(folder, 2**24)
    assert store.index.entries == entries
    store.close()


@pytest.mark.parametrize("command", ["ls", "stats", "verify", "prune"])
def test_refusals_are_one_sentence(command, folder, tmp_path, capsys):
    more = ["--damaged"] if command == "prune" else []
    assert exit_code(["cache", command, str(tmp_path / "nothing"), *more]) == 1
    assert capsys.readouterr().err == f"octavo: {tmp_path}/nothing is no cache folder: it has no data.mdb\n"
    assert not (tmp_path / "nothing").exists()
    store = DiskStore(folder, 2**24)
    assert exit_code(["cache", command, str(folder), *more]) == 1
    assert "is in use by process" in capsys.readouterr().err
    store.close()


def test_prune_wants_to_know_what_to_give_up(folder, capsys):
    assert exit_code(["cache", "prune", str(folder)]) == 2
    assert "say what to give up: --size, --days or --damaged" in capsys.readouterr().err
    assert exit_code(["cache", "prune", str(folder), "--size", "much"]) == 2
    assert "a size is a number of bytes" in capsys.readouterr().err
