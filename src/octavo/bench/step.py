"""``octavo bench step``: what a step of one stream spends outside linear layers and attention.

A step is all of :meth:`octavo.engine.engine.Engine.step`: scheduling, the tensors of the step, the model,
sampling, text. Every other step runs layer by layer, as the engine runs those that need it, and the native
calls of attention within it are timed. All products of the model run once more after each whole step, on
the same weights; what their calls cost from Python, which the engine calls from within native code, is
measured on a product of next to nothing and taken off. So what is left holds norms, rotation, activations,
cache writes and everything that is Python.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from rich.table import Table

from octavo.attention.backend import AttentionBackend, Step
from octavo.bench.machine import machine, versions
from octavo.bench.perplexity import way
from octavo.config import CacheConfig, EngineConfig, SchedulerConfig
from octavo.engine.build import assemble, attention_spec, load
from octavo.kernels import fused
from octavo.kernels.api import KVLayer
from octavo.kernels.linear import PackedLinear, StoredMatrix
from octavo.kernels.native import _native
from octavo.models.native import NativeDecoder
from octavo.request import SamplingParams
from octavo.weights import hub
from octavo.weights.load import open_checkpoint

#: Steps that are not counted: memory is touched, threads are awake.
WARM_UP = 3
CALLS = 200


class TimedBackend(AttentionBackend):
    """Attention that, while ``watching``, is called layer by layer, and adds up the seconds of its kernel."""

    watching = False
    seconds = 0.0

    def one_pass(self, step: Step) -> fused.Plan | None:
        return None if self.watching else super().one_pass(step)

    def run(self, q: torch.Tensor, layer: KVLayer, step: Step) -> torch.Tensor:
        timed = TimedPlan(step.attention.native)
        out = super().run(q, layer, replace(step, attention=step.attention._replace(native=timed)))
        self.seconds += timed.seconds
        return out


class TimedPlan:
    """Stands in for a native plan."""

    def __init__(self, native: _native.AttentionPlan) -> None:
        self.num_tokens = native.num_tokens
        self.seconds = 0.0
        self._native = native

    def run(self, *args: Any) -> None:
        start = time.perf_counter()
        self._native.run(*args)
        self.seconds += time.perf_counter() - start


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of one step, of attention in the step after it, and of all its products made once more."""

    step: float
    attention: float
    linear: float

    @property
    def outside(self) -> float:
        return self.step - self.attention - self.linear


def run(
    model: str,
    ways: Sequence[str],
    *,
    context: int,
    steps: int,
    threads: int,
    report: Callable[[str], None],
) -> dict[str, Any]:
    """Decode ``steps`` tokens after a prompt of ``context`` in each of ``ways``: "float16", "q8_0/int8".

    Raises ValueError for weights that the model cannot be kept in.
    """
    rows = {}
    for name in ways:
        config = _config(model, name, context + 2 * (WARM_UP + steps) + 1, threads)
        rows[name] = measure(config, context=context, steps=steps)
        report(f"{name}: {rows[name]['step_ms']:.2f} ms, {rows[name]['share_outside']:.1%} outside")
    return {
        "bench": "step",
        "model": model.rpartition("/")[2],
        "context": context,
        "steps": steps,
        "threads": threads,
        "machine": machine(),
        "versions": versions(),
        "weights": rows,
    }


def _config(model: str, name: str, max_model_len: int, threads: int) -> EngineConfig:
    weights, activations = way(name)
    return EngineConfig(
        model=model,
        cache=CacheConfig(enable_prefix_caching=False),
        scheduler=SchedulerConfig(max_num_seqs=1, max_model_len=max_model_len),
        weights=weights,
        activations=activations,
        num_threads=threads,
    )


def measure(config: EngineConfig, *, context: int, steps: int) -> dict[str, Any]:
    """Milliseconds of the parts of a step, medians over ``steps`` of them."""
    loaded = load(open_checkpoint(hub.resolve(config.model)), config)
    attention = TimedBackend("fused", attention_spec(config, loaded.config), loaded.pool)
    engine = assemble(config, loaded, attention=attention)
    assert isinstance(loaded.decoder, NativeDecoder)
    products = loaded.decoder.linears()
    calls, kept = prepare(products)
    call_s = call_seconds(products[0])
    prompt = [i % loaded.vocab_size for i in range(1, context + 1)]
    most = 2 * (WARM_UP + steps) + 1
    engine.add_request(prompt, SamplingParams(temperature=0, max_tokens=most, ignore_eos=True))
    # The prompt's steps give one token at their end.
    while not any(output.outputs[0].token_ids for output in engine.step()):
        pass
    times = []
    with torch.inference_mode():
        for _ in range(WARM_UP + steps):
            start = time.perf_counter()
            engine.step()
            between = time.perf_counter()
            for call in calls:
                call()
            linear_s = time.perf_counter() - between - call_s * len(products)
            attention.watching, attention.seconds = True, 0.0
            engine.step()
            attention.watching = False
            times.append(Times(between - start, attention.seconds, linear_s))
    del kept
    weight_bytes = sum(weight.bytes for linear in products for weight in linear.weights)
    return _row(times[WARM_UP:], weight_bytes, call_s)


def prepare(products: Sequence[PackedLinear]) -> tuple[list[Callable[[], None]], list[torch.Tensor]]:
    """Native calls on one row each, and the tensors that they work on."""
    calls, kept = [], []
    for linear in products:
        x, out = torch.randn(1, linear.inputs), torch.empty(1, linear.outputs)
        calls.append(linear.prepare(x, out))
        kept += [x, out]
    return calls, kept


def call_seconds(like: PackedLinear) -> float:
    """What a call of a product costs that has next to nothing to compute."""
    small = PackedLinear(32, {"w": 16}, like.pool)
    small.pack("w", StoredMatrix.of(torch.zeros(16, 32)))
    (call,), kept = prepare([small])
    seconds = []
    for _ in range(CALLS):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    del kept
    return statistics.median(seconds)


def _row(times: Sequence[Times], weight_bytes: int, call_s: float) -> dict[str, Any]:
    def median_ms(values: Sequence[float]) -> float:
        return statistics.median(values) * 1e3

    linear_ms = median_ms([t.linear for t in times])
    return {
        "step_ms": median_ms([t.step for t in times]),
        "linear_ms": linear_ms,
        "attention_ms": median_ms([t.attention for t in times]),
        "outside_ms": median_ms([t.outside for t in times]),
        "share_outside": statistics.median(t.outside / t.step for t in times),
        "weight_bytes": weight_bytes,
        "linear_gb_per_s": weight_bytes / linear_ms / 1e6,
        "call_us": call_s * 1e6,
        "step_ms_all": [t.step * 1e3 for t in times],
    }


def table(result: dict[str, Any]) -> Table:
    """A line for each way of keeping the weights."""
    made = Table(
        "weights",
        "step, ms",
        "linear",
        "attention",
        "outside",
        "share outside",
        "linear reads",
        title=_title(result),
    )
    for name, row in result["weights"].items():
        made.add_row(
            name,
            *(f"{row[part]:.2f}" for part in ("step_ms", "linear_ms", "attention_ms", "outside_ms")),
            f"{row['share_outside']:.1%}",
            f"{row['linear_gb_per_s']:.1f} GB/s",
        )
    return made


def _title(result: dict[str, Any]) -> str:
    return f"one stream of {result['model']} after {result['context']} tokens"
