"""Grammars for the demo model's tokenizer, whose tokens have many characters."""

import numpy as np

from jaxserve.demo import DEMO_MODEL
from jaxserve.sampling_params import Grammar
from jaxserve.structured_output.compiler import GrammarCompiler
from jaxserve.text.tokenizer import Tokenizer

DEMO = Tokenizer.from_directory(DEMO_MODEL)
assert DEMO is not None
DEMO_VOCAB, DEMO_EOS = 4096, 0


def new_compiler(vocab_size: int = DEMO_VOCAB) -> GrammarCompiler:
    """A compiler that has compiled nothing yet."""
    return GrammarCompiler(DEMO, vocab_size, (DEMO_EOS,))


def regex(text: str) -> Grammar:
    return Grammar(kind="regex", text=text)


def tokens_of(allowed: np.ndarray) -> list[int]:
    """The tokens of a mask."""
    return np.flatnonzero(np.unpackbits(allowed.view(np.uint8), bitorder="little")).tolist()
