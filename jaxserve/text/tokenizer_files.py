"""Reads the tokenizer of a checkpoint directory from any of its published formats.

tokenizer.json holds the complete tokenizer and is preferred. Otherwise tokenizer.model (sentencepiece), or vocab.json
with merges.txt (byte-level BPE), hold the vocabulary, and tokenizer_config.json, special_tokens_map.json and
added_tokens.json hold the special tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from jaxserve.text import sentencepiece

TOKENIZER_JSON, SENTENCEPIECE, VOCAB_JSON, MERGES = "tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt"
CONFIG, SPECIAL, ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
TOKENIZER_FILES = (TOKENIZER_JSON, SENTENCEPIECE, VOCAB_JSON, MERGES, CONFIG, SPECIAL, ADDED)
T = TypeVar("T")
_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

# Classes of transformers, without "Fast", whose tokenizers are supported; others have further steps.
_LLAMA = ("LlamaTokenizer", "CodeLlamaTokenizer", "GemmaTokenizer")
_GPT2 = ("GPT2Tokenizer", "CodeGenTokenizer")
_QWEN2 = ("Qwen2Tokenizer",)
_LIKE_GPT2 = ("gpt2", "opt", "gptj", "gpt_neo", "gpt_bigcode", "codegen")  # model_type, if no class is named
_LIKE_LLAMA = ("llama", "mistral", "mixtral", "gemma", "gemma2", "gemma3_text")
_QWEN2_WORDS = (  # from tokenizer.json of Qwen2
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Settings:
    """The settings in tokenizer_config.json, special_tokens_map.json and added_tokens.json.

    Attributes:
      kind: name of the class in transformers, without "Fast"; empty if none is named.
      entries: tokenizer_config.json, with missing entries from special_tokens_map.json.
      tokens: added tokens, special or not, with their ids (None if not given).
    """

    kind: str
    entries: dict[str, Any]
    tokens: list[tuple[tokenizers.AddedToken, int | None]]

    def text(self, name: str) -> str | None:
        """The text of a token such as bos_token; None if there is none."""
        token = self.entries.get(name)
        return token["content"] if isinstance(token, dict) else token

    def flag(self, name: str, default: bool) -> bool:
        """A boolean setting."""
        value = self.entries.get(name)
        return default if value is None else bool(value)


def read(directory: Path) -> tokenizers.Tokenizer | None:
    """Reads the tokenizer of a directory; returns None if it has none.

    Raises:
      ValueError: a file cannot be read, or its tokenizer is not supported.
    """
    if (file := directory / TOKENIZER_JSON).exists():
        return _checked(file, lambda: tokenizers.Tokenizer.from_str(file.read_text(encoding="utf-8")))
    if (file := directory / SENTENCEPIECE).exists():
        return _checked(file, lambda: _from_sentencepiece(directory))
    if (file := directory / VOCAB_JSON).exists() and (directory / MERGES).exists():
        return _checked(file, lambda: _from_merges(directory))
    return None


def vocabulary(directory: Path) -> tuple[Path, dict[str, int]]:
    """Reads (file, token ids by text) of a directory's vocabulary; no ids without one.

    Raises:
      ValueError: a file exists and cannot be read.
    """
    if (file := directory / TOKENIZER_JSON).exists():
        return file, _checked(file, lambda: _vocabulary_of(_json(file)))
    if (file := directory / SENTENCEPIECE).exists():
        pieces = _checked(file, lambda: sentencepiece.parse(file.read_bytes()).pieces)
        ids = {piece.text: i for i, piece in enumerate(pieces)}
    elif (file := directory / VOCAB_JSON).exists():
        ids = _checked(file, lambda: _json(file))
    else:
        return file, {}
    settings = _checked(file, lambda: _settings(directory))
    return file, ids | {token.content: i for token, i in settings.tokens if i is not None}


def _vocabulary_of(entries: dict[str, Any]) -> dict[str, int]:
    """The ids of all tokens in the entries of a tokenizer.json, by text."""
    try:
        ids = entries["model"]["vocab"]
        if not isinstance(ids, dict):
            ids = {text: i for i, (text, _) in enumerate(ids)}
        return ids | {token["content"]: token["id"] for token in entries.get("added_tokens") or []}
    except (KeyError, TypeError, ValueError):
        raise ValueError("it has no vocabulary of tokens and their ids") from None


def special_tokens(directory: Path) -> dict[str, str]:
    """Texts of the special tokens in the settings files, by names such as eos_token.

    Raises:
      ValueError: a file exists and cannot be read.
    """
    settings = _checked(directory / CONFIG, lambda: _settings(directory))
    return {name: text for name in _NAMES if (text := settings.text(name))}


def _checked(file: Path, make: Callable[[], T]) -> T:
    try:
        return make()
    except Exception as problem:  # the library raises bare Exception
        kind = "" if file.name != TOKENIZER_JSON else "not a tokenizer of the tokenizers library: "
        raise ValueError(f"{file}: {kind}{problem}") from problem


def _from_sentencepiece(directory: Path) -> tokenizers.Tokenizer:
    settings = _settings(directory)
    if _class_of(directory, settings.kind, _LLAMA, _LIKE_LLAMA) is None:
        raise ValueError(_unsupported(settings.kind))
    model = sentencepiece.parse((directory / SENTENCEPIECE).read_bytes())
    if (prefix := settings.entries.get("add_prefix_space")) is not None:
        model.normalizer.dummy_prefix = bool(prefix)
    added = _ids(settings, {piece.text: i for i, piece in enumerate(model.pieces)})
    built = sentencepiece.build(model, prefix_everywhere=settings.flag("legacy", True), added=added)
    specials = [tokenizers.AddedToken(text, normalized=False, special=True) for text in sentencepiece.special(model)]
    _finish(built, settings, specials, bos=settings.text("bos_token") or _first(built, "<s>", "<bos>"), add_bos=True)
    return built


def _from_merges(directory: Path) -> tokenizers.Tokenizer:
    settings = _settings(directory)
    kind = _class_of(directory, settings.kind, (*_GPT2, *_QWEN2), _LIKE_GPT2)
    if kind is None:
        raise ValueError(_unsupported(settings.kind))
    vocab = _json(directory / VOCAB_JSON)
    lines = (directory / MERGES).read_text(encoding="utf-8").splitlines()
    pairs = [tuple(line.split(" ")) for line in lines if line and not line.startswith("#version")]
    if any(len(pair) != 2 for pair in pairs):
        raise ValueError(f"{MERGES} beside it has lines that are not pairs of tokens")
    merges: list[tuple[str, str]] = [(pair[0], pair[1]) for pair in pairs]
    built = tokenizers.Tokenizer(models.BPE(vocab=vocab | _ids(settings, vocab), merges=merges))
    prefix = settings.flag("add_prefix_space", False)
    if kind in _QWEN2:
        built.normalizer = normalizers.NFC()
        words = pre_tokenizers.Split(tokenizers.Regex(_QWEN2_WORDS), "isolated")
        bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=False)
        built.pre_tokenizer = pre_tokenizers.Sequence([words, bytes_of])
    else:
        built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    built.decoder = decoders.ByteLevel()
    specials = []
    if settings.text("eos_token") is None and (text := _first(built, "<|endoftext|>")) is not None:
        specials = [tokenizers.AddedToken(text, normalized=False, special=True)]
    _finish(built, settings, specials, bos=settings.text("bos_token"), add_bos=False)
    return built


def _class_of(directory: Path, kind: str, classes: tuple[str, ...], families: tuple[str, ...]) -> str | None:
    """The supported class of a tokenizer, or None. If no class is named, model_type decides."""
    if kind:
        return kind if kind in classes else None
    family = _json(directory / "config.json").get("model_type") if (directory / "config.json").exists() else None
    return classes[0] if family in families else None


def _unsupported(kind: str) -> str:
    named = f"is of {kind}" if kind else f"has no tokenizer_class in {CONFIG}"
    return (
        f"{named}, which is not supported in this format; write {TOKENIZER_JSON} beside it "
        "(transformers: AutoTokenizer.from_pretrained(DIR), then save_pretrained(DIR))"
    )


def _finish(
    built: tokenizers.Tokenizer,
    settings: _Settings,
    specials: list[tokenizers.AddedToken],
    *,
    bos: str | None,
    add_bos: bool,
) -> None:
    """Adds the added tokens, and the special tokens before and after a text."""
    built.add_tokens(specials)
    known = built.get_vocab(with_added_tokens=True)  # a model has no embedding for a token without an id
    built.add_tokens([token for token, i in settings.tokens if i is not None or token.content in known])
    for token, i in settings.tokens:
        if i is not None and built.token_to_id(token.content) != i:
            raise ValueError(f"the token {token.content!r} is added with id {i}, which is taken")
    around = []
    if settings.flag("add_bos_token", add_bos) and bos is not None:
        around.append(bos)
    around.append("$A")
    if settings.flag("add_eos_token", False) and (eos := settings.text("eos_token")) is not None:
        around.append(eos)
    ids = {text: built.token_to_id(text) for text in around if text != "$A"}
    if None in ids.values():
        raise ValueError(f"{CONFIG} beside it puts {around} around a text, which are not all in the vocabulary")
    if ids:
        built.post_processor = processors.TemplateProcessing(single=around, special_tokens=list(ids.items()))


def _first(built: tokenizers.Tokenizer, *texts: str) -> str | None:
    return next((text for text in texts if built.token_to_id(text) is not None), None)


def _ids(settings: _Settings, vocab: dict[str, int]) -> dict[str, int]:
    """The ids of added tokens that are not in the vocabulary."""
    return {token.content: i for token, i in settings.tokens if i is not None and token.content not in vocab}


def _settings(directory: Path) -> _Settings:
    """Reads the settings files; each may be missing."""
    config, special, added = (
        _json(directory / name) if (directory / name).exists() else {} for name in (CONFIG, SPECIAL, ADDED)
    )
    entries = special | {name: value for name, value in config.items() if value is not None}
    named = [entries[name] for name in _NAMES if entries.get(name)]
    named += entries.get("additional_special_tokens") or []
    found: dict[str, tuple[tokenizers.AddedToken, int | None]] = {}
    for text, i in added.items():
        found[text] = (tokenizers.AddedToken(text, normalized=True, special=False), int(i))
    for token in named:
        made = _token(token, special=True)
        found[made.content] = (made, found.get(made.content, (made, None))[1])
    for i, token in (entries.get("added_tokens_decoder") or {}).items():
        made = _token(token, special=bool(token.get("special")))
        found[made.content] = (made, int(i))
    kind = str(entries.get("tokenizer_class") or "").removesuffix("Fast")
    ordered = sorted(found.values(), key=lambda pair: -1 if pair[1] is None else pair[1])
    return _Settings(kind=kind, entries=entries, tokens=ordered)


def _token(token: Any, *, special: bool) -> tokenizers.AddedToken:
    """Parses an added token: its text, or an object with its settings."""
    if isinstance(token, str):
        return tokenizers.AddedToken(token, normalized=not special, special=special)
    flags = {name: bool(token[name]) for name in ("lstrip", "rstrip", "single_word") if name in token}
    return tokenizers.AddedToken(
        token["content"], normalized=bool(token.get("normalized", not special)), special=special, **flags
    )


def _json(file: Path) -> dict[str, Any]:
    try:
        entries = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as problem:
        raise ValueError(f"{file.name} is not JSON ({problem})") from problem
    if not isinstance(entries, dict):
        raise ValueError(f"{file.name} does not hold a JSON object")
    return entries
