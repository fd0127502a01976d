"""Making summaries: means of compact keys and values, turned to the centre of their span."""

from __future__ import annotations

import pytest
import torch

from octavo.config import RopeConfig
from octavo.kernels import api, compact, reference
from octavo.kernels.native import _native
from octavo.models.rope import RopeTable, turns_to_centre

from .paged import Case, empty_compact, pool

ISAS = [isa for isa in ("avx2", "portable") if isa in _native.isas()]
ROPE = RopeConfig(theta=10000.0)
HEADS = 2


def layer(key: torch.Tensor, value: torch.Tensor, bits: int, spare: int, isa: str = "auto") -> api.KVLayer:
    """``key`` and ``value`` ``[blocks, kv_heads, 16, d]``; block i in compact block i, then ``spare`` NaN."""
    blocks, kv_heads, _, d = key.shape
    case = Case(seqs=(), num_kv_heads=kv_heads, head_dim=d, history_window=16, value_bits=bits)
    kv = api.KVLayer(key, value, 1.0, compact=empty_compact(case, blocks + spare))
    pairs = torch.arange(blocks, dtype=torch.int32)[:, None].expand(-1, 2).contiguous()
    compact.seal(kv, pairs, pool(1), isa=isa)
    return kv


def operations(*each: tuple[int, int, range]) -> torch.Tensor:
    rows = [[to, level, *sources, *[-1] * (16 - len(sources))] for to, level, sources in each]
    return torch.tensor(rows, dtype=torch.int32)


def entries(kv: api.KVLayer, blocks: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """What is read of compact blocks: keys and values ``[blocks, kv_heads, 16, d]``."""
    assert kv.compact is not None
    kv_heads, d = kv.key.shape[1], kv.key.shape[3]
    both = reference.expand_compact(kv.compact, torch.tensor(blocks), d)
    k, v = (x.view(kv_heads, len(blocks), 16, d).transpose(0, 1) for x in both)
    return k, v


def random_layer(blocks: int, bits: int, spare: int, dim: int = 64, isa: str = "auto") -> api.KVLayer:
    g = torch.Generator().manual_seed(blocks + dim)
    key, value = (torch.randn(blocks, HEADS, 16, dim, generator=g) for _ in range(2))
    return layer(key, value, bits, spare, isa)


def turned(x: torch.Tensor, turns: torch.Tensor | None) -> torch.Tensor:
    """``x`` ``[..., n, d]`` float64 by ``turns`` ``[n, 2, d]``."""
    if turns is None:
        return x
    cos, sin = turns.double().unbind(1)
    return x * cos + x.roll(x.shape[-1] // 2, -1) * sin


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dim", [40, 64, 128])
@pytest.mark.parametrize("mean", ["plain", "centre"])
def test_a_summary_is_the_sealed_mean(mean: str, dim: int, bits: int, isa: str) -> None:
    turns = turns_to_centre(ROPE, dim, None, 3) if mean == "centre" else None
    kv = random_layer(64, bits, 8, dim, isa)
    compact.summarise(
        kv,
        operations(*((64 + i, 0, range(16 * i, 16 * i + 16)) for i in range(4)), (70, 1, range(64, 68))),
        turns,
        pool(1),
        isa=isa,
    )
    k, v = (x.double() for x in entries(kv, list(range(64))))
    one = turned(k, None if turns is None else turns[0]).mean(2), v.mean(2)  # [64, heads, d]
    child_k, child_v = (x.double().unflatten(2, (4, 4)) for x in entries(kv, list(range(64, 68))))
    two = turned(child_k, None if turns is None else turns[1, :4]).mean(3), child_v.mean(3)
    wanted = [
        torch.cat(
            [
                x.view(4, 16, HEADS, dim).transpose(1, 2),
                y.transpose(1, 2).reshape(1, 16, HEADS, dim).transpose(1, 2),
            ]
        )
        for x, y in zip(one, two, strict=True)
    ]
    want = layer(wanted[0].float(), wanted[1].float(), bits, 0, isa)
    assert kv.compact is not None
    assert want.compact is not None
    for got, exact in zip(kv.compact[:2], want.compact[:2], strict=True):
        assert torch.equal(got[[64, 65, 66, 67, 70]], exact)
        assert (got[[68, 69, 71]] == 255).all()


def test_threads_and_instruction_sets_make_the_same_summaries() -> None:
    made = []
    for isa in ISAS:
        for threads in (1, 2):
            kv = random_layer(16, 8, 1)
            turns = turns_to_centre(ROPE, 64, None, 1)
            compact.summarise(kv, operations((16, 0, range(16))), turns, pool(threads), isa=isa)
            assert kv.compact is not None
            made.append(torch.cat([kv.compact.key[16], kv.compact.value[16]], -1))
    assert all(torch.equal(made[0], x) for x in made)


def test_keys_of_one_vector_give_that_vector_at_the_centre() -> None:
    """Keys are one vector rotated by their positions: so is the mean, by the centre's; not without turns."""
    dim, blocks, first = 64, 16 * 16, 4096
    g = torch.Generator().manual_seed(0)
    vector = torch.randn(dim, generator=g)
    inverse = 1.0 / (ROPE.theta ** (torch.arange(0, dim, 2, dtype=torch.float64) / dim))

    def at(positions: torch.Tensor) -> torch.Tensor:
        angle = positions.double()[..., None] * torch.cat([inverse, inverse])
        low, high = vector.double().chunk(2)
        return vector.double() * angle.cos() + torch.cat([-high, low]) * angle.sin()

    positions = torch.arange(first, first + 16 * blocks).view(blocks, 1, 16)
    key = at(positions).float()
    error = {}
    for mean in ("centre", "plain"):
        kv = layer(key, key, 8, 21)
        turns = turns_to_centre(ROPE, dim, None, 3) if mean == "centre" else None
        compact.summarise(
            kv,
            operations(
                *((256 + i, 0, range(16 * i, 16 * i + 16)) for i in range(16)),
                *((272 + i, 1, range(256 + 4 * i, 260 + 4 * i)) for i in range(4)),
                (276, 2, range(272, 276)),
            ),
            turns,
            pool(1),
        )
        for level, block in enumerate((256, 272, 276)):
            tokens = 16 * 4**level
            centre = first + tokens * torch.arange(16) + (tokens - 1) / 2
            error[mean, level] = (entries(kv, [block])[0][0, 0].double() - at(centre)).abs().max()
    # Half a step of the record at each level: keys differ from their mean by up to twice the vector's length.
    step = 2 * vector.norm() / 127
    for level in range(3):
        assert error["centre", level] < (level + 2) * step / 2
        assert error["plain", level] > 10 * error["centre", level]


def test_turns_are_those_of_the_table() -> None:
    """Turned by -position of the table and then on to the centre: what turns_to_centre does at once."""
    factors = torch.linspace(1.0, 8.0, 32)
    config = RopeConfig(theta=500.0, scaling="factors")
    turns = turns_to_centre(config, 64, factors, 4)
    table = RopeTable(config, 64, "cpu", factors).upto(300)
    x = torch.randn(4, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    centres = torch.tensor([7, 23, 39, 55])  # of 16 tokens each, less a half
    at_own = torch.stack([turned(x[i : i + 1], table[c : c + 1])[0] for i, c in enumerate(centres.tolist())])
    at_parent = turned(at_own, turns[1, :4])
    want = torch.stack([turned(x[i : i + 1], table[31:32])[0] for i in range(4)])
    torch.testing.assert_close(at_parent, want, atol=1e-4, rtol=0)
    assert torch.equal(turns[1:, 4:, 0], torch.ones(3, 12, 64))
    assert not turns[1:, 4:, 1].any()
    yarn = RopeConfig(
        theta=500.0, scaling="yarn", factor=8.0, original_max_position_embeddings=512, attention_factor=1.5
    )
    assert torch.allclose(turns_to_centre(yarn, 64, None, 1).square().sum(2), torch.ones(1, 16, 64))


@pytest.mark.parametrize("bits", [8, 4])
def test_nan_stays_nan(bits: int) -> None:
    kv = random_layer(16, bits, 1)
    kv.value[3, 0, 5, 7] = float("nan")
    compact.seal(kv, torch.tensor([[3, 3]], dtype=torch.int32), pool(1))
    compact.summarise(kv, operations((16, 0, range(16))), None, pool(1))
    k, v = entries(kv, [16])
    assert v[0, 0, 3].isnan().all()
    v[0, 0, 3] = 0.0
    assert v.isfinite().all()
    assert k.isfinite().all()
    kv.key[9, 1, 2, 3] = float("inf")
    compact.seal(kv, torch.tensor([[9, 9]], dtype=torch.int32), pool(1))
    compact.summarise(kv, operations((16, 0, range(16))), None, pool(1))
    k, _ = entries(kv, [16])
    assert k[0, 1, 9].isnan().all()
    k[0, 1, 9] = 0.0
    assert k.isfinite().all()


def test_it_names_what_is_wrong() -> None:
    kv = random_layer(16, 8, 1)
    assert kv.compact is not None
    before = kv.compact.key.clone()
    turns = turns_to_centre(ROPE, 64, None, 1)
    good = operations((16, 0, range(16)))
    for wrong, by, message in (
        (operations((16, 0, range(16)), (17, 0, range(16))), None, "compact block 17, allowed are 0 to 16"),
        (operations((16, 0, range(2, 18))), None, "compact block 17, allowed are 0 to 16"),
        (operations((16, 0, range(4))), None, "compact block -1, allowed are 0 to 16"),
        (operations((16, -1, range(16))), None, "level -1, which is negative"),
        (operations((16, 1, range(4))), turns, "level 1 but turns are there for 1"),
        (good.long(), None, "operations must be"),
        (good, turns[..., :32], "turns must be"),
    ):
        with pytest.raises(ValueError, match=message):
            compact.summarise(kv, wrong, by, pool(1))
    assert torch.equal(kv.compact.key, before)
    with pytest.raises(ValueError, match="no compact blocks"):
        compact.summarise(kv._replace(compact=None), good, None, pool(1))
    big = kv._replace(key=kv.key.view(8, HEADS, 32, 64), value=kv.value.view(8, HEADS, 32, 64))
    with pytest.raises(ValueError, match="block_size of 16, got 32"):
        compact.summarise(big, good, None, pool(1))
