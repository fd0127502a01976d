"""What the process may use of the machine: memory and CPUs."""

from __future__ import annotations

import math
import os
import re
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import NamedTuple

from octavo.cache.kv_cache import PlaneSet, bytes_per_block, bytes_per_compact_block
from octavo.config import CacheConfig, EngineConfig, ModelConfig
from octavo.engine.blocks import PoolShape
from octavo.kernels.history_layout import GROUP

#: The share of the free memory that the KV pool takes when no size is given.
DEFAULT_MEMORY_SHARE = 0.5

_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGT", start=1):
    _UNITS[f"{_letter}B"] = 1000**_power
    _UNITS[f"{_letter}IB"] = 1024**_power


def parse_size(size: str | int) -> int:
    """Bytes of ``size``: a number, or text such as "2GiB", "512MB" or "1.5 GiB".

    kB, MB, GB and TB are powers of 1000; KiB, MiB, GiB and TiB powers of 1024; case is ignored.
    Raises ValueError for anything else and for sizes below 1 byte or not below 8 EiB.
    """
    if isinstance(size, str):
        match = re.fullmatch(r"\s*([0-9]{1,30}(?:\.[0-9]{1,30})?)\s*([A-Za-z]*)\s*", size)
        if match is None or match[2].upper() not in _UNITS:
            raise ValueError(f'a size is a number of bytes or text such as "2GiB" or "512MB", got {size!r}')
        value = int(Decimal(match[1]) * _UNITS[match[2].upper()])
    elif isinstance(size, int) and not isinstance(size, bool):
        value = size
    else:
        raise ValueError(f'a size is a number of bytes or text such as "2GiB" or "512MB", got {size!r}')
    if not 1 <= value < 2**63:
        raise ValueError(f"a size must be at least 1 byte and below 8 EiB, got {size!r:.100}")
    return value


def format_size(num_bytes: float) -> str:
    """Bytes as text for people: "512.0 MiB"."""
    for unit in ("bytes", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "bytes" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} GiB"


def available_memory(root: Path = Path("/")) -> int:
    """Bytes that this process may still allocate: the least of what the machine has available and
    of what its control groups (v1 and v2, the process's own and every one above it) leave.

    ``root`` is where ``/proc`` and ``/sys`` are found (tests).
    """
    limits = [_mem_available(root)]
    for folder, limit_name, usage_name in _memory_groups(root):
        limit, usage = _read_number(folder / limit_name), _read_number(folder / usage_name)
        if limit is not None and usage is not None:
            limits.append(max(limit - usage + _reclaimable(folder), 0))
    return min(limits)


def usable_cpus(root: Path = Path("/")) -> int:
    """CPUs that this process may use: its affinity, and the quota of its control groups rounded up."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    for quota in _cpu_quotas(root):
        count = min(count, max(1, -int(-quota // 1)))
    return max(count, 1)


def _mem_available(root: Path) -> int:
    try:
        text = (root / "proc/meminfo").read_text()
    except OSError:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    match = re.search(r"^MemAvailable:\s+(\d+) kB", text, re.MULTILINE)
    if match is None:
        raise ValueError("/proc/meminfo has no MemAvailable; give kv_cache_memory a size")
    return int(match[1]) * 1024


def _groups(root: Path, controller: str) -> list[tuple[Path, bool]]:
    """Control-group folders of this process from its own up to the root: (folder, is v2)."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, v2 = root / "sys/fs/cgroup", True
        elif controller in controllers.split(","):
            base, v2 = root / "sys/fs/cgroup" / controller, False
        else:
            continue
        # Inside a container the path may be the host's and absent here; the mount itself is then ours.
        relative = Path(path.lstrip("/"))
        found += [(base / part, v2) for part in (relative, *relative.parents) if (base / part).is_dir()]
    return found


def _memory_groups(root: Path) -> list[tuple[Path, str, str]]:
    v1, v2 = ("memory.limit_in_bytes", "memory.usage_in_bytes"), ("memory.max", "memory.current")
    return [(folder, *(v2 if is_v2 else v1)) for folder, is_v2 in _groups(root, "memory")]


def _reclaimable(folder: Path) -> int:
    """Bytes of cached files in a group's usage, which the kernel drops before it refuses memory."""
    try:
        text = (folder / "memory.stat").read_text()
    except OSError:
        return 0
    match = re.search(r"^(?:total_)?inactive_file (\d+)", text, re.MULTILINE)
    return int(match[1]) if match else 0


def _cpu_quotas(root: Path) -> list[float]:
    quotas = []
    for folder, is_v2 in _groups(root, "cpu"):
        if is_v2:
            try:
                quota, _, period = (folder / "cpu.max").read_text().partition(" ")
            except OSError:
                continue
            if quota.isdigit() and int(period) > 0:
                quotas.append(int(quota) / int(period))
        else:
            limit = _read_number(folder / "cpu.cfs_quota_us")
            length = _read_number(folder / "cpu.cfs_period_us")
            if limit is not None and length and limit > 0:
                quotas.append(limit / length)
    return quotas


def _read_number(path: Path) -> int | None:
    """The number in a file; None where there is none ("max", or no such file)."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.lstrip("-").isdigit() else None


def check_block_size(size: int) -> None:
    if not (1 <= size <= 256 and size & (size - 1) == 0):
        raise ValueError(f"block_size must be a power of two from 1 to 256, got {size}")


def plane_set(config: EngineConfig, model: ModelConfig) -> PlaneSet:
    """What the cache has beside K and V as stored. Refuses dense layers that do not exist."""
    for layer in config.dense_layers:
        if not 0 <= layer < model.num_layers:
            raise ValueError(f"dense_layers must name layers from 0 to {model.num_layers - 1}, got {layer}")
    layers = [i for i in range(model.num_layers) if config.has_planes and i not in config.dense_layers]
    cache = config.cache
    return PlaneSet(
        layers, config.has_tail, config.has_fast, cache.num_compact_blocks or 0, cache.value_bits or 8
    )


class BlockSizes(NamedTuple):
    """Bytes of a block as stored, and of a compact one."""

    stored: int
    compact: int

    @classmethod
    def of(cls, config: EngineConfig, model: ModelConfig) -> BlockSizes:
        shape = {
            "num_layers": model.num_layers,
            "num_kv_heads": model.num_kv_heads,
            "block_size": config.cache.block_size,
            "head_dim": model.head_dim,
        }
        planes = plane_set(config, model)
        stored = bytes_per_block(**shape, kv_dtype=config.cache.kv_dtype, planes=planes)
        return cls(stored, bytes_per_compact_block(**shape, planes=planes) if config.cache.value_bits else 0)


def pool_shape(cache: CacheConfig) -> PoolShape:
    """The pools that a resolved configuration names."""
    assert cache.num_blocks is not None
    budget = cache.history_budget
    assert budget is None or isinstance(budget, int)
    return PoolShape(
        cache.block_size, cache.num_blocks, cache.num_compact_blocks or 0, cache.compact_window, budget
    )


def _budget_tokens(cache: CacheConfig, sizes: BlockSizes, model: ModelConfig, longest: int) -> int | None:
    """``history_budget`` in tokens, of a size the tokens that it holds beside the summaries of ``longest``.

    Raises ValueError for what is neither, for what compact history cannot keep to, and where a layer's
    sliding window would see a part of what is summarised.
    """
    budget, window = cache.history_budget, cache.compact_window
    if budget is None:
        return None
    if window is None:
        raise ValueError('history_budget needs history="compact": only compact blocks are summarised')
    least = window + GROUP**2
    length = re.fullmatch(r"\s*([0-9]{1,12})\s*(k?)\s*", str(budget))
    if length is not None:
        tokens = int(length[1]) * (1024 if length[2] else 1)
    else:
        num_bytes = parse_size(budget)
        stored = (window // GROUP + 2) * sizes.stored
        # What a sequence has beside its budget does not depend on the budget, once it is longer than that.
        shape = PoolShape(GROUP, 1, 0, window, least, GROUP)
        beside = shape.compact_needed(max(longest, 2 * least)) - (least - window) // GROUP
        blocks = (num_bytes - stored) // sizes.compact - beside
        tokens = window + max(0, blocks) * GROUP
    tokens -= tokens % GROUP
    for layer in range(model.num_layers):
        seen = model.window(layer)
        if seen is not None and tokens - GROUP**2 < seen < longest:
            raise ValueError(
                f"a sliding window of {seen} tokens needs a history_budget of at least {seen + GROUP**2}, "
                f"got {budget!r:.100}"
            )
    if tokens < least:
        raise ValueError(
            f"history_budget must be at least {least} tokens with a history_window of {window}, "
            f"got {budget!r:.100}" + ("" if length else f", which holds {tokens}")
        )
    return tokens


def resolve(config: EngineConfig, model: ModelConfig, available: int) -> tuple[EngineConfig, str | None]:
    """Settle the numbers of blocks and ``scheduler.max_model_len``; ``available`` is free memory in bytes.

    The pool is, in this order: ``num_blocks``; ``kv_cache_memory``; or ``DEFAULT_MEMORY_SHARE`` of
    ``available``, but no more than ``max_num_seqs`` sequences of ``max_model_len`` can use. A
    ``max_model_len`` that the pool cannot hold, given or the model's own, is lowered to what it holds,
    and the second value is one line that says so (else None).
    """
    cache, scheduler = config.cache, config.scheduler
    check_block_size(cache.block_size)
    sizes = BlockSizes.of(config, model)
    longest = scheduler.max_model_len or model.max_position_embeddings
    budget = _budget_tokens(cache, sizes, model, longest)
    cache = replace(cache, history_budget=budget)
    config = replace(config, cache=cache)
    if cache.num_blocks is not None:
        num_compact = cache.num_compact_blocks or cache.num_blocks
        shape = PoolShape(cache.block_size, cache.num_blocks)
        if cache.value_bits is not None:
            shape = shape._replace(
                num_compact=num_compact,
                window=cache.compact_window,
                budget=budget,
                step_tokens=scheduler.max_num_batched_tokens,
            )
        _check_num_blocks(shape, sizes, available)
    elif cache.kv_cache_memory is not None:
        num_bytes = parse_size(cache.kv_cache_memory)
        shape = _divide(config, sizes, num_bytes, longest)
        if shape.num_blocks < 1:
            raise ValueError(f"kv_cache_memory of {format_size(num_bytes)} {_holds_nothing(config, sizes)}")
        if num_bytes > available:
            raise ValueError(
                f"kv_cache_memory of {format_size(num_bytes)} is more than the {format_size(available)} "
                "that the process may still use"
            )
    else:
        most = scheduler.max_num_seqs * _sequence_bytes(config, sizes, longest)
        shape = _divide(config, sizes, min(int(available * DEFAULT_MEMORY_SHARE), most), longest)
        if shape.num_blocks < 1:
            raise ValueError(
                f"only {format_size(available)} of memory is free, and half of it "
                f"{_holds_nothing(config, sizes)}: no KV pool fits"
            )

    max_model_len, note = fit_max_model_len(
        scheduler.max_model_len, model.max_position_embeddings, shape.capacity
    )
    return (
        replace(
            config,
            cache=replace(cache, num_blocks=shape.num_blocks, num_compact_blocks=shape.num_compact or None),
            scheduler=replace(scheduler, max_model_len=max_model_len),
        ),
        note,
    )


def _check_num_blocks(shape: PoolShape, sizes: BlockSizes, available: int) -> None:
    if shape.num_blocks < 1:
        raise ValueError(f"num_blocks must be at least 1, got {shape.num_blocks}")
    shape.check()
    left = available - shape.num_compact * sizes.compact
    if shape.num_blocks > left // sizes.stored:
        beside = f" beside {shape.num_compact} compact blocks" if shape.num_compact else ""
        raise ValueError(
            f"num_blocks must be at most {max(0, left // sizes.stored)}{beside}, which take the "
            f"{format_size(available)} that the process may still use, got {shape.num_blocks}"
        )


def _sequence_blocks(config: EngineConfig, tokens: int) -> tuple[int, int]:
    """Blocks as stored and compact ones that a sequence of so many tokens has while it grows."""
    size, window = config.cache.block_size, config.cache.compact_window
    blocks = -(-tokens // size)
    if window is None or blocks <= window // size + 2:
        return blocks, 0
    compact, budget = blocks - window // size, config.cache.history_budget
    if budget is not None:
        # While it grows by single tokens; a prompt's chunk needs more at a time, which _divide allows for.
        shape = PoolShape(size, 1, compact, window, int(budget), size)
        compact = min(compact, shape.compact_needed(tokens))
    return window // size + 2, compact


def num_sequences(config: EngineConfig, tokens: int) -> float:
    """How many sequences of so many tokens the pools of a resolved configuration hold."""
    stored, compact = _sequence_blocks(config, tokens)
    num_blocks, num_compact = config.cache.num_blocks or 0, config.cache.num_compact_blocks or 0
    return min(num_blocks / stored, num_compact / compact if compact else math.inf)


def sequence_bytes(config: EngineConfig, model: ModelConfig, tokens: int) -> int:
    """Bytes of all that a sequence of so many tokens has in the pools of ``config``, which need not be
    resolved.

    Raises ValueError for a budget of history that cannot be.
    """
    sizes = BlockSizes.of(config, model)
    cache = replace(config.cache, history_budget=_budget_tokens(config.cache, sizes, model, tokens))
    return _sequence_bytes(replace(config, cache=cache), sizes, tokens)


def _sequence_bytes(config: EngineConfig, sizes: BlockSizes, tokens: int) -> int:
    stored, compact = _sequence_blocks(config, tokens)
    return stored * sizes.stored + compact * sizes.compact


def _divide(config: EngineConfig, sizes: BlockSizes, num_bytes: int, longest: int) -> PoolShape:
    """The pools that take ``num_bytes``; without a block where they do not hold what one sequence needs.

    Beside what its sequences have while they grow, one of them may at a time have a step's tokens as stored.
    """
    cache, size = config.cache, config.cache.block_size
    if cache.compact_window is None:
        return PoolShape(size, num_bytes // sizes.stored)
    tokens = min(cache.history_tokens or longest, longest)
    stored, compact = _sequence_blocks(config, tokens)
    least = cache.compact_window // size + 3
    step = min(config.scheduler.max_num_batched_tokens, tokens) // size + 1
    left = num_bytes - step * sizes.stored
    each = stored * sizes.stored + max(1, compact) * sizes.compact
    num_blocks = max(least, step + left * stored // each)
    num_compact = (num_bytes - num_blocks * sizes.stored) // sizes.compact
    if num_compact < 1:
        return PoolShape(size, 0)
    assert cache.history_budget is None or isinstance(cache.history_budget, int)
    steps = config.scheduler.max_num_batched_tokens
    return PoolShape(size, num_blocks, num_compact, cache.compact_window, cache.history_budget, steps)


def _holds_nothing(config: EngineConfig, sizes: BlockSizes) -> str:
    size, window = config.cache.block_size, config.cache.compact_window
    if window is None:
        return f"holds no block: one block of {size} tokens takes {format_size(sizes.stored)}"
    least = (window // size + 3) * sizes.stored + sizes.compact
    return f"does not hold a history_window of {window} tokens: that takes {format_size(least)}"


def fit_max_model_len(requested: int | None, model_limit: int, pool_tokens: int) -> tuple[int, str | None]:
    """The longest sequence to admit, and one line to show when that is less than was to be had.

    ``requested`` None takes the model's own limit. Raises ValueError, naming both numbers, when
    more is requested than the model knows or when nothing fits.
    """
    if requested is not None and not 1 <= requested <= model_limit:
        raise ValueError(f"max_model_len must be between 1 and the model's {model_limit}, got {requested}")
    if pool_tokens < 2:
        raise ValueError(f"the KV pool holds {pool_tokens} tokens, at least 2 are needed")
    wanted = model_limit if requested is None else requested
    if wanted <= pool_tokens:
        return wanted, None
    return pool_tokens, f"max_model_len lowered from {wanted} to {pool_tokens}: the KV pool holds no more"
