"""`jaxserve serve` on several hosts: the flags that place a process among them, and the two parts there are to play."""

from __future__ import annotations

import argparse
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from jaxserve.cluster.config import ClusterConfig, LinksName, Secrets, check
from server import flags
from server.report import say, show, starting
from server.start import mending, model_directory

if TYPE_CHECKING:
    from jaxserve.engine import Engine

_FAILING = 10.0  # seconds that the watchdog has to end a process that has failed


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags that `from_flags` reads."""
    group = parser.add_argument_group("several hosts (docs/hosts.md)")
    group.add_argument(
        "--hosts",
        type=_hosts,
        metavar="N|auto",
        default=1,
        help="processes that serve one model together, each with as many of its T x S devices; auto: what jax finds "
        "out on TPU pods, Slurm and Kubernetes (default: %(default)s)",
    )
    group.add_argument("--host-id", type=int, metavar="I", help="which of them this is; 0 plans and has the front door")
    group.add_argument("--coordinator", metavar="HOST:PORT", help="where the others find host 0, by this very name")
    group.add_argument(
        "--control-port", type=int, metavar="N", help="of host 0, for plans (default: the one after the coordinator's)"
    )
    group.add_argument(
        "--join-timeout",
        type=float,
        metavar="S",
        default=300.0,
        help="how long the hosts wait for each other (default: %(default)g)",
    )
    group.add_argument(
        "--step-deadline",
        type=float,
        metavar="S",
        help="an iteration that takes longer has failed, and so have the hosts (default: 20 times what the largest "
        "bucket takes, and at least 10)",
    )
    group.add_argument(
        "--links",
        choices=get_args(LinksName),
        default="auto",
        help="how stages on different hosts pass arrays on; direct: the runtime copies; bridge: a program on both; "
        "auto: direct where a probe finds that it works (default: %(default)s)",
    )
    for name, text in (
        ("cert", "this host's certificate, for mutual TLS between the hosts"),
        ("key", "its private key"),
        ("ca", "the authority that has signed the certificate of every host"),
    ):
        group.add_argument(f"--hosts-{name}", type=Path, metavar="FILE.pem", help=text)
    group.add_argument(
        "--flight-seconds",
        type=float,
        metavar="S",
        default=120.0,
        help="of iterations that are kept for `jaxserve replay`; written when a host fails and on SIGUSR1 "
        "(default: %(default)g)",
    )
    group.add_argument(
        "--flight-folder", type=Path, metavar="DIR", default=Path(), help="where to (default: the folder it runs in)"
    )


def from_flags(args: argparse.Namespace) -> ClusterConfig | None:
    """This process's place; None where it serves alone. Raises UserError for flags that cannot be."""
    with mending():
        secrets = _secrets(args)
        if args.hosts == 1:
            given = ("host_id", "coordinator", "control_port", "step_deadline")
            for name in given:
                if getattr(args, name) is not None:
                    raise ValueError(f"--{name.replace('_', '-')} needs --hosts")
            if secrets is not None:
                raise ValueError("--hosts-cert needs --hosts")
            return None
        local_devices = None
        if args.hosts == "auto":
            from jaxserve.cluster.detect import detect

            count, host, coordinator, local_devices = detect()
        else:
            count, host, coordinator = args.hosts, args.host_id, args.coordinator
            if host is None or coordinator is None:
                raise ValueError(f"--hosts {count} needs --host-id and --coordinator")
        cluster = ClusterConfig(
            hosts=count,
            host=host,
            coordinator=coordinator,
            control_port=args.control_port,
            join_timeout=args.join_timeout,
            step_deadline=args.step_deadline,
            links=args.links,
            record_seconds=args.flight_seconds,
            record_folder=args.flight_folder,
            secrets=secrets,
            local_devices=local_devices,
        )
        check(flags.engine_config(args), cluster)
        return cluster


def lead(args: argparse.Namespace, cluster: ClusterConfig) -> Engine:
    """Host 0: the engine of all hosts. Raises UserError for whatever the user can mend."""
    path = model_directory(args)
    with mending():
        config = flags.engine_config(args)
        from jaxserve.cluster import start
        from jaxserve.cluster.failure import HostFailed
        from jaxserve.engine import Engine

        with starting() as report:
            try:
                led = start.lead(path, config, cluster, tell=say, progress=report)
            except HostFailed as failure:
                say(f"error: {failure}")
                time.sleep(_FAILING)  # the watchdog, which has found it out, ends this process
                os._exit(failure.code)
        engine = Engine(config, led.started, led.tokenizer)
        signal.signal(signal.SIGUSR1, lambda *_: start.write_record(led.recorder, "asked for", say))
    show(engine.report, model=path.name)
    return engine


def follow(args: argparse.Namespace, cluster: ClusterConfig) -> int:
    """Any other host. Returns 0 once host 0 has ended. Raises UserError for whatever the user can mend."""
    with mending():
        config = flags.engine_config(args)
        from jaxserve.cluster import start

        # Whoever ends the group has host 0 do so: a worker that left first would look like one that failed.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: say("waiting for host 0 to end the hosts"))
        start.follow(model_directory(args), config, cluster, tell=say)
    say("stopped")
    return 0


def _hosts(text: str) -> int | str:
    if text == "auto":
        return text
    if (count := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{count} is no number of hosts")
    return count


def _secrets(args: argparse.Namespace) -> Secrets | None:
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
    return Secrets(authority=authority, certificate=certificate, key=key)
