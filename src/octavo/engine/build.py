"""From a configuration to a running engine: files, weights, pool, backend."""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass
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

#: What the native kernels take at most.
MAX_THREADS = 1024

_WHOLE = (
    "block_size",
    "num_blocks",
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_model_len",
    "num_threads",
)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in memory; several engines may run on it, one after the other.

    ``vocab_size``: ids below it are both tokens and rows of the head. ``fingerprint`` is the
    checkpoint's own digest.
    """

    config: ModelConfig
    decoder: Decoder
    tokenizer: Tokenizer
    fingerprint: str

    @property
    def vocab_size(self) -> int:
        return min(self.tokenizer.vocab_size, self.config.vocab_size)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return (*self.config.eos_token_ids, *self.tokenizer.eos_token_ids)


def build_engine(config: EngineConfig) -> Engine:
    """Load the model that ``config`` names and make an engine of it.

    Sets torch's number of threads for the whole process. Raises ValueError, in one sentence, for an
    option or a model that cannot be served.
    """
    _check(config)
    checkpoint = open_checkpoint(hub.resolve(config.model))
    # Refused before the weights are read, which takes seconds.
    _backend(config, read_config(checkpoint))
    return assemble(config, load(checkpoint, config.device))


def load(checkpoint: Checkpoint, device: str = "cpu") -> LoadedModel:
    """Read weights and tokenizer. Raises ValueError for what is damaged or not supported."""
    config, tokenizer = read_config(checkpoint), read_tokenizer(checkpoint)
    decoder = Decoder(config, device)
    to_canonical = partial(canonical, config.architecture)
    load_model(decoder, checkpoint, tied=config.tie_word_embeddings, canonical=to_canonical)
    decoder.pack()
    if not decoder.packed:
        log.warning(
            "torch cannot pack weights here: linear layers run on plain ones, at up to twice the time"
        )
    return LoadedModel(config, decoder, tokenizer, checkpoint.fingerprint())


def assemble(config: EngineConfig, loaded: LoadedModel) -> Engine:
    """An engine with its own pool over a loaded model; see :func:`build_engine`."""
    attention = _backend(config, loaded.config)
    torch.set_num_threads(attention.num_threads)
    config, note = resources.resolve(config, loaded.config, resources.available_memory())
    if note is not None:
        log.warning(note)
    cache, num_blocks = config.cache, config.cache.num_blocks
    assert num_blocks is not None
    kv_cache = KVCache(
        num_layers=loaded.config.num_layers,
        num_blocks=num_blocks,
        num_kv_heads=loaded.config.num_kv_heads,
        block_size=cache.block_size,
        head_dim=loaded.config.head_dim,
        kv_dtype=cache.kv_dtype,
        device=config.device,
    )
    scheduler = Scheduler(
        config.scheduler,
        block_size=cache.block_size,
        num_blocks=num_blocks,
        prefix_cache=cache.enable_prefix_caching,
        fingerprint=prefix_fingerprint(config, loaded.config, loaded.fingerprint, isa(config.attention)),
    )
    runner = Runner(loaded.decoder, kv_cache, attention, vocab_size=loaded.vocab_size, device=config.device)
    return Engine(
        config,
        runner=runner,
        scheduler=scheduler,
        tokenizer=loaded.tokenizer,
        eos_token_ids=loaded.eos_token_ids,
    )


def read_config(checkpoint: Checkpoint) -> ModelConfig:
    """The model's shape from whatever the checkpoint says about itself."""
    if isinstance(checkpoint.source, GGUFFile):
        return ModelConfig.from_gguf(checkpoint.metadata, checkpoint.source.tensors.keys())
    return ModelConfig.from_hf(checkpoint.metadata)


def read_tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    """The tokenizer that the checkpoint brings. Raises ValueError for one that is not known exactly."""
    if checkpoint.kind == "hf":
        return Tokenizer.from_hf(checkpoint.path)
    return Tokenizer.from_gguf(checkpoint.metadata)


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


def _check(config: EngineConfig) -> None:
    for place in (config, config.cache, config.scheduler):
        for name, value in ((name, getattr(place, name, None)) for name in _WHOLE):
            if value is not None and not _is_whole(value):
                raise ValueError(f"{name} must be a whole number, got {value!r}")
    if config.num_threads is not None and not 1 <= config.num_threads <= MAX_THREADS:
        raise ValueError(f"num_threads must be between 1 and {MAX_THREADS}, got {config.num_threads}")
    if config.cache.kv_dtype not in DTYPES:
        raise ValueError(f"kv_dtype must be one of {', '.join(DTYPES)}, got {config.cache.kv_dtype!r}")
    for name in ("max_num_seqs", "max_num_batched_tokens"):
        if getattr(config.scheduler, name) < 1:
            raise ValueError(f"{name} must be at least 1, got {getattr(config.scheduler, name)}")
    resources.check_block_size(config.cache.block_size)
    try:
        torch.empty(0, device=config.device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"device {config.device!r} cannot be used: {reason}") from None


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _backend(config: EngineConfig, model: ModelConfig) -> AttentionBackend:
    num_threads = resources.usable_cpus() if config.num_threads is None else config.num_threads
    spec = AttentionSpec(
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        block_size=config.cache.block_size,
        kv_dtype=DTYPES[config.cache.kv_dtype],
        device=config.device,
    )
    return AttentionBackend(config.attention, spec, num_threads)
