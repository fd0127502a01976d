"""What the prefix cache is made of: nodes of its trees, and a request's way through one. Free of torch."""

from __future__ import annotations

import hashlib
from array import array
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from sys import byteorder

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
    both; ``NO_BLOCK`` stands for what it has not. Where a node has its compact form, so have all above it.
    ``stored_users`` counts the chains through the node that read it as stored, ``compact_users`` those that
    read its compact form; so a node without ``users`` has only such nodes below it. ``tokens`` are packed; a
    *tail* has fewer than block_size of them, an empty digest and no children. ``newest`` is the child that
    was added last and is no tail, if it is still there. ``guards`` and ``spare_key`` belong to
    :class:`~octavo.cache.spare.Spare`.
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
    protected: bool = False
    last_used: int = 0
    queue_key: tuple[int, int] | None = None
    guards: int = 0
    spare_key: tuple[int, int, int] | None = None

    @property
    def users(self) -> int:
        """Chains through the node."""
        return self.stored_users + self.compact_users

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
    """How many nodes of a path from a root have a compact form: as with users, the first ones."""
    return bisect_left(nodes, True, key=lambda node: node.compact == NO_BLOCK)


@dataclass(slots=True, eq=False)
class Chain:
    """A request's side of the cache: its tokens, their digests so far, and the nodes it uses.

    Chains of different ``policy`` have different K and V for the same tokens, and share nothing.
    ``path[i]`` is the node that stands for the request's block i: the first ``num_compact`` of them are read
    in compact form, the others as stored. ``broken`` means that no further block of this request can be
    registered. The first ``num_saved`` blocks of ``path`` are on disk as stored or on their way, and so are
    the compact forms of the first ``num_saved_compact``; of those from ``num_compact_at_start`` on the first
    ``num_struck`` are no longer kept there as stored.
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

    The first ``num_compact`` of ``nodes`` are read in compact form. The blocks ``known`` of the prefix are
    cached in some form: where these are more than ``nodes``, what the next query reads as stored is gone.
    """

    nodes: Sequence[Node] = ()
    tail: Node | None = None
    tail_rows: int = 0
    num_compact: int = 0
    known: Sequence[Node] = ()


def readable(
    num_blocks: int, is_stored: Callable[[int], bool], num_with_compact: int, window_blocks: int | None
) -> tuple[int, int]:
    """How many blocks of a prefix can be reused, and how many of those are read in compact form.

    ``is_stored`` says which are there as stored; the first ``num_with_compact`` are there in compact form.
    The next query after block i reads those before i - window_blocks in compact form, the others as stored;
    of the former, the last may be there as stored alone and are made compact then. Looks at the window
    before the end first: there a prefix ends, but for one that was given up.
    """
    length = num_blocks
    while length > 0:
        old = 0 if window_blocks is None else max(0, length - window_blocks)
        read_compact = min(num_with_compact, old)
        missing = next((i for i in range(length - 1, read_compact - 1, -1) if not is_stored(i)), None)
        if missing is None:
            return length, read_compact
        length = missing  # a shorter prefix that has it reads it as stored, too
    return 0, 0
