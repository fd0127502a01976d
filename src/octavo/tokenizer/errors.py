"""What can go wrong with text, each said in one sentence."""

from __future__ import annotations


class TokenizerError(ValueError):
    """A tokenizer that cannot be built, or text or ids that it cannot take."""


class ChatTemplateError(TokenizerError):
    """Messages that the chat template refuses, or a template that fails or is not allowed."""


def check_text(text: object, what: str) -> str:
    """``text`` itself, or a :class:`TokenizerError` when it is not a string that UTF-8 can hold.

    ``what`` names it in the message, for example "the prompt".
    """
    if not isinstance(text, str):
        raise TokenizerError(f"{what} must be a string, got {type(text).__name__}")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise TokenizerError(
            f"{what} contains a lone surrogate (U+{ord(text[error.start]):04X}) at character {error.start}, "
            "which is not a character: send valid Unicode text"
        ) from None
    return text
