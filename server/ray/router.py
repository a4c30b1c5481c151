"""How Serve chooses the replica of a call."""

from __future__ import annotations

import hashlib
import random

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica


class SessionRouter(RequestRouter):
    """Sends the calls of a session to one replica, which has their prefix, and others to the shorter of two queues.

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
