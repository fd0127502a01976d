"""A sorted set of keys whose operations stay cheap at 100,000 entries. Free of torch."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import Generic, TypeVar

K = TypeVar("K", bytes, tuple[int, int], tuple[int, int, int])

#: A chunk is split in two above this: short enough that moving its pointers is not felt.
CHUNK = 1024


class SortedKeys(Generic[K]):
    """Distinct keys in order, held in chunks so that an insertion moves at most ``CHUNK`` pointers."""

    def __init__(self) -> None:
        self._chunks: list[list[K]] = []
        self._last: list[K] = []  # the last key of each chunk
        self._len = 0

    def __len__(self) -> int:
        return self._len

    def __iter__(self) -> Iterator[K]:
        """The keys in order; the set must not change meanwhile."""
        for chunk in self._chunks:
            yield from chunk

    def add(self, key: K) -> None:
        """Insert a key that is not there yet."""
        self._len += 1
        if not self._chunks:
            self._chunks.append([key])
            self._last.append(key)
            return
        at = min(bisect_left(self._last, key), len(self._chunks) - 1)
        chunk = self._chunks[at]
        insort(chunk, key)
        if len(chunk) > CHUNK:
            half = len(chunk) // 2
            self._chunks.insert(at + 1, chunk[half:])
            self._last.insert(at, chunk[half - 1])
            del chunk[half:]
            at += 1
        self._last[at] = self._chunks[at][-1]

    def remove(self, key: K) -> None:
        """Delete a key. Raises KeyError when it is not there."""
        at = bisect_left(self._last, key)
        if at == len(self._chunks):
            raise KeyError(key)
        chunk = self._chunks[at]
        index = bisect_left(chunk, key)
        if chunk[index] != key:
            raise KeyError(key)
        del chunk[index]
        self._len -= 1
        if chunk:
            self._last[at] = chunk[-1]
        else:
            del self._chunks[at], self._last[at]

    def first(self) -> K:
        """The smallest key. Raises IndexError when empty."""
        return self._chunks[0][0]

    def at_or_above(self, key: K) -> K | None:
        """The smallest key that is not below ``key``."""
        at = bisect_left(self._last, key)
        if at == len(self._chunks):
            return None
        chunk = self._chunks[at]
        return chunk[bisect_left(chunk, key)]

    def below(self, key: K) -> K | None:
        """The greatest key below ``key``."""
        at = bisect_left(self._last, key)
        if at < len(self._chunks):
            index = bisect_left(self._chunks[at], key)
            if index:
                return self._chunks[at][index - 1]
        return self._last[at - 1] if at else None
