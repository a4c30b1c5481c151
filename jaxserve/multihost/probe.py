"""Finds out whether direct links work: every host sends a few numbers over each of them."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.multihost.failure import one_line
from jaxserve.multihost.links import DirectLink, make_links
from jaxserve.runner.lowering import StagePrograms

_SECONDS = 60.0  # for all links; copies between CPUs take milliseconds, but accelerators set up connections first
_POLL = 0.005  # seconds
_REFUSALS = (ValueError, RuntimeError, NotImplementedError, TimeoutError)  # JaxRuntimeError among them


def probe(stages: Sequence[StagePrograms], check: Callable[[str, str], str], seconds: float = _SECONDS) -> str:
    """Send a few numbers over every link between hosts with `DirectLink`. All hosts call this together.

    Over sockets (CPUs) the senders of a link start before its receivers: a host's socket listens from its first copy
    on, and a sender refuses layouts that sockets do not support, for whose numbers a receiver would wait for ever.

    Args:
      check: takes a subject and this host's problem with it, and returns the problems of all hosts (`HostGroup.check`).
      seconds: within which all numbers must arrive.

    Returns:
      Why direct links do not work, by host, or "". It is the same on every host.
    """
    native = getattr(jax.local_devices()[0].client, "supports_cross_host_transfers", False)
    deadline = time.monotonic() + seconds
    links = zip(make_links(stages, "direct"), stages, strict=True)
    problem, received = "", list[tuple[int, Any]]()
    for index, (link, source) in enumerate(links):
        if not isinstance(link, DirectLink):
            continue
        at_once = native or bool(source.mesh.local_devices)
        if at_once and not problem:
            problem = _start(index, link, source, received, deadline)
        if problems := check(f"sending over link {index}", problem):
            return problems
        if not at_once:
            problem = _start(index, link, source, received, deadline)
    return check("receiving over links", problem or _arrive(received, deadline))


_SENT = np.arange(8, dtype=np.float32).reshape(4, 2)


def _start(
    index: int, link: DirectLink, source: StagePrograms, received: list[tuple[int, Any]], deadline: float
) -> str:
    """Start a copy, on a thread because the runtime may block. Returns the problem."""
    results: queue.SimpleQueue[jax.Array | Exception | None] = queue.SimpleQueue()

    def copy() -> None:
        try:
            x = None
            if source.mesh.local_devices:
                x = jax.make_array_from_callback(_SENT.shape, source.everywhere, lambda place: _SENT[place])
            results.put(link.send(x, jax.ShapeDtypeStruct(_SENT.shape, jnp.float32)))
        except Exception as problem:
            results.put(problem)

    threading.Thread(target=copy, name="jaxserve-probe", daemon=True).start()
    try:
        result = results.get(timeout=max(0.0, deadline - time.monotonic()))
    except queue.Empty:
        return f"link {index}: the runtime does not return from the copy"
    if isinstance(result, _REFUSALS):
        return f"link {index}: {one_line(result)}"
    if isinstance(result, Exception):
        raise result
    if result is not None:
        received.append((index, result))
    return ""


def _arrive(received: Sequence[tuple[int, Any]], deadline: float) -> str:
    """Wait for what was sent, but in no call that may not return. Returns the problem."""
    for index, array in received:
        while not array.is_ready():
            if time.monotonic() > deadline:
                return f"link {index}: nothing arrived in time"
            time.sleep(_POLL)
        try:
            if not np.array_equal(np.asarray(array), _SENT):
                return f"link {index}: other numbers arrived than were sent"
        except _REFUSALS as problem:
            return f"link {index}: {one_line(problem)}"
    return ""
