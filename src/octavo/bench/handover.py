"""A checkpoint of ours as a transformers model: the same float32 weights, not a second conversion."""

from __future__ import annotations

from typing import Any

import torch

from octavo.engine.build import read_config
from octavo.weights import hub
from octavo.weights.load import Checkpoint, open_checkpoint


def transformers_model(model: str) -> Any:
    """The model called ``model`` in transformers, float32, with its sdpa attention, ready to generate.

    Raises ValueError for a GGUF file of another architecture than Llama, and when transformers wants
    tensors that the checkpoint lacks.
    """
    from transformers import AutoModelForCausalLM

    checkpoint = open_checkpoint(hub.resolve(model))
    factory: Any = AutoModelForCausalLM
    peer = factory.from_config(_config(checkpoint), attn_implementation="sdpa", dtype=torch.float32)
    tensors = {name: tensor.to(torch.float32) for name, tensor in checkpoint.tensors()}
    missing, unexpected = peer.load_state_dict(tensors, strict=False, assign=True)
    peer.tie_weights()
    tied = {"lm_head.weight"} if peer.config.tie_word_embeddings else set()
    if set(missing) - tied or unexpected:
        raise ValueError(f"transformers misses {sorted(set(missing) - tied)} and does not know {unexpected}")
    return peer.eval()


def _config(checkpoint: Checkpoint) -> Any:
    from transformers import AutoConfig, LlamaConfig

    if checkpoint.kind == "hf":
        return AutoConfig.for_model(**checkpoint.metadata)
    config = read_config(checkpoint)
    if checkpoint.metadata["general.architecture"] != "llama" or config.rope.scaling != "none":
        raise ValueError(
            "transformers can be handed only a Llama GGUF without rope scaling; give a folder of safetensors"
        )
    return LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_position_embeddings,
        rms_norm_eps=config.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope.theta},
        tie_word_embeddings="lm_head.weight" not in checkpoint.names,
    )
