"""Schemas of HTTP bodies. `SamplingParams` checks the ranges of sampling parameters."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, create_model, field_validator
from pydantic_core import PydanticCustomError

from jaxserve.errors import InvalidRequest
from jaxserve.fields import Param
from jaxserve.generation import chat
from jaxserve.generation import tools as tool_use
from jaxserve.generation.beam_search import FIELDS, BeamParams, parse_beam_params
from jaxserve.generation.samples import MAX_SAMPLES
from jaxserve.generation.tools import ToolUse
from jaxserve.sampling_params import MAX_LOGPROBS, MAX_STOP, SAMPLING_PARAMS, Grammar
from jaxserve.structured_output import grammar
from server.http.body import Body
from server.limits import MAX_PROMPTS, MAX_VALUES

_MAX_REQUESTS = 1024  # most requests of one call
_DEFAULT_MAX_TOKENS = 16  # of a completion, as in OpenAI's API

Seed = int | float
TokenIds = Annotated[list[int], Field(max_length=MAX_VALUES, fail_fast=True)]
Choices = Annotated[list[str], Field(max_length=grammar.MAX_CHOICES, fail_fast=True)]
Stops = Annotated[list[str], Field(max_length=MAX_STOP, fail_fast=True)]


def _field(param: Param) -> tuple[Any, None]:
    """An optional pydantic field with the type of a sampling parameter."""
    items = Field(max_length=param.max_items, fail_fast=True)
    kinds: dict[Any, Any] = {
        tuple[str, ...]: str | Annotated[list[str], items],
        tuple[int, ...]: Annotated[list[int], items],
        tuple[tuple[int, float], ...]: Annotated[dict[str, float], Field(max_length=param.max_items)],
    }
    return kinds.get(param.kind, param.kind) | None, None


def sampling_body(name: str, *params: Param) -> type[Body]:
    fields: Any = {param.name: _field(param) for param in params}
    return create_model(name, __base__=Body, **fields)


# Each protocol has its own fields for grammars and logprobs.
PLAIN_PARAMS = [param for name, param in SAMPLING_PARAMS.items() if name not in ("grammar", "logprobs")]
_OpenAISampling = sampling_body("_OpenAISampling", *PLAIN_PARAMS)


class StreamOptions(Body):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class JsonSchema(Body):
    """OpenAI's json_schema. The text always follows the schema; `strict` has no effect."""

    name: str | None = Field(default=None, max_length=256)
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @property
    def grammar(self) -> Grammar | None:
        """The constraint on the text. Raises InvalidRequest."""
        if (self.json_schema is None) == (self.type == "json_schema"):
            raise InvalidRequest(
                "response_format", "needs json_schema with type json_schema, and must not have it with another type"
            )
        if self.json_schema is not None:
            return grammar.json_schema("response_format", self.json_schema.schema_)
        return grammar.json_object("response_format") if self.type == "json_object" else None


class StructuredOutputs(Body):
    """vLLM's structured_outputs."""

    json_: dict[str, Any] | str | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    json_object: bool | None = None


class OpenAIBody(_OpenAISampling):
    """The fields that completions and chats share."""

    model: str | None = None
    max_tokens: int | None = None  # inherited; repeated for the type checker, like prompt_logprobs
    prompt_logprobs: int | None = None
    seed: Seed | None = None
    n: int | None = Field(default=None, ge=1, le=MAX_SAMPLES)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None
    priority: int = Field(default=0, ge=-(2**31), lt=2**31)
    cache_salt: str = Field(default="", max_length=256)
    timeout: float | None = Field(default=None, gt=0, le=86_400)
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: bool | None = None
    skip_special_tokens: bool = True
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = Field(default=None, ge=-1)
    return_token_ids: bool = False

    @property
    def sampling(self) -> dict[str, Any]:
        """The given sampling parameters, as `parse_request` takes them. Raises InvalidRequest."""
        fields = {name: getattr(self, name) for name in SAMPLING_PARAMS if getattr(self, name, None) is not None}
        if fields.get("top_k") == -1:
            fields["top_k"] = 0  # -1 turns it off too
        if "seed" in fields:
            fields["seed"] = seed_of(fields["seed"])
        if (wanted := self._grammar()) is not None:
            fields["grammar"] = wanted
        return fields

    def _grammar(self) -> Grammar | None:
        """The constraint on the text, from the field that has one. Raises InvalidRequest."""
        found = [] if self.response_format is None else [self.response_format.grammar]
        vllm = self.structured_outputs or StructuredOutputs()
        for name, kind, values in (
            ("json", "json_schema", (self.guided_json, vllm.json_)),
            ("regex", "regex", (self.guided_regex, vllm.regex)),
            ("choice", "choice", (self.guided_choice, vllm.choice)),
            ("grammar", "lark", (self.guided_grammar, vllm.grammar)),
        ):
            for field, value in zip((f"guided_{name}", f"structured_outputs.{name}"), values, strict=True):
                if value is not None:
                    found.append(grammar.read(field, {"type": kind, "value": value}))
        if vllm.json_object:
            found.append(grammar.json_object("structured_outputs.json_object"))
        wanted = [each for each in found if each is not None]
        if len(wanted) > 1:
            raise InvalidRequest(wanted[1].field, f"and {wanted[0].field} are both given; give one")
        return wanted[0] if wanted else None

    @property
    def tokenizing(self) -> dict[str, Any]:
        """How a prompt becomes tokens, as `parse_request` takes it."""
        return {} if self.add_special_tokens is None else {"add_special_tokens": self.add_special_tokens}

    @property
    def fills_context(self) -> bool:
        """Whether the answer may fill the rest of the context."""
        return False

    @property
    def for_tgi(self) -> bool:
        """Whether TGI's client asks for a chat: all fields in each delta, and no [DONE]."""
        return False

    @property
    def beams(self) -> BeamParams | None:
        """The parameters of a beam search; None if the call samples."""
        params = parse_beam_params({name: getattr(self, name, None) for name in FIELDS})
        if params is not None:
            for name in ("stream", "echo"):
                if getattr(self, name, None):
                    raise InvalidRequest(name, "is not served with use_beam_search: the best is known only at the end")
            if not self.skip_special_tokens:
                raise InvalidRequest("skip_special_tokens", "is not served with use_beam_search")
        return params

    @field_validator("truncate_prompt_tokens")
    @classmethod
    def _keeps_tokens(cls, given: int | None) -> int | None:
        if given == 0:
            raise PydanticCustomError("tokens", "must be at least 1, or -1 for as many as fit")
        return given

    @property
    def usage_wanted(self) -> bool:
        """Whether a stream ends with its usage."""
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options", "needs stream to be true")
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def continuous_usage(self) -> bool:
        """Whether each chunk has the usage so far."""
        return self.usage_wanted and self.stream_options is not None and self.stream_options.continuous_usage_stats


def check_prompts(given: Any) -> list[Any]:
    """One or several prompts, each a text or token ids, as a list. Raises PydanticCustomError."""
    several = given if isinstance(given, list) and not _is_ids(given) else [given]
    if not several or not (all(isinstance(one, str) for one in several) or all(map(_is_ids, several))):
        raise PydanticCustomError("prompt", "must be a string, a list of token ids, or a list of one of these")
    if len(several) > MAX_PROMPTS:
        raise PydanticCustomError("prompt", "has too many prompts; one call may have {most}", {"most": MAX_PROMPTS})
    return several


def prompt_fields(prompts: Sequence[Any]) -> list[dict[str, Any]]:
    """The fields of each prompt, as `parse_request` takes them."""
    return [{"prompt" if isinstance(one, str) else "prompt_token_ids": one} for one in prompts]


class CompletionBody(OpenAIBody):
    prompt: Any
    best_of: int | None = Field(default=None, ge=1, le=MAX_SAMPLES)
    echo: bool | None = None
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    suffix: str | None = None

    _are_prompts = field_validator("prompt")(check_prompts)

    @property
    def sampling(self) -> dict[str, Any]:
        if self.suffix:
            raise InvalidRequest("suffix", "is not served: these models do not fill in the middle")
        fields = {"max_tokens": _DEFAULT_MAX_TOKENS} | super().sampling
        if fields["max_tokens"] == 0:
            if not self.echo:
                raise InvalidRequest("max_tokens", "is 0, which makes sense with echo only")
            fields |= {"max_tokens": 1, "temperature": 0.0}  # the token is dropped
        if self.echo and self.logprobs is not None:
            fields["prompt_logprobs"] = max(self.logprobs, fields.get("prompt_logprobs", 0))
        if (self.best_of or 1) > (self.n or 1):
            fields.setdefault("logprobs", 0)
        return fields

    @property
    def prompts(self) -> list[dict[str, Any]]:
        """The fields of each prompt, as `parse_request` takes them."""
        return [fields | self.tokenizing for fields in prompt_fields(self.prompt)]

    @property
    def samples(self) -> int:
        """Requests for each prompt."""
        n, best_of = self.n or 1, self.best_of or self.n or 1
        if best_of < n:
            raise InvalidRequest("best_of", f"is {best_of}, less than n ({n})")
        if best_of > n and self.stream:
            raise InvalidRequest("best_of", "cannot be streamed: the best answer is known only at the end")
        if best_of * len(self.prompts) > _MAX_REQUESTS:
            raise InvalidRequest("prompt", f"makes more than {_MAX_REQUESTS} requests, {best_of} for each prompt")
        return best_of


class ChatBody(OpenAIBody):
    messages: Any
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool = True

    @functools.cached_property
    def tool_use(self) -> ToolUse | None:
        """How tools are used, if they are. Raises InvalidRequest."""
        return tool_use.read_use(self.tools, self.tool_choice, parallel=self.parallel_tool_calls)

    @property
    def prompts(self) -> list[dict[str, Any]]:
        names = ("add_generation_prompt", "chat_template_kwargs", "reasoning_effort")
        fields = {name: getattr(self, name) for name in names} | self.tokenizing
        if self.tool_use is not None:
            fields["tools"] = list(self.tool_use.tools)
        return [{"messages": chat.read(self.messages)} | fields]

    def _grammar(self) -> Grammar | None:
        wanted = super()._grammar()
        if self.tool_use is None:
            return wanted
        if wanted is not None:
            raise InvalidRequest(wanted.field, "and tools are both given; give one, or tool_choice none")
        return self.tool_use.grammar

    @property
    def for_tgi(self) -> bool:
        return self.model == "tgi"

    @property
    def samples(self) -> int:
        return self.n or 1

    @property
    def fills_context(self) -> bool:
        return self.max_tokens is None and self.max_completion_tokens is None

    @property
    def sampling(self) -> dict[str, Any]:
        fields = super().sampling
        if self.max_completion_tokens is not None:
            if self.max_tokens not in (None, self.max_completion_tokens):
                raise InvalidRequest("max_tokens", "and max_completion_tokens differ; give one")
            fields["max_tokens"] = self.max_completion_tokens
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs", "needs logprobs to be true")
        fields.pop("logprobs", None)
        if self.logprobs:
            fields["logprobs"] = self.top_logprobs or 0
        if self.stream and self.prompt_logprobs is not None:
            raise InvalidRequest("prompt_logprobs", "is not in the stream of a chat; leave stream out")
        if self.fills_context and "min_tokens" in fields:
            fields["max_tokens"] = max(1, fields["min_tokens"])  # `fill_context` sets the real limit
        return fields


class TokenizeBody(Body):
    prompt: str
    add_special_tokens: bool = True
    model: str | None = None


class DetokenizeBody(Body):
    tokens: TokenIds
    model: str | None = None


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(token) is int for token in value)


def seed_of(number: Seed) -> int:
    """A 64-bit seed from any number: integers that fit stay, others are hashed."""
    if isinstance(number, int) and -(2**63) <= number < 2**64:
        return number
    return int.from_bytes(hashlib.blake2b(repr(number).encode(), digest_size=8).digest())
