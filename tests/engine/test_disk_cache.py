"""Warm after a restart: what one engine sealed, another reads from disk, and answers as a cold one does."""

from __future__ import annotations

import pytest
import torch
from tiny_engine import greedy, prompt, tokens

from octavo.cache.disk_store import DiskStore


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
    from octavo.cache.kv_cache import KVCache

    for dtype in ("float32", "float16"):
        cache = KVCache(
            num_layers=3,
            num_blocks=4,
            num_kv_heads=2,
            block_size=32,
            head_dim=16,
            kv_dtype=dtype,
            plane_layers=(0, 2),
        )
        generator = torch.Generator().manual_seed(1)
        for part in (cache.key, cache.value, cache.planes):
            bits = torch.randint(0, 256, (part.nbytes,), generator=generator, dtype=torch.uint8)
            part.view(torch.uint8).view(-1).copy_(bits)
        rows = cache.read_block(1)
        assert len(rows) == cache.block_bytes
        others = [
            part[:, [0, 2]].clone().view(torch.uint8) for part in (cache.key, cache.value, cache.planes)
        ]
        cache.write_block(3, memoryview(bytes(rows)))
        for part, other in zip((cache.key, cache.value, cache.planes), others, strict=True):
            assert torch.equal(
                part[:, 3].contiguous().view(torch.uint8), part[:, 1].contiguous().view(torch.uint8)
            )
            assert torch.equal(part[:, [0, 2]].view(torch.uint8), other)
