"""Keeps jax's coordinator out of strangers' reach, behind the control channel.

The coordinator knows neither secrets nor encryption, and another process that joins it as one of the hosts ends the
job. So it has no port: on host 0 it listens on a Unix socket in a folder that only this user can open. On a worker jax
connects to such a socket too, and a stream of the control channel carries the connection to host 0, once the worker has
proven that it belongs to the group.
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import grpc

from jaxserve.multihost import channel, handshake
from jaxserve.multihost import control_pb2 as pb
from jaxserve.multihost.config import ClusterConfig

_PIECE = 2**16  # most bytes of a message
_POLL = 0.02  # seconds until jax listens
_LONGEST = 70  # bytes of a folder's path; that of a Unix socket in it has 30 more, and may have 103 on macOS
_FACTS = [("stream", "jax's coordinator")]


class Coordinator:
    """Host 0's side: the socket on which jax listens, and the connections of workers to it."""

    def __init__(self, reception: handshake.Reception) -> None:
        self._reception = reception
        self._path: str | None = None

    @contextlib.contextmanager
    def listening(self) -> Iterator[str]:
        """The address on which jax's coordinator listens. Once all have joined nobody else can."""
        with _private_path() as path:
            self._path = path
            yield f"unix:{path}"

    def carry(self, requests: Iterator[pb.FromWorker], context: grpc.ServicerContext) -> Iterator[bytes]:
        """Handles a stream that carries one connection."""
        if (yield from self._reception.receive(requests, context)) is None:
            return
        with socket.socket(socket.AF_UNIX) as end:
            context.add_callback(lambda: _shut(end))
            while not self._connect(end):
                if not context.is_active():
                    return
                time.sleep(_POLL)

            def write() -> None:
                _write(requests, end)
                _shut(end)

            threading.Thread(target=write, name="jaxserve-coordinator", daemon=True).start()
            for data in _read(end):
                yield pb.FromMaster(carried=data).SerializeToString()

    def _connect(self, end: socket.socket) -> bool:
        path = self._path
        with contextlib.suppress(OSError):  # jax does not listen yet
            if path is not None:
                end.connect(path)
                return True
        return False


class Tunnel:
    """A worker's side: a socket where jax reaches host 0's coordinator.

    The control channel carries its connections. If host 0 is lost, they stay open here: jax would end this process
    before it has told why.
    """

    def __init__(self, cluster: ClusterConfig) -> None:
        self._cluster = cluster
        self._open: list[tuple[socket.socket, grpc.Call]] = []

    @contextlib.contextmanager
    def listening(self) -> Iterator[str]:
        """The address for jax while the block lasts; connections last longer."""
        open_stream = channel.connect(self._cluster, channel.COORDINATE)

        def accept() -> None:
            with contextlib.suppress(OSError):  # nobody listens any more
                while True:
                    end, _ = listening.accept()
                    threading.Thread(target=self._carry, args=(open_stream, end), daemon=True).start()

        with _private_path() as path, socket.socket(socket.AF_UNIX) as listening:
            listening.bind(path)
            listening.listen()
            threading.Thread(target=accept, name="jaxserve-coordinator", daemon=True).start()
            try:
                yield f"unix:{path}"
            finally:
                _shut(listening)

    def close(self) -> None:
        """Ends all connections, once jax has left.

        While Python ends nobody would carry them, and jax on host 0 would wait for their end.
        """
        for end, stream in self._open:
            stream.cancel()
            _shut(end)

    def _carry(self, open_stream: channel.OpenStream, end: socket.socket) -> None:
        out: queue.SimpleQueue[pb.FromWorker | None] = queue.SimpleQueue()
        cluster = self._cluster
        messages: Any = open_stream(iter(out.get, None))  # an iterator and a call
        self._open.append((end, messages))
        with end:
            with contextlib.suppress(grpc.RpcError, StopIteration):
                if handshake.prove(cluster.shared_secret, cluster.host, _FACTS, messages, out.put):
                    threading.Thread(target=_write, args=(messages, end), daemon=True).start()
                    for data in _read(end):
                        out.put(pb.FromWorker(carried=data))
            out.put(None)


@contextlib.contextmanager
def _private_path() -> Iterator[str]:
    parent = tempfile.gettempdir()
    if len(os.fsencode(parent)) > _LONGEST:
        parent = "/tmp"
    with tempfile.TemporaryDirectory(prefix="jaxserve-", dir=parent) as folder:  # for this user only
        yield str(Path(folder, "coordinator"))


def _read(end: socket.socket) -> Iterator[bytes]:
    with contextlib.suppress(OSError):
        while data := end.recv(_PIECE):
            yield data


def _write(messages: Iterable[pb.FromWorker] | Iterable[pb.FromMaster], end: socket.socket) -> None:
    with contextlib.suppress(OSError, grpc.RpcError):
        for message in messages:
            end.sendall(message.carried)


def _shut(end: socket.socket) -> None:
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
