"""Completes a stream of JSON lines, in the order of the input."""

from __future__ import annotations

import json
import queue
import threading
import time
from collections import deque
from collections.abc import Generator, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxserve.errors import EngineStopped, InvalidRequest, QueueFull
from jaxserve.generation.completion import Assembler
from jaxserve.generation.parsing import parse_request
from jaxserve.request import FinishReason, Request, TokenEvent

if TYPE_CHECKING:
    from jaxserve.engine import Engine

_LONGEST_ID = 1024  # characters of an id as JSON


class LineResult(NamedTuple):
    """The result of one input line.

    Attributes:
      number: number of the line, from 1.
      size: bytes of the input up to the end of this line.
      encoded: the output line, as JSON without its newline.
      error: why the line failed, or None.
      tokens: number of generated tokens.
    """

    number: int
    size: int
    encoded: bytes
    error: str | None
    tokens: int


@dataclass(slots=True)
class _Line:
    number: int
    size: int
    id: Any
    request: Request | None = None
    assembler: Assembler | None = None
    answer: LineResult | None = None


class EngineFailed(RuntimeError):
    """The engine has failed; no later line will be served."""


class LineServer:
    """Completes the lines of one source with one engine.

    Args:
      engine: started.
      defaults: sampling fields of lines that do not give their own.
      window: most lines read and not yet answered, which bounds memory.
    """

    def __init__(self, engine: Engine, defaults: dict[str, Any], *, window: int) -> None:
        self._engine = engine
        self._defaults = defaults
        self._eos = frozenset(engine.model_config.eos_token_ids)
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()  # lines from the reader, events from the engine
        self._sink = self._inbox.put
        self._window = threading.Semaphore(window)
        self._lines: deque[_Line] = deque()  # not yet answered, in the order of the input
        self._held: deque[_Line] = deque()  # refused by a full queue; tried again later
        self._alive: dict[str, _Line] = {}

    def answers(self, source: Iterable[bytes]) -> Generator[LineResult]:
        """Yields the result of every line that is not blank, in order.

        Raises:
          OSError: the source cannot be read further.
          EngineFailed: the engine has failed.
        """
        # Reading has its own thread, because it may wait for input while finished lines can be returned.
        threading.Thread(target=self._read, args=(source,), daemon=True).start()
        reading = True
        try:
            while reading or self._lines:
                match self._inbox.get():
                    case None:
                        reading = False
                    case Exception() as problem:
                        raise problem
                    case (int() as number, int() as size, bytes() as text):
                        self._take(number, size, text)
                    case events:
                        self._hear(events)
                self._submit_held()
                while self._lines and (answer := self._lines[0].answer) is not None:
                    self._lines.popleft()
                    self._window.release()
                    yield answer
        finally:
            for request_id in self._alive:
                self._engine.abort(request_id)

    def _read(self, source: Iterable[bytes]) -> None:
        size = 0
        try:
            for number, text in enumerate(source, 1):
                size += len(text)
                if text.strip():
                    self._window.acquire()
                    self._inbox.put((number, size, text))
        except Exception as problem:  # for the caller's thread to raise
            self._inbox.put(problem)
        self._inbox.put(None)

    def _take(self, number: int, size: int, text: bytes) -> None:
        line = _Line(number, size, number)
        self._lines.append(line)
        try:
            fields = _decode(text)
            line.id = _checked_id(fields.pop("id", number))
            line.request = self._parse(number, fields)
        except ValueError as problem:
            self._refuse(line, str(problem))
        else:
            self._held.append(line)

    def _parse(self, number: int, fields: dict[str, Any]) -> Request:
        return parse_request(
            self._defaults | {name: value for name, value in fields.items() if value is not None},
            request_id=str(number),
            tokenizer=self._engine.tokenizer,
            arrival=time.monotonic(),
            defaults=self._engine.request_defaults,
            longest=self._engine.limits.longest,
        )

    def _submit_held(self) -> None:
        while self._held:
            line = self._held[0]
            assert line.request is not None
            try:
                self._engine.submit(line.request, self._sink)
            except QueueFull:
                return  # the events of earlier lines call this again
            except InvalidRequest as problem:
                self._refuse(line, str(problem))
            except EngineStopped as problem:  # no event has reported the failure yet
                raise EngineFailed(str(problem)) from problem
            else:
                line.assembler = Assembler(line.request, self._engine.tokenizer, self._eos)
                self._alive[line.request.request_id] = line
            self._held.popleft()

    def _hear(self, events: list[TokenEvent]) -> None:
        for event in events:
            line = self._alive.get(event.request_id)
            if line is None:
                continue  # a stop string has ended it already
            assert line.request is not None
            assert line.assembler is not None
            if event.finish_reason in (FinishReason.ERROR, FinishReason.ABORTED):
                if not self._engine.is_healthy:
                    raise EngineFailed(event.error or "the engine has failed")
                del self._alive[event.request_id]
                self._refuse(line, event.error or "the request was ended")
                continue
            line.assembler.push(event)
            if line.assembler.finished:
                del self._alive[event.request_id]
                if event.finish_reason is None:
                    self._engine.abort(event.request_id)
                completion = line.assembler.completion()
                line.assembler = None
                encoded = _encode(completion.to_json() | {"id": line.id})
                line.answer = LineResult(line.number, line.size, encoded, None, len(completion.token_ids))

    @staticmethod
    def _refuse(line: _Line, error: str) -> None:
        line.answer = LineResult(line.number, line.size, _encode({"id": line.id, "error": error}), error, 0)


def _decode(text: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(text)
    except RecursionError:
        raise ValueError("not JSON: nested too deeply") from None
    except ValueError as problem:
        raise ValueError(f"not JSON: {problem}") from None
    if not isinstance(fields, dict):
        raise ValueError("a line must hold a JSON object")
    return fields


def _checked_id(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, str | int | float) or len(str(value)) > _LONGEST_ID:
        raise InvalidRequest("id", f"must be a number, or a string of at most {_LONGEST_ID} characters")
    return value


def _encode(fields: dict[str, Any]) -> bytes:
    # Surrogates in an id have no UTF-8; a line with them is escaped.
    try:
        return json.dumps(fields, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return json.dumps(fields).encode()
