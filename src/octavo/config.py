"""Frozen configuration; a dtype is a string. A model's own is translated in ``model_config``, once.

Nothing is mutated after it was made: ``octavo.engine.resources.resolve`` returns a new ``EngineConfig``.
"""

from __future__ import annotations

from dataclasses import dataclass

from octavo.attn_rule import ADAPTIVE
from octavo.model_config import ModelConfig, RopeConfig, UnsupportedModelError

__all__ = [
    "ACTIVATIONS",
    "HISTORIES",
    "HISTORY_MEANS",
    "HISTORY_VALUES",
    "WEIGHTS",
    "CacheConfig",
    "EngineConfig",
    "ModelConfig",
    "RopeConfig",
    "SchedulerConfig",
    "UnsupportedModelError",
]

#: How weights are kept: as stored, or in the one type named.
WEIGHTS = ("auto", "float32", "float16", "bfloat16", "q8_0", "q4_1")
#: What is multiplied with the weights: as it is, or rounded to 8 bits a value.
ACTIVATIONS = ("float32", "int8")
#: What old history is read as: K and V as stored, or compact blocks.
HISTORIES = ("exact", "compact")
#: How compact blocks hold values, and the bits of each.
HISTORY_VALUES = {"int8": 8, "int4": 4}
#: How the mean of rotated keys is taken: each turned to the centre of its span first, or as they are.
HISTORY_MEANS = ("centre", "plain")


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """The paged KV cache.

    ``kv_cache_memory`` is a size ("2GiB", or bytes) or None for a stated share of the memory that
    the process may still use; ``num_blocks`` overrides both (tests). Sealed blocks are also kept in the
    folder ``cache_dir``, if given, in no more than ``cache_disk`` bytes.

    With ``history`` "compact" a query at position p reads every block that lies wholly before
    p - ``history_window`` in compact form, with values as ``history_values`` says. The memory is then divided
    between blocks as stored and compact ones so that it holds as many sequences of ``history_tokens`` tokens
    (None: of ``max_model_len``) as it can; ``num_compact_blocks`` goes with ``num_blocks`` (tests).

    ``history_budget``, tokens or a size ("64k", "1GiB"), caps what a sequence has of blocks: beyond it the
    oldest compact blocks are read as summaries, whose keys are means as ``history_mean`` says (see
    ``octavo.kernels.history_layout``). With ``history_recall`` a summary that draws more than that share of a
    row's mass is read as the blocks it stands for.
    """

    block_size: int = 16
    kv_dtype: str = "float32"  # "float32" | "float16"
    kv_cache_memory: str | int | None = None
    num_blocks: int | None = None
    enable_prefix_caching: bool = True
    cache_dir: str | None = None
    cache_disk: str | int = "20GiB"
    history: str = "exact"  # one of HISTORIES
    history_window: int = 512
    history_values: str = "int8"  # one of HISTORY_VALUES
    history_tokens: int | None = None
    num_compact_blocks: int | None = None
    history_budget: str | int | None = None
    history_mean: str = "centre"  # one of HISTORY_MEANS
    history_recall: float | None = None

    @property
    def compact_window(self) -> int | None:
        """The window in tokens, None where all history is read as stored."""
        return self.history_window if self.history == "compact" else None

    @property
    def value_bits(self) -> int | None:
        """Bits of a value in compact history, None where there is none."""
        return HISTORY_VALUES[self.history_values] if self.history == "compact" else None


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits of a step. ``max_model_len`` None: the model's own limit, fitted to the pool.

    ``step_ms``: milliseconds that a step which extends answers should take, chunks of prompts included;
    0 gives prompts whatever ``max_num_batched_tokens`` leaves.
    """

    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    max_model_len: int | None = None
    step_ms: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """All that an engine is made from.

    With ``attn_topk`` or ``topk_planes`` the cache holds what top-k attention needs, in every layer but
    ``dense_layers``: for ``attn_topk_mode`` "fast" and for the tail only if the engine is started with them.
    """

    model: str
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    attention: str = "fused"
    weights: str = "auto"  # one of WEIGHTS
    activations: str = "float32"  # one of ACTIVATIONS
    device: str = "cpu"
    num_threads: int | None = None
    seed: int | None = None
    attn_topk: int | str = 0  # of requests that do not say; 0 is dense, a name of ADAPTIVE as many as matter
    attn_topk_mode: str = "exact"
    attn_topk_tail: bool | None = None  # None: with a name of ADAPTIVE only
    topk_planes: bool = False
    dense_layers: tuple[int, ...] = ()

    @property
    def has_planes(self) -> bool:
        """Whether a request may ask for top-k attention."""
        return self.attn_topk != 0 or self.topk_planes

    @property
    def has_tail(self) -> bool:
        """Whether a request may ask for the tail."""
        return self.attn_topk in ADAPTIVE if self.attn_topk_tail is None else self.attn_topk_tail

    @property
    def has_fast(self) -> bool:
        """Whether a request may ask for the fast mode."""
        return self.attn_topk_mode == "fast"
