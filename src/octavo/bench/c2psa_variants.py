"""The attentions that ``octavo bench c2psa`` compares, and what is measured of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from octavo.nn import C2PSA, LinformerAttention, MultiHeadAttention
from octavo.nn.attention import Attention

MATERIALISED, SDPA = "mha, scores kept", "mha, sdpa"

Kind = Literal["mha", "linformer", "c2psa"]
#: Those of TIMES need a quiet machine.
TIMES = ("batch-time", "length-time", "heads")
MEMORIES = ("batch-memory", "length-memory", "bert")
SECTIONS = TIMES + MEMORIES


@dataclass(frozen=True, slots=True)
class Shape:
    """Of one attention module."""

    d_model: int = 768
    num_heads: int = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One attention. ``share`` is how many heads have one K and V (gqa) or one Q, K and V (c2psa)."""

    name: str
    kind: Kind
    share: int = 1
    topk: int = 0
    projected_len: int = 0
    materialise: bool = False

    def make(self, shape: Shape, length: int) -> Attention:
        """Random weights, for sequences of ``length`` tokens. In training C2PSA is checkpointed."""
        if self.kind == "c2psa":
            return C2PSA(shape.d_model, shape.num_heads, self.share, self.topk)
        if self.kind == "linformer":
            return LinformerAttention(shape.d_model, shape.num_heads, self.projected_len, length)
        return MultiHeadAttention(
            shape.d_model,
            shape.num_heads,
            num_kv_heads=shape.num_heads // self.share,
            materialise=self.materialise,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class C2psaSettings:
    """What is measured; the defaults are those of the published result.

    ``length`` belongs to the sections over batches, ``lengths`` to those over lengths at batch 1.
    ``memory_limit`` in bytes: what would need more is not run but fitted.
    """

    sections: tuple[str, ...]
    threads: int
    memory_limit: int
    rounds: int = 5
    shape: Shape = Shape()
    length: int = 512
    batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    lengths: tuple[int, ...] = (512, 1024, 2048, 4096, 8192, 16_384)
    rates: tuple[int, ...] = (1, 2, 4)
    topks: tuple[int, ...] = (32, 64)
    projected_lens: tuple[int, ...] = (128, 256)
    bert: Mapping[str, int] | None = None
    device: str = "cpu"

    def __post_init__(self) -> None:
        unknown = [name for name in self.sections if name not in SECTIONS]
        if unknown or not self.sections:
            raise ValueError(
                f"sections must be some of {', '.join(SECTIONS)}, got {', '.join(unknown) or 'none'}"
            )


def variants(settings: C2psaSettings) -> list[Variant]:
    """Standard attention first, then grouped-query attention at the same rates, Linformer and C2PSA."""
    return [
        Variant(name=MATERIALISED, kind="mha", materialise=True),
        Variant(name=SDPA, kind="mha"),
        *(Variant(name=f"gqa r={r}", kind="mha", share=r) for r in settings.rates if r > 1),
        *(Variant(name=f"linformer {n}", kind="linformer", projected_len=n) for n in settings.projected_lens),
        *(
            Variant(name=f"c2psa r={r} k={k}", kind="c2psa", share=r, topk=k)
            for r in settings.rates
            for k in settings.topks
        ),
    ]


#: Tiny, for a look and for tests.
QUICK: dict[str, Any] = {
    "shape": Shape(64, 4),
    "length": 256,
    "batches": (1, 2, 4),
    "lengths": (256, 512, 768, 1024),
    "rates": (1, 4),
    "topks": (4,),
    "projected_lens": (8,),
    "bert": {
        "vocab_size": 64,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 48,
    },
}
