"""Which written blocks can serve another request that starts with the same tokens. Free of torch.

The cache is a forest, one tree for each salt and attention policy. A node is a block whose rows are
written; its place in the tree is the chain of blocks before it. Full blocks are found by their chain
digest; the rest of a prefix, shorter than a block, by the sorted order of a node's children. The cache
holds no reference counts of block tables (the pool does): it counts the chains that pass through a node.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from sys import byteorder

from octavo.cache.sorted_keys import SortedKeys

#: Share of the pool that blocks which were hit may claim before the oldest of them age out.
PROTECTED_SHARE = 0.8
#: Bytes of a packed token id. Big-endian, so that the order of bytes is the order of tokens.
TOKEN_BYTES = 4
MAX_TOKEN_ID = 2**32 - 1
#: What the empty attention policy is called.
DENSE = "attn_topk=0"
#: A miss is explained by no more policies than this.
MAX_POLICIES_LOOKED_AT = 4


def sha256(data: bytes) -> bytes:
    """The chain's hash function; another one can be injected."""
    return hashlib.sha256(data).digest()


def pack(token_ids: Sequence[int]) -> bytes:
    """Token ids as big-endian 32-bit numbers. Raises ValueError for one that does not fit."""
    try:
        packed = array("I", token_ids)
    except (OverflowError, TypeError):
        raise ValueError(f"token ids must be whole numbers between 0 and {MAX_TOKEN_ID}") from None
    if byteorder == "little":
        packed.byteswap()
    return packed.tobytes()


@dataclass(slots=True, eq=False)
class Node:
    """A cached block, or the root of a salt's tree (block -1).

    ``users`` counts the chains through the node, so a node that nobody uses has only such nodes
    below it. ``tokens`` are packed; a *tail* has fewer than block_size of them, no digest and no
    children.
    """

    serial: int
    block: int
    parent: Node | None
    tokens: bytes
    digest: bytes | None
    num_children: int = 0
    users: int = 0
    protected: bool = False
    last_used: int = 0
    queue_key: tuple[int, int] | None = None

    @property
    def key(self) -> bytes:
        """Sorts a node among its siblings by its tokens."""
        assert self.parent is not None
        return _child_key(self.parent, self.tokens)


def _child_key(parent: Node, tokens: bytes) -> bytes:
    return parent.serial.to_bytes(8, "big") + tokens


@dataclass(slots=True, eq=False)
class Chain:
    """A request's side of the cache: its tokens, their digests so far, and the nodes it uses.

    Chains of different ``policy`` have different K and V for the same tokens, and share nothing.
    ``path[i]`` is the node that stands for the request's block i. ``broken`` means that no further
    block of this request can be registered. The first ``num_saved`` blocks of ``path`` are on disk or on
    their way.
    """

    salt: str
    packed: bytearray
    policy: str = ""
    digests: list[bytes] = field(default_factory=list)
    path: list[Node] = field(default_factory=list)
    broken: bool = False
    num_saved: int = 0

    @property
    def num_tokens(self) -> int:
        return len(self.packed) // TOKEN_BYTES

    def append(self, token_id: int) -> None:
        self.packed += token_id.to_bytes(TOKEN_BYTES, "big")


@dataclass(frozen=True, slots=True)
class Match:
    """What a chain can reuse: whole blocks, then the first ``tail_rows`` rows of ``tail``'s block."""

    nodes: tuple[Node, ...] = ()
    tail: Node | None = None
    tail_rows: int = 0


class PrefixCache:
    """Digests, the tree of cached blocks, and the order in which they are given up.

    Eviction takes unused leaves only. A block that was never hit is on *probation* and goes before
    those that were hit, which are *protected*; within each, the least recently used goes first. When
    more than ``PROTECTED_SHARE`` of the pool is protected, the oldest ones return to probation.
    Operations on one block cost O(log n) in the number of cached blocks.
    """

    def __init__(
        self,
        *,
        block_size: int,
        num_blocks: int,
        fingerprint: str,
        enabled: bool = True,
        hash_function: Callable[[bytes], bytes] = sha256,
    ) -> None:
        self.block_size = block_size
        self.enabled = enabled
        self.num_evictable = 0
        self.num_evictions = 0
        self._fingerprint = fingerprint
        self._hash = hash_function
        self._max_protected = int(PROTECTED_SHARE * num_blocks)
        self._block_bytes = block_size * TOKEN_BYTES
        self._serial = 0
        self._clock = 0
        self._forget_all()

    def _forget_all(self) -> None:
        self._policies: dict[str, None] = {}
        self._roots: dict[bytes, Node] = {}
        self._by_digest: dict[bytes, Node] = {}
        self._by_block: dict[int, Node] = {}
        self._by_key: dict[bytes, Node] = {}
        self._children: SortedKeys[bytes] = SortedKeys()
        self._probation: SortedKeys[tuple[int, int]] = SortedKeys()
        self._protected: SortedKeys[tuple[int, int]] = SortedKeys()
        self._queued: dict[int, Node] = {}
        self._num_protected = 0
        self.num_evictable = 0

    def __len__(self) -> int:
        """Cached blocks, used or not."""
        return len(self._by_block)

    def holds(self, block: int) -> bool:
        """True when the block is cached, so that its rows must be kept."""
        return block in self._by_block

    def blocks(self) -> list[int]:
        """The cached blocks, used or not."""
        return list(self._by_block)

    def parents(self) -> dict[int, int]:
        """Cached block -> the block before it in its tree, -1 for the first."""
        return {
            block: node.parent.block if node.parent is not None else -1
            for block, node in self._by_block.items()
        }

    # ---- a request's chain

    def chain(self, token_ids: Sequence[int], salt: str, policy: str = "") -> Chain:
        """Start a chain. Raises ValueError for a token id that does not fit 32 bits."""
        return Chain(salt, bytearray(pack(token_ids)), policy, broken=not self.enabled)

    def digests(self, chain: Chain) -> list[bytes]:
        """The digests of all full blocks of the chain; hashes only what is new."""
        digests, size = chain.digests, self._block_bytes
        for start in range(len(digests) * size, len(chain.packed) - size + 1, size):
            parent = digests[-1] if digests else self.root_digest(chain)
            digests.append(self._hash(parent + bytes(chain.packed[start : start + size])))
        return digests

    def root_digest(self, chain: Chain) -> bytes:
        """What stands before a chain's first block: fingerprint, policy and salt."""
        fingerprint, name = self._fingerprint.encode(), _root_name(chain)
        return self._hash(len(fingerprint).to_bytes(8, "big") + fingerprint + name)

    # ---- match (pure), commit (once)

    def match(self, chain: Chain) -> Match:
        """The longest cached prefix of a chain, less than the whole of it. Changes nothing."""
        node = self._roots.get(_root_name(chain))
        if node is None or not self.enabled:
            return Match()
        # The last token is always computed: its hidden state gives the next one.
        limit = chain.num_tokens - 1
        nodes: list[Node] = []
        for digest in self.digests(chain)[: limit // self.block_size]:
            child = self._by_digest.get(digest)
            start = len(nodes) * self._block_bytes
            if child is None or not self._is(child, node, chain.packed[start : start + self._block_bytes]):
                break
            nodes.append(child)
            node = child
        start = len(nodes) * self.block_size
        end = min(start + self.block_size, limit)
        wanted = bytes(chain.packed[start * TOKEN_BYTES : end * TOKEN_BYTES])
        tail, rows = self._longest_common(node, wanted)
        return Match(tuple(nodes), tail, rows)

    @staticmethod
    def _is(node: Node, parent: Node, tokens: bytes | bytearray) -> bool:
        """A digest is only a hint: equal tokens under the same parent are the proof."""
        return node.parent is parent and node.tokens == tokens

    def _longest_common(self, parent: Node, wanted: bytes) -> tuple[Node | None, int]:
        # In sorted order the longest common prefix is with one of the two neighbours.
        best, rows = None, 0
        key = _child_key(parent, wanted)
        for neighbour in (self._children.at_or_above(key), self._children.below(key)):
            node = self._by_key[neighbour] if neighbour is not None else None
            if node is not None and node.parent is parent:
                common = _common_tokens(node.tokens, wanted)
                if common > rows:
                    best, rows = node, common
        return best, rows

    def commit(self, chain: Chain, match: Match, *, hit: bool) -> None:
        """Use what was matched. ``hit`` False (a resume) protects nothing."""
        self._clock += 1
        for node in match.nodes:
            self._use(node)
            if hit and not node.protected:
                node.protected = True
                self._num_protected += 1
        chain.path = list(match.nodes)
        if match.tail is not None:
            # Copied, not used; and not protected either: one common token is no proof of worth.
            self._touch(match.tail)

    def _use(self, node: Node) -> None:
        if node.users == 0:
            self.num_evictable -= 1
            self._unqueue(node)
        node.users += 1
        node.last_used = self._clock

    def _touch(self, node: Node) -> None:
        queued = node.queue_key is not None
        self._unqueue(node)
        node.last_used = self._clock
        if queued:
            self._enqueue(node)

    def explain(self, chain: Chain, match: Match, num_loaded: int = 0) -> str:
        """Why the prefix stopped matching, with the first token that is computed. One salt only.

        ``num_loaded`` tokens after the match come from disk.

        Cached rows of another attention policy are no match, which is said.
        """
        if not self.enabled:
            return "prefix caching is off"
        first = len(match.nodes) * self.block_size + match.tail_rows + num_loaded
        if chain.num_tokens == 1:
            return "the prompt is one token (0), which is always computed"
        if first == chain.num_tokens - 1:
            return f"the whole prompt is cached; its last token ({first}) is always computed"
        other = self._policy_with_more(chain, first)
        if other is not None:
            return (
                f"token {first} is the first computed: what is cached from there on was computed with "
                f"{other or DENSE}, this request has {chain.policy or DENSE}, and the two share nothing"
            )
        if first == 0:
            return "no cached block starts with this prefix: token 0 is the first computed"
        if num_loaded:
            return f"nothing whole on disk continues this prefix: token {first} is the first computed"
        if match.tail is not None:
            ended = match.tail_rows * TOKEN_BYTES == len(match.tail.tokens)
        else:
            ended = match.nodes[-1].num_children == 0
        if ended:
            return f"nothing cached continues this prefix: token {first} is the first computed"
        return f"token {first} differs from what is cached"

    def _policy_with_more(self, chain: Chain, rows: int) -> str | None:
        """Another attention policy under which more of these tokens are cached, of the last few in use."""
        for policy in list(self._policies)[-MAX_POLICIES_LOOKED_AT:]:
            if policy != chain.policy:
                match = self.match(Chain(chain.salt, chain.packed, policy))
                if len(match.nodes) * self.block_size + match.tail_rows > rows:
                    return policy
        return None

    # ---- registering what was written

    def extend(self, chain: Chain, block: int) -> int:
        """Register the chain's next full block, whose rows are all written in ``block``.

        Returns the block that stands for it from now on: another one when another request wrote the
        same rows before; the caller then puts that one in the block table and gives up ``block``.
        So whoever uses a node also uses all nodes above it. A hash collision breaks the chain:
        nothing more of it is registered.
        """
        index = len(chain.path)
        digest = self.digests(chain)[index]
        tokens = bytes(chain.packed[index * self._block_bytes : (index + 1) * self._block_bytes])
        parent = chain.path[-1] if chain.path else self._root(chain)
        node = self._by_digest.get(digest)
        if node is None:
            node = self._insert(parent, tokens, block, digest)
        elif not self._is(node, parent, tokens):
            chain.broken = True
            self._drop_childless_root(parent)
            return block
        self._clock += 1
        self._use(node)
        chain.path.append(node)
        return node.block

    def release(self, chain: Chain, tail_block: int | None, tail_rows: int) -> None:
        """End the chain's use of its nodes; cache its last, partly filled block as a tail.

        ``tail_rows`` rows of ``tail_block`` are written. The tail is left out if a sibling already
        begins with its tokens. The chain can start again from :meth:`match`.
        """
        self._clock += 1
        if tail_block is not None and tail_rows and not chain.broken:
            parent = chain.path[-1] if chain.path else self._root(chain)
            start = len(chain.path) * self._block_bytes
            tokens = bytes(chain.packed[start : start + tail_rows * TOKEN_BYTES])
            above = self._children.at_or_above(_child_key(parent, tokens))
            if above is None or not above.startswith(_child_key(parent, tokens)):
                tail = self._insert(parent, tokens, tail_block, None)
                tail.last_used = self._clock
                self._enqueue(tail)
        # Leaf first: a parent is queued only once nothing hangs below it.
        for node in reversed(chain.path):
            node.users -= 1
            node.last_used = self._clock
            if node.users == 0:
                self.num_evictable += 1
                self._enqueue(node)
        chain.path = []
        chain.broken = not self.enabled

    def _root(self, chain: Chain) -> Node:
        name = _root_name(chain)
        root = self._roots.get(name)
        if root is None:
            self._serial += 1
            root = self._roots[name] = Node(self._serial, -1, None, name, None)
            self._policies[chain.policy] = None
        return root

    def _insert(self, parent: Node, tokens: bytes, block: int, digest: bytes | None) -> Node:
        """Add a node below ``parent``, which the chain uses, so that it is in no queue."""
        self._serial += 1
        node = Node(self._serial, block, parent, tokens, digest)
        key = node.key
        shorter = self._children.below(key)
        if shorter is not None and key.startswith(shorter):
            # A tail that the new block begins with is of no more use: it goes first.
            old = self._by_key[shorter]
            self._unqueue(old)
            old.last_used = 0
            self._enqueue(old)
        self._children.add(key)
        self._by_key[key] = node
        self._by_block[block] = node
        if digest is not None:
            self._by_digest[digest] = node
        parent.num_children += 1
        self.num_evictable += 1
        return node

    # ---- giving up

    def evict(self) -> int | None:
        """Forget the unused leaf that is worth least and return its block; None if all are used."""
        self._age_out()
        queue = self._probation if len(self._probation) else self._protected
        if not len(queue):
            return None
        node = self._queued[queue.first()[1]]
        self._remove(node)
        self.num_evictions += 1
        return node.block

    def clear(self) -> list[int]:
        """Forget everything; returns the blocks. The caller drops every chain's path and breaks it."""
        blocks = self.blocks()
        self._forget_all()
        return blocks

    def _age_out(self) -> None:
        while self._num_protected > self._max_protected and len(self._protected):
            node = self._queued[self._protected.first()[1]]
            self._unqueue(node)
            self._unprotect(node)
            self._clock += 1
            node.last_used = self._clock
            self._enqueue(node)

    def _unprotect(self, node: Node) -> None:
        if node.protected:
            node.protected = False
            self._num_protected -= 1

    def _enqueue(self, node: Node) -> None:
        if node.users or node.num_children or node.block < 0:
            return
        node.queue_key = (node.last_used, node.serial)
        (self._protected if node.protected else self._probation).add(node.queue_key)
        self._queued[node.serial] = node

    def _unqueue(self, node: Node) -> None:
        if node.queue_key is not None:
            (self._protected if node.protected else self._probation).remove(node.queue_key)
            del self._queued[node.serial]
            node.queue_key = None

    def _remove(self, node: Node) -> None:
        self._unqueue(node)
        self._unprotect(node)
        key, parent = node.key, node.parent
        assert parent is not None
        self._children.remove(key)
        del self._by_key[key], self._by_block[node.block]
        if node.digest is not None:
            del self._by_digest[node.digest]
        self.num_evictable -= 1
        parent.num_children -= 1
        self._enqueue(parent)
        self._drop_childless_root(parent)

    def _drop_childless_root(self, node: Node) -> None:
        if node.block < 0 and node.num_children == 0:
            del self._roots[node.tokens]

    # ---- for tests

    def check_invariants(self, chains: Iterable[Chain]) -> None:
        """Raise AssertionError unless tree, digests, counts and queues agree (for tests)."""
        nodes = list(self._by_block.values())
        users: Counter[int] = Counter()
        for chain in chains:
            parent = self._roots.get(_root_name(chain))
            for node in chain.path:
                assert node.parent is parent, "a path skips a node"
                users[node.serial] += 1
                parent = node
        for node in nodes:
            assert self._by_block[node.block] is node
            assert self._by_key[node.key] is node
            assert node.users == users[node.serial], "users differ from the paths"
            parent = node.parent
            assert parent is not None
            above = self._by_block.get(parent.block) if parent.block >= 0 else self._roots.get(parent.tokens)
            assert above is parent, "a parent was given up before its child"
            assert parent.block < 0 or len(parent.tokens) == self._block_bytes, "a tail has a child"
            assert (node.digest is None) == (len(node.tokens) < self._block_bytes)
            assert node.digest is None or self._by_digest[node.digest] is node
            leaf = node.users == 0 and node.num_children == 0
            assert (node.queue_key is not None) == leaf, "the queues hold exactly the unused leaves"
        children = Counter(node.parent.serial for node in nodes if node.parent is not None)
        for parent in [*nodes, *self._roots.values()]:
            assert parent.num_children == children[parent.serial]
            assert parent.block >= 0 or parent.num_children, "an empty tree is kept"
        assert self.num_evictable == sum(node.users == 0 for node in nodes)
        assert self._num_protected == sum(node.protected for node in nodes)
        assert list(self._children) == sorted(self._by_key)
        assert len(self._by_key) == len(nodes)
        assert len(self._by_digest) == sum(node.digest is not None for node in nodes)
        assert len(self._queued) == len(self._probation) + len(self._protected)


def _root_name(chain: Chain) -> bytes:
    """The name of a chain's tree: no two pairs of policy and salt have the same."""
    policy = chain.policy.encode()
    return len(policy).to_bytes(4, "big") + policy + chain.salt.encode("utf-8", "surrogatepass")


def _common_tokens(a: bytes, b: bytes) -> int:
    """Tokens that two packed sequences share at their start."""
    size = min(len(a), len(b))
    difference = int.from_bytes(a[:size], "big") ^ int.from_bytes(b[:size], "big")
    return (size - (difference.bit_length() + 7) // 8) // TOKEN_BYTES
