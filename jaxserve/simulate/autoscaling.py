"""Replicas whose number follows the work that they owe, by the rule of a KEDA ScaledObject."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, inf
from pathlib import Path
from typing import Any, NamedTuple

from jaxserve.simulate.virtual_clock import SimulatedReplica

METRIC = "jaxserve_outstanding_seconds"
# What Kubernetes does where the object says nothing: a deviation from the target within which nothing changes, and the
# most that is added in so many seconds, the larger of pods and of a share of those that there are.
_TOLERANCE = 0.1
_UP_PODS, _UP_SHARE, _UP_SECONDS = 4, 1.0, 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingRule:
    """How many replicas there are to be, by the seconds of work that all of them owe together.

    Attributes:
      least / most: replicas.
      owed_seconds: what each replica is to owe.
      period: seconds between two decisions, and between two samples of the work.
      window: seconds over which the samples of a replica are averaged.
      up_window / down_window: seconds in which a decision has to hold before replicas are added or removed.
      down_replicas / down_seconds: most replicas that are removed in so many seconds.
    """

    least: int
    most: int
    owed_seconds: float
    period: float
    window: float
    up_window: float
    down_window: float
    down_replicas: int
    down_seconds: float

    @classmethod
    def read(cls, path: Path) -> ScalingRule:
        """The rule of a ScaledObject's file.

        Raises:
          ValueError: it is none, or has another form than that of `deploy/kustomize/components/scaling`.
        """
        import yaml

        try:
            text = path.read_text(encoding="utf-8")
        except OSError as error:
            raise ValueError(f"{path}: the rule cannot be read: {error.strerror}") from None
        try:
            found = yaml.safe_load(text)
            if not isinstance(found, dict) or found.get("kind") != "ScaledObject":
                raise ValueError("it is no ScaledObject of KEDA")
            return cls._of(found["spec"])
        except (yaml.YAMLError, ValueError, KeyError, TypeError, IndexError) as error:
            what = f"{error} is missing" if isinstance(error, KeyError) else " ".join(str(error).split())
            raise ValueError(
                f"{path}: no rule that can be simulated: {what}; deploy/kustomize/components/scaling has one"
            ) from None

    @classmethod
    def _of(cls, spec: Mapping[str, Any]) -> ScalingRule:
        behavior = spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
        trigger, up, down = spec["triggers"][0], behavior["scaleUp"], behavior["scaleDown"]
        query, policy = trigger["metadata"]["query"], down["policies"][0]
        averaged = re.fullmatch(rf"sum\(avg_over_time\({METRIC}(?:{{.*}})?\[(\d+)([sm])\]\)\)", query)
        if averaged is None:
            raise ValueError(f"query is {query}; it must be sum(avg_over_time({METRIC}[...]))")
        if trigger.get("metricType") != "AverageValue" or len(spec["triggers"]) > 1:
            raise ValueError("it must have one trigger, of metricType AverageValue")
        if policy["type"] != "Pods" or len(down["policies"]) > 1 or "policies" in up:
            raise ValueError("scaleDown must have one policy, of type Pods, and scaleUp none")
        rule = cls(
            least=int(_number(spec, "minReplicaCount")),
            most=int(_number(spec, "maxReplicaCount")),
            owed_seconds=_number(trigger["metadata"], "threshold"),
            period=_number(spec, "pollingInterval"),
            window=float(averaged[1]) * {"s": 1, "m": 60}[averaged[2]],
            up_window=_number(up, "stabilizationWindowSeconds"),
            down_window=_number(down, "stabilizationWindowSeconds"),
            down_replicas=int(_number(policy, "value")),
            down_seconds=_number(policy, "periodSeconds"),
        )
        if not 1 <= rule.least <= rule.most or rule.owed_seconds <= 0 or rule.period <= 0:
            raise ValueError(
                "minReplicaCount must be at least 1 and at most maxReplicaCount; threshold and pollingInterval above 0"
            )
        return rule


def _number(fields: Mapping[str, Any], name: str) -> float:
    try:
        number = float(fields[name])
    except (ValueError, TypeError):
        number = inf
    if not 0 <= number < inf:
        raise ValueError(f"{name} is {fields[name]!r}; it must be a number of at least 0")
    return number


class HorizontalAutoscaler:
    """What Kubernetes' HorizontalPodAutoscaler decides by a rule."""

    def __init__(self, rule: ScalingRule) -> None:
        self._rule = rule
        self._wanted: deque[tuple[float, int]] = deque()  # earlier decisions, before windows and limits
        self._changes: deque[tuple[float, int]] = deque()  # replicas that were added or, if negative, removed

    def decide(self, now: float, replicas: int, owed: float) -> int:
        """Replicas that there are to be from now on.

        Args:
          replicas: that there are, those that start included.
          owed: seconds of work of all of them.
        """
        rule, target = self._rule, self._rule.owed_seconds
        within = abs(owed / (target * replicas) - 1) <= _TOLERANCE
        wanted = replicas if within else ceil(owed / target)
        if not self._wanted:
            self._wanted.append((now, replicas))
        self._wanted.append((now, wanted))
        while self._wanted[0][0] <= now - max(rule.up_window, rule.down_window):
            self._wanted.popleft()
        least = min(count for time, count in self._wanted if time > now - rule.up_window)
        most = max(count for time, count in self._wanted if time > now - rule.down_window)
        decided = min(max(replicas, least), most)
        if decided > replicas:
            before = replicas - self._changed(now, _UP_SECONDS, 1)
            decided = min(decided, max(before + _UP_PODS, before + ceil(before * _UP_SHARE)))
        elif decided < replicas:
            before = replicas - self._changed(now, rule.down_seconds, -1)
            decided = max(decided, min(before - rule.down_replicas, replicas))
        decided = min(max(decided, rule.least), rule.most)
        if decided != replicas:
            self._changes.append((now, decided - replicas))
        return decided

    def _changed(self, now: float, seconds: float, sign: int) -> int:
        """Replicas that were added or removed (-1) in the last seconds."""
        return sum(change for time, change in self._changes if time > now - seconds and change * sign > 0)


@dataclass(slots=True, kw_only=True, eq=False)
class Pod:
    """One replica from its start to its end.

    Attributes:
      place: its simulated replica's.
      start / ready: when it was started, and when it takes requests.
      stopped: when it was told to stop: it takes no more requests and ends those that it has.
      end: when it had ended them.
    """

    place: int
    start: float
    ready: float
    stopped: float = inf
    end: float = inf


class Sample(NamedTuple):
    """The fleet at one decision.

    Attributes:
      owed: seconds of work of all replicas, averaged as the rule says.
      replicas: that there are to be from then on.
      ready: those that take requests.
    """

    time: float
    owed: float
    replicas: int
    ready: int


class ScaledFleet:
    """Starts and stops replicas by a rule; ready ones take requests (a `fleet.Scaling`).

    A replica that starts is ready after a fixed time. The newest are stopped first. One that is told to stop ends its
    requests, and its cache is lost.

    Attributes:
      ready: places of the replicas that take requests.
      pods: all that have been started.
      samples: one for each decision.
    """

    def __init__(
        self,
        rule: ScalingRule,
        replicas: Sequence[SimulatedReplica],
        *,
        start_seconds: float,
        owed_seconds: Callable[[SimulatedReplica, float], float],
    ) -> None:
        """
        Args:
          replicas: twice as many as the rule's most, because some end their requests while others start. The rule's
            least are ready at the beginning.
          owed_seconds: of work that a replica has at a time.
        """
        self._rule, self._replicas, self._start_seconds = rule, replicas, start_seconds
        self._owed_seconds = owed_seconds
        self._autoscaler = HorizontalAutoscaler(rule)
        self._next = rule.period
        self._owed: deque[dict[int, float]] = deque(maxlen=max(round(rule.window / rule.period), 1))
        self.pods = [Pod(place=place, start=0.0, ready=0.0) for place in range(rule.least)]
        self._alive = self.pods.copy()
        self.ready: list[int] = list(range(rule.least))
        self.samples = [Sample(0.0, 0.0, rule.least, rule.least)]

    def advance(self, now: float) -> None:
        """Take the decisions that are due up to this time."""
        while self._next <= now:
            for pod in self._alive:
                self._replicas[pod.place].advance(self._next)
            self._decide(self._next)
            self._next += self._rule.period
        if len(self.ready) < len(self._running()):
            self.ready = [pod.place for pod in self._running() if pod.ready <= now]

    def finish(self, now: float) -> None:
        """End the count of every replica: all requests have ended."""
        for pod in self._alive:
            pod.end = max(self._replicas[pod.place].now, pod.stopped) if pod.stopped < inf else now

    def _running(self) -> list[Pod]:
        return [pod for pod in self._alive if pod.stopped == inf]

    def _decide(self, now: float) -> None:
        self._end_stopped()
        running = self._running()
        owed = self._average(now)
        wanted = self._autoscaler.decide(now, len(running), owed)
        for _ in range(wanted - len(running)):
            self._start(now)
        for pod in running[wanted:]:  # the newest are last
            pod.stopped = now
        self.ready = [pod.place for pod in self._running() if pod.ready <= now]
        self.samples.append(Sample(now, owed, wanted, len(self.ready)))

    def _average(self, now: float) -> float:
        """Seconds of work of all replicas, averaged over samples; starting ones have none."""
        self._owed.append(
            {id(pod): self._owed_seconds(self._replicas[pod.place], now) for pod in self._alive if pod.ready <= now}
        )
        found: dict[int, list[float]] = {}
        for sample in self._owed:
            for pod, owed in sample.items():
                found.setdefault(pod, []).append(owed)
        return sum(sum(each) / len(each) for each in found.values())

    def _start(self, now: float) -> None:
        used = {pod.place for pod in self._alive}
        place = next((place for place in range(len(self._replicas)) if place not in used), None)
        if place is None:
            return  # all others still end their requests
        pod = Pod(place=place, start=now, ready=now + self._start_seconds)
        self.pods.append(pod)
        self._alive.append(pod)

    def _end_stopped(self) -> None:
        for pod in self._alive:
            replica = self._replicas[pod.place]
            if pod.stopped < inf and replica.is_idle:
                pod.end = max(replica.now, pod.stopped)
                replica.scheduler.pool.flush()
        self._alive = [pod for pod in self._alive if pod.end == inf]
