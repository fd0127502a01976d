"""Top-k attention as a public function: what it refuses, torch's machinery around it, and its memory."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch

import octavo
from octavo.kernels import topk

Q = torch.randn(2, 4, 5, 8)
KV = torch.randn(2, 2, 7, 8)


def test_it_is_public() -> None:
    assert octavo.topk_attention is topk.topk_attention


@pytest.mark.parametrize(
    ("args", "settings", "reason"),
    [
        ((Q, KV, KV, 0), {}, "topk must be at least 1, got 0"),
        ((Q, KV, KV, 4), {"normalize": "l1"}, "normalize must be None or 'l2', got 'l1'"),
        ((Q, KV, KV, 4), {"recent": 2}, "recent keys exist only with causal=True, got recent=2"),
        ((Q, KV, KV, 4), {"causal": True, "recent": 5}, r"recent must be between 0 and topk \(4\), got 5"),
        ((Q, KV, KV, 4), {"causal": True, "recent": -1}, "recent must be between 0"),
        ((Q, KV, KV, 4), {"scale": 0.0}, "scale must be a positive finite number, got 0.0"),
        ((Q, KV, KV, 4), {"scale": float("nan")}, "scale must be a positive"),
        ((Q, KV, KV, 4), {"grad_threshold": -1.0}, "grad_threshold must be .* got -1.0"),
        ((Q, KV[:, :, :4], KV[:, :, :4], 4), {"causal": True}, "as many keys as queries, got 4 and 5"),
        ((Q[0], KV, KV, 4), {}, r"q must be \[b, h, n, d\]"),
        ((Q, KV, KV[:, :, :6], 4), {}, r"k and v \[b, h_kv, m, d\]"),
        ((Q[:1], KV, KV, 4), {}, r"q must be \[b, h, n, d\]"),
        ((Q[..., :4], KV, KV, 4), {}, "same head size, got 4 and 8"),
        ((Q[:, :3], KV, KV, 4), {}, "h must be a multiple of h_kv, got 3 and 2"),
        ((Q.half(), KV, KV, 4), {}, "one dtype"),
        ((Q.long(), KV.long(), KV.long(), 4), {}, "one dtype"),
        ((Q, KV.to("meta"), KV.to("meta"), 4), {}, "on one device"),
        ((Q, KV, KV, 4), {"key_padding_mask": torch.zeros(2, 7)}, r"\[2, 7\] bool .* True = padding"),
        ((Q, KV, KV, 4), {"key_padding_mask": torch.zeros(2, 5, dtype=torch.bool)}, r"\[2, 7\] bool"),
    ],
)
def test_it_refuses(args: Any, settings: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        topk.topk_attention(*args, **settings)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("save", [True, False])
def test_operator_is_what_it_claims(dtype: torch.dtype, save: bool) -> None:
    """torch's own checks: schema, shapes and strides of the fake version, autograd registration."""
    q, k, v = Q.to(dtype), KV.to(dtype), KV.to(dtype)
    mask = torch.zeros(2, 7, dtype=torch.bool)
    if save:
        q, k, v = (t.clone().requires_grad_() for t in (q, k, v))
    utilities = ("test_schema", "test_faketensor", *(("test_aot_dispatch_dynamic",) if save else ()))
    with torch.set_grad_enabled(save):
        torch.library.opcheck(
            torch.ops.octavo.topk_attention.default,
            (q, k, v, mask, 3, 0, False, 0.5, False, 0.0, save),
            test_utils=utilities,
        )


def test_second_derivatives_are_refused() -> None:
    q = Q.double().clone().requires_grad_()
    (grad,) = torch.autograd.grad(
        topk.topk_attention(q, KV.double(), KV.double(), 3).sum(), q, create_graph=True
    )
    with pytest.raises(RuntimeError):
        grad.sum().backward()


def test_compiled_whole() -> None:
    """One graph, no breaks, the same numbers, forward and backward."""

    def attend(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return topk.topk_attention(q * 2, k, k, 3, causal=True).square()

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    results = []
    for f in (attend, compiled):
        q, k = Q.clone().requires_grad_(), KV.clone().requires_grad_()
        out = f(q, k)
        out.sum().backward()
        results.append((out, q.grad, k.grad))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, atol=0, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_autocast_does_not_reach_inside(dtype: torch.dtype) -> None:
    q, k = Q.to(dtype), KV.to(dtype)
    want = topk.topk_attention(q, k, k, 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = topk.topk_attention(q, k, k, 3)
    assert torch.equal(got, want)


MEASURE = r"""
import re, sys, torch
from octavo.kernels import topk_native, topk_tiled
from octavo.kernels.topk import make_spec
torch.set_num_threads(1)
module = {"native": topk_native, "tiled": topk_tiled}[sys.argv[1]]
n, k = int(sys.argv[2]), int(sys.argv[3])
def run(n):
    spec = make_spec(k, 16, causal=False, recent=None, scale=None, normalize=None, num_keys=n)
    q, key, value = (torch.randn(1, 1, n, 16) for _ in range(3))
    out, kept = module.forward(q, key, value, None, spec, save=True)
    module.backward(out, (q, key, value), kept, spec, 0.0)
def high_water():
    return int(re.search(r"VmHWM:\s+(\d+) kB", open("/proc/self/status").read())[1]) * 1024
run(64)
before = high_water()
run(n)
print(high_water() - before)
"""


def peak(name: str, n: int, k: int) -> int:
    """Bytes that forward and backward of n queries and keys add to a fresh process's peak."""
    command = [sys.executable, "-c", MEASURE, name, str(n), str(k)]
    # A fixed threshold, so that what is freed goes back at once and no luck of the heap is measured.
    env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    return int(subprocess.run(command, capture_output=True, text=True, check=True, env=env).stdout)


def test_native_memory_grows_with_n_times_k() -> None:
    """n x n scores would take 256 MiB at n = 8,192; the law: at most so many bytes for each kept key."""
    k = 16
    for n in (4096, 8192):
        used = peak("native", n, k)
        # Position, weight and score gradient: 12 bytes a kept key. q, k, v, out and gradients: 64 a row.
        assert used < 12 * n * k + 9 * 64 * n + (4 << 20), f"{used} bytes at n = {n}"


@pytest.mark.slow
def test_tiled_memory_grows_with_n_times_k() -> None:
    """A tile's temporaries are the same at both lengths; n x n scores would add 128 MiB."""
    k, small, large = 8, 2048, 6144
    grown = peak("tiled", large, k) - peak("tiled", small, k)
    assert grown < (12 * k + 12 * 64) * (large - small) + (16 << 20), f"{grown} bytes"


def test_the_measurement_sees_a_dense_matrix() -> None:
    """The other two could not fail if the measure were blind: with k = n the kept weights are n x n."""
    assert peak("native", 2048, 2048) > 12 * 2048 * 2048


def test_a_forked_process_has_threads_of_its_own() -> None:
    """As a data loader's worker: the parent's threads do not exist there."""
    code = """
import os, torch
torch.set_num_threads(2)
from octavo import topk_attention
q = torch.randn(1, 2, 300, 16)
want = topk_attention(q, q, q, 5)
child = os.fork()
if child == 0:
    os._exit(0 if torch.equal(topk_attention(q, q, q, 5), want) else 3)
assert os.waitpid(child, 0)[1] == 0
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
