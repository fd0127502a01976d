"""The nodes of the prefix cache by their place: one tree for each salt and attention policy. Free of torch.

Full blocks are found by their tokens and their place, and named by their chain digest; the rest of a prefix,
shorter than a block, is found by the sorted order of a node's children. Who reads a node, and which blocks it
has, is the business of :class:`~octavo.cache.prefix_cache.PrefixCache`.
"""

from __future__ import annotations

from octavo.cache.chain import (
    NO_BLOCK,
    TOKEN_BYTES,
    Chain,
    Node,
    child_key,
    common_tokens,
    newest_below,
)
from octavo.cache.sorted_keys import SortedKeys

#: Nodes of a way down that are compared at once, at first and after a parting; then twice as many each time.
FIRST_STRIDE = 16


class Forest:
    """Trees of nodes. Adding, removing and finding one cost O(log n) in the number of nodes."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.block_bytes = block_size * TOKEN_BYTES
        self._serial = 0
        self.clear()

    def clear(self) -> None:
        """Forget all nodes; no later one has the serial of one of these."""
        #: Attention policies that something was cached under, in the order of their first use.
        self.policies: dict[str, None] = {}
        self.roots: dict[bytes, Node] = {}
        self.by_digest: dict[bytes, Node] = {}
        self.by_key: dict[bytes, Node] = {}
        self.children: SortedKeys[bytes] = SortedKeys()

    def root(self, chain: Chain) -> Node:
        """The root of the chain's tree, which is made if there is none."""
        name = chain.root_name
        root = self.roots.get(name)
        if root is None:
            self._serial += 1
            root = self.roots[name] = Node(self._serial, NO_BLOCK, None, name, b"")
            self.policies[chain.policy] = None
        return root

    def known(self, chain: Chain) -> list[Node]:
        """The nodes of the longest prefix of whole blocks that is cached in any form, less than all of it.

        The way that was added last is tried first, many blocks at once; so what is cached costs neither
        look-ups nor hashes, but where ways part. Compares no more in vain than it finds, but for a few.
        """
        node, nodes = self.roots.get(chain.root_name), list[Node]()
        if node is None:
            return nodes
        size, stride = self.block_bytes, FIRST_STRIDE
        # The last token is always computed: its hidden state gives the next one.
        num_blocks = (chain.num_tokens - 1) // self.block_size
        while len(nodes) < num_blocks:
            way, start = newest_below(node, min(stride, num_blocks - len(nodes))), len(nodes) * size
            tokens = b"".join([n.tokens for n in way])
            same = common_tokens(tokens, chain.packed[start : start + len(tokens)]) // self.block_size
            nodes += way if same == len(way) else way[:same]
            stride *= 2
            if same < len(way) or not way:
                node, start = nodes[-1] if nodes else node, len(nodes) * size
                child = self.by_key.get(child_key(node, chain.packed[start : start + size]))
                if child is None:
                    break
                nodes.append(child)
                stride = FIRST_STRIDE
            node = nodes[-1]
        chain.digests += [n.digest for n in nodes[len(chain.digests) :]]
        return nodes

    def longest_common(self, parent: Node, wanted: bytes) -> tuple[Node | None, int]:
        """The child with a block as stored that shares most tokens with ``wanted``, and how many."""
        # In sorted order the longest common prefix is with one of the two neighbours.
        best, rows = None, 0
        key = child_key(parent, wanted)
        for neighbour in (self.children.at_or_above(key), self.children.below(key)):
            node = self.by_key[neighbour] if neighbour is not None else None
            if node is not None and node.parent is parent and node.block != NO_BLOCK:
                common = common_tokens(node.tokens, wanted)
                if common > rows:
                    best, rows = node, common
        return best, rows

    def has_child(self, parent: Node, tokens: bytes) -> bool:
        """Whether a child begins with these tokens."""
        key = child_key(parent, tokens)
        above = self.children.at_or_above(key)
        return above is not None and above.startswith(key)

    def add(
        self, parent: Node, tokens: bytes, block: int, digest: bytes, compact: int = NO_BLOCK
    ) -> tuple[Node, Node | None]:
        """A new node below ``parent``, and the tail, if there is one, that it begins with."""
        self._serial += 1
        node = Node(self._serial, block, parent, tokens, digest, compact)
        key = node.key
        shorter = self.children.below(key)
        self.children.add(key)
        self.by_key[key] = node
        if len(tokens) == self.block_bytes:
            self.by_digest[digest] = parent.newest = node
        parent.num_children += 1
        return node, self.by_key[shorter] if shorter is not None and key.startswith(shorter) else None

    def remove(self, node: Node) -> Node:
        """Take a leaf out, and its tree if it was the last in it; returns the node above it."""
        key, parent = node.key, node.parent
        assert parent is not None
        self.children.remove(key)
        del self.by_key[key]
        if len(node.tokens) == self.block_bytes:
            del self.by_digest[node.digest]
        if parent.newest is node:
            parent.newest = None
        parent.num_children -= 1
        self.drop_childless_root(parent)
        return parent

    def drop_childless_root(self, node: Node) -> None:
        """Forget a root that nothing hangs below; any other node stays."""
        if node.parent is None and node.num_children == 0:
            del self.roots[node.tokens]
