"""A worker host: hands the master's plans to its replicas, and ends when the group does."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager

import grpc

from jaxserve.multihost import channel, handshake
from jaxserve.multihost import control_pb2 as pb
from jaxserve.multihost.config import ClusterConfig
from jaxserve.multihost.coordinator import Tunnel
from jaxserve.multihost.failure import ExitCode, Symptom, SymptomKind
from jaxserve.multihost.failure_detector import LEAST_SILENCE, STARTING_SILENCE
from jaxserve.multihost.follower import ReplicaFollower
from jaxserve.multihost.process_watchdog import ProcessWatchdog, end_process
from jaxserve.profiler import Profiler

_log = logging.getLogger(__name__)

_VERDICT = 1.0  # seconds; host 0 takes half of it to choose the cause, and stops all hosts


class MasterConnection(channel.ControlChannel):
    """A worker's side of the control channel.

    Args:
      facts: the values that every host must share.
      tell: prints a line for each step of the start.
      alive: called twice a second with the seconds until the next call must come.
      profiler: captures when host 0 says so; None where no folder was given for it.
      end: ends the process.

    Attributes:
      on_failure: called with the reason before the process ends, unless host 0 has sent it.
      followers: of the replicas with devices here, by number. Set it before host 0 may send the first plan.
    """

    def __init__(
        self,
        cluster: ClusterConfig,
        facts: Sequence[tuple[str, str]],
        *,
        tell: Callable[[str], None],
        alive: Callable[[float], None] = lambda _: None,
        profiler: Profiler | None = None,
        end: Callable[[int], None] = end_process,
    ) -> None:
        self._cluster, self._facts, self._tell, self._alive, self._end = cluster, list(facts), tell, alive, end
        self._profiler = profiler
        self._tunnel = Tunnel(cluster)
        self._profiling = ThreadPoolExecutor(1, thread_name_prefix="jaxserve-profiler")
        self.on_failure: Callable[[str], None] = lambda _: None
        self._out: queue.SimpleQueue[pb.FromWorker | None] = queue.SimpleQueue()
        self.followers: Mapping[int, ReplicaFollower] = {}
        self._changed = threading.Condition()
        self._agreed: dict[str, pb.Agreed] = {}
        self._heard = time.monotonic()
        self._deadline = 0.0
        self._step = "joining"
        self._serving = self._stopping = self._failing = False
        self._watchdog = ProcessWatchdog(self._look, self._beat)

    def join(self) -> None:
        """Joins the group; ValueError if host 0 is out of reach, is a stranger or refuses this host."""
        cluster, address = self._cluster, self._cluster.coordinator
        messages = channel.connect(cluster)(iter(self._out.get, None))
        try:
            if not handshake.prove(cluster.shared_secret, cluster.host, self._facts, messages, self._out.put):
                self._out.put(None)
                raise ValueError(f"host 0 at {address} has another secret: give every host the same --hosts-secret")
            welcome = next(messages).welcome
        except (grpc.RpcError, StopIteration):
            self._out.put(None)
            raise ValueError(f"host 0 at {address} ended the start") from None
        if welcome.refusal:
            self._out.put(None)  # otherwise a thread would wait for more messages to send
            raise ValueError(f"host 0 at {address} refuses: {welcome.refusal}")
        self._heard = time.monotonic()
        threading.Thread(target=self._listen, args=(messages,), name="jaxserve-master", daemon=True).start()
        self._watchdog.start()

    def coordinator(self) -> AbstractContextManager[str]:
        return self._tunnel.listening()

    def left(self) -> None:
        """Ends the connections to jax's coordinator, once this host has left the job."""
        self._tunnel.close()

    def reached(self, step: str) -> None:
        self._step = step
        self._tell(f"host {self._cluster.host}: {step}")
        self._out.put(pb.FromWorker(reached=pb.Reached(step=step)))

    def _decide(self, mine: pb.Vote) -> pb.Agreed:
        self._out.put(pb.FromWorker(vote=mine))
        with self._changed:
            self._changed.wait_for(lambda: mine.about in self._agreed)
            return self._agreed[mine.about]

    def follow(self) -> None:
        """Launch the plans of all `followers` until the master stops.

        An iteration that fails ends the process."""
        threads = [
            threading.Thread(target=follower.run, name=f"jaxserve-replica-{replica}", daemon=True)
            for replica, follower in self.followers.items()
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self._watchdog.stop()
        self._out.put(None)
        self._profiling.shutdown()  # a profile that host 0 began just before has then started, and can be closed

    def send(self, message: pb.FromWorker) -> None:
        """Send a message to host 0. Any thread may call this."""
        self._out.put(message)

    def fail(self, cause: str, *, replica: int = 0, sequence: int = 0, stage: int | None = None) -> None:
        """Report a failure on this host to host 0 and end the process.

        Args:
          stage: the stage whose device failed; None if this host's own code raised.
        """
        self._failing = True
        cause = cause.splitlines()[0][:1000]
        failed = pb.Failed(sequence=sequence, stage=stage, launching=stage is None, cause=cause)
        self._out.put(pb.FromWorker(failed=failed, replica=replica))
        where = self._step
        if self._serving:
            where = self.followers[replica].where(sequence, stage)
        time.sleep(_VERDICT)  # what was seen here may come from another host's failure
        self._finish(ExitCode.BROKEN, f"host {self._cluster.host} ({where}): {cause}")

    def _finish(self, code: ExitCode, why: str, *, told: bool = False) -> None:
        with self._changed:
            if self._stopping:
                return
            self._stopping = True
        _log.error("%s", why)
        if not told:
            self.on_failure(why)
        self._end(code)

    def _listen(self, messages: Iterator[pb.FromMaster]) -> None:
        why = "it ended its control stream"
        try:
            for message in messages:
                self._heard = time.monotonic()
                match message.WhichOneof("message"):
                    case "plan":
                        self.followers[message.replica].put(message.plan)
                    case "phase":
                        self._deadline, self._serving = message.phase.deadline_seconds, True
                        self._alive(self._silence())  # replaces the limit of the last call
                        self._to_all(message.phase)
                    case "hold":
                        self.followers[message.replica].put(message.hold)
                    case "release":
                        self.followers[message.replica].put(message.release)
                    case "prepare":
                        held = [each.grammars for each in self.followers.values() if each.grammars is not None]
                        if held:  # all have the same compiler
                            held[0].prepare(message.prepare, self._out.put)
                    case "profile":
                        self._profiling.submit(self._profile, message.profile)
                    case "agreed":
                        with self._changed:
                            self._agreed[message.agreed.about] = message.agreed
                            self._changed.notify_all()
                    case "stop":
                        self._stop(message.stop.cause)
                        return
        except grpc.RpcError as problem:
            why = f"its control stream broke: {problem.details() if isinstance(problem, grpc.Call) else problem}"
        self._lost(why)

    def _profile(self, running: bool) -> None:
        """Start or stop a profile on this host. Host 0 has judged the order."""
        if self._profiler is None:
            _log.warning("host 0 profiles all hosts, and this one has no --profile DIR")
            return
        try:
            self._profiler.ensure(running)
        except Exception:
            _log.exception("the profile cannot be %s", "started" if running else "written")

    def _lost(self, why: str) -> None:
        where = "; ".join(at for each in self.followers.values() if (at := each.now()))
        self._finish(ExitCode.LOST, f"host 0 is lost{', ' * bool(where)}{where}: {why}")

    def _stop(self, cause: str) -> None:
        if self._failing and cause.startswith(f"host {self._cluster.host},"):
            self._finish(ExitCode.BROKEN, cause)
            return
        if cause:
            self._finish(ExitCode.LOST, f"host 0 has ended the hosts' work: {cause}", told=True)
            return
        with self._changed:
            self._stopping = True
        if not self._serving:
            self._end(0)
        self._to_all(None)

    def _to_all(self, message: pb.Phase | None) -> None:
        for follower in self.followers.values():
            follower.put(message)

    def _look(self) -> bool:
        """Check that host 0 still sends messages and that no iteration is late."""
        if self._stopping:
            return False
        silent = time.monotonic() - self._heard
        if silent > self._silence():
            self._lost(f"it sent nothing for {silent:.1f} s")
            return False
        for follower in self.followers.values():
            waiting = follower.progress.waiting()
            if self._deadline and waiting is not None and waiting.seconds > self._deadline + 1.0:
                # One second later than host 0, which knows better which host the others wait for.
                late = Symptom(
                    kind=SymptomKind.LATE,
                    hosts=(self._cluster.host,),
                    replicas=follower.replicas,
                    stages=(waiting.stage,),
                    sequence=waiting.sequence,
                    cause="not done in time",
                )
                self._finish(ExitCode.OVERDUE, str(late))
                return False
        return True

    def _silence(self) -> float:
        """Seconds without a message after which host 0 counts as lost."""
        return max(self._deadline, LEAST_SILENCE) if self._serving else STARTING_SILENCE

    def _beat(self) -> None:
        self._alive(self._silence())
        beat = pb.Heartbeat()
        for replica, follower in self.followers.items():
            if (waiting := follower.progress.waiting()) is not None:
                beat.oldest.append(pb.Unfinished(replica=replica, sequence=waiting.sequence, stage=waiting.stage))
        self._out.put(pb.FromWorker(heartbeat=beat))
