"""What a decoder layer is made of, by role: the projections and norms that both decoders build and load."""

from __future__ import annotations

import re
from typing import NamedTuple

from octavo.config import ModelConfig

_LAYER_NAME = re.compile(r"model\.layers\.(\d+)\.(.+)")

EMBEDDING = "model.embed_tokens.weight"
PLACES = "model.embed_positions.weight"
HEAD = "lm_head.weight"
FINAL_NORM = "model.norm"
ROPE_FACTORS = "rope_freqs.weight"


class Part(NamedTuple):
    """Projections of one input that are one matrix: canonical name -> outputs, in order."""

    inputs: int
    outputs: dict[str, int]
    bias: bool


def projections(config: ModelConfig) -> dict[str, Part]:
    """Role -> part. q, k and v are one matrix, gate and up are one."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    qkv = {"self_attn.q_proj": q_size, "self_attn.k_proj": kv_size, "self_attn.v_proj": kv_size}
    gate_up = ("mlp.gate_proj", "mlp.up_proj") if config.gated_mlp else ("mlp.up_proj",)
    return {
        "qkv": Part(hidden, qkv, config.qkv_bias),
        "o": Part(q_size, {"self_attn.o_proj": hidden}, config.output_bias),
        "gate_up": Part(hidden, dict.fromkeys(gate_up, inner), config.mlp_bias),
        "down": Part(inner, {"mlp.down_proj": hidden}, config.mlp_bias),
    }


def norms(config: ModelConfig) -> dict[str, str]:
    """Role -> canonical name of the norms of a row; ``post_norms`` (Gemma 3) has two more."""
    if not config.post_norms:
        return {"input_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
    return {
        "input_norm": "input_layernorm",
        "attention_post_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_post_norm": "post_feedforward_layernorm",
    }


def head_norms(config: ModelConfig) -> dict[str, str]:
    """Role -> canonical name of the norms of a head."""
    return {"q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm"} if config.qk_norm else {}


def split_name(name: str) -> tuple[int | None, str]:
    """``model.layers.N.rest`` -> (N, rest); any other name -> (None, name)."""
    match = _LAYER_NAME.fullmatch(name)
    return (None, name) if match is None else (int(match[1]), match[2])
