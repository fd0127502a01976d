"""The whole engine's tokens a second in decode over long contexts, dense and with top-k attention.

One request decodes greedily over a prompt that was not computed: a step of more than one token a sequence
fills the cache with random K and V and seals the planes, so that 32k tokens of context cost no hours. All
else is the engine as it is: scheduler, decoder, sampler. The weights are the model's also at positions beyond
its context: what is measured is time, and nothing that is generated is looked at.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from octavo.attention.backend import AttentionBackend
from octavo.batch import ForwardBatch
from octavo.cache.kv_cache import KVCache
from octavo.config import CacheConfig, EngineConfig, SchedulerConfig
from octavo.engine import build
from octavo.engine.build import LoadedModel
from octavo.engine.engine import Engine
from octavo.engine.runner import Model
from octavo.kernels import fused, topk_paged
from octavo.kernels.api import AttentionMeta, KVLayer
from octavo.kernels.native import ThreadPool
from octavo.request import SamplingParams
from octavo.weights import hub
from octavo.weights.load import open_checkpoint

BLOCK_SIZE = 16
#: Prompt tokens that are filled in at once.
STEP_TOKENS = 4096
#: Decode steps of one turn; turns of all ways make a round.
TURN = 8


def ways(topk: int) -> dict[str, dict[str, Any]]:
    """By name: what the engine is started with."""
    return {
        "dense_float32": {"kv_dtype": "float32"},
        "dense": {},
        "exact": {"attn_topk": topk},
        "fast": {"attn_topk": topk, "attn_topk_mode": "fast"},
        "auto": {"attn_topk": "auto"},
    }


@dataclass(frozen=True, slots=True)
class UncomputedPrompts:
    """A decoder whose prompts are noise: see above."""

    decoder: Model
    hidden_size: int
    pool: ThreadPool

    def forward(self, batch: ForwardBatch, kv_cache: KVCache, attention: AttentionBackend) -> torch.Tensor:
        """As the decoder's, where each sequence has one token."""
        if batch.num_tokens == batch.num_seqs:
            return self.decoder.forward(batch, kv_cache, attention)
        spec = attention.spec
        generator = torch.Generator().manual_seed(int(batch.positions[0]))
        shape = (batch.num_tokens, spec.num_kv_heads, spec.head_dim)
        key, value = torch.randn(2, *shape, generator=generator).unbind()
        # As in the bench of attention alone: a mean of each head, as long as two deviations.
        key += 2 * torch.randn(shape[1:], generator=torch.Generator().manual_seed(0))
        meta = AttentionMeta(batch.block_table, batch.seq_lens, batch.cu_seqlens_q)
        # A budget that keeps all: nothing is left to attend to but what these keys add to the planes.
        budget = topk_paged.policies([topk_paged.Policy.of(int(n)) for n in batch.seq_lens])
        rows = torch.empty(spec.num_heads, spec.head_dim).expand(batch.num_tokens, -1, -1)
        for i in range(len(kv_cache.key)):
            fused.write_kv(*kv_cache.layer(i), key, value, batch.slot_mapping)
            planes = kv_cache.layer_planes(i)
            if planes is not None:
                plan = topk_paged.plan(meta, budget, spec, self.pool)
                topk_paged.attend(rows, KVLayer(*kv_cache.layer(i), 1.0, planes=planes), plan, rows)
        return torch.zeros(batch.num_tokens, self.hidden_size)

    def logits(self, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """The decoder's."""
        return self.decoder.logits(hidden, rows)


@dataclass(frozen=True, slots=True)
class Bench:
    """A model in memory, for contexts of up to ``max_len`` tokens."""

    base: EngineConfig
    loaded: LoadedModel

    @classmethod
    def open(cls, model: str, max_len: int, threads: int) -> Bench:
        """Raises ValueError for a model that cannot be read."""
        base = EngineConfig(model=model, num_threads=threads)
        loaded = build.load(open_checkpoint(hub.resolve(model)), base)
        decoder = UncomputedPrompts(loaded.decoder, loaded.config.hidden_size, loaded.pool)
        # A wider context than the model has: its rope goes on.
        wide = replace(loaded.config, max_position_embeddings=max_len)
        return cls(base, replace(loaded, config=wide, decoder=decoder))

    def engine(self, max_len: int, options: dict[str, Any]) -> Engine:
        """With room for one request; K and V are float16 where ``options`` do not say."""
        own = {"kv_dtype": "float16"} | options
        config = replace(
            self.base,
            cache=CacheConfig(
                kv_dtype=own.pop("kv_dtype"),
                block_size=BLOCK_SIZE,
                num_blocks=max_len // BLOCK_SIZE + 2,
                enable_prefix_caching=False,
            ),
            scheduler=SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=STEP_TOKENS),
            **own,
        )
        return build.assemble(config, self.loaded)


def measure(
    model: str, lengths: Sequence[int], *, topk: int, rounds: int, threads: int, report: Callable[[str], None]
) -> list[dict[str, Any]]:
    """One row a length and way, with the median of the rounds' tokens a second; the ways take turns."""
    steps = TURN * (rounds + 1) + 1
    bench = Bench.open(model, max(lengths) + steps, threads)
    rows = []
    for keys in lengths:
        engines = {name: bench.engine(keys + steps, options) for name, options in ways(topk).items()}
        for name, seconds in _take_turns(engines, keys, steps, rounds).items():
            speeds = [TURN / s for s in seconds]
            rows.append({"keys": keys, "way": name, "tok_s": statistics.median(speeds), "all_tok_s": speeds})
        own = [f"{row['way']} {row['tok_s']:.1f}" for row in rows if row["keys"] == keys]
        report(f"{keys:,} keys, tokens a second: {', '.join(own)}")
    return rows


def start(engine: Engine, prompt: int, steps: int) -> None:
    """Queue a prompt of so many tokens and run the engine until it has given the first of ``steps``."""
    params = SamplingParams(temperature=0, max_tokens=steps, ignore_eos=True)
    engine.add_request([i % 251 for i in range(prompt)], params)
    while not any(output.outputs[0].token_ids for output in engine.step()):
        pass


def _take_turns(engines: dict[str, Engine], prompt: int, steps: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of each engine's turns of decode steps; the first round is not counted."""
    for engine in engines.values():
        start(engine, prompt, steps)
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    for i in range(rounds + 1):
        for name, engine in engines.items():
            began = time.perf_counter()
            for _ in range(TURN):
                engine.step()
            if i:
                seconds[name].append(time.perf_counter() - began)
    return seconds
