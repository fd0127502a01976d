"""What the fused kernel refuses, and the native write of K and V."""

from __future__ import annotations

import subprocess
import sys
import weakref
from typing import Any

import pytest
import torch

from octavo import _native
from octavo.cache.kv_cache import KVCache
from octavo.kernels import api, fused
from octavo.kernels.native import ThreadPool

from .paged import Case, Paged, build, pool

CASE = Case(seqs=((1, 40), (5, 20)))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"head_dim": 24}, "head_dim from 32 to 256"),
        ({"head_dim": 36}, "multiple of 8"),
        ({"head_dim": 264}, "head_dim from 32 to 256"),
        ({"block_size": 24}, "power of two"),
        ({"block_size": 512}, "power of two"),
        ({"block_size": 0}, "power of two"),
        ({"kv_dtype": torch.bfloat16}, "float32 or float16"),
        ({"device": "cuda"}, "CPU"),
        ({"num_heads": 7}, "multiple of num_kv_heads"),
    ],
)
def test_why_not(changes: dict[str, Any], reason: str) -> None:
    spec = api.AttentionSpec(
        **{
            "num_heads": 6,
            "num_kv_heads": 2,
            "head_dim": 64,
            "block_size": 16,
            "kv_dtype": torch.float32,
            "device": "cpu",
            **changes,
        }
    )
    assert reason in (fused.why_not(spec) or "")
    with pytest.raises(ValueError, match=reason):
        fused.plan(build(CASE).meta, spec, pool(1))


def _meta(paged: Paged, **changes: torch.Tensor) -> api.AttentionMeta:
    return paged.meta._replace(**changes)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"seq_lens": ints(40, 4)}, "sequence 1 has 5 queries but seq_len 4"),
        (
            {"seq_lens": ints(40, 2000)},
            "sequence 1 needs 125 blocks for seq_len 2000 but",
        ),
        ({"cu_seqlens_q": ints(1, 2, 6)}, "cu_seqlens_q must start with 0"),
        ({"cu_seqlens_q": ints(0, 3, 2)}, "must not fall"),
        ({"cu_seqlens_q": ints(0, 1)}, "cu_seqlens_q must be"),
        ({"seq_lens": torch.tensor([40, 20])}, "seq_lens must be .* int32"),
        ({"block_table": torch.full((2, 4), -1, dtype=torch.int32)}, "block -1, which is negative"),
        ({"block_table": torch.zeros(4, 2, dtype=torch.int32).t()}, "block_table must be .* contiguous"),
    ],
)
def test_plan_refuses(changes: dict[str, torch.Tensor], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        fused.plan(_meta(build(CASE), **changes), CASE.spec, pool(1))


@pytest.mark.parametrize("num_threads", [0, -1, 100_000])
def test_a_pool_refuses_threads(num_threads: int) -> None:
    with pytest.raises(ValueError, match=f"num_threads must be between 1 and 1024, got {num_threads}"):
        ThreadPool(num_threads)


def test_plan_refuses_an_unknown_isa() -> None:
    with pytest.raises(ValueError, match="isa must be auto, avx512, avx2 or portable"):
        fused.plan(build(CASE).meta, CASE.spec, pool(1), isa="sse9")


def test_attend_refuses_a_block_outside_the_cache() -> None:
    paged = build(CASE)
    plan = fused.plan(_meta(paged, block_table=paged.meta.block_table + 1000), CASE.spec, pool(1))
    with pytest.raises(ValueError, match=r"block_table holds block 10\d\d but the cache has 8 blocks"):
        fused.attend(paged.q, paged.kv, plan)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda q, kv: (q.double(), kv), "q must be .* float32"),
        (lambda q, kv: (q[:5], kv), r"q must be \[6, 6, 32\]"),
        (lambda q, kv: (q.transpose(0, 1).contiguous().transpose(0, 1), kv), "each token contiguous"),
        (lambda q, kv: (q, kv._replace(key=kv.key.half())), "key must be .* torch.float32"),
        (lambda q, kv: (q, kv._replace(value=kv.value[:, :1])), "value must be"),
        (lambda q, kv: (q, kv._replace(value=kv.value[1:])), "key has 8 blocks but value has 7"),
        (
            lambda q, kv: (q, kv._replace(key=kv.key.mT.contiguous().mT)),
            "contiguous",
        ),
        (lambda q, kv: (q, kv._replace(window=0)), "window must be at least 1 or None, got 0"),
    ],
)
def test_attend_refuses(change: Any, reason: str) -> None:
    paged = build(CASE)
    plan = fused.plan(paged.meta, CASE.spec, pool(1))
    q, kv = change(paged.q, paged.kv)
    with pytest.raises(ValueError, match=reason):
        fused.attend(q, kv, plan)


def test_no_sequences_and_no_queries_are_fine() -> None:
    empty = api.AttentionMeta(torch.zeros(0, 1, dtype=torch.int32), ints(), ints(0))
    paged = build(CASE)
    out, _ = fused.attend(torch.zeros(0, 6, 32), paged.kv, fused.plan(empty, CASE.spec, pool(2)))
    assert out.shape == (0, 6, 32)
    case = Case(seqs=((0, 20), (3, 20)))
    paged = build(case)
    out, _ = fused.attend(paged.q, paged.kv, fused.plan(paged.meta, case.spec, pool(2)))
    assert out.isfinite().all()


def test_without_the_extension_the_error_says_what_to_do() -> None:
    code = (
        "import sys; sys.modules['octavo._native'] = None; from octavo.kernels import api; api.get('fused')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "ImportError: octavo's native extension is missing: run pip install ." in done.stderr


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("head_dim", [32, 72])
def test_write_kv_equals_index_put(kv_dtype: torch.dtype, head_dim: int) -> None:
    """Rounding to float16 is torch's own, with values that overflow, underflow and are not numbers."""
    shape = (5, 2, 4, head_dim)
    joint = torch.randn(6, 4, head_dim) * torch.logspace(-9, 6, 6)[:, None, None]
    joint[0, 0, :4] = torch.tensor([float("nan"), float("inf"), 65519.9, 65520.0])
    k, v = joint[:, :2], joint[:, 2:]
    slots = torch.tensor([3, -1, 19, 0, 8, 4])
    key, value = torch.zeros(shape, dtype=kv_dtype), torch.zeros(shape, dtype=kv_dtype)
    fused.write_kv(key, value, k, v, slots)
    for cache, rows in ((key, k), (value, v)):
        want = torch.zeros(shape, dtype=kv_dtype)
        kept = slots >= 0
        want[slots[kept] // 4, :, slots[kept] % 4] = rows[kept].to(kv_dtype)
        torch.testing.assert_close(cache, want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("slot", [-2, 20, 2**40])
def test_write_kv_refuses_a_slot_outside_the_cache(slot: int) -> None:
    key, value = torch.zeros(5, 2, 4, 32), torch.zeros(5, 2, 4, 32)
    k = torch.ones(2, 2, 32)
    with pytest.raises(ValueError, match=rf"slot_mapping\[1\] is {slot}, allowed are -1 \(skip\) to 19"):
        fused.write_kv(key, value, k, k, torch.tensor([0, slot]))
    assert not key.any()
    assert not value.any()


def test_write_kv_refuses_what_does_not_fit() -> None:
    key, value = torch.zeros(5, 2, 4, 32), torch.zeros(5, 2, 4, 32)
    k, slots = torch.ones(2, 2, 32), torch.tensor([0, 1])
    for args, reason in (
        ((key, value[:4], k, k, slots), "key has 5 blocks but value has 4"),
        ((key, value.half(), k, k, slots), "value must be"),
        ((key.bfloat16(), value, k, k, slots), "key must be"),
        ((key, value, k[:1], k, slots), "k must be"),
        ((key, value, k, k.half(), slots), "v must be"),
        ((key, value, k, k, slots.int()), "slot_mapping must be a contiguous int64 vector"),
    ):
        with pytest.raises(ValueError, match=reason):
            fused.write_kv(*args)


def test_read_memory_reads_every_byte() -> None:
    x = torch.arange(300_001)
    for num_threads in (1, 3):
        assert _native.read_memory(x.data_ptr(), x.numel() * 8, pool(num_threads)) == int(x.sum())


@pytest.mark.parametrize("write", ["torch", "native"])
def test_a_pad_row_is_written_nowhere(write: str) -> None:
    cache = KVCache(num_layers=1, num_blocks=3, num_kv_heads=2, block_size=4, head_dim=8)
    k, v = torch.ones(3, 2, 8), torch.full((3, 2, 8), 2.0)
    slots = torch.tensor([5, -1, 2])
    if write == "torch":
        cache.write(0, k, v, slots)
    else:
        fused.write_kv(*cache.layer(0), k, v, slots)
    written = cache.key[0].abs().sum(dim=(1, 3)).flatten().nonzero().flatten().tolist()
    assert written == [2, 5]
    assert cache.value[0].sum() == 2 * 2 * 8 * 2.0


def test_a_plan_keeps_its_threads() -> None:
    """Nobody else need hold the pool: a plan on freed threads would read whatever lies there now."""
    paged = build(CASE)
    pools = [ThreadPool(2) for _ in range(8)]
    alive = [weakref.finalize(one, list) for one in pools]
    plans = [fused.plan(paged.meta, CASE.spec, one) for one in pools]
    pools.clear()
    assert all(one.alive for one in alive)
    assert all(fused.attend(paged.q, paged.kv, plan)[0].isfinite().all() for plan in plans)
    plans.clear()
    assert not any(one.alive for one in alive)
