"""Admission of calls: bounds on the queue, shares and rates of tenants, and deadlines.

A call is admitted or refused before any work is done for it, by the most tokens that its text can have. Its requests
and tokens count against the bounds until the engine counts them itself. All of this runs on one thread and takes
microseconds, so a refusal is cheap. `CallPrompts` then tells what can never fit from what may come back later.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextvars import ContextVar
from itertools import count
from typing import TYPE_CHECKING

from jaxserve.scheduler.buckets import BucketLadder, decode_seconds, prompt_rate, seconds_of_work
from jaxserve.scheduler.order import RequestOrder, make_order
from server import errors
from server.auth import ANYBODY, Tenant, current
from server.waiting_calls import Place, WaitingCalls, Work

if TYPE_CHECKING:
    from jaxserve.stats import Load
    from server.engine_client import EngineClient

_SAMPLE_SECONDS = 0.25  # least time between two samples of the engine's counters
_OLD_SECONDS = 5.0  # a rate is not measured from a sample older than this
_SMOOTHING = 0.3  # weight of the newest sample
_SMOOTHING_ENDS = 0.05  # weight of the newest answer
_MISSES, _STEP = 0.03, 0.3  # calls that may wait longer than estimated, and how fast the estimate follows
_CONTENDED = 0.5  # in a queue fuller than this, a tenant may have no more than its share
_SHORTEST_RETRY, _LONGEST_RETRY = 0.1, 60.0  # seconds


# Requests of the current call that have been counted against its tenant's rate, and not admitted yet.
_charged: ContextVar[int] = ContextVar("charged", default=0)


class Ticket:
    """The place of one call in the queue until `release`, which may be called twice."""

    def __init__(
        self,
        admission: AdmissionController,
        tenant: Tenant,
        work: Work,
        place: Place,
        slack: float,
        estimate: float,
    ) -> None:
        """
        Args:
          place: about the key that the engine's order will give the requests, and the call's number.
          estimate: seconds until the requests start.
        """
        self.tenant, self.requests, self.tokens = tenant, work.requests, work.tokens
        self._admission, self._work, self._place, self._slack = admission, work, place, slack
        self._estimate, self._since = estimate, admission.now()
        self._kept = False
        self._stage = 0  # 0: not submitted; 1: waits in the engine; 2: has started, or was released

    def correct(self, tokens: int) -> None:
        """Sets the actual number of prompt tokens. Raises ApiError if they make the call too late."""
        if tokens / self._admission.prompt_rate > self._slack:
            raise errors.ApiError(
                errors.ErrorKind.TOO_LATE, f"{tokens} prompt tokens cannot be computed before the deadline"
            )
        if self._stage == 0:
            self._admission.reserved_tokens += tokens - self.tokens
        if self._stage < 2:
            self._admission.stop_waiting(self.tenant, self._place)
            self.tokens, self._work = tokens, self._work._replace(tokens=tokens)
            self._admission.wait(self.tenant, self._place, self._work)

    def submitted(self) -> None:
        """The engine counts the requests from now on."""
        if self._stage == 0:
            self._stage = 1
            self._admission.reserved_requests -= self.requests
            self._admission.reserved_tokens -= self.tokens

    def started(self) -> None:
        """The requests no longer wait: the first token has come."""
        if self._stage < 2:
            self._admission.has_started(self._estimate, self._admission.now() - self._since)
        self._leave()

    def _leave(self) -> None:
        self.submitted()
        if self._stage == 1:
            self._stage = 2
            self._admission.stop_waiting(self.tenant, self._place)

    def keep(self) -> None:
        """Reserves queue capacity until `release`, for a call that submits requests repeatedly.

        The reserved requests count against the bounds, but not as work that others wait for.
        """
        self._leave()
        if not self._kept:
            self._kept = True
            self._admission.kept_requests += self.requests
            self._admission.kept_tokens += self.tokens

    def release(self) -> None:
        """The call has ended."""
        self._leave()
        if self._kept:
            self._kept = False
            self._admission.kept_requests -= self.requests
            self._admission.kept_tokens -= self.tokens


class AdmissionController:
    """Admits or refuses the calls to one engine.

    Args:
      engine: gives the bounds, the costs measured at start, and the load; it need not be ready yet.
      tenants: returns all tenants by name; a single tenant has the whole queue.
      clock: monotonic seconds.
    """

    def __init__(
        self,
        engine: EngineClient,
        *,
        tenants: Callable[[], dict[str, Tenant]] = dict,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.reserved_requests = self.reserved_tokens = 0  # admitted, and not counted by the engine yet
        self.kept_requests = self.kept_tokens = 0  # of calls that submit requests repeatedly
        self._load, self._tenants, self._clock = engine.load, tenants, clock
        self._max_seconds = engine.config.max_queue_seconds or engine.config.target_ttft
        self._max_rows = engine.config.max_rows * engine.config.replicas
        self._max_requests, self._max_tokens = engine.config.max_queued_requests, engine.config.max_queued_tokens
        self._waiting: dict[str, WaitingCalls] = {}  # tenant -> its calls whose requests have not started
        self._numbers = count()
        self._rates: dict[str, tuple[float, float]] = {}  # tenant -> (time, level of its token bucket then)
        self._engine = engine
        self._order: RequestOrder | None = None  # the engine's costs are known once it is ready
        self._seen_rate: float | None = None  # tokens a second while a request waited
        self._used_share = 1.0  # of max_tokens that requests generate
        self._margin = 1.0  # times the estimated wait, within which all but _MISSES of the calls have started
        self._mean_tokens = 0.0  # that requests generate; 0 while unknown, so that no guess refuses a call
        self._sampled: tuple[float, int] | None = None  # (when, tokens computed until then) while the batch was full

    @property
    def prompt_rate(self) -> float:
        """Most prompt tokens a second."""
        return prompt_rate(self._engine.report.buckets)

    @property
    def _decode_seconds(self) -> float:
        """Seconds of an iteration in which all rows decode."""
        return decode_seconds(self._engine.report.buckets, self._engine.config.max_rows)

    @property
    def _tokens_per_second(self) -> float:
        return self._max_rows / self._decode_seconds if self._seen_rate is None else self._seen_rate

    def admit(
        self,
        tenant: Tenant,
        *,
        requests: int,
        prompt_tokens: int,
        new_tokens: int,
        exactly: bool = False,
        deadline: float | None = None,
    ) -> Ticket:
        """Gives a call its place in the queue, or refuses it.

        Args:
          requests: number of requests that it makes.
          prompt_tokens: most prompt tokens of all of them.
          new_tokens: most tokens that one of them generates; its exact number if `exactly`.
          deadline: of the call, on the clock; None for none.

        Raises:
          ApiError: INVALID (the queue never holds so many requests), RATE_LIMITED, QUEUE_FULL or TOO_LATE.
        """
        if requests > self._max_requests:
            raise errors.invalid("prompt", f"makes {requests} requests; the queue takes {self._max_requests} at most")
        load = self.sample()
        now = self._clock()
        waiting, tokens = self._ahead(load)
        key = self._key(prompt_tokens // max(requests, 1))
        wait = self._wait(load, tenant, key)
        over = self._over(waiting, tokens, requests, prompt_tokens, wait)
        if over is not None:
            raise errors.queue_full(over, _bounded(wait))
        contended = waiting > _CONTENDED * self._max_requests or tokens > _CONTENDED * self._max_tokens
        if contended and waiting and self._exceeds_share(tenant, requests, prompt_tokens):
            raise errors.queue_full(f"{tenant.name} already has its share of the queue", _bounded(wait))
        slack = math.inf
        if deadline is not None:
            own = self._decode_seconds * (new_tokens if exactly else min(new_tokens, self._mean_tokens))
            slack = deadline - now - wait - own  # time left for the prompt, whose length is not known yet
            if slack < 0:
                raise errors.ApiError(
                    errors.ErrorKind.TOO_LATE,
                    f"the deadline is in {max(0.0, deadline - now):.1f} s; waiting takes about {wait:.1f} s, and the "
                    f"answer {own:.1f} s",
                )
        # Last: a call refused for another reason does not count against the rate, but for what `charge` has taken.
        self._take_from_rate(tenant, requests - _charged.get(), now)
        _charged.set(0)
        self.reserved_requests += requests
        self.reserved_tokens += prompt_tokens
        work, place = Work(requests, prompt_tokens, requests * new_tokens), (key, next(self._numbers))
        self.wait(tenant, place, work)
        return Ticket(self, tenant, work, place, slack, wait)

    def charge(self) -> None:
        """Counts one request against the current tenant's rate, before the call is parsed.

        Raises:
          ApiError: RATE_LIMITED.
        """
        self._take_from_rate(current.get(), 1, self._clock())
        _charged.set(1)

    def full(self) -> errors.ApiError | None:
        """The error for calls of the current tenant while the queue is full; else None."""
        load = self.sample()
        waiting, tokens = self._ahead(load)
        over = self._over(waiting, tokens, 1, 1, self._wait(load, current.get(), self._key(1)))
        return None if over is None else errors.queue_full(over, _bounded(self._wait(load)))

    def finished(self, generated: int, max_tokens: int) -> None:
        """Records how much of its max_tokens a request has generated, to estimate later calls."""
        self._used_share += _SMOOTHING_ENDS * (generated / max_tokens - self._used_share)
        self._mean_tokens += _SMOOTHING_ENDS * (generated - self._mean_tokens)

    def has_started(self, estimate: float, waited: float) -> None:
        """Records how long a call has waited, if the limit was near."""
        if self._max_seconds is not None and estimate * self._margin > self._max_seconds / 2:
            step = 1 - _MISSES if waited > estimate * self._margin else -_MISSES
            self._margin = max(self._margin * math.exp(_STEP * step), 1.0)

    def outstanding_seconds(self) -> float:
        """Estimated seconds of the live requests' work, with all rows used, at measured costs."""
        load = self._load()
        if not load.outstanding_tokens:
            return 0.0  # of an engine that is not ready no costs are known, and it has no requests
        answers = (load.outstanding_tokens - load.prefill_tokens) * self._used_share
        config, costs = self._engine.config, self._engine.report.buckets
        work = seconds_of_work(costs, config.max_rows, prompt_tokens=load.prefill_tokens, answer_tokens=answers)
        return work / config.replicas

    def now(self) -> float:
        """Monotonic seconds."""
        return self._clock()

    def retry_seconds(self) -> float:
        """Seconds after which a caller that is refused now should try again."""
        return _bounded(self._wait(self._load()))

    def wait(self, tenant: Tenant, place: Place, work: Work) -> None:
        """A call waits from now on."""
        self._waiting.setdefault(tenant.name, WaitingCalls()).add(place, work)

    def stop_waiting(self, tenant: Tenant, place: Place) -> None:
        """A call no longer waits."""
        calls = self._waiting[tenant.name]
        calls.remove(place)
        if not calls.total.requests:
            del self._waiting[tenant.name]

    def _ahead(self, load: Load) -> tuple[int, int]:
        """(requests, tokens) that count against the bounds."""
        waiting = load.waiting + self.reserved_requests + self.kept_requests
        return waiting, load.waiting_tokens + self.reserved_tokens + self.kept_tokens

    def _over(self, waiting: int, tokens: int, requests: int, prompt_tokens: int, wait: float) -> str | None:
        if waiting + requests > self._max_requests:
            return f"{waiting} requests are waiting; the limit is {self._max_requests}"
        if waiting and tokens + prompt_tokens > self._max_tokens:
            return f"{tokens} tokens are waiting; the limit is {self._max_tokens}"
        if self._max_seconds is not None and wait * self._margin > self._max_seconds:
            return f"waiting takes about {wait * self._margin:.1f} s; the limit is {self._max_seconds:g} s"
        return None

    def _exceeds_share(self, tenant: Tenant, requests: int, tokens: int) -> bool:
        shares = {name: each.share for name, each in self._tenants().items()} | {tenant.name: tenant.share}
        part, has = tenant.share / sum(shares.values()), self._of(tenant.name).total
        return has.requests + requests > part * self._max_requests or has.tokens + tokens > part * self._max_tokens

    def _of(self, name: str) -> WaitingCalls:
        return self._waiting.get(name) or WaitingCalls()

    def _take_from_rate(self, tenant: Tenant, requests: int, now: float) -> None:
        """A token bucket: it fills at the tenant's rate up to its burst."""
        if tenant.rate is None or not requests:
            return
        when, level = self._rates.get(tenant.name, (now, tenant.burst))
        level = min(tenant.burst, level + (now - when) * tenant.rate)
        if level < min(requests, tenant.burst):
            self._rates[tenant.name] = now, level
            raise errors.ApiError(
                errors.ErrorKind.RATE_LIMITED,
                f"{tenant.name} is limited to {tenant.rate:g} requests a second",
                retry_after=(min(requests, tenant.burst) - level) / tenant.rate,
            )
        self._rates[tenant.name] = now, level - requests  # below 0 after a call of more than the burst

    def _key(self, tokens: int) -> float:
        """Roughly the key that the engine's order gives a request of this prompt length now."""
        if self._order is None:
            self._order = make_order(self._engine.config, BucketLadder(self._engine.report.buckets))
        return self._order.key(self._clock(), 0, tokens)

    def _behind(self, tenant: Tenant, key: float) -> Work:
        """What waits and comes after a call of this tenant with this key.

        While the tenant's own calls before it are served, others get as much as their shares of it at most.
        """
        before, behind, tenants = self._of(tenant.name).before(key), Work(), self._tenants()
        for name, calls in self._waiting.items():
            weight = 1.0 if name == tenant.name else tenants.get(name, ANYBODY).share / tenant.share
            ahead = Work(*map(min, calls.total, Work().plus(before, weight)))
            behind = behind.plus(calls.total).plus(ahead, -1)
        return behind

    def _wait(self, load: Load, tenant: Tenant | None = None, key: float = math.inf) -> float:
        """Estimated seconds until the requests that wait now have started.

        Args:
          tenant / key: leaves out the requests that a request of this tenant with this key goes before.
        """
        behind = Work() if tenant is None else self._behind(tenant, key)
        ahead = max(load.waiting + self.reserved_requests - behind.requests, 0)
        free = max(0, self._max_rows - load.running)
        # Prompts before it are computed first, however many rows are free.
        tokens = max(load.prefill_tokens + self.reserved_tokens - behind.tokens, 0)
        prompts = tokens / self.prompt_rate
        if ahead < free:
            return prompts
        if self._seen_rate is not None:  # until they have started, as much is computed as they bring
            answers = sum(calls.total.answers for calls in self._waiting.values()) - behind.answers
            prompts = max(prompts, (tokens + answers * self._used_share) / max(self._seen_rate, 1e-3))
        owed = load.outstanding_tokens * self._used_share + self.reserved_tokens
        owed -= behind.tokens + behind.answers * self._used_share
        # A call does not wait for the work that the last rows do beside it.
        rows = max(owed, 0) / max(self._tokens_per_second, 1e-3) * (ahead + 1) / (ahead + max(1, load.running))
        return max(rows, prompts)

    def sample(self) -> Load:
        """Updates the measured tokens a second: the capacity only while requests wait."""
        now, load = self._clock(), self._load()
        done = load.prompt_tokens + load.generated_tokens
        seconds = now - self._sampled[0] if self._sampled is not None else _OLD_SECONDS
        if not load.waiting:
            self._sampled = None
        elif self._sampled is None or seconds >= _OLD_SECONDS or done < self._sampled[1]:
            # The queue may have been empty meanwhile, or a new engine process counts from 0.
            self._sampled = now, done
        elif seconds >= _SAMPLE_SECONDS and done > self._sampled[1]:  # else it stands still, which is not its speed
            rate = (done - self._sampled[1]) / seconds
            self._seen_rate = self._tokens_per_second + _SMOOTHING * (rate - self._tokens_per_second)
            self._sampled = now, done
        return load


def _bounded(seconds: float) -> float:
    return min(max(seconds, _SHORTEST_RETRY), _LONGEST_RETRY)
