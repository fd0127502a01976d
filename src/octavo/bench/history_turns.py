"""What the next turn of a conversation costs as its history grows: time to the first token, speed, memory.

Chats are strung together to each length and read once; then the ways to keep history take turns at the next
turn, always from the same history, so that their ratios hold when the machine's speed drifts. Beyond the
model's context a random model of the same shape steps over a cache of noise, for time alone.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from octavo.attention.backend import AttentionBackend
from octavo.batch import ForwardBatch
from octavo.bench.history_memory import BUDGET, POOL_BYTES, WAYS, Way
from octavo.cache.kv_cache import KVCache
from octavo.config import ModelConfig, SchedulerConfig
from octavo.engine import build, resources
from octavo.engine.build import LoadedModel
from octavo.engine.engine import Engine
from octavo.kernels import compact
from octavo.kernels.api import KVLayer, num_compact_blocks
from octavo.kernels.native import ThreadPool
from octavo.models.native import NativeDecoder
from octavo.request import RequestOutput, SamplingParams
from octavo.tokenizer import Tokenizer

#: Tokens that the model says in a turn.
ANSWER = 16
#: Rows of a turn's question, in the steps over noise.
QUESTION = 64
MEMORY = "1GiB"

Message = dict[str, str]


@dataclass(slots=True)
class History:
    """A conversation so far, which ends with what the user said; with the next turn it has ``tokens`` tokens
    at most."""

    tokens: int
    messages: list[Message]

    @classmethod
    def of(cls, messages: Sequence[Message], tokens: int, tokenizer: Tokenizer) -> History:
        """As much of a conversation as leaves room for the next turn and its answer."""
        made = cls(tokens, list(messages))
        while len(tokenizer.apply_chat_template(made.next_turn(99))) + ANSWER > tokens:
            if len(made.messages) < 3:
                raise ValueError(f"no turn of the chats fits {tokens} tokens")
            del made.messages[-2:]
        return made

    @property
    def turn(self) -> int:
        """The number of the turn that comes next."""
        return sum(message["role"] == "user" for message in self.messages) + 1

    def next_turn(self, number: int) -> list[Message]:
        """The same history and a question, another one for each ``number``."""
        ask = f"That is number {number}. And what did I say at first?"
        return [
            *self.messages,
            {"role": "assistant", "content": "I see."},
            {"role": "user", "content": ask},
        ]


@dataclass(slots=True)
class Asked:
    """What one way's turns at one length took, in seconds."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    first_token_s: list[float] = field(default_factory=list)
    tokens_per_s: list[float] = field(default_factory=list)


def measure(
    loaded: LoadedModel,
    histories: Sequence[History],
    *,
    rounds: int,
    threads: int | None,
    report: Callable[[str], None],
) -> dict[str, Any]:
    """A row for each way and history; ``missing`` says why the engine refuses a way.

    Raises RuntimeError when a turn is not answered.
    """
    engines: dict[str, Engine] = {}
    missing: dict[str, str] = {}
    longest = max(history.tokens for history in histories)
    for name, way in WAYS.items():
        try:
            engines[name] = _engine(way, loaded, longest, threads)
        except ValueError as error:
            missing[name] = str(error)
            report(f"{name}: {error}")
            continue
        for history in histories:
            _ask(engines[name], history.messages, 1)
        report(f"{name}: histories are read")
    found = {(name, history.tokens): Asked() for name in engines for history in histories}
    for number in range(rounds + 1):  # the first is not counted
        for history in histories:
            messages = history.next_turn(number)
            for name, engine in engines.items():
                turn = _ask(engine, messages, ANSWER)
                if number:
                    _note(found[name, history.tokens], *turn)
        report(f"round {number} of {rounds}")
    rows = []
    for (name, tokens), asked in found.items():
        turn_number = next(h.turn for h in histories if h.tokens == tokens)
        rows.append({"way": name, "tokens": tokens, "turn": turn_number, **_row(asked)})
    return {"rows": rows, "missing": missing, "answer_tokens": ANSWER, "rounds": rounds}


def _engine(way: Way, loaded: LoadedModel, tokens: int, threads: int | None) -> Engine:
    limits = SchedulerConfig(max_model_len=tokens, max_num_seqs=1)
    config = replace(way.config("", threads=threads, kv_cache_memory=MEMORY), scheduler=limits)
    return build.assemble(config, loaded)


def _ask(
    engine: Engine, messages: Sequence[Message], max_tokens: int
) -> tuple[RequestOutput, float, list[float]]:
    """The answer, when it was asked for, and when each of its tokens was there."""
    ids = engine.tokenizer.apply_chat_template(messages)
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    start = time.perf_counter()
    engine.add_request(ids, params)
    times: list[float] = []
    output = None
    while engine.has_unfinished():
        for output in engine.step():
            if output.outputs and len(output.outputs[0].token_ids) > len(times):
                times.append(time.perf_counter())
    if output is None or output.error is not None:
        raise RuntimeError(f"a turn was not answered: {output and output.error}")
    return output, start, times


def _note(asked: Asked, output: RequestOutput, start: float, times: Sequence[float]) -> None:
    asked.prompt_tokens, asked.cached_tokens = len(output.prompt_token_ids), output.num_cached_tokens
    asked.first_token_s.append(times[0] - start)
    asked.tokens_per_s.append((len(times) - 1) / (times[-1] - times[0]))


def _row(asked: Asked) -> dict[str, Any]:
    return {
        "prompt_tokens": asked.prompt_tokens,
        "cached_tokens": asked.cached_tokens,
        "first_token_s": statistics.median(asked.first_token_s),
        "tokens_per_s": statistics.median(asked.tokens_per_s),
        "all": {"first_token_s": asked.first_token_s, "tokens_per_s": asked.tokens_per_s},
    }


def add_bytes(rows: Sequence[dict[str, Any]], config: ModelConfig) -> None:
    """Add to each row what a token of its history takes of a pool, window included."""
    for row in rows:
        limits = SchedulerConfig(max_model_len=row["tokens"])
        wanted = WAYS[row["way"]].config("", kv_cache_memory=POOL_BYTES)
        model = replace(config, max_position_embeddings=max(row["tokens"], config.max_position_embeddings))
        resolved, _ = resources.resolve(replace(wanted, scheduler=limits), model, 2 * POOL_BYTES)
        row["bytes_per_token"] = POOL_BYTES / resources.num_sequences(resolved, row["tokens"]) / row["tokens"]


# ---- longer than the model's context


def measure_long(
    config: ModelConfig,
    lengths: Sequence[int],
    *,
    rounds: int,
    threads: int,
    report: Callable[[str], None],
) -> dict[str, Any]:
    """Steps of a random model of the shape of ``config``, float32 weights, over noise: one that computes a
    question and one that says a token."""
    longest = max(lengths)
    pool = ThreadPool(threads)
    decoder = _random_decoder(replace(config, max_position_embeddings=longest), pool)
    steps: dict[tuple[str, int, int], Callable[[], object]] = {}
    missing = {}
    with torch.inference_mode():
        for name, way in WAYS.items():
            if way.attn_topk or name == BUDGET:
                missing[name] = "steps over noise are of dense attention, without summaries"
                continue
            wanted = way.config("", threads=threads)
            backend = AttentionBackend("fused", build.attention_spec(wanted, config), pool)
            window = wanted.cache.compact_window
            cache = _noise(config, wanted, longest, pool)
            for tokens in lengths:
                for queries in (QUESTION, 1):
                    batch = _batch(tokens, queries, wanted.cache.block_size, window)
                    steps[name, tokens, queries] = partial(_step, decoder, batch, cache, backend)
            report(f"{name}: noise for {longest} tokens")
        seconds: dict[tuple[str, int, int], list[float]] = {key: [] for key in steps}
        for number in range(rounds + 1):
            for key, step in steps.items():
                start = time.perf_counter()
                step()
                if number:
                    seconds[key].append(time.perf_counter() - start)
            report(f"round {number} of {rounds}")
    rows = []
    for name, tokens in dict.fromkeys(key[:2] for key in steps):
        question, token = seconds[name, tokens, QUESTION], seconds[name, tokens, 1]
        rows.append(
            {
                "way": name,
                "tokens": tokens,
                "first_token_s": statistics.median(question),
                "tokens_per_s": 1 / statistics.median(token),
                "all": {"first_token_s": question, "token_s": token},
            }
        )
    return {"rows": rows, "missing": missing, "question_tokens": QUESTION, "rounds": rounds}


def _step(decoder: NativeDecoder, batch: ForwardBatch, cache: KVCache, backend: AttentionBackend) -> object:
    return decoder.logits(decoder.forward(batch, cache, backend), batch.logits_rows)


def _random_decoder(config: ModelConfig, pool: ThreadPool) -> NativeDecoder:
    generator = torch.Generator().manual_seed(0)
    decoder = NativeDecoder(config, pool)
    for name, shape in decoder.expected_weights().items():
        decoder.load_weight(name, torch.randn(shape, generator=generator) * 0.05)
    return decoder


def _noise(config: ModelConfig, wanted: Any, tokens: int, pool: ThreadPool) -> KVCache:
    """K and V of ``tokens`` tokens. In compact history those of the window and a step are as stored, and each
    of the others is made compact from one of these."""
    size, window = wanted.cache.block_size, wanted.cache.compact_window
    total = -(-tokens // size)
    stored = total if window is None else min(total, window // size + QUESTION // size + 2)
    resolved = replace(wanted.cache, num_blocks=stored, num_compact_blocks=None if window is None else total)
    cache = KVCache(
        num_layers=config.num_layers,
        num_blocks=stored,
        num_kv_heads=config.num_kv_heads,
        block_size=size,
        head_dim=config.head_dim,
        kv_dtype=wanted.cache.kv_dtype,
        planes=resources.plane_set(replace(wanted, cache=resolved), config),
    )
    noise = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0))
    for tensor in (cache.key, cache.value):
        flat = tensor.view(-1)
        for start in range(0, flat.numel(), noise.numel()):
            piece = flat[start : start + noise.numel()]
            piece.copy_(noise[: piece.numel()])
    if window is not None:
        pairs = torch.tensor([(i % stored, i) for i in range(total)], dtype=torch.int32)
        for i in range(config.num_layers):
            compact.seal(KVLayer(*cache.layer(i), 1.0, compact=cache.layer_compact(i)), pairs, pool)
    return cache


def _batch(tokens: int, queries: int, size: int, window: int | None) -> ForwardBatch:
    """A step that computes the last ``queries`` of ``tokens`` tokens, whose last one is read."""
    first = tokens - queries
    old = 0 if window is None else num_compact_blocks(first, window, size)
    blocks = -(-tokens // size)
    table = torch.zeros(1, blocks, dtype=torch.int32)
    table[0, old:] = torch.arange(blocks - old, dtype=torch.int32)
    positions = torch.arange(first, tokens)
    compacts = 0 if window is None else num_compact_blocks(tokens - 1, window, size)
    return ForwardBatch(
        token_ids=positions % 256,
        positions=positions,
        slot_mapping=table[0, positions // size].to(torch.int64) * size + positions % size,
        block_table=table,
        seq_lens=torch.tensor([tokens], dtype=torch.int32),
        cu_seqlens_q=torch.tensor([0, queries], dtype=torch.int32),
        logits_rows=torch.tensor([queries - 1]),
        compact_table=None
        if window is None
        else torch.arange(max(1, compacts), dtype=torch.int32).view(1, -1),
        history_window=window,
    )
