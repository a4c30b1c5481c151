"""Replicas of the engine that serve arrivals together, each arrival routed as in the engine."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from jaxserve.request import Request
from jaxserve.sampling_params import SamplingParams
from jaxserve.scheduler import routing
from jaxserve.scheduler.prefix_index import PrefixIndex
from jaxserve.scheduler.state import allocation_of
from jaxserve.simulate.outcome import Outcome, OutcomeTable, TableOutcome
from jaxserve.simulate.virtual_clock import Arrival, SimulatedReplica
from jaxserve.simulate.workload import DrawnPrompt


class Scaling(Protocol):
    """Decides over time which replicas take new requests."""

    @property
    def ready(self) -> Sequence[int]:
        """The replicas that take them, by their places; at least one."""
        ...

    def advance(self, now: float) -> None:
        """Act up to this time, before the arrival at it is routed."""
        ...


def serve(incoming: Sequence[Arrival], replicas: Sequence[SimulatedReplica]) -> list[Outcome]:
    """Serve every arrival (ascending in time) as the engine would, and return token times.

    Each arrival is routed as in the engine, to the replica with the fewest outstanding tokens after cached prefixes.

    Returns:
      An outcome for each arrival; a refused one has an error.
    """
    outcomes: list[Outcome] = []

    def kept(arrival: Arrival) -> Outcome:
        outcomes.append(Outcome(arrival=arrival.time, prompt_tokens=len(arrival.prompt)))
        return outcomes[-1]

    _serve(incoming, replicas, kept, None)
    return outcomes


def serve_into(
    table: OutcomeTable,
    incoming: Sequence[Arrival],
    replicas: Sequence[SimulatedReplica],
    scaling: Scaling | None = None,
) -> None:
    """Serve every arrival as `serve` does, and keep the outcomes in a new table.

    Args:
      scaling: chooses the replicas that take requests; without it all do.
    """
    for replica in replicas:
        replica.gaps = table.gaps
    _serve(incoming, replicas, lambda each: TableOutcome(table, table.add(each.time, len(each.prompt))), scaling)


def _ids(prompt: np.ndarray | DrawnPrompt) -> tuple[int, ...]:
    """The token ids of a prompt."""
    return prompt.ids() if isinstance(prompt, DrawnPrompt) else tuple(prompt.tolist())


def _serve(
    incoming: Sequence[Arrival],
    replicas: Sequence[SimulatedReplica],
    outcome_of: Callable[[Arrival], Outcome | TableOutcome],
    scaling: Scaling | None,
) -> None:
    sampling: dict[tuple[int, bool], SamplingParams] = {}
    prefixes = PrefixIndex([replica.scheduler.pool for replica in replicas]) if len(replicas) > 1 else None
    # Without a prefix cache the token values do not matter.
    tokens_matter = replicas[0].scheduler.pool.prefix_cache
    ready: Sequence[int] = range(len(replicas))
    for index, arrival in enumerate(incoming):
        if scaling is not None:
            scaling.advance(arrival.time)
            ready = scaling.ready
        for replica in replicas:
            replica.advance(arrival.time)
        outcome, kind = outcome_of(arrival), (arrival.max_tokens, arrival.max_tokens == arrival.output)
        limit = sampling.get(kind)
        if limit is None:
            limit = SamplingParams(max_tokens=arrival.max_tokens, temperature=0.0, ignore_eos=kind[1])
            sampling[kind] = limit
        request = Request(
            request_id=str(index),
            prompt=_ids(arrival.prompt) if tokens_matter else (0,) * len(arrival.prompt),
            sampling=limit,
            priority=arrival.priority,
            arrival=arrival.time,
            tenant=arrival.tenant,
        )
        if prefixes is None:
            replicas[0].submit(request, arrival, outcome, 0)
            continue
        cached = prefixes.cached_tokens(allocation_of(request))
        owed = [replicas[each].outstanding_tokens(arrival.time) for each in ready]
        chosen = ready[routing.choose(owed, [cached[each] for each in ready])]
        replicas[chosen].submit(request, arrival, outcome, cached[chosen])
    for replica in replicas:
        replica.advance(math.inf)
        assert not replica.scheduler.has_work
