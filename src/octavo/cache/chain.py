"""What the prefix cache is made of: nodes of its trees, and a request's way through one. Free of torch."""

from __future__ import annotations

import hashlib
from array import array
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from sys import byteorder
from typing import NamedTuple

from octavo.kernels.history_layout import first_kept, num_summarised

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


def common_tokens(a: bytes | bytearray, b: bytes | bytearray) -> int:
    """Tokens that two packed sequences share at their start."""
    size = min(len(a), len(b))
    if a == b:  # the rest is slow for long ones
        return size // TOKEN_BYTES
    difference = int.from_bytes(a[:size], "big") ^ int.from_bytes(b[:size], "big")
    return (size - (difference.bit_length() + 7) // 8) // TOKEN_BYTES


@dataclass(slots=True, eq=False)
class Node:
    """A cached block, or the root of a tree, which has no parent.

    A node has the block as stored, ``block``, or its compact form, the block ``compact`` of another pool, or
    both; ``NO_BLOCK`` stands for what it has not. Where a node has its compact form, so have all above it;
    but those that were read in a summary may have neither form. ``stored_users`` counts the chains through
    the node that read it as stored, ``compact_users`` those that read its compact form, ``summary_users``
    those that read a summary in its place; so a node without ``users`` has only such nodes below it.
    ``tokens`` are packed; a *tail* has fewer than block_size of them, an empty digest and no children.
    ``newest`` is the child that was added last and is no tail, if it is still there. ``guards`` and
    ``spare_key`` belong to :class:`~octavo.cache.spare.Spare`, ``was_summarised`` and ``queued_compact`` to
    :class:`~octavo.cache.summaries.Summaries`.
    """

    serial: int
    block: int
    parent: Node | None
    tokens: bytes
    digest: bytes
    compact: int = NO_BLOCK
    num_children: int = 0
    newest: Node | None = None
    stored_users: int = 0
    compact_users: int = 0
    summary_users: int = 0
    protected: bool = False
    last_used: int = 0
    queue_key: tuple[int, int] | None = None
    guards: int = 0
    spare_key: tuple[int, int, int] | None = None
    was_summarised: bool = False
    queued_compact: tuple[int, int, int] | None = None

    @property
    def users(self) -> int:
        """Chains through the node."""
        return self.stored_users + self.compact_users + self.summary_users

    @property
    def is_idle(self) -> bool:
        """Whether no chain reads its compact form, or will once it has left the chain's window."""
        return self.stored_users + self.compact_users == 0

    @property
    def key(self) -> bytes:
        """Sorts a node among its siblings by its tokens."""
        assert self.parent is not None
        return child_key(self.parent, self.tokens)


def child_key(parent: Node, tokens: bytes | bytearray) -> bytes:
    return parent.serial.to_bytes(8, "big") + tokens


def newest_below(node: Node, most: int) -> list[Node]:
    """The way down that was added last, ``most`` nodes at most."""
    way: list[Node] = []
    for _ in range(most):
        newest = node.newest
        if newest is None:
            break
        way.append(newest)
        node = newest
    return way


def num_used(nodes: Sequence[Node]) -> int:
    """How many nodes of a path from a root have users: a node with one has only such nodes above it."""
    return bisect_left(nodes, True, key=lambda node: node.users == 0)


def num_with_compact(nodes: Sequence[Node]) -> int:
    """How many nodes of a path from a root have a compact form: as with users, the first ones, where none
    are read in summaries."""
    return bisect_left(nodes, True, key=lambda node: node.compact == NO_BLOCK)


@dataclass(slots=True, eq=False)
class Chain:
    """A request's side of the cache: its tokens, their digests so far, and the nodes it uses.

    Chains of different ``policy`` have different K and V for the same tokens, and share nothing.
    ``path[i]`` is the node that stands for the request's block i: the first ``num_compact`` of them are read
    in compact form, the others as stored. ``broken`` means that no further block of this request can be
    registered. The first ``num_saved`` blocks of ``path`` are on disk as stored or on their way, and so are
    the compact forms of the first ``num_saved_compact``; of those from ``num_compact_at_start`` on the first
    ``num_struck`` are no longer kept there as stored. Of the compact ones ``num_summarised``, but for the
    first, are read in summaries (``octavo.kernels.history_layout``), and those of the first
    ``num_saved_summarised`` are on disk too.
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
    num_summarised: int = 0
    num_saved_summarised: int = 0

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

    The first ``num_compact`` of ``nodes`` are read in compact form, ``num_summarised`` of these in summaries.
    The blocks ``known`` of the prefix are cached in some form: where these are more than ``nodes``, what the
    next query reads as stored is gone.
    """

    nodes: Sequence[Node] = ()
    tail: Node | None = None
    tail_rows: int = 0
    num_compact: int = 0
    known: Sequence[Node] = ()
    num_summarised: int = 0

    @property
    def read(self) -> Sequence[Node]:
        """The nodes that are not read in summaries alone."""
        start = first_kept(self.num_summarised)
        return [*self.nodes[:1], *self.nodes[start:]] if start else self.nodes


class Reach(NamedTuple):
    """How much of a prefix can be reused: ``num_blocks``, of which the first ``num_compact`` are read in
    compact form, and ``num_summarised`` of these in summaries."""

    num_blocks: int
    num_compact: int
    num_summarised: int = 0


def readable(
    num_blocks: int,
    is_stored: Callable[[int], bool],
    compact_end: Callable[[int], int],
    window_blocks: int | None,
    budget_blocks: int | None = None,
    has_layout: Callable[[int], bool] = lambda summarised: False,
) -> Reach:
    """How much of a prefix can be reused.

    ``is_stored`` says which blocks are there as stored, ``compact_end`` where the run of those that are there
    in compact form ends which starts with a block, ``has_layout`` whether what is read in place of so many
    summarised blocks is there. The next query after block i reads those before i - window_blocks in compact
    form, the others as stored; of the former, the last may be there as stored alone and are made compact
    then, and the last that it reads in summaries may be there as compact blocks alone. Looks at the window
    before the end first: there a prefix ends, but for one that was given up.
    """
    length = num_blocks
    while length > 0:
        old = 0 if window_blocks is None else max(0, length - window_blocks)
        most = 0 if budget_blocks is None else num_summarised(length, budget_blocks)
        shorter = length - 1
        for summarised in range(most, -1, -1):
            read_compact = min(old, compact_end(first_kept(summarised)))
            missing = next((i for i in range(length - 1, read_compact - 1, -1) if not is_stored(i)), None)
            if missing is not None:
                # With fewer summarised it would be missing too; and where most are, so for a shorter prefix.
                shorter = missing if summarised == most else shorter
                break
            if summarised == 0 or has_layout(summarised):
                return Reach(length, read_compact, summarised)
        length = shorter
    return Reach(0, 0)


def run_ends(there: Sequence[bool]) -> list[int]:
    """For each place, and the one after the last, where the run of True ends that starts there."""
    ends = [len(there)] * (len(there) + 1)
    for index in range(len(there) - 1, -1, -1):
        ends[index] = ends[index + 1] if there[index] else index
    return ends
