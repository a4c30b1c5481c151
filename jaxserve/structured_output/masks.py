"""What the grammars of a replica's requests allow next, computed beside the iterations.

A mask depends on the row's last token, which the host reads an iteration late. So the layers of an iteration are
launched without it, and while they run the tokens of the one before land, threads here compute the masks, and the
choice of tokens is launched with them. A row whose mask is not there when the layers have run is taken out of the
iteration; nobody waits for it.

It follows plans and their results alone, so it can live wherever tokens are chosen. Where several hosts choose the same
tokens each has one, and they must come to the same masks whatever was quicker where: `GrammarMasks(alike=True)`.
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
from jaxserve.structured_output.matcher import Compiled, GrammarFailed, Matcher

_log = logging.getLogger(__name__)

_THREADS = min(4, max(1, (os.cpu_count() or 2) // 2))
_LOOK_SECONDS = 0.0005  # between looks at whether the layers have run


class GrammarState:
    """One request's text and what may follow it.

    Attributes:
      in_flight: tokens launched that have not landed.
      is_ready: whether `allowed` is what may follow the tokens that have.
      problem: why it cannot go on, if it cannot.
      is_over: nothing follows any more: by its grammar, or since its request has ended.
    """

    __slots__ = (
        "allowed",
        "compiled",
        "field",
        "in_flight",
        "is_over",
        "is_ready",
        "keeps_on",
        "matcher",
        "problem",
    )

    def __init__(self, sampling: SamplingParams, compiled: Compiled) -> None:
        assert sampling.grammar is not None
        self.field = sampling.grammar.field
        self.keeps_on = sampling.ignore_eos
        self.compiled = compiled
        self.matcher: Matcher | None = None  # until the first token
        self.allowed = self._going_on(compiled.first)
        self.in_flight = 0
        self.is_ready, self.is_over = True, False
        self.problem: str | None = None

    def take(self, token: int) -> bool:
        """Takes a token in, unless there is a problem already; whether it is the last."""
        if self.problem is None:
            with self._problems():
                if self.matcher is None:
                    self.matcher = self.compiled.start()
                return self.matcher.advance(token)
        return True

    def look(self) -> None:
        """Finds out what may follow."""
        with self._problems():
            assert self.matcher is not None
            self.allowed = self._going_on(self.matcher.allowed())

    @contextlib.contextmanager
    def _problems(self) -> Iterator[None]:
        """Whatever goes wrong inside is this text's problem alone."""
        try:
            yield
        except GrammarFailed as problem:
            self.problem = str(problem)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as problem:  # a panic of the library is no Exception
            _log.exception("a grammar cannot be followed")
            self.problem = f"it cannot be followed ({type(problem).__name__})"

    def _going_on(self, allowed: np.ndarray) -> np.ndarray:
        if not self.keeps_on:
            return allowed
        others = allowed & ~self.compiled.end_tokens
        return others if others.any() else allowed


class _Place(NamedTuple):
    """Where a plan in flight chooses a token of a text: its chunk, and the entry of its result."""

    chunk: int
    entry: int
    text: GrammarState


class _Launched(NamedTuple):
    """A plan in flight and the texts that it chooses tokens of."""

    sequence: int
    texts: list[_Place]


class GrammarMasks:
    """The texts of one replica's constrained requests. One thread calls everything.

    For each plan: `launched`, and if it says so `wait` and `fill` once `is_known`; then `landed`.

    Args:
      alike: whether other hosts must come to the same masks. What a plan under way may have then depends on plans and
        results alone, not on when the end of a request has been heard of.
    """

    def __init__(self, *, alike: bool = False) -> None:
        self._alike = alike
        self._texts: dict[str, GrammarState] = {}
        self._by_row: dict[int, GrammarState | None] = {}
        self._in_flight: deque[_Launched] = deque()
        self._threads: ThreadPoolExecutor | None = None
        self._changed = threading.Condition()
        self._to_do: deque[GrammarState] = deque()

    def begin(
        self, request_id: str, sampling: SamplingParams, compiled: Compiled, generated: Sequence[int] = ()
    ) -> None:
        """A request with a grammar has come in.

        Args:
          generated: tokens of its text that there are already.
        """
        text = self._texts[request_id] = GrammarState(sampling, compiled)
        for token in generated:
            text.take(token)
        if generated:
            text.look()

    def end(self, request_id: str) -> bool:
        """A request has ended; whether it was one with a grammar."""
        text = self._texts.pop(request_id, None)
        if text is not None and not self._alike:
            text.is_over = True
        return text is not None

    def launched(self, plan: IterationPlan) -> bool:
        """Notes a plan about to be launched; whether the choice of its tokens waits for masks."""
        for admission in plan.admissions:
            if admission.sampling.grammar is not None or admission.row in self._by_row:
                self._by_row[admission.row] = self._texts.get(admission.request_id)
        if not self._texts:
            return False
        texts = []
        entry = 0
        for index, chunk in enumerate(plan.chunks):
            text = self._by_row.get(chunk.row) if chunk.samples else None
            if text is not None and not text.is_over:
                text.in_flight += 1
                texts.append(_Place(index, entry, text))
            entry += chunk.samples or 1
        if texts:
            self._in_flight.append(_Launched(plan.sequence, texts))
        return bool(texts)

    @property
    def is_known(self) -> bool:
        """Whether the tokens have landed that the newest plan's masks depend on."""
        return all(text.is_over or text.in_flight == 1 for _, _, text in self._in_flight[-1].texts)

    def wait(self, may_go: Callable[[int], bool]) -> list[int]:
        """Waits for the newest plan's masks; takes the rows out of it whose masks are late.

        Args:
          may_go: asked every now and then with the number of masks that are missing, whether to go on without them.

        Returns:
          The chunks of those rows.
        """
        launched = self._in_flight[-1]
        with self._changed:
            while late := [each for each in launched.texts if not (each.text.is_ready or each.text.is_over)]:
                if may_go(len(late)):
                    break
                self._changed.wait(_LOOK_SECONDS)
        for each in late:
            each.text.in_flight -= 1
            launched.texts.remove(each)
        return [each.chunk for each in late]

    def fill(self, points: int, words: int) -> np.ndarray:
        """The newest plan's masks: uint32[points, words] for the entries of its result, all bits set where there is no
        grammar."""
        allowed = np.full((points, words), 0xFFFFFFFF, np.uint32)
        for _, entry, text in self._in_flight[-1].texts:
            if text.problem is None and not text.is_over:
                allowed[entry] = text.allowed
        return allowed

    def landed(self, plan: IterationPlan, result: IterationResult) -> IterationResult:
        """Takes the tokens of the oldest plan in; the result, with the ends that the grammars make of it."""
        if not self._in_flight or self._in_flight[0].sequence != plan.sequence:
            return result
        ends: dict[int, GrammarEnd] = {}
        looks: list[GrammarState] = []
        for _, entry, text in self._in_flight.popleft().texts:
            text.in_flight -= 1
            if text.is_over:
                continue
            if text.take(int(result.tokens[entry])):
                ends[entry] = GrammarEnd(text.problem, text.field)
                text.is_over = True
            else:
                text.is_ready = False
                looks.append(text)
        self._compute(looks)
        return dataclasses.replace(result, grammar_ends=ends) if ends else result

    def _compute(self, texts: Sequence[GrammarState]) -> None:
        """Has what may follow these texts found out."""
        if self._threads is None and texts:
            self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="jaxserve-masks")
        self._to_do.extend(texts)
        for _ in range(min(_THREADS, len(texts))):
            assert self._threads is not None
            self._threads.submit(self._work)

    def _work(self) -> None:
        while True:
            try:
                text = self._to_do.popleft()
            except IndexError:
                return
            text.look()
            with self._changed:
                text.is_ready = True
                self._changed.notify_all()
