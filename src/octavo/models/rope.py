"""Rotary positions: frequencies with their scalings, the table of cosines and sines, the rotation."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from octavo.config import RopeConfig
from octavo.kernels.history_layout import FAN, GROUP, MAX_LEVELS, tokens_of

#: Rows of the table are computed in chunks of this many positions, each from scratch, so that a row
#: has the same bits whenever and however far the table grew.
CHUNK = 1024


class Rotation(NamedTuple):
    """Of each token of a step: ``cos`` and ``sin``, ``[num_tokens, 1, head_dim]``; the first half of ``sin``
    is negated."""

    cos: torch.Tensor
    sin: torch.Tensor


def rotate(x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Rotate ``x`` ``[num_tokens, heads, head_dim]``; dimension i is paired with i + head_dim / 2."""
    half = x.shape[-1] // 2
    return (x * rotation.cos).addcmul_(x.roll(half, -1), rotation.sin)


def frequencies(
    config: RopeConfig, head_dim: int, factors: torch.Tensor | None = None
) -> tuple[torch.Tensor, float]:
    """Radians a position of each pair, ``[head_dim / 2]`` float32, and the factor of cos and sin.

    ``factors`` ``[head_dim / 2]`` are the checkpoint's own divisors (scaling "factors"). Sources: RoPE,
    arXiv 2104.09864; linear, arXiv 2306.15595; YaRN, arXiv 2309.00071; llama3, the Llama 3.1 release.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    inverse = 1.0 / (config.theta**exponents)
    if config.scaling == "none":
        return inverse, 1.0
    if config.scaling == "linear":
        return inverse / config.factor, 1.0
    if config.scaling == "factors":
        if factors is None:
            raise ValueError('rope scaling "factors" needs the tensor rope_freqs.weight')
        return inverse / factors.to(inverse), 1.0
    if config.original_max_position_embeddings is None:
        raise ValueError(f"rope scaling {config.scaling!r} needs original_max_position_embeddings")
    original = config.original_max_position_embeddings
    if config.scaling == "llama3":
        return _llama3(config, original, inverse), 1.0
    if config.scaling == "yarn":
        return _yarn(config, original, head_dim, exponents), _yarn_attention_factor(config)
    raise ValueError(f"rope scaling {config.scaling!r} is not supported")


def _llama3(config: RopeConfig, original: int, inverse: torch.Tensor) -> torch.Tensor:
    """Long wavelengths are stretched, short ones kept, those between interpolated."""
    turns = original / (2 * math.pi / inverse)
    low, high = config.low_freq_factor, config.high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - kept) * inverse / config.factor + kept * inverse


def _yarn(config: RopeConfig, original: int, head_dim: int, exponents: torch.Tensor) -> torch.Tensor:
    """Pairs that turn often over the original context are kept, those that turn rarely stretched."""

    def dimension(turns: float) -> float:
        return head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(config.theta))

    low, high = dimension(config.beta_fast), dimension(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # a step instead of 0 / 0
    pairs = torch.arange(head_dim // 2, dtype=torch.float32)
    kept = 1 - ((pairs - low) / (high - low)).clamp(0, 1)
    base = config.theta**exponents
    return 1.0 / (config.factor * base) * (1 - kept) + 1.0 / base * kept


def _yarn_attention_factor(config: RopeConfig) -> float:
    def growth(weight: float) -> float:
        return 1.0 if config.factor <= 1 else 0.1 * weight * math.log(config.factor) + 1.0

    if config.attention_factor is not None:
        return config.attention_factor
    if config.mscale and config.mscale_all_dim:
        return growth(config.mscale) / growth(config.mscale_all_dim)
    return growth(1.0)


def turns_to_centre(
    config: RopeConfig, head_dim: int, factors: torch.Tensor | None, levels: int
) -> torch.Tensor:
    """What turns the keys of a summary to the centre of their span: ``[levels, 16, 2, head_dim]`` float32.

    Cos and sin, as a row of the table holds them. At level 0 of the 16 tokens of a block, at a level above of
    the 4 entries that become one, each of which stands at its own centre; the rows after these 4 turn
    nothing. The factor of cos and sin (YaRN's) is in the keys already.
    """
    inverse = frequencies(config, head_dim, factors)[0].double()
    away = torch.zeros(levels, GROUP, dtype=torch.float64)  # positions from a key to the centre
    away[0] = (GROUP - 1) / 2 - torch.arange(GROUP)
    for level in range(1, levels):
        away[level, :FAN] = tokens_of(level - 1) * ((FAN - 1) / 2 - torch.arange(FAN))
    angles = away[..., None] * inverse
    cos, sin = angles.cos(), angles.sin()
    return torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)), 2).float()


class RopeTable:
    """Cosines and sines of all positions seen so far, float32; it grows by ``CHUNK`` when one is passed.

    ``factors`` is read when the first position is asked for, after the weights were loaded.
    """

    def __init__(
        self, config: RopeConfig, head_dim: int, device: str, factors: torch.Tensor | None = None
    ) -> None:
        self._config = config
        self._head_dim = head_dim
        self._factors = factors
        self._table = torch.empty(0, 2, head_dim, device=device)
        self._turns: torch.Tensor | None = None

    def at(self, positions: torch.Tensor) -> Rotation:
        """The rotation of each of ``positions`` ``[num_tokens]`` int64."""
        rows = self.upto(int(positions.max())).index_select(0, positions)
        return Rotation(rows[:, :1], rows[:, 1:])

    def turns(self) -> torch.Tensor:
        """:func:`turns_to_centre` of all levels, made once: of one shape, for the reason of ``CHUNK``."""
        if self._turns is None:
            self._turns = turns_to_centre(self._config, self._head_dim, self._factors, MAX_LEVELS)
        return self._turns

    def upto(self, longest: int) -> torch.Tensor:
        """Cosines and sines of position 0 to at least ``longest``: ``[positions, 2, head_dim]``."""
        if longest >= self._table.shape[0]:
            self._grow(longest)
        return self._table

    def _grow(self, longest: int) -> None:
        inverse, factor = frequencies(self._config, self._head_dim, self._factors)
        chunks = [self._table]
        for first in range(self._table.shape[0], longest + 1, CHUNK):
            angles = torch.outer(torch.arange(first, first + CHUNK, dtype=torch.float32), inverse)
            angles = angles.double()  # a library's own float32 cosine may depend on the length of the vector
            cos, sin = ((f(angles) * factor).float() for f in (torch.cos, torch.sin))
            rows = torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)), 1)
            chunks.append(rows.to(self._table.device))
        self._table = torch.cat(chunks)
