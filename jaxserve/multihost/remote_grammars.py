"""Texts that are held to a grammar, where hosts share a model.

Every host that chooses tokens follows the texts by itself, from the plans and from the tokens that it chooses, and
computes what may come next; no mask travels. Host 0 lets a request in once all of these hosts have compiled its
grammar, so that none of them ever has to wait for that within an iteration.
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
from jaxserve.structured_output.masks import GrammarMasks
from jaxserve.structured_output.matcher import COMPILE_SECONDS, Compiled, Grammars

_PATIENCE = 2 * COMPILE_SECONDS  # another host may be busier than this one


class GrammarCompileRequests:
    """Grammars that other hosts have been asked to compile. Thread safe.

    Args:
      send: sends a message to every worker.
      hosts: those that choose tokens, without host 0.
    """

    def __init__(self, send: Callable[[pb.FromMaster], None], hosts: Iterable[int]) -> None:
        self._send, self._hosts = send, frozenset(hosts)
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        self._awaited: dict[int, set[int]] = {}
        self._problems: dict[int, str] = {}

    def ask(self, grammar: Grammar) -> Callable[[], str | None]:
        """Has the hosts compile a grammar; returns what waits for them and says why one cannot, or None."""
        with self._changed:
            number = next(self._numbers)
            self._awaited[number] = set(self._hosts)
        self._send(pb.FromMaster(prepare=pb.Prepare(number=number, grammar=wire.encode_grammar(grammar))))
        return partial(self._wait, number)

    def answered(self, host: int, prepared: pb.Prepared) -> None:
        """A host has compiled a grammar, or says why not."""
        with self._changed:
            awaited = self._awaited.get(prepared.number)
            if awaited is None:  # nobody waits any more
                return
            awaited.discard(host)
            if prepared.problem:
                self._problems[prepared.number] = f"{prepared.problem} (on host {host})"
            self._changed.notify_all()

    def _wait(self, number: int) -> str | None:
        with self._changed:
            self._changed.wait_for(lambda: not self._awaited[number], _PATIENCE)
            missing, problem = self._awaited.pop(number), self._problems.pop(number, None)
        if problem is None and missing:
            problem = f"was not compiled on host {min(missing)} within {_PATIENCE:g} seconds"
        return problem


class WorkerGrammars:
    """The texts of a worker that chooses tokens: what may come next in each.

    `prepare` and `landed` may be called by any thread, the others by the one that launches.

    Args:
      mask_shape: of the masks of an iteration (see `Pipeline.mask_shape`).
    """

    def __init__(self, grammars: Grammars, mask_shape: Callable[[IterationPlan], tuple[int, int]]) -> None:
        self._grammars, self._mask_shape = grammars, mask_shape
        self._masks = GrammarMasks(alike=True)
        self._landed: queue.SimpleQueue[tuple[IterationPlan, IterationResult]] = queue.SimpleQueue()

    def prepare(self, prepare: pb.Prepare, answer: Callable[[pb.FromWorker], None]) -> None:
        """Has a grammar compiled and answers then."""

        def done(found: Compiled | str) -> None:
            problem = found if isinstance(found, str) else ""
            answer(pb.FromWorker(prepared=pb.Prepared(number=prepare.number, problem=problem)))

        self._grammars.compile_aside(wire.decode_grammar(prepare.grammar), done)

    def hold(self, hold: pb.Hold) -> None:
        """A request has come in, whose grammar was prepared."""
        sampling = wire.decode_sampling(hold.sampling)
        assert sampling.grammar is not None
        self._masks.begin(hold.request_id, sampling, self._grammars.compiled(sampling.grammar))

    def release(self, release: pb.Release) -> None:
        """A request has ended."""
        self._masks.end(release.request_id)

    def landed(self, plan: IterationPlan, result: IterationResult) -> None:
        """Tokens have been chosen."""
        self._landed.put((plan, result))

    def launched(self, plan: IterationPlan) -> Callable[[], np.ndarray | None]:
        """Notes a plan about to be launched; what says its masks, and waits for the tokens that they depend on."""
        while not self._landed.empty():
            self._masks.landed(*self._landed.get())
        return partial(self._allowed, plan) if self._masks.launched(plan) else lambda: None

    def _allowed(self, plan: IterationPlan) -> np.ndarray:
        while not self._masks.is_known:
            self._masks.landed(*self._landed.get())
        self._masks.wait(lambda _: False)
        return self._masks.fill(*self._mask_shape(plan))
