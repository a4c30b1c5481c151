"""Stages in a row, the links between them, and the batches in flight.

With one stage two iterations are in flight, the second launched before the first's tokens are known (its decodes read
them on the device). With S stages it is S + 1 of disjoint rows: one in each stage and one that waits for the first, so
that no stage waits for the host. A row's newest token then goes back from the last stage to the first while other rows
run, and is written to its history there before the row's next iteration.

The head and the choice of tokens are launches of their own after the layers', made for as many tokens as are chosen;
an iteration that chooses none has neither. What the choice needs of a grammar depends on the row's token before, so
that for an iteration with such rows it is enqueued later, while the layers run.

On several hosts each has a pipeline of all stages, of which it runs those that have devices here (`cluster`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.iteration import IterationPlan, IterationResult
from jaxserve.models import Model, Params
from jaxserve.models.layers import Quantized
from jaxserve.request import Request
from jaxserve.runner.batch import PackedPlan
from jaxserve.runner.links import Link, links_within
from jaxserve.runner.lowering import StagePrograms
from jaxserve.runner.programs import Forward, StageShape, points_for
from jaxserve.runner.stage import Launched, wait
from jaxserve.sampling_params import Grammar
from jaxserve.weights import is_matrix

# Called after a launch with the plan and an output of each stage, which is there when the stage has run.
Watcher = Callable[[IterationPlan, Sequence[jax.Array]], None]


class Stage(Protocol):
    """What a pipeline asks of a stage: a `stage.StageRunner`, or a `cluster.absent.RemoteStage`."""

    programs: StagePrograms
    params: Any
    pool: Any
    buckets: tuple[int, ...]
    compile_seconds: dict[int, float]
    num_programs: int

    def admit(self, admissions: Sequence[np.ndarray]) -> None: ...
    def draft(self, drafts: np.ndarray) -> None: ...
    def copy(self, copies: np.ndarray) -> None: ...
    def forward(self, bucket: int, packed: np.ndarray, x: jax.Array | None) -> Forward: ...
    def answer(self, plan: IterationPlan, out: Forward, allowed: np.ndarray | None = None) -> Launched: ...
    def feed(self, points: jax.Array | None, chosen: jax.Array | None) -> None: ...
    def replace_params(self, params: Params) -> None: ...


class _Fed(NamedTuple):
    """What the first stage is to take in: points int32[P, 3] and what was chosen at the first S of them, int32[2, S];
    each where it is, or None on a host where it is not."""

    entries: int
    points: jax.Array | None
    chosen: jax.Array | None


class _Unanswered(NamedTuple):
    """An iteration whose tokens are still to be chosen, and what each stage leaves."""

    plan: IterationPlan
    outs: tuple[Forward, ...]


class InFlight(NamedTuple):
    """An iteration under way.

    Attributes:
      hidden: an output of each stage, which is there when the stage has run; None of a stage on other hosts.
      launched: its answers, where the last stage is here.
    """

    plan: IterationPlan
    hidden: tuple[jax.Array | None, ...]
    launched: Launched


class Pipeline:
    """Launches iterations in order and hands their answers back in the same order.

    Args:
      links: the way from each stage to the next, and from the last to the first; those within a process where None.
    """

    def __init__(self, stages: Sequence[Stage], links: Sequence[Link] | None = None) -> None:
        self.stages = tuple(stages)
        self._links = tuple(links_within([stage.programs for stage in stages]) if links is None else links)
        self._in_flight: deque[InFlight] = deque()
        self._unanswered: _Unanswered | None = None
        self._fed: deque[_Fed] = deque()  # of plans launched
        self._landed = 0  # so many of them are known on the host
        self.watchers: list[Watcher] = []
        self._hidden: dict[int, jax.ShapeDtypeStruct] = {}  # what a link carries, by bucket
        self._counts = self.shape.point_counts(self.stages[0].buckets)

    @property
    def model(self) -> Model:
        """The model whose layers the stages share."""
        return self.stages[0].programs.model

    @property
    def shape(self) -> StageShape:
        """The sizes that all stages are compiled for."""
        return self.stages[0].programs.shape

    def mask_shape(self, plan: IterationPlan) -> tuple[int, int]:
        """Of what `answer` is given for an iteration: tokens that it may choose, and words of a mask."""
        return points_for(plan, self._counts), self.stages[-1].programs.mask_words

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
        assert not self.spans_hosts
        for stage in self.stages:
            stage.replace_params(params)

    @property
    def spans_hosts(self) -> bool:
        """Whether stages may be on other hosts, whose weights cannot be replaced from here, nor their work watched."""
        return False

    @property
    def problem(self) -> str | None:
        """Why nothing will be answered any more, where callers may be told."""
        return None

    def prepare(self, grammar: Grammar) -> Callable[[], str | None]:
        """Has every other host that chooses tokens compile a grammar. Any thread may ask.

        Returns:
          What waits until they have, and says why one cannot, or None.
        """
        del grammar
        return lambda: None

    def hold(self, request: Request) -> None:
        """A request with a grammar has come in: hosts that choose tokens follow its text."""

    def release(self, request_id: str) -> None:
        """A request with a grammar has ended."""

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
        return self._unanswered is None or _is_there(self._unanswered.outs[0].hidden)

    def launch(self, plan: IterationPlan, packed: PackedPlan, *, answer: bool = True) -> None:
        """Enqueues an iteration; returns before it has run.

        Args:
          answer: whether its tokens are chosen too; otherwise `answer` has to be called before the next launch.
        """
        assert self.has_room
        assert self._unanswered is None
        self._unanswered = self._forward(plan, packed, self.take_landed())
        if answer:
            self.answer()

    def answer(self, allowed: np.ndarray | None = None) -> None:
        """Enqueues the choice of the tokens of the iteration launched without.

        Args:
          allowed: uint32[S, words] what the grammars of its rows allow (see `StageRunner.answer`).
        """
        assert self._unanswered is not None
        unanswered, self._unanswered = self._unanswered, None
        self._in_flight.append(self._answered(unanswered, allowed))

    def take_landed(self) -> int:
        """Of how many earlier iterations the first stage takes in the tokens before the next is launched."""
        landed, self._landed = self._landed, 0
        return landed

    def enqueue(
        self, plan: IterationPlan, packed: PackedPlan, feeds: int, allowed: Callable[[], np.ndarray | None]
    ) -> InFlight:
        """Enqueues an iteration on every stage that is here; its answers are the caller's to take.

        Args:
          feeds: of how many earlier iterations, the oldest that were not, the first stage takes in the tokens before.
          allowed: says what `answer` is given, called once the layers are enqueued; it may block until that is known.
        """
        unanswered = self._forward(plan, packed, feeds)
        return self._answered(unanswered, allowed())

    def _forward(self, plan: IterationPlan, packed: PackedPlan, feeds: int) -> _Unanswered:
        first = self.stages[0]
        # Only now: devices run what they are given in order, and a first stage that is given tokens before they are
        # chosen has to wait for them.
        for _ in range(feeds):
            entries, points, chosen = self._fed.popleft()
            if self._links[-1].in_line:
                chosen = self._back(chosen, entries)
            first.feed(points, chosen)
        x, outs = None, []
        for index, stage in enumerate(self.stages):
            stage.admit(packed.admissions)
            if packed.drafts is not None:
                stage.draft(packed.drafts)
            if packed.copies is not None:
                stage.copy(packed.copies)
            if index:
                x = self._links[index - 1].send(x, self._between(plan.bucket))
            outs.append(stage.forward(plan.bucket, packed.iteration, x))
            x = outs[-1].hidden
        for watcher in self.watchers:
            watcher(plan, [out.hidden for out in outs])
        return _Unanswered(plan, tuple(outs))

    def _answered(self, unanswered: _Unanswered, allowed: np.ndarray | None = None) -> InFlight:
        plan, outs = unanswered
        launched = self.stages[-1].answer(plan, outs[-1], allowed)
        if len(self.stages) > 1 and plan.sampler is not None:
            chosen, count = launched.chosen, points_for(plan, self._counts)
            if not self._links[-1].in_line:
                chosen = self._back(chosen, count)
            self._fed.append(_Fed(count, outs[0].points, chosen))
        return InFlight(plan, tuple(out.hidden for out in outs), launched)

    def _between(self, bucket: int) -> jax.ShapeDtypeStruct:
        if bucket not in self._hidden:
            self._hidden[bucket] = self.stages[0].programs.hidden(bucket)
        return self._hidden[bucket]

    def _back(self, chosen: jax.Array | None, count: int) -> jax.Array | None:
        return self._links[-1].send(chosen, jax.ShapeDtypeStruct((2, count), jnp.int32))

    def wait(self) -> tuple[IterationPlan, IterationResult]:
        """Blocks until the oldest iteration has run, and takes its answers."""
        plan, _, launched = self._in_flight.popleft()
        result = wait(launched)
        self.landed(plan)
        return plan, result

    def landed(self, plan: IterationPlan) -> None:
        """The oldest iteration's tokens are known."""
        if len(self.stages) > 1 and plan.sampler is not None:
            self._landed += 1

    def close(self) -> None:
        """Lets go of whatever works for it beyond this process."""


def _is_there(x: Any) -> bool:
    return x.is_ready()


def _cut(values: Any, own: jax.ShapeDtypeStruct) -> Any:
    """A parameter without its padding."""
    if values.shape == own.shape:
        return values
    if isinstance(values, Quantized):
        rows, columns = map(slice, own.shape)
        return Quantized(values.values[rows, columns], values.scales[rows])
    return values[tuple(map(slice, own.shape))]
