"""The tokenizer of a model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from octavo.tokenizer.control import ControlTokens, Disguise
from octavo.tokenizer.errors import ChatTemplateError, TokenizerError, check_text
from octavo.tokenizer.gguf import parts_from_gguf
from octavo.tokenizer.hf import parts_from_hf
from octavo.tokenizer.parts import ControlToken, TokenizerParts
from octavo.tokenizer.stream import TextStream
from octavo.tokenizer.template import ChatTemplate
from octavo.tokenizer.vocabulary import Vocabulary

#: Deepest nesting of what is given to a chat template (tools are JSON schemas, some ten levels deep).
_MAX_NESTING = 64


class Tokenizer:
    """Text to token ids and back, with the model's own rules.

    Control tokens (an end of turn, say) are recognised only where they were asked for: in what a chat
    template writes, and in a text encoded with ``allow_special=True``. Anywhere else their text is
    plain text. Bad input raises :class:`TokenizerError`, a ``ValueError`` of one sentence.

    Attributes:
        vocab_size: ids are ``0 .. vocab_size - 1``; a model's head may be wider, and what it says past
            this means nothing.
        bos_token_id: the token that starts a text, or None. 0 is an id like any other.
        eos_token_ids: all the tokens that end a text, without repeats.
        special_token_ids: the control tokens, which ``skip_special_tokens`` leaves out of text.
        add_bos: whether the model wants ``bos_token_id`` before a prompt.
        vocabulary: the bytes of each token.
    """

    #: What to tell a user whose prompt has no tokens.
    EMPTY_PROMPT = (
        "the prompt is empty, and this model puts no token of its own before a text: "
        "give at least one character or token"
    )

    def __init__(self, parts: TokenizerParts) -> None:
        self.vocab_size = parts.vocab_size
        self.bos_token_id = parts.bos_token_id
        self.eos_token_ids = parts.eos_token_ids
        self.special_token_ids = frozenset(token.id for token in parts.control)
        self.add_bos = parts.add_bos
        self.vocabulary = Vocabulary(parts)
        self._parts = parts
        self._control = ControlTokens(parts.control)
        unknown = parts.named_tokens.get("unk_token")
        # The unknown token stands for characters that the vocabulary lacks, so plain text may become it.
        self._never_plain = frozenset(token.id for token in parts.control if token.text != unknown)
        self._templates: dict[str, ChatTemplate] = {}

    @classmethod
    def from_hf(cls, folder: Path | str) -> Tokenizer:
        """From a folder with ``tokenizer.json`` (and ``tokenizer_config.json``, ... where they exist)."""
        return cls(parts_from_hf(Path(folder)))

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """From a GGUF file's metadata, a plain dict of its keys."""
        return cls(parts_from_gguf(metadata))

    @property
    def has_chat_template(self) -> bool:
        return bool(self._parts.chat_templates)

    def encode(self, text: str, *, allow_special: bool = False, add_bos: bool | None = None) -> list[int]:
        """The ids of ``text``.

        Args:
            text: any valid Unicode; "" gives no ids, or BOS alone.
            allow_special: take the text of a control token for that token. Only for text that no
                user wrote.
            add_bos: put BOS in front, unless it is there already; None does what the model wants.
        """
        check_text(text, "the prompt")
        pieces = self._control.split(text) if allow_special else [text]
        return self._with_bos(self._encode_pieces(pieces), add_bos)

    def decode(
        self, ids: Sequence[int], skip_special_tokens: bool = True, *, prompt_ids: Sequence[int] = ()
    ) -> str:
        """The text of ``ids``; bytes that are not UTF-8 become U+FFFD.

        ``prompt_ids``: what the ids continue. Some models write a space before every word; the
        space is dropped at the start of a text but not where a text goes on.
        """
        stream = TextStream(self.vocabulary, skip_special_tokens=skip_special_tokens, prompt_ids=prompt_ids)
        return "".join([*map(stream.push, ids), stream.flush()])

    def id_to_text(self, token_id: int) -> str:
        """The text of one token by itself, special or not, with its leading space."""
        return self.vocabulary.bytes_of(token_id).decode("utf-8", "replace")

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        *,
        add_bos: bool | None = None,
        **kwargs: Any,
    ) -> list[int]:
        """The ids of a conversation.

        Control tokens come from the template only; their text inside a message is plain text. There is
        one BOS: the template's own, or else the model's where it wants one.

        Args:
            messages: dicts with "role" and "content", both strings (see :meth:`render_chat`).
            add_generation_prompt: end with the opening of the assistant's next turn.
            add_bos: as in :meth:`encode`.
            kwargs: other variables for the template ("tools", "enable_thinking", ...).
        """
        rendered, disguise = self._render(messages, add_generation_prompt, kwargs)
        pieces = (
            piece if isinstance(piece, ControlToken) else disguise.take_off(piece)
            for piece in self._control.split(rendered)
        )
        return self._with_bos(self._encode_pieces(pieces), add_bos)

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **kwargs: Any
    ) -> str:
        """The text that the chat template makes of ``messages``. To encode, use :meth:`apply_chat_template`:
        in this text a user's "<|im_end|>" looks like a real one.

        An assistant's message with "tool_calls" may have no content. Raises :class:`ChatTemplateError`
        for messages of the wrong shape, and with the template's own reason where it refuses them.
        """
        rendered, disguise = self._render(messages, add_generation_prompt, kwargs)
        return disguise.take_off(rendered)

    def _render(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool, kwargs: dict[str, Any]
    ) -> tuple[str, Disguise]:
        checked = _checked_messages(messages)
        named = self._parts.named_tokens
        reserved = sorted(named.keys() & kwargs.keys() | {"messages"} & kwargs.keys())
        if reserved:
            raise ChatTemplateError(
                f"{reserved[0]!r} is the model's own and cannot be given to its chat template"
            )
        disguise = Disguise(self._control)
        variables = {"tools": None, "documents": None, **kwargs}
        _check_strings(variables, "the chat template's arguments")
        rendered = self._template("tool_use" if variables["tools"] else "default").render(
            {
                **disguise.put_on(variables),
                **named,
                "messages": disguise.put_on(checked),
                "add_generation_prompt": add_generation_prompt,
            }
        )
        return rendered, disguise

    def _template(self, name: str) -> ChatTemplate:
        sources = self._parts.chat_templates
        if not sources:
            raise ChatTemplateError(
                "this model has no chat template (it is a base model): give it a prompt instead of messages"
            )
        name = name if name in sources else "default"
        if name not in sources:
            raise ChatTemplateError(
                f"this model has no default chat template, only {', '.join(sorted(sources))}"
            )
        if name not in self._templates:
            self._templates[name] = ChatTemplate(sources[name])
        return self._templates[name]

    def _encode_pieces(self, pieces: Iterable[str | ControlToken]) -> list[int]:
        ids: list[int] = []
        backend = self._parts.backend
        for piece in pieces:
            if isinstance(piece, ControlToken):
                ids.append(piece.id)
            else:
                ids += self._encode_plain(backend, piece)
            backend = self._parts.inner_backend
        return ids

    def _encode_plain(self, backend: tokenizers.Tokenizer, text: str) -> list[int]:
        encoding = backend.encode(text, add_special_tokens=False)
        ids: list[int] = encoding.ids
        if self._never_plain.isdisjoint(ids):
            return ids
        # A vocabulary that is searched for whole words finds control tokens too: cut each in two.
        cuts = [0]
        for token_id, (start, end) in zip(ids, encoding.offsets, strict=True):
            if token_id in self._never_plain:
                if end - start < 2:
                    raise TokenizerError(
                        f"{text[start:end]!r} is a control token and cannot be plain text here"
                    )
                cuts.append(start + 1)
        parts = [text[a:b] for a, b in zip(cuts, [*cuts[1:], len(text)], strict=True)]
        inner = self._parts.inner_backend
        halves = [self._encode_plain(inner if i else backend, part) for i, part in enumerate(parts)]
        return [token_id for half in halves for token_id in half]

    def _with_bos(self, ids: list[int], add_bos: bool | None) -> list[int]:
        if not (self.add_bos if add_bos is None else add_bos):
            return ids
        if self.bos_token_id is None:
            raise TokenizerError("add_bos was asked for, but this model has no BOS token")
        return ids if ids[:1] == [self.bos_token_id] else [self.bos_token_id, *ids]


def _checked_messages(messages: Any) -> list[dict[str, Any]]:
    if not isinstance(messages, list | tuple):
        raise ChatTemplateError(f"messages must be a list, got {type(messages).__name__}")
    if not messages:
        raise ChatTemplateError("messages is empty: give at least one message")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise ChatTemplateError(
                f'messages[{i}] must be a dict with "role" and "content", got {type(message).__name__}'
            )
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str) or not role:
            raise ChatTemplateError(f'messages[{i}]["role"] must be a non-empty string, got {role!r:.40}')
        if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
            raise ChatTemplateError(
                f'messages[{i}]["content"] must be a string (it may be empty), got {type(content).__name__}'
            )
        _check_strings(message, f"messages[{i}]")
    return [dict(message) for message in messages]


def _check_strings(value: Any, where: str, depth: int = 0) -> None:
    if depth > _MAX_NESTING:
        raise ChatTemplateError(f"{where}: lists and dicts are nested more than {_MAX_NESTING} deep")
    if isinstance(value, str):
        check_text(value, where)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            _check_strings(key, where, depth + 1)
            _check_strings(item, where, depth + 1)
    elif isinstance(value, list | tuple):
        for item in value:
            _check_strings(item, where, depth + 1)
