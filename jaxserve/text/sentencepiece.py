"""Converts a sentencepiece model (tokenizer.model) to a tokenizer of the tokenizers library.

The file is a protobuf message, of which sentencepiece.proto has the fields that matter here.
"""

from __future__ import annotations

import re
from typing import Any

import tokenizers
from google.protobuf.message import DecodeError
from tokenizers import decoders, models, normalizers, pre_tokenizers

from jaxserve.text.sentencepiece_pb2 import SentencepieceModel

_SPACE = "▁"  # replaces a space within pieces
_UNIGRAM, _BPE = 1, 2  # kinds of models
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6  # kinds of pieces
_NEVER = -1e9  # score of pieces that text must not match by name, such as <0x0A>


def parse(data: bytes) -> SentencepieceModel:
    """Parses the content of a tokenizer.model. Raises ValueError."""
    model = SentencepieceModel()
    try:
        model.ParseFromString(data)
    except DecodeError:
        raise ValueError("is not a sentencepiece model, or is truncated") from None
    trainer = model.trainer
    if not 0 <= trainer.unknown < len(model.pieces):
        raise ValueError("is not a sentencepiece model: it has no piece for unknown characters")
    if trainer.kind not in (_UNIGRAM, _BPE):
        raise ValueError(f"is a sentencepiece model of kind {trainer.kind}; only unigram (1) and BPE (2) are supported")
    if trainer.space_after or not model.normalizer.escapes_spaces:
        raise ValueError("is a sentencepiece model with spaces after words or unescaped spaces, which is not supported")
    return model


def special(model: SentencepieceModel) -> list[str]:
    """The texts of the control and unknown pieces."""
    return [piece.text for piece in model.pieces if piece.kind in (_CONTROL, _UNKNOWN)]


def build(model: SentencepieceModel, *, prefix_everywhere: bool, added: dict[str, int]) -> tokenizers.Tokenizer:
    """Builds the tokenizer of a model, without post-processor.

    Args:
      prefix_everywhere: whether a space is added after each special token in a text too, and not only before the text.
      added: ids of further tokens by text.

    Raises:
      ValueError: the ids of the added tokens leave a gap after the model's ids.
    """
    built = tokenizers.Tokenizer(_bpe(model, added) if model.trainer.kind == _BPE else _unigram(model, added))
    rules = model.normalizer
    steps: list[Any] = [normalizers.Precompiled(rules.charsmap)] if rules.charsmap else []
    if rules.single_spaces:
        steps += [
            normalizers.Replace(tokenizers.Regex(r"\A +|[ ▁]+\z"), ""),
            normalizers.Replace(tokenizers.Regex(" {2,}"), " "),
        ]
    if rules.dummy_prefix and prefix_everywhere:
        steps.append(normalizers.Prepend(_SPACE))
    built.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", _SPACE)])
    before: list[Any] = []
    if rules.dummy_prefix and not prefix_everywhere:
        before.append(pre_tokenizers.Metaspace(_SPACE, prepend_scheme="first", split=False))
    if whole := [piece.text for piece in model.pieces if piece.kind == _USER_DEFINED]:
        longest_first = "|".join(re.escape(text) for text in sorted(whole, key=len, reverse=True))
        before.append(pre_tokenizers.Split(tokenizers.Regex(longest_first), "isolated"))
    if before:
        built.pre_tokenizer = pre_tokenizers.Sequence(before)
    after: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    built.decoder = decoders.Sequence([*after, decoders.Strip(" ", 1, 0)] if rules.dummy_prefix else after)
    return built


def _bpe(model: SentencepieceModel, added: dict[str, int]) -> models.BPE:
    """Merges are ordered by the score of the merged piece; only normal pieces are merged."""
    normal = {piece.text: (-piece.score, i) for i, piece in enumerate(model.pieces) if piece.kind == _NORMAL}
    pairs = (
        (*rank, text[:cut], text[cut:])
        for text, rank in normal.items()
        for cut in range(1, len(text))
        if text[:cut] in normal and text[cut:] in normal
    )
    return models.BPE(
        vocab={piece.text: i for i, piece in enumerate(model.pieces)} | added,
        merges=[(left, right) for _, _, left, right in sorted(pairs)],
        unk_token=model.pieces[model.trainer.unknown].text,
        fuse_unk=True,
        byte_fallback=model.trainer.byte_fallback,
        ignore_merges=any(piece.kind == _USER_DEFINED for piece in model.pieces),  # no merge makes user-defined pieces
    )


def _unigram(model: SentencepieceModel, added: dict[str, int]) -> models.Unigram:
    vocab = [(piece.text, _NEVER if piece.kind == _BYTE else piece.score) for piece in model.pieces]
    for text, i in sorted(added.items(), key=lambda item: item[1]):
        if i > len(vocab):
            raise ValueError(f"the token {text!r} is added with id {i}; {len(vocab)} would be the next id")
        if i == len(vocab):
            vocab.append((text, _NEVER))
    return models.Unigram(vocab, unk_id=model.trainer.unknown, byte_fallback=model.trainer.byte_fallback)
