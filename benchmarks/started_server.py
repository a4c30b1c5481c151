"""Runs `jaxserve serve` for a benchmark."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from benchmarks.free_ports import free_ports
from jaxserve.config import ENGINE_PARAMS, EngineConfig
from server.commands.bench import load_generator
from server.commands.flags import is_switch

_STOP_SECONDS = 60.0  # how long a server may take to drain


class Server(NamedTuple):
    """A server that was started here."""

    address: str
    pid: int


@contextlib.contextmanager
def started_server(model: Path, config: EngineConfig, log: Path, more: Sequence[str] = ()) -> Iterator[Server]:
    """Runs `jaxserve serve` while the block lasts; yields it once it is healthy.

    Args:
      more: flags of the server.

    Raises:
      ValueError: the server ended before it was ready; the message holds the end of its output.
    """
    (port,) = free_ports(1)
    address = f"127.0.0.1:{port}"
    command = [sys.executable, "-m", "server.commands.cli", "serve", "--model", str(model)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--http-port", "off", *engine_arguments(config), *more]
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
        try:
            _await_healthy(address, process, log)
            yield Server(address, process.pid)
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def engine_arguments(config: EngineConfig) -> list[str]:
    """The engine flags that describe a configuration, where it differs from the default."""
    arguments = []
    for name, param in ENGINE_PARAMS.items():
        value = getattr(config, name)
        if value == param.default:
            continue
        if is_switch(param):
            arguments.append(param.flag)
        elif param.kind is bool:
            arguments += [param.flag, "on" if value else "off"]
        elif isinstance(value, tuple):
            arguments += [param.flag, ",".join(map(str, value))]
        else:
            arguments += [param.flag, str(param.none if value is None else value) + "s" * param.is_duration]
    return arguments


def _await_healthy(address: str, process: subprocess.Popen[bytes], log: Path) -> None:
    with grpc.insecure_channel(address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        while True:
            if process.poll() is not None:
                tail = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-5:])
                raise ValueError(f"the server ended with code {process.returncode} before it was ready:\n{tail}")
            try:
                answer = stub.Check(health_pb2.HealthCheckRequest(service=load_generator.SERVICE), timeout=5.0)
                if answer.status == health_pb2.HealthCheckResponse.SERVING:
                    return
            except grpc.RpcError:
                pass  # not listening yet, or the service is not registered yet
            time.sleep(0.2)
