"""Frozen configuration. HF and GGUF metadata are translated here, once; a dtype is a string.

``resolve()`` methods return a new object; nothing is mutated after it was made.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary positions of one kind of layer. ``scaling`` is "none", "linear", "llama3" or "yarn"."""

    theta: float = 10000.0
    scaling: str = "none"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    partial_rotary_factor: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The shape of a decoder. One decoder, driven by these fields, covers every architecture."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    norm: str = "rms"  # "rms" | "layer"
    norm_eps: float = 1e-5
    norm_weight_offset: float = 0.0  # Gemma multiplies by (1 + w)
    activation: str = "silu"  # "silu" | "gelu_tanh" | "gelu"
    gated_mlp: bool = True
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    post_norms: bool = False  # Gemma 3 norms after attention and after the MLP too
    embedding_scale: float = 1.0
    attention_scale: float | None = None  # None: head_dim ** -0.5
    positions: str = "rope"  # "rope" | "learned"
    rope: RopeConfig = RopeConfig()
    rope_local: RopeConfig | None = None  # of the sliding layers, when they differ
    sliding_window: int | None = None
    sliding_layers: tuple[int, ...] = ()  # which layers use the window
    tie_word_embeddings: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    dtype: str = "float32"  # of the checkpoint

    def window(self, layer: int) -> int | None:
        """The sliding window of a layer in tokens, or None where it sees everything."""
        return self.sliding_window if layer in self.sliding_layers else None


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """The paged KV cache.

    ``kv_cache_memory`` is a size ("2GiB", or bytes) or None for a stated share of the memory that
    the process may still use; ``num_blocks`` overrides both (tests).
    """

    block_size: int = 16
    kv_dtype: str = "float32"  # "float32" | "float16"
    kv_cache_memory: str | int | None = None
    num_blocks: int | None = None
    enable_prefix_caching: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits of a step. ``max_model_len`` None: the model's own limit, fitted to the pool."""

    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    max_model_len: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """All that an engine is made from."""

    model: str
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    attention: str = "fused"
    device: str = "cpu"
    num_threads: int | None = None
    seed: int | None = None
