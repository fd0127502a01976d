"""What a decoder is made of."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from octavo.metadata_kinds import MAX_SIZE, UnsupportedModelError, check_number, check_size
from octavo.model_metadata import RopeConfig, gguf_fields, hf_fields

__all__ = ["ModelConfig", "RopeConfig", "UnsupportedModelError"]

_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "max_position_embeddings",
)


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
    max_position_embeddings: int  # with any rope scaling already applied
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
    rope: RopeConfig = field(default_factory=RopeConfig)
    rope_local: RopeConfig | None = None  # of the sliding layers, when they differ
    sliding_window: int | None = None
    sliding_layers: tuple[int, ...] = ()  # which layers use the window
    tie_word_embeddings: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    dtype: str = "float32"  # of the checkpoint

    def __post_init__(self) -> None:
        for size in _SIZES:
            check_size(size, getattr(self, size))
        for name in ("norm_eps", "embedding_scale", "attention_scale"):
            if getattr(self, name) is not None:
                check_number(getattr(self, name), name)
        named = self.eos_token_ids if self.bos_token_id is None else (self.bos_token_id, *self.eos_token_ids)
        for token_id in named:
            if isinstance(token_id, bool) or not isinstance(token_id, int) or token_id < 0:
                raise UnsupportedModelError(
                    f"bos and eos token ids must be integers of 0 or more, got {token_id!r:.100}"
                )
        if self.num_heads % self.num_kv_heads:
            raise UnsupportedModelError(
                f"num_heads ({self.num_heads}) must be a multiple of num_kv_heads ({self.num_kv_heads})"
            )
        if self.positions == "rope" and self.head_dim % 2:
            raise UnsupportedModelError(f"rotary positions need an even head_dim, got {self.head_dim}")
        window = self.sliding_window
        if self.sliding_layers and (type(window) is not int or not 1 <= window <= MAX_SIZE):
            raise UnsupportedModelError(
                f"sliding layers need a sliding_window of at least 1 token, got {window!r:.100}"
            )

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> ModelConfig:
        """Translate the contents of a ``config.json``.

        Raises:
            UnsupportedModelError: an unknown architecture, rope scaling, activation or option, or a
                missing or senseless value; one sentence says which and what is supported.
        """
        return cls(**hf_fields(config))

    @classmethod
    def from_gguf(
        cls, metadata: Mapping[str, Any], tensor_names: Collection[str] | None = None
    ) -> ModelConfig:
        """Translate the key-value pairs of a GGUF file.

        ``tensor_names``, in GGUF's terms or in canonical ones, are all that tells whether the embeddings
        are tied (there is no ``output.weight`` or ``lm_head.weight``) and whether the file brings its own
        rope factors. Without them the embeddings count as tied and there are no such factors.
        The result describes tensors in Hugging Face's layout, as for ``from_hf``: rotary halves apart, and
        Gemma's norm weights without the 1 that the file adds.
        Raises UnsupportedModelError as ``from_hf`` does.
        """
        return cls(**gguf_fields(metadata, tensor_names))

    @property
    def min_weights(self) -> int:
        """How many numbers the matrices hold; a checkpoint of the model brings no fewer."""
        heads = 2 * (self.num_heads + self.num_kv_heads) * self.head_dim
        layer = heads + (3 if self.gated_mlp else 2) * self.intermediate_size
        rows = self.vocab_size * (1 if self.tie_word_embeddings else 2)
        if self.positions == "learned":
            rows += self.max_position_embeddings
        return self.hidden_size * (self.num_layers * layer + rows)

    @property
    def softmax_scale(self) -> float:
        """What q.k is multiplied by before the softmax."""
        return self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale

    def window(self, layer: int) -> int | None:
        """The sliding window of a layer in tokens, or None where it sees everything."""
        return self.sliding_window if layer in self.sliding_layers else None

    def layer_rope(self, layer: int) -> RopeConfig:
        """The rotary positions of a layer (meaningless where positions are learned)."""
        return self.rope_local if self.rope_local and layer in self.sliding_layers else self.rope
