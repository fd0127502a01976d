"""What a loader hands to :class:`octavo.tokenizer.Tokenizer`, whatever kind of file it read."""

from __future__ import annotations

from dataclasses import dataclass, field

import tokenizers


@dataclass(frozen=True, slots=True)
class ControlToken:
    """A token that steers the model and that plain text never becomes, for example an end of turn.

    ``lstrip`` and ``rstrip`` swallow the white space beside it; ``single_word`` forbids letters there.
    """

    id: int
    text: str
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerParts:
    """A tokenizer in pieces.

    Attributes:
        backend: encodes text that starts a prompt; never recognises a control token.
        inner_backend: encodes text behind a control token; differs from ``backend`` only where the
            model puts a space before the first word of a prompt and nowhere else.
        control: the control tokens.
        added: id -> text of every added token, control or not: their text is taken literally.
        vocab_size: one more than the highest id.
        bos_token_id: the token that starts a text, if the model has one.
        eos_token_ids: every token that ends a text.
        add_bos: whether the model wants ``bos_token_id`` before a prompt.
        chat_templates: name -> Jinja source; "default" is the usual one.
        named_tokens: the special tokens' texts by role, for templates ("bos_token", "eos_token", ...).
    """

    backend: tokenizers.Tokenizer
    inner_backend: tokenizers.Tokenizer
    control: tuple[ControlToken, ...]
    added: dict[int, str]
    vocab_size: int
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    add_bos: bool = False
    chat_templates: dict[str, str] = field(default_factory=dict)
    named_tokens: dict[str, str] = field(default_factory=dict)
