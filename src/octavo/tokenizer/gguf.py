"""A tokenizer from the vocabulary, merges or scores, and rules that a GGUF file carries."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from octavo.tokenizer.errors import TokenizerError
from octavo.tokenizer.parts import ControlToken, TokenizerParts

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

#: Rebuilding merges takes time that grows with the square of a token's length. Real ones have up to 50.
_MAX_PIECE_CHARACTERS = 256

#: Texts of tokens that end a turn, for files that mark none: without one a chat would never end.
_END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>", "<|endofturn|>")


@dataclass(frozen=True, slots=True)
class _PreRule:
    """How text is cut before byte-level BPE: by ``pattern`` (None: GPT-2's), after ``split_digits``."""

    pattern: str | None = None
    split_digits: bool = False
    nfc: bool = False
    ignore_merges: bool = False
    add_bos: bool = False


_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

_GPT2 = _PreRule()
_DIGIT_BY_DIGIT = _PreRule(split_digits=True)
_LLAMA3 = _PreRule(_WORDS + r"\p{N}{1,3}" + _REST, ignore_merges=True, add_bos=True)

#: ``tokenizer.ggml.pre`` -> the rule of the models that use it, as in their own tokenizer.json.
PRE_RULES = {
    "gpt-2": _GPT2,
    "phi-2": _GPT2,
    "smollm": _DIGIT_BY_DIGIT,
    "starcoder": _DIGIT_BY_DIGIT,
    "refact": _DIGIT_BY_DIGIT,
    "command-r": _PreRule(split_digits=True, nfc=True),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _PreRule(_WORDS + r"\p{N}" + _REST, nfc=True),
}


@dataclass(frozen=True, slots=True)
class _Vocab:
    tokens: list[str]
    types: list[int]
    ids: dict[str, int]


def parts_from_gguf(metadata: Mapping[str, Any]) -> TokenizerParts:
    """The tokenizer that ``metadata`` (a GGUF file's keys and values) describes.

    Raises :class:`TokenizerError` for a kind of tokenizer, or of cutting rule, that is not known
    exactly: a near miss would give plausible, wrong ids.
    """
    model = metadata.get("tokenizer.ggml.model")
    builders: dict[str, Callable[[Mapping[str, Any], _Vocab], tuple[tokenizers.Tokenizer, bool]]] = {
        "gpt2": _byte_level,
        "llama": _sentencepiece,
    }
    if not isinstance(model, str) or model not in builders:
        raise TokenizerError(f"tokenizer.ggml.model is {model!r}; the known ones are {', '.join(builders)}")
    vocab = _vocab(metadata)
    backend, default_bos = builders[model](metadata, vocab)
    literal = [i for i, kind in enumerate(vocab.types) if kind == USER_DEFINED and vocab.tokens[i]]
    if literal:
        backend.add_tokens([AddedToken(vocab.tokens[i], normalized=False) for i in literal])

    named = {}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token_id = _token_id(metadata, key, len(vocab.tokens))
        if token_id is not None:
            named[f"{name}_token"] = vocab.tokens[token_id]
    bos = _token_id(metadata, "bos", len(vocab.tokens))
    ends = _end_ids(metadata, vocab)
    control = {i for i, kind in enumerate(vocab.types) if kind in (UNKNOWN, CONTROL)}
    control |= {*ends} if bos is None else {*ends, bos}
    add_bos = metadata.get("tokenizer.ggml.add_bos_token", default_bos)
    return TokenizerParts(
        backend=backend,
        inner_backend=backend,
        control=tuple(ControlToken(i, vocab.tokens[i]) for i in sorted(control)),
        added={i: vocab.tokens[i] for i in sorted(control.union(literal))},
        vocab_size=len(vocab.tokens),
        bos_token_id=bos,
        eos_token_ids=ends,
        add_bos=bool(add_bos) and bos is not None,
        chat_templates=_templates(metadata),
        named_tokens=named,
    )


def _array(metadata: Mapping[str, Any], key: str, kind: type, default: list[Any] | None = None) -> list[Any]:
    value = metadata.get(f"tokenizer.ggml.{key}", default)
    if value is None:
        raise TokenizerError(f"the GGUF file has no tokenizer.ggml.{key}, which its tokenizer needs")
    # By the few types that there are: a look at each of 100,000 items takes a tenth of the start.
    if not isinstance(value, list) or not all(issubclass(found, kind) for found in set(map(type, value))):
        raise TokenizerError(f"tokenizer.ggml.{key} of the GGUF file must be an array of {kind.__name__}")
    return value


def _vocab(metadata: Mapping[str, Any]) -> _Vocab:
    tokens: list[str] = _array(metadata, "tokens", str)
    types: list[int] = _array(metadata, "token_type", int, default=[NORMAL] * len(tokens))
    if not tokens or len(types) != len(tokens):
        raise TokenizerError(
            f"the GGUF file has {len(tokens)} tokens and {len(types)} token types: each token needs one"
        )
    ids = {token: i for i, token in enumerate(tokens)}
    if len(ids) != len(tokens):
        twice = next(token for i, token in enumerate(tokens) if ids[token] != i)
        raise TokenizerError(f"the GGUF file's vocabulary holds the token {twice!r} more than once")
    return _Vocab(tokens, types, ids)


def _byte_level(metadata: Mapping[str, Any], vocab: _Vocab) -> tuple[tokenizers.Tokenizer, bool]:
    name = metadata.get("tokenizer.ggml.pre")
    rule = PRE_RULES.get(name) if isinstance(name, str) else None
    if rule is None:
        raise TokenizerError(
            f"tokenizer.ggml.pre is {name!r}, and how it cuts text is not known; "
            f"the known ones are {', '.join(sorted(PRE_RULES))}"
        )
    merges = []
    for merge in _array(metadata, "merges", str):
        left, space, right = merge.partition(" ")
        if not (left and space and right):
            raise TokenizerError(
                f"the GGUF file's merge {merge!r:.60} is not two tokens with a space between"
            )
        merges.append((left, right))
    backend = _backend(vocab.ids, merges, ignore_merges=rule.ignore_merges)
    if rule.nfc:
        backend.normalizer = normalizers.NFC()
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", False))
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if rule.split_digits else []
    if rule.pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(rule.pattern), "isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=rule.pattern is None))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    return backend, rule.add_bos


def _sentencepiece(metadata: Mapping[str, Any], vocab: _Vocab) -> tuple[tokenizers.Tokenizer, bool]:
    scores: list[float] = _array(metadata, "scores", float)
    if len(scores) != len(vocab.tokens):
        raise TokenizerError(
            f"the GGUF file has {len(vocab.tokens)} tokens and {len(scores)} scores: each token needs one"
        )
    if not all(map(math.isfinite, scores)):
        raise TokenizerError("the GGUF file has a token score that is not a finite number")
    longest = max(map(len, vocab.tokens))
    if longest > _MAX_PIECE_CHARACTERS:
        raise TokenizerError(
            f"the GGUF file has a token of {longest} characters; at most {_MAX_PIECE_CHARACTERS} are allowed"
        )
    if metadata.get("tokenizer.ggml.remove_extra_whitespaces", False):
        raise TokenizerError("tokenizer.ggml.remove_extra_whitespaces is set, which is not supported")
    bytes_present = vocab.types.count(BYTE)
    if bytes_present not in (0, 256):
        raise TokenizerError(
            f"the GGUF file's vocabulary has {bytes_present} byte tokens; 256 or none are needed"
        )
    unknown = _token_id(metadata, "unknown", len(vocab.tokens))
    backend = _backend(
        vocab.ids,
        _merges_from_scores(vocab, scores),
        byte_fallback=bytes_present > 0,
        fuse_unk=True,
        unk_token=None if unknown is None else vocab.tokens[unknown],
    )
    # Where a model has it, the space comes before the first word behind an added token too.
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    replace = normalizers.Replace(" ", "▁")
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace]) if prefix else replace
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        steps.append(decoders.Strip(" ", 1, 0))
    backend.decoder = decoders.Sequence(steps)
    return backend, True


def _merges_from_scores(vocab: _Vocab, scores: list[float]) -> list[tuple[str, str]]:
    """The pairs that join into each token, best score first.

    SentencePiece joins the neighbours whose joint token has the best score. A merge list says the same
    when every way to cut a token in two comes at the rank of that token's score. Only ordinary tokens are
    pieces: a control token must never come out of a merge.
    """
    ordinary = [i for i, kind in enumerate(vocab.types) if kind == NORMAL]
    pieces = {vocab.tokens[i] for i in ordinary}
    ordinary.sort(key=lambda i: -scores[i])
    return [
        (token[:cut], token[cut:])
        for token in (vocab.tokens[i] for i in ordinary)
        for cut in range(len(token) - 1, 0, -1)
        if token[:cut] in pieces and token[cut:] in pieces
    ]


def _backend(ids: dict[str, int], merges: list[tuple[str, str]], **options: Any) -> tokenizers.Tokenizer:
    try:
        backend = tokenizers.Tokenizer(models.BPE(vocab=ids, merges=merges, **options))
    except Exception as error:
        raise TokenizerError(f"the GGUF file's vocabulary and merges do not fit together: {error}") from error
    backend.encode_special_tokens = True
    return backend


def _token_id(metadata: Mapping[str, Any], name: str, size: int) -> int | None:
    value = metadata.get(f"tokenizer.ggml.{name}_token_id")
    if value is None:
        return None
    if not isinstance(value, int) or not 0 <= value < size:
        raise TokenizerError(f"tokenizer.ggml.{name}_token_id is {value!r}; ids are 0 to {size - 1}")
    return value


def _end_ids(metadata: Mapping[str, Any], vocab: _Vocab) -> tuple[int, ...]:
    size = len(vocab.tokens)
    ends = [_token_id(metadata, name, size) for name in ("eos", "eot", "eom")]
    if ends[1] is None:
        ends += [
            vocab.ids[text]
            for text in _END_OF_TURN
            if text in vocab.ids and vocab.types[vocab.ids[text]] == CONTROL
        ]
    return tuple(dict.fromkeys(end for end in ends if end is not None))


def _templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    found = {}
    for key, value in metadata.items():
        if key == "tokenizer.chat_template" and isinstance(value, str):
            found["default"] = value
        elif key.startswith("tokenizer.chat_template.") and isinstance(value, str):
            found[key.removeprefix("tokenizer.chat_template.")] = value
    return found
