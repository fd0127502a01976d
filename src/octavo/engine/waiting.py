"""The requests that are not running: in order of admission, or put off until a prefix is written.

Free of torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import islice

from octavo.cache.chain import Chain
from octavo.cache.sorted_keys import SortedKeys
from octavo.request import Request


@dataclass(slots=True, eq=False)
class Entry:
    """The scheduler's own notes on a request.

    ``num_written`` tokens have K and V that an earlier step wrote (rows copied or computed by a step that is
    under way do not count), and the compact forms of its first ``num_compacted`` blocks are written; of those
    ``num_summarised`` are read in summaries. ``own_summaries`` of the request's summaries are
    not cached, as they are still to be made. ``last_position`` is how many tokens can ever need K and V.
    ``passed`` counts later requests that were admitted before this one. ``put_off`` is the digest that a
    waiting request waits for; ``claims`` are those that a running one will write.
    """

    request: Request
    chain: Chain
    stop_ids: frozenset[int]
    last_position: int
    num_written: int = 0
    num_compacted: int = 0
    num_summarised: int = 0
    own_summaries: set[tuple[int, int]] = field(default_factory=set)
    passed: int = 0
    put_off: bytes | None = None
    claims: set[bytes] = field(default_factory=set)

    @property
    def key(self) -> tuple[int, int, int]:
        """The order of service: the lower priority number, then the older, first."""
        request = self.request
        return (request.priority, request.arrival, request.id)


class WaitingQueue:
    """Waiting requests in order, and apart from them those put off for a prefix in flight.

    A running request *claims* the full blocks that it is going to write. A waiting request whose
    next blocks are claimed is put off under the last such digest, and looked at again when that
    block is written or its claim is given up; until then it costs nothing.
    """

    def __init__(self) -> None:
        self._order: SortedKeys[tuple[int, int, int]] = SortedKeys()
        self._entries: dict[tuple[int, int, int], Entry] = {}
        self._put_off: dict[bytes, dict[int, Entry]] = {}
        self.num_put_off = 0
        self._claims: dict[bytes, Entry] = {}

    def __len__(self) -> int:
        return len(self._entries) + self.num_put_off

    def head(self, count: int) -> list[Entry]:
        """The first ``count`` requests that are not put off, in order."""
        return [self._entries[key] for key in islice(self._order, count)]

    def push(self, entry: Entry) -> None:
        self._order.add(entry.key)
        self._entries[entry.key] = entry

    def remove(self, entry: Entry) -> None:
        """Take out a waiting request, put off or not."""
        if entry.put_off is None:
            self._order.remove(entry.key)
            del self._entries[entry.key]
            return
        group = self._put_off[entry.put_off]
        del group[entry.request.id]
        if not group:
            del self._put_off[entry.put_off]
        entry.put_off = None
        self.num_put_off -= 1

    def put_off(self, entry: Entry, digest: bytes) -> None:
        """Set a waiting request aside until the claim on ``digest`` is settled."""
        self.remove(entry)
        entry.put_off = digest
        self._put_off.setdefault(digest, {})[entry.request.id] = entry
        self.num_put_off += 1

    def claim(self, entry: Entry, digests: list[bytes]) -> None:
        """Note that ``entry``, now running, will write the blocks with these digests."""
        for digest in digests:
            if digest not in self._claims:
                self._claims[digest] = entry
                entry.claims.add(digest)

    def claimed_by(self, digest: bytes) -> Entry | None:
        """The running request that will write this block."""
        return self._claims.get(digest)

    def settle(self, entry: Entry, digest: bytes) -> None:
        """End a claim (written, or given up): those who waited for it are looked at again."""
        if digest not in entry.claims:
            return
        entry.claims.remove(digest)
        del self._claims[digest]
        for waiter in self._put_off.pop(digest, {}).values():
            waiter.put_off = None
            self.num_put_off -= 1
            self.push(waiter)

    def drop_claims(self, entry: Entry) -> None:
        """End all claims of a request that stops running."""
        for digest in tuple(entry.claims):
            self.settle(entry, digest)

    def check_invariants(self, running: list[Entry]) -> None:
        """Raise AssertionError unless claims and put-off requests belong together (for tests)."""
        assert list(self._order) == sorted(self._entries)
        assert set(self._claims.values()) <= set(running), "a claim outlived its request"
        for entry in running:
            assert all(self._claims[digest] is entry for digest in entry.claims)
        for digest, group in self._put_off.items():
            assert digest in self._claims, "put off for what nobody writes"
            assert group
            assert all(entry.put_off == digest for entry in group.values())
        assert self.num_put_off == sum(len(group) for group in self._put_off.values())
