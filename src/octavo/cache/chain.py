"""What the prefix cache is made of: nodes of its trees, and a request's way through one. Free of torch."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from sys import byteorder
from typing import NamedTuple

from octavo.kernels.history_layout import first_kept, num_groups

#: Bytes of a packed token id. Big-endian, so that the order of bytes is the order of tokens.
TOKEN_BYTES = 4
MAX_TOKEN_ID = 2**32 - 1
#: In place of a block that is not there.
NO_BLOCK = -1


def sha256(data: bytes) -> bytes:
    """The chain's hash function; another one can be injected."""
    return hashlib.sha256(data).digest()


def compact_key(digest: bytes) -> bytes:
    """The name of a block's compact form, where the block itself goes by its digest."""
    return sha256(b"compact" + digest)


def summary_key(digest: bytes, level: int) -> bytes:
    """The name of a summary whose last block has this digest."""
    return sha256(b"summary" + level.to_bytes(1, "big") + digest)


def pack(token_ids: Sequence[int]) -> bytes:
    """Token ids as big-endian 32-bit numbers. Raises ValueError for one that does not fit."""
    try:
        packed = array("I", token_ids)
    except (OverflowError, TypeError):
        raise ValueError(f"token ids must be whole numbers between 0 and {MAX_TOKEN_ID}") from None
    if byteorder == "little":
        packed.byteswap()
    return packed.tobytes()


def common_tokens(a: bytes, b: bytes) -> int:
    """Tokens that two packed sequences share at their start."""
    size = min(len(a), len(b))
    difference = int.from_bytes(a[:size], "big") ^ int.from_bytes(b[:size], "big")
    return (size - (difference.bit_length() + 7) // 8) // TOKEN_BYTES


@dataclass(slots=True, eq=False)
class Node:
    """A cached block, or the root of a tree, which has no parent.

    A node has the block as stored, ``block``, or its compact form, the block ``compact`` of another pool, or
    both; ``NO_BLOCK`` stands for what it has not. Where a node has its compact form, so have all above it,
    but for those that are read in a summary: they may have neither. ``users`` counts the chains through the
    node, so a node that nobody uses has only such nodes below it, ``stored_users`` those that read it as
    stored, and ``num_summarised`` those that read a summary in its place. ``tokens`` are packed; a *tail* has
    fewer than block_size of them, no digest and no children. ``guards`` and ``spare_key`` belong to
    :class:`~octavo.cache.spare.Spare`, ``was_summarised`` and ``queued_compact`` to
    :class:`~octavo.cache.summaries.Summaries`.
    """

    serial: int
    block: int
    parent: Node | None
    tokens: bytes
    digest: bytes | None
    compact: int = NO_BLOCK
    num_children: int = 0
    users: int = 0
    stored_users: int = 0
    protected: bool = False
    last_used: int = 0
    queue_key: tuple[int, int] | None = None
    guards: int = 0
    spare_key: tuple[int, int, int] | None = None
    num_summarised: int = 0
    was_summarised: bool = False
    queued_compact: tuple[int, int, int] | None = None

    @property
    def is_idle(self) -> bool:
        """Whether no chain reads its compact form, or will once it has left the chain's window."""
        return self.users == self.num_summarised

    @property
    def key(self) -> bytes:
        """Sorts a node among its siblings by its tokens."""
        assert self.parent is not None
        return child_key(self.parent, self.tokens)


def child_key(parent: Node, tokens: bytes) -> bytes:
    return parent.serial.to_bytes(8, "big") + tokens


@dataclass(slots=True, eq=False)
class Chain:
    """A request's side of the cache: its tokens, their digests so far, and the nodes it uses.

    Chains of different ``policy`` have different K and V for the same tokens, and share nothing. ``path[i]``
    is the node that stands for the request's block i: the first ``num_compact`` of them are read in compact
    form, the others as stored; and of the former ``num_groups`` groups in summaries
    (``octavo.kernels.history_layout``). ``broken`` means that no further block of this request can be
    registered. The first ``num_saved`` blocks of ``path`` are on disk as stored or on their way, and so are
    the compact forms of the first ``num_saved_compact``; of those from ``num_compact_at_start`` on the first
    ``num_struck`` are no longer kept there as stored. The summaries of the first ``num_saved_groups`` are
    there too.
    """

    salt: str
    packed: bytearray
    policy: str = ""
    digests: list[bytes] = field(default_factory=list)
    path: list[Node] = field(default_factory=list)
    num_compact: int = 0
    broken: bool = False
    num_saved: int = 0
    num_saved_compact: int = 0
    num_compact_at_start: int = 0
    num_struck: int = 0
    num_groups: int = 0
    num_saved_groups: int = 0

    @property
    def num_tokens(self) -> int:
        return len(self.packed) // TOKEN_BYTES

    @property
    def root_name(self) -> bytes:
        """The name of the chain's tree: no two pairs of policy and salt have the same."""
        policy = self.policy.encode()
        return len(policy).to_bytes(4, "big") + policy + self.salt.encode("utf-8", "surrogatepass")

    def append(self, token_id: int) -> None:
        self.packed += token_id.to_bytes(TOKEN_BYTES, "big")


@dataclass(frozen=True, slots=True)
class Match:
    """What a chain can reuse: whole blocks, then the first ``tail_rows`` rows of ``tail``'s block.

    The first ``num_compact`` of ``nodes`` are read in compact form, ``num_groups`` groups of them in
    summaries. ``num_known`` blocks of the prefix are cached in some form: where these are more than
    ``nodes``, what the next query reads as stored is gone.
    """

    nodes: tuple[Node, ...] = ()
    tail: Node | None = None
    tail_rows: int = 0
    num_compact: int = 0
    num_known: int = 0
    num_groups: int = 0


class Reach(NamedTuple):
    """How much of a prefix can be reused: ``num_blocks``, of which the first ``num_compact`` are read in
    compact form, and ``num_groups`` groups of them in summaries."""

    num_blocks: int
    num_compact: int
    num_groups: int


def readable(
    stored: Sequence[bool],
    compact: Sequence[bool],
    window_blocks: int | None,
    budget_blocks: int | None,
    has_layout: Callable[[int], bool],
) -> Reach:
    """How much of a prefix can be reused.

    ``stored`` and ``compact`` say which forms are there of each block, ``has_layout`` whether the summaries
    of so many groups are. The next query after block i reads those before i - window_blocks in compact form,
    the others as stored; of the former, the last may be there as stored alone and are made compact then, and
    the last groups that it reads in summaries may be there as compact blocks alone. Looks at the window
    before the end first: there a prefix ends, but for one that was given up.
    """
    # Before which block the run of compact blocks ends that starts at each.
    run_end = [len(compact)] * (len(compact) + 1)
    for index in range(len(compact) - 1, -1, -1):
        run_end[index] = run_end[index + 1] if compact[index] else index
    for length in range(len(stored), 0, -1):
        old = 0 if window_blocks is None else max(0, length - window_blocks)
        most = 0 if budget_blocks is None else num_groups(length, budget_blocks)
        for groups in range(most, -1, -1):
            read_compact = min(old, run_end[first_kept(groups)])
            if not all(stored[read_compact:length]):
                break  # with fewer groups more of them would have to be there
            if groups == 0 or (compact[0] and has_layout(groups)):
                return Reach(length, read_compact, groups)
    return Reach(0, 0, 0)
