"""``octavo run``: one answer with ``--prompt``, a chat without."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from octavo.cli import options as opt
from octavo.cli.answer import Answer, InterruptFlag, receive
from octavo.cli.errors import INTERRUPTED, USAGE, CommandError, plainly
from octavo.cli.explain import check_plot
from octavo.cli.explain import explain as show_reads
from octavo.request import SamplingParams
from octavo.weights.hub import DEFAULT_MODEL

if TYPE_CHECKING:
    from octavo.llm import LLM


@dataclass(frozen=True, slots=True)
class OneShot:
    """What ``--prompt`` asks for beside the sampling."""

    prompt: str
    system: str | None
    raw: bool
    as_json: bool
    plot: Path | None


def run(  # noqa: PLR0913  (each argument is an option of the command)
    model: opt.Model = DEFAULT_MODEL,
    prompt: Annotated[
        str | None, typer.Option("--prompt", "-p", help="Answer this and exit; - reads it from stdin.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="With --prompt: print one JSON object instead of the text.")
    ] = False,
    raw: Annotated[
        bool,
        typer.Option("--raw", help="With --prompt: continue the text as it is, without the chat template."),
    ] = False,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="The system prompt of the chat.")] = None,
    temperature: opt.Temperature = 0.7,
    top_p: opt.TopP = 0.95,
    top_k: opt.TopK = 0,
    min_p: opt.MinP = 0.0,
    max_tokens: opt.MaxTokens = 512,
    seed: opt.Seed = None,
    stop: opt.Stop = None,
    attention: opt.Attention = "fused",
    weights: opt.Weights = "auto",
    activations: opt.Activations = "float32",
    threads: opt.Threads = None,
    kv_dtype: opt.KVDtype = "float32",
    kv_cache_memory: opt.KVCacheMemory = None,
    block_size: opt.BlockSize = 16,
    max_model_len: opt.MaxModelLen = None,
    history: opt.History = "exact",
    history_window: opt.HistoryWindow = 512,
    history_values: opt.HistoryValues = "int8",
    history_budget: opt.HistoryBudget = None,
    history_recall: opt.HistoryRecall = None,
    attn_topk: opt.AttnTopk = "0",
    attn_topk_mode: opt.AttnTopkMode = "exact",
    attn_topk_tail: opt.AttnTopkTail = None,
    dense_layers: opt.DenseLayers = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Show which positions top-k attention read for each answer.")
    ] = False,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.png", help="Also write what --explain shows as PNG.")
    ] = None,
) -> None:
    """Chat with a model, or answer one --prompt.

    Without --prompt it reads turns from the terminal, or one turn a line from a pipe, to the end of input.

    In the chat, /help lists its commands and Ctrl-C stops an answer.
    """
    if prompt is None and (as_json or raw):
        raise CommandError(f"{'--json' if as_json else '--raw'} needs --prompt", USAGE)
    if raw and system is not None:
        raise CommandError("--system needs the chat template, which --raw leaves out", USAGE)
    if plot is not None and not explain:
        raise CommandError("--plot needs --explain", USAGE)
    if explain and not attn_topk:
        raise CommandError("--explain needs --attn-topk: dense attention reads all keys", USAGE)
    check_plot(plot)
    with plainly(USAGE):
        params = SamplingParams(
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            max_tokens=max_tokens,
            seed=seed,
            stop=stop or None,
            attn_explain=explain,
        )
    if prompt == "-":
        prompt = sys.stdin.read()
    engine = {
        "attention": attention,
        "weights": weights,
        "activations": activations,
        "block_size": block_size,
        "kv_dtype": kv_dtype,
        "kv_cache_memory": kv_cache_memory,
        "max_model_len": max_model_len,
        "history": history,
        "history_window": history_window,
        "history_values": history_values,
        "history_budget": history_budget,
        "history_recall": history_recall,
        "num_threads": threads,
        "attn_topk": attn_topk,
        "attn_topk_mode": attn_topk_mode,
        "attn_topk_tail": attn_topk_tail,
        "dense_layers": opt.parse_layers(dense_layers),
    }
    start = time.perf_counter()
    llm = load(model, engine)
    load_s = time.perf_counter() - start
    if not raw and not llm.tokenizer.has_chat_template:
        raise CommandError(f"{model} is a base model without a chat template: use --raw --prompt TEXT")
    if prompt is None:
        from octavo.cli.chat import chat

        chat(llm, params, system, plot)
    else:
        _answer_once(llm, OneShot(prompt, system, raw, as_json, plot), params, load_s)


def load(model: str, engine: dict[str, Any]) -> LLM:
    """The engine with the model in it, behind a spinner on a terminal."""
    console = Console(stderr=True)
    with plainly(), console.status(f"Loading {model} ..."):
        from octavo import LLM

        llm = LLM(model, **engine)
        llm.engine  # noqa: B018  (an encoder is refused here, in one sentence)
        return llm


def describe(llm: LLM) -> dict[str, Any]:
    """What computes: the attention backend, its instruction set, how weights are kept, and activations."""
    from octavo.engine.build import isa

    config = llm.engine.config
    return {
        "attention": config.attention,
        "isa": isa(config.attention),
        "weights": config.weights,
        "activations": config.activations,
    }


def messages_of(prompt: str, system: str | None) -> list[dict[str, str]]:
    before = [] if system is None else [{"role": "system", "content": system}]
    return [*before, {"role": "user", "content": prompt}]


def _answer_once(llm: LLM, ask: OneShot, params: SamplingParams, load_s: float) -> None:
    def write(piece: str) -> None:
        if not ask.as_json:
            print(piece, end="", flush=True)

    with plainly():
        if ask.raw:
            stream = llm.stream(ask.prompt, params)
        else:
            stream = llm.stream_chat(messages_of(ask.prompt, ask.system), params)
        with InterruptFlag() as interrupt:
            answer = receive(stream, write, interrupt)
    if ask.as_json:
        print(json.dumps(_as_json(answer, load_s) | describe(llm), ensure_ascii=False))
    else:
        print()
        if sys.stderr.isatty():
            print(answer.summary(), file=sys.stderr)
    if params.attn_explain:
        show_reads(answer.output, Console(stderr=True), ask.plot)
    if answer.interrupted:
        raise typer.Exit(INTERRUPTED)


def _as_json(answer: Answer, load_s: float) -> dict[str, Any]:
    output = answer.output
    choice = output.outputs[0] if output and output.outputs else None
    return {
        "text": answer.text,
        "token_ids": choice.token_ids if choice else [],
        "finish_reason": "abort" if answer.interrupted else (choice.finish_reason if choice else None),
        "stop_reason": choice.stop_reason if choice else None,
        "num_prompt_tokens": len(output.prompt_token_ids) if output else None,
        "num_cached_tokens": output.num_cached_tokens if output else None,
        "num_disk_tokens": output.num_disk_tokens if output else None,
        "num_compact_tokens": output.num_compact_tokens if output else None,
        "num_summarised_tokens": output.num_summarised_tokens if output else None,
        "cache_miss_reason": output.cache_miss_reason if output else None,
        "attn_topk": asdict(output.attn_topk) if output and output.attn_topk else None,
        "attn_reads": asdict(output.attn_reads) if output and output.attn_reads else None,
        "history": asdict(output.history) if output and output.history else None,
        "timings": {
            "load_s": round(load_s, 4),
            "first_token_s": None if answer.first_token_s is None else round(answer.first_token_s, 4),
            "total_s": round(answer.total_s, 4),
            "tokens_per_s": None if answer.tokens_per_s is None else round(answer.tokens_per_s, 2),
        },
    }
