"""Host 0's side of the control channel: joining, votes, and the end of the group."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

import grpc

from jaxserve.multihost import channel, handshake
from jaxserve.multihost import control_pb2 as pb
from jaxserve.multihost.config import ClusterConfig
from jaxserve.multihost.coordinator import Coordinator
from jaxserve.multihost.failure import ExitCode, HostFailed, Symptom, SymptomKind, one_line
from jaxserve.multihost.failure_detector import STARTING_SILENCE, FailureDetector, Member, ReplicaIterations
from jaxserve.multihost.process_watchdog import ProcessWatchdog, end_process
from jaxserve.multihost.remote_grammars import GrammarCompileRequests
from jaxserve.multihost.replica_hosts import ReplicaHosts

_log = logging.getLogger(__name__)

_GATHER = 0.5  # seconds to wait for other symptoms of a failure before the cause is chosen
_GRACE = 1.0  # seconds for callers to get the error, or for workers to end


class HostGroup(channel.ControlChannel):
    """Host 0's view of all hosts.

    Args:
      facts: the values that every host must share.
      tell: prints a line for each step of the start.
      end: ends the process.

    Attributes:
      replicas: the hosts of each replica, once they are placed.
      reception: lets in who proves to be a host of the group, and counts the others.
      failure: why the group failed. The process ends about a second later, so that callers get the error first.
      on_failure: called once with the cause, by the watchdog's thread.
    """

    def __init__(
        self,
        cluster: ClusterConfig,
        facts: Sequence[tuple[str, str]],
        *,
        tell: Callable[[str], None],
        end: Callable[[int], None] = end_process,
    ) -> None:
        self._cluster, self._facts = cluster, list(facts)
        self._tell, self._end = tell, end
        self.on_failure: Callable[[Symptom], None] = lambda _: None
        self._changed = threading.Condition()
        self._detector = FailureDetector(range(1, cluster.hosts))
        self._members = self._detector.members
        self._problems: list[Symptom] = []
        self.failure: HostFailed | None = None
        self.replicas: list[ReplicaHosts] = []
        self.preparations = GrammarCompileRequests(self.broadcast, ())
        self._refused: str | None = None
        self.reception = handshake.Reception(cluster.shared_secret)
        self._coordinator = Coordinator(self.reception)
        self._stopping = False
        self._watchdog = ProcessWatchdog(self._look, self._beat)
        self._server: grpc.Server | None = None

    # The start

    def listen(self) -> None:
        """Open the control channel. Raises ValueError if the port is taken."""
        methods = {channel.FOLLOW: self._follow, channel.COORDINATE: self._coordinator.carry}
        self._server = channel.listen(self._cluster, methods)
        self._watchdog.start()

    def join(self) -> None:
        """Wait until every host has joined.

        Raises:
          ValueError: a host did not join in time, or was refused; the message names it.
        """
        deadline, wrong = time.monotonic() + self._cluster.join_timeout, None
        with self._changed:
            while missing := [member.host for member in self._members.values() if not member.joined]:
                self.raise_if_failed()
                left, wrong = deadline - time.monotonic(), self._refused
                if left <= 0:
                    hosts = f"host{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
                    waited = f"within {self._cluster.join_timeout:g} s at {self._cluster.coordinator}"
                    wrong = f"{hosts} did not join {waited}"
                    if self.reception.strangers:
                        wrong += f"; {self.reception.strangers} connections did not prove to be hosts of this group"
                if wrong is not None:
                    break
                self._changed.wait(left)
        if wrong is not None:
            self.stop(wrong)
            raise ValueError(wrong)

    def coordinator(self) -> AbstractContextManager[str]:
        return self._coordinator.listening()

    def reached(self, step: str) -> None:
        """Announce this host's step of the start."""
        self._detector.step = step
        self._tell(f"host 0: {step}")

    def _decide(self, mine: pb.Vote) -> pb.Agreed:
        """Wait for every host's vote, and send the result to all. Raises HostFailed."""
        with self._changed:
            while any(mine.about not in member.votes for member in self._members.values()):
                self.raise_if_failed()
                self._changed.wait()
            votes = {0: mine} | {host: member.votes[mine.about] for host, member in self._members.items()}
        agreed = pb.Agreed(
            about=mine.about,
            value=min(vote.value for vote in votes.values()),
            problem="; ".join(f"host {host}: {vote.problem}" for host, vote in votes.items() if vote.problem),
        )
        self.broadcast(pb.FromMaster(agreed=agreed))
        return agreed

    def place(self, placed: Sequence[Mapping[int, tuple[int, ...]]]) -> list[ReplicaHosts]:
        """Set the stages that each replica has on each host (`config.place`)."""
        its = [ReplicaIterations((index,) if len(placed) > 1 else (), stages) for index, stages in enumerate(placed)]
        self._detector.replicas = its
        self.replicas = [ReplicaHosts(index, each, self) for index, each in enumerate(its)]
        sampling = {host for each in its for host in each.sampling}
        self.preparations = GrammarCompileRequests(self.broadcast, sampling - {0})
        return self.replicas

    def phase(self, deadline: float, *, serving: bool) -> None:
        """Restart all plan numbers at 0 and set the deadline in seconds; 0 is no deadline."""
        with self._changed:
            self.raise_if_failed()
            self._detector.deadline = deadline
            if serving:
                self._detector.step = None
                for member in self._members.values():
                    member.step = None
        self.broadcast(pb.FromMaster(phase=pb.Phase(deadline_seconds=deadline)))

    # Failure

    def report(self, problem: Symptom) -> None:
        """Add a symptom. After 0.5 s the watchdog picks the cause and ends all hosts."""
        with self._changed:
            if self._stopping:
                return
            self._problems.append(problem)

    def cannot_start(self, problem: Exception) -> None:
        """Report that this host failed to start. Raises HostFailed."""
        cause = f"{type(problem).__name__}: {one_line(problem)}"
        self.report(Symptom(kind=SymptomKind.RAISED, hosts=(0,), step=self._detector.step, cause=cause))
        self.raise_failure()

    def raise_failure(self) -> None:
        """Wait until the cause is known, then raise HostFailed."""
        with self._changed:
            self._changed.wait_for(lambda: self.failure is not None, STARTING_SILENCE)
        self.raise_if_failed()

    def raise_if_failed(self) -> None:
        """Raise HostFailed if the group has failed."""
        if self.failure is not None:
            raise HostFailed(self.failure.problem, self.failure.code)

    def _look(self) -> bool:
        """Check for symptoms. If there are any: pick the cause, fail callers, end all hosts."""
        with self._changed:
            if self._stopping:
                return False
            if not (self._problems or self._detector.silent() or self._detector.late()):
                return True
        time.sleep(_GATHER)
        with self._changed:
            if self._stopping:
                return False
            self._stopping = True
            problem = self._detector.cause([*self._problems, *self._detector.silent(), *self._detector.late()])
            if problem is None:
                self._stopping = False  # a host was slow, and has sent something since
                return True
            code = ExitCode.LOST
            if problem.hosts == (0,):
                code = ExitCode.OVERDUE if problem.kind == SymptomKind.LATE else ExitCode.BROKEN
        _log.error("the hosts cannot go on: %s", problem)
        self.broadcast(pb.FromMaster(stop=pb.Stop(cause=str(problem))))
        self.on_failure(problem)
        with self._changed:  # after `on_failure`: a thread that waits for `failure` may end the process
            self.failure = HostFailed(problem, code)
            self._changed.notify_all()
        for replica in self.replicas:
            replica.end()
        time.sleep(_GRACE)
        self._end(code)
        return False

    def stop(self, cause: str = "") -> bool:
        """Stop the workers, normally if there is no cause, and wait up to a second for them.

        Returns:
          False if the group was stopping already.
        """
        with self._changed:
            if self._stopping:
                return False
            self._stopping = True
        self._watchdog.stop()
        self.broadcast(pb.FromMaster(stop=pb.Stop(cause=cause)))
        deadline = time.monotonic() + _GRACE
        with self._changed:
            while any(member.joined and not member.left for member in self._members.values()):
                if (left := deadline - time.monotonic()) <= 0:
                    break
                self._changed.wait(left)
        for member in self._members.values():
            member.queue.put(None)  # ends the threads of streams that are still open
        if self._server is not None:
            self._server.stop(channel.LEAVING_SECONDS)
        return True

    # The channel

    def broadcast(self, message: pb.FromMaster, hosts: Container[int] | None = None) -> None:
        """Send a message to every worker that has joined, or to those of them in `hosts`."""
        data = message.SerializeToString()  # once for all workers
        for member in self._members.values():
            if member.joined and (hosts is None or member.host in hosts):
                member.queue.put(data)

    def _beat(self) -> None:
        self.broadcast(pb.FromMaster(heartbeat=pb.Heartbeat()))

    def _follow(self, requests: Iterator[pb.FromWorker], context: grpc.ServicerContext) -> Iterator[bytes]:
        """Handle one worker's stream."""
        joining = yield from self.reception.receive(requests, context)
        if joining is None:
            return
        refusal = self._admit(joining)
        if refusal is not None:
            refusal = f"host {joining.host}: {refusal}"
            # The start fails once the worker has its refusal. The stream may end before this generator resumes.
            if not context.add_callback(lambda: self._refuse(refusal)):
                self._refuse(refusal)
            yield pb.FromMaster(welcome=pb.Welcome(refusal=refusal)).SerializeToString()
            return
        member = self._members[joining.host]
        yield pb.FromMaster(welcome=pb.Welcome()).SerializeToString()
        self._tell(f"host {member.host}: joined")
        context.add_callback(lambda: self._left(member))
        listening = threading.Thread(
            target=self._listen, args=(member, requests), name=f"jaxserve-host-{member.host}", daemon=True
        )
        listening.start()
        while (data := member.queue.get()) is not None:
            yield data

    def _refuse(self, refusal: str) -> None:
        with self._changed:
            self._refused = refusal
            self._changed.notify_all()

    def _admit(self, joining: pb.Join) -> str | None:
        """Mark a host as joined, or return why it is refused."""
        if joining.host not in self._members:
            return f"is not one of the expected hosts, 1 to {self._cluster.hosts - 1}"
        theirs = {fact.field: fact.value for fact in joining.facts}
        for name, ours in self._facts:
            if theirs.get(name) != ours:
                return f"{name} is {theirs.get(name)}; on host 0 it is {ours}"
        with self._changed:
            member = self._members[joining.host]
            if member.joined:
                return "has joined already"
            member.joined, member.heard = True, time.monotonic()
            self._changed.notify_all()
        return None

    def _listen(self, member: Member, requests: Iterator[pb.FromWorker]) -> None:
        try:
            for message in requests:
                self._take(member, message)
        except grpc.RpcError:
            pass
        except Exception as problem:  # otherwise the thread would end silently
            _log.exception("host %d sent an invalid message", member.host)
            self.report(self._detector.of(member, SymptomKind.DISCONNECTED, f"it sent an invalid message: {problem}"))
        self._left(member)

    def _left(self, member: Member) -> None:
        with self._changed:
            if member.left:
                return
            member.left = True
            self._changed.notify_all()
        member.queue.put(None)
        cause = "its control stream ended: the process has ended, or was cut off"
        self.report(self._detector.of(member, SymptomKind.DISCONNECTED, cause))

    def _take(self, member: Member, message: pb.FromWorker) -> None:
        member.heard = time.monotonic()
        match message.WhichOneof("message"):
            case "heartbeat":
                oldest = {each.replica: each for each in message.heartbeat.oldest}
                for index, its in enumerate(self._detector.replicas):
                    if member.host in its.stages:
                        its.heard(member.host, oldest.get(index))
            case "completed":
                self.replicas[message.replica].completed(member.host, message.completed)
            case "prepared":
                self.preparations.answered(member.host, message.prepared)
            case "vote":
                with self._changed:
                    member.votes[message.vote.about] = message.vote
                    self._changed.notify_all()
            case "reached":
                member.step = message.reached.step
                self._tell(f"host {member.host}: {member.step}")
            case "failed":
                failed = message.failed
                problem = Symptom(
                    kind=SymptomKind.RAISED if failed.launching else SymptomKind.DEVICE_ERROR,
                    hosts=(member.host,),
                    step=member.step,
                    cause=failed.cause,
                )
                if member.step is None:
                    its = self._detector.replicas[message.replica]
                    stages = its.stages[member.host] if failed.launching else (failed.stage,)
                    problem = replace(problem, replicas=its.replicas, stages=stages, sequence=failed.sequence)
                self.report(problem)
