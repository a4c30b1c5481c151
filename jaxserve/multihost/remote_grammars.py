"""Grammars where several hosts share a model.

Every host that samples tracks the grammar states by itself, from the plans and its own sampled tokens, and computes the
masks. No mask is sent between hosts. Host 0 admits a request once all of these hosts have compiled its grammar, so that
no iteration waits for a compilation.
"""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable, Iterable
from functools import partial

import numpy as np

from jaxserve.iteration import IterationPlan, IterationResult
from jaxserve.multihost import control_pb2 as pb
from jaxserve.multihost import wire
from jaxserve.sampling_params import Grammar
from jaxserve.structured_output.compiler import COMPILE_SECONDS, GrammarCompiler
from jaxserve.structured_output.masks import GrammarMasks
from jaxserve.structured_output.matcher import CompiledGrammar

_WAIT_SECONDS = 2 * COMPILE_SECONDS  # another host may be busier than this one


class GrammarCompileRequests:
    """Grammars that other hosts were asked to compile. Thread safe.

    Args:
      send: sends a message to every worker.
      hosts: hosts that sample tokens, without host 0.
    """

    def __init__(self, send: Callable[[pb.FromMaster], None], hosts: Iterable[int]) -> None:
        self._send, self._hosts = send, frozenset(hosts)
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        self._awaited: dict[int, set[int]] = {}
        self._problems: dict[int, str] = {}

    def ask(self, grammar: Grammar) -> Callable[[], str | None]:
        """Ask the hosts to compile a grammar.

        Returns a function that waits for them; it returns why a host cannot compile it, or None.
        """
        with self._changed:
            number = next(self._numbers)
            self._awaited[number] = set(self._hosts)
        self._send(pb.FromMaster(prepare=pb.Prepare(number=number, grammar=wire.encode_grammar(grammar))))
        return partial(self._wait, number)

    def answered(self, host: int, prepared: pb.Prepared) -> None:
        """Record that a host has compiled a grammar, or why it could not."""
        with self._changed:
            awaited = self._awaited.get(prepared.number)
            if awaited is None:  # no thread waits for it any more
                return
            awaited.discard(host)
            if prepared.problem:
                self._problems[prepared.number] = f"{prepared.problem} (on host {host})"
            self._changed.notify_all()

    def _wait(self, number: int) -> str | None:
        with self._changed:
            self._changed.wait_for(lambda: not self._awaited[number], _WAIT_SECONDS)
            missing, problem = self._awaited.pop(number), self._problems.pop(number, None)
        if problem is None and missing:
            problem = f"was not compiled on host {min(missing)} within {_WAIT_SECONDS:g} seconds"
        return problem


class WorkerGrammars:
    """The grammar states on a worker that samples tokens.

    Any thread may call `prepare` and `landed`; only the launching thread may call the others.

    Args:
      mask_shape: gives the shape of an iteration's masks (see `Pipeline.mask_shape`).
    """

    def __init__(self, grammars: GrammarCompiler, mask_shape: Callable[[IterationPlan], tuple[int, int]]) -> None:
        self._grammars, self._mask_shape = grammars, mask_shape
        self._masks = GrammarMasks(multihost=True)
        self._landed: queue.SimpleQueue[tuple[IterationPlan, IterationResult]] = queue.SimpleQueue()

    def prepare(self, prepare: pb.Prepare, answer: Callable[[pb.FromWorker], None]) -> None:
        """Compile a grammar, and answer when that is done."""

        def done(found: CompiledGrammar | str) -> None:
            problem = found if isinstance(found, str) else ""
            answer(pb.FromWorker(prepared=pb.Prepared(number=prepare.number, problem=problem)))

        self._grammars.compile_in_background(wire.decode_grammar(prepare.grammar), done)

    def hold(self, hold: pb.Hold) -> None:
        """Add a request whose grammar was compiled."""
        sampling = wire.decode_sampling(hold.sampling)
        assert sampling.grammar is not None
        self._masks.begin(hold.request_id, sampling, self._grammars.compile(sampling.grammar))

    def release(self, release: pb.Release) -> None:
        """Remove a request that has ended."""
        self._masks.end(release.request_id)

    def landed(self, plan: IterationPlan, result: IterationResult) -> None:
        """Apply the sampled tokens of an iteration."""
        self._landed.put((plan, result))

    def launched(self, plan: IterationPlan) -> Callable[[], np.ndarray | None]:
        """Note a plan before its launch.

        Returns a function that waits for the tokens that the masks depend on, and returns the masks.
        """
        while not self._landed.empty():
            self._masks.landed(*self._landed.get())
        return partial(self._allowed, plan) if self._masks.launched(plan) else lambda: None

    def _allowed(self, plan: IterationPlan) -> np.ndarray:
        while not self._masks.is_known:
            self._masks.landed(*self._landed.get())
        self._masks.wait(lambda _: False)
        return self._masks.fill(*self._mask_shape(plan))
