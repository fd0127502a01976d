"""Warm after a restart: what one engine sealed, another reads from disk, and answers as a cold one does."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import resource
import signal
import threading
import time

import lmdb
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_engine import greedy, prompt, tokens

from octavo.cache.disk_store import DiskStore
from octavo.cache.kv_cache import KVCache, PlaneSet


@pytest.fixture
def warm(tiny, tmp_path):
    """An engine over the folder; the one before it is closed, as if the server was started again."""
    open_engines = []

    def make(max_bytes: int = 2**24, folder=tmp_path / "cache", **options):
        for engine in open_engines:
            engine.close()
        made = tiny(store=DiskStore(folder, max_bytes), **options)
        open_engines.append(made.engine)
        return made

    yield make
    for engine in open_engines:
        engine.close()


def test_the_next_turn_of_every_conversation_is_read_from_disk_and_answers_as_cold(tiny, warm):
    turns = [prompt(41, seed) for seed in range(4)]
    before = warm()
    replies = [tokens(output) for output in before.run(*((turn, greedy(9)) for turn in turns))]
    longer = [turn + reply + prompt(7, 9) for turn, reply in zip(turns, replies, strict=True)]
    after = warm()
    outputs = after.run(*((turn, greedy(12, logprobs=3)) for turn in longer))
    cold = tiny().run(*((turn, greedy(12, logprobs=3)) for turn in longer))
    for output, expected, turn in zip(outputs, cold, turns, strict=True):
        assert output.outputs == expected.outputs  # tokens and their log-probabilities, to the bit
        sealed = (len(turn) + 9 - 1) // 4 * 4  # the last token sampled is never computed
        assert output.num_disk_tokens == output.num_cached_tokens == sealed
    assert after.engine.metrics.disk_hits == sum(output.num_disk_tokens for output in outputs)
    assert after.engine.disk_stats.damaged == 0


def test_rows_and_planes_come_back_as_they_were_stored():
    for dtype in ("float32", "float16"):
        cache = KVCache(
            num_layers=3,
            num_blocks=4,
            num_kv_heads=2,
            block_size=32,
            head_dim=16,
            kv_dtype=dtype,
            planes=PlaneSet((0, 2), tail=True, fast=True),
        )
        assert cache.planes is not None
        scan, mean_value, bounds = cache.planes
        assert mean_value is not None
        assert bounds is not None
        parts = (cache.key, cache.value, scan, mean_value, bounds)
        generator = torch.Generator().manual_seed(1)
        for part in parts:
            bits = torch.randint(0, 256, (part.nbytes,), generator=generator, dtype=torch.uint8)
            part.view(torch.uint8).view(-1).copy_(bits)
        rows = cache.read_block(1)
        assert len(rows) == cache.block_bytes
        others = [part[:, [0, 2]].clone().view(torch.uint8) for part in parts]
        cache.write_block(3, memoryview(bytes(rows)))
        for part, other in zip(parts, others, strict=True):
            assert torch.equal(
                part[:, 3].contiguous().view(torch.uint8), part[:, 1].contiguous().view(torch.uint8)
            )
            assert torch.equal(part[:, [0, 2]].view(torch.uint8), other)


def damage(folder, digest: bytes, change) -> None:
    """Replace the value under ``digest`` by what ``change`` makes of it, behind the store's back."""
    with lmdb.open(str(folder), max_dbs=2, map_size=2**24) as environment:
        blocks = environment.open_db(b"blocks")
        with environment.begin(write=True, db=blocks) as transaction:
            transaction.put(digest, change(bytes(transaction.get(digest))))


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_or_foreign_record_is_a_miss_that_is_reported_and_mended(data, tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("damaged")
    turns = [prompt(30, seed) for seed in range(3)]
    first = tiny(store=DiskStore(folder, 2**24))
    first.run(*((turn, greedy(1)) for turn in turns))
    first.engine.close()

    store = DiskStore(folder, 2**24)
    digests = sorted(store.index.entries)
    depths = {digest: store.index.entries[digest].num_tokens for digest in digests}
    store.close()
    victim = data.draw(st.sampled_from(digests))
    how = data.draw(st.sampled_from(["flip", "cut", "noise", "another's"]))

    def change(value: bytes) -> bytes:
        place = data.draw(st.integers(0, len(value) - 1))
        if how == "flip":
            return value[:place] + bytes([value[place] ^ data.draw(st.integers(1, 255))]) + value[place + 1 :]
        if how == "cut":
            return value[:place]
        return data.draw(st.binary(max_size=300))

    if how == "another's":
        other = data.draw(st.sampled_from([digest for digest in digests if digest != victim]))
        taken = []
        damage(folder, other, lambda value: taken.append(value) or value)
        damage(folder, victim, lambda value: taken[0])
    else:
        damage(folder, victim, change)

    jobs = [(turn + prompt(5, 7), greedy(4, logprobs=2)) for turn in turns]
    again = tiny(store=DiskStore(folder, 2**24))
    outputs, cold = again.run(*jobs), tiny().run(*jobs)
    assert [output.outputs for output in outputs] == [output.outputs for output in cold]
    assert again.engine.disk_stats.damaged == 1
    assert sorted(output.num_disk_tokens for output in outputs) == [depths[victim] - 4, 28, 28]
    again.engine.close()
    store = DiskStore(folder, 2**24)
    assert list(store.verify()) == []
    assert victim in store.index.entries
    store.close()


def test_bits_that_flip_in_the_file_itself_are_seen(tiny, warm, tmp_path):
    job = (prompt(30), greedy(1))
    first = warm()
    (cold,) = first.run(job)
    rows = bytes(first.kv_cache.read_block(0))
    first.engine.close()
    file = tmp_path / "cache" / "data.mdb"
    content = file.read_bytes()
    assert rows in content  # more than once, maybe: LMDB copies a page before it changes it
    file.write_bytes(content.replace(rows, rows[:100] + bytes([rows[100] ^ 4]) + rows[101:]))
    again = warm()
    (output,) = again.run(job)
    assert output.outputs == cold.outputs
    assert output.num_disk_tokens == 0
    assert again.engine.disk_stats.damaged == 1


def test_nothing_is_served_to_another_salt_fingerprint_or_layout(warm, caplog):
    job = (prompt(30), greedy(1))
    warm().run((*job, {"cache_salt": "one"}))
    (output,) = warm().run((*job, {"cache_salt": "two"}))
    assert output.num_disk_tokens == 0
    (output,) = warm(fingerprint="another model").run((*job, {"cache_salt": "one"}))
    assert output.num_disk_tokens == 0
    (output,) = warm().run((*job, {"cache_salt": "one"}))
    assert output.num_disk_tokens == 28
    assert "damaged" not in caplog.text


def test_where_memory_ends_the_disk_goes_on(tiny, warm):
    """A pool of 16 blocks forgets the first conversation; the store has the rest of it."""
    long, other = prompt(40, 1), prompt(56, 2)
    engine = warm(num_blocks=16)
    engine.run((long, greedy(1)))
    engine.disk.flush()
    engine.run((other, greedy(1)))
    (output,) = engine.run(([*long, 50], greedy(6, logprobs=1)))
    (cold,) = tiny(num_blocks=16).run(([*long, 50], greedy(6, logprobs=1)))
    assert output.outputs == cold.outputs
    assert output.num_cached_tokens == 40
    assert 0 < output.num_disk_tokens < 40
    assert output.cache_miss_reason == "the whole prompt is cached; its last token (40) is always computed"


def test_under_a_small_pool_with_preemptions_all_is_as_without_a_disk(tiny, warm):
    rng = random.Random(5)
    system = prompt(12, 99)
    jobs = [
        (system + prompt(rng.randrange(1, 12), seed % 4), greedy(rng.randrange(12, 30), logprobs=1))
        for seed in range(12)
    ]
    expected = [tiny(num_blocks=256).run(job)[0].outputs for job in jobs]
    from_disk = preempted = 0
    for _ in range(3):
        engine = warm(num_blocks=16, budget=24)
        for _ in range(2):
            outputs = engine.run(*jobs)
            assert [output.outputs for output in outputs] == expected
            from_disk += sum(output.num_disk_tokens for output in outputs)
            preempted += sum(output.metrics.num_preemptions for output in outputs)
    assert from_disk
    assert preempted


def test_one_request_a_step_loads(warm):
    turns = [prompt(30, seed) for seed in range(5)]
    warm().run(*((turn, greedy(1)) for turn in turns))
    engine = warm()
    ids = [engine.add(turn, greedy(8)) for turn in turns]
    loaded = []
    while engine.engine.has_unfinished():
        before = engine.engine.disk_stats.loaded
        engine.engine.step()
        loaded.append(engine.engine.disk_stats.loaded - before)
    assert [count for count in loaded if count] == [7] * len(ids)


def test_a_queue_that_is_full_costs_no_request_and_the_next_turn_saves_what_is_missing(
    tiny, warm, monkeypatch
):
    taken = threading.Event()
    commit = DiskStore.commit

    def slow(store, *arguments):
        taken.wait(30)
        return commit(store, *arguments)

    monkeypatch.setattr(DiskStore, "commit", slow)
    engine = warm(queue_bytes=4 * 512)  # four blocks of 512 bytes
    assert engine.kv_cache.block_bytes == 512
    (output,) = engine.run((prompt(41), greedy(1)))
    assert engine.engine.disk_stats.unsaved == 10 - 4
    taken.set()
    engine.disk.flush()
    assert engine.engine.disk_stats.blocks == 4
    for _ in range(3):
        engine.run((prompt(41), greedy(1)))
        engine.disk.flush()
    assert engine.engine.disk_stats.blocks == 10
    (again,) = warm().run((prompt(41), greedy(1)))
    assert again.outputs == output.outputs
    assert again.num_disk_tokens == 40


def test_a_disk_that_takes_nothing_costs_no_request_and_is_told_once(tiny, warm, caplog):
    jobs = [(prompt(40, seed), greedy(5)) for seed in range(4)]
    engine = warm()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**13, limits[1]))
    try:
        outputs = [engine.run(job)[0] for job in jobs]
        engine.disk.flush()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [output.outputs for output in outputs] == [tiny().run(job)[0].outputs for job in jobs]
    stats = engine.engine.disk_stats
    assert stats.unsaved > 0
    assert stats.saved == stats.blocks == 0
    assert caplog.text.count("does not take more blocks") == 1
    engine.run(jobs[0])
    engine.disk.flush()
    assert engine.engine.disk_stats.blocks > 0


def test_a_request_that_fails_leaves_nothing_on_disk(warm):
    engine = warm()
    engine.model.nan_on = {120}
    (output,) = engine.run(([*prompt(23, 1), 120], greedy(1)))
    assert output.error is not None
    engine.disk.flush()
    assert engine.engine.disk_stats.blocks == 0


@pytest.mark.parametrize("place", ["read_block", "put", "fetch", "end_reading", "note"])
def test_an_interrupt_anywhere_in_the_disk_s_part_loses_no_block_and_no_answer(
    place, tiny, warm, monkeypatch
):
    before = warm()
    before.run((prompt(41), greedy(1)))
    engine = warm()
    owner = engine.runner if place == "read_block" else engine.disk
    real, calls = getattr(owner, place), []

    def interrupted(*arguments, **options):
        calls.append(arguments)
        if len(calls) == 1:
            real(*arguments, **options)
            raise KeyboardInterrupt
        return real(*arguments, **options)

    monkeypatch.setattr(owner, place, interrupted)
    job = (prompt(41) + prompt(22, 5), greedy(9, logprobs=1))
    number = engine.add(*job)
    with pytest.raises(KeyboardInterrupt):
        engine.drain()
    output = engine.drain()[number]
    (cold,) = tiny().run(job)
    assert output.outputs == cold.outputs
    engine.run(job)
    engine.disk.flush()
    assert engine.engine.disk_stats.blocks == (63 + 8) // 4
    assert list(engine.disk._store.verify()) == []


def test_to_forget_the_cache_is_to_forget_the_disk_too(warm):
    engine = warm()
    engine.run((prompt(41), greedy(1)))
    engine.add(prompt(60, 3), greedy(30))
    for _ in range(3):
        engine.engine.step()
    engine.engine.reset_prefix_cache()
    assert engine.engine.disk_stats.blocks == 0
    engine.drain()
    (output,) = engine.run((prompt(41), greedy(1)))
    assert output.num_cached_tokens == 0
    (again,) = warm().run((prompt(41), greedy(1)))
    assert again.num_disk_tokens == 40
    assert again.outputs == output.outputs


def test_the_bound_on_disk_holds_and_what_was_used_last_stays(tiny, warm):
    engine = warm(max_bytes=2**20, num_blocks=512)
    for seed in range(60):
        engine.run((prompt(41, seed), greedy(1)))
        engine.disk.flush()
    stats = engine.engine.disk_stats
    assert stats.evicted > 0
    assert stats.file_bytes <= 2**20
    again = warm(max_bytes=2**20, num_blocks=512)
    (last,) = again.run((prompt(41, 59), greedy(1)))
    (first,) = again.run((prompt(41, 0), greedy(1)))
    assert (last.num_disk_tokens, first.num_disk_tokens) == (40, 0)
    assert first.outputs == tiny().run((prompt(41, 0), greedy(1)))[0].outputs


@pytest.mark.parametrize("seed", [1, 2])
def test_after_kill_9_what_was_sealed_a_second_before_is_reused_and_answers_are_those_of_a_cold_engine(
    seed, tiny, tmp_path
):
    """A child chats on and on and tells after each turn; it is killed at some moment."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()

    def chat():
        torch.set_num_threads(1)  # those that torch started before are not in this process
        engine = tiny(store=DiskStore(tmp_path / "cache", 2**26), num_blocks=1024)
        dialogues = [prompt(20, number) for number in range(4)]
        while True:
            for number, dialogue in enumerate(dialogues):
                (output,) = engine.run((dialogue, greedy(7)))
                dialogues[number] = dialogue + tokens(output) + prompt(5, len(dialogue))
                theirs.send((time.monotonic(), dialogue, tokens(output)))

    child = context.Process(target=chat)
    child.start()
    ours.recv()
    time.sleep(1.2 + random.Random(seed).random() * 0.3)
    os.kill(child.pid, signal.SIGKILL)
    killed = time.monotonic()
    child.join()
    theirs.close()
    told = []
    with contextlib.suppress(EOFError):
        while True:
            told.append(ours.recv())

    after = tiny(store=DiskStore(tmp_path / "cache", 2**26), num_blocks=1024)
    assert list(after.disk._store.verify()) == []
    last = {tuple(dialogue[:20]): (at, dialogue, reply) for at, dialogue, reply in told}
    assert len(last) == 4
    old = [turn for turn in told if turn[0] < killed - 1.0]
    assert old
    for at, dialogue, reply in [old[-1], *last.values()]:
        (output,) = after.run((dialogue + reply + [65], greedy(5, logprobs=1)))
        (cold,) = tiny(num_blocks=1024).run((dialogue + reply + [65], greedy(5, logprobs=1)))
        assert output.outputs == cold.outputs
        if at < killed - 1.0:
            assert output.num_cached_tokens >= (len(dialogue) + len(reply) - 1) // 4 * 4
            assert output.num_disk_tokens > 0
    after.engine.close()
