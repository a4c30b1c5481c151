"""Grammars over a tokenizer's vocabulary, by llguidance: compiled once, followed a token at a time.

What callers send may be hostile. Everything has a bound: the text's size, the time that compiling may take, the work of
each step, the states of an automaton, the compiled grammars that are kept. A grammar is also followed for a few tokens
before it is accepted, so that one that runs into a bound at once is refused at the door.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import llguidance
import numpy as np
from llguidance.gbnf_to_lark import gbnf_to_lark

from jaxserve.errors import InvalidRequest, QueueFull
from jaxserve.sampling_params import Grammar
from jaxserve.text.tokenizer import Tokenizer

_log = logging.getLogger(__name__)

COMPILE_SECONDS = 2.0  # for one grammar
MAX_CACHED = 128  # compiled grammars kept, used or not
MAX_CACHED_BYTES = 2**19  # of their texts; compiled, one may come to some 400 times its text
MAX_COMPILING = 32  # grammars that are being compiled or wait for it
_THREADS = 2
_TOKENIZER_SECONDS = 60.0  # for the vocabulary to be read, once
_TRIED = 32  # tokens that a new grammar is followed for
_LONGEST_PROBLEM = 300  # characters of llguidance's own words that a caller is shown
# White space in JSON: a space, or a line's end and an indent. Without a bound some models never stop.
_JSON: Any = {"whitespace_pattern": r"\x20|\x0A[\x20\x09]{0,40}"}
# A step of one token: some milliseconds at most. A state takes one or two kB.
_LIMITS = llguidance.LLParserLimits(
    initial_lexer_fuel=400_000,
    step_lexer_fuel=50_000,
    step_max_items=20_000,
    max_items_in_row=2_000,
    max_lexer_states=20_000,
    max_grammar_size=100_000,
    verbose_errors=False,
)


class GrammarFailed(ValueError):
    """A grammar cannot be compiled, or cannot be followed any further."""


class Matcher:
    """How far a text has come in its grammar. Not thread safe."""

    __slots__ = ("_compiled", "_matcher")

    def __init__(self, compiled: Compiled, matcher: llguidance.LLMatcher) -> None:
        self._compiled = compiled
        self._matcher = matcher

    def advance(self, token: int) -> bool:
        """Takes the next token in; whether nothing may follow it.

        Raises:
          GrammarFailed: the token is not allowed, or a bound has been reached.
        """
        if not self._matcher.consume_token(token):
            raise GrammarFailed(self._problem() or f"token {token} is not allowed here")
        return self._matcher.is_stopped()

    def allowed(self) -> np.ndarray:
        """uint32[words], a bit for every token of the model that may follow, the lowest first; one at least.

        Raises:
          GrammarFailed: none may, or a bound has been reached.
        """
        words = np.zeros(self._compiled.words, np.uint32)
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if self._matcher.is_error():
            raise GrammarFailed(self._problem())
        words = words[: len(self._compiled.vocabulary)] & self._compiled.vocabulary
        if not words.any():
            raise GrammarFailed("it allows no token of the model's")
        return words

    def _problem(self) -> str:
        told = _short(self._matcher.get_error())
        if told.startswith("NoExtension"):
            return "it allows no text"
        return told or "llguidance cannot follow it"


class Compiled:
    """A grammar over the vocabulary; any number of texts may begin with it.

    Attributes:
      first: uint32[words] what the first token may be (`Matcher.allowed`).
      vocabulary: uint32[words] a bit for every token of the model.
      words: of a mask as llguidance makes it, which may go beyond the model's vocabulary.
      end_tokens: uint32[words] the bits of the tokens that end a text.
    """

    __slots__ = ("__weakref__", "_matcher", "end_tokens", "first", "vocabulary", "words")

    def __init__(
        self, matcher: llguidance.LLMatcher, *, words: int, vocabulary: np.ndarray, end_tokens: np.ndarray
    ) -> None:
        self._matcher = matcher
        self.words, self.vocabulary, self.end_tokens = words, vocabulary, end_tokens
        self.first = self.start().allowed()

    def start(self) -> Matcher:
        """A new text."""
        return Matcher(self, self._matcher.deep_copy())


class _Job:
    """A grammar that is being compiled, or waits for it."""

    __slots__ = ("future", "started")

    def __init__(self) -> None:
        self.future: Future[Compiled] = Future()
        self.started: float | None = None


class Grammars:
    """Compiles grammars for one tokenizer and model, on threads of its own, and keeps some.

    Thread safe.

    Args:
      vocab_size: of the model, whatever the tokenizer has.
      eos_token_ids: tokens that may stand where a text is whole.
      elsewhere: has others compile a grammar too, and returns what waits for them and says why one cannot, or None.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
        eos_token_ids: Iterable[int],
        *,
        elsewhere: Callable[[Grammar], Callable[[], str | None]] = lambda _: lambda: None,
    ) -> None:
        self._text_tokenizer, self._vocab_size, self._elsewhere = tokenizer, vocab_size, elsewhere
        self._eos = sorted(eos_token_ids)
        self._tokenizer: llguidance.LLTokenizer | None = None
        self._reading = threading.Lock()
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="jaxserve-grammars")
        self._lock = threading.Lock()
        self._jobs: dict[Grammar, _Job] = {}
        self._kept: OrderedDict[Grammar, Compiled | str] = OrderedDict()  # or why it is refused
        self._kept_bytes = 0
        self._alive: weakref.WeakValueDictionary[Grammar, Compiled] = weakref.WeakValueDictionary()

    def compiled(self, grammar: Grammar) -> Compiled:
        """The grammar compiled; waits for it where it is not yet.

        Raises:
          InvalidRequest: it cannot be compiled, or not in time.
          QueueFull: as many others as may are being compiled.
        """
        job = self._begin(grammar)
        if isinstance(job, Compiled):
            return job
        while True:
            try:
                return job.future.result(self._patience(job))
            except TimeoutError:
                if job.started is not None and self._patience(job) <= 0:
                    raise self._slow(grammar) from None
            except GrammarFailed as problem:
                raise _refusal(grammar, str(problem)) from None

    async def prepare(self, grammar: Grammar) -> Compiled:
        """As `compiled`, for event loops; does not wait for its turn for ever either (QueueFull).

        As long as somebody holds what it returns, `compiled` does not wait at all.
        """
        job = self._begin(grammar)
        if isinstance(job, Compiled):
            return job
        waited = asyncio.wrap_future(job.future)
        waited.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody may wait any more
        while True:
            try:
                return await asyncio.wait_for(asyncio.shield(waited), self._patience(job))
            except TimeoutError:
                if job.started is None:
                    raise QueueFull("other grammars are being compiled") from None
                if self._patience(job) <= 0:
                    raise self._slow(grammar) from None
            except GrammarFailed as problem:
                raise _refusal(grammar, str(problem)) from None

    def compile_aside(self, grammar: Grammar, done: Callable[[Compiled | str], None]) -> None:
        """As `compiled`, but returns at once.

        `done` is called, on any thread, with the grammar or why it is none.
        """

        def tell(future: Future[Compiled]) -> None:
            problem = future.exception()
            done(future.result() if problem is None else str(problem))

        try:
            job = self._begin(grammar)
        except InvalidRequest as problem:
            done(str(problem).removeprefix(f"{problem.field}: "))
            return
        except QueueFull as problem:
            done(str(problem))
            return
        if isinstance(job, Compiled):
            done(job)
        else:
            job.future.add_done_callback(tell)

    def read_ahead(self) -> None:
        """Has the vocabulary read on a thread, before the first grammar comes."""
        self._threads.submit(self._read_tokenizer)

    @property
    def kept(self) -> tuple[int, int]:
        """How many grammars, compiled or refused, are kept, and the bytes of their texts."""
        return len(self._kept), self._kept_bytes

    def _begin(self, grammar: Grammar) -> Compiled | _Job:
        with self._lock:
            known = self._kept.get(grammar) or self._alive.get(grammar)
            if grammar in self._kept:
                self._kept.move_to_end(grammar)
            if isinstance(known, str):
                raise _refusal(grammar, known)
            if known is not None:
                return known
            job = self._jobs.get(grammar)
            if job is None:
                if len(self._jobs) >= MAX_COMPILING:
                    raise QueueFull(f"{len(self._jobs)} grammars are being compiled, as many as may")
                job = self._jobs[grammar] = _Job()
                self._threads.submit(self._work, grammar, job)
            return job

    def _patience(self, job: _Job) -> float:
        """Seconds to wait for a job before looking how far it is."""
        if job.started is not None:
            return job.started + COMPILE_SECONDS - time.monotonic()
        return COMPILE_SECONDS + (_TOKENIZER_SECONDS if self._tokenizer is None else 0.0)

    def _slow(self, grammar: Grammar) -> InvalidRequest:
        problem = f"takes longer than {COMPILE_SECONDS:g} seconds to compile"
        self._keep(grammar, problem)  # so that it is not tried again
        return _refusal(grammar, problem)

    def _keep(self, grammar: Grammar, found: Compiled | str) -> None:
        with self._lock:
            if grammar in self._kept:
                return
            self._kept[grammar] = found
            self._kept_bytes += len(grammar.text)
            if isinstance(found, Compiled):
                self._alive[grammar] = found
            while len(self._kept) > MAX_CACHED or (self._kept_bytes > MAX_CACHED_BYTES and len(self._kept) > 1):
                oldest, _ = self._kept.popitem(last=False)
                self._kept_bytes -= len(oldest.text)

    def _work(self, grammar: Grammar, job: _Job) -> None:
        try:
            tokenizer = self._read_tokenizer()
            job.started = time.monotonic()
            wait = self._elsewhere(grammar)
            try:
                compiled = self._compile(tokenizer, grammar)
            finally:
                problem = wait()  # whatever becomes of it here, or what is asked elsewhere would be kept for ever
            if problem is not None:
                raise GrammarFailed(problem)
            if time.monotonic() - job.started > COMPILE_SECONDS:
                raise GrammarFailed(f"takes longer than {COMPILE_SECONDS:g} seconds to compile")
        except GrammarFailed as problem:
            self._keep(grammar, str(problem))
            job.future.set_exception(problem)
        except BaseException as problem:  # a panic of the library is no Exception
            _log.exception("a grammar of %d bytes could not be compiled", len(grammar.text))
            failed = GrammarFailed(f"cannot be compiled ({type(problem).__name__})")
            self._keep(grammar, str(failed))
            job.future.set_exception(failed)
        else:
            self._keep(grammar, compiled)
            job.future.set_result(compiled)
        finally:
            with self._lock:
                del self._jobs[grammar]

    def _read_tokenizer(self) -> llguidance.LLTokenizer:
        with self._reading:
            if self._tokenizer is None:
                size = max(self._vocab_size, self._text_tokenizer.vocab_size)
                try:
                    self._tokenizer = llguidance.LLTokenizer(
                        self._text_tokenizer.to_json(), n_vocab=size, eos_token=self._eos or None
                    )
                except Exception as problem:
                    raise GrammarFailed(f"is not served with this tokenizer: {_short(str(problem))}") from None
            return self._tokenizer

    def _compile(self, tokenizer: llguidance.LLTokenizer, grammar: Grammar) -> Compiled:
        matcher = llguidance.LLMatcher(tokenizer, _definition(grammar), log_level=0, limits=_LIMITS)
        if matcher.is_error():
            raise GrammarFailed(f"cannot be compiled: {_short(matcher.get_error())}")
        try:
            compiled = Compiled(
                matcher,
                words=-(-tokenizer.vocab_size // 32),
                vocabulary=_bits(range(self._vocab_size), self._vocab_size),
                end_tokens=_bits(self._eos or tokenizer.eos_tokens, self._vocab_size),
            )
            _follow(compiled)
        except GrammarFailed as problem:
            raise GrammarFailed(f"cannot be followed: {problem}") from None
        return compiled


def _definition(grammar: Grammar) -> str:
    """The grammar as llguidance takes it."""
    text, matcher = grammar.text, llguidance.LLMatcher
    match grammar.kind:
        case "json_schema":
            try:  # a schema with settings of its own for llguidance is left its own
                return matcher.grammar_from_json_schema(text, defaults=None if '"x-guidance"' in text else _JSON)
            except ValueError as problem:
                raise GrammarFailed(f"cannot be compiled: {_short(str(problem))}") from None
        case "regex":
            return matcher.grammar_from_regex(text)
        case "choice":
            # In capitals, it is one word of the text rather than a choice of rules: thousands are no work.
            return matcher.grammar_from_lark("start: WORD\nWORD: " + " | ".join(map(json.dumps, json.loads(text))))
        case "lark":
            return matcher.grammar_from_lark(_lark(text))


def _lark(text: str) -> str:
    """Lark, also of a grammar in GBNF (`name ::= ...`), which other engines take by the same field."""
    if not re.search(r"^[ \t]*[\w-]+[ \t]*::=", text, re.MULTILINE):
        return text
    try:
        return gbnf_to_lark(text)
    except RecursionError:
        raise GrammarFailed("cannot be compiled: nested too deeply") from None
    except Exception as problem:  # the converter raises bare Exception
        raise GrammarFailed(f"cannot be compiled: {_short(str(problem))}") from None


def _follow(compiled: Compiled) -> None:
    """Goes a few tokens into a grammar, at random.

    Raises GrammarFailed where a bound is reached.
    """
    matcher, draw = compiled.start(), np.random.default_rng(0)
    for _ in range(_TRIED):
        allowed = np.flatnonzero(np.unpackbits(matcher.allowed().view(np.uint8), bitorder="little"))
        if matcher.advance(int(draw.choice(allowed))):
            return


def _bits(tokens: Iterable[int], count: int) -> np.ndarray:
    """uint32[words] with these bits of `count` set."""
    bits = np.zeros(-(-count // 32) * 32, np.uint8)
    bits[[token for token in tokens if token < count]] = 1
    return np.packbits(bits, bitorder="little").view(np.uint32)


def _short(told: str) -> str:
    """One line of llguidance's several; where one of them is the reason, that one."""
    reason = re.search(r"^[ \t]*error: (.+)$", told, re.MULTILINE)
    line = " ".join((reason[1] if reason else told).replace("<non-verbose/>", "").split())
    return line if len(line) <= _LONGEST_PROBLEM else line[: _LONGEST_PROBLEM - 3] + "..."


def _refusal(grammar: Grammar, problem: str) -> InvalidRequest:
    return InvalidRequest(grammar.field, problem)
