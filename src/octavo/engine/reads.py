"""What an answer's attention read of its context, added up over its tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from octavo.batch import SPAN, AttnReads
from octavo.request import AttnReadReport


@dataclass(frozen=True, slots=True)
class SpanCounts:
    """Pairs of a query head and a key, read and seen, each ``[layers, spans]`` int64."""

    read: np.ndarray
    seen: np.ndarray

    @classmethod
    def of_row(cls, reads: AttnReads, i: int) -> SpanCounts:
        """The i-th watched row of a step."""
        spans = -(-reads.num_keys[i] // SPAN)
        read, seen = (np.stack([layer[side][i, :spans] for layer in reads.layers]) for side in (0, 1))
        return cls(read, seen)

    def __add__(self, later: SpanCounts) -> SpanCounts:
        """Both together; ``later`` has at least as many spans."""
        more = ((0, 0), (0, later.read.shape[1] - self.read.shape[1]))
        return SpanCounts(np.pad(self.read, more) + later.read, np.pad(self.seen, more) + later.seen)

    def report(self) -> AttnReadReport:
        share = np.round(self.read / np.maximum(self.seen, 1), 4)
        return AttnReadReport(span=SPAN, share=tuple(tuple(layer) for layer in share.tolist()))
