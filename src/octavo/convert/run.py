"""``convert``: an MHA checkpoint in, a C2PSA one out, with what each step did to the quality."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from octavo.config import ModelConfig
from octavo.convert.evaluate import (
    LayerPair,
    Windows,
    end_metric,
    layer_errors,
    layer_pairs,
    moment_roots,
    read_windows,
)
from octavo.convert.heads import LayerHeads
from octavo.convert.pool import METHODS, Method, Plan, plan, pool
from octavo.convert.recover import Recovery, recover
from octavo.convert.source import Source, read_source
from octavo.convert.stack import Stack, load_stack
from octavo.convert.write import check_free, new_folder, write_model
from octavo.nn.c2psa import resolve_compress_rate
from octavo.request import check_int
from octavo.weights.load import open_checkpoint

Progress = Callable[[str, int], Callable[[], None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What to make. ``text`` is what the heads are fitted to and measured on, or None for neither.

    ``window`` and ``tokens``: how long the text's windows are, at most as long as the model takes, and how
    many tokens are fitted to at most; half as many are measured on.
    """

    compress_rate: int | Literal["auto"] = "auto"
    topk: int = 64
    method: Method = "aligned"
    text: str | None = None
    recovery: Recovery = field(default_factory=Recovery)
    window: int = 256
    tokens: int = 16_384


@dataclass(frozen=True, slots=True)
class Conversion:
    """The heads that come out, and the report of how."""

    source: Source
    rate: int
    topk: int
    heads: list[LayerHeads]
    report: dict[str, Any]


def convert(path: Path, out: Path, options: Options, progress: Progress) -> dict[str, Any]:
    """Convert the checkpoint at ``path`` into the folder ``out``; returns the report.

    ``progress(what, steps)`` is called before something long and returns what to call after each step.
    Raises ValueError, in one sentence, for a model, an option or a folder that cannot be used.
    """
    check_free(out)
    made = compute(path, options, progress)
    with new_folder(out) as folder:
        write_model(made.source, made.heads, made.rate, made.topk, folder)
    return made.report


def compute(path: Path, options: Options, progress: Progress) -> Conversion:
    """As ``convert``, without writing."""
    check_int("topk", options.topk, 1)
    check_int("tokens", options.tokens, 1)
    check_int("steps", options.recovery.steps, 0)
    check_int("seed", options.recovery.seed, 0)
    if options.method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(METHODS)}, got {options.method!r:.100}")
    source = read_source(open_checkpoint(path))
    rate = resolve_compress_rate(source.counts.num_heads, options.compress_rate)
    report = _head_report(source, rate, options)
    if options.text is None:
        original = source.heads()
        plans = _plans(source, original, rate, None, progress)
        report["pooling_error"] = {method: [made.error for made in plans[method]] for method in METHODS}
        return Conversion(source, rate, options.topk, _pooled(original, plans[options.method]), report)
    windows = read_windows(source, options.text, _length(source, options), options.tokens)
    return _fitted(source, rate, windows, options, report, progress)


def _fitted(
    source: Source, rate: int, windows: Windows, options: Options, report: dict[str, Any], progress: Progress
) -> Conversion:
    original = source.heads()
    stack = load_stack(source.checkpoint, source.config)
    # A decoder attends to all keys unless it is told otherwise, so its heads are fitted to that.
    topk = None if source.is_decoder else options.topk
    with torch.no_grad():
        roots = moment_roots(stack, original, windows.fit)
        plans = _plans(source, original, rate, roots, progress)
        pairs = layer_pairs(stack, original, windows.held_out)
    report["pooling_error"] = {method: [made.error for made in plans[method]] for method in METHODS}
    measured = _Measured(stack, original, windows.held_out, pairs)
    steps = report["steps"] = [measured.step("original", original, None)]
    if topk is not None and topk < windows.held_out.shape[1]:
        steps.append(measured.step("original, top-k", original, topk))
    for method in METHODS:
        variant = _pooled(original, plans[method])
        steps.append(measured.step("mean-pooled" if method == "mean" else "aligned", variant, topk))
    pooled = _pooled(original, plans[options.method])
    name = f"{'mean-pooled' if options.method == 'mean' else 'aligned'}+distilled"
    step_done = progress("distil", len(original) * (options.recovery.steps + 1))
    start = time.monotonic()
    fitted = recover(stack, original, pooled, windows.fit, topk, options.recovery, step_done)
    report["distillation"] = {
        "seconds": round(time.monotonic() - start, 1),
        "seed": options.recovery.seed,
        "steps_a_layer": options.recovery.steps,
        "fitted_tokens": windows.fit.numel(),
        "held_out_tokens": windows.held_out.numel(),
        "window": windows.fit.shape[1],
        "target_error_before": fitted.before,
        "target_error_after": fitted.after,
    }
    steps.append(measured.step(name, fitted.heads, topk))
    return Conversion(source, rate, options.topk, fitted.heads, report)


@dataclass(frozen=True, slots=True)
class _Measured:
    stack: Stack
    original: Sequence[LayerHeads]
    ids: Tensor
    pairs: Sequence[LayerPair]

    @torch.no_grad()
    def step(self, name: str, variant: Sequence[LayerHeads], topk: int | None) -> dict[str, Any]:
        errors = layer_errors(self.stack, self.pairs, variant, topk)
        return {
            "step": name,
            **end_metric(self.stack, self.original, variant, self.ids, topk),
            "layer_error": sum(errors) / len(errors),
            "layer_errors": errors,
        }


def _plans(
    source: Source,
    heads: Sequence[LayerHeads],
    rate: int,
    roots: Sequence[Tensor] | None,
    progress: Progress,
) -> dict[Method, list[Plan]]:
    done = progress("align", len(heads))
    plans: dict[Method, list[Plan]] = {method: [] for method in METHODS}
    for i, layer in enumerate(heads):
        root = None if roots is None else roots[i]
        for method in METHODS:
            plans[method].append(plan(layer, rate, method, source.family, root))
        done()
    return plans


def _pooled(heads: Sequence[LayerHeads], plans: Sequence[Plan]) -> list[LayerHeads]:
    return [pool(layer, made) for layer, made in zip(heads, plans, strict=True)]


def _length(source: Source, options: Options) -> int:
    check_int("window", options.window, 8)
    config = source.config
    most = config.max_position_embeddings if isinstance(config, ModelConfig) else config.max_tokens
    return min(options.window, most)


def _head_report(source: Source, rate: int, options: Options) -> dict[str, Any]:
    config, counts = source.config, source.counts
    left = counts.pooled(rate)

    def weights(heads: int, kv_heads: int) -> int:
        return config.num_layers * config.hidden_size * config.head_dim * 2 * (heads + kv_heads)

    return {
        "model": source.checkpoint.path.name,
        "compress_rate": rate,
        "topk": options.topk,
        "method": options.method,
        "num_heads": [counts.num_heads, left.num_heads],
        "num_kv_heads": [counts.num_kv_heads, left.num_kv_heads],
        "head_dim": config.head_dim,
        "attention_weights": [weights(*counts), weights(*left)],
    }
