"""`python -m benchmarks overload`: the server's admission before a simulated engine, with too much traffic."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from jaxserve.iteration import IterationPlan
from jaxserve.planning.predict import predict
from jaxserve.request import Request
from jaxserve.sampling_params import SamplingParams
from jaxserve.simulate.outcome import Distribution, Outcome
from jaxserve.simulate.policy_comparison import system_of
from jaxserve.simulate.system import SimulatedEngine
from jaxserve.simulate.virtual_clock import Arrival, SimulatedDevice, SimulatedReplica, arrivals
from jaxserve.stats import Load
from server import errors
from server.admission import AdmissionController, Ticket
from server.auth import ANYBODY
from server.commands import console
from server.commands.plan import make_deployment
from server.commands.simulate import add_trace_flags, read_trace

HELP = """\
Serves recorded traffic, faster than it was recorded, with a simulated engine behind the server's own admission: who is
refused, and how long the others wait for their first token.

  python -m benchmarks overload --trace FILE --model llama-3-70b --topology h200:8 --tensor 8 --max-rows 128 \\
    --target-ttft 2s --speed 10"""


class Admitted(Outcome):
    """The outcome of an admitted request, which keeps its ticket up to date as a server does."""

    def __init__(self, arrival: Arrival, ticket: Ticket, front: Front) -> None:
        super().__init__(arrival=arrival.time, prompt_tokens=len(arrival.prompt))
        self._ticket, self._front, self._limit = ticket, front, arrival.max_tokens

    def add(self, now: float, count: int) -> None:
        """Tokens have come."""
        if not self.token_times:
            self._ticket.started()
            self._front.prefill -= self.prompt_tokens
        self._front.generated += count
        super().add(now, count)

    def ended(self, error: str | None = None) -> None:
        """The request has ended."""
        self._front.admission.finished(self.tokens, self._limit)
        self._ticket.release()
        super().ended(error)


class Front:
    """A server's admission and one simulated replica, on the same virtual clock."""

    def __init__(self, system: SimulatedEngine) -> None:
        self.now, self.generated, self.prefill, self._prompts = 0.0, 0, 0, 0
        self._system, device = system, SimulatedDevice(system.seconds, system.config.stages)
        in_flight = system.config.in_flight or system.config.stages + 1
        self.replica = SimulatedReplica(system.scheduler(), device, in_flight=in_flight, watch=self._launched)
        engine: Any = SimpleNamespace(
            config=system.config, report=SimpleNamespace(buckets=system.costs), load=self._load
        )
        self.admission = AdmissionController(engine, clock=lambda: self.now)

    def _launched(self, plan: IterationPlan, landing: float) -> None:
        self._prompts += plan.num_tokens - plan.num_decodes

    def _load(self) -> Load:
        scheduler, submitted = self.replica.scheduler, self.replica.submitted
        idle = dict.fromkeys(Load.__dataclass_fields__, 0)
        counted = {
            "running": scheduler.requests.num_running,
            "waiting": scheduler.num_waiting + len(submitted),
            "waiting_tokens": scheduler.waiting_tokens + sum(len(each.prompt) for each in submitted),
            "outstanding_tokens": self.replica.outstanding_tokens(self.now),
            "prefill_tokens": self.prefill,
            "prompt_tokens": self._prompts,
            "generated_tokens": self.generated,
        }
        return Load(**(idle | counted))

    def serve(self, incoming: Sequence[Arrival]) -> tuple[list[Outcome], int]:
        """The outcomes of the admitted requests, and how many were refused."""
        found: list[Outcome] = []
        for number, arrival in enumerate(incoming):
            self.replica.advance(arrival.time)
            self.now = arrival.time
            prompt = arrival.prompt
            try:
                ticket = self.admission.admit(
                    ANYBODY, requests=1, prompt_tokens=len(prompt), new_tokens=arrival.max_tokens
                )
            except errors.ApiError:
                continue
            sampling = SamplingParams(max_tokens=arrival.max_tokens, temperature=0.0, ignore_eos=True)
            request = Request(
                request_id=str(number), prompt=tuple(prompt.tolist()), sampling=sampling, arrival=arrival.time
            )
            found.append(Admitted(arrival, ticket, self))
            self.replica.submit(request, arrival, found[-1], 0)
            self.prefill += len(prompt)
            ticket.submitted()
        self.replica.advance(float("inf"))
        return found, len(incoming) - len(found)


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--trace", required=True, metavar="FILE", help="recorded arrivals and lengths")
    add_trace_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Serves the traffic and prints who waited for how long. Returns 0."""
    with console.user_errors():
        deployment = make_deployment(args)
        workload = read_trace(args, deployment.max_context)
        plan = predict(deployment)
        found, refused = Front(system_of(plan, plan.deployment.engine)).serve(arrivals(workload))
    first = Distribution.of(1e3 * each.first_token for each in found if each.tokens)
    in_time = sum(args.slo.met(each) for each in found)
    answer = {
        "requests": len(workload.jobs),
        "refused": refused,
        "in_time_of_admitted": in_time / max(len(found), 1),
        "ttft_ms": first and {"p50": first.p50, "p95": first.p95, "p99": first.p99},
    }
    console.print_json(answer)
    return 0
