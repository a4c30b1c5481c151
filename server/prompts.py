"""The prompts of one call: checked against bounds, then tokenized and made into requests."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from jaxserve.errors import InvalidRequest
from jaxserve.generation.parsing import parse_request, prompt_text
from jaxserve.request import Request
from jaxserve.sampling_params import SamplingParams
from server.call import Call
from server.text import RefusedWork, TextTools, most_tokens, offload_if_long, parsing_work

if TYPE_CHECKING:
    from server.engine_client import EngineClient

Adjust = Callable[[Request], Request]


class CallPrompts:
    """The prompts of one call.

    Args:
      fields: the fields of each prompt, as `parse_request` takes them.
      defaults: sampling parameters that a prompt's fields do not give.
      adjust: changes a request once its prompt is tokenized.
      is_cut: whether `adjust` may shorten the prompt; a prompt that is too long is then no error.
    """

    def __init__(
        self,
        engine: EngineClient,
        fields: Sequence[Mapping[str, Any]],
        call: Call,
        defaults: Mapping[str, Any],
        *,
        adjust: Adjust,
        is_cut: bool,
    ) -> None:
        self.fields, self.call = fields, call
        self._engine, self._defaults, self._adjust, self._is_cut = engine, defaults, adjust, is_cut
        self._text = TextTools(engine)
        self._longest = longest(engine)

    def check_sizes(self) -> None:
        """Raises InvalidRequest for a prompt that is too long, however its text is tokenized."""
        if self._is_cut:
            return
        for fields in self.fields:
            if (ids := fields.get("prompt_token_ids")) is not None and len(ids) > self._longest:
                raise InvalidRequest("prompt_token_ids", f"has {len(ids)} tokens; at most {self._longest} fit")
            if (text := fields.get("prompt")) is not None:
                self._text.check_fits("prompt", text, self._longest)

    @cached_property
    def _sizes(self) -> list[int]:
        return [most_tokens(fields) for fields in self.fields]

    @property
    def most_tokens(self) -> int:
        """Upper bound of the tokens of all prompts together."""
        return sum([min(size, self._longest) for size in self._sizes])

    @property
    def new_tokens(self) -> int:
        """Upper bound of the tokens that one request generates."""
        return max(map(self._new_tokens, self.fields), default=0)

    def _new_tokens(self, fields: Mapping[str, Any]) -> int:
        given, usual = fields.get("max_tokens"), self._defaults.get("max_tokens", SamplingParams().max_tokens)
        return given if isinstance(given, int) and given else usual

    async def parse(self) -> list[Request]:
        """Tokenizes the prompts and returns a request for each. Raises InvalidRequest."""
        work = sum(map(parsing_work, self.fields, self._sizes))
        return await offload_if_long(work, lambda: [self._parse(fields) for fields in self.fields])

    async def check_fit(self, refused: RefusedWork) -> None:
        """Raises InvalidRequest for a prompt that can never be served.

        This is for calls that a full queue refuses: a caller should not retry such a prompt. Token ids are counted. A
        text is tokenized only if the number of its bytes does not show that it fits, and only while `refused` takes
        more work.
        """
        unclear = {i: fields for i, fields in enumerate(self.fields) if not self._fits(fields)}
        work = sum([parsing_work(fields, self._sizes[i]) for i, fields in unclear.items()])
        if unclear and refused.takes(work):
            await refused.run(work, lambda: [self._check_fit(fields) for fields in unclear.values()])

    def _fits(self, fields: Mapping[str, Any], text: str | None = None) -> bool:
        """Whether a prompt certainly fits, by the number of its token ids or of its text's bytes."""
        text = fields.get("prompt") if text is None else text
        if isinstance(text, str):
            if self._engine.tokenizer is None:
                return False
            tokens = self._engine.tokenizer.most_tokens(len(text.encode(errors="replace")))
        elif (ids := fields.get("prompt_token_ids")) is not None:
            tokens = len(ids)
        else:
            return False
        return 0 < tokens <= self._longest - self._new_tokens(fields)

    def _check_fit(self, fields: Mapping[str, Any]) -> None:
        if fields.get("messages") is not None:  # to render a chat takes less time than to tokenize it
            found = prompt_text(fields, self._engine.tokenizer, self._longest_text)
            if found is not None and self._fits(fields, found[1]):
                return
        self._parse(fields)

    @property
    def _longest_text(self) -> int | None:
        return None if self._is_cut else self._text.longest(self._longest)

    def _parse(self, fields: Mapping[str, Any]) -> Request:
        call = self.call
        request = parse_request(
            fields,
            request_id="",
            tokenizer=self._engine.tokenizer,
            priority=call.priority,
            arrival=call.arrival,
            tenant=call.tenant.name,
            share=call.tenant.share,
            cache_salt=call.tenant.salt(call.cache_salt),
            defaults=self._defaults,
            longest=self._longest if self._defaults else None,
            longest_text=self._longest_text,
        )
        request = self._adjust(request)
        self._engine.limits.check(request)
        return request


def longest(engine: EngineClient) -> int:
    """Most tokens of a request. Raises EngineNotReady."""
    return min(engine.max_context, engine.report.request_slots)
