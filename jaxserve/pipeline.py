"""Stages in a row, the links between them, and the batches in flight.

With one stage two iterations are in flight, the second launched before the first's tokens are known (its decodes read
them on the device). With S stages it is S + 1 of disjoint rows: one in each stage and one that waits for the first, so
that no stage waits for the host. A row's newest token then goes back from the last stage to the first while other rows
run, and is written to its history there before the row's next iteration.

The choice of tokens is a launch of its own after the layers'. What it needs of a grammar depends on the row's token
before, so that for an iteration with such rows it is enqueued later, while the layers run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxserve.batch import PackedPlan
from jaxserve.iteration import IterationPlan, IterationResult
from jaxserve.models import Model, Params
from jaxserve.models.layers import Quantized
from jaxserve.programs import Forward, StageShape
from jaxserve.stage import Launched, StageRunner, wait
from jaxserve.weights import is_matrix

# Called after a launch with the plan and an output of each stage, which is there when the stage has run.
Watcher = Callable[[IterationPlan, Sequence[jax.Array]], None]


class _Fed(NamedTuple):
    """What the first stage is to take in: points int32[S, 3] and what was chosen there, int32[2, S]."""

    points: jax.Array
    chosen: jax.Array


class _Unanswered(NamedTuple):
    """An iteration whose tokens are still to be chosen; what the first stage and the last leave."""

    plan: IterationPlan
    first: Forward
    last: Forward


class _InFlight(NamedTuple):
    plan: IterationPlan
    launched: Launched
    fed: _Fed | None


class Pipeline:
    """Launches iterations in order and hands their answers back in the same order."""

    def __init__(self, stages: Sequence[StageRunner]) -> None:
        self.stages = tuple(stages)
        self._in_flight: deque[_InFlight] = deque()
        self._unanswered: _Unanswered | None = None
        self._landed: list[_Fed] = []
        self.watchers: list[Watcher] = []

    @property
    def model(self) -> Model:
        """The model whose layers the stages share."""
        return self.stages[0].programs.model

    @property
    def shape(self) -> StageShape:
        """The sizes that all stages are compiled for."""
        return self.stages[0].programs.shape

    @property
    def mask_words(self) -> int:
        """Words of a mask of the model's tokens."""
        return self.stages[-1].programs.mask_words

    @property
    def params(self) -> Params:
        """The whole model's parameters, each where it is used (the first place of two) and without its padding."""
        tree: Params = {"layers": {}}
        for stage in reversed(self.stages):
            tree |= stage.params | {"layers": stage.params["layers"] | tree["layers"]}
        shapes = self.model.unpadded.shapes(self.shape.attention.dtype)
        shapes["layers"] = dict(enumerate(shapes["layers"]))
        return jax.tree.map(_cut, tree, shapes, is_leaf=is_matrix)

    def replace_params(self, params: Params) -> None:
        """Takes other weights of the same shapes; no iteration may be in flight."""
        assert not self.in_flight
        for stage in self.stages:
            stage.replace_params(params)

    @property
    def in_flight(self) -> int:
        """Iterations launched whose answers were not taken."""
        return len(self._in_flight) + (self._unanswered is not None)

    @property
    def has_room(self) -> bool:
        """Whether another iteration may be launched."""
        return self.in_flight <= len(self.stages)

    @property
    def has_answers(self) -> bool:
        """Whether the oldest iteration's tokens are chosen as soon as its layers have run."""
        return bool(self._in_flight)

    @property
    def is_idle(self) -> bool:
        """Whether the first stage has run the layers of every iteration."""
        return self._unanswered is None or self._unanswered.first.hidden.is_ready()

    def launch(self, plan: IterationPlan, packed: PackedPlan, *, answer: bool = True) -> None:
        """Enqueues an iteration; returns before it has run.

        Args:
          answer: whether its tokens are chosen too; otherwise `answer` has to be called before the next launch.
        """
        assert self.has_room
        assert self._unanswered is None
        first = self.stages[0]
        # Only now: devices run what they are given in order, and a first stage that is given tokens before they are
        # chosen has to wait for them.
        for fed in self._landed:
            first.feed(*fed)
        self._landed.clear()
        x, outs = None, []
        for stage in self.stages:
            stage.admit(packed.admissions)
            if packed.drafts is not None:
                stage.draft(packed.drafts)
            if packed.copies is not None:
                stage.copy(packed.copies)
            outs.append(stage.forward(plan.bucket, packed.iteration, None if x is None else stage.receive(x)))
            x = outs[-1].hidden
        self._unanswered = _Unanswered(plan, outs[0], outs[-1])
        if answer:
            self.answer()
        for watcher in self.watchers:
            watcher(plan, [out.hidden for out in outs])

    def answer(self, allowed: np.ndarray | None = None) -> None:
        """Enqueues the choice of the tokens of the iteration launched without.

        Args:
          allowed: uint32[S, words] what the grammars of its rows allow (see `StageRunner.answer`).
        """
        assert self._unanswered is not None
        (plan, first_out, last_out), self._unanswered = self._unanswered, None
        first, last = self.stages[0], self.stages[-1]
        launched = last.answer(plan, last_out, allowed)
        fed = None
        if first is not last and launched.chosen is not None:
            fed = _Fed(first_out.points, first.receive(launched.chosen))
        self._in_flight.append(_InFlight(plan, launched, fed))

    def wait(self) -> tuple[IterationPlan, IterationResult]:
        """Blocks until the oldest iteration has run, and takes its answers."""
        plan, launched, fed = self._in_flight.popleft()
        result = wait(launched)
        if fed is not None:
            self._landed.append(fed)
        return plan, result


def _cut(values: Any, own: jax.ShapeDtypeStruct) -> Any:
    """A parameter without its padding."""
    if values.shape == own.shape:
        return values
    if isinstance(values, Quantized):
        rows, columns = map(slice, own.shape)
        return Quantized(values.values[rows, columns], values.scales[rows])
    return values[tuple(map(slice, own.shape))]
