"""Converts a sentencepiece model (tokenizer.model) to a tokenizer of the tokenizers library.

The file is a protobuf message. The field numbers below are those of sentencepiece_model.proto in
github.com/google/sentencepiece.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

_SPACE = "▁"  # replaces a space within pieces
_UNIGRAM, _BPE = 1, 2  # kinds of models
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6  # kinds of pieces
_NEVER = -1e9  # score of pieces that text must not match by name, such as <0x0A>


@dataclass(slots=True, kw_only=True)
class SentencepieceModel:
    """The fields of a sentencepiece model that define the tokenizer, with their defaults.

    Attributes:
      pieces: text, score and kind of each token id.
      charsmap: rules that replace characters, in the format of `normalizers.Precompiled`; may be empty.
    """

    pieces: list[tuple[str, float, int]] = field(default_factory=list)
    kind: int = _UNIGRAM
    byte_fallback: bool = False
    unknown: int = 0
    space_after: bool = False
    charsmap: bytes = b""
    dummy_prefix: bool = True
    single_spaces: bool = True
    escapes_spaces: bool = True

    def special(self) -> list[str]:
        """The texts of the control and unknown pieces."""
        return [text for text, _, kind in self.pieces if kind in (_CONTROL, _UNKNOWN)]


def parse(data: bytes) -> SentencepieceModel:
    """Parses the content of a tokenizer.model. Raises ValueError."""
    model = SentencepieceModel()
    try:
        for number, value in _fields(data):
            if number == 1:
                model.pieces.append(_piece(value))
            elif number == 2:
                _read_training(model, value)
            elif number == 3:
                _read_normalizer(model, value)
    except (ValueError, TypeError, LookupError, AttributeError, struct.error) as problem:
        raise ValueError(f"is not a sentencepiece model, or is truncated ({type(problem).__name__})") from None
    if not 0 <= model.unknown < len(model.pieces):
        raise ValueError("is not a sentencepiece model: it has no piece for unknown characters")
    if model.kind not in (_UNIGRAM, _BPE):
        raise ValueError(f"is a sentencepiece model of kind {model.kind}; only unigram (1) and BPE (2) are supported")
    if model.space_after or not model.escapes_spaces:
        raise ValueError("is a sentencepiece model with spaces after words or unescaped spaces, which is not supported")
    return model


def build(model: SentencepieceModel, *, prefix_everywhere: bool, added: dict[str, int]) -> tokenizers.Tokenizer:
    """Builds the tokenizer of a model, without post-processor.

    Args:
      prefix_everywhere: whether a space is added after each special token in a text too, and not only before the text.
      added: ids of further tokens by text.

    Raises:
      ValueError: the ids of the added tokens leave a gap after the model's ids.
    """
    built = tokenizers.Tokenizer(_bpe(model, added) if model.kind == _BPE else _unigram(model, added))
    steps: list[Any] = [normalizers.Precompiled(model.charsmap)] if model.charsmap else []
    if model.single_spaces:
        steps += [
            normalizers.Replace(tokenizers.Regex(r"\A +|[ ▁]+\z"), ""),
            normalizers.Replace(tokenizers.Regex(" {2,}"), " "),
        ]
    if model.dummy_prefix and prefix_everywhere:
        steps.append(normalizers.Prepend(_SPACE))
    built.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", _SPACE)])
    before: list[Any] = []
    if model.dummy_prefix and not prefix_everywhere:
        before.append(pre_tokenizers.Metaspace(_SPACE, prepend_scheme="first", split=False))
    if whole := [text for text, _, kind in model.pieces if kind == _USER_DEFINED]:
        longest_first = "|".join(re.escape(text) for text in sorted(whole, key=len, reverse=True))
        before.append(pre_tokenizers.Split(tokenizers.Regex(longest_first), "isolated"))
    if before:
        built.pre_tokenizer = pre_tokenizers.Sequence(before)
    after: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    built.decoder = decoders.Sequence([*after, decoders.Strip(" ", 1, 0)] if model.dummy_prefix else after)
    return built


def _bpe(model: SentencepieceModel, added: dict[str, int]) -> models.BPE:
    """Merges are ordered by the score of the merged piece; only normal pieces are merged."""
    normal = {text: (-score, i) for i, (text, score, kind) in enumerate(model.pieces) if kind == _NORMAL}
    pairs = (
        (*rank, text[:cut], text[cut:])
        for text, rank in normal.items()
        for cut in range(1, len(text))
        if text[:cut] in normal and text[cut:] in normal
    )
    return models.BPE(
        vocab={text: i for i, (text, _, _) in enumerate(model.pieces)} | added,
        merges=[(left, right) for _, _, left, right in sorted(pairs)],
        unk_token=model.pieces[model.unknown][0],
        fuse_unk=True,
        byte_fallback=model.byte_fallback,
        ignore_merges=any(kind == _USER_DEFINED for _, _, kind in model.pieces),  # no merge makes user-defined pieces
    )


def _unigram(model: SentencepieceModel, added: dict[str, int]) -> models.Unigram:
    vocab = [(text, _NEVER if kind == _BYTE else score) for text, score, kind in model.pieces]
    for text, i in sorted(added.items(), key=lambda item: item[1]):
        if i > len(vocab):
            raise ValueError(f"the token {text!r} is added with id {i}; {len(vocab)} would be the next id")
        if i == len(vocab):
            vocab.append((text, _NEVER))
    return models.Unigram(vocab, unk_id=model.unknown, byte_fallback=model.byte_fallback)


def _piece(data: bytes) -> tuple[str, float, int]:
    text, score, kind = "", 0.0, _NORMAL
    for number, value in _fields(data):
        if number == 1:
            text = value.decode()
        elif number == 2:
            (score,) = struct.unpack("<f", value)
        elif number == 3:
            kind = value
    return text, score, kind


def _read_training(model: SentencepieceModel, data: bytes) -> None:
    for number, value in _fields(data):
        if number == 3:
            model.kind = value
        elif number == 24:
            model.space_after = bool(value)
        elif number == 35:
            model.byte_fallback = bool(value)
        elif number == 40:
            model.unknown = value


def _read_normalizer(model: SentencepieceModel, data: bytes) -> None:
    for number, value in _fields(data):
        if number == 2:
            model.charsmap = value
        elif number == 3:
            model.dummy_prefix = bool(value)
        elif number == 4:
            model.single_spaces = bool(value)
        elif number == 5:
            model.escapes_spaces = bool(value)


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """(number, value) of each field of a protobuf message: an int for a varint, else bytes."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        kind = tag & 7
        if kind == 0:
            value, at = _varint(data, at)
        else:
            if kind == 2:
                length, at = _varint(data, at)
            else:
                length = {1: 8, 5: 4}[kind]
            value, at = data[at : at + length], at + length
            if at > len(data):
                raise ValueError
        yield tag >> 3, value


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
        if shift > 63:
            raise ValueError
