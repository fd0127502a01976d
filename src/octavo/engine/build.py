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
from octavo.engine.encoder import EncoderEngine, is_encoder, load_encoder
from octavo.engine.engine import Engine
from octavo.engine.runner import Runner
from octavo.engine.scheduler import Scheduler
from octavo.kernels import native
from octavo.kernels.api import KERNEL_VERSION, AttentionSpec
from octavo.models.decoder import Decoder
from octavo.models.registry import canonical
from octavo.request import check_int, is_int
from octavo.tokenizer import Tokenizer
from octavo.weights import hub
from octavo.weights.gguf import GGUFFile
from octavo.weights.load import Checkpoint, load_model, open_checkpoint

log = logging.getLogger("octavo")

MAX_THREADS = 1024
#: A block's number is an int32 in the block table.
MAX_BLOCKS = 2**31 - 1


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
    return _build_decoder(config, open_checkpoint(hub.resolve(config.model)))


def build(config: EngineConfig) -> Engine | EncoderEngine:
    """As :func:`build_engine`, or an encoder's engine where ``config`` names an encoder."""
    _check(config)
    checkpoint = open_checkpoint(hub.resolve(config.model))
    if not is_encoder(checkpoint):
        return _build_decoder(config, checkpoint)
    torch.set_num_threads(_num_threads(config))
    return load_encoder(checkpoint, config.device)


def _build_decoder(config: EngineConfig, checkpoint: Checkpoint) -> Engine:
    # Refused before the weights are read, which takes seconds.
    _backend(config, read_config(checkpoint))
    return assemble(config, load(checkpoint, config.device))


def load(checkpoint: Checkpoint, device: str = "cpu") -> LoadedModel:
    """Read weights and tokenizer. Raises ValueError for what is damaged or not supported."""
    config = read_config(checkpoint)
    _check_size(config, checkpoint)
    tokenizer = read_tokenizer(checkpoint)
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
    torch.set_num_threads(attention.pool.num_threads)
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


def _check_size(config: ModelConfig, checkpoint: Checkpoint) -> None:
    """Refuse, before anything of that size is made, a model that its own files cannot hold."""
    # No storage type that is read puts more than two weights into a byte.
    most = 2 * checkpoint.num_bytes
    if config.min_weights > most:
        raise ValueError(
            f"the metadata of {checkpoint.path.name} describes a model of at least {config.min_weights} "
            f"weights, but its {checkpoint.num_bytes} bytes can hold no more than {most}"
        )


def isa(attention: str) -> str:
    """The instruction set that the attention backend computes with on this machine."""
    if attention == "fused":
        return native.isa()
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
    cache, limits = config.cache, config.scheduler
    check_int("block_size", cache.block_size, 1, 256)
    check_int("max_num_seqs", limits.max_num_seqs, 1)
    check_int("max_num_batched_tokens", limits.max_num_batched_tokens, 1)
    if config.num_threads is not None:
        check_int("num_threads", config.num_threads, 1, MAX_THREADS)
    if cache.num_blocks is not None:
        check_int("num_blocks", cache.num_blocks, 1, MAX_BLOCKS)
    if limits.max_model_len is not None:
        check_int("max_model_len", limits.max_model_len, 1)
    if not isinstance(cache.enable_prefix_caching, bool):
        raise ValueError(
            f"enable_prefix_caching must be True or False, got {cache.enable_prefix_caching!r:.100}"
        )
    if config.seed is not None and not is_int(config.seed):
        raise ValueError(f"seed must be a whole number, got {config.seed!r:.100}")
    if cache.kv_dtype not in DTYPES:
        raise ValueError(f"kv_dtype must be one of {', '.join(DTYPES)}, got {cache.kv_dtype!r:.100}")
    if config.device != "cpu":
        _check_device(config.device)
    resources.check_block_size(config.cache.block_size)


def _check_device(device: str) -> None:
    if not isinstance(device, str):
        raise ValueError(f'device must be text such as "cpu", got {device!r:.100}')
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        # torch lists reasons over many lines; the first names the device.
        reason = str(error).splitlines()[0]
        raise ValueError(f"device {device!r:.100} cannot be used: {reason}") from None


def _num_threads(config: EngineConfig) -> int:
    return resources.usable_cpus() if config.num_threads is None else config.num_threads


def _backend(config: EngineConfig, model: ModelConfig) -> AttentionBackend:
    spec = AttentionSpec(
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        block_size=config.cache.block_size,
        kv_dtype=DTYPES[config.cache.kv_dtype],
        device=config.device,
    )
    return AttentionBackend(config.attention, spec, native.ThreadPool(_num_threads(config)))
