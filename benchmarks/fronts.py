"""`python -m benchmarks fronts`: one front routes calls to simulated replicas, or many that see their own calls."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence

import numpy as np

from jaxserve.planning.predict import predict
from jaxserve.request import Request
from jaxserve.sampling_params import SamplingParams
from jaxserve.scheduler import routing
from jaxserve.scheduler.prefix_index import PrefixIndex
from jaxserve.scheduler.state import allocation_of
from jaxserve.simulate.outcome import Distribution, Outcome
from jaxserve.simulate.policy_comparison import system_of
from jaxserve.simulate.system import SimulatedEngine
from jaxserve.simulate.virtual_clock import Arrival, SimulatedDevice, SimulatedReplica, arrivals
from server.commands import console, flags
from server.commands.plan import make_deployment
from server.commands.simulate import add_trace_flags, read_trace

HELP = """\
Serves recorded traffic with simulated replicas behind one front, behind several that know their own calls alone, and
behind several that also read the replicas' cache events and loads.

  python -m benchmarks fronts --trace FILE --model gpt3-13b --topology h100:16 --replicas 16 --speed 8"""


CHOICES = 8  # replicas that a front compares by loads that were read some time ago


class RoutedCall(Outcome):
    """The outcome of a call, which keeps what its front thinks the replica owes it up to date."""

    def __init__(self, arrival: Arrival, owed: list[int], replica: int, uncached: int) -> None:
        super().__init__(arrival=arrival.time, prompt_tokens=len(arrival.prompt))
        self._owed, self._replica, self._uncached, self._limit = owed, replica, uncached, arrival.max_tokens
        owed[replica] += uncached + arrival.max_tokens

    def add(self, now: float, count: int) -> None:
        """Tokens have come."""
        self._owed[self._replica] -= count + (0 if self.token_times else self._uncached)
        super().add(now, count)

    def ended(self, error: str | None = None) -> None:
        """The call has ended."""
        self._owed[self._replica] -= self._limit - self.tokens + (0 if self.token_times else self._uncached)
        super().ended(error)


def serve(
    system: SimulatedEngine, incoming: Sequence[Arrival], *, fronts: int, period: float | None, seed: int
) -> list[Outcome]:
    """Serve every arrival through a front drawn by chance.

    Args:
      period: seconds between two readings of the replicas' loads, with which cache events come; 0 for always; None if a
        front knows its own calls alone.
    """
    replicas = [
        SimulatedReplica(
            system.scheduler(),
            SimulatedDevice(system.seconds, system.config.stages),
            in_flight=system.config.in_flight or system.config.stages + 1,
        )
        for _ in range(system.replicas)
    ]
    prefixes = PrefixIndex([replica.scheduler.pool for replica in replicas])
    own = [[0] * len(replicas) for _ in range(fronts)]
    told, read = [0] * len(replicas), -math.inf  # loads, and when they were read
    since = [[0] * len(replicas) for _ in range(fronts)]  # what each front has sent since then
    found: list[Outcome] = []
    rng = np.random.default_rng([seed, 6])
    for number, (arrival, front) in enumerate(
        zip(incoming, rng.integers(fronts, size=len(incoming)).tolist(), strict=True)
    ):
        now = arrival.time
        for replica in replicas:
            replica.advance(now)
        request = Request(
            request_id=str(number),
            prompt=tuple(arrival.prompt.tolist()),
            sampling=SamplingParams(max_tokens=arrival.max_tokens, temperature=0.0, ignore_eos=True),
            arrival=now,
        )
        cached, owed = [0] * len(replicas), own[front]
        if period is not None:
            at = now if not period else period * math.floor(now / period)
            if at > read:
                told, read = [replica.outstanding_tokens(at) for replica in replicas], at
                since = [[0] * len(replicas) for _ in range(fronts)]
            owed = [sum(each) for each in zip(told, since[front], strict=True)]
            cached = prefixes.cached_tokens(allocation_of(request))
        seen = range(len(replicas))
        if period:  # all would choose the same replica until the next reading
            seen = rng.choice(len(replicas), min(CHOICES, len(replicas)), replace=False).tolist()
        chosen = seen[routing.choose([owed[each] for each in seen], [cached[each] for each in seen])]
        uncached = len(arrival.prompt) - cached[chosen]
        since[front][chosen] += uncached + arrival.max_tokens
        found.append(RoutedCall(arrival, own[front], chosen, uncached))
        replicas[chosen].submit(request, arrival, found[-1], cached[chosen])
    for replica in replicas:
        replica.advance(math.inf)
    return found


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--trace", required=True, metavar="FILE", help="recorded arrivals and lengths")
    parser.add_argument("--fronts", type=int, default=16, metavar="N", help="(default: %(default)s)")
    parser.add_argument(
        "--period", type=flags.duration, default=0.1, metavar="S", help="between readings of loads (default: 100ms)"
    )
    add_trace_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Serves the traffic three times and prints the share in time. Returns 0."""
    with console.user_errors():
        deployment = make_deployment(args)
        plan = predict(deployment)
        coming = arrivals(read_trace(args, deployment.max_context))
        system = system_of(plan, plan.deployment.engine)
    answer = {}
    for name, fronts, period in (
        ("one front", 1, 0.0),
        (f"{args.fronts} fronts, own calls", args.fronts, None),
        (f"{args.fronts} fronts, events and loads", args.fronts, args.period),
    ):
        found = serve(system, coming, fronts=fronts, period=period, seed=args.seed)
        first = Distribution.of(1e3 * each.first_token for each in found if each.tokens)
        in_time = float(np.mean([bool(each.tokens) and each.first_token <= args.slo.ttft for each in found]))
        answer[name] = {"in_time": in_time, "ttft_ms": first and {"p50": first.p50, "p95": first.p95}}
    console.print_json(answer)
    return 0
