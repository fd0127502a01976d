"""Keys and values of one causal module, kept between calls."""

from __future__ import annotations

import torch


class KVCache:
    """What a causal module has seen of each sequence in a batch. One module, one cache.

    Room doubles when it runs out, so a token costs O(1) on average. For inference: what is
    appended must not require gradients.
    """

    def __init__(self) -> None:
        self._length = 0
        self._key: torch.Tensor | None = None
        self._value: torch.Tensor | None = None
        self._padding: torch.Tensor | None = None

    def __len__(self) -> int:
        """Positions held."""
        return self._length

    def clear(self) -> None:
        """Forget everything, and give the memory back."""
        self.__init__()  # type: ignore[misc]  # starts over, subclasses too

    def append(
        self, key: torch.Tensor, value: torch.Tensor, padding: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Add ``key`` and ``value`` ``[b, h, n, d]`` and return all that is held, ``[b, h, len(self), d]``.

        ``padding`` ``[b, n]`` bool marks new positions that are no keys; the mask that comes back covers
        all positions and is None as long as none was ever given. Raises ValueError for keys that do not
        fit those held, or that require gradients.
        """
        if torch.is_grad_enabled() and (key.requires_grad or value.requires_grad):
            raise ValueError("a KV cache is for inference: call the module under torch.no_grad()")
        b, h, n, d = key.shape
        if self._key is None:
            self._key, self._value = key.new_empty(b, h, 0, d), value.new_empty(b, h, 0, d)
        assert self._value is not None
        held = self._key
        if (b, h, d) != (held.shape[0], held.shape[1], held.shape[3]) or key.dtype != held.dtype:
            raise ValueError(
                f"the cache holds [{held.shape[0]}, {held.shape[1]}, n, {held.shape[3]}] {held.dtype}, "
                f"new keys are {list(key.shape)} {key.dtype}"
            )
        end = self._length + n
        if end > held.shape[2]:
            room = max(end, 2 * held.shape[2])
            self._key, self._value = (self._grown(x, room) for x in (self._key, self._value))
        self._key[:, :, self._length : end] = key
        self._value[:, :, self._length : end] = value
        self._append_padding(padding, b, n, key.device)
        self._length = end
        return self._key[:, :, :end], self._value[:, :, :end], self._padding

    def _grown(self, x: torch.Tensor, room: int) -> torch.Tensor:
        grown = x.new_empty(x.shape[0], x.shape[1], room, x.shape[3])
        grown[:, :, : self._length] = x[:, :, : self._length]
        return grown

    def _append_padding(self, padding: torch.Tensor | None, b: int, n: int, device: torch.device) -> None:
        if padding is None and self._padding is None:
            return
        if self._padding is None:
            self._padding = torch.zeros(b, self._length, dtype=torch.bool, device=device)
        if padding is None:
            padding = torch.zeros(b, n, dtype=torch.bool, device=device)
        self._padding = torch.cat([self._padding, padding], dim=1)
