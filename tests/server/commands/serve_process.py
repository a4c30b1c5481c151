"""`jaxserve serve` in a process of its own."""

import contextlib
import http.server
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.server.fake_engine import WAIT_SECONDS

ROOT = Path(__file__).parents[3]
HOST = "127.0.0.2"  # not the default


def run_cli(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "server.commands.cli", "serve", *flags]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)


class Server:
    """`jaxserve serve` in a process of its own.

    Args:
      program: module to run, with its own arguments.
      variables: added to the environment.
    """

    def __init__(self, program: str, *flags: str, variables: dict[str, str] | None = None) -> None:
        self._lines: list[str] = []
        self.process = subprocess.Popen(
            [sys.executable, "-m", *program.split(), *flags],
            cwd=ROOT,
            text=True,
            stderr=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"JAX_PLATFORMS": "cpu"} | (variables or {}),
        )
        assert self.process.stderr is not None
        self._reader = threading.Thread(target=self._lines.extend, args=(self.process.stderr,), daemon=True)
        self._reader.start()

    @property
    def log(self) -> str:
        return "".join(self._lines)

    def until(self, condition: Callable[[], Any]) -> Any:
        """What a condition returns once it is true. Fails if the process ends before that, or after a minute."""
        end = time.monotonic() + 60
        while not (found := condition()):
            assert self.process.poll() is None, self.log
            assert time.monotonic() < end, self.log
            time.sleep(0.05)
        return found

    def until_told(self, text: str) -> None:
        self.until(lambda: text in self.log)

    def children(self) -> list[int]:
        tasks = Path(f"/proc/{self.process.pid}/task").glob("*/children")
        return [int(child) for task in tasks for child in task.read_text().split()]

    def stop(self) -> int:
        """Sends SIGTERM; the exit code."""
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(60)
        self._reader.join(WAIT_SECONDS)
        return code


@contextlib.contextmanager
def running(program: str, *flags: str, **settings: Any) -> Iterator[Server]:
    it = Server(program, *flags, **settings)
    try:
        yield it
    finally:
        for child in it.children() if it.process.poll() is None else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        it.process.kill()
        it.process.communicate()


@contextlib.contextmanager
def collector() -> Iterator[tuple[str, list[str]]]:
    """An HTTP server in the place of an OpenTelemetry collector: its URL, and the paths that were posted to."""
    paths: list[str] = []

    class Collect(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            paths.append(self.path)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Collect) as served:
        thread = threading.Thread(target=served.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{served.server_port}", paths
        finally:
            served.shutdown()
            thread.join()
