"""Budgets of keys in the engine: what is refused, in a sentence, and what the prefix cache makes of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import typer

from octavo.attention.backend import AttentionBackend
from octavo.batch import ForwardBatch
from octavo.cache.kv_cache import KVCache, bytes_per_block
from octavo.cache.prefix_cache import PrefixCache
from octavo.cli import options
from octavo.config import CacheConfig, EngineConfig
from octavo.engine import admission, build
from octavo.kernels import topk_paged
from octavo.kernels.api import AttentionSpec
from octavo.kernels.native import ThreadPool
from octavo.request import AttnTopkReport, SamplingParams


def spec(**changes: object) -> AttentionSpec:
    fields = {
        "num_heads": 2,
        "num_kv_heads": 1,
        "head_dim": 32,
        "block_size": 16,
        "kv_dtype": torch.float32,
        "device": "cpu",
    }
    return AttentionSpec(**(fields | changes))  # type: ignore[arg-type]


# ---- refusals


def test_without_planes_a_request_that_asks_is_refused_by_the_name_of_the_flag(tiny) -> None:
    engine = tiny()
    with pytest.raises(ValueError, match=r"attn_topk \(4\) needs .*--attn-topk K or --topk-planes"):
        engine.add([1, 2, 3], SamplingParams(attn_topk=4))
    engine.add([1, 2, 3], SamplingParams(attn_topk=0))
    assert engine.drain()


@pytest.mark.parametrize("topk", [-1, 1.5, True, "4", 2**20 + 1])
def test_a_budget_is_a_whole_number(topk: object) -> None:
    with pytest.raises(ValueError, match="attn_topk must be a whole number"):
        SamplingParams(attn_topk=topk)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="attn_topk must be a whole number"):
        build._check(EngineConfig(model="m", attn_topk=topk))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"topk_planes": 1}, "topk_planes must be True or False"),
        ({"dense_layers": (0,)}, "dense_layers needs attn_topk or topk_planes"),
        ({"dense_layers": 3, "attn_topk": 4}, "dense_layers must be a list of layers"),
        ({"dense_layers": ("a",), "attn_topk": 4}, "dense_layers must be a list of layers"),
    ],
)
def test_options_of_the_engine(config: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build._check(EngineConfig(model="m", cache=CacheConfig(), **config))


def test_what_a_backend_cannot_serve_under_a_budget() -> None:
    with pytest.raises(ValueError, match="block_size that is a multiple of 16, got 8"):
        AttentionBackend("fused", spec(block_size=8), ThreadPool(1), topk=True)
    with pytest.raises(ValueError, match='need attention="fused"'):
        AttentionBackend("sdpa", spec(), ThreadPool(1), topk=True)
    AttentionBackend("fused", spec(block_size=8), ThreadPool(1))


def test_layers_on_the_command_line() -> None:
    assert options.parse_layers("0, 1,12") == (0, 1, 12)
    assert options.parse_layers(None) == ()
    for text in ("a", "0,,1", "-1", "0.5"):
        with pytest.raises(typer.BadParameter, match="layers by number"):
            options.parse_layers(text)


# ---- the policy


def test_the_policy_names_all_that_decides() -> None:
    config = EngineConfig(model="m", attn_topk=64, dense_layers=(0, 1))
    assert admission.resolve_attn_topk(SamplingParams(), config) == (64, "attn_topk=64 dense_layers=0,1")
    assert admission.resolve_attn_topk(SamplingParams(attn_topk=0), config) == (0, "")
    planes = EngineConfig(model="m", topk_planes=True)
    assert admission.resolve_attn_topk(SamplingParams(), planes) == (0, "")
    assert admission.resolve_attn_topk(SamplingParams(attn_topk=9), planes) == (9, "attn_topk=9")


def test_policies_share_nothing_and_the_miss_reason_says_so() -> None:
    cache = PrefixCache(block_size=4, num_blocks=16, fingerprint="f")
    tokens = list(range(10))
    written = cache.chain(tokens, "salt", "attn_topk=8")
    for block in range(2):
        cache.extend(written, block)
    same = cache.chain(tokens, "salt", "attn_topk=8")
    assert len(cache.match(same).nodes) == 2
    for policy in ("", "attn_topk=4", "attn_topk=8 dense_layers=0"):
        other = cache.chain(tokens, "salt", policy)
        match = cache.match(other)
        assert match.nodes == ()
        assert match.tail is None
        assert not set(cache.digests(other)) & set(cache.digests(same))
        reason = cache.explain(other, match)
        assert "attn_topk=8" in reason
        assert (policy or "attn_topk=0") in reason
    # Nothing is said of what other salts hold.
    stranger = cache.chain(tokens, "other", "attn_topk=4")
    assert "attn_topk" not in cache.explain(stranger, cache.match(stranger))


def test_no_pair_of_salt_and_policy_has_the_name_of_another() -> None:
    cache = PrefixCache(block_size=2, num_blocks=4, fingerprint="f")
    pairs = [("", ""), ("x", ""), ("", "x"), ("ab", "c"), ("b", "ca"), ("c", "ab"), ("\0x", ""), ("", "\0x")]
    digests = {cache.digests(cache.chain([1, 2], salt, policy))[0] for salt, policy in pairs}
    assert len(digests) == len(pairs)


# ---- the cache's planes


def test_planes_lie_beside_the_layers_that_are_not_dense() -> None:
    cache = KVCache(
        num_layers=3, num_blocks=4, num_kv_heads=2, block_size=32, head_dim=64, plane_layers=[1, 2]
    )
    assert cache.plane(0) is None
    plane = cache.plane(2)
    assert plane is not None
    assert plane.shape == (4, 2, 2, topk_paged.record_bytes(64))
    held = cache.key.nbytes + cache.value.nbytes + cache.planes.nbytes
    size = {"num_layers": 3, "num_kv_heads": 2, "block_size": 32, "head_dim": 64}
    assert held == 4 * bytes_per_block(**size, kv_dtype="float32", plane_layers=2)
    # Copies take the spans that are whole; the rest is written when it is completed.
    plane[1] = 7
    cache.copy_rows(1, 3, 31)
    assert (plane[3, :, 0] == 7).all()
    assert (plane[3, :, 1] == 0).all()


def test_a_batch_with_budgets_needs_a_backend_made_for_them() -> None:
    ints = torch.zeros(1, dtype=torch.int64)
    batch = ForwardBatch(
        token_ids=ints,
        positions=ints,
        slot_mapping=ints,
        block_table=torch.zeros(1, 1, dtype=torch.int32),
        seq_lens=torch.ones(1, dtype=torch.int32),
        cu_seqlens_q=torch.tensor([0, 1], dtype=torch.int32),
        logits_rows=ints,
        attn_topk=torch.ones(1, dtype=torch.int32),
    )
    with pytest.raises(ValueError, match="made without topk"):
        AttentionBackend("fused", spec(), ThreadPool(1)).plan(batch)


def test_reports_add_up() -> None:
    a = AttnTopkReport(
        attn_topk=4,
        rows=10,
        visible_keys=100,
        kept_keys=40,
        mean_dropped_mass=0.2,
        worst_dropped_mass=0.5,
        bytes_read=7,
        dense_bytes=9,
    )
    b = replace(a, rows=30, visible_keys=200, kept_keys=120, mean_dropped_mass=0.04, worst_dropped_mass=0.1)
    for report in (AttnTopkReport(attn_topk=4) + a + b, a + (b + AttnTopkReport(attn_topk=9))):
        assert (report.attn_topk, report.rows, report.visible_keys, report.kept_keys) == (4, 40, 300, 160)
        assert report.mean_dropped_mass == pytest.approx((10 * 0.2 + 30 * 0.04) / 40)
        assert report.worst_dropped_mass == 0.5
        assert (report.bytes_read, report.dense_bytes) == (14, 18)
