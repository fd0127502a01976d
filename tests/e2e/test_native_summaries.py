"""Decoders that read their oldest history as summaries: torch's numbers, and bits that no chunk changes."""

from __future__ import annotations

import dataclasses
from typing import Literal

import pytest
import torch

from octavo.attention.backend import AttentionBackend
from octavo.batch import ForwardBatch
from octavo.cache.kv_cache import KVCache, PlaneSet
from octavo.kernels.api import AttentionSpec, num_compact_blocks
from octavo.kernels.history_layout import FAN, GROUP, first_kept, layout, num_summarised
from octavo.models.decoder import Decoder
from octavo.models.native import NativeDecoder

from .test_native_decoder import CONFIGS, POOLS, fill, ids_of, native

WINDOW, BUDGET, LENGTH = 16, 272, 1700  # 89 blocks are summarised in the end
MODELS = {
    name: dataclasses.replace(CONFIGS[name], max_position_embeddings=2048)
    for name in ("llama", "gemma3", "gpt2", "rope-factors")
}
#: The reference computes row by row: one model is enough for every run.
ONE_FAST = ["llama", *(pytest.param(n, marks=pytest.mark.slow) for n in MODELS if n != "llama")]


class Dialogue:
    """One sequence and its cache: each step makes the compact blocks and summaries that it is first to read.

    ``mass`` ``[tokens, num_heads]`` is what the steps' layers added. With ``budget`` None nothing is
    summarised; with ``recall`` any entry above that share can be recalled, as all compact blocks stay.
    """

    def __init__(
        self,
        decoder: NativeDecoder | Decoder,
        attention: str = "fused",
        mean: Literal["centre", "plain"] = "centre",
        *,
        budget: int | None = BUDGET,
        recall: float | None = None,
    ) -> None:
        config = decoder.config
        shape = {"num_kv_heads": config.num_kv_heads, "head_dim": config.head_dim, "block_size": 16}
        blocks = -(-LENGTH // 16) + 1
        planes = PlaneSet(compact_blocks=2 * blocks)
        self.decoder, self.mean, self.budget, self.share = decoder, mean, budget, recall
        self.report = torch.zeros(1, 2, dtype=torch.float64)
        self.cache = KVCache(num_layers=config.num_layers, num_blocks=blocks, planes=planes, **shape)
        spec = AttentionSpec(
            num_heads=config.num_heads, kv_dtype=torch.float32, device="cpu", value_bits=8, **shape
        )
        self.attention = AttentionBackend(attention, spec, POOLS[1])
        self.length = self.compact = 0
        self.made: dict[tuple[int, int], int] = {}
        self.mass: list[torch.Tensor] = []

    @torch.inference_mode()
    def step(self, ids: list[int], read: int | None = None) -> torch.Tensor:
        """Logits of the new tokens, or of the last ``read``."""
        start, self.length = self.length, self.length + len(ids)
        last = self.length - 1
        compact = range(self.compact, num_compact_blocks(last, WINDOW, 16))
        self.compact = max(self.compact, compact.stop)
        operations, rows = [], []
        first, number = (
            0 if self.budget is None else num_summarised(p // 16, self.budget // 16) for p in (start, last)
        )
        for count in range(max(1, first), number + 1):
            for level, unit in layout(count):
                if (level, unit) not in self.made:
                    sources = (
                        [self.made[level - 1, FAN * unit + i] for i in range(FAN)] + [-1] * (GROUP - FAN)
                        if level
                        else [compact_id(1 + GROUP * unit + i) for i in range(GROUP)]
                    )
                    self.made[level, unit] = compact_id(LENGTH // 16 + 2) + len(self.made)
                    operations.append([self.made[level, unit], level, *sources])
                rows.append((level, unit, self.made[level, unit]))
        table = [0 if 0 < b < first_kept(first) else compact_id(b) for b in range(self.compact)]
        counts = len(ids) if read is None else read
        self.mass.append(torch.zeros(len(ids), self.decoder.config.num_heads))
        batch = ForwardBatch(
            token_ids=torch.tensor(ids),
            positions=torch.arange(start, self.length),
            slot_mapping=torch.arange(start, self.length),
            block_table=torch.arange(-(-self.length // 16), dtype=torch.int32)[None],
            seq_lens=torch.tensor([self.length], dtype=torch.int32),
            cu_seqlens_q=torch.tensor([0, len(ids)], dtype=torch.int32),
            logits_rows=torch.arange(len(ids) - counts, len(ids)),
            rows_read=None if read is None else torch.tensor([read], dtype=torch.int32),
            compact_table=torch.tensor([table], dtype=torch.int32),
            history_window=WINDOW,
            compactions=torch.tensor([[b, compact_id(b)] for b in compact], dtype=torch.int32).view(-1, 2),
            history_budget=self.budget,
            summary_table=torch.tensor([[*rows, (-1, -1, -1)]], dtype=torch.int32),
            summaries=torch.tensor(operations, dtype=torch.int32) if operations else None,
            summary_mass=self.mass[-1],
            history_mean=self.mean,
            recall_share=self.share,
            recall_table=torch.tensor([[self.address(b) for b in range(self.compact)]]).view(1, -1, 2),
            recall_strides=self.strides().expand(1, self.compact, 2).contiguous(),
            recall_report=self.report,
        )
        hidden = self.decoder.forward(batch, self.cache, self.attention)
        return self.decoder.logits(hidden, batch.logits_rows)

    def address(self, block: int) -> tuple[int, int]:
        """Of the keys and values of a block's compact form in the first layer."""
        assert self.cache.compact is not None
        key, value = self.cache.compact.key, self.cache.compact.value
        return key[0, compact_id(block)].data_ptr(), value[0, compact_id(block)].data_ptr()

    def strides(self) -> torch.Tensor:
        """Bytes from a layer to the next."""
        assert self.cache.compact is not None
        key, value = self.cache.compact.key, self.cache.compact.value
        return torch.tensor([key.stride(0), value.stride(0)])

    def run(self, ids: list[int], sizes: list[int]) -> torch.Tensor:
        assert sum(sizes) == len(ids)
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        return torch.cat([self.step(ids[at : at + n]) for at, n in zip(starts, sizes, strict=True)])


def compact_id(block: int) -> int:
    return block + 1


@pytest.mark.parametrize("name", ONE_FAST)
@pytest.mark.parametrize("mean", ["centre", pytest.param("plain", marks=pytest.mark.slow)])
def test_equals_the_torch_decoder(name: str, mean: Literal["centre", "plain"]) -> None:
    config = MODELS[name]
    ids = ids_of(config, LENGTH)
    sizes = [900, 800]
    other = Dialogue(fill(Decoder(config), config), "reference", mean)
    want = other.run(ids, sizes)
    dialogue = Dialogue(native(config), mean=mean)
    got = dialogue.run(ids, sizes)
    # Where the decoders' last bits differ a key may be rounded to the next code. The other mean is ten times
    # as far away, and 1 in places.
    assert (got - want).abs().median() < 3e-3
    assert (got - want).abs().max() < 0.1
    mass, other_mass = torch.cat(dialogue.mass), torch.cat(other.mass)
    torch.testing.assert_close(mass, other_mass, atol=0.01, rtol=0)
    number = torch.tensor([num_summarised(p // 16, BUDGET // 16) for p in range(LENGTH)])
    assert not mass[number == 0].any()
    assert (mass[number > 0] > 0).all()


@pytest.mark.parametrize("name", ONE_FAST)
def test_chunks_change_no_bit(name: str) -> None:
    config = MODELS[name]
    ids = ids_of(config, LENGTH)
    decoder = native(config)
    want = Dialogue(decoder).run(ids, [LENGTH])
    for sizes in ([290, 1, 1, 300, 1108], [1000, *[1] * 40, 660]):
        assert torch.equal(Dialogue(decoder).run(ids, sizes), want)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_it_is_not_the_history_itself(name: str) -> None:
    config = MODELS[name]
    ids = ids_of(config, LENGTH)
    decoder = native(config)
    centre, plain = (Dialogue(decoder, mean=m).run(ids, [LENGTH]) for m in ("centre", "plain"))
    first = BUDGET + 16  # the first block of so many tokens and more
    assert torch.equal(centre[:first], plain[:first])
    changed = (centre[first:] != plain[first:]).any(1)
    # Learned positions are not turned.
    assert changed.all() if name == "llama" else not changed.any()


@pytest.mark.parametrize("read", [0, 1, 5])
def test_rows_that_are_read_are_the_same(read: int) -> None:
    config = MODELS["llama"]
    ids = ids_of(config, 800)
    decoder = native(config)
    whole, part = Dialogue(decoder), Dialogue(decoder)
    want = whole.run(ids, [700, 100])
    part.step(ids[:700], read)
    got = part.step(ids[700:], read)
    assert torch.equal(got, want[800 - read :])
    # Rows that are not read lack the last layer's share.
    assert torch.equal(part.mass[1][100 - read :], whole.mass[1][100 - read :])
    assert (part.mass[1][: 100 - read] < whole.mass[1][: 100 - read]).all()
    again = ids_of(config, 3, seed=1)
    assert torch.equal(part.step(again), whole.step(again))


def test_a_share_needs_something_to_recall() -> None:
    dialogue = Dialogue(native(MODELS["llama"]), budget=None, recall=0.01)
    with pytest.raises(ValueError, match="a recall_share needs a history_budget"):
        dialogue.step([1, 2, 3])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_recalling_all_gives_the_compact_history(name: str) -> None:
    """In each layer its own; half of it gives something between."""
    config = MODELS[name]
    ids = ids_of(config, LENGTH)
    decoder = native(config)
    want = Dialogue(decoder, budget=None).run(ids, [LENGTH])
    none, some, every = (Dialogue(decoder, recall=share) for share in (None, 0.003, 1e-30))
    far, between, got = (d.run(ids, [900, 1, 799]) for d in (none, some, every))
    assert every.report[0, 0] > some.report[0, 0] > 0
    assert not every.report[0, 1]
    assert not none.report.any()
    errors = [(x - want).abs().mean() for x in (got, between, far)]
    assert errors[0] < 1e-3
    assert errors[0] < errors[1] < errors[2]
    assert not torch.cat(every.mass).any()
    again = Dialogue(decoder, recall=0.003)
    assert torch.equal(again.run(ids, [LENGTH]), between)
    assert torch.equal(again.report, some.report)
    other = Dialogue(fill(Decoder(config), config), "reference", recall=0.003)
    assert (other.run(ids, [LENGTH]) - between).abs().median() < 3e-3
    torch.testing.assert_close(other.report, some.report, rtol=0.01, atol=0)
