"""Open Inference: reads its tensors and parameters, makes the tensors of answers.

`text_input` holds one prompt or several. A sampling parameter is a parameter of the request, or a tensor of its name.
Names that Triton's backends for language models have for some of them are taken too.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxserve.errors import InvalidRequest, shown
from jaxserve.generation.parsing import PROMPTS
from jaxserve.request import FinishReason
from jaxserve.sampling_params import SAMPLING_PARAMS
from server.call import Call
from server.compat.kserve_tensors import Tensor
from server.handler import RequestHandler

PROMPT, TEXT = "text_input", "text_output"
INPUTS = ({"name": PROMPT, "datatype": "BYTES", "shape": [-1]},)  # others are optional
OUTPUTS = (
    {"name": TEXT, "datatype": "BYTES", "shape": [-1]},
    {"name": "finish_reason", "datatype": "BYTES", "shape": [-1]},
    {"name": "completion_tokens", "datatype": "INT64", "shape": [-1]},
)
# Names of Triton's backends for vLLM and TensorRT-LLM, and of the protocol's text generation.
_ALIASES = {"stop_words": "stop", "random_seed": "seed", "max_new_tokens": "max_tokens", "streaming": "stream"}
_JSON = "sampling_parameters"  # a JSON object of sampling parameters, as Triton's vLLM backend takes it
_NO_EFFECT = frozenset(("binary_data_output", "content_type"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a request asks for.

    Attributes:
      shape: of `text_input`, and so of the outputs.
      fields: sampling parameters, as `parse_request` takes them.
      outputs: names of the tensors to return.
      stream: whether it wants more than one answer; None if it does not say.
      timeout: seconds within which it wants its answer.
    """

    prompts: tuple[str, ...]
    shape: tuple[int, ...]
    fields: dict[str, Any]
    outputs: tuple[str, ...]
    stream: bool | None = None
    timeout: float | None = None

    def call(self, call_id: str, protocol: str, deadline: float | None = None) -> Call:
        ends = [each for each in (deadline, self.timeout and time.monotonic() + self.timeout) if each is not None]
        return Call(id=call_id, protocol=protocol, deadline=min(ends, default=None))


def read(inputs: Sequence[Tensor], parameters: Mapping[str, Any], outputs: Sequence[str]) -> Asked:
    """Reads a request. Raises InvalidRequest, naming the tensor or parameter."""
    fields = {name: value for name, value in parameters.items() if not _is_triton_internal(name)}
    prompts: Tensor | None = None
    for tensor in inputs:
        if tensor.name == PROMPT:
            prompts = tensor
        elif tensor.name in fields:
            raise InvalidRequest(tensor.name, "is both a parameter and a tensor, or a tensor twice; give one")
        else:
            fields[tensor.name] = _value(tensor)
    if prompts is None or prompts.datatype != "BYTES" or not prompts.values:
        raise InvalidRequest(PROMPT, "must be a BYTES tensor with at least one prompt")
    names = [output["name"] for output in OUTPUTS]
    for name in outputs:
        if name not in names:
            raise InvalidRequest("outputs", f"names {shown(name)}; there are {', '.join(map(str, names))}")
    return _asked(fields, tuple(prompts.values), prompts.shape, tuple(outputs or names))


def read_text(text: str, parameters: Mapping[str, Any]) -> Asked:
    """Reads a request of the calls `generate` and `generate_stream`. Raises InvalidRequest."""
    return _asked(dict(parameters), (text,), (1,), (TEXT,))


def _is_triton_internal(name: str) -> bool:
    return name in _NO_EFFECT or name.startswith("triton_")


def _value(tensor: Tensor) -> Any:
    """The value of a parameter's tensor: one, or a list where it may have several."""
    name = _ALIASES.get(tensor.name, tensor.name)
    if name in SAMPLING_PARAMS and isinstance(SAMPLING_PARAMS[name].default, tuple):
        return list(tensor.values)
    if len(tensor.values) != 1:
        raise InvalidRequest(tensor.name, f"has {len(tensor.values)} values; it is one for all prompts of a request")
    return tensor.values[0]


def _asked(fields: dict[str, Any], prompts: tuple[str, ...], shape: tuple[int, ...], outputs: tuple[str, ...]) -> Asked:
    fields = {_ALIASES.get(name, name): value for name, value in fields.items()}
    if (given := fields.pop(_JSON, None)) is not None:
        fields |= _json_object(given)
    stream, timeout = fields.pop("stream", None), fields.pop("timeout", None)
    if stream is not None and not isinstance(stream, bool):
        raise InvalidRequest("stream", f"is {shown(stream)}; it must be true or false")
    if timeout is not None and (type(timeout) is not int or timeout < 0):
        raise InvalidRequest("timeout", f"is {shown(timeout)}; it must be a whole number of microseconds")
    if fields.pop("priority", 0) != 0:
        raise InvalidRequest("priority", "is not served by this protocol")
    for name in PROMPTS:
        if name in fields:
            raise InvalidRequest(name, f"is not taken by this protocol; {PROMPT} has the prompt")
    return Asked(
        prompts=prompts,
        shape=shape,
        fields=fields,
        outputs=outputs,
        stream=stream,
        timeout=timeout / 1e6 if timeout else None,
    )


def _json_object(text: Any) -> dict[str, Any]:
    try:
        value = json.loads(text)
        if isinstance(value, dict):
            return value
    except (TypeError, ValueError, RecursionError):
        pass
    raise InvalidRequest(_JSON, "must be the text of a JSON object")


async def whole(handler: RequestHandler, asked: Asked, call: Call) -> list[Tensor]:
    """The tensors of an answer. Raises as `RequestHandler.generate`."""
    if asked.stream:
        raise InvalidRequest("stream", "needs a call that streams: ModelStreamInfer, or generate_stream over HTTP")
    async with _generate(handler, asked, call) as generation:
        await generation.finish()
        found = generation.completions()
        return _outputs(
            asked,
            [each.text for each in found],
            [each.finish_reason for each in found],
            [len(each.token_ids) for each in found],
        )


async def parts(handler: RequestHandler, asked: Asked, call: Call) -> AsyncIterator[tuple[list[Tensor], bool]]:
    """(tensors, whether it is the last) of each part of an answer; one part if not `stream`."""
    if asked.stream is False:
        yield await whole(handler, asked, call), True
        return
    if len(asked.prompts) > 1:
        raise InvalidRequest(PROMPT, f"has {len(asked.prompts)} prompts; a stream answers one")
    generated = 0
    async with _generate(handler, asked, call) as generation:
        async for deltas in generation:
            for _, delta in deltas:
                generated += len(delta.token_ids)
                reason = delta.finish_reason
                if delta.text or reason is not None:
                    yield _outputs(asked, [delta.text], [reason], [generated]), reason is not None


def _generate(handler: RequestHandler, asked: Asked, call: Call) -> Any:
    return handler.generate([{"prompt": prompt} | asked.fields for prompt in asked.prompts], call)


def _outputs(
    asked: Asked, texts: list[str], reasons: Sequence[FinishReason | None], generated: list[int]
) -> list[Tensor]:
    values: dict[str, list[Any]] = {
        TEXT: texts,
        "finish_reason": ["" if reason is None else reason.value for reason in reasons],
        "completion_tokens": generated,
    }
    kinds = {str(output["name"]): str(output["datatype"]) for output in OUTPUTS}
    return [Tensor(name=name, datatype=kinds[name], shape=asked.shape, values=values[name]) for name in asked.outputs]
