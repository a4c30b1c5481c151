"""Processes of a group in tests: started together, read a line at a time, and never left behind."""

import contextlib
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.free_ports import free_ports

ROOT = Path(__file__).parents[3]
WAIT_SECONDS = 120.0  # the bound of every wait; nothing ever takes this long


class Host:
    """A process, and what it has printed: lines of JSON on standard output, anything on standard error."""

    def __init__(self, module: str, told: dict, folder: Path, environment: dict[str, str]) -> None:
        self.errors = folder / f"host-{told['host']}-{time.monotonic_ns()}.err"
        with self.errors.open("w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, json.dumps(told)],
                cwd=ROOT,
                text=True,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=os.environ | {"PYTHONFAULTHANDLER": "1"} | environment,
            )
        self.lines: list[dict[str, Any]] = []
        self._printed: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def until(self, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """The next line that is so; an error with all there was if none comes."""
        for line in self._lines():
            self.lines.append(line)
            if condition(line):
                return line
        raise AssertionError(f"it ended with {self.code()} after {self.lines}: {self.errors.read_text()}")

    def rest(self) -> list[dict[str, Any]]:
        """What it prints until it ends."""
        found = list(self._lines())
        self.lines += found
        return found

    def code(self) -> int:
        """How it ends. Raises Hangs if it does not."""
        try:
            return self.process.wait(WAIT_SECONDS)
        except subprocess.TimeoutExpired:
            raise Hangs from None

    def stacks(self) -> str:
        """Ends the process, and returns what its threads did, below all that it has printed as errors."""
        self.process.send_signal(signal.SIGCONT)
        self.process.send_signal(signal.SIGABRT)  # Python prints every thread's stack
        self.process.wait(WAIT_SECONDS)
        return self.errors.read_text()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                self._printed.put(line)
        self._printed.put(None)

    def _lines(self) -> Iterator[dict[str, Any]]:
        with contextlib.suppress(queue.Empty):
            while (line := self._printed.get(timeout=WAIT_SECONDS)) is not None:
                yield json.loads(line)
            return
        raise Hangs


class Hangs(Exception):
    """A process neither prints nor ends."""


def free_address() -> str:
    """HOST:PORT for a coordinator, which takes the next port as well."""
    return f"127.0.0.1:{free_ports(2)[0]}"


class Cable:
    """A connection between ports of this machine that can be cut, or go silent."""

    def __init__(self, port: int) -> None:
        """Args:
        port: that it leads to.
        """
        self._to = port
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listening.getsockname()[1]}"
        self._ends: list[socket.socket] = []
        self._silent = threading.Event()
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self._accepting.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near = self._listening.accept()[0]
                try:
                    far = socket.create_connection(("127.0.0.1", self._to))
                except OSError:  # nobody listens yet, or any more; who has called will call again
                    near.close()
                    continue
                self._ends += [near, far]
                for source, target in ((near, far), (far, near)):
                    threading.Thread(target=self._carry, args=(source, target), daemon=True).start()

    def _carry(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if not self._silent.is_set():
                    target.sendall(data)

    def close(self) -> None:
        """Both ends hear of it."""
        with contextlib.suppress(OSError):  # it is closed already
            self._listening.shutdown(socket.SHUT_RDWR)
        self._accepting.join()  # so that no end comes after the last
        self._listening.close()
        for end in self._ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def fall_silent(self) -> None:
        """Nobody hears anything."""
        self._silent.set()


@contextlib.contextmanager
def group(
    module: str, hosts: list[dict], folder: Path, *, coordinator: str | None = None, **environment: str
) -> Iterator[list[Host]]:
    """A process for each, which have ended when this has."""
    common = {"hosts": len(hosts), "coordinator": coordinator or free_address(), "folder": str(folder)}
    started = [Host(module, common | {"host": index} | told, folder, environment) for index, told in enumerate(hosts)]
    try:
        yield started
    except Hangs:
        stacks = [f"host {index}: {host.stacks()}" for index, host in enumerate(started)]
        raise AssertionError("a host hangs\n" + "\n".join(stacks)) from None
    finally:
        for host in started:
            with contextlib.suppress(ProcessLookupError):
                host.process.send_signal(signal.SIGCONT)
                host.process.kill()
            host.process.wait(WAIT_SECONDS)


def make_certificates(folder: Path) -> None:
    """ca.pem, and host.pem with host.key, for 127.0.0.1."""
    folder.mkdir(exist_ok=True)

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    openssl("req", "-x509", *curve, "-days", "30", "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=ca")
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1\n")
    openssl("req", *curve, "-keyout", "host.key", "-out", "host.csr", "-subj", "/CN=host")
    openssl(
        *("x509", "-req", "-in", "host.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial"),
        *("-days", "30", "-extfile", "names", "-out", "host.pem"),
    )
