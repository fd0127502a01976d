"""From a configuration to a running engine: files, weights, pool, backend."""

from __future__ import annotations

import hashlib
import logging
from functools import partial

import torch

from octavo.attention.backend import AttentionBackend
from octavo.cache.kv_cache import DTYPES, KVCache
from octavo.config import EngineConfig, ModelConfig
from octavo.engine import resources
from octavo.engine.engine import Engine
from octavo.engine.runner import Runner
from octavo.engine.scheduler import Scheduler
from octavo.kernels.api import KERNEL_VERSION, AttentionSpec
from octavo.models.decoder import Decoder
from octavo.models.registry import canonical
from octavo.tokenizer import Tokenizer
from octavo.weights import hub
from octavo.weights.gguf import GGUFFile
from octavo.weights.load import Checkpoint, load_model, open_checkpoint

log = logging.getLogger("octavo")


def build_engine(config: EngineConfig) -> Engine:
    """Load the model that ``config`` names and make an engine of it.

    Sets torch's number of threads for the whole process. Raises ValueError, in one sentence, for an
    option or a model that cannot be served.
    """
    num_threads = resources.usable_cpus() if config.num_threads is None else config.num_threads
    if num_threads < 1:
        raise ValueError(f"num_threads must be at least 1, got {num_threads}")
    if config.cache.kv_dtype not in DTYPES:
        raise ValueError(f"kv_dtype must be one of {', '.join(DTYPES)}, got {config.cache.kv_dtype!r}")
    checkpoint = open_checkpoint(hub.resolve(config.model))
    model_config = read_config(checkpoint)
    # Everything that can be refused is refused before the weights are read.
    attention = AttentionBackend(config.attention, _spec(config, model_config), num_threads)
    torch.set_num_threads(num_threads)
    tokenizer = (
        Tokenizer.from_hf(checkpoint.path)
        if checkpoint.kind == "hf"
        else Tokenizer.from_gguf(checkpoint.metadata)
    )
    model = Decoder(model_config, config.device)
    load_model(
        model,
        checkpoint,
        tied=model_config.tie_word_embeddings,
        canonical=partial(canonical, model_config.architecture),
    )
    config, note = resources.resolve(config, model_config, resources.available_memory())
    if note is not None:
        log.warning(note)

    cache, num_blocks = config.cache, config.cache.num_blocks
    assert num_blocks is not None
    kv_cache = KVCache(
        num_layers=model_config.num_layers,
        num_blocks=num_blocks,
        num_kv_heads=model_config.num_kv_heads,
        block_size=cache.block_size,
        head_dim=model_config.head_dim,
        kv_dtype=cache.kv_dtype,
        device=config.device,
    )
    scheduler = Scheduler(
        config.scheduler,
        block_size=cache.block_size,
        num_blocks=num_blocks,
        prefix_cache=cache.enable_prefix_caching,
        fingerprint=prefix_fingerprint(config, model_config, checkpoint.fingerprint(), isa(config.attention)),
    )
    vocab_size = min(tokenizer.vocab_size, model_config.vocab_size)
    return Engine(
        config,
        runner=Runner(model, kv_cache, attention, vocab_size=vocab_size, device=config.device),
        scheduler=scheduler,
        tokenizer=tokenizer,
        eos_token_ids=(*model_config.eos_token_ids, *tokenizer.eos_token_ids),
    )


def read_config(checkpoint: Checkpoint) -> ModelConfig:
    """The model's shape from whatever the checkpoint says about itself."""
    if isinstance(checkpoint.source, GGUFFile):
        return ModelConfig.from_gguf(checkpoint.metadata, checkpoint.source.tensors.keys())
    return ModelConfig.from_hf(checkpoint.metadata)


def isa(attention: str) -> str:
    """The instruction set that the attention backend computes with on this machine."""
    if attention == "fused":
        from octavo.kernels import fused

        return fused.isa()
    return torch.backends.cpu.get_cpu_capability()


def prefix_fingerprint(
    config: EngineConfig,
    model: ModelConfig,
    weights: str,
    isa: str,
    kernel_version: int = KERNEL_VERSION,
) -> str:
    """A digest of all that the K and V of a token depend on beside the tokens up to it.

    ``weights`` is the checkpoint's own digest; ``model`` holds the rope settings.
    """
    parts = (
        weights,
        repr(model),
        config.attention,
        config.cache.kv_dtype,
        str(config.cache.block_size),
        config.device,
        isa,
        str(kernel_version),
    )
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _spec(config: EngineConfig, model: ModelConfig) -> AttentionSpec:
    return AttentionSpec(
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        block_size=config.cache.block_size,
        kv_dtype=DTYPES[config.cache.kv_dtype],
        device=config.device,
    )
