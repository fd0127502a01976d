"""A real but tiny engine: one attention layer over the paged cache, a byte-level tokenizer."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

import pytest
import torch
from tokenizers import Tokenizer as HFTokenizer
from tokenizers import decoders, models, pre_tokenizers

from octavo.attention.backend import AttentionBackend
from octavo.batch import ForwardBatch
from octavo.cache.disk_cache import DiskCache
from octavo.cache.disk_store import DiskStore
from octavo.cache.kv_cache import KVCache
from octavo.config import CacheConfig, EngineConfig, SchedulerConfig
from octavo.engine.blocks import PoolShape
from octavo.engine.engine import Engine
from octavo.engine.runner import Runner
from octavo.engine.scheduler import Scheduler
from octavo.kernels.api import AttentionSpec, KVLayer
from octavo.kernels.native import ThreadPool
from octavo.request import RequestOutput
from octavo.tokenizer import Tokenizer

torch.set_num_threads(1)  # rows of 32 numbers: threads would only wait for each other

SPECIALS = ["<|end|>", "<|im_start|>", "<|im_end|>"]
VOCAB = 256 + len(SPECIALS)
EOS = 256
HEAD_WIDTH = VOCAB + 5  # wider than the tokenizer, as padded heads are
HEADS, KV_HEADS, DIM = 4, 2, 8


def times(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x @ weight row by row, so that a row's bits do not depend on how many rows there are."""
    return torch.cat([row[None] @ weight for row in x])


class TinyModel:
    """Embedding, one layer of attention, a head; what a row gives is independent, to the bit, of the
    batch. ``fail_on`` tokens make a forward pass raise, ``nan_on`` tokens make it give NaN."""

    def __init__(self, seed: int = 0) -> None:
        g = torch.Generator().manual_seed(seed)
        width = HEADS * DIM
        self.embedding = torch.randn(HEAD_WIDTH, width, generator=g)
        self.q = torch.randn(width, width, generator=g) / 4
        self.kv = torch.randn(2, width, KV_HEADS * DIM, generator=g) / 4
        self.out = torch.randn(width, width, generator=g)
        self.head = torch.randn(width, HEAD_WIDTH, generator=g) / 3
        self.fail_on: set[int] = set()
        self.nan_on: set[int] = set()
        self.forwards: list[int] = []  # tokens of each forward pass
        self.head_rows: list[int] = []

    def forward(self, batch: ForwardBatch, kv_cache: KVCache, attention: AttentionBackend) -> torch.Tensor:
        self.forwards.append(batch.num_tokens)
        tokens = set(batch.token_ids.tolist())
        x = self.embedding[batch.token_ids]
        x = x + torch.sin(batch.positions[:, None] * torch.linspace(0.01, 1.0, x.shape[1]))
        k, v = (times(x, w) for w in self.kv)
        kv_cache.write(0, k.view(-1, KV_HEADS, DIM), v.view(-1, KV_HEADS, DIM), batch.slot_mapping)
        if tokens & self.fail_on:
            raise RuntimeError("this token cannot be computed")
        layer = KVLayer(*kv_cache.layer(0), scale=DIM**-0.5)
        out = attention.run(times(x, self.q).view(-1, HEADS, DIM), layer, attention.plan(batch))
        hidden = x + times(out.flatten(1), self.out)
        for token in self.nan_on:
            hidden[batch.token_ids == token] = float("nan")
        return hidden

    def logits(self, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        self.head_rows.append(len(rows))
        return times(hidden[rows], self.head)


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    hf = HFTokenizer(models.BPE(vocab={c: i for i, c in enumerate(letters)}, merges=[]))
    hf.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    hf.decoder = decoders.ByteLevel()
    hf.add_special_tokens(SPECIALS)
    hf.save(str(folder / "tokenizer.json"))
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    config = {
        "eos_token": SPECIALS[0],
        "chat_template": template,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return Tokenizer.from_hf(folder)


class Tiny:
    """An engine and its parts, for tests to look into."""

    def __init__(  # noqa: PLR0913 - each test sets one or two of them
        self,
        tokenizer: Tokenizer,
        *,
        block_size: int = 4,
        num_blocks: int = 64,
        max_model_len: int | None = None,
        max_num_seqs: int = 16,
        budget: int = 64,
        step_ms: int = 0,
        prefix_cache: bool = True,
        eos: Sequence[int] = (EOS,),
        fingerprint: str = "tiny",
        store: DiskStore | None = None,
        queue_bytes: int = 2**20,
    ) -> None:
        self.model = TinyModel()
        self.kv_cache = KVCache(
            num_layers=1, num_blocks=num_blocks, num_kv_heads=KV_HEADS, block_size=block_size, head_dim=DIM
        )
        spec = AttentionSpec(
            num_heads=HEADS,
            num_kv_heads=KV_HEADS,
            head_dim=DIM,
            block_size=block_size,
            kv_dtype=torch.float32,
            device="cpu",
        )
        limits = SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_model_len=max_model_len or block_size * num_blocks,
            step_ms=step_ms,
        )
        self.disk = None
        if store is not None:
            rows = self.kv_cache.block_bytes
            self.disk = DiskCache(store, block_size=block_size, row_bytes=rows, queue_bytes=queue_bytes)
        self.scheduler = Scheduler(
            limits,
            PoolShape(block_size, num_blocks),
            prefix_cache=prefix_cache,
            fingerprint=fingerprint,
            disk=self.disk,
        )
        self.runner = Runner(
            self.model,
            self.kv_cache,
            AttentionBackend("reference", spec, ThreadPool(1)),
            vocab_size=tokenizer.vocab_size,
        )
        cache = CacheConfig(block_size=block_size, num_blocks=num_blocks)
        self.engine = Engine(
            EngineConfig(model="tiny", cache=cache, scheduler=limits, attention="reference", seed=1),
            runner=self.runner,
            scheduler=self.scheduler,
            tokenizer=tokenizer,
            eos_token_ids=eos,
            disk=self.disk,
        )

    def add(self, prompt, params, **kw) -> int:
        return self.engine.add_request(prompt, params, **kw)

    def drain(self, max_steps: int = 5000) -> dict[int, RequestOutput]:
        """Run to the end; the last output of every prompt by its id."""
        last: dict[int, RequestOutput] = {}
        for _ in range(max_steps):
            if not self.engine.has_unfinished():
                self.scheduler.check_invariants()
                return last
            for output in self.engine.step():
                last[int(output.request_id)] = output
        raise AssertionError(f"not finished after {max_steps} steps")

    def run(self, *jobs) -> list[RequestOutput]:
        """Each job is (prompt, params) or (prompt, params, keywords); all at once, in order."""
        ids = [self.add(job[0], job[1], **(job[2] if len(job) > 2 else {})) for job in jobs]
        last = self.drain()
        return [last[i] for i in ids]


@pytest.fixture(scope="session")
def tiny(tokenizer) -> Callable[..., Tiny]:
    return lambda **options: Tiny(tokenizer, **options)
