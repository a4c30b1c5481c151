"""The request log: a JSON line for every request that ended and every refused call."""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import time
from datetime import UTC, datetime
from typing import IO, TYPE_CHECKING, Any

from jaxserve.generation.completion import Completion
from server.call import Observer, RequestTiming
from server.errors import ApiError

if TYPE_CHECKING:
    from jaxserve.text.tokenizer import Tokenizer

_log = logging.getLogger(__name__)


class RequestLog(Observer):
    """Writes the request log.

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
        self._write(line)

    def refused(self, call_id: str, refusal: ApiError) -> None:
        self._write({"id": call_id, "refused": refusal.kind.value, "message": str(refusal)})

    def close(self) -> None:
        if self._file is not sys.stdout:
            with contextlib.suppress(OSError):  # `_write` has logged it
                self._file.close()

    def _write(self, line: dict[str, Any]) -> None:
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        try:
            self._file.write(json.dumps({"time": now} | line) + "\n")
            self._file.flush()
            self._failed = False
        except OSError as problem:  # a full disk must not end requests
            if not self._failed:
                _log.error("the request log cannot be written: %s", problem.strerror)
            self._failed = True


def _since(start: float, end: float | None) -> float | None:
    return None if end is None else round(end - start, 6)
