"""Stages in a row, the links between them, and the batches in flight.

With one stage two iterations are in flight, the second launched before the first's tokens are known (its decodes read
them on the device). With S stages it is S + 1 of disjoint rows: one in each stage and one that waits for the first, so
that no stage waits for the host. A row's newest token then goes back from the last stage to the first while other rows
run, and is written to its history there before the row's next iteration.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from jaxserve.batch import PackedPlan
from jaxserve.iteration import IterationPlan, IterationResult
from jaxserve.models import Model, Params
from jaxserve.models.layers import Quantized
from jaxserve.programs import StageShape
from jaxserve.stage import Launched, StageRunner, wait
from jaxserve.weights import is_matrix

# Called after a launch with the plan and an output of each stage, which is there when the stage has run.
Watcher = Callable[[IterationPlan, Sequence[jax.Array]], None]


class _Fed(NamedTuple):
    """What the first stage is to take in: points int32[S, 3] and what was chosen there, int32[2, S]."""

    points: jax.Array
    chosen: jax.Array


class _InFlight(NamedTuple):
    plan: IterationPlan
    launched: Launched
    fed: _Fed | None


class Pipeline:
    """Launches iterations in order and hands their answers back in the same order."""

    def __init__(self, stages: Sequence[StageRunner]) -> None:
        self.stages = tuple(stages)
        self._in_flight: deque[_InFlight] = deque()
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
        assert not self._in_flight
        for stage in self.stages:
            stage.replace_params(params)

    @property
    def in_flight(self) -> int:
        """Iterations launched whose answers were not taken."""
        return len(self._in_flight)

    @property
    def has_room(self) -> bool:
        """Whether another iteration may be launched."""
        return len(self._in_flight) <= len(self.stages)

    def launch(self, plan: IterationPlan, packed: PackedPlan) -> None:
        """Enqueues an iteration; returns before it has run."""
        assert self.has_room
        first, last = self.stages[0], self.stages[-1]
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
        launched = last.answer(plan, outs[-1])
        fed = None
        if first is not last and launched.chosen is not None:
            fed = _Fed(outs[0].points, first.receive(launched.chosen))
        self._in_flight.append(_InFlight(plan, launched, fed))
        for watcher in self.watchers:
            watcher(plan, [out.hidden for out in outs])

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
