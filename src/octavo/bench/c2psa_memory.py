"""Peak memory of one attention module, and of training a whole BERT-base, each in a process of its own.

On the CPU it is the most resident memory above what the process held before; libraries, threads and the
allocator have been used before that. On a GPU it is torch's own count. Sizes are taken in rising order; one
that would need more than the limit is not run, and what follows is fitted to what was measured: a straight
line over batches, a parabola over lengths.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from octavo.bench.c2psa_variants import MATERIALISED, QUICK, SDPA, C2psaSettings, Variant, variants
from octavo.bench.worker import forget_peak, peak_bytes
from octavo.encoder_config import EncoderConfig
from octavo.models.encoder import Encoder, EncoderBatch
from octavo.nn import MultiHeadAttention
from octavo.nn.attention import Attention
from octavo.training.loop import make_optimizer
from octavo.training.settings import TrainSettings

Report = Callable[[str], None]
Row = dict[str, Any]

#: The workspace that libraries keep for themselves is there after so many.
WARM_UP_TOKENS = 512
#: The first step of a whole model, which makes AdamW's moments.
FIRST_TOKENS = 16
#: BERT-base, with its dropout.
BERT = {
    "model_type": "bert",
    "vocab_size": 30_522,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
    "architectures": ["BertForSequenceClassification"],
    "id2label": {"0": "down", "1": "up"},
}
#: Of the whole model: names, and whether attention is computed again in the backward pass.
BERT_ROWS = ((MATERIALISED, False), (SDPA, False), (MATERIALISED, True), ("c2psa", True))


def batch_memory(settings: C2psaSettings, report: Report) -> list[Row]:
    """Peak bytes of a forward pass and of a training step at each batch."""
    return _blocks(settings, [(batch, settings.length) for batch in settings.batches], report)


def length_memory(settings: C2psaSettings, report: Report) -> list[Row]:
    """Peak bytes of a forward pass and of a training step at each length, batch 1."""
    return _blocks(settings, [(1, length) for length in settings.lengths], report)


def _blocks(settings: C2psaSettings, sizes: Sequence[tuple[int, int]], report: Report) -> list[Row]:
    by_length = sizes[0][0] == sizes[-1][0]
    numbers = [length if by_length else batch for batch, length in sizes]
    rows = []
    for variant in variants(settings):
        found = {}
        for training in (False, True):
            jobs = [partial(block_bytes, settings, variant, size, training) for size in sizes]
            degree = 2 if by_length and variant.materialise else 1
            found[training] = measure(numbers, jobs, degree, settings.memory_limit)
        for size, forward, train in zip(sizes, found[False], found[True], strict=True):
            rows.append({"variant": variant.name, "batch": size[0], "length": size[1]})
            rows[-1] |= {"forward_bytes": forward[0], "training_bytes": train[0]}
            rows[-1] |= {"forward_fitted": forward[1], "training_fitted": train[1]}
        report(f"{variant.name}: {train[0] / 2**20:,.0f} MiB to train at batch {size[0]} of {size[1]} tokens")
    return rows


def bert_memory(settings: C2psaSettings, report: Report) -> list[Row]:
    """Peak bytes of a training step of the whole model at each batch, with weights and AdamW's moments."""
    rows = []
    for name, checkpointed in BERT_ROWS:
        jobs = [partial(bert_bytes, settings, name, checkpointed, batch) for batch in settings.batches]
        label = f"{name}{', checkpointed' if checkpointed else ''}"
        if name == "c2psa":
            label = f"c2psa r={settings.rates[-1]} k={settings.topks[-1]}, checkpointed"
        found = measure(settings.batches, jobs, 1, settings.memory_limit)
        for batch, (count, fitted) in zip(settings.batches, found, strict=True):
            rows.append({"variant": label, "batch": batch, "length": settings.length})
            rows[-1] |= {"training_bytes": count, "training_fitted": fitted}
        report(
            f"BERT-base, {label}: {count / 2**20:,.0f} MiB{' (fitted)' if fitted else ''} at batch {batch}"
        )
    return rows


def measure(
    numbers: Sequence[int], jobs: Sequence[Callable[[], int]], degree: int, limit: int
) -> list[tuple[int, bool]]:
    """Bytes of each job, and whether they are fitted; ``numbers`` rise, bytes grow like their ``degree``.

    Raises ValueError where fewer jobs fit than a fit needs.
    """
    found: list[int] = []
    for number, job in zip(numbers, jobs, strict=True):
        if found and found[-1] * (number / numbers[len(found) - 1]) ** degree > limit:
            break
        try:
            found.append(in_own_process(job))
        except BrokenProcessPool:
            break  # the system had less than the limit
    if len(found) == len(jobs):
        return [(count, False) for count in found]
    if len(found) <= degree:
        raise ValueError(
            f"only {len(found)} of {len(jobs)} sizes fit into {limit / 2**30:.1f} GiB: too few for a fit"
        )
    curve = np.polyfit(numbers[: len(found)], found, degree)
    rest = [(round(float(np.polyval(curve, number))), True) for number in numbers[len(found) :]]
    return [(count, False) for count in found] + rest


def in_own_process(job: Callable[[], int]) -> int:
    """What ``job`` returns in a new process. Raises BrokenProcessPool where the system ended that.

    It is forked from a server that has imported this module and nothing else, so that it has done no work yet
    and is there at once.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(job).result()


def block_bytes(settings: C2psaSettings, variant: Variant, size: tuple[int, int], training: bool) -> int:
    """Peak bytes of one module's pass over ``size`` (batch, length), in this process.

    Its input and, in training, the gradient of its output are the caller's and there before.
    """
    _settle(settings)
    batch, length = size
    module = variant.make(settings.shape, length).train(training).to(settings.device)

    def given(batch: int, length: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        x = torch.randn(batch, length, settings.shape.d_model, device=settings.device)
        return x.requires_grad_(training), torch.ones_like(x) if training else None

    def step(x: torch.Tensor, out_grad: torch.Tensor | None) -> None:
        with torch.set_grad_enabled(training):
            out = module(x)
            if out_grad is not None:
                torch.autograd.backward(out, out_grad)

    step(*given(1, min(length, WARM_UP_TOKENS)))
    module.zero_grad(set_to_none=True)
    x, out_grad = given(batch, length)
    with _peak(settings.device) as peak:
        step(x, out_grad)
    return peak[0]


def bert_bytes(settings: C2psaSettings, name: str, checkpointed: bool, batch: int) -> int:
    """Peak bytes of training a whole model, from nothing, in this process."""
    _settle(settings)

    def train(sizes: Mapping[str, int], texts: int, length: int) -> None:
        metadata: dict[str, Any] = BERT | dict(sizes)
        if name == "c2psa":
            metadata |= {"c2psa": {"compress_rate": settings.rates[-1], "topk": settings.topks[-1]}}
        encoder = Encoder(EncoderConfig.from_hf(metadata)).to(settings.device).train()
        for module in encoder.modules():
            if isinstance(module, MultiHeadAttention):
                module.materialise = name == MATERIALISED
            if isinstance(module, Attention):
                module.checkpoint = checkpointed
        optimizer = make_optimizer(encoder, TrainSettings())
        # The first step makes AdamW's moments, so that the second has everything that a step has.
        for size in ((1, min(length, FIRST_TOKENS)), (texts, length)):
            logits = encoder.classify(_texts(encoder.config, *size, settings.device))
            target = torch.zeros(size[0], dtype=torch.long, device=settings.device)
            torch.autograd.backward(F.cross_entropy(logits, target))
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    train(QUICK["bert"], 1, min(settings.length, WARM_UP_TOKENS))
    with _peak(settings.device) as peak:
        train(settings.bert or {}, batch, settings.length)
    return peak[0]


def _texts(config: EncoderConfig, batch: int, length: int, device: str) -> EncoderBatch:
    ids = torch.randint(0, config.vocab_size, (batch * length,), device=device)
    positions = torch.arange(length, device=device).repeat(batch) + config.first_position
    return EncoderBatch(ids, positions, torch.zeros_like(ids), ((batch, length),))


def _settle(settings: C2psaSettings) -> None:
    """Threads, seed, and an allocator that gives back at once what is freed, where it can be told to."""
    torch.manual_seed(0)
    torch.set_num_threads(settings.threads)
    if settings.device == "cpu" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        mmap_threshold = -3  # M_MMAP_THRESHOLD of mallopt(3)
        libc.mallopt(mmap_threshold, 1 << 16)


@contextlib.contextmanager
def _peak(device: str) -> Iterator[list[int]]:
    """Yields a list that holds, afterwards, the most bytes above those at the start."""
    found: list[int] = []
    if device == "cpu":
        before = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        forget_peak()
        yield found
        found.append(peak_bytes() - before)
        return
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    yield found
    found.append(torch.cuda.max_memory_allocated(device) - before)
