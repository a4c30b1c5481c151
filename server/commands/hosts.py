"""`jaxserve serve` on several hosts: the flags, host 0, and the other hosts."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from jaxserve.multihost import clusters
from jaxserve.multihost.config import CLUSTER_PARAMS, ClusterConfig, TlsFiles, check_settings
from jaxserve.multihost.process_watchdog import end_process
from server.commands import flags
from server.commands.console import Progress, say, user_errors
from server.commands.settings import HOSTS_SECRET
from server.engine_process import exit_codes
from server.engine_process.job import EngineJob
from server.engine_process.remote_engine import RemoteEngine
from server.engine_process.supervisor import EngineGone, RestartPolicy, Supervisor

if TYPE_CHECKING:
    from jaxserve.config import EngineConfig
    from jaxserve.engine import Engine
    from jaxserve.multihost.failure import HostFailed

OWN_SECONDS = 2.0  # for a host to report its own failure, before its front process kills it
FAILING_SECONDS = 10.0  # for the watchdog to end a process whose hosts have failed
# Only host 0 ends the group: it would take a worker that leaves earlier for a failed one.
WAITING = "waiting for host 0 to end the hosts (again to end at once)"


def add_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("hosts (several that serve one model; docs/hosts.md)")
    group.add_argument(
        "--hosts",
        type=_hosts,
        metavar="N|auto",
        default=1,
        help="processes that serve one model together, with equal shares of its T x S x R devices; auto: as Slurm, "
        "mpirun, LeaderWorkerSet or a TPU slice tells each (default: %(default)s)",
    )
    group.add_argument(
        "--host-id", type=int, metavar="I", help="number of this host; host 0 schedules and serves the clients"
    )
    group.add_argument("--coordinator", metavar="HOST:PORT", help="address of host 0, the same on every host")
    for param in CLUSTER_PARAMS.values():
        flags.add(group, param)
    for name, text in (
        ("cert", "this host's certificate, for mutual TLS between the hosts"),
        ("key", "its private key"),
        ("ca", "the authority that signed the certificate of every host"),
    ):
        group.add_argument(f"--hosts-{name}", type=Path, metavar="FILE.pem", help=text)
    group.add_argument(
        "--hosts-secret",
        type=Path,
        metavar="FILE",
        help="a secret that every host proves to know when it joins, at least 16 bytes; without --hosts-cert needed "
        f"beyond this machine (or the variable {HOSTS_SECRET}, which holds the secret itself)",
    )


def from_flags(args: argparse.Namespace) -> ClusterConfig | None:
    """This host's place among several; None if it serves alone. Raises UserError."""
    with user_errors():
        secrets, shared_secret = _secrets(args), _shared_secret(args.hosts_secret)
        if args.hosts == 1:
            for name in ("host_id", "coordinator"):
                if getattr(args, name) is not None:
                    raise ValueError(f"--{name.replace('_', '-')} needs --hosts")
            for name, value in flags.read(args, CLUSTER_PARAMS).items():
                if value != CLUSTER_PARAMS[name].default:
                    raise ValueError(f"{CLUSTER_PARAMS[name].flag} needs --hosts")
            if secrets is not None:
                raise ValueError("--hosts-cert needs --hosts")
            if shared_secret is not None:
                raise ValueError(f"{HOSTS_SECRET if args.hosts_secret is None else '--hosts-secret'} needs --hosts")
            return None
        count, host, coordinator, local_devices = args.hosts, args.host_id, args.coordinator, None
        if count == "auto":
            if host is not None:
                raise ValueError("--host-id and --hosts auto: auto takes the number of each host from its cluster")
            place = clusters.find(os.environ)
            if place.hosts == 1:
                say(f"this process serves alone: {place.cluster} runs no other")
                return None
            count, host, coordinator = place.hosts, place.host, coordinator or place.coordinator
            if coordinator is None:
                raise ValueError(f"--hosts auto: {place.cluster} does not tell where host 0 is; give --coordinator")
            local_devices = place.local_devices(flags.engine_config(args).num_devices // count, os.environ)
            say(f"host {host} of {count}, with host 0 at {coordinator}, from the variables of {place.cluster}")
        elif host is None or coordinator is None:
            raise ValueError(f"--hosts {count} needs --host-id and --coordinator")
        cluster = ClusterConfig(
            hosts=count,
            host=host,
            coordinator=coordinator,
            secrets=secrets,
            shared_secret=shared_secret,
            local_devices=local_devices,
            **flags.read(args, CLUSTER_PARAMS),
        )
        check_settings(flags.engine_config(args), cluster)
        return cluster


def lead(path: Path, config: EngineConfig, cluster: ClusterConfig, progress: Progress) -> Engine:
    """Starts host 0 and the engine of all hosts. Raises ValueError for mistakes, and HostFailed."""
    from jaxserve.engine import Engine
    from jaxserve.generation import defaults
    from jaxserve.multihost import startup as start

    recommended = defaults.read(path, config)
    started, tokenizer, recorders = start.lead(path, config, cluster, tell=say, progress=progress)
    signal.signal(signal.SIGUSR2, lambda *_: start.write_records(recorders, "asked for", say))
    return Engine(config, started, tokenizer, recommended)


def end_failed(failure: HostFailed) -> NoReturn:
    """Prints why the hosts could not start, and waits for the watchdog to end the process."""
    say(f"error: {failure}")
    time.sleep(FAILING_SECONDS)
    os._exit(failure.code)


def follow(
    path: Path,
    config: EngineConfig,
    cluster: ClusterConfig,
    profile: str | Path | None = None,
    *,
    alive: Callable[[float], None] = lambda _: None,
) -> NoReturn:
    """Runs a host other than host 0, and ends the process with it. Raises UserError.

    Args:
      profile: directory for captures of jax's profiler, or None.
      alive: called twice a second with the seconds within which the next call must come.
    """
    with user_errors():
        from jaxserve.multihost import startup as start
        from jaxserve.profiler import Profiler

        leave = _signal_handler(lambda: None)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda number, _: leave(number))
        start.follow(
            path,
            config,
            cluster,
            tell=say,
            alive=lambda seconds: alive(seconds + OWN_SECONDS),
            profiler=None if profile is None else Profiler(profile),
        )
    say("stopped")
    end_process(exit_codes.ENDED)  # without Python's own end, where threads of libraries may wait for each other


async def follow_in_own_process(
    path: Path,
    config: EngineConfig,
    cluster: ClusterConfig,
    restarts: RestartPolicy | None,
    profile: Path | None = None,
) -> int:
    """Runs a host other than host 0 in a process of its own, and ends that process if it hangs.

    Returns:
      The exit code, 0 once host 0 has ended.

    Raises:
      UserError: a mistake of the user.
    """
    job = EngineJob.of(str(path), config, None if profile is None else str(profile), cluster)
    supervisor = Supervisor(RemoteEngine(config, None), job, restarts=restarts)
    loop, leave = asyncio.get_running_loop(), _signal_handler(supervisor.let_end)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, leave, number)
    try:
        await supervisor.run()
    except EngineGone as problem:
        say(f"error: {problem}")
        return problem.exit_code
    say("stopped")
    return exit_codes.ENDED


def _signal_handler(let_end: Callable[[], None]) -> Callable[[int], None]:
    """A worker's signal handler: it waits for host 0 after one signal, ends after two."""
    asked = False

    def leave(number: int) -> None:
        nonlocal asked
        if asked:
            os._exit(128 + number)
        asked = True
        say(WAITING)
        let_end()

    return leave


def _hosts(text: str) -> int | str:
    if text == "auto":
        return text
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is neither auto nor a number of hosts")
    return int(text)


def _shared_secret(path: Path | None) -> bytes | None:
    if path is None:
        held = os.environ.get(HOSTS_SECRET)
        return None if held is None else os.fsencode(held).strip()
    try:
        return path.read_bytes().strip()
    except OSError as problem:
        raise ValueError(f"--hosts-secret {path}: {problem.strerror}") from None


def _secrets(args: argparse.Namespace) -> TlsFiles | None:
    from server.tls import Tls

    files = (args.hosts_cert, args.hosts_key, args.hosts_ca)
    if not any(files):
        return None
    if not all(files):
        raise ValueError("--hosts-cert, --hosts-key and --hosts-ca go together")
    try:
        Tls(certificate=args.hosts_cert, key=args.hosts_key, client_ca=args.hosts_ca)
    except ValueError as problem:
        raise ValueError(str(problem).replace("--tls-client-ca", "--hosts-ca").replace("--tls-", "--hosts-")) from None
    certificate, key, authority = (path.read_bytes() for path in files)
    return TlsFiles(authority=authority, certificate=certificate, key=key)
