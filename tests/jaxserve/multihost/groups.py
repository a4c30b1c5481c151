"""A group of two hosts that are threads of this process, joined by the control channel."""

import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from jaxserve.multihost.config import ClusterConfig
from jaxserve.multihost.group import HostGroup
from jaxserve.multihost.worker import MasterConnection
from tests.jaxserve.multihost.processes import WAIT_SECONDS, free_address

SECRET = b"a secret of 24 bytes or so"
FACTS = [("max_rows", "4"), ("the model's fingerprint", "abc")]


class Ends:
    """Takes the place of the end of a process."""

    def __init__(self) -> None:
        self.codes: queue.SimpleQueue[int] = queue.SimpleQueue()

    def __call__(self, code: int) -> None:
        self.codes.put(code)


def place(host: int, coordinator: str, hosts: int = 2, **settings: Any) -> ClusterConfig:
    return ClusterConfig(hosts=hosts, host=host, coordinator=coordinator, **{"join_timeout": 30.0} | settings)


def listening(coordinator: str, ends: Ends | None = None, **settings: Any) -> HostGroup:
    """Host 0, to which others may connect."""
    group = HostGroup(place(0, coordinator, **settings), FACTS, tell=lambda _: None, end=ends or Ends())
    group.listen()
    return group


def worker(
    coordinator: str, ends: Ends | None = None, alive: Callable[[float], Any] = lambda _: None, **settings: Any
) -> MasterConnection:
    """Host 1, before it connects."""
    own = place(1, coordinator, **settings)
    return MasterConnection(own, FACTS, tell=lambda _: None, alive=alive, end=ends or Ends())


def join(group: HostGroup, membership: MasterConnection) -> None:
    """Brings both past the handshake."""
    aside(membership.join)
    group.join()


def joined(ends: Ends | None = None, **settings: Any) -> tuple[HostGroup, MasterConnection]:
    """Both hosts, past the handshake."""
    coordinator = free_address()
    group, membership = listening(coordinator, ends, **settings), worker(coordinator, ends, **settings)
    join(group, membership)
    return group, membership


def until(condition: Callable[[], bool]) -> None:
    bound = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < bound
        time.sleep(0.01)


def aside(call: Callable[[], Any]) -> threading.Thread:
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    return thread
