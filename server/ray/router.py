"""How Serve chooses the replica of a call."""

from __future__ import annotations

import asyncio
import hashlib
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from server.ray.prefixes import Prompt

STATS_SECONDS = 1.0  # between two reports of a replica to the routers
_SENT_SECONDS = 3 * STATS_SECONDS  # after which blocks of a prompt that was sent are in a report, or not cached


class SessionRouter(RequestRouter):
    """Keeps a session on the replica with its prefix; others go to the shorter of two queues.

    A session is the value of the header `x-session-id`: Serve's routers see the headers of a call, not its body. Each
    session ranks the replicas by a hash of its own, so a replica that comes or goes moves its own sessions alone, and
    one that is full leaves its calls to the next.
    """

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        session = ""
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
            session = pending_request.metadata.session_id
        if not session:
            return [random.sample(candidate_replicas, min(2, len(candidate_replicas)))]

        def rank(replica: RunningReplica) -> bytes:
            return hashlib.blake2b(f"{session}\0{replica.replica_id.unique_id}".encode()).digest()

        return [[replica] for replica in sorted(candidate_replicas, key=rank)]


@dataclass(slots=True)
class _Known:
    """What a router knows of a replica.

    Attributes:
      stats: its last report (see `RoutedReplica.record_routing_stats`).
      cached: the numbers of the blocks in it.
      sent: those of prompts sent since, and when, oldest first.
    """

    stats: dict[str, Any] = field(default_factory=dict)
    cached: frozenset[int] = frozenset()
    sent: dict[int, float] = field(default_factory=dict)

    def update(self, stats: dict[str, Any]) -> None:
        if stats == self.stats:
            return
        self.stats, self.cached = stats, frozenset(stats.get("blocks", ()))
        bound = time.monotonic() - _SENT_SECONDS
        self.sent = {number: at for number, at in self.sent.items() if at > bound}

    def send(self, blocks: Sequence[int]) -> None:
        self.sent |= dict.fromkeys(blocks, time.monotonic())

    def matches(self, prompt: Prompt) -> int:
        """How many blocks of the prompt it has, from the first on."""
        found, blocks = 0, prompt.blocks(self.stats["block_size"]) if self.stats else ()
        for depth in range(1, len(blocks) + 1):
            is_told = depth % self.stats["step"] == 0
            if blocks[depth - 1] in self.sent or (is_told and blocks[depth - 1] in self.cached):
                found = depth
            elif is_told:
                break
        return found


class PrefixRouter(RequestRouter):
    """Chooses the replica that has most of a prompt cached, unless it has too many calls.

    It has too much if it has more calls than the replica with the fewest, by over half of the rows that a replica
    computes at a time; then, and for prompts that nobody has, the one with the fewest takes the call (of several the
    one with the fewest blocks). A call's first argument is its `Prompt`. Replicas report the blocks that they have each
    second, and prompts that were sent since count too.
    """

    def initialize_state(self, **kwargs: Any) -> None:
        """Called by Serve with the arguments of the router's configuration: `rows` of a replica."""
        self._rows: int = kwargs["rows"]
        self._known: dict[ReplicaID, _Known] = {}

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Called by Serve when replicas come, go or report."""
        self._known = {each.replica_id: self._known.get(each.replica_id, _Known()) for each in replicas}
        for each in replicas:
            self._known[each.replica_id].update(each.routing_stats)
        super().update_replicas(replicas)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        prompt = Prompt()
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
            prompt = pending_request.args[0]
            await asyncio.sleep(0)  # so that Serve sends, and counts, the calls before this one
        calls = {each.replica_id: self._calls(each.replica_id) for each in candidate_replicas}
        most = min(calls.values()) + self._rows / 2

        def rank(replica: RunningReplica) -> tuple[bool, int, int, int, float]:
            name, known = replica.replica_id, self._known[replica.replica_id]
            has_too_much = calls[name] > most
            matched = 0 if has_too_much else known.matches(prompt)
            return has_too_much, -matched, calls[name], len(known.cached) + len(known.sent), random.random()

        return [[replica] for replica in sorted(candidate_replicas, key=rank)]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Called by Serve when a replica has taken a call."""
        known = self._known.get(replica_id)
        if known is not None and known.stats:
            known.send(pending_request.args[0].blocks(known.stats["block_size"]))

    def _calls(self, name: ReplicaID) -> int:
        """A replica's calls as Serve counts them or, after a quiet while, as it reports itself."""
        counted = self.replica_queue_len_cache.get(name)
        return self._known[name].stats.get("calls", 0) if counted is None else counted
