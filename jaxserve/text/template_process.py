"""Chat templates in another process, which can be killed and has little memory.

A template of a checkpoint is a program. Jinja's sandbox keeps it from the rest of Python, but not from a loop without
end or a text that fills the memory; both may happen while it is compiled too, where constants are folded. So this file
is also a program: it reads requests from a socket, a line of JSON each, and answers each with a line. It imports
nothing of jaxserve, because it is run by its path and must start quickly.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import functools
import json
import resource
import signal
import socket
import subprocess
import sys
import threading
from typing import Any, BinaryIO, NoReturn

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

SECONDS = 1.0  # for a request
MAX_TEXT = 2**20  # characters of a rendered chat
_MEMORY = 512 * 2**20  # bytes of address space; the process itself takes about 30 MiB
_START_SECONDS = 60.0  # on a machine with much else to do
_MAX_ERROR = 200  # characters of a template's error, which may quote the messages
_READY = b"ready\n"


class LimitsExceeded(Exception):
    """A request took too long or too much memory, or its text is too long."""


class TemplateProcess:
    """Asks a process of this file. Thread safe: one request at a time.

    The process starts with the first request, and again after one that exceeded the limits. It ends with this one.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._stream: BinaryIO | None = None

    def ask(self, request: bytes) -> dict[str, str]:
        """The answer to a line of JSON (`_answer`). Raises LimitsExceeded."""
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._start()
            assert self._socket is not None
            assert self._stream is not None
            try:
                self._socket.sendall(request + b"\n")
                answer = json.loads(self._stream.readline())
            except (OSError, ValueError):  # it has ended, or was stopped
                self._end()
                answer = {}
        if not answer:
            raise LimitsExceeded
        return answer

    def _start(self) -> None:
        self._end()
        self._socket, theirs = socket.socketpair()
        with theirs:
            # Not the folder of this file, whose modules have the names of others.
            command = [sys.executable, "-P", __file__, str(theirs.fileno())]
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        self._stream = self._socket.makefile("rb")
        atexit.register(self._end)
        self._socket.settimeout(_START_SECONDS)
        if self._stream.readline() != _READY:
            raise RuntimeError("the process that renders chat templates does not start")
        self._socket.settimeout(2 * SECONDS)  # it ends itself after SECONDS

    def _end(self) -> None:
        atexit.unregister(self._end)
        if self._process is None:
            return
        assert self._socket is not None
        assert self._stream is not None
        self._process.kill()
        self._process.wait()
        self._stream.close()
        self._socket.close()
        self._process = None


def environment() -> jinja2.Environment:
    """The names that transformers gives to templates."""
    made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    made.filters["tojson"] = _to_json
    made.globals["raise_exception"] = _raise
    made.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return made


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The filter `tojson` as transformers has it."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


@functools.lru_cache(maxsize=16)
def _compiled(source: str) -> jinja2.Template:
    return environment().from_string(source)


def _answer(request: dict[str, Any]) -> dict[str, str]:
    """Answers a request.

    Args:
      request: `source` of a template, and the `context`, whose names it may read.

    Returns:
      `text`, or `error`; nothing if it takes too much memory or the text is too long.
    """
    try:
        pieces, size = [], 0
        for piece in _compiled(request["source"]).generate(request["context"]):
            pieces.append(piece)
            size += len(piece)
            if size > MAX_TEXT:
                return {}
        return {"text": "".join(pieces)}
    except MemoryError:
        return {}
    except Exception as problem:  # a template may raise anything on messages that it does not expect
        return {"error": str(problem)[:_MAX_ERROR]}


def _serve(descriptor: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all processes
    with contextlib.suppress(ValueError, OSError):  # macOS has no such limit
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    with socket.socket(fileno=descriptor) as channel, channel.makefile("rwb") as stream:
        stream.write(_READY)
        stream.flush()
        for line in stream:
            signal.setitimer(signal.ITIMER_REAL, SECONDS)  # whose signal ends this process
            answer = json.dumps(_answer(json.loads(line)))
            signal.setitimer(signal.ITIMER_REAL, 0)
            stream.write(answer.encode() + b"\n")
            stream.flush()


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
