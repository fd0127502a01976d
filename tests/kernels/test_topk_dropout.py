"""Top-k attention with dropout: at 0 and on average it is top-k attention; only kept weights are dropped."""

from __future__ import annotations

import pytest
import torch

from octavo.kernels import topk, topk_dropout
from octavo.kernels.topk import topk_attention
from octavo.nn import C2PSA

B, H, KV, N, D = 2, 4, 2, 9, 8


def tensors(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    torch.manual_seed(0)
    shapes = ((B, H, N, D), (B, KV, N, D), (B, KV, N, D))
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def masks() -> list[torch.Tensor | None]:
    padding = torch.zeros(B, N, dtype=torch.bool)
    padding[0, 4:] = True
    padding[1] = True  # rows without a key
    return [None, padding]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("normalize", [None, "l2"])
@pytest.mark.parametrize("tile", [1 << 24, 2 * B * H * N, 1])
@pytest.mark.parametrize("mask", masks(), ids=["all", "padded"])
def test_without_dropout_it_is_topk_attention(
    causal: bool, normalize: str | None, tile: int, mask: torch.Tensor | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Output and gradients, in one tile and in many."""
    monkeypatch.setattr(topk_dropout, "TILE_SCORES", tile)
    told = {"causal": causal, "normalize": normalize, "key_padding_mask": mask}
    made = []
    for mine in (False, True):
        q, k, v = tensors()
        if mine:
            spec = topk.make_spec(
                3, D, causal=causal, recent=None, scale=None, normalize=normalize, num_keys=N
            )
            with torch.no_grad():
                position = topk._forward(q, k, v, mask, *spec, 0.0, True)[2]
            out = topk_dropout.attend(q, k, v, position, spec, 0.0)
        else:
            out = topk_attention(q, k, v, 3, **told)
        weights = torch.linspace(-1, 1, out.numel()).view(out.shape)
        made.append([out, *torch.autograd.grad((out * weights).sum(), (q, k, v))])
    for got, want in zip(*made, strict=True):
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


def test_on_average_nothing_is_lost() -> None:
    q, k, v = (x.detach() for x in tensors())
    want = topk_attention(q, k, v, 3)
    torch.manual_seed(1)
    runs = torch.stack([topk_attention(q, k, v, 3, dropout_p=0.3) for _ in range(2000)])
    error = runs.std(0) / len(runs) ** 0.5
    assert ((runs.mean(0) - want).abs() < 5 * error + 1e-6).all()
    assert (error > 0).all()


def test_a_kept_weight_is_dropped_or_scaled_and_no_other_counts() -> None:
    """Values that are unit vectors show the weights."""
    q, k = torch.randn(1, 1, N, D), torch.randn(1, 1, N, D)
    v = torch.eye(N)[None, None]
    whole = topk_attention(
        torch.nn.functional.pad(q, (0, 1)), torch.nn.functional.pad(k, (0, 1)), v, 4, scale=1.0
    )
    some = topk_attention(
        torch.nn.functional.pad(q, (0, 1)),
        torch.nn.functional.pad(k, (0, 1)),
        v,
        4,
        scale=1.0,
        dropout_p=0.25,
    )
    kept = some != 0
    assert (whole[kept] > 0).all()
    torch.testing.assert_close(some[kept], whole[kept] / 0.75, atol=1e-6, rtol=1e-5)
    assert 0 < (kept & (whole > 0)).sum() < (whole > 0).sum()


def test_double_precision_agrees_with_finite_differences() -> None:
    q, k, v = (x[:1, :2, :5, :4].detach().requires_grad_() for x in tensors(torch.float64))

    def run(*qkv: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(3)
        return topk_attention(*qkv, 3, dropout_p=0.4)

    assert torch.autograd.gradcheck(run, (q, k, v))


@pytest.mark.parametrize("dropout", [-0.1, 1.0, float("nan")])
def test_shares_that_are_refused(dropout: float) -> None:
    q, k, v = tensors()
    with pytest.raises(ValueError, match="dropout_p must be at least 0 and less than 1"):
        topk_attention(q, k, v, 3, dropout_p=dropout)
    with pytest.raises(ValueError, match="dropout must be at least 0 and less than 1"):
        C2PSA(32, 4, dropout=dropout)


def test_the_threshold_of_gradients_is_refused_beside_it() -> None:
    with pytest.raises(ValueError, match="grad_threshold and dropout_p cannot both be above 0"):
        C2PSA(32, 4, grad_threshold=0.1, dropout=0.1)
