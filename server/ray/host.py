"""A group's host other than host 0: an actor in the replica's placement group."""

from __future__ import annotations

import asyncio
import os
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from server.commands import cli, serve
from server.commands.serve import ServeSettings
from server.engine_process.job import EngineJob
from server.engine_process.remote_engine import RemoteEngine
from server.engine_process.supervisor import ENGINE_COMMAND, Supervisor

_PARENT_SECONDS = 0.5  # between two looks at the parent


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """What the hosts of a group share.

    Attributes:
      hosts: their number.
      coordinator: HOST:PORT of host 0.
      secret: what they prove to each other.
    """

    hosts: int
    coordinator: str
    secret: bytes


def settings(flags: Sequence[str], group: Group | None, host: int = 0) -> ServeSettings:
    """One host's settings; its engine process is restarted. Raises UserError for a wrong flag."""
    given = ["serve", "--supervise", *flags]
    if group is None:
        return serve.from_flags(cli.parser().parse_args(given))
    given += ["--hosts", str(group.hosts), "--host-id", str(host), "--coordinator", group.coordinator]
    with tempfile.NamedTemporaryFile() as file:  # which nobody else can read
        file.write(group.secret)
        file.flush()
        return serve.from_flags(cli.parser().parse_args([*given, "--hosts-secret", file.name]))


class Host:
    """An actor with one host's engine process, which ends with it.

    Args:
      flags: of `jaxserve serve`.
      group: the hosts.
      host: this one's number.
    """

    async def __init__(self, flags: Sequence[str], group: Group, host: int) -> None:
        end_with_parent()
        chosen = settings(flags, group, host)
        job = EngineJob.of(str(chosen.model), chosen.engine, None, chosen.cluster, log_level=chosen.log_level)
        engine = RemoteEngine(chosen.engine, None)
        supervisor = Supervisor(engine, job, restarts=chosen.restarts, command=ENGINE_COMMAND)
        self._running = asyncio.create_task(supervisor.run())


def end_with_parent() -> None:
    """Ends this process once its raylet is gone: Ray itself may take a minute."""
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_PARENT_SECONDS)
    os._exit(1)
