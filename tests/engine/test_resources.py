"""Sizes, memory and CPU limits, and the pool that follows from them."""

from __future__ import annotations

import dataclasses
import os

import pytest

from octavo.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from octavo.engine import resources

GIB = 1 << 30
MODEL = ModelConfig(
    architecture="llama",
    vocab_size=100,
    hidden_size=64,
    intermediate_size=128,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_position_embeddings=1024,
)
BLOCK = 2 * 2 * 2 * 16 * 16 * 4  # K and V, layers, kv heads, block size, head_dim, bytes


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("2GiB", 2 * GIB),
        ("512MB", 512_000_000),
        ("1.5 KiB", 1536),
        ("100", 100),
        (7, 7),
        ("3gib", 3 * GIB),
        ("9007199254740993", 9007199254740993),
        ("8388607TiB", 8388607 * 2**40),
    ],
)
def test_sizes(text, num_bytes):
    assert resources.parse_size(text) == num_bytes


@pytest.mark.parametrize(
    "text",
    [
        *("", "GiB", "2 parsecs", "-1GiB", "0", 0, -5, 1.5, True, None, "1e9", "٣GiB "),
        *("9" * 400, "9" * 400 + "GiB", "8388608TiB", 2**63, 10**400),
    ],
)
def test_bad_sizes_are_refused_in_one_sentence(text):
    with pytest.raises(ValueError, match="a size"):
        resources.parse_size(text)


def machine(tmp_path, files: dict[str, str]):
    files = {"proc/meminfo": "MemTotal: 99 kB\nMemAvailable:   8388608 kB\n"} | files
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


V1 = "4:memory:/box\n2:cpu,cpuacct:/box\n"
V1_FILES = {
    "proc/self/cgroup": V1,
    "sys/fs/cgroup/memory/box/memory.limit_in_bytes": f"{4 * GIB}\n",
    "sys/fs/cgroup/memory/box/memory.usage_in_bytes": f"{2 * GIB}\n",
    "sys/fs/cgroup/memory/box/memory.stat": f"cache 5\ntotal_inactive_file {GIB}\n",
    "sys/fs/cgroup/cpu/box/cpu.cfs_quota_us": "150000\n",
    "sys/fs/cgroup/cpu/box/cpu.cfs_period_us": "100000\n",
}
V2_FILES = {
    "proc/self/cgroup": "0::/a/b\n",
    "sys/fs/cgroup/a/b/memory.max": "max\n",
    "sys/fs/cgroup/a/b/memory.current": "5\n",
    "sys/fs/cgroup/a/memory.max": f"{3 * GIB}\n",
    "sys/fs/cgroup/a/memory.current": f"{GIB}\n",
    "sys/fs/cgroup/a/cpu.max": "100000 100000\n",
}
IN_CONTAINER = {
    "proc/self/cgroup": "0::/../host/path\n",
    "sys/fs/cgroup/memory.max": f"{GIB}\n",
    "sys/fs/cgroup/memory.current": "0\n",
    "sys/fs/cgroup/cpu.max": "max 100000\n",
}


@pytest.mark.parametrize(
    ("files", "memory", "cpus"),
    [({}, 8 * GIB, 4), (V1_FILES, 3 * GIB, 2), (V2_FILES, 2 * GIB, 1), (IN_CONTAINER, GIB, 4)],
    ids=["none", "v1", "v2, limit on the parent", "v2 in a container"],
)
def test_the_tightest_limit_counts(tmp_path, monkeypatch, files, memory, cpus):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    root = machine(tmp_path, files)
    assert resources.available_memory(root) == memory
    assert resources.usable_cpus(root) == cpus


def test_this_machine_can_be_read():
    assert resources.available_memory() > 0
    assert resources.usable_cpus() >= 1


def config(**kw) -> EngineConfig:
    cache = {k: kw.pop(k) for k in ("kv_cache_memory", "num_blocks", "block_size") if k in kw}
    return EngineConfig(model="m", cache=CacheConfig(**cache), scheduler=SchedulerConfig(**kw))


def test_the_default_pool_is_half_of_what_is_free_capped_by_what_can_be_used():
    resolved, note = resources.resolve(config(), MODEL, 100 * GIB)
    assert resolved.cache.num_blocks == 64 * 1024 // 16
    assert note is None
    resolved, note = resources.resolve(config(), MODEL, BLOCK * 200)
    assert resolved.cache.num_blocks == 100
    assert note is None


def test_s14_the_models_own_length_is_fitted_to_the_pool_with_one_line():
    resolved, note = resources.resolve(config(num_blocks=10), MODEL, GIB)
    assert resolved.scheduler.max_model_len == 160
    assert "160" in note
    assert "1024" in note


def test_s14_a_given_length_that_does_not_fit_is_lowered_with_one_line_too():
    resolved, note = resources.resolve(config(num_blocks=10, max_model_len=500), MODEL, GIB)
    assert resolved.scheduler.max_model_len == 160
    assert "160" in note
    assert "500" in note


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kv_cache_memory": 100}, ["holds no block", "8.0 KiB"]),
        ({"kv_cache_memory": "2GiB"}, ["2.0 GiB", "1.0 GiB"]),
        ({"max_model_len": 1025}, ["1025", "1024"]),
        ({"block_size": 12}, ["power of two", "12"]),
        ({"num_blocks": 0}, ["num_blocks", "0"]),
        ({"num_blocks": 2 * GIB // BLOCK}, ["num_blocks", str(GIB // BLOCK), "1.0 GiB"]),
        ({"num_blocks": 10**25}, ["num_blocks", str(GIB // BLOCK)]),
    ],
)
def test_options_out_of_range(options, words):
    with pytest.raises(ValueError) as error:
        resources.resolve(config(**options), MODEL, GIB)
    assert all(word in str(error.value) for word in words), error.value


def test_a_given_size_is_used_whole():
    resolved, _ = resources.resolve(config(kv_cache_memory=BLOCK * 70 + 5), MODEL, GIB)
    assert resolved.cache.num_blocks == 70


# ---- two pools


def divided(memory: int, **cache) -> tuple[CacheConfig, int]:
    """The resolved cache of a model of many layers, and what its blocks take."""
    model = dataclasses.replace(
        MODEL, num_layers=30, num_heads=9, num_kv_heads=3, head_dim=64, max_position_embeddings=8192
    )
    given = EngineConfig(
        model="m",
        cache=CacheConfig(kv_cache_memory=memory, history="compact", **cache),
        scheduler=SchedulerConfig(max_model_len=8192),
    )
    resolved, note = resources.resolve(given, model, 100 * GIB)
    assert note is None
    sizes = resources.BlockSizes.of(resolved, model)
    assert resolved.cache.num_blocks is not None
    assert resolved.cache.num_compact_blocks is not None
    taken = resolved.cache.num_blocks * sizes.stored + resolved.cache.num_compact_blocks * sizes.compact
    return resolved.cache, taken


@pytest.mark.parametrize("values", ["int8", "int4"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_memory_is_divided_for_conversations_of_the_given_length_and_used_whole(values, dtype):
    memory = 4 * GIB
    cache, taken = divided(memory, kv_dtype=dtype, history_values=values)
    assert 0.999 * memory < taken <= memory
    stored, compact = cache.num_blocks, cache.num_compact_blocks
    per_chat = stored / 34, compact / (512 - 32)  # a window of 512 tokens and what a step adds; the rest
    assert per_chat[0] == pytest.approx(per_chat[1], rel=0.2)
    short, _ = divided(memory, kv_dtype=dtype, history_values=values, history_tokens=1024)
    assert short.num_blocks > 2 * stored


@pytest.mark.parametrize(("values", "goal"), [("int8", 1.65), ("int4", 2.0)])
def test_a_pool_holds_so_many_times_the_long_conversations_of_float16(values, goal):
    memory = 8 * GIB
    cache, _ = divided(memory, kv_dtype="float16", history_values=values)
    chats = min(cache.num_blocks / 34, cache.num_compact_blocks / 480)
    plain = memory / (512 * 16 * 30 * 3 * 64 * 2 * 2)
    assert chats >= goal * plain


def test_a_memory_that_holds_no_window_is_refused_in_a_sentence():
    sentence = r"does not hold a history_window of 512 tokens: that takes 12\.\d MiB"
    with pytest.raises(ValueError, match=sentence):
        divided(10 * 1024**2, kv_dtype="float16")
