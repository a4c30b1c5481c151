"""Text and tokens for callers, without delaying the event loop."""

from __future__ import annotations

import asyncio
import functools
import json
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from jaxserve.generation import parsing
from server import errors
from server.limits import MAX_REFUSED_TEXT, MAX_VALUES

if TYPE_CHECKING:
    from jaxserve.text.tokenizer import Tokenizer
    from server.engine_client import EngineClient

_Result = TypeVar("_Result")

_LONG_TEXT = 4_000  # characters; work on more runs off the event loop (about a millisecond)
REQUEST_WORK = 64  # a request takes as long to make as so many characters to tokenize
# Few threads, so that long texts take turns for the processor and leave some of it to the engine.
_THREADS = ThreadPoolExecutor(max(2, (os.cpu_count() or 1) // 2), thread_name_prefix="jaxserve-text")
_REFUSED_THREAD = ThreadPoolExecutor(1, thread_name_prefix="jaxserve-refused")
_SHORT_TEXT = 1_000  # characters; work on more, for a call that is refused, runs off the event loop


class RefusedWork:
    """Work on the texts of calls that the queue refuses; long texts take turns on one thread.

    So a flood of such calls takes the time of one thread at most. A call that would wait behind too much work is
    refused without it.
    """

    def __init__(self) -> None:
        self._waiting = 0  # bytes of the texts that wait or are being worked on

    def takes(self, size: int) -> bool:
        """Whether work on `size` more bytes is accepted."""
        return not self._waiting or self._waiting + size <= MAX_REFUSED_TEXT

    async def run(self, size: int, work: Callable[[], _Result]) -> _Result:
        """Does work on a text of `size` bytes."""
        if size <= _SHORT_TEXT:
            return work()
        self._waiting += size
        try:
            return await _on(_REFUSED_THREAD, work)
        finally:
            self._waiting -= size


class TextTools:
    """Tokenizes and detokenizes with the tokenizer of an engine's checkpoint."""

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the checkpoint. Raises ApiError if it has none."""
        if self._engine.tokenizer is None:
            raise errors.ApiError(errors.ErrorKind.UNSUPPORTED, "this checkpoint has no tokenizer")
        return self._engine.tokenizer

    def longest(self, tokens: int) -> int | None:
        """Most bytes of a text with this many tokens; None if there is no such bound."""
        most = None if self._engine.tokenizer is None else self._engine.tokenizer.most_bytes
        return None if most is None else tokens * most

    def check_fits(self, field: str, text: str, tokens: int) -> None:
        """InvalidRequest for a text that must exceed `tokens` tokens; does not tokenize it."""
        parsing.check_text(field, text, self.longest(tokens))

    async def tokenize(self, text: str, *, special_tokens: bool = True, field: str = "text") -> list[int]:
        """The token ids of a text. Raises ApiError, naming the field, if there are none or too many."""
        return await offload_if_long(len(text), self.ids, text, special_tokens=special_tokens, field=field)

    def ids(self, text: str, *, special_tokens: bool = True, field: str = "text") -> list[int]:
        """As `tokenize`, on the calling thread, which a long text blocks."""
        self.check_fits(field, text, self._engine.max_context)
        try:
            ids = self.tokenizer.encode(text, special_tokens=special_tokens)
        except ValueError as problem:
            raise errors.invalid(field, str(problem)) from problem
        if len(ids) > MAX_VALUES:
            raise errors.invalid(field, f"has {len(ids)} tokens; at most {MAX_VALUES} are answered with")
        return ids

    async def detokenize(self, token_ids: Sequence[int], *, field: str = "token_ids") -> str:
        """The text of token ids. Raises ApiError, naming the field, for ids outside the vocabulary."""
        tokenizer, vocab_size = self.tokenizer, self._engine.model_config.vocab_size

        def decode() -> str:
            for token in token_ids:
                if not 0 <= token < vocab_size:
                    raise errors.invalid(field, f"has token id {token}; the vocabulary has {vocab_size}")
            return tokenizer.decode(token_ids)

        return await offload_if_long(len(token_ids), decode)


def most_tokens(fields: Mapping[str, Any]) -> int:
    """Most tokens that a prompt can have: a token of a text stands for at least one byte.

    A chat template, or a tokenizer that adds tokens or rewrites the text, may make a few more. They count once the text
    is tokenized.
    """
    texts = [] if (text := fields.get("prompt")) is None else [text]
    if messages := fields.get("messages"):  # without them tools are refused, whatever they are
        texts += [_text(part) for message in messages for part in message.values()]
        texts += map(_text, fields.get("tools") or ())
    return sum(len(text.encode(errors="replace")) for text in texts) + len(fields.get("prompt_token_ids") or ())


def _text(part: Any) -> str:
    """A part of a chat as text: calls of tools, and tools, as JSON."""
    try:
        return part if isinstance(part, str) else json.dumps(part, ensure_ascii=False)
    except RecursionError:
        return ""  # the template fails on it as well, and says so


def parsing_work(fields: Mapping[str, Any], size: int) -> int:
    """The work of making a request, in characters to tokenize, as `offload_if_long` takes it.

    A chat counts as a long text, for its template.

    Args:
      size: most tokens of its prompt.
    """
    biases = fields.get("logit_bias")
    work = REQUEST_WORK + size + (len(biases) if isinstance(biases, Mapping) else 0)
    return max(work, _LONG_TEXT + 1) if fields.get("messages") else work


async def offload_if_long(size: int, work: Callable[..., _Result], *args: Any, **kwargs: Any) -> _Result:
    """Does work on a text of `size` characters; on another thread if the text is long."""
    return await offload_if(size > _LONG_TEXT, functools.partial(work, *args, **kwargs))


async def offload_if(is_long: bool, work: Callable[[], _Result]) -> _Result:
    """Does work, on another thread if it is long."""
    return await _on(_THREADS, work) if is_long else work()


async def _on(threads: ThreadPoolExecutor, work: Callable[[], _Result]) -> _Result:
    """Does work on one of the threads.

    A call that ends before a thread is free leaves no text in the queue.
    """
    waiting = [work]
    del work
    try:
        return await asyncio.get_running_loop().run_in_executor(threads, lambda: waiting.pop()())
    finally:
        waiting.clear()
