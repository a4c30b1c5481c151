"""Compiles grammars for a vocabulary with llguidance, and matches texts token by token.

Callers may send hostile grammars. So there are limits on a grammar's size, its compilation time, the work of each step,
the states of its automaton, and the number of cached grammars. Before a grammar is accepted, a few random tokens are
matched, so that a grammar that reaches a limit at once is refused at submission.
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

import llguidance
import numpy as np
from llguidance.gbnf_to_lark import gbnf_to_lark

from jaxserve.errors import InvalidRequest, QueueFull
from jaxserve.sampling_params import Grammar
from jaxserve.structured_output.grammar import JSON_DEFAULTS
from jaxserve.text.tokenizer import Tokenizer

_log = logging.getLogger(__name__)

COMPILE_SECONDS = 2.0  # time limit for one grammar
MAX_CACHED = 128  # cached grammars
MAX_CACHED_BYTES = 2**19  # of the cached grammars' texts; a compiled grammar may take 400 times its text
MAX_COMPILING = 32  # grammars that are being compiled or queued
_THREADS = 2
_TOKENIZER_SECONDS = 60.0  # to load the tokenizer's vocabulary, once
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


class _CompileJob:
    """A grammar that is being compiled since `started`, or is queued (None)."""

    __slots__ = ("future", "started")

    def __init__(self) -> None:
        self.future: Future[CompiledGrammar] = Future()
        self.started: float | None = None


class GrammarCompiler:
    """Compiles grammars for one model on its own threads, and caches them. Thread safe.

    Args:
      vocab_size: size of the model's vocabulary, which may differ from the tokenizer's.
      eos_token_ids: tokens that are allowed where a text is complete.
      compile_on_workers: starts compiling a grammar on other hosts. Returns a function that waits for these hosts and
        returns why one of them cannot compile it, or None.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
        eos_token_ids: Iterable[int],
        *,
        compile_on_workers: Callable[[Grammar], Callable[[], str | None]] = lambda _: lambda: None,
    ) -> None:
        self._text_tokenizer, self._vocab_size = tokenizer, vocab_size
        self._compile_on_workers = compile_on_workers
        self._eos = sorted(eos_token_ids)
        self._tokenizer: llguidance.LLTokenizer | None = None
        self._tokenizer_lock = threading.Lock()
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="jaxserve-grammars")
        self._lock = threading.Lock()
        self._jobs: dict[Grammar, _CompileJob] = {}
        self._cache: OrderedDict[Grammar, CompiledGrammar | str] = OrderedDict()  # a str says why it is refused
        self._cached_bytes = 0
        self._in_use: weakref.WeakValueDictionary[Grammar, CompiledGrammar] = weakref.WeakValueDictionary()

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """Compiles a grammar or returns the cached result; blocks until it is done.

        Raises:
          InvalidRequest: the grammar cannot be compiled, or not in time.
          QueueFull: MAX_COMPILING other grammars are being compiled or queued.
        """
        job = self._find_or_start(grammar)
        if isinstance(job, CompiledGrammar):
            return job
        while True:
            try:
                return job.future.result(self._timeout(job))
            except TimeoutError:
                if job.started is not None and self._timeout(job) <= 0:
                    raise self._refuse_slow(grammar) from None
            except GrammarError as problem:
                raise InvalidRequest(grammar.field, str(problem)) from None

    async def compile_async(self, grammar: Grammar) -> CompiledGrammar:
        """Like `compile`, for event loops; raises QueueFull also if the grammar waits too long.

        While the caller keeps the returned object, `compile` returns it without blocking.
        """
        job = self._find_or_start(grammar)
        if isinstance(job, CompiledGrammar):
            return job
        waited = asyncio.wrap_future(job.future)
        # Retrieves the exception even if the caller is gone: asyncio warns about exceptions that are never retrieved.
        waited.add_done_callback(lambda done: done.cancelled() or done.exception())
        while True:
            try:
                return await asyncio.wait_for(asyncio.shield(waited), self._timeout(job))
            except TimeoutError:
                if job.started is None:
                    raise QueueFull("other grammars are being compiled") from None
                if self._timeout(job) <= 0:
                    raise self._refuse_slow(grammar) from None
            except GrammarError as problem:
                raise InvalidRequest(grammar.field, str(problem)) from None

    def compile_in_background(self, grammar: Grammar, done: Callable[[CompiledGrammar | str], None]) -> None:
        """Like `compile`, but returns at once and raises nothing.

        Calls `done`, on any thread, with the compiled grammar or with why it cannot be compiled.
        """

        def tell(future: Future[CompiledGrammar]) -> None:
            problem = future.exception()
            done(future.result() if problem is None else str(problem))

        try:
            job = self._find_or_start(grammar)
        except InvalidRequest as problem:
            done(str(problem).removeprefix(f"{problem.field}: "))
            return
        except QueueFull as problem:
            done(str(problem))
            return
        if isinstance(job, CompiledGrammar):
            done(job)
        else:
            job.future.add_done_callback(tell)

    def load_tokenizer_in_background(self) -> None:
        """Starts loading the tokenizer's vocabulary on a thread, before the first grammar needs it."""
        self._threads.submit(self._load_tokenizer)

    @property
    def cached(self) -> tuple[int, int]:
        """Number of cached grammars, compiled or refused, and the bytes of their texts."""
        return len(self._cache), self._cached_bytes

    def _find_or_start(self, grammar: Grammar) -> CompiledGrammar | _CompileJob:
        with self._lock:
            known = self._cache.get(grammar) or self._in_use.get(grammar)
            if grammar in self._cache:
                self._cache.move_to_end(grammar)
            if isinstance(known, str):
                raise InvalidRequest(grammar.field, known)
            if known is not None:
                return known
            job = self._jobs.get(grammar)
            if job is None:
                if len(self._jobs) >= MAX_COMPILING:
                    raise QueueFull(f"{len(self._jobs)} grammars are being compiled or queued; no more are accepted")
                job = self._jobs[grammar] = _CompileJob()
                self._threads.submit(self._run, grammar, job)
            return job

    def _timeout(self, job: _CompileJob) -> float:
        """Seconds to wait for a job before checking its state again."""
        if job.started is not None:
            return job.started + COMPILE_SECONDS - time.monotonic()
        return COMPILE_SECONDS + (_TOKENIZER_SECONDS if self._tokenizer is None else 0.0)

    def _refuse_slow(self, grammar: Grammar) -> InvalidRequest:
        problem = f"takes longer than {COMPILE_SECONDS:g} seconds to compile"
        self._add_to_cache(grammar, problem)  # so that it is not tried again
        return InvalidRequest(grammar.field, problem)

    def _add_to_cache(self, grammar: Grammar, result: CompiledGrammar | str) -> None:
        with self._lock:
            if grammar in self._cache:
                return
            self._cache[grammar] = result
            self._cached_bytes += len(grammar.text)
            if isinstance(result, CompiledGrammar):
                self._in_use[grammar] = result
            while len(self._cache) > MAX_CACHED or (self._cached_bytes > MAX_CACHED_BYTES and len(self._cache) > 1):
                oldest, _ = self._cache.popitem(last=False)
                self._cached_bytes -= len(oldest.text)

    def _run(self, grammar: Grammar, job: _CompileJob) -> None:
        try:
            tokenizer = self._load_tokenizer()
            job.started = time.monotonic()
            wait = self._compile_on_workers(grammar)
            try:
                compiled = self._compile(tokenizer, grammar)
            finally:
                problem = wait()  # after a failure here too, or the request to the workers would never be removed
            if problem is not None:
                raise GrammarError(problem)
            if time.monotonic() - job.started > COMPILE_SECONDS:
                raise GrammarError(f"takes longer than {COMPILE_SECONDS:g} seconds to compile")
        except GrammarError as problem:
            self._add_to_cache(grammar, str(problem))
            job.future.set_exception(problem)
        except BaseException as problem:  # a panic in llguidance is not an Exception
            _log.exception("a grammar of %d bytes could not be compiled", len(grammar.text))
            failed = GrammarError(f"cannot be compiled ({type(problem).__name__})")
            self._add_to_cache(grammar, str(failed))
            job.future.set_exception(failed)
        else:
            self._add_to_cache(grammar, compiled)
            job.future.set_result(compiled)
        finally:
            with self._lock:
                del self._jobs[grammar]

    def _load_tokenizer(self) -> llguidance.LLTokenizer:
        with self._tokenizer_lock:
            if self._tokenizer is None:
                size = max(self._vocab_size, self._text_tokenizer.vocab_size)
                try:
                    self._tokenizer = llguidance.LLTokenizer(
                        self._text_tokenizer.to_json(), n_vocab=size, eos_token=self._eos or None
                    )
                except Exception as problem:
                    raise GrammarError(f"is not served with this tokenizer: {_one_line(str(problem))}") from None
            return self._tokenizer

    def _compile(self, tokenizer: llguidance.LLTokenizer, grammar: Grammar) -> CompiledGrammar:
        matcher = llguidance.LLMatcher(tokenizer, _definition(grammar), log_level=0, limits=_LIMITS)
        if matcher.is_error():
            raise GrammarError(f"cannot be compiled: {_one_line(matcher.get_error())}")
        try:
            compiled = CompiledGrammar(
                matcher,
                words=-(-tokenizer.vocab_size // 32),
                vocabulary=_bits(range(self._vocab_size), self._vocab_size),
                end_tokens=_bits(self._eos or tokenizer.eos_tokens, self._vocab_size),
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
