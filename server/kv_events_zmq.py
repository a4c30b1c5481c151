"""Publishes KV events over ZMQ as vLLM does, for routers (llm-d, Dynamo, smg).

A message has three frames: topic, number of the batch from 0 on (8 bytes, big-endian) and the batch in msgpack. Who
misses some sends the first number that it wants to the replay endpoint (a DEALER sends an empty frame and the number),
and gets all kept batches from there on, each after an empty frame, and at the end the number -1 with an empty batch.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from typing import Any

from server.compat.vllm_kv_events import event_maps
from server.kv_events import MOST_BATCHES, KvEventBatch, KvEventLog

_log = logging.getLogger(__name__)

_END = (-1).to_bytes(8, "big", signed=True)
_BOUND = ("*", "::", "0.0.0.0")  # parts of an endpoint on which the server listens
_MOST_UNSENT = 100_000  # messages for one subscriber; later ones are dropped until it reads


class ZmqPublisher:
    """Sends a log's batches to all subscribers on its own thread; they never delay it.

    Args:
      endpoint: bound if it has a wildcard or is a file (ipc://), and else connected to, as in vLLM.
      replay: endpoint to bind for subscribers that missed some; None offers no replay.
      topic: of every message.

    Raises:
      ValueError: ZMQ or msgpack is not installed, or an endpoint cannot be used.
    """

    def __init__(self, log: KvEventLog, endpoint: str, *, replay: str | None = None, topic: str = "") -> None:
        try:
            import msgpack
            import zmq  # pyright: ignore[reportMissingImports]  # an extra
        except ImportError as problem:
            raise ValueError(f"--kv-events {endpoint} needs {problem.name}: install jaxserve[kv-events]") from None
        self._zmq, self._pack = zmq, msgpack.packb
        self._log, self._topic = log, topic.encode()
        self._context = zmq.Context()
        self._publisher, self._replay = self._context.socket(zmq.PUB), self._context.socket(zmq.ROUTER)
        self._publisher.set_hwm(_MOST_UNSENT)
        self._replay.set_hwm(MOST_BATCHES + 1)
        try:
            bound = endpoint.startswith(("ipc://", "inproc://")) or any(part in endpoint for part in _BOUND)
            (self._publisher.bind if bound else self._publisher.connect)(endpoint)
            if replay is not None:
                endpoint = replay
                self._replay.bind(replay)
        except zmq.ZMQError as problem:
            self._context.destroy(linger=0)
            raise ValueError(f"--kv-events cannot use {endpoint}: {problem}") from None
        self._waker, self._woken = socket.socketpair()
        self._waker.setblocking(False)
        self._woken.setblocking(False)
        self._is_closing = False
        log.listeners.append(self._wake)
        self._thread = threading.Thread(target=self._run, name="jaxserve-kv-events", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops the thread and closes the endpoints."""
        self._log.listeners.remove(self._wake)
        self._is_closing = True
        self._wake()
        self._thread.join()
        self._context.destroy(linger=0)
        self._waker.close()
        self._woken.close()

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # it is awake
            self._waker.send(b"w")

    def _run(self) -> None:
        poller, sent = self._zmq.Poller(), 0
        poller.register(self._replay, self._zmq.POLLIN)
        poller.register(self._woken, self._zmq.POLLIN)
        while not self._is_closing:
            try:
                poller.poll()
                with contextlib.suppress(BlockingIOError):
                    self._woken.recv(4096)
                for batch in self._log.after(sent):
                    sent = batch.sequence
                    self._publisher.send_multipart(self._frames(batch))
                with contextlib.suppress(self._zmq.Again):
                    self._answer(self._replay.recv_multipart(self._zmq.NOBLOCK))
            except Exception:
                _log.exception("KV events could not be sent; the next ones are")

    def _answer(self, request: list[bytes]) -> None:
        """Sends the batches that a subscriber asks for."""
        if len(request) != 3 or len(request[2]) != 8:
            _log.warning("a request for KV events has %d frames; it has an empty one and a number", len(request) - 1)
            return
        head = (request[0], b"")
        for batch in self._log.after(int.from_bytes(request[2], "big")):
            self._replay.send_multipart((*head, *self._frames(batch)))
        self._replay.send_multipart((*head, b"", _END, b""))

    def _frames(self, batch: KvEventBatch) -> tuple[Any, ...]:
        return self._topic, (batch.sequence - 1).to_bytes(8, "big"), self._pack(event_maps(batch))
