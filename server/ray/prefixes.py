"""Prefixes for routing: the blocks of a prompt, and those that a replica has cached."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from jaxserve.errors import InvalidRequest
from jaxserve.generation.parsing import PROMPT_FIELDS, parse_request
from jaxserve.scheduler.prefix_changes import BlocksRemoved, BlocksStored
from jaxserve.scheduler.prefix_digests import PrefixDigests
from jaxserve.text.tokenizer import Tokenizer
from server.auth import ANYBODY, ApiKeys, key_of
from server.compat.tgi_schemas import TgiBody
from server.engine_client import EngineClient
from server.errors import ApiError
from server.grpc.messages import fields_of
from server.http import json_text
from server.http.responses_body import ResponsesBody
from server.http.schemas import ChatBody, CompletionBody
from server.kv_events import number_of
from server.proto.jaxserve.v1 import inference_pb2 as pb
from server.text import offload_if_long

MOST_BLOCKS = 16_384  # that a replica tells of; of more it tells every second one, or third, ...
_MOST_BYTES = 2**20  # of a call whose prompt is read

_BODIES = {
    "/v1/completions": CompletionBody,
    "/v1/chat/completions": ChatBody,
    "/v1/responses": ResponsesBody,
    **dict.fromkeys(("/generate", "/generate_stream", "/"), TgiBody),
}


class Prompt:
    """A prompt's tokens for the router; they stay in its process, a replica gets none."""

    def __init__(self, tokens: Sequence[int] = (), salt: str = "") -> None:
        self._tokens, self._salt = tokens, salt
        self._blocks: dict[int, list[int]] = {}

    def blocks(self, size: int) -> list[int]:
        """The numbers of its full blocks, as the prefix cache has them (see `number_of`)."""
        if size not in self._blocks:
            digests = PrefixDigests(self._salt).first(len(self._tokens) // size, list(self._tokens), size)
            self._blocks[size] = [number_of(digest) for digest in digests]
        return self._blocks[size]

    def __reduce__(self) -> tuple[type[Prompt], tuple[()]]:
        return Prompt, ()


class CachedBlocks:
    """Blocks in the prefix cache of a replica's engine, whose job asks for KV events."""

    def __init__(self, engine: EngineClient) -> None:
        self._depths: dict[int, int] = {}  # number -> the block's place in its prompt, from 1
        self._take = engine.follow_prefixes(self._collect)

    def _collect(self) -> None:
        for change in self._take():
            match change:
                case BlocksStored():
                    depth = 0 if change.parent is None else self._depths.get(number_of(change.parent))
                    if depth is not None:
                        numbers = map(number_of, change.digests)
                        self._depths.update((number, at) for at, number in enumerate(numbers, depth + 1))
                case BlocksRemoved():
                    for digest in change.digests:
                        self._depths.pop(number_of(digest), None)
                case _:
                    self._depths.clear()

    def told(self) -> tuple[int, tuple[int, ...]]:
        """(step, numbers): the blocks whose places in their prompts are multiples of the step."""
        step = 1 + len(self._depths) // MOST_BLOCKS
        return step, tuple(number for number, depth in self._depths.items() if depth % step == 0)


class PromptReader:
    """Reads the prompts of calls, as the replica that answers them will.

    Args:
      keys: of tenants, whose cached prefixes are apart; None if calls need none.
    """

    def __init__(self, tokenizer: Tokenizer | None, keys: ApiKeys | None) -> None:
        self._tokenizer, self._keys = tokenizer, keys

    async def of_http(self, path: str, headers: Iterable[tuple[bytes, bytes]], body: bytes) -> Prompt:
        """The first prompt of a call; an empty one if it has none, or the replica will refuse it."""
        schema = _BODIES.get(path)
        if schema is None or not 0 < len(body) <= _MOST_BYTES:
            return Prompt()

        def read() -> tuple[Mapping[str, Any], str]:
            _, parsed = json_text.parse(body, schema)
            match parsed:
                case TgiBody():
                    return {"prompt": parsed.inputs}, ""
                case ResponsesBody():
                    parsed = parsed.chat
            return parsed.prompts[0], parsed.cache_salt

        named = {key.decode("latin-1"): value.decode("latin-1") for key, value in headers}
        return await self._prompt(read, named, len(body))

    async def of_rpc(self, request: Any, metadata: Iterable[tuple[str, Any]]) -> Prompt:
        """The prompt of an RPC; an empty one if it has none, or the replica will refuse it."""
        if not isinstance(request, pb.GenerateRequest) or (size := request.ByteSize()) > _MOST_BYTES:
            return Prompt()
        headers = {key: value for key, value in metadata if isinstance(value, str)}
        return await self._prompt(lambda: (fields_of(request), request.cache_salt), headers, size)

    async def _prompt(
        self, read: Callable[[], tuple[Mapping[str, Any], str]], headers: Mapping[str, str], size: int
    ) -> Prompt:
        tenant = ANYBODY if self._keys is None else self._keys.tenant_of(key_of(headers))
        if tenant is None:  # nobody's work is done for a caller without a key
            return Prompt()

        def parse() -> Prompt:
            fields, salt = read()
            fields = {name: value for name, value in fields.items() if name in PROMPT_FIELDS}
            return Prompt(parse_request(fields, request_id="", tokenizer=self._tokenizer).prompt, tenant.salt(salt))

        try:
            return await offload_if_long(size, parse)
        except (ApiError, InvalidRequest):
            return Prompt()
