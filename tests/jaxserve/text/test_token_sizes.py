"""How many tokens a text of so many bytes may have."""

from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import models, normalizers, pre_tokenizers, processors

from jaxserve.text.token_sizes import BYTES, most_tokens
from jaxserve.text.tokenizer import Tokenizer

BYTE_LEVEL: dict[str, Any] = {"pre_tokenizer": pre_tokenizers.ByteLevel(add_prefix_space=False)}
GROW = "\u0958\U0001d160\u0130 a<s>"  # what NFC, NFD, lower case, prefixes and spaces make longer


def tokenizer_of(parts: dict[str, Any], names: list[str]) -> tokenizers.Tokenizer:
    """A tokenizer without merges: each byte that is left has a token."""
    vocab = {name: i for i, name in enumerate(dict.fromkeys(names))}
    made = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=names[0].startswith("<0x")))
    for name, part in parts.items():
        setattr(made, name, part)
    made.add_special_tokens(["<s>"])
    return made


@pytest.mark.parametrize(
    ("parts", "names", "expected"),
    [
        (BYTE_LEVEL, list(BYTES), (1, 0)),
        (BYTE_LEVEL | {"normalizer": normalizers.NFC()}, list(BYTES), (3, 0)),
        (
            BYTE_LEVEL | {"normalizer": normalizers.Sequence([normalizers.NFD(), normalizers.Lowercase()])},
            [*BYTES],
            (6, 0),
        ),
        ({"pre_tokenizer": pre_tokenizers.ByteLevel(add_prefix_space=True)}, list(BYTES), (2, 0)),
        (
            BYTE_LEVEL | {"post_processor": processors.TemplateProcessing("<s> $A <s>", None, [("<s>", 256)])},
            list(BYTES),
            (1, 2),
        ),
        (
            {"normalizer": normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])},
            [f"<0x{byte:02X}>" for byte in range(256)],
            (12, 0),
        ),
        ({"pre_tokenizer": pre_tokenizers.Metaspace()}, [f"<0x{byte:02X}>" for byte in range(256)], (6, 0)),
    ],
)
def test_a_text_has_no_more_tokens_than_its_bytes_tell(
    parts: dict[str, Any], names: list[str], expected: tuple[int, int]
) -> None:
    made = tokenizer_of(parts, names)
    assert most_tokens(made) == expected
    tokenizer = Tokenizer(made)

    @settings(max_examples=100, deadline=None, database=None)
    @given(st.one_of(st.text(max_size=40), st.text(GROW, max_size=40)))
    def holds(text: str) -> None:
        size = len(text.encode(errors="replace"))
        try:
            assert len(tokenizer.encode(text)) <= tokenizer.most_tokens(size)
        except ValueError:  # half of a surrogate pair
            assert not text.isprintable()

    holds()


@pytest.mark.parametrize(
    "part", [normalizers.NFKC(), normalizers.Replace(tokenizers.Regex("a*"), "bc"), normalizers.BertNormalizer()]
)
def test_of_other_tokenizers_no_bound_is_known(part: Any) -> None:
    made = tokenizer_of(BYTE_LEVEL | {"normalizer": part}, list(BYTES))
    assert most_tokens(made) is None
    assert Tokenizer(made).most_tokens(1) == float("inf")
