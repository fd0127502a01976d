"""What a conversion costs, measured on text that was not used to fit it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.convert.heads import LayerHeads
from octavo.convert.recover import run_attention
from octavo.convert.source import Source
from octavo.convert.stack import WINDOWS, DecoderStack, Stack, run
from octavo.engine.build import read_tokenizer
from octavo.tokenizer.encoder import EncoderTokenizer


class Windows(NamedTuple):
    """Token ids ``[windows, length]``: one part of a text to fit to, and a later one to measure on."""

    fit: Tensor
    held_out: Tensor


def read_windows(source: Source, text: str, length: int, most: int) -> Windows:
    """The first four fifths of ``text`` to fit to, the last fifth to measure on; at most ``most`` and
    ``most / 2`` tokens of them, in windows spread evenly.

    Raises ValueError for a text that is too short for one window each.
    """
    cut = text.rfind(" ", 0, len(text) * 4 // 5)
    parts = [_window_ids(source, part, length) for part in (text[:cut], text[cut:])]
    for name, part in zip(("four fifths", "fifth"), parts, strict=True):
        if not len(part):
            raise ValueError(f"the text is too short: its {name} must hold a window of {length} tokens")
    highest = max(int(part.max()) for part in parts)
    if highest >= source.config.vocab_size:
        raise ValueError(f"the text has token {highest}, the model knows {source.config.vocab_size}")
    fit, held_out = (
        _spread(part, limit // length) for part, limit in zip(parts, (most, most // 2), strict=True)
    )
    return Windows(fit, held_out)


def moment_roots(stack: Stack, heads: Sequence[LayerHeads], ids: Tensor) -> list[Tensor]:
    """Of each layer's attention inputs with a 1 behind: a square root of their second moment, float64."""
    roots = []
    x = stack.embed(ids)
    for i, layer in enumerate(heads):
        inputs = stack.attention_input(i, x)
        flat = inputs.flatten(0, 1).double()
        flat = torch.cat((flat, flat.new_ones(len(flat), 1)), 1)
        values, vectors = torch.linalg.eigh(flat.T @ flat / len(flat))
        roots.append(vectors * values.clamp(min=0).sqrt())
        x = stack.finish(i, x, run_attention(layer, inputs, stack.attends(i, ids.shape[1], None)))
    return roots


class LayerPair(NamedTuple):
    """What the original gives a layer's attention, and what that gives: ``[windows, length, hidden]``."""

    inputs: Tensor
    outputs: Tensor


def layer_pairs(stack: Stack, original: Sequence[LayerHeads], ids: Tensor) -> list[LayerPair]:
    """Of every layer of the original."""
    pairs = []
    x = stack.embed(ids)
    for i, heads in enumerate(original):
        inputs = stack.attention_input(i, x)
        outputs = run_attention(heads, inputs, stack.attends(i, ids.shape[1], None))
        pairs.append(LayerPair(inputs, outputs))
        x = stack.finish(i, x, outputs)
    return pairs


def layer_errors(
    stack: Stack, pairs: Sequence[LayerPair], variant: Sequence[LayerHeads], topk: int | None
) -> list[float]:
    """Relative squared error of each layer's attention output, on what the original's layer is given."""
    errors = []
    for i, ((inputs, wanted), heads) in enumerate(zip(pairs, variant, strict=True)):
        found = run_attention(heads, inputs, stack.attends(i, inputs.shape[1], topk))
        errors.append(float((found - wanted).square().sum() / wanted.square().sum()))
    return errors


def end_metric(
    stack: Stack,
    original: Sequence[LayerHeads],
    variant: Sequence[LayerHeads],
    ids: Tensor,
    topk: int | None,
) -> dict[str, Any]:
    """A decoder's perplexity of each window's second half; an encoder's cosine to the original's vectors."""
    if isinstance(stack, DecoderStack):
        return {"perplexity": _perplexity(stack, variant, ids, topk)}
    cosines = []
    for part in torch.split(ids, WINDOWS):
        theirs = stack.outcome(run(stack, original, part))
        ours = stack.outcome(run(stack, variant, part, topk))
        cosines.append(F.cosine_similarity(theirs, ours, dim=-1))
    every = torch.cat(cosines)
    return {"cosine": float(every.mean()), "lowest_cosine": float(every.min())}


def _perplexity(stack: Stack, variant: Sequence[LayerHeads], ids: Tensor, topk: int | None) -> float:
    losses = []
    half = ids.shape[1] // 2
    for part in torch.split(ids, WINDOWS):
        x = run(stack, variant, part, topk)
        for row, window in zip(x, part, strict=True):
            logits = stack.outcome(row[None, half - 1 : -1])[0]
            losses.append(F.cross_entropy(logits, window[half:]))
    return math.exp(torch.stack(losses).mean().item())


def _window_ids(source: Source, text: str, length: int) -> Tensor:
    if source.is_decoder:
        ids = torch.tensor(read_tokenizer(source.checkpoint).encode(text, add_bos=False))
        count = len(ids) // length
        return ids[: count * length].view(count, length)
    tokenizer = EncoderTokenizer(source.checkpoint.path)
    words = text.split()
    # A word has at least one token, so that a text of so many words fills a window, and what is more is cut.
    pieces = [" ".join(words[i : i + length]) for i in range(0, len(words) - length + 1, length)]
    rows = [tokenizer.encode(piece, max_tokens=length, truncate=True).ids for piece in pieces]
    return torch.tensor([row for row in rows if len(row) == length])


def _spread(rows: Tensor, most: int) -> Tensor:
    """At most ``most`` rows (at least one), evenly over all."""
    count = max(1, min(most, len(rows)))
    return rows[torch.arange(count) * len(rows) // count]
