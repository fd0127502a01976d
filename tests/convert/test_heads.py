"""Laws of turning and pooling heads, on random ones."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.config import RopeConfig
from octavo.convert.align import distances, turns
from octavo.convert.heads import HeadCounts, LayerHeads
from octavo.convert.layer import Attend, attention
from octavo.convert.pool import Plan, partition, plan, pool, turn
from octavo.models.rope import RopeTable, Rotation, rotate

HIDDEN, HEAD_DIM = 20, 6
FAMILIES = ("orthogonal", "phases")
SHAPES = [(6, 6, 2), (6, 6, 3), (6, 3, 2), (6, 3, 3), (6, 2, 3), (8, 4, 4), (9, 3, 3), (14, 2, 2), (14, 2, 7)]
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")


def random_heads(heads: int, kv_heads: int, seed: int = 0, biased: bool = True) -> LayerHeads:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def rows(count: int) -> torch.Tensor:
        stack = normal(count, HEAD_DIM, HIDDEN + 1)
        stack[..., -1] *= biased
        return stack

    return LayerHeads(
        q=rows(heads),
        k=rows(kv_heads),
        v=rows(kv_heads),
        o=normal(heads, HIDDEN, HEAD_DIM),
        o_bias=normal(HIDDEN) if biased else None,
        biased=biased,
    )


def random_turns(count: int, family: str, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    target = torch.randn(count, HEAD_DIM, 9, generator=generator, dtype=torch.float64)
    return turns(torch.randn(target.shape, generator=generator, dtype=torch.float64), target, family)


def how(family: str, n: int) -> Attend:
    """Rotary and causal where turns are phases."""
    if family == "orthogonal":
        return Attend(HEAD_DIM**-0.5, causal=False)
    rotation = RopeTable(RopeConfig(), HEAD_DIM, "cpu").at(torch.arange(n))
    return Attend(HEAD_DIM**-0.5, causal=True, rotation=Rotation(*(t.double() for t in rotation)))


def inputs(n: int = 11, seed: int = 0) -> torch.Tensor:
    return torch.randn(2, n, HIDDEN, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def no_plan(heads: LayerHeads, qk: torch.Tensor, vo: torch.Tensor) -> Plan:
    counts = heads.counts
    return Plan([[i] for i in range(counts.num_kv_heads)], [[i] for i in range(counts.num_heads)], qk, vo, 0)


@pytest.mark.parametrize("family", FAMILIES)
def test_turns_are_orthogonal_and_undo_a_turn(family: str) -> None:
    made = random_turns(4, family)
    torch.testing.assert_close(made @ made.mT, torch.eye(HEAD_DIM, dtype=torch.float64).expand(4, -1, -1))
    own = torch.randn(4, HEAD_DIM, 9, dtype=torch.float64)
    torch.testing.assert_close(turns(own, made @ own, family), made)


def test_phases_commute_with_the_rotation_of_every_position() -> None:
    made = random_turns(1, "phases")[0]
    rotation = how("phases", 30).rotation
    assert rotation is not None
    x = torch.randn(30, 1, HEAD_DIM, dtype=torch.float64)
    torch.testing.assert_close(rotate(x, rotation) @ made.T, rotate(x @ made.T, rotation))
    free = random_turns(1, "orthogonal")[0]
    assert not torch.allclose(rotate(x, rotation) @ free.T, rotate(x @ free.T, rotation), atol=1e-3)


@pytest.mark.parametrize("family", FAMILIES)
def test_no_turn_brings_heads_nearer_than_the_distance_says(family: str) -> None:
    heads = torch.randn(5, HEAD_DIM, 9, dtype=torch.float64)
    found = distances(heads, family)
    best = turns(heads[:, None].expand(5, 5, -1, -1), heads[None, :].expand(5, 5, -1, -1), family)
    reached = (best @ heads[:, None] - heads[None, :]).square().sum((-2, -1))
    torch.testing.assert_close(found, reached, atol=1e-9, rtol=1e-9)
    for seed in range(20):
        other = (random_turns(1, family, seed)[0] @ heads[:, None] - heads[None, :]).square().sum((-2, -1))
        assert (other >= found - 1e-9).all()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 6), (6, 2), (4, 1)])
@pytest.mark.parametrize("biased", [True, False])
def test_turning_alone_changes_nothing(family: str, heads: int, kv_heads: int, biased: bool) -> None:
    layer, x = random_heads(heads, kv_heads, biased=biased), inputs()
    made = no_plan(layer, random_turns(kv_heads, family, 1), random_turns(kv_heads, "orthogonal", 2))
    turned = turn(layer, made)
    assert not torch.allclose(turned.q, layer.q)
    torch.testing.assert_close(attention(turned, x, how(family, 11)), attention(layer, x, how(family, 11)))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("heads", "kv_heads", "rate"), SHAPES)
def test_heads_that_are_turns_of_each_other_pool_without_loss(
    family: str, heads: int, kv_heads: int, rate: int
) -> None:
    """They are found wherever they lie, and whatever their output projections are."""
    left = HeadCounts(heads, kv_heads).pooled(rate)
    few = random_heads(*left, seed=3)
    generator = torch.Generator().manual_seed(4)
    kv_of = torch.randperm(kv_heads, generator=generator) % left.num_kv_heads
    # Of the query heads over one new K and V head, in a random order, each new one is meant `rate` times.
    q_of = torch.empty(heads, dtype=torch.long)
    for c in range(left.num_kv_heads):
        mine = torch.arange(heads)[kv_of.repeat_interleave(heads // kv_heads) == c]
        if kv_heads == heads:
            q_of[mine] = c
            continue
        new = torch.arange(left.repeats).repeat_interleave(rate) + c * left.repeats
        q_of[mine] = new[torch.randperm(len(new), generator=generator)]
    qk, vo = random_turns(kv_heads, family, 5), random_turns(kv_heads, "orthogonal", 6)
    many = LayerHeads(
        q=qk.repeat_interleave(heads // kv_heads, 0) @ few.q[q_of],
        k=qk @ few.k[kv_of],
        v=vo @ few.v[kv_of],
        o=random_heads(heads, kv_heads, seed=7).o,
        o_bias=few.o_bias,
        biased=True,
    )
    x = inputs()
    made = plan(many, rate, "aligned", family)
    assert made.error < 1e-12
    pooled = pool(many, made)
    assert pooled.counts == left
    want = attention(many, x, how(family, 11))
    torch.testing.assert_close(attention(pooled, x, how(family, 11)), want)
    if kv_heads > left.num_kv_heads:
        mean = pool(many, plan(many, rate, "mean", family))
        assert not torch.allclose(attention(mean, x, how(family, 11)), want, atol=1e-2)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("heads", "kv_heads", "rate"), SHAPES)
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_aligned_never_loses_more_than_mean(
    family: str, heads: int, kv_heads: int, rate: int, seed: int
) -> None:
    layer = random_heads(heads, kv_heads, seed)
    root = torch.randn(HIDDEN + 1, HIDDEN + 1, dtype=torch.float64)
    for each in (None, root):
        mean, aligned = (plan(layer, rate, method, family, each) for method in ("mean", "aligned"))
        assert 0 <= aligned.error <= mean.error <= 1
        if len(aligned.kv_groups) < kv_heads:
            assert aligned.error < 0.95 * mean.error


@pytest.mark.parametrize("family", FAMILIES)
def test_the_error_is_what_averaging_loses(family: str) -> None:
    """Recomputed from the turned heads and the averages, on inputs with ``root``'s second moment."""
    layer = random_heads(6, 3)
    x = torch.cat((inputs(40).flatten(0, 1), torch.ones(80, 1, dtype=torch.float64)), 1)
    values, vectors = torch.linalg.eigh(x.T @ x / len(x))
    made = plan(layer, 3, "aligned", family, vectors * values.clamp(min=0).sqrt())
    turned, pooled = turn(layer, made), pool(layer, made)

    def energy(stack: torch.Tensor) -> float:
        return float((stack @ x.T).square().sum() / len(x))

    lost = {"q": 0.0, "k": 0.0, "v": 0.0}
    for name, groups in (("q", made.q_groups), ("k", made.kv_groups), ("v", made.kv_groups)):
        for new, group in enumerate(groups):
            lost[name] += energy(getattr(turned, name)[group] - getattr(pooled, name)[new])
    want = (lost["q"] + lost["k"]) / (energy(layer.q) + energy(layer.k)) / 2 + lost["v"] / energy(layer.v) / 2
    assert made.error == pytest.approx(want, rel=1e-9)


@given(st.integers(1, 64), st.data())
def test_left_over_heads_fit_each_other(kv_heads: int, data: st.DataObject) -> None:
    heads = kv_heads * data.draw(st.integers(1, 8))
    rate = data.draw(st.sampled_from([r for r in range(1, heads + 1) if heads % r == 0]))
    left = HeadCounts(heads, kv_heads).pooled(rate)
    assert left.num_heads * rate == heads
    assert left.num_heads % left.num_kv_heads == 0
    assert kv_heads % left.num_kv_heads == 0
    if left.num_heads % kv_heads == 0:
        assert left.num_kv_heads == kv_heads  # pooled only where fewer are needed


def test_the_rule_for_k_and_v_heads() -> None:
    assert HeadCounts(9, 3).pooled(3) == (3, 3)
    assert HeadCounts(9, 3).pooled(9) == (1, 1)
    assert HeadCounts(14, 2).pooled(2) == (7, 1)
    assert HeadCounts(14, 2).pooled(7) == (2, 2)
    assert HeadCounts(12, 4).pooled(2) == (6, 2)
    assert HeadCounts(12, 12).pooled(4) == (3, 3)
    with pytest.raises(ValueError, match=r"divide num_heads=9 \(1, 3, 9\), got 2"):
        HeadCounts(9, 3).pooled(2)


@pytest.mark.parametrize(("heads", "kv_heads", "rate"), SHAPES)
def test_query_heads_meet_only_over_one_new_k_and_v_head(heads: int, kv_heads: int, rate: int) -> None:
    for method in ("mean", "aligned"):
        made = plan(random_heads(heads, kv_heads), rate, method, "orthogonal")
        left = HeadCounts(heads, kv_heads).pooled(rate)
        assert sorted(chain(*made.kv_groups)) == list(range(kv_heads))
        assert sorted(chain(*made.q_groups)) == list(range(heads))
        assert [len(group) for group in made.q_groups] == [rate] * left.num_heads
        for new, group in enumerate(made.q_groups):
            assert {head // (heads // kv_heads) for head in group} <= {*made.kv_groups[new // left.repeats]}


@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 1000))
def test_a_partition_is_no_worse_than_neighbours(groups: int, size: int, seed: int) -> None:
    points = torch.randn(groups * size, 3, generator=torch.Generator().manual_seed(seed))
    distance = torch.cdist(points, points).square()
    found = partition(distance, size)
    assert sorted(chain(*found)) == list(range(groups * size))
    assert {len(group) for group in found} == {size}

    def within(parts: list[list[int]]) -> float:
        return sum(float(distance[part][:, part].sum()) for part in parts)

    neighbours = [list(range(i, i + size)) for i in range(0, groups * size, size)]
    assert within(found) <= within(neighbours) + 1e-4


def test_a_partition_finds_clusters() -> None:
    cluster = torch.tensor([2, 0, 1, 1, 2, 0, 0, 2, 1])
    distance = (cluster[:, None] != cluster[None, :]).double()
    assert partition(distance, 3) == [[0, 4, 7], [1, 5, 6], [2, 3, 8]]


@pytest.mark.parametrize("biased", [True, False])
def test_cutting_and_joining_again_is_the_identity(biased: bool) -> None:
    layer = random_heads(6, 2, biased=biased)
    tensors = layer.tensors()
    assert ("q.bias" in tensors) is ("o.bias" in tensors) is biased
    again = LayerHeads.cut(tensors, HEAD_DIM)
    for name in ("q", "k", "v", "o"):
        assert torch.equal(getattr(again, name), getattr(layer, name))
    assert again.biased is biased


@pytest.mark.parametrize("family", FAMILIES)
def test_a_rate_of_one_changes_no_bit(family: str) -> None:
    layer = random_heads(6, 2)
    pooled = pool(layer, plan(layer, 1, "aligned", family))
    for name in ("q", "k", "v", "o"):
        assert torch.equal(getattr(pooled, name), getattr(layer, name))


def test_a_layer_of_zeros_loses_nothing() -> None:
    layer = random_heads(4, 4)
    zeros = replace(layer, q=layer.q * 0, k=layer.k * 0, v=layer.v * 0)
    for method in ("mean", "aligned"):
        assert plan(zeros, 2, method, "phases").error == 0
