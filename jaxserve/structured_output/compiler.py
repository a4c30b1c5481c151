"""Compiles the grammars of requests on threads of their own, and caches them.

Callers may send hostile grammars. So there are limits on the time of one compilation and on the number of grammars that
are cached or wait; `matcher.py` has the limits on what a grammar may describe.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor

import llguidance

from jaxserve.errors import InvalidRequest, QueueFull
from jaxserve.sampling_params import Grammar
from jaxserve.structured_output.matcher import CompiledGrammar, GrammarError, compile_grammar, read_vocabulary
from jaxserve.text.tokenizer import Tokenizer

_log = logging.getLogger(__name__)

COMPILE_SECONDS = 2.0  # time limit for one grammar
MAX_CACHED = 128  # cached grammars
MAX_CACHED_BYTES = 2**19  # of the cached grammars' texts; a compiled grammar may take 400 times its text
MAX_COMPILING = 32  # grammars that are being compiled or queued
_THREADS = 2
_VOCABULARY_SECONDS = 60.0  # to load the tokenizer's vocabulary, once


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
        self._tokenizer, self._vocab_size, self._eos = tokenizer, vocab_size, sorted(eos_token_ids)
        self._compile_on_workers = compile_on_workers
        self._vocabulary: llguidance.LLTokenizer | None = None
        self._vocabulary_lock = threading.Lock()
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

    def load_vocabulary_in_background(self) -> None:
        """Starts loading the tokenizer's vocabulary on a thread, before the first grammar needs it."""
        self._threads.submit(self._load_vocabulary)

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
        return COMPILE_SECONDS + (_VOCABULARY_SECONDS if self._vocabulary is None else 0.0)

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
            vocabulary = self._load_vocabulary()
            job.started = time.monotonic()
            wait = self._compile_on_workers(grammar)
            try:
                compiled = compile_grammar(grammar, vocabulary, self._vocab_size, self._eos)
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

    def _load_vocabulary(self) -> llguidance.LLTokenizer:
        with self._vocabulary_lock:
            if self._vocabulary is None:
                self._vocabulary = read_vocabulary(self._tokenizer, self._vocab_size, self._eos)
            return self._vocabulary
