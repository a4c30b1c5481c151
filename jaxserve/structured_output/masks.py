"""Computes the grammar masks of a replica's constrained requests while iterations run.

A mask depends on the row's last token, which the host reads one iteration late. So the layers of an iteration are
launched first. While they run, the tokens of the previous iteration land and threads compute the masks; then sampling
is launched with the masks. If a mask is late when the layers have run, its row is removed from the iteration, so no
other request waits for it.

The only inputs are plans and their results, so masks can be computed on every host that samples tokens. These hosts
must compute the same masks whatever their speed: `GrammarMasks(multihost=True)`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from jaxserve.iteration import GrammarEnd, IterationPlan, IterationResult
from jaxserve.sampling_params import SamplingParams
from jaxserve.structured_output.matcher import CompiledGrammar, GrammarError, Matcher

_log = logging.getLogger(__name__)

_THREADS = min(4, max(1, (os.cpu_count() or 2) // 2))
_POLL_SECONDS = 0.0005  # between checks whether the layers have run


class GrammarState:
    """The position of one request's text in its grammar, and the mask of its next token.

    Attributes:
      allowed: uint32[words], the mask of the next token.
      in_flight: launched tokens that have not landed.
      is_ready: whether `allowed` takes all landed tokens into account.
      problem: why the text cannot continue, if it cannot.
      is_finished: whether the grammar allows no more tokens, or the request has ended.
    """

    __slots__ = (
        "allowed",
        "compiled",
        "field",
        "ignore_eos",
        "in_flight",
        "is_finished",
        "is_ready",
        "matcher",
        "problem",
    )

    def __init__(self, sampling: SamplingParams, compiled: CompiledGrammar) -> None:
        assert sampling.grammar is not None
        self.field = sampling.grammar.field
        self.ignore_eos = sampling.ignore_eos
        self.compiled = compiled
        self.matcher: Matcher | None = None  # until the first token
        self.allowed = self._without_end_tokens(compiled.first)
        self.in_flight = 0
        self.is_ready, self.is_finished = True, False
        self.problem: str | None = None

    def advance(self, token: int) -> bool:
        """Advances by one token, unless there was a problem. Returns whether the text ends here."""
        if self.problem is None:
            with self._record_problem():
                if self.matcher is None:
                    self.matcher = self.compiled.start()
                return self.matcher.advance(token)
        return True

    def update_mask(self) -> None:
        """Computes `allowed` for the next token."""
        with self._record_problem():
            assert self.matcher is not None
            self.allowed = self._without_end_tokens(self.matcher.allowed())

    @contextlib.contextmanager
    def _record_problem(self) -> Iterator[None]:
        """Stores an exception as `problem`, so that it ends this request only."""
        try:
            yield
        except GrammarError as problem:
            self.problem = str(problem)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as problem:  # a panic in llguidance is not an Exception
            _log.exception("a grammar cannot be followed")
            self.problem = f"it cannot be followed ({type(problem).__name__})"

    def _without_end_tokens(self, allowed: np.ndarray) -> np.ndarray:
        """With ignore_eos, the mask without end tokens, unless the grammar allows nothing else."""
        if not self.ignore_eos:
            return allowed
        others = allowed & ~self.compiled.end_tokens
        return others if others.any() else allowed


class _MaskedEntry(NamedTuple):
    """A constrained token of a plan in flight: its chunk, and its entry in the plan's result."""

    chunk: int
    entry: int
    text: GrammarState


class _LaunchedPlan(NamedTuple):
    """A plan in flight and its constrained tokens."""

    sequence: int
    entries: list[_MaskedEntry]


class GrammarMasks:
    """The grammar states and masks of one replica's constrained requests. For one thread only.

    Call `launched` for each plan. If it returns True, call `wait` and `fill` once `is_known`. Then call `landed`.

    Args:
      multihost: whether other hosts must compute the same masks. The masks of a plan in flight then depend on plans
        and results only, and not on when this host learns that a request has ended.
    """

    def __init__(self, *, multihost: bool = False) -> None:
        self._multihost = multihost
        self._texts: dict[str, GrammarState] = {}
        self._by_row: dict[int, GrammarState | None] = {}
        self._in_flight: deque[_LaunchedPlan] = deque()
        self._threads: ThreadPoolExecutor | None = None
        self._changed = threading.Condition()
        self._queue: deque[GrammarState] = deque()

    def begin(
        self, request_id: str, sampling: SamplingParams, compiled: CompiledGrammar, generated: Sequence[int] = ()
    ) -> None:
        """Adds a request with a grammar.

        Args:
          generated: tokens generated so far.
        """
        text = self._texts[request_id] = GrammarState(sampling, compiled)
        for token in generated:
            text.advance(token)
        if generated:
            text.update_mask()

    def end(self, request_id: str) -> bool:
        """Removes a request that has ended. Returns whether it had a grammar."""
        text = self._texts.pop(request_id, None)
        if text is not None and not self._multihost:
            text.is_finished = True
        return text is not None

    def launched(self, plan: IterationPlan) -> bool:
        """Records a plan that is about to be launched. Returns whether its sampling needs masks."""
        for admission in plan.admissions:
            if admission.sampling.grammar is not None or admission.row in self._by_row:
                self._by_row[admission.row] = self._texts.get(admission.request_id)
        if not self._texts:
            return False
        entries = []
        entry = 0
        for index, chunk in enumerate(plan.chunks):
            text = self._by_row.get(chunk.row) if chunk.samples else None
            if text is not None and not text.is_finished:
                text.in_flight += 1
                entries.append(_MaskedEntry(index, entry, text))
            entry += chunk.samples or 1
        if entries:
            self._in_flight.append(_LaunchedPlan(plan.sequence, entries))
        return bool(entries)

    @property
    def is_known(self) -> bool:
        """Whether all tokens that the newest plan's masks depend on have landed."""
        return all(text.is_finished or text.in_flight == 1 for _, _, text in self._in_flight[-1].entries)

    def wait(self, may_withdraw: Callable[[int], bool]) -> list[int]:
        """Waits for the newest plan's masks, and removes rows with late masks from the plan.

        Args:
          may_withdraw: called repeatedly with the number of missing masks; True removes their rows.

        Returns:
          The chunks of the removed rows.
        """
        launched = self._in_flight[-1]
        with self._changed:
            while late := [each for each in launched.entries if not (each.text.is_ready or each.text.is_finished)]:
                if may_withdraw(len(late)):
                    break
                self._changed.wait(_POLL_SECONDS)
        for each in late:
            each.text.in_flight -= 1
            launched.entries.remove(each)
        return [each.chunk for each in late]

    def fill(self, points: int, words: int) -> np.ndarray:
        """The newest plan's masks: uint32[points, words], one row per entry of its result.

        All bits are set for entries without a grammar.
        """
        allowed = np.full((points, words), 0xFFFFFFFF, np.uint32)
        for _, entry, text in self._in_flight[-1].entries:
            if text.problem is None and not text.is_finished:
                allowed[entry] = text.allowed
        return allowed

    def landed(self, plan: IterationPlan, result: IterationResult) -> IterationResult:
        """Advances texts by the oldest plan's tokens; returns the result with `grammar_ends` set."""
        if not self._in_flight or self._in_flight[0].sequence != plan.sequence:
            return result
        ends: dict[int, GrammarEnd] = {}
        advanced: list[GrammarState] = []
        for _, entry, text in self._in_flight.popleft().entries:
            text.in_flight -= 1
            if text.is_finished:
                continue
            if text.advance(int(result.tokens[entry])):
                ends[entry] = GrammarEnd(text.problem, text.field)
                text.is_finished = True
            else:
                text.is_ready = False
                advanced.append(text)
        self._compute(advanced)
        return dataclasses.replace(result, grammar_ends=ends) if ends else result

    def _compute(self, texts: Sequence[GrammarState]) -> None:
        """Computes the masks of these texts on threads."""
        if self._threads is None and texts:
            self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="jaxserve-masks")
        self._queue.extend(texts)
        for _ in range(min(_THREADS, len(texts))):
            assert self._threads is not None
            self._threads.submit(self._work)

    def _work(self) -> None:
        while True:
            try:
                text = self._queue.popleft()
            except IndexError:
                return
            text.update_mask()
            with self._changed:
                text.is_ready = True
                self._changed.notify_all()
