"""A pipeline of stages, the links between them, and the iterations in flight.

With one stage, two iterations are in flight: the second is launched before the tokens of the first are known, and its
decodes read them on the device. With S stages, S + 1 iterations of disjoint rows are in flight: one in each stage and
one that waits for the first, so that no stage waits for the host. A row's newest token goes back from the last stage to
the first while other rows run.

Head and sampler are launched separately after the layers. They are compiled for several sample counts, and an iteration
that samples no token launches neither. A row's grammar mask depends on its previous token, so the host computes it
while the layers run, and launches the sampler then. A row whose mask is late is withdrawn from the iteration.

On several hosts each has a pipeline of all stages and runs those that have devices there (`multihost`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve import weights
from jaxserve.iteration import IterationPlan, IterationResult
from jaxserve.models import Model, Params
from jaxserve.runner.batch import PackedPlan
from jaxserve.runner.links import Link, links_within
from jaxserve.runner.lowering import StagePrograms
from jaxserve.runner.programs import Forward, StageShape, points_for
from jaxserve.runner.stage import Launched, wait
from jaxserve.sampling_params import Grammar, SamplingParams
from jaxserve.scheduler.scheduler import Scheduler
from jaxserve.structured_output.masks import GrammarMasks
from jaxserve.structured_output.matcher import CompiledGrammar

# Called after a launch with the plan and an output of each stage, which is ready when the stage has run.
Watcher = Callable[[IterationPlan, Sequence[jax.Array]], None]


class Stage(Protocol):
    """The interface of a stage: `stage.StageRunner`, or `multihost.remote_stage.RemoteStage`."""

    programs: StagePrograms
    params: Any
    pool: Any
    buckets: tuple[int, ...]
    compile_seconds: dict[int, float]
    num_programs: int

    def admit(self, admissions: Sequence[np.ndarray]) -> None: ...
    def draft(self, drafts: np.ndarray) -> None: ...
    def copy(self, copies: np.ndarray) -> None: ...
    def forward(self, plan: IterationPlan, packed: np.ndarray, x: jax.Array | None) -> Forward: ...
    def sample(self, plan: IterationPlan, out: Forward, allowed: np.ndarray | None = None) -> Launched: ...
    def feed_back_tokens(self, points: jax.Array | None, chosen: jax.Array | None) -> None: ...
    def replace_params(self, params: Params) -> None: ...


class _TokenFeed(NamedTuple):
    """Tokens for the first stage: points int32[P, 3], and those sampled at the first S of them.

    Each is on the devices that made it, or None on a host without them.
    """

    entries: int
    points: jax.Array | None
    chosen: jax.Array | None


class Unsampled(NamedTuple):
    """An iteration whose sampler is not launched yet, with the output of each stage."""

    plan: IterationPlan
    outs: tuple[Forward, ...]


class InFlight(NamedTuple):
    """An iteration in flight.

    Attributes:
      hidden: an output of each stage, ready when the stage has run; None for a stage on other hosts.
      launched: the results, if the last stage is on this host.
    """

    plan: IterationPlan
    hidden: tuple[jax.Array | None, ...]
    launched: Launched


class Pipeline:
    """Launches iterations in order and returns their results in the same order.

    Args:
      links: from each stage to the next, and from the last to the first; those within a process if None.
    """

    def __init__(self, stages: Sequence[Stage], links: Sequence[Link] | None = None) -> None:
        self.stages = tuple(stages)
        self._links = tuple(links_within([stage.programs for stage in stages]) if links is None else links)
        self._in_flight: deque[InFlight] = deque()
        self._unsampled: Unsampled | None = None
        self._feeds: deque[_TokenFeed] = deque()  # of plans launched
        self._landed = 0  # number of feeds whose plans have completed
        self._masks = GrammarMasks(multihost=self.spans_hosts)
        self._scheduler: Scheduler | None = None
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
        """Shape of an iteration's grammar masks: positions it samples at, and words of a mask."""
        return points_for(plan, self._counts), self.stages[-1].programs.mask_words

    @property
    def params(self) -> Params:
        """The whole model's parameters without padding, each where it is first used."""
        tree: Params = {"layers": {}}
        for stage in reversed(self.stages):
            tree |= stage.params | {"layers": stage.params["layers"] | tree["layers"]}
        tree["layers"] = [tree["layers"][i] for i in range(self.model.config.num_layers)]
        return weights.unpadded(self.model, tree)

    def replace_params(self, params: Params) -> None:
        """Take other weights of the same shapes. No iteration may be in flight."""
        assert not self.in_flight
        assert not self.spans_hosts
        for stage in self.stages:
            stage.replace_params(params)

    @property
    def spans_hosts(self) -> bool:
        """Whether stages may be on other hosts: no weights replaced nor work timed from here."""
        return False

    @property
    def problem(self) -> str | None:
        """Why the pipeline has failed, in words for callers; None while it works."""
        return None

    @property
    def strangers(self) -> int:
        """Connections between hosts that were dropped because they did not know the group's secret."""
        return 0

    def connect(self, scheduler: Scheduler) -> None:
        """Withdraws rows with late grammar masks from this scheduler's plans; without one, waits."""
        self._scheduler = scheduler

    def prepare(self, grammar: Grammar) -> Callable[[], str | None]:
        """Start compiling a grammar on every other host that samples. Any thread may call this.

        Returns:
          A call that waits until they have, and returns why one cannot, or None.
        """
        del grammar
        return lambda: None

    def tell_profile(self, running: bool) -> None:
        """Start or stop a profile on every other host. Any thread may call this."""

    def add_grammar(
        self, request_id: str, sampling: SamplingParams, compiled: CompiledGrammar, generated: Sequence[int] = ()
    ) -> None:
        """Constrain a request to its grammar from its next sampled token on.

        Args:
          generated: tokens that it has already.
        """
        self._masks.begin(request_id, sampling, compiled, generated)

    def remove_grammar(self, request_id: str) -> None:
        """Forget the grammar of a request that has ended, if it had one."""
        self._masks.end(request_id)

    @property
    def in_flight(self) -> int:
        """Number of launched iterations whose results have not been taken."""
        return len(self._in_flight) + (self._unsampled is not None)

    @property
    def has_capacity(self) -> bool:
        """Whether another iteration may be in flight."""
        return self.in_flight <= len(self.stages)

    def can_launch(self) -> bool:
        """Samples the newest iteration if it waits for masks; whether another may be launched."""
        return self._sample_masked() and self.has_capacity

    def launch(self, plan: IterationPlan, packed: PackedPlan) -> None:
        """Enqueue an iteration; returns before it has run.

        If it waits for grammar masks, `can_launch` or `wait` enqueues its sampling.
        """
        assert self.has_capacity
        assert self._unsampled is None
        masked = self._masks.launched(plan)
        self._unsampled = self._enqueue_layers(plan, packed)
        if not masked:
            self._enqueue_sampling()

    def wait(self) -> tuple[IterationPlan, IterationResult]:
        """Block until the oldest iteration has run, and take its result."""
        if not self._has_sampled:
            sampled = self._sample_masked()
            assert sampled
        plan, result = self._take_oldest()
        return plan, self._masks.landed(plan, result)

    def _sample_masked(self) -> bool:
        """Enqueue the sampling of the newest iteration, if it waits for grammar masks.

        Returns:
          False while the masks depend on tokens in flight.
        """
        if self._unsampled is None:
            return True
        if not self._masks.is_known:
            return False
        late = self._masks.wait(self._may_withdraw)
        if late:
            assert self._scheduler is not None
            self._scheduler.withdraw(late)
        self._enqueue_sampling(self._masks.fill(*self.mask_shape(self._unsampled.plan)))
        return True

    def _may_withdraw(self, missing: int) -> bool:
        """Whether to withdraw rows without masks: the layers have run, and other requests are live."""
        if self._scheduler is None or missing >= self._scheduler.requests.num_running + self._scheduler.num_waiting:
            return False
        return self._is_idle

    @property
    def _is_idle(self) -> bool:
        """Whether the first stage has run the layers of every iteration."""
        return self._unsampled is None or _is_ready(self._unsampled.outs[0].hidden)

    @property
    def _has_sampled(self) -> bool:
        """Whether the oldest iteration's sampling is enqueued."""
        return bool(self._in_flight)

    def _enqueue_layers(self, plan: IterationPlan, packed: PackedPlan) -> Unsampled:
        return self._forward(plan, packed, self.take_landed())

    def _enqueue_sampling(self, allowed: np.ndarray | None = None) -> None:
        """Enqueue the sampling of the newest iteration.

        Args:
          allowed: uint32[S, words] grammar masks of its rows (see `StageRunner.sample`).
        """
        assert self._unsampled is not None
        unsampled, self._unsampled = self._unsampled, None
        self._in_flight.append(self._sampled(unsampled, allowed))

    def _take_oldest(self) -> tuple[IterationPlan, IterationResult]:
        plan, _, launched = self._in_flight.popleft()
        result = wait(launched)
        self.landed(plan)
        return plan, result

    def take_landed(self) -> int:
        """Completed iterations whose tokens return to stage 0 before the next launch."""
        landed, self._landed = self._landed, 0
        return landed

    def enqueue(
        self, plan: IterationPlan, packed: PackedPlan, feeds: int, allowed: Callable[[], np.ndarray | None]
    ) -> InFlight:
        """Enqueue an iteration on every local stage, for a caller that takes the result itself.

        Args:
          feeds: number of earlier iterations whose tokens are fed back to stage 0 before.
          allowed: returns the grammar masks. It is called once the layers are enqueued, and may block.
        """
        unsampled = self._forward(plan, packed, feeds)
        return self._sampled(unsampled, allowed())

    def _forward(self, plan: IterationPlan, packed: PackedPlan, feeds: int) -> Unsampled:
        first = self.stages[0]
        # Only now: devices run in order, so a first stage that is fed tokens before they are sampled waits for them.
        for _ in range(feeds):
            entries, points, chosen = self._feeds.popleft()
            if self._links[-1].in_line:
                chosen = self._back(chosen, entries)
            first.feed_back_tokens(points, chosen)
        x, outs = None, []
        for index, stage in enumerate(self.stages):
            stage.admit(packed.admissions)
            if packed.drafts is not None:
                stage.draft(packed.drafts)
            if packed.copies is not None:
                stage.copy(packed.copies)
            if index:
                x = self._links[index - 1].send(x, self._between(plan.bucket))
            outs.append(stage.forward(plan, packed.iteration, x))
            x = outs[-1].hidden
        for watcher in self.watchers:
            watcher(plan, [out.hidden for out in outs])
        return Unsampled(plan, tuple(outs))

    def _sampled(self, unsampled: Unsampled, allowed: np.ndarray | None = None) -> InFlight:
        plan, outs = unsampled
        launched = self.stages[-1].sample(plan, outs[-1], allowed)
        if len(self.stages) > 1 and plan.sampler is not None:
            chosen, count = launched.chosen, points_for(plan, self._counts)
            if not self._links[-1].in_line:
                chosen = self._back(chosen, count)
            self._feeds.append(_TokenFeed(count, outs[0].points, chosen))
        return InFlight(plan, tuple(out.hidden for out in outs), launched)

    def _between(self, bucket: int) -> jax.ShapeDtypeStruct:
        if bucket not in self._hidden:
            self._hidden[bucket] = self.stages[0].programs.hidden(bucket)
        return self._hidden[bucket]

    def _back(self, chosen: jax.Array | None, count: int) -> jax.Array | None:
        return self._links[-1].send(chosen, jax.ShapeDtypeStruct((2, count), jnp.int32))

    def landed(self, plan: IterationPlan) -> None:
        """Note that the oldest iteration's tokens are known."""
        if len(self.stages) > 1 and plan.sampler is not None:
            self._landed += 1

    def close(self) -> None:
        """Release what the pipeline uses outside this process."""


def _is_ready(x: Any) -> bool:
    return x.is_ready()
