"""The attention modules: what each computes, and that they swap for one another."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from octavo.nn import C2PSA, KVCache, LinformerAttention, MultiHeadAttention
from octavo.nn.c2psa import resolve_compress_rate

D, H = 32, 4
MODULES: dict[str, Callable[..., nn.Module]] = {
    "c2psa": lambda **kw: C2PSA(D, H, topk=3, **kw),
    "mha": lambda **kw: MultiHeadAttention(D, H, **kw),
    "materialised": lambda **kw: MultiHeadAttention(D, H, materialise=True, **kw),
    "gqa": lambda **kw: MultiHeadAttention(D, H, num_kv_heads=2, **kw),
    "linformer": lambda **kw: LinformerAttention(D, H, projected_len=6, max_len=16, **kw),
}
each = pytest.mark.parametrize("name", list(MODULES))
causal_ones = pytest.mark.parametrize("name", [n for n in MODULES if n != "linformer"])


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def build(name: str, **kw: Any) -> Any:
    return MODULES[name](**kw)


def torch_twin(module: MultiHeadAttention) -> nn.MultiheadAttention:
    twin = nn.MultiheadAttention(D, H, batch_first=True)
    assert twin.in_proj_bias is not None
    with torch.no_grad():
        parts = (module.q_proj, module.k_proj, module.v_proj)
        twin.in_proj_weight.copy_(torch.cat([p.weight for p in parts]))
        twin.in_proj_bias.copy_(torch.cat([p.bias for p in parts]))
    twin.out_proj.load_state_dict(module.out_proj.state_dict())
    return twin


@each
def test_dropout_is_off_in_evaluation_and_right_on_average(name: str) -> None:
    x = torch.randn(1, 5, D)
    plain = build(name).eval()
    module = build(name, dropout=0.3).eval()
    module.load_state_dict(plain.state_dict())
    want = plain(x)
    torch.testing.assert_close(module(x), want, atol=0, rtol=0)
    with torch.no_grad():
        runs = torch.stack([module.train()(x) for _ in range(1000)])
    error = runs.std(0) / len(runs) ** 0.5
    assert (error > 0).all()
    assert ((runs.mean(0) - want).abs() < 5 * error).all()
    with pytest.raises(ValueError, match=r"dropout must be at least 0 and less than 1, got 1\.0"):
        build(name, dropout=1.0)


@pytest.mark.parametrize("materialise", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_mha_equals_torch(materialise: bool, causal: bool) -> None:
    module = MultiHeadAttention(D, H, causal, materialise=materialise)
    x, mask = torch.randn(2, 7, D), torch.zeros(2, 7, dtype=torch.bool)
    mask[1, 4:] = True
    attn_mask = torch.ones(7, 7, dtype=torch.bool).triu(1) if causal else None
    want, _ = torch_twin(module)(x, x, x, key_padding_mask=mask, attn_mask=attn_mask)
    torch.testing.assert_close(module(x, key_padding_mask=mask), want, atol=1e-5, rtol=1e-5)


def test_c2psa_with_every_key_and_no_sharing_is_mha() -> None:
    mha, c2psa = MultiHeadAttention(D, H), C2PSA(D, H, compress_rate=1, topk=100)
    c2psa.load_state_dict(mha.state_dict())
    x = torch.randn(2, 9, D)
    torch.testing.assert_close(c2psa(x), mha(x), atol=1e-5, rtol=1e-5)


def test_sharing_is_mha_whose_grouped_heads_are_equal() -> None:
    """The definition: r heads with the same Q, K and V, and an output projection summed over each group."""
    rate, topk = 2, 100
    c2psa, mha = C2PSA(D, H, compress_rate=rate, topk=topk), MultiHeadAttention(D, H)
    with torch.no_grad():
        for name in ("q_proj", "k_proj", "v_proj"):
            small, large = getattr(c2psa, name), getattr(mha, name)
            for parameter in ("weight", "bias"):
                heads = getattr(small, parameter).unflatten(0, (H // rate, D // H))
                getattr(large, parameter).copy_(heads.repeat_interleave(rate, dim=0).flatten(0, 1))
        summed = mha.out_proj.weight.view(D, H // rate, rate, D // H).sum(2)
        c2psa.out_proj.weight.copy_(summed.flatten(1))
        c2psa.out_proj.bias.copy_(mha.out_proj.bias)
    x = torch.randn(2, 9, D)
    torch.testing.assert_close(c2psa(x), mha(x), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("rate", [1, 2, 3, 4, 6, 12])
def test_projections_shrink_by_the_rate(rate: int) -> None:
    def size(module: nn.Module) -> int:
        parts = [getattr(module, n) for n in ("q_proj", "k_proj", "v_proj")]
        return sum(p.numel() for part in parts for p in part.parameters())

    assert size(C2PSA(96, 12, compress_rate=rate)) * rate == size(MultiHeadAttention(96, 12))
    assert C2PSA(96, 12, compress_rate=rate)(torch.randn(1, 5, 96)).shape == (1, 5, 96)


@pytest.mark.parametrize(
    ("num_heads", "rate"),
    [(1, 1), (2, 2), (4, 2), (7, 1), (8, 2), (9, 3), (10, 2), (12, 4), (14, 2), (16, 4)],
)
def test_the_automatic_rate(num_heads: int, rate: int) -> None:
    assert resolve_compress_rate(num_heads, "auto") == rate
    assert C2PSA(num_heads * 8, num_heads).compress_rate == rate


@pytest.mark.parametrize("rate", [0, -1, 5, 24, 2.0, "2", True, None])
def test_a_rate_that_does_not_divide_is_refused_with_the_divisors(rate: Any) -> None:
    with pytest.raises(ValueError, match=r"num_heads=12 \(1, 2, 3, 4, 6, 12\), got"):
        C2PSA(96, 12, compress_rate=rate)


@pytest.mark.parametrize(
    ("build_it", "reason"),
    [
        (lambda: C2PSA(30, 4), "num_heads must divide d_model, got num_heads=4 and d_model=30"),
        (lambda: MultiHeadAttention(32, 0), "num_heads must divide d_model"),
        (lambda: C2PSA(32, 4, topk=0), "topk must be at least 1, got 0"),
        (lambda: C2PSA(32, 4, normalize="l1"), "normalize must be"),
        (lambda: C2PSA(32, 4, recent=3), "recent keys exist only with causal=True"),
        (lambda: C2PSA(32, 4, topk=4, causal=True, recent=5), "recent must be between 0 and topk"),
        (lambda: C2PSA(32, 4, grad_threshold=-1.0), "grad_threshold"),
        (lambda: MultiHeadAttention(32, 4, num_kv_heads=3), "num_kv_heads must divide num_heads=4, got 3"),
        (lambda: LinformerAttention(32, 4, causal=True), "cannot be causal"),
        (lambda: LinformerAttention(32, 4, 600, 512), r"between 1 and max_len \(512\), got 600"),
    ],
)
def test_construction_refuses(build_it: Callable[[], Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        build_it()


@each
def test_call_refuses(name: str) -> None:
    module, x = build(name), torch.randn(2, 5, D)
    for args, reason in (
        ({"x": x[0]}, r"x must be \[b, n, 32\], got \[5, 32\]"),
        ({"x": x[..., :8]}, r"x must be \[b, n, 32\]"),
        (
            {"x": x, "key_padding_mask": torch.zeros(2, 4, dtype=torch.bool)},
            r"must be \[2, 5\], got \[2, 4\]",
        ),
        ({"x": x, "key_padding_mask": torch.zeros(2, 5, dtype=torch.long)}, "must be bool .* or float"),
        ({"x": x, "key_padding_mask": torch.ones(2, 5)}, "0 and -inf only"),
        ({"x": x, "cache": KVCache()}, "a KV cache needs causal=True"),
    ):
        with pytest.raises(ValueError, match=reason):
            module(**args)


def test_linformer_refuses_a_longer_sequence() -> None:
    with pytest.raises(ValueError, match="at most 16 tokens, got 17"):
        build("linformer")(torch.randn(1, 17, D))


@each
def test_padding_equals_a_shorter_sequence(name: str) -> None:
    """For Linformer too: padded keys leave the sums."""
    module, x = build(name), torch.randn(2, 9, D)
    mask = torch.zeros(2, 9, dtype=torch.bool)
    mask[:, 6:] = True
    want = module(x[:, :6])
    float_mask = torch.zeros(2, 9).masked_fill(mask, float("-inf"))
    for m in (mask, float_mask):
        got = module(torch.where(mask[..., None], 1e3, x), key_padding_mask=m)
        torch.testing.assert_close(got[:, :6], want, atol=1e-5, rtol=1e-5)


@each
def test_a_sequence_of_padding_gives_the_bias_and_no_nan(name: str) -> None:
    module, x = build(name), torch.randn(2, 5, D, requires_grad=True)
    mask = torch.tensor([[True] * 5, [False] * 5])
    out = module(x, key_padding_mask=mask)
    torch.testing.assert_close(out[0], module.out_proj.bias.expand(5, D))
    out.sum().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()


@causal_ones
def test_causal_tokens_do_not_see_the_future(name: str) -> None:
    module, x = build(name, causal=True), torch.randn(2, 9, D)
    other = torch.cat([x[:, :5], torch.randn(2, 4, D)], dim=1)
    torch.testing.assert_close(module(x)[:, :5], module(other)[:, :5], atol=1e-6, rtol=1e-6)
    assert not torch.allclose(build(name)(x)[:, :5], build(name)(other)[:, :5])


@causal_ones
@pytest.mark.parametrize("chunks", [(9,), (1,) * 9, (4, 1, 1, 3), (2, 7)])
@pytest.mark.parametrize("padded", [False, True])
@torch.no_grad()
def test_a_cache_changes_nothing(name: str, chunks: tuple[int, ...], padded: bool) -> None:
    module, x = build(name, causal=True), torch.randn(2, 9, D)
    mask = torch.zeros(2, 9, dtype=torch.bool)
    if padded:
        mask[0, :5] = True  # padding in front, as a batch of prompts has it
    want = module(x, key_padding_mask=mask if padded else None)
    cache, parts, at = KVCache(), [], 0
    for size in chunks:
        # A mask only while there is something to mask, as in decoding.
        m = mask[:, at : at + size] if padded and bool(mask[:, at : at + size].any()) else None
        parts.append(module(x[:, at : at + size], key_padding_mask=m, cache=cache))
        at += size
    assert len(cache) == 9
    torch.testing.assert_close(torch.cat(parts, dim=1), want, atol=1e-5, rtol=1e-5)
    cache.clear()
    assert len(cache) == 0
    torch.testing.assert_close(module(x[:, :3], cache=cache), module(x[:, :3]), atol=1e-5, rtol=1e-5)


def test_a_cache_grows_by_doubling_and_refuses_what_does_not_fit() -> None:
    cache, moves, last = KVCache(), 0, -1
    for _ in range(1000):
        k, _, _ = cache.append(torch.ones(1, 2, 1, 4), torch.ones(1, 2, 1, 4), None)
        moves, last = moves + (k.data_ptr() != last), k.data_ptr()
    assert k.shape == (1, 2, 1000, 4)
    assert moves <= 11
    one = torch.ones(1, 2, 1, 4)
    for key, reason in ((torch.ones(2, 2, 1, 4), r"holds \[1, 2, n, 4\]"), (one.half(), "float16")):
        with pytest.raises(ValueError, match=reason):
            cache.append(key, key, None)
    with pytest.raises(ValueError, match="for inference"):
        cache.append(one.requires_grad_(), one, None)


@each
def test_state_dicts_round_trip(name: str) -> None:
    module, other, x = build(name), build(name), torch.randn(1, 6, D)
    assert not torch.equal(module(x), other(x))
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file))
    assert torch.equal(module(x), other(x))
    names = {k.rsplit(".", 1)[0] for k in module.state_dict()} - {"key_mix", "value_mix"}
    assert names == {"q_proj", "k_proj", "v_proj", "out_proj"}


def saved_bytes(module: nn.Module, x: torch.Tensor) -> int:
    """Bytes of activations that the forward pass keeps for the backward pass."""
    total: dict[int, int] = {}
    parameters = {p.data_ptr() for p in module.parameters()}

    def pack(t: torch.Tensor) -> torch.Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in parameters:
            total[storage.data_ptr()] = storage.nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        keep_alive = module(x)
    del keep_alive
    return sum(total.values())


@each
def test_checkpointing_keeps_only_the_input_and_only_in_training(name: str) -> None:
    plain, x = build(name, checkpoint=False), torch.randn(2, 12, D, requires_grad=True)
    checked = build(name, checkpoint=True)
    checked.load_state_dict(plain.state_dict())
    gradients = []
    for module in (plain, checked):
        x.grad = None
        out = module(x)
        out.square().sum().backward()
        gradients.append([out.detach(), x.grad, *(p.grad for p in module.parameters())])
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, atol=0, rtol=0)
    assert saved_bytes(checked, x) <= x.nbytes < saved_bytes(plain, x)
    checked.eval()
    assert saved_bytes(checked, x) == saved_bytes(plain, x)


def test_c2psa_is_checkpointed_unless_told_otherwise() -> None:
    assert C2PSA(D, H).checkpoint
    assert not MultiHeadAttention(D, H).checkpoint


@each
@pytest.mark.parametrize("training", [False, True])
def test_compile_gives_one_graph_and_the_same_numbers(name: str, training: bool) -> None:
    module = build(name, checkpoint=True).train(training)
    x, mask = torch.randn(2, 8, D), torch.zeros(2, 8, dtype=torch.bool)
    mask[0, 5:] = True
    compiled = torch.compile(copy.deepcopy(module), fullgraph=True, backend="aot_eager")
    results = []
    for m in (module, compiled):
        leaf = x.clone().requires_grad_()
        out = m(leaf, key_padding_mask=mask)
        out.square().sum().backward()
        results.append((out, leaf.grad, m.q_proj.weight.grad))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-6)


@each
def test_autocast(name: str) -> None:
    module, x = build(name), torch.randn(2, 8, D, requires_grad=True)
    want = module(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = module(x)
    assert out.dtype == torch.bfloat16
    # What is left of 8 bits of precision; a wrong mask or scale would be far outside.
    assert F.cosine_similarity(out.float().flatten(), want.flatten(), dim=0) > 0.99
    out.float().sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == torch.float32
    assert x.grad.isfinite().all()


@each
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_types(name: str, dtype: torch.dtype) -> None:
    module, x = build(name), torch.randn(2, 8, D)
    want, got = module(x), copy.deepcopy(module).to(dtype)(x.to(dtype))
    assert got.dtype == dtype
    assert F.cosine_similarity(got.float().flatten(), want.flatten(), dim=0) > 0.99


def test_c2psa_takes_the_call_of_torch_s_module() -> None:
    module, twin = C2PSA(D, H, compress_rate=1, topk=100), MultiHeadAttention(D, H)
    twin.load_state_dict(module.state_dict())
    reference = torch_twin(twin)
    x, memory = torch.randn(2, 5, D), torch.randn(2, 7, D)
    mask = torch.zeros(2, 7, dtype=torch.bool)
    mask[1, 3:] = True
    future = torch.ones(5, 5, dtype=torch.bool).triu(1)
    calls: list[tuple[tuple[torch.Tensor, ...], dict[str, Any]]] = [
        ((x, x, x), {}),
        ((), {"query": x, "key": memory, "value": memory, "key_padding_mask": mask}),
        ((x, memory, memory * 2, mask, False), {}),
        ((x, x, x), {"attn_mask": future, "is_causal": True, "need_weights": False}),
    ]
    for args, kwargs in calls:
        out, weights = module(*args, **kwargs)
        assert weights is None
        torch.testing.assert_close(out, reference(*args, **kwargs)[0], atol=1e-5, rtol=1e-5)


def test_c2psa_refuses_what_it_cannot_do() -> None:
    module, x = C2PSA(D, H), torch.randn(2, 5, D)
    for kwargs, reason in (
        ({"key": x, "value": x, "need_weights": True}, "n x n weights"),
        ({"key": x, "value": x, "attn_mask": torch.zeros(5, 5)}, "takes no attn_mask"),
        ({"key": x}, "together or not at all"),
        ({"key": x, "value": x, "cache": KVCache(), "is_causal": True}, "for self-attention"),
        ({"x": None}, "needs x"),
    ):
        with pytest.raises(ValueError, match=reason):
            module(**{"x": x, **kwargs})


@pytest.mark.parametrize("training", [False, True])
def test_c2psa_inside_torch_s_encoder(training: bool) -> None:
    """Put in place of self_attn it is used, in training and where torch would take its own fast path."""
    layer = nn.TransformerEncoderLayer(D, H, 64, dropout=0.0, batch_first=True)
    c2psa = C2PSA(D, H, compress_rate=1, topk=100)
    reference = MultiHeadAttention(D, H)
    reference.load_state_dict(c2psa.state_dict())
    swapped = copy.deepcopy(layer)
    swapped.self_attn = c2psa
    layer.self_attn = torch_twin(reference)
    x, mask = torch.randn(2, 6, D), torch.zeros(2, 6, dtype=torch.bool)
    mask[1, 4:] = True
    want, got = (
        nn.TransformerEncoder(m, 2, enable_nested_tensor=False).train(training)(x, src_key_padding_mask=mask)
        for m in (layer, swapped)
    )
    seen = ~mask
    torch.testing.assert_close(got[seen], want[seen], atol=1e-5, rtol=1e-5)
    sparse = copy.deepcopy(swapped)
    sparse.self_attn.topk = 1
    assert not torch.allclose(sparse.train(training)(x), swapped.train(training)(x))


@pytest.mark.parametrize("name", ["c2psa", "mha", "linformer"])
def test_a_module_learns(name: str) -> None:
    """The gradients are good for something: predict at every place which of the tokens is marked."""
    module = build(name)
    head = nn.Linear(D, 1)
    optimizer = torch.optim.Adam([*module.parameters(), *head.parameters()], lr=1e-2)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(120):
        x = torch.randn(16, 8, D, generator=generator)
        sign = torch.randint(0, 2, (16,), generator=generator).float()
        x[torch.arange(16), torch.randint(0, 8, (16,), generator=generator), :2] = torch.stack(
            [torch.full((16,), 8.0), (sign * 2 - 1) * 8.0], dim=1
        )
        loss = F.binary_cross_entropy_with_logits(head(module(x))[:, 0, 0], sign)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert sum(losses[-20:]) / 20 < 0.2, losses[-5:]
