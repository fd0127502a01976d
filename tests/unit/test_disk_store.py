"""The store on disk: what is read is what was saved, whatever happened to the file or the process."""

from __future__ import annotations

import multiprocessing
import os
import random
import resource
import signal
import time
from pathlib import Path

import lmdb
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.cache.disk_index import DiskIndex, IndexEntry
from octavo.cache.disk_store import DamagedRecordError, DiskStore, Record, decode, encode

ROOT = b"r" * 32
# A child gets a copy of this process: nothing has to be imported again.
FORK = multiprocessing.get_context("fork")


def name(*parts: int) -> bytes:
    return bytes(parts).ljust(32, b"\0")


def record(chain: int, depth: int, size: int = 1000) -> Record:
    rows = random.Random(f"{chain}/{depth}").randbytes(size)
    parent = name(chain, depth - 1) if depth else ROOT
    return Record(name(chain, depth), parent, bytes([depth] * 16), 4 * (depth + 1), rows)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def contents(store: DiskStore) -> dict[bytes, tuple[bytes, bytes, bytes]]:
    snapshot = store.snapshot()
    found = {}
    for digest in store.index.entries:
        parent, tokens, rows = store.read(snapshot, digest)
        found[digest] = (parent, tokens, bytes(rows))
    snapshot.abort()
    return found


def test_what_is_saved_is_there_after_opening_again(folder):
    store = DiskStore(folder, 2**22)
    saved = [record(1, depth) for depth in range(5)] + [record(2, 0, size=0)]
    store.commit(saved)
    entries = store.index.entries
    store.close()
    store = DiskStore(folder, 2**22)
    assert contents(store) == {r.digest: (r.parent, r.tokens, r.rows) for r in saved}
    assert store.index.entries == entries
    assert list(store.verify()) == []
    store.close()


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_a_value_that_differs_in_anything_from_what_was_saved_is_damaged(data):
    saved = record(1, 1, size=data.draw(st.integers(0, 80)))
    value = bytearray(encode(saved))
    digest = saved.digest
    assert decode(digest, memoryview(value)) == (saved.parent, saved.tokens, saved.rows)
    how = data.draw(st.sampled_from(["flip", "cut", "longer", "other", "moved"]))
    if how == "flip":
        value[data.draw(st.integers(0, len(value) - 1))] ^= data.draw(st.integers(1, 255))
    elif how == "cut":
        del value[data.draw(st.integers(0, len(value) - 1)) :]
    elif how == "longer":
        value += data.draw(st.binary(min_size=1, max_size=40))
    elif how == "other":
        value = bytearray(data.draw(st.binary(max_size=len(value)).filter(lambda v: v != bytes(value))))
    else:
        digest = name(9, 9)
    with pytest.raises(DamagedRecordError):
        decode(digest, memoryview(value))


def test_a_second_process_is_told_who_has_the_folder(folder):
    ours, theirs = FORK.Pipe()

    def hold():
        store = DiskStore(folder, 2**22)
        theirs.send(os.getpid())
        time.sleep(60)
        store.close()

    child = FORK.Process(target=hold)
    child.start()
    pid = ours.recv()
    sentence = f"the cache folder {folder} is in use by process {pid}: one process at a time may have it"
    with pytest.raises(ValueError) as error:
        DiskStore(folder, 2**22)
    assert str(error.value) == sentence
    os.kill(pid, signal.SIGKILL)
    child.join()
    DiskStore(folder, 2**22).close()


def test_whenever_the_writer_is_killed_the_store_opens_with_all_that_was_acknowledged(folder):
    rng = random.Random(3)
    done: set[bytes] = set()
    for attempt in range(8):
        ours, theirs = FORK.Pipe()

        def write(attempt=attempt, theirs=theirs):
            store = DiskStore(folder, 2**24)
            for depth in range(200):
                batch = [record(attempt, depth, 20_000), record(100 + attempt, depth, 3)]
                store.commit(batch)
                theirs.send([r.digest for r in batch])

        child = FORK.Process(target=write)
        child.start()
        done.update(ours.recv())  # it has begun
        time.sleep(rng.random() * 0.05)
        os.kill(child.pid, signal.SIGKILL)
        child.join()
        theirs.close()
        try:
            while True:
                done.update(ours.recv())
        except EOFError:
            pass
        store = DiskStore(folder, 2**24)
        assert done <= store.index.entries.keys()
        assert list(store.verify()) == []
        store.close()
    assert len(done) > 16


@settings(max_examples=8, deadline=None)
@given(
    sizes=st.lists(st.integers(100, 60_000), min_size=1, max_size=4),
    steps=st.lists(st.tuples(st.integers(0, 5), st.integers(1, 12)), min_size=10, max_size=30),
)
def test_the_file_keeps_its_bound_and_every_chain_its_beginning(sizes, steps, tmp_path_factory):
    bound = 2**20
    store = DiskStore(tmp_path_factory.mktemp("cache"), bound)
    depths = dict.fromkeys(range(6), 0)
    for chain, count in steps:
        kept = [name(chain, depth) for depth in range(depths[chain])]
        depth = next((i for i, digest in enumerate(kept) if digest not in store.index.entries), len(kept))
        batch = [record(chain, depth + i, sizes[chain % len(sizes)]) for i in range(count) if depth + i < 250]
        depths[chain] = depth + len(batch)
        for item in batch:
            store.commit([item])
            assert store.file_bytes <= bound
            assert store.index.num_bytes <= store.room
            kept = store.index.entries.keys()
            assert item.digest in kept or {d[0] for d in kept} == {chain}, "what is newest goes last"
            for entry in store.index.entries.values():
                assert entry.parent == ROOT or entry.parent in store.index.entries, "a beginning is lost"
    assert list(store.verify()) == []
    store.close()


@settings(max_examples=100, deadline=None)
@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["add", "touch", "evict", "remove"]), st.integers(0, 30)), max_size=60
    )
)
def test_the_index_gives_up_the_leaf_whose_chain_was_used_least_recently(steps):
    """Against a tree that is looked through from end to end."""
    index = DiskIndex()
    parents: dict[bytes, bytes] = {}
    used: dict[bytes, int] = {}

    def below(digest: bytes) -> list[bytes]:
        return [child for child, parent in parents.items() if parent == digest]

    for clock, (what, number) in enumerate(steps):
        known = sorted(parents)
        pick = known[number % len(known)] if known else None
        if what == "add":
            digest, parent = name(clock), pick if pick is not None and number % 4 else ROOT
            index.add(digest, IndexEntry(parent, 10, 1, clock, b""))
            parents[digest], used[digest] = parent, clock
        elif pick is not None and what == "touch":
            index.touch(pick, clock)
            used[pick] = clock
        elif pick is not None:
            leaves = [digest for digest in known if not below(digest)]
            gone = min(leaves, key=lambda leaf: (used[leaf], leaf)) if leaves else None
            assert index.first() == gone
            if what == "remove":
                gone = pick
            if gone is None:  # orphans in a ring cannot be: there is always a leaf
                raise AssertionError("no leaf")
            index.remove(gone)
            parent = parents.pop(gone)
            if parent in used:
                used[parent] = max(used[parent], used[gone])
            del used[gone]
        assert set(index.entries) == set(parents)
        assert index.num_bytes == 10 * len(parents)
        assert {d: e.last_used for d, e in index.entries.items()} == used
        assert set(index.leaves()) == {digest for digest in parents if not below(digest)}


def test_a_disk_that_takes_no_more_leaves_the_store_as_it_was(folder):
    store = DiskStore(folder, 2**24)
    store.commit([record(1, 0), record(1, 1)])
    before = contents(store)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (store.file_bytes, limits[1]))
    try:
        with pytest.raises((lmdb.Error, OSError)):
            store.commit([record(1, 2, 500_000)], touches=[name(1, 0)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert contents(store) == before
    store.commit([record(1, 2, 500_000)])
    assert store.index.entries.keys() == {*before, name(1, 2)}
    store.close()


def test_what_cannot_be_opened_is_told_in_a_sentence(folder, tmp_path):
    plain = tmp_path / "plain"
    plain.write_text("x")
    with pytest.raises(ValueError, match=r"plain cannot be written: "):
        DiskStore(plain, 2**22)
    with pytest.raises(ValueError, match="needs at least 1048576 bytes, got 7"):
        DiskStore(folder, 7)

    foreign = tmp_path / "foreign"
    with lmdb.open(str(foreign), max_dbs=1) as other:
        other.open_db(b"their table")
    with pytest.raises(ValueError, match="holds a database of something else"):
        DiskStore(foreign, 2**22)

    noise = tmp_path / "noise"
    noise.mkdir()
    (noise / "data.mdb").write_bytes(random.Random(1).randbytes(20_000))
    with pytest.raises(ValueError, match="noise cannot be opened"):
        DiskStore(noise, 2**22)

    store = DiskStore(folder, 2**22)
    store.commit([record(1, 0, 100_000)])
    store.close()
    os.truncate(folder / "data.mdb", 30_000)
    with pytest.raises(ValueError, match="was cut short, 30000 bytes where"):
        DiskStore(folder, 2**22)
    # none of these refusals keeps a folder locked
    (folder / "data.mdb").unlink()
    DiskStore(folder, 2**22).close()


def test_a_smaller_bound_makes_the_file_smaller_and_keeps_what_was_used_last(folder):
    store = DiskStore(folder, 2**23)
    for chain in range(10):
        store.commit([record(chain, depth, 50_000) for depth in range(8)])
    store.commit([], touches=[name(3, 7)])
    large = store.file_bytes
    store.close()
    store = DiskStore(folder, 2**20)
    assert store.file_bytes <= 2**20 < large
    assert name(3, 7) in store.index.entries
    assert name(9, 0) in store.index.entries
    assert name(0, 0) not in store.index.entries
    assert list(store.verify()) == []
    store.close()


def test_pruning(folder):
    store = DiskStore(folder, 2**23)
    for chain in range(3):
        store.commit([record(chain, depth, 9_000) for depth in range(4)])
    since = store.index.entries[name(2, 0)].last_used
    store.prune(2**30, unused_since=since)
    assert {digest[0] for digest in store.index.entries} == {2}
    store.prune(2**30, removals=[name(2, 1)])
    assert sorted(store.index.entries) == [name(2, 0), name(2, 2), name(2, 3)]
    store.prune(0)
    assert not store.index.entries
    assert not list(folder.glob("compact*"))
    store.close()
