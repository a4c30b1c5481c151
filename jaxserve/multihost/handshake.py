"""How host 0 and a worker prove to each other that they know the group's secret.

Each side sends random bytes, and an HMAC over the random bytes of both. Host 0 goes first: a worker tells nothing of
itself to a stranger, and a worker without the secret learns nothing of the group. The proof of a worker covers what it
says too. Without a secret the proofs are made with an empty one.
"""

from __future__ import annotations

import hmac
import json
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence

import grpc

from jaxserve.multihost import control_pb2 as pb

_log = logging.getLogger(__name__)

NONCE_BYTES = 32
_WARN_SECONDS = 60.0  # between two log lines about strangers
_SECONDS = 10.0  # within which a worker must have proven that it is one


def _proof(secret: bytes | None, hello: pb.Hello, nonce: bytes, joining: pb.Join | None = None) -> bytes:
    """Host 0's proof; with `joining`, the worker's."""
    said = [] if joining is None else [joining.host, [[fact.field, fact.value] for fact in joining.facts]]
    return hmac.digest(secret or b"", hello.nonce + nonce + json.dumps(said).encode(), "sha256")


def hello() -> pb.Hello:
    """What a worker sends first."""
    return pb.Hello(nonce=os.urandom(NONCE_BYTES))


def join(
    secret: bytes | None, hello: pb.Hello, challenge: pb.Challenge, host: int, facts: Sequence[tuple[str, str]]
) -> pb.Join | None:
    """A worker's answer to host 0's challenge; None if host 0 does not know the secret."""
    if not hmac.compare_digest(challenge.proof, _proof(secret, hello, challenge.nonce)):
        return None
    joining = pb.Join(host=host, facts=[pb.Fact(field=name, value=value) for name, value in facts])
    joining.proof = _proof(secret, hello, challenge.nonce, joining)
    return joining


def prove(
    secret: bytes | None,
    host: int,
    facts: Sequence[tuple[str, str]],
    messages: Iterator[pb.FromMaster],
    send: Callable[[pb.FromWorker], None],
) -> bool:
    """A worker's side of a stream. Returns whether host 0 knows the secret.

    Raises:
      grpc.RpcError, StopIteration: host 0 has ended the stream.
    """
    greeting = hello()
    send(pb.FromWorker(hello=greeting))
    joining = join(secret, greeting, next(messages).challenge, host, facts)
    if joining is not None:
        send(pb.FromWorker(join=joining))
    return joining is not None


class Reception:
    """Host 0's side.

    Args:
      secret: of the group.

    Attributes:
      strangers: streams that ended without a proof.
    """

    def __init__(self, secret: bytes | None) -> None:
        self._secret = secret
        self._lock = threading.Lock()
        self._warned = -math.inf
        self.strangers = 0

    def receive(
        self, requests: Iterator[pb.FromWorker], context: grpc.ServicerContext
    ) -> Generator[bytes, None, pb.Join | None]:
        """Yields what host 0 sends, and returns the worker's message.

        None stands for a stranger: who does not know the secret, says something else, or takes longer than 10 s.
        """
        known = False
        # A generator whose stream has ended may never resume; this is called then too.
        context.add_callback(lambda: None if known else self._drop(context.peer()))
        timer = threading.Timer(_SECONDS, context.cancel)
        timer.start()
        try:
            hello = _next(requests).hello
            if len(hello.nonce) != NONCE_BYTES:
                return None
            nonce = os.urandom(NONCE_BYTES)
            challenge = pb.Challenge(nonce=nonce, proof=_proof(self._secret, hello, nonce))
            yield pb.FromMaster(challenge=challenge).SerializeToString()
            joining = _next(requests).join
            expected = _proof(self._secret, hello, nonce, joining)
            known = bool(joining.facts) and hmac.compare_digest(joining.proof, expected)
            return joining if known else None
        except grpc.RpcError:
            return None
        finally:
            timer.cancel()

    def _drop(self, peer: str) -> None:
        with self._lock:
            self.strangers += 1
            now = time.monotonic()
            if now < self._warned + _WARN_SECONDS:
                return
            self._warned = now
        _log.warning("%s is no host of this group: dropped, %d connections so far", peer, self.strangers)


def _next(requests: Iterator[pb.FromWorker]) -> pb.FromWorker:
    return next(requests, pb.FromWorker())
