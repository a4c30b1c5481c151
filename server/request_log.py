"""The request log: a JSON line for every request that ended and every refused call."""

from __future__ import annotations

import contextlib
import json
import logging
import queue
import sys
import threading
import time
from datetime import UTC, datetime
from typing import IO, TYPE_CHECKING, Any

from jaxserve.generation.completion import Completion
from server.call import Observer, RequestTiming
from server.errors import ApiError

if TYPE_CHECKING:
    from jaxserve.text.tokenizer import Tokenizer

_log = logging.getLogger(__name__)

_MOST_WAITING = 10_000  # lines that a slow disk may be behind; more are dropped
_CLOSE_SECONDS = 5.0  # to write the rest at the end


class RequestLog(Observer):
    """Writes the request log, on a thread of its own: a slow disk delays no caller.

    Args:
      path: file to append to, or `-` for standard output.
      tokenizer: logs prompts as text; None logs token ids.
      prompts: whether prompts and answers are logged.

    Raises:
      OSError: the file cannot be written.
    """

    def __init__(self, path: str, *, tokenizer: Tokenizer | None, prompts: bool) -> None:
        self._file: IO[str] = sys.stdout if path == "-" else open(path, "a", encoding="utf-8")  # noqa: SIM115
        self._tokenizer, self._prompts = tokenizer, prompts
        self._failed = False
        self._dropped = 0
        self._lines: queue.Queue[dict[str, Any] | None] = queue.Queue(_MOST_WAITING)
        self._thread = threading.Thread(target=self._run, name="jaxserve-request-log", daemon=True)
        self._thread.start()

    def ended(self, timing: RequestTiming, completion: Completion) -> None:
        call, sampling = timing.call, timing.request.sampling
        line: dict[str, Any] = {
            "id": call.id,
            "protocol": call.protocol,
            "finish_reason": completion.finish_reason.value if completion.finish_reason is not None else "cut short",
            "prompt_tokens": completion.prompt_tokens,
            "cached_tokens": completion.cached_tokens,
            "completion_tokens": len(completion.token_ids),
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "queue_seconds": _since(call.arrival, timing.began),
            "first_token_seconds": _since(call.arrival, timing.first_token),
            "seconds": _since(call.arrival, time.monotonic()),
        }
        if call.tenant.name:
            line["tenant"] = call.tenant.name
        if self._prompts:
            prompt = timing.request.prompt
            line["prompt"] = self._tokenizer.decode(prompt) if self._tokenizer is not None else prompt
            line["completion"] = completion.text if self._tokenizer is not None else completion.token_ids
        self._put(line)

    def refused(self, call_id: str, refusal: ApiError) -> None:
        self._put({"id": call_id, "refused": refusal.kind.value, "message": str(refusal)})

    def close(self) -> None:
        with contextlib.suppress(queue.Full):
            self._lines.put(None, timeout=_CLOSE_SECONDS)
            self._thread.join(_CLOSE_SECONDS)
        if self._file is not sys.stdout and not self._thread.is_alive():
            with contextlib.suppress(OSError):  # `_write` has logged it
                self._file.close()

    def _put(self, line: dict[str, Any]) -> None:
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        try:
            self._lines.put_nowait({"time": now} | line)
        except queue.Full:
            if not self._dropped:
                _log.error("the request log is written too slowly: lines are dropped")
            self._dropped += 1
            return
        if self._dropped and self._lines.qsize() < _MOST_WAITING / 2:  # it is not about to drop more
            _log.error("%d lines of the request log were dropped", self._dropped)
            self._dropped = 0

    def _run(self) -> None:
        while (line := self._lines.get()) is not None:
            self._write(json.dumps(line) + "\n")

    def _write(self, line: str) -> None:
        try:
            self._file.write(line)
            self._file.flush()
            self._failed = False
        except OSError as problem:  # a full disk must not end requests
            if not self._failed:
                _log.error("the request log cannot be written: %s", problem.strerror)
            self._failed = True


def _since(start: float, end: float | None) -> float | None:
    return None if end is None else round(end - start, 6)
