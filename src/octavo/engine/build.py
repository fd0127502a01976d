"""From a configuration to a running engine: files, weights, pool, backend."""

from __future__ import annotations

import hashlib
import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from octavo.attention.backend import AttentionBackend
from octavo.attn_rule import AttnRule
from octavo.cache.chain import TOKEN_BYTES
from octavo.cache.disk_cache import DiskCache
from octavo.cache.disk_store import MIN_BYTES, DiskStore, record_bytes
from octavo.cache.kv_cache import DTYPES, KVCache
from octavo.config import (
    ACTIVATIONS,
    HISTORIES,
    HISTORY_MEANS,
    HISTORY_VALUES,
    WEIGHTS,
    CacheConfig,
    EngineConfig,
    ModelConfig,
)
from octavo.engine import resources
from octavo.engine.encoder import EncoderEngine, is_encoder, load_encoder
from octavo.engine.engine import Engine
from octavo.engine.history import History
from octavo.engine.runner import Model, Runner
from octavo.engine.scheduler import Scheduler
from octavo.kernels import native
from octavo.kernels.api import KERNEL_VERSION, AttentionSpec
from octavo.kernels.compact import RECORD_KEYS
from octavo.kernels.history_layout import GROUP
from octavo.kernels.linear import int8_types
from octavo.metadata_kinds import c2psa_fields
from octavo.models.decoder import Decoder
from octavo.models.native import NativeDecoder
from octavo.models.registry import canonical
from octavo.request import check_attn_topk, check_int, is_int
from octavo.tokenizer import Tokenizer
from octavo.weights import hub
from octavo.weights.gguf import GGUFFile
from octavo.weights.load import Checkpoint, load_model, load_stored, open_checkpoint

log = logging.getLogger("octavo")

MAX_THREADS = 1024
#: Blocks that a bound on the disk must have room for.
MIN_DISK_BLOCKS = 64
#: A block's number is an int32 in the block table.
MAX_BLOCKS = 2**31 - 1


class LoadOptions(NamedTuple):
    """What of an ``EngineConfig`` decides how a model lies in memory."""

    attention: str
    weights: str
    activations: str
    device: str
    num_threads: int

    @classmethod
    def of(cls, config: EngineConfig) -> LoadOptions:
        num_threads = resources.usable_cpus() if config.num_threads is None else config.num_threads
        return cls(config.attention, config.weights, config.activations, config.device, num_threads)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in memory; several engines may run on it, one after the other.

    ``vocab_size``: ids below it are both tokens and rows of the head. ``fingerprint`` is the
    checkpoint's own digest. ``options`` are what it was loaded for; its engines run on its ``pool``.
    """

    config: ModelConfig
    decoder: Model
    tokenizer: Tokenizer
    fingerprint: str
    options: LoadOptions
    pool: native.ThreadPool

    @property
    def vocab_size(self) -> int:
        return min(self.tokenizer.vocab_size, self.config.vocab_size)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return (*self.config.eos_token_ids, *self.tokenizer.eos_token_ids)


def build_engine(config: EngineConfig) -> Engine:
    """Load the model that ``config`` names and make an engine of it.

    Raises ValueError, in one sentence, for an option or a model that cannot be served.
    """
    _check(config)
    return _build_decoder(config, open_checkpoint(hub.resolve(config.model)))


def build(config: EngineConfig) -> Engine | EncoderEngine:
    """As :func:`build_engine`, or an encoder's engine where ``config`` names an encoder."""
    _check(config)
    checkpoint = open_checkpoint(hub.resolve(config.model))
    if not is_encoder(checkpoint):
        return _build_decoder(config, checkpoint)
    torch.set_num_threads(LoadOptions.of(config).num_threads)
    return load_encoder(checkpoint, config.device)


def _build_decoder(config: EngineConfig, checkpoint: Checkpoint) -> Engine:
    model = read_config(checkpoint)
    # Refused before the weights are read, which takes seconds.
    _backend(config, model, native.ThreadPool(1))
    topk = c2psa_fields(checkpoint.metadata).get("topk")
    if topk is not None and topk < model.max_position_embeddings and not config.attn_topk:
        line = "%s asks for the top %d keys: the decoder attends to all without attn_topk"
        log.warning(line, checkpoint.path.name, topk)
    return assemble(config, load(checkpoint, config))


def load(checkpoint: Checkpoint, config: EngineConfig) -> LoadedModel:
    """Read weights and tokenizer. Raises ValueError for what is damaged or not supported.

    With "fused" attention the decoder is native and keeps matrices as ``config.weights`` says; with any other
    it is torch's, in float32, and torch's number of threads is set for the whole process.
    """
    model = read_config(checkpoint)
    _check_size(model, checkpoint)
    # The digest wants one core and no Python, and is asked for last.
    with ThreadPoolExecutor(1) as beside:
        fingerprint = beside.submit(checkpoint.fingerprint)
        tokenizer = read_tokenizer(checkpoint)
        options = LoadOptions.of(config)
        pool = native.ThreadPool(options.num_threads)
        decoder = _decoder(checkpoint, model, options, pool)
        return LoadedModel(model, decoder, tokenizer, fingerprint.result(), options, pool)


def _decoder(
    checkpoint: Checkpoint, model: ModelConfig, options: LoadOptions, pool: native.ThreadPool
) -> Decoder | NativeDecoder:
    tied, to_canonical = model.tie_word_embeddings, partial(canonical, model.architecture)
    if options.attention == "fused":
        stored = NativeDecoder(model, pool, int8=options.activations == "int8")
        load_stored(stored, checkpoint, options.weights, tied=tied, canonical=to_canonical)
        if options.activations == "int8":
            _check_products(stored, checkpoint.path.name)
        return stored
    torch.set_num_threads(options.num_threads)
    decoder = Decoder(model, options.device)
    load_model(decoder, checkpoint, tied=tied, canonical=to_canonical)
    return decoder


def _check_products(decoder: NativeDecoder, name: str) -> None:
    """Refuse 8-bit activations where no product would use them, and say how many do not."""
    have = int8_types()
    lacking = [{weight.type for weight in product}.difference(have) for product in decoder.products()]
    types = ", ".join(sorted(set().union(*lacking)))
    if all(lacking):
        raise ValueError(
            f'activations="int8" needs weights in {", ".join(have[:-1])} or {have[-1]}, but those of {name} '
            f'are in {types}: use weights="q8_0" or "q4_1" with a checkpoint of float weights'
        )
    if any(lacking):
        line = "%s: %d of %d products keep float32 activations, for weights in %s"
        log.warning(line, name, sum(map(bool, lacking)), len(lacking), types)


def assemble(
    config: EngineConfig, loaded: LoadedModel, *, attention: AttentionBackend | None = None
) -> Engine:
    """An engine with its own pool of blocks over a loaded model; see :func:`build_engine`.

    ``attention`` takes the place of the backend that ``config`` names.
    """
    wanted = LoadOptions.of(config)
    if wanted != loaded.options:
        raise ValueError(f"the model was loaded with {loaded.options}, the engine wants {wanted}")
    attention = attention or _backend(config, loaded.config, loaded.pool)
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
        planes=resources.plane_set(config, loaded.config),
    )
    if cache.num_compact_blocks is not None:
        log.info(
            "compact history: %d blocks as stored and %d compact ones, of %s and %s each",
            num_blocks,
            cache.num_compact_blocks,
            resources.format_size(kv_cache.block_bytes),
            resources.format_size(kv_cache.compact_block_bytes),
        )
    if config.has_planes:
        rows, planes = kv_cache.key.nbytes + kv_cache.value.nbytes, kv_cache.plane_bytes
        kinds = ["scan"] + ["means of values"] * config.has_tail + ["bounds of keys"] * config.has_fast
        log.info(
            "top-k attention: planes (%s) of %s beside K and V of %s: %.2f times plain float16 in all",
            ", ".join(kinds),
            resources.format_size(planes),
            resources.format_size(rows),
            (rows + planes) / (kv_cache.key.numel() + kv_cache.value.numel()) / 2,
        )
    fingerprint = prefix_fingerprint(config, loaded.config, loaded.fingerprint, isa(config.attention))
    disk = open_disk(config, kv_cache, fingerprint)
    scheduler = Scheduler(
        config.scheduler,
        resources.pool_shape(cache),
        prefix_cache=cache.enable_prefix_caching,
        fingerprint=fingerprint,
        disk=disk,
        recalls=cache.history_recall is not None,
    )
    runner = Runner(
        loaded.decoder,
        kv_cache,
        attention,
        vocab_size=loaded.vocab_size,
        device=config.device,
        history=History.of(cache, loaded.config),
    )
    return Engine(
        config,
        runner=runner,
        scheduler=scheduler,
        tokenizer=loaded.tokenizer,
        eos_token_ids=loaded.eos_token_ids,
        disk=disk,
    )


def open_disk(config: EngineConfig, kv_cache: KVCache, fingerprint: str) -> DiskCache | None:
    """The cache's folder, if the configuration names one. Raises ValueError, in one sentence."""
    cache = config.cache
    if cache.cache_dir is None:
        return None
    max_bytes = resources.parse_size(cache.cache_disk)
    block_bytes = kv_cache.block_bytes
    least = MIN_BYTES + MIN_DISK_BLOCKS * record_bytes(TOKEN_BYTES * cache.block_size, block_bytes)
    if max_bytes < least:
        raise ValueError(
            f"cache_disk must be at least {resources.format_size(least)}, room for {MIN_DISK_BLOCKS} blocks "
            f"of this model, got {cache.cache_disk!r:.100}"
        )
    store = DiskStore(Path(cache.cache_dir), max_bytes)
    return DiskCache(
        store,
        block_size=cache.block_size,
        row_bytes=block_bytes,
        compact_bytes=kv_cache.compact_block_bytes,
        window_blocks=resources.pool_shape(cache).window_blocks,
        origin=bytes.fromhex(fingerprint[:16]),
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
        config.weights,
        config.activations,
        config.cache.kv_dtype,
        str(config.cache.block_size),
        config.device,
        isa,
        str(kernel_version),
        # Of what another process left on disk: the tables and the torch backends are torch's, and the planes
        # lie beside the rows.
        torch.__version__,
        repr((config.has_planes, config.has_tail, config.has_fast, config.dense_layers)),
        repr((config.cache.compact_window, config.cache.value_bits)),
        repr((config.cache.history_budget, config.cache.history_mean, config.cache.history_recall)),
    )
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _check(config: EngineConfig) -> None:
    cache, limits = config.cache, config.scheduler
    check_int("block_size", cache.block_size, 1, 256)
    check_int("max_num_seqs", limits.max_num_seqs, 1)
    check_int("max_num_batched_tokens", limits.max_num_batched_tokens, 1)
    check_int("step_ms", limits.step_ms, 0)
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
    if cache.cache_dir is not None:
        if not isinstance(cache.cache_dir, str) or not cache.cache_dir:
            raise ValueError(f"cache_dir must be the path of a folder, got {cache.cache_dir!r:.100}")
        if not cache.enable_prefix_caching:
            raise ValueError("cache_dir needs prefix caching, which is off")
        resources.parse_size(cache.cache_disk)
    _check_history(cache)
    if config.seed is not None and not is_int(config.seed):
        raise ValueError(f"seed must be a whole number, got {config.seed!r:.100}")
    if cache.kv_dtype not in DTYPES:
        raise ValueError(f"kv_dtype must be one of {', '.join(DTYPES)}, got {cache.kv_dtype!r:.100}")
    check_attn_topk(config.attn_topk, config.attn_topk_mode, config.attn_topk_tail)
    if not isinstance(config.topk_planes, bool):
        raise ValueError(f"topk_planes must be True or False, got {config.topk_planes!r:.100}")
    if not isinstance(config.dense_layers, tuple) or not all(map(is_int, config.dense_layers)):
        raise ValueError(f"dense_layers must be a list of layers by number, got {config.dense_layers!r:.100}")
    if (config.has_tail or config.has_fast) and not config.has_planes:
        name = "attn_topk_tail" if config.has_tail else f"attn_topk_mode={config.attn_topk_mode!r}"
        raise ValueError(f"{name} needs attn_topk or topk_planes: without them every layer is dense")
    if config.attn_topk:
        AttnRule.of(config.attn_topk, config.attn_topk_mode, config.has_tail)
    if cache.history_budget is not None and config.has_planes:
        raise ValueError("history_budget goes with dense attention: leave out attn_topk and topk_planes")
    if config.dense_layers and not config.has_planes:
        raise ValueError("dense_layers needs attn_topk or topk_planes: without them every layer is dense")
    if config.weights not in WEIGHTS:
        raise ValueError(f"weights must be one of {', '.join(WEIGHTS)}, got {config.weights!r:.100}")
    if config.attention != "fused" and config.weights not in ("auto", "float32"):
        raise ValueError(
            f'weights={config.weights!r} needs attention="fused": with {config.attention!r} they are float32'
        )
    if config.activations not in ACTIVATIONS:
        raise ValueError(
            f"activations must be one of {', '.join(ACTIVATIONS)}, got {config.activations!r:.100}"
        )
    if config.activations == "int8":
        if config.attention != "fused":
            raise ValueError(f'activations="int8" needs attention="fused", got {config.attention!r:.100}')
        if config.weights in ("float32", "float16", "bfloat16"):
            raise ValueError(
                f'activations="int8" needs weights that are quantised, got weights={config.weights!r}: '
                'use weights="q8_0" or "q4_1"'
            )
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


def attention_spec(config: EngineConfig, model: ModelConfig) -> AttentionSpec:
    """What an attention kernel must know of the model and its cache."""
    return AttentionSpec(
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        block_size=config.cache.block_size,
        kv_dtype=DTYPES[config.cache.kv_dtype],
        device=config.device,
        value_bits=config.cache.value_bits,
    )


def _backend(config: EngineConfig, model: ModelConfig, pool: native.ThreadPool) -> AttentionBackend:
    spec = attention_spec(config, model)
    return AttentionBackend(config.attention, spec, pool, topk=config.has_planes)


def _check_budget(cache: CacheConfig) -> None:
    budget = cache.history_budget
    if isinstance(budget, bool) or not isinstance(budget, str | int):
        raise ValueError(f'history_budget must be tokens or a size ("64k", "1GiB"), got {budget!r:.100}')
    if cache.history == "compact" and cache.block_size != GROUP:
        raise ValueError(f"history_budget needs a block_size of {GROUP}, got {cache.block_size}")


def _check_recall(cache: CacheConfig) -> None:
    share = cache.history_recall
    if share is None:
        return
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share < 1:
        raise ValueError(f"history_recall must be a share between 0 and 1, got {share!r:.100}")
    if cache.history_budget is None:
        raise ValueError("history_recall needs history_budget: only summaries are recalled")


def _check_history(cache: CacheConfig) -> None:
    if cache.history not in HISTORIES:
        raise ValueError(f"history must be one of {', '.join(HISTORIES)}, got {cache.history!r:.100}")
    if cache.history_values not in HISTORY_VALUES:
        allowed = ", ".join(HISTORY_VALUES)
        raise ValueError(f"history_values must be one of {allowed}, got {cache.history_values!r:.100}")
    if cache.history_tokens is not None:
        check_int("history_tokens", cache.history_tokens, 1)
    if cache.num_compact_blocks is not None:
        check_int("num_compact_blocks", cache.num_compact_blocks, 1, MAX_BLOCKS)
    check_int("history_window", cache.history_window, 1)
    if cache.history_mean not in HISTORY_MEANS:
        allowed = ", ".join(HISTORY_MEANS)
        raise ValueError(f"history_mean must be one of {allowed}, got {cache.history_mean!r:.100}")
    if cache.history_budget is not None:
        _check_budget(cache)
    _check_recall(cache)
    step = max(cache.block_size, RECORD_KEYS)
    if cache.history != "compact":
        return
    if cache.block_size % RECORD_KEYS:
        raise ValueError(
            f'history="compact" needs a block_size that is a multiple of {RECORD_KEYS}, '
            f"got {cache.block_size}"
        )
    if cache.history_window % step:
        raise ValueError(
            f"history_window must be a multiple of the block size {step}, got {cache.history_window}"
        )
