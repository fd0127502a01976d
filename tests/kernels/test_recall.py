"""Reading the tokens behind a summary again: which, what it gives, and that a row decides alone."""

from __future__ import annotations

import pytest
import torch

from octavo.kernels import api, compact, fused, reference
from octavo.kernels.history_layout import first_kept, layout, tokens_of
from octavo.kernels.native import _native

from .paged import Case, Paged, build, pool, run
from .test_fused_exact import same

ISAS = [isa for isa in ("avx2", "portable") if isa in _native.isas()]
# 95 blocks are summarised in the last rows: levels 1, 0, 0, the last in part.
BASE = Case(
    seqs=((20, 1850), (1, 300), (3, 1100)), need_lse=True, history_window=64, history_budget=320, head_dim=64
)
LAYER = 3


class Archive:
    """Each compact block of all layers in memory of its own, as a file has them; other layers are NaN."""

    def __init__(self, case: Case, *, gone: tuple[int, ...] = ()) -> None:
        self.memory = []
        blocks = max(-(-n // 16) for _, n in case.seqs)
        self.table = torch.zeros(len(case.seqs), blocks, 2, dtype=torch.int64)
        self.strides = torch.zeros_like(self.table)
        for s, (_, n) in enumerate(case.seqs):
            _, k, v = case.tokens(s)
            whole = n // 16
            key, value = (x[: 16 * whole].unflatten(0, (whole, 16)).transpose(1, 2) for x in (k, v))
            kv = api.KVLayer(key.contiguous(), value.contiguous(), 1.0, compact=None)
            sizes = (
                compact.key_record_bytes(case.head_dim),
                compact.value_record_bytes(case.head_dim, case.value_bits),
            )
            shape = (whole, case.num_kv_heads, 1)
            kv = kv._replace(
                compact=api.CompactKV(*(torch.zeros(*shape, size, dtype=torch.uint8) for size in sizes))
            )
            pairs = torch.arange(whole, dtype=torch.int32)[:, None].expand(-1, 2).contiguous()
            compact.seal(kv, pairs, pool(1))
            assert kv.compact is not None
            for b in range(case.summarised(n - 1) + 1):
                for which, records in enumerate(kv.compact[:2]):
                    assert records is not None
                    data = records[b].flatten()
                    stride = len(data) + 3 + b % 5  # addresses are of any kind
                    memory = torch.full(((LAYER + 1) * stride + 8,), 255, dtype=torch.uint8)
                    memory[LAYER * stride + 1 :][: len(data)] = data
                    self.memory.append(memory)
                    self.table[s, b, which] = 0 if b in gone else memory.data_ptr() + 1
                    self.strides[s, b, which] = stride

    def recall(self, share: float) -> api.Recall:
        report = torch.zeros(self.table.shape[0], 2, dtype=torch.float64)
        return api.Recall(share, self.table, self.strides, report)


def attend(
    paged: Paged, recall: api.Recall | None, threads: int = 1, isa: str = "auto"
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Output, lse and mass."""
    mass = torch.zeros(paged.q.shape[:2])
    plan = fused.plan(paged.meta, paged.case.spec, pool(threads), isa=isa)
    out, lse = fused.attend(paged.q, paged.kv._replace(layer=LAYER), plan, mass=mass, recall=recall)
    assert lse is not None
    return out, lse, mass


def wanted(paged: Paged, recall: api.Recall) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    mass = torch.zeros(paged.q.shape[:2])
    kv = paged.kv._replace(layer=LAYER)
    out, lse = reference.attend(paged.q, kv, paged.meta, mass=mass, recall=recall)
    return out, lse, mass


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("bits", [8, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "share", [0.004, 0.5, *(pytest.param(x, marks=pytest.mark.slow) for x in (0.0005, 0.02))]
)
@pytest.mark.parametrize("gone", [(), (5, 70, 90)])
def test_it_equals_the_reference(gone: tuple[int, ...], share: float, bits: int, isa: str) -> None:
    case = BASE.with_(value_bits=bits)
    paged, archive = build(case), Archive(case, gone=gone)
    got_recall, want_recall = archive.recall(share), archive.recall(share)
    got = attend(paged, got_recall, 2, isa)
    want = wanted(paged, want_recall)
    assert torch.equal(got_recall.report, want_recall.report)
    recalled, missing = got_recall.report.sum(0).tolist()
    assert (recalled > 0) == (share < 0.5)
    assert (missing > 0) == (bool(gone) and share < 0.5)
    assert not got_recall.report[1].any()  # it reads no summaries
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-5)
    if share == 0.5:
        assert same(got, attend(paged, None))


def test_all_that_is_recalled_is_the_compact_history() -> None:
    case = BASE.with_(seqs=((5, 1850),))
    paged, archive = build(case), Archive(case)
    got = attend(paged, archive.recall(1e-30))
    plain, _ = run("fused", build(case.with_(history_budget=None)))
    torch.testing.assert_close(got[0], plain, atol=1e-5, rtol=1e-5)
    assert not got[2].any()
    assert not torch.allclose(attend(paged, None)[0], plain, atol=1e-2)


def test_a_row_decides_alone() -> None:
    """In any company, with any number of threads and any instruction set, and whatever others recall."""
    case = BASE
    paged, archive = build(case), Archive(case)
    recall = archive.recall(0.004)
    want = attend(paged, recall)
    assert recall.report is not None
    assert recall.report[0, 0] > 0
    for threads in (2, 16):
        assert same(attend(paged, archive.recall(0.004), threads), want)
    for isa in ISAS:
        assert same(attend(paged, archive.recall(0.004), isa=isa), want)
    at = 0
    for s, (q_len, n) in enumerate(case.seqs):
        for row in range(q_len):
            # The row alone: the same sequence with one query, up to its position.
            one = case.with_(
                seqs=tuple(
                    (int(i == s), n - q_len + row + 1 if i == s else m) for i, (_, m) in enumerate(case.seqs)
                )
            )
            part = build(Truncated(one, case))
            got = attend(part, archive.recall(0.004))
            for a, b in zip(got, want, strict=True):
                assert torch.equal(a[0], b[at + row])
        at += q_len


class Truncated(Case):
    """The sequences of another case, shorter."""

    def __init__(self, case: Case, whole: Case) -> None:
        super().__init__(**{f: getattr(case, f) for f in Case.__dataclass_fields__})
        object.__setattr__(self, "_whole", whole)

    def tokens(self, s: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q, k, v = self._whole.tokens(s)  # type: ignore[attr-defined]  # set beside the frozen case
        n = self.seqs[s][1]
        return q[:n], k[:n], v[:n]


def test_only_what_is_recalled_is_read() -> None:
    """Blocks whose entries stay below the share may hold anything."""
    case = BASE.with_(seqs=((1, 1850),), num_heads=1, num_kv_heads=1)
    paged, archive = build(case), Archive(case)
    share = 0.01
    want = attend(paged, archive.recall(share))
    k, _, bias = reference._Sequence(paged.kv, paged.meta, 0, 1).read(1849)
    shares = torch.softmax(torch.einsum("hd,hnd->hn", paged.q[0], k) * case.scale + bias, -1)[0]
    read, first = set(), 16
    for level, unit in layout(case.summarised(1849)):
        each = tokens_of(level) // 16
        for entry in range(16):
            if 1 + (16 * unit + entry) * each > case.summarised(1849):
                break
            if shares[first] > share:
                read |= {1 + (16 * unit + entry) * each + i for i in range(each)}
            first += 1
    assert 0 < len(read) < first_kept(case.summarised(1849)) - 1
    for b in range(first_kept(case.summarised(1849))):
        if b not in read:
            archive.memory[2 * b].fill_(255)
            archive.memory[2 * b + 1].fill_(255)
    assert same(attend(paged, archive.recall(share)), want)


def test_it_names_what_is_wrong() -> None:
    paged, archive = build(BASE), Archive(BASE)
    recall = archive.recall(0.01)
    assert recall.report is not None
    short = recall.table[:, :50].contiguous()
    for wrong, message in (
        (recall._replace(share=0.0), "recall_share must lie between 0 and 1, got 0.0"),
        (recall._replace(share=1.5), "between 0 and 1"),
        (recall._replace(table=recall.table[:2]), "recall_table must be"),
        (recall._replace(strides=recall.strides.int()), "recall_strides must be"),
        (recall._replace(strides=recall.strides[..., 0]), "recall_strides must be"),
        (recall._replace(report=recall.report.float()), "recall_report must be"),
        (recall._replace(table=short, strides=short), "sequence 0 has 96 blocks that may be recalled"),
    ):
        with pytest.raises(ValueError, match=message):
            attend(paged, wrong)
