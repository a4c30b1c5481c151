"""An engine that is four numbers, on a clock of our own: what the tests of admission control ask."""

from types import SimpleNamespace
from typing import Any

import pytest

from jaxserve.config import EngineConfig
from server.admission import AdmissionController, Ticket
from server.auth import ANYBODY, Tenant
from server.errors import ApiError


class Engine:
    """Four rows; 10 ms an iteration of decodes, 1,000 prompt tokens a second."""

    def __init__(self, **limits: Any) -> None:
        self.config = EngineConfig(max_rows=4, **limits)
        cost = SimpleNamespace(size=10, milliseconds=10.0, tokens_per_second=1000.0)
        self.report = SimpleNamespace(buckets=(cost,))
        self.now = 50.0
        self.counts = SimpleNamespace(
            running=0,
            waiting=0,
            waiting_tokens=0,
            outstanding_tokens=0,
            prefill_tokens=0,
            prompt_tokens=0,
            generated_tokens=0,
        )

    def load(self) -> Any:
        return self.counts

    def admission(self, *tenants: Tenant) -> AdmissionController:
        named = {tenant.name: tenant for tenant in tenants}
        return AdmissionController(self, tenants=lambda: named, clock=lambda: self.now)  # pyright: ignore[reportArgumentType]

    def take(self, ticket: Ticket) -> None:
        """Counts a ticket's requests as waiting, as the engine does from `submit` on."""
        self.counts.waiting += ticket.requests
        self.counts.waiting_tokens += ticket.tokens
        ticket.submitted()

    def begin(self, ticket: Ticket) -> None:
        self.counts.waiting -= ticket.requests
        self.counts.waiting_tokens -= ticket.tokens
        ticket.started()


def ask(admission: AdmissionController, tenant: Tenant = ANYBODY, **changes: Any) -> Ticket:
    return admission.admit(tenant, **{"requests": 1, "prompt_tokens": 10, "new_tokens": 100} | changes)


def refusal(admission: AdmissionController, tenant: Tenant = ANYBODY, **changes: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        ask(admission, tenant, **changes)
    return caught.value


def loaded(**limits: Any) -> Engine:
    """An engine whose rows are all in use for another 10 s, at 400 tokens a second."""
    engine = Engine(**limits)
    engine.counts.running, engine.counts.outstanding_tokens = 4, 4000
    return engine


def waits(engine: Engine, admission: AdmissionController, prompt_tokens: int, tenant: Tenant = ANYBODY) -> None:
    """A request of this length begins to wait; its answer is of no length."""
    engine.take(ask(admission, tenant, prompt_tokens=prompt_tokens, new_tokens=0))
    engine.counts.outstanding_tokens += prompt_tokens
