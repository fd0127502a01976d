"""Prompts, parameters and a cache-free forward pass for tests of the engine over the tiny model."""

from __future__ import annotations

import random

import torch

from octavo.request import SamplingParams

EOS = 256
VOCAB = 259


def prompt(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(f"{seed}/{length}")
    return [rng.randrange(32, 127) for _ in range(length)]


def greedy(max_tokens: int = 8, **kw) -> SamplingParams:
    return SamplingParams(**({"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True} | kw))


def always(token: int, **kw) -> SamplingParams:
    return SamplingParams(**({"temperature": 0.0, "logit_bias": {token: 1e5}} | kw))


def dense_logits(model, tokens: list[int]) -> torch.Tensor:
    """The tiny model without a cache: [len(tokens), head width]."""
    ids = torch.tensor(tokens)
    x = model.embedding[ids]
    x = x + torch.sin(torch.arange(len(ids))[:, None] * torch.linspace(0.01, 1.0, x.shape[1]))
    q = (x @ model.q).view(len(ids), 4, 8).transpose(0, 1)
    k, v = ((x @ w).view(len(ids), 2, 8).transpose(0, 1).repeat_interleave(2, 0) for w in model.kv)
    out = torch.nn.functional.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0]
    return (x + out.transpose(0, 1).flatten(1) @ model.out) @ model.head


def dense_greedy(model, tokens: list[int], count: int) -> list[int]:
    tokens = list(tokens)
    for _ in range(count):
        tokens.append(int(dense_logits(model, tokens)[-1, :VOCAB].argmax()))
    return tokens[-count:]


def tokens(output, index: int = 0) -> list[int]:
    assert output.error is None
    return output.outputs[index].token_ids


# ---- the one path
