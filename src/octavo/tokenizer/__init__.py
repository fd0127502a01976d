"""Text to token ids and back: encoding, chat templates, incremental decoding."""

from octavo.tokenizer.core import Tokenizer
from octavo.tokenizer.detokenizer import IncrementalDetokenizer
from octavo.tokenizer.errors import ChatTemplateError, TokenizerError

__all__ = ["ChatTemplateError", "IncrementalDetokenizer", "Tokenizer", "TokenizerError"]
