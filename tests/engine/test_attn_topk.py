"""Budgets of keys in the engine: what is refused, in a sentence, and what the prefix cache makes of them."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
import typer

from octavo import attn_rule
from octavo.attention.backend import AttentionBackend
from octavo.attn_rule import AttnRule
from octavo.batch import ForwardBatch
from octavo.cache.explain import explain
from octavo.cache.kv_cache import KVCache, PlaneSet, bytes_per_block
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
        ({"attn_topk_tail": True}, "attn_topk_tail needs attn_topk or topk_planes"),
        ({"attn_topk_mode": "fast"}, "attn_topk_mode='fast' needs attn_topk or topk_planes"),
        (
            {"attn_topk": "auto", "attn_topk_mode": "fast", "attn_topk_tail": True},
            'it needs attn_topk_mode="exact"',
        ),
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
    assert options.parse_attn_topk("auto") == "auto"
    assert options.parse_attn_topk("lean") == "lean"
    assert options.parse_attn_topk("64") == 64
    for text in ("all", "-1", "1.5", str(2**20 + 1)):
        with pytest.raises(typer.BadParameter, match="a number of keys from 0 to 1048576, or auto or lean"):
            options.parse_attn_topk(text)
    for text in ("a", "0,,1", "-1", "0.5"):
        with pytest.raises(typer.BadParameter, match="layers by number"):
            options.parse_layers(text)


# ---- the policy


def test_the_policy_names_all_that_decides() -> None:
    config = EngineConfig(model="m", attn_topk=64, dense_layers=(0, 1))

    def policy(config: EngineConfig, **asked: object) -> tuple[int, str]:
        rule, words = admission.resolve_attn_topk(SamplingParams(**asked), config)  # type: ignore[arg-type]
        return rule.topk, words

    assert policy(config) == (64, "attn_topk=64 dense_layers=0,1")
    assert policy(config, attn_topk=0) == (0, "")
    planes = EngineConfig(model="m", topk_planes=True)
    assert policy(planes) == (0, "")
    assert policy(planes, attn_topk=9) == (9, "attn_topk=9")
    every = EngineConfig(model="m", attn_topk=64, attn_topk_mode="fast", attn_topk_tail=True)
    assert policy(every) == (64, "attn_topk=64 mode=fast tail")
    assert policy(every, attn_topk_mode="exact", attn_topk_tail=False) == (64, "attn_topk=64")
    auto = EngineConfig(model="m", attn_topk="auto")
    assert auto.has_planes
    assert auto.has_tail
    assert policy(auto)[1].startswith("attn_topk=auto (")
    assert policy(auto, attn_topk="lean")[1] == "attn_topk=lean (4 recent, 330 ppm) tail"
    assert policy(auto)[1].endswith(" tail")
    assert policy(auto, attn_topk_tail=False)[1] + " tail" == policy(auto)[1]


def test_a_rule_is_a_policy_of_the_kernel() -> None:
    assert AttnRule._fields == topk_paged.Policy._fields
    for tail, mode in itertools.product((False, True), ("exact", "fast")):
        assert AttnRule.of(9, mode, tail) == topk_paged.Policy.of(9, tail=tail, fast=mode == "fast")
    for name, its in attn_rule.ADAPTIVE.items():
        assert AttnRule.of(name, "exact", True) == topk_paged.Policy.adaptive(its.least, its.recent)
        assert AttnRule.of(name, "exact", True).budget == name


@pytest.mark.parametrize(
    ("config", "asked", "message"),
    [
        ({}, {"attn_topk_mode": "fast"}, r"attn_topk_mode=.*started with it \(--attn-topk-mode fast\)"),
        ({}, {"attn_topk_tail": True}, r"attn_topk_tail needs .*attn_topk_tail=True \(--attn-topk-tail\)"),
        (
            {},
            {"attn_topk": "auto"},
            r'attn_topk="auto", without attn_topk_tail=False, needs .*--attn-topk-tail',
        ),
        (
            {"attn_topk_mode": "fast", "attn_topk_tail": True},
            {"attn_topk": "auto"},
            'attn_topk="auto" weighs all keys: it needs attn_topk_mode="exact"',
        ),
    ],
)
def test_what_the_cache_has_no_planes_for_is_refused_by_the_flag(
    config: dict, asked: dict, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        admission.resolve_attn_topk(SamplingParams(**asked), EngineConfig(model="m", attn_topk=8, **config))


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (
            {"attn_topk": "all"},
            'attn_topk must be a whole number, between 0 and 1048576, or "auto" or "lean", got \'all\'',
        ),
        ({"attn_topk_mode": "quick"}, "attn_topk_mode must be one of exact, fast, got 'quick'"),
        ({"attn_topk_tail": 1}, "attn_topk_tail must be True or False, got 1"),
    ],
)
def test_what_is_no_policy(asked: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingParams(**asked)
    with pytest.raises(ValueError, match=message):
        build._check(EngineConfig(model="m", **{"attn_topk": 4} | asked))


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
        reason = explain(cache, other, match)
        assert "attn_topk=8" in reason
        assert (policy or "attn_topk=0") in reason
    # Nothing is said of what other salts hold.
    stranger = cache.chain(tokens, "other", "attn_topk=4")
    assert "attn_topk" not in explain(cache, stranger, cache.match(stranger))


def test_no_pair_of_salt_and_policy_has_the_name_of_another() -> None:
    cache = PrefixCache(block_size=2, num_blocks=4, fingerprint="f")
    pairs = [("", ""), ("x", ""), ("", "x"), ("ab", "c"), ("b", "ca"), ("c", "ab"), ("\0x", ""), ("", "\0x")]
    digests = {cache.digests(cache.chain([1, 2], salt, policy))[0] for salt, policy in pairs}
    assert len(digests) == len(pairs)


# ---- the cache's planes


def test_planes_lie_beside_the_layers_that_are_not_dense() -> None:
    size = {"num_layers": 3, "num_kv_heads": 2, "block_size": 32, "head_dim": 64}
    for tail, fast in itertools.product((False, True), repeat=2):
        kinds = PlaneSet([1, 2], tail, fast)
        cache = KVCache(**size, num_blocks=4, planes=kinds)
        assert cache.layer_planes(0) is None
        planes = cache.layer_planes(2)
        assert planes is not None
        assert planes.scan.shape == (4, 2, 2, topk_paged.record_bytes(64))
        assert (planes.mean_value is not None, planes.bounds is not None) == (tail, fast)
        held = cache.key.nbytes + cache.value.nbytes + cache.plane_bytes
        assert held == 4 * bytes_per_block(**size, kv_dtype="float32", planes=kinds)
        # Copies take the spans that are whole; the rest is written when it is completed.
        for plane in planes:
            if plane is not None:
                plane[1] = 7
        cache.copy_rows(1, 3, 31)
        for plane in planes:
            if plane is not None:
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
        attn_topk=topk_paged.policies([topk_paged.Policy.of(1)]),
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
