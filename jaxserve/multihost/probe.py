"""Chooses the links between hosts: direct ones, if a few numbers pass over each."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.multihost import distributed
from jaxserve.multihost.channel import ControlChannel
from jaxserve.multihost.config import ClusterConfig
from jaxserve.multihost.failure import one_line
from jaxserve.multihost.links import BridgeLink, DirectLink, crossing, make_links
from jaxserve.runner.links import Link
from jaxserve.runner.lowering import StagePrograms

_SECONDS = 60.0  # for all links; copies between CPUs take milliseconds, but accelerators connect first
_POLL = 0.005  # seconds
_REFUSALS = (ValueError, RuntimeError, NotImplementedError, TimeoutError)  # JaxRuntimeError among them


def choose_links(
    replicas: Sequence[Sequence[StagePrograms]],
    sizes: Sequence[int],
    cluster: ClusterConfig,
    party: ControlChannel,
    tell: Callable[[str], None],
    shared: str = "",
) -> list[list[Link]]:
    """Each replica's links: those that the settings name, or that work on all hosts.

    All hosts call this together.

    Args:
      sizes: tokens of each bucket.
      shared: why direct links do not serve these replicas (`config.shared_by_links`), or "".

    Raises:
      ValueError: the settings name direct links, and they do not work.
    """
    if not any(map(crossing, replicas)):
        return [make_links(programs, "bridge") for programs in replicas]
    party.reached("linking stages")
    way, why = "bridge", "asked for"
    if cluster.links == "auto" and shared:
        why = shared
    elif cluster.links != "bridge":
        party.agree("compiled", 1)  # a host that still compiles would look unreachable
        way, why = "direct", "probed"
        if problem := probe(replicas, party.check):
            distributed.keep_client()
            if cluster.links == "direct":
                raise ValueError(f"links is direct, which does not work: {problem}")
            way, why = "bridge", f"direct links do not work: {problem}"
    made = [make_links(programs, way) for programs in replicas]
    first = replicas[0][0]
    hidden = [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in map(first.hidden, sizes)]
    chosen = [jax.ShapeDtypeStruct((2, count), "int32") for count in first.shape.point_counts(sizes)]
    for links in made:
        for link in links:
            if isinstance(link, BridgeLink):
                link.prepare(chosen if link is links[-1] else hidden)
    if cluster.host == 0 or any(isinstance(link, DirectLink | BridgeLink) for links in made for link in links):
        tell(f"host {cluster.host}: links between hosts: {way} ({why})")
    return made


def probe(
    replicas: Sequence[Sequence[StagePrograms]], check: Callable[[str, str], str], seconds: float = _SECONDS
) -> str:
    """Sends a few numbers over every `DirectLink` between hosts, which call this together.

    Over sockets (CPUs), the senders of a link start before its receivers. A host's socket listens only from its first
    copy on. A sender refuses layouts that sockets do not support; a receiver would wait for its numbers for ever.

    Args:
      check: takes a subject and this host's problem with it, and returns the problems of all hosts (`HostGroup.check`).
      seconds: within which all numbers must arrive.

    Returns:
      Why direct links do not work, by host, or "". It is the same on every host.
    """
    native = getattr(jax.local_devices()[0].client, "supports_cross_host_transfers", False)
    deadline = time.monotonic() + seconds
    problem, received = "", list[tuple[str, Any]]()
    for replica, stages in enumerate(replicas):
        links = make_links(stages, "direct")
        for index in crossing(stages):
            name = f"link {index}" + (f" of replica {replica}" if len(replicas) > 1 else "")
            link, source = links[index], stages[index]
            at_once = native or bool(source.mesh.local_devices)
            if at_once and not problem:
                problem = _start(name, link, source, received, deadline)
            if problems := check(f"sending over {name}", problem):
                return problems
            if not at_once:
                problem = _start(name, link, source, received, deadline)
    return check("receiving over links", problem or _arrive(received, deadline))


_SENT = np.arange(8, dtype=np.float32).reshape(4, 2)


def _start(name: str, link: Link, source: StagePrograms, received: list[tuple[str, Any]], deadline: float) -> str:
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
        return f"{name}: the runtime does not return from the copy"
    if isinstance(result, _REFUSALS):
        return f"{name}: {one_line(result)}"
    if isinstance(result, Exception):
        raise result
    if result is not None:
        received.append((name, result))
    return ""


def _arrive(received: Sequence[tuple[str, Any]], deadline: float) -> str:
    """Wait for all arrays, without a call that may never return. Returns the problem."""
    for name, array in received:
        while not array.is_ready():
            if time.monotonic() > deadline:
                return f"{name}: nothing arrived in time"
            time.sleep(_POLL)
        try:
            if not np.array_equal(np.asarray(array), _SENT):
                return f"{name}: other numbers arrived than were sent"
        except _REFUSALS as problem:
            return f"{name}: {one_line(problem)}"
    return ""
