"""Compiles a grammar for a vocabulary with llguidance, and matches texts token by token.

Callers may send hostile grammars. So there are limits on a grammar's size, the work of each step and the states of its
automaton; `compiler.py` limits the compilation time. Before a grammar is accepted, a few random tokens are matched, so
that a grammar that reaches a limit at once is refused at submission.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable

import llguidance
import numpy as np
from llguidance.gbnf_to_lark import gbnf_to_lark

from jaxserve.sampling_params import Grammar
from jaxserve.structured_output.grammar import JSON_DEFAULTS
from jaxserve.text.tokenizer import Tokenizer

_TRIAL_TOKENS = 32  # tokens that are matched before a grammar is accepted
_MAX_PROBLEM = 300  # characters of an llguidance error that are shown to a caller
# These limit the step of one token to some milliseconds. A state takes one or two kB.
_LIMITS = llguidance.LLParserLimits(
    initial_lexer_fuel=400_000,
    step_lexer_fuel=50_000,
    step_max_items=20_000,
    max_items_in_row=2_000,
    max_lexer_states=20_000,
    max_grammar_size=100_000,
    verbose_errors=False,
)


class GrammarError(ValueError):
    """A grammar cannot be compiled, or a text cannot be matched any further."""


class Matcher:
    """The position of one text in its grammar. Not thread safe."""

    __slots__ = ("_compiled", "_matcher")

    def __init__(self, compiled: CompiledGrammar, matcher: llguidance.LLMatcher) -> None:
        self._compiled = compiled
        self._matcher = matcher

    def advance(self, token: int) -> bool:
        """Advances by one token. Returns whether the text must end here.

        Raises:
          GrammarError: the token is not allowed, or a limit was reached.
        """
        if not self._matcher.consume_token(token):
            raise GrammarError(self._problem() or f"token {token} is not allowed here")
        return self._matcher.is_stopped()

    def allowed(self) -> np.ndarray:
        """The mask of the next token: uint32[words], one bit per token, lowest bit first.

        Raises:
          GrammarError: no token is allowed, or a limit was reached.
        """
        words = np.zeros(self._compiled.words, np.uint32)
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if self._matcher.is_error():
            raise GrammarError(self._problem())
        words = words[: len(self._compiled.vocabulary)] & self._compiled.vocabulary
        if not words.any():
            raise GrammarError("it allows no token of the model's")
        return words

    def _problem(self) -> str:
        error = _one_line(self._matcher.get_error())
        if error.startswith("NoExtension"):
            return "it allows no text"
        return error or "llguidance cannot follow it"


class CompiledGrammar:
    """A grammar compiled for a vocabulary; any number of texts may use it.

    Attributes:
      first: uint32[words], the mask of the first token (see `Matcher.allowed`).
      vocabulary: uint32[words], the bits of all tokens of the model.
      words: size of llguidance's masks, which may be larger than the model's vocabulary.
      end_tokens: uint32[words], the bits of the tokens that end a text.
    """

    __slots__ = ("__weakref__", "_matcher", "end_tokens", "first", "vocabulary", "words")

    def __init__(
        self, matcher: llguidance.LLMatcher, *, words: int, vocabulary: np.ndarray, end_tokens: np.ndarray
    ) -> None:
        self._matcher = matcher
        self.words, self.vocabulary, self.end_tokens = words, vocabulary, end_tokens
        self.first = self.start().allowed()

    def start(self) -> Matcher:
        """A matcher for a new text."""
        return Matcher(self, self._matcher.deep_copy())


def read_vocabulary(tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Collection[int]) -> llguidance.LLTokenizer:
    """The tokens of a tokenizer as llguidance reads them; takes seconds for a large vocabulary.

    Raises:
      GrammarError: llguidance cannot read them.
    """
    size = max(vocab_size, tokenizer.vocab_size)
    try:
        return llguidance.LLTokenizer(tokenizer.to_json(), n_vocab=size, eos_token=sorted(eos_token_ids) or None)
    except Exception as problem:
        raise GrammarError(f"is not served with this tokenizer: {_one_line(str(problem))}") from None


def compile_grammar(
    grammar: Grammar, vocabulary: llguidance.LLTokenizer, vocab_size: int, eos_token_ids: Collection[int]
) -> CompiledGrammar:
    """Compiles a grammar for a model.

    Args:
      vocabulary: what `read_vocabulary` returned.
      vocab_size: size of the model's vocabulary.
      eos_token_ids: tokens that are allowed where a text is complete.

    Raises:
      GrammarError: it cannot be compiled, or reaches a limit at once.
    """
    matcher = llguidance.LLMatcher(vocabulary, _definition(grammar), log_level=0, limits=_LIMITS)
    if matcher.is_error():
        raise GrammarError(f"cannot be compiled: {_one_line(matcher.get_error())}")
    try:
        compiled = CompiledGrammar(
            matcher,
            words=-(-vocabulary.vocab_size // 32),
            vocabulary=_bits(range(vocab_size), vocab_size),
            end_tokens=_bits(eos_token_ids or vocabulary.eos_tokens, vocab_size),
        )
        _try_random_tokens(compiled)
    except GrammarError as problem:
        raise GrammarError(f"cannot be followed: {problem}") from None
    return compiled


def _definition(grammar: Grammar) -> str:
    """The grammar in llguidance's format."""
    text, matcher = grammar.text, llguidance.LLMatcher
    match grammar.kind:
        case "json_schema":
            try:  # a schema with "x-guidance" has its own settings
                defaults = None if '"x-guidance"' in text else JSON_DEFAULTS
                return matcher.grammar_from_json_schema(text, defaults=defaults)
            except ValueError as problem:
                raise GrammarError(f"cannot be compiled: {_one_line(str(problem))}") from None
        case "regex":
            return matcher.grammar_from_regex(text)
        case "choice":
            # In capitals: a terminal of the lexer instead of parser rules, so thousands of options are cheap.
            return matcher.grammar_from_lark("start: WORD\nWORD: " + " | ".join(map(json.dumps, json.loads(text))))
        case "lark":
            return matcher.grammar_from_lark(_lark(text))


def _lark(text: str) -> str:
    """Converts GBNF (`name ::= ...`), which other engines accept in the same field, to Lark."""
    if not re.search(r"^[ \t]*[\w-]+[ \t]*::=", text, re.MULTILINE):
        return text
    try:
        return gbnf_to_lark(text)
    except RecursionError:
        raise GrammarError("cannot be compiled: nested too deeply") from None
    except Exception as problem:  # the converter raises bare Exception
        raise GrammarError(f"cannot be compiled: {_one_line(str(problem))}") from None


def _try_random_tokens(compiled: CompiledGrammar) -> None:
    """Matches a few random tokens; raises GrammarError if a limit is reached."""
    matcher, draw = compiled.start(), np.random.default_rng(0)
    for _ in range(_TRIAL_TOKENS):
        allowed = np.flatnonzero(np.unpackbits(matcher.allowed().view(np.uint8), bitorder="little"))
        if matcher.advance(int(draw.choice(allowed))):
            return


def _bits(tokens: Iterable[int], count: int) -> np.ndarray:
    """uint32[words]: `count` bits, those of these tokens set."""
    bits = np.zeros(-(-count // 32) * 32, np.uint8)
    bits[[token for token in tokens if token < count]] = 1
    return np.packbits(bits, bitorder="little").view(np.uint32)


def _one_line(error: str) -> str:
    """An error of llguidance in one line: its `error:` line if it has one."""
    reason = re.search(r"^[ \t]*error: (.+)$", error, re.MULTILINE)
    line = " ".join((reason[1] if reason else error).replace("<non-verbose/>", "").split())
    return line if len(line) <= _MAX_PROBLEM else line[: _MAX_PROBLEM - 3] + "..."
