"""How many bytes of a text one token can stand for, and how many tokens a text can have."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import tokenizers

_VISIBLE = (*range(33, 127), *range(161, 173), *range(174, 256))  # bytes that GPT-2's alphabet maps to themselves
BYTES = {chr(byte): byte for byte in _VISIBLE}
BYTES |= {chr(256 + i): byte for i, byte in enumerate(byte for byte in range(256) if byte not in _VISIBLE)}

# How many times as long in UTF-8 a normalizer makes a text at most.
_GROWS = {"NFC": 3, "NFD": 3, "Lowercase": 2, "Strip": 1, "StripAccents": 1}
_COMPOSES = 3  # NFC makes a text at most this many times smaller: U+1100 U+1161 U+11A8 become U+AC01
_SPLITS = frozenset(("ByteLevel", "Digits", "Metaspace", "Punctuation", "Split", "UnicodeScripts"))


def most_bytes(tokenizer: tokenizers.Tokenizer, vocab: Mapping[str, int]) -> int | None:
    """Most UTF-8 bytes of text that a token stands for; None if unbounded or unknown.

    It is unbounded if a step may remove a part of the text, or if one token may stand for any number of unknown
    characters.

    Args:
      vocab: the ids of all tokens, added ones too.
    """
    normalizers, splits = _steps(tokenizer.normalizer), _steps(tokenizer.pre_tokenizer)
    shrinks = 1
    for step in normalizers:
        if step["type"] == "NFC":
            shrinks = _COMPOSES
        elif step["type"] == "Replace":
            pattern = step["pattern"].get("String")
            if pattern is None or len(pattern.encode()) > len(step["content"].encode()):
                return None
        elif step["type"] not in ("Prepend", "NFD"):
            return None
    if any(step["type"] not in _SPLITS or step.get("behavior") == "Removed" for step in splits):
        return None
    if any(token.lstrip or token.rstrip for token in tokenizer.get_added_tokens_decoder().values()):
        return None  # such a token takes any number of spaces
    if any(step["type"] == "ByteLevel" for step in splits):
        names = BYTES.keys()
    elif getattr(tokenizer.model, "byte_fallback", False):
        names = [f"<0x{byte:02X}>" for byte in range(256)]
    else:
        return None
    if not all(name in vocab for name in names):
        return None  # what has no token is dropped, or becomes one unknown token
    return shrinks * max(len(name.encode()) for name in vocab)


def most_tokens(tokenizer: tokenizers.Tokenizer) -> tuple[int, int] | None:
    """(a, b): a text of n bytes in UTF-8 has at most a * n + b tokens. None if that is unknown.

    A token stands for at least one byte of the text that the normalizers return. If a step adds a prefix to a text, it
    may add one to every piece that an earlier step has split off, and each piece has at least one byte.
    """
    times = 1
    for step in _steps(tokenizer.normalizer):
        kind, pattern = step["type"], step.get("pattern", {}).get("String")
        if kind == "Replace" and pattern:
            times *= -(-len(step["content"].encode()) // len(pattern.encode())) or 1
        elif kind == "Prepend":
            times *= 1 + len(step["prepend"].encode())
        elif kind in _GROWS:
            times *= _GROWS[kind]
        else:
            return None
    for step in _steps(tokenizer.pre_tokenizer):
        if step["type"] == "Metaspace":
            times *= 2 * len(step["replacement"].encode())
        elif step["type"] == "ByteLevel" and step.get("add_prefix_space"):
            times *= 2
        elif step["type"] not in _SPLITS:
            return None
    return times, tokenizer.num_special_tokens_to_add(False)


def _steps(component: Any) -> list[dict[str, Any]]:
    """The steps of a normalizer or pre-tokenizer, as tokenizer.json has them."""
    return [] if component is None else _flat(json.loads(component.__getstate__()))


def _flat(step: dict[str, Any]) -> list[dict[str, Any]]:
    if step["type"] != "Sequence":
        return [step]
    return [each for part in step.get("normalizers") or step.get("pretokenizers") or () for each in _flat(part)]
