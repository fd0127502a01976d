"""A tokenizer from the files of a Hugging Face folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from octavo.tokenizer.errors import TokenizerError
from octavo.tokenizer.parts import ControlToken, TokenizerParts

_ROLES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


def parts_from_hf(folder: Path) -> TokenizerParts:
    """The tokenizer of ``folder``.

    Reads ``tokenizer.json`` (needed), and where they exist ``tokenizer_config.json``,
    ``special_tokens_map.json``, ``generation_config.json`` (or else ``config.json``) for the end tokens, and
    ``chat_template.jinja``.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise TokenizerError(
            f"{folder.name!r} has no tokenizer.json, which is needed; a tokenizer of another form can be "
            "converted with transformers: AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
        )
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:
        raise TokenizerError(f"tokenizer.json of {folder.name!r} cannot be read: {error}") from error
    backend.no_truncation()
    backend.no_padding()
    config = _read_json(folder / "tokenizer_config.json")
    named, extra_special = _named_tokens(config, _read_json(folder / "special_tokens_map.json"))
    _complete_added_tokens(backend, config, [*named.values(), *extra_special])

    added = backend.get_added_tokens_decoder()
    control = tuple(
        ControlToken(i, token.content, token.lstrip, token.rstrip, token.single_word)
        for i, token in sorted(added.items())
        if token.special
    )
    bos = _id_of(backend, named.get("bos_token"))
    model_add_bos = bos is not None and backend.encode("a").ids[:1] == [bos]
    add_bos = config.get("add_bos_token")
    backend.encode_special_tokens = True
    return TokenizerParts(
        backend=backend,
        inner_backend=_without_first_space(backend),
        control=control,
        added={i: token.content for i, token in added.items()},
        vocab_size=max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1,
        bos_token_id=bos,
        eos_token_ids=_end_ids(folder, backend, named.get("eos_token")),
        add_bos=model_add_bos if add_bos is None else bool(add_bos) and bos is not None,
        chat_templates=_templates(folder, config),
        named_tokens=named,
    )


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except RecursionError:
        raise TokenizerError(f"{path.name} of {path.parent.name!r} nests too deeply") from None
    except ValueError as error:  # not JSON, not UTF-8, or a number of thousands of digits
        raise TokenizerError(f"{path.name} of {path.parent.name!r} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{path.name} of {path.parent.name!r} must hold a JSON object")
    return value


def _text_of(value: Any) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _named_tokens(config: dict[str, Any], special_map: dict[str, Any]) -> tuple[dict[str, str], list[str]]:
    """Special tokens by role, and the other special ones; ``tokenizer_config.json`` has the last word."""
    merged = {**special_map, **config}
    named = {role: text for role in _ROLES if (text := _text_of(merged.get(role))) is not None}
    others = merged.get("extra_special_tokens", merged.get("additional_special_tokens")) or []
    if not isinstance(others, dict | list):
        raise TokenizerError(f"the tokenizer's other special tokens must be a list, got {others!r:.100}")
    if isinstance(others, dict):
        named.update({role: text for role, item in others.items() if (text := _text_of(item)) is not None})
        others = []
    return named, [text for item in others if (text := _text_of(item)) is not None]


def _complete_added_tokens(
    backend: tokenizers.Tokenizer, config: dict[str, Any], special_texts: list[str]
) -> None:
    """Tell the backend of added tokens that only ``tokenizer_config.json`` knows."""
    known = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    listed = config.get("added_tokens_decoder") or {}
    if not isinstance(listed, dict):
        raise TokenizerError("added_tokens_decoder of tokenizer_config.json must be an object")
    for key, spec in listed.items():
        if not key.isdecimal() or not isinstance(spec, dict) or _text_of(spec) is None:
            raise TokenizerError(f"added_tokens_decoder of tokenizer_config.json has a bad entry {key!r:.40}")
    for key, spec in sorted(listed.items(), key=lambda item: int(item[0])):
        if spec["content"] not in known or (spec.get("special") and not known[spec["content"]].special):
            flags = {
                name: bool(spec[name])
                for name in ("lstrip", "rstrip", "single_word", "normalized")
                if name in spec
            }
            token = AddedToken(spec["content"], special=bool(spec.get("special")), **flags)
            (backend.add_special_tokens if token.special else backend.add_tokens)([token])
            known[token.content] = token
            if backend.token_to_id(token.content) != int(key):
                raise TokenizerError(
                    f"tokenizer_config.json gives {token.content!r} the id {key}, "
                    f"tokenizer.json {backend.token_to_id(token.content)}"
                )
    for text in special_texts:
        # A text without a token of its own gets none: that id would be past the model's vocabulary.
        if backend.token_to_id(text) is not None and not (text in known and known[text].special):
            backend.add_special_tokens([AddedToken(text, special=True, normalized=False)])


def _id_of(backend: tokenizers.Tokenizer, text: str | None) -> int | None:
    return None if text is None else backend.token_to_id(text)


def _end_ids(folder: Path, backend: tokenizers.Tokenizer, eos: str | None) -> tuple[int, ...]:
    generation = _read_json(folder / "generation_config.json") or _read_json(folder / "config.json")
    listed = generation.get("eos_token_id")
    ids = [_id_of(backend, eos), *(listed if isinstance(listed, list) else [listed])]
    wrong = [i for i in ids if i is not None and (isinstance(i, bool) or not isinstance(i, int) or i < 0)]
    if wrong:
        raise TokenizerError(f"eos_token_id of {folder.name!r} must be ids of 0 or more, got {wrong[0]!r}")
    return tuple(dict.fromkeys(i for i in ids if i is not None))


def _without_first_space(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """The same tokenizer for text in the middle of a prompt.

    Some put a space before the first word of a whole text only ("prepend_scheme": "first"). Text behind a
    control token is encoded by itself here, and is not the first.
    """
    if backend.pre_tokenizer is None or b'"first"' not in backend.pre_tokenizer.__getstate__():
        return backend
    state = json.loads(backend.to_str())
    steps = [state["pre_tokenizer"]]
    for step in steps:
        steps += step.get("pretokenizers", [])
        if step.get("prepend_scheme") == "first":
            step["prepend_scheme"] = "never"
    inner = tokenizers.Tokenizer.from_str(json.dumps(state))
    inner.encode_special_tokens = True
    return inner


def _templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            return {"default": path.read_text(encoding="utf-8")}
        except UnicodeDecodeError:
            raise TokenizerError(f"{path.name} of {folder.name!r} is not UTF-8") from None
    source = config.get("chat_template")
    if isinstance(source, str):
        return {"default": source}
    if isinstance(source, list):
        pairs = [(item.get("name"), item.get("template")) for item in source if isinstance(item, dict)]
        found = {k: v for k, v in pairs if isinstance(k, str) and isinstance(v, str)}
        if len(found) == len(source):
            return found
    if source is not None:
        raise TokenizerError(
            "chat_template of tokenizer_config.json must be a string, or a list of named strings"
        )
    return {}
