"""From a token id to the bytes that it stands for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import tokenizers

from octavo.tokenizer.errors import TokenizerError
from octavo.tokenizer.parts import TokenizerParts


def _byte_alphabet() -> dict[str, int]:
    """Byte-level BPE's printable stand-in for every byte (GPT-2's table, read backwards).

    Printable Latin-1 characters stand for themselves; the 68 others are moved, in order, to U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    table.update({chr(0x100 + i): byte for i, byte in enumerate(others)})
    return table


BYTE_OF_CHAR = _byte_alphabet()


class Vocabulary:
    """The bytes of every token, made when first asked for.

    The text of a list of ids is the UTF-8 text of their joined bytes, with U+FFFD for what is not UTF-8,
    less the space that some models put before the first word.

    Attributes:
        strip_left: spaces that are taken off the start of a text, at most.
        special: the ids that ``skip_special_tokens`` leaves out.
    """

    def __init__(self, parts: TokenizerParts) -> None:
        self._backend = parts.backend
        self._added = parts.added
        self._size = parts.vocab_size
        self._byte_level = False
        self._byte_fallback = False
        self._fused = False
        self._replace: list[tuple[str, str]] = []
        self._drop_in_first: str | None = None
        self._unsupported: str | None = None
        self.strip_left = 0
        self.special = frozenset(token.id for token in parts.control)
        self._cache: list[bytes | None] = [None] * parts.vocab_size
        for step in _decoder_steps(parts.backend):
            self._read_step(step)

    def _read_step(self, step: dict[str, Any]) -> None:
        kind = step["type"]
        if kind == "ByteLevel":
            self._byte_level = True
        elif kind == "ByteFallback":
            self._byte_fallback = True
        elif kind == "Replace" and "String" in step["pattern"]:
            self._replace.append((step["pattern"]["String"], step["content"]))
        elif kind == "Strip" and self._fused and step["content"] == " " and step["stop"] == 0:
            self.strip_left += step["start"]
        elif kind == "Fuse":
            self._fused = True
        elif kind == "Metaspace":
            self._replace.append((step["replacement"], " "))
            if step["prepend_scheme"] != "never":
                self._drop_in_first = step["replacement"]
        else:
            self._unsupported = kind

    def check_id(self, token_id: int) -> None:
        """Refuse an id that is not one of ``0 .. vocab_size - 1``."""
        if not 0 <= token_id < self._size:
            raise TokenizerError(
                f"token id {token_id} is not in the vocabulary: ids are 0 to {self._size - 1}"
            )

    def bytes_of(self, token_id: int, *, first: bool = False) -> bytes:
        """The bytes of one token; ``first`` when it opens a text. An id without a token has none."""
        if first and self._drop_in_first is not None and token_id not in self._added:
            self.check_id(token_id)
            piece = self._backend.id_to_token(token_id) or ""
            return self._piece_bytes(piece.replace(self._drop_in_first, ""))
        self.check_id(token_id)
        known = self._cache[token_id]
        if known is None:
            text = self._added.get(token_id)
            if text is not None:
                known = self._replaced(text).encode()
            else:
                known = self._piece_bytes(self._backend.id_to_token(token_id) or "")
            self._cache[token_id] = known
        return known

    def _replaced(self, piece: str) -> str:
        for old, new in self._replace:
            piece = piece.replace(old, new)
        return piece

    def _piece_bytes(self, piece: str) -> bytes:
        if self._unsupported is not None:
            raise TokenizerError(
                f"this tokenizer's decoder {self._unsupported!r} is not supported: "
                "ByteLevel, ByteFallback, Replace, Strip, Metaspace and Fuse are"
            )
        if self._byte_level:
            values = [BYTE_OF_CHAR.get(char) for char in piece]
            return piece.encode() if None in values else bytes(v for v in values if v is not None)
        if self._byte_fallback and len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            try:
                return bytes([int(piece[3:5], 16)])
            except ValueError:
                return piece.encode()
        return self._replaced(piece).encode()


def _decoder_steps(backend: tokenizers.Tokenizer) -> Iterator[dict[str, Any]]:
    if backend.decoder is None:
        yield {"type": "none"}
        return
    state = json.loads(backend.decoder.__getstate__())
    yield from _flatten(state)


def _flatten(state: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if state["type"] == "Sequence":
        for step in state["decoders"]:
            yield from _flatten(step)
    else:
        yield state
