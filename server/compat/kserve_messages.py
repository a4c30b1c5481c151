"""Open Inference requests and answers in both forms: HTTP bodies and gRPC messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import ConfigDict, Field

from jaxserve.errors import InvalidRequest
from server.compat import kserve_infer, kserve_tensors
from server.compat.kserve_infer import Asked
from server.compat.kserve_tensors import Tensor
from server.http.body import Body
from server.http.call import HttpCall, encoded
from server.proto.inference import open_inference_grpc_pb2 as pb

_HEADER = "inference-header-content-length"  # bytes of JSON in a body that tensors in binary follow
_MAX_TENSORS = 64


class InputTensor(Body):
    name: str
    shape: Annotated[list[int], Field(max_length=8, fail_fast=True)]
    datatype: str
    parameters: dict[str, Any] = Field(default_factory=dict)
    data: list[Any] | None = None


class OutputTensor(Body):
    name: str
    parameters: dict[str, Any] = Field(default_factory=dict)


class InferBody(Body):
    id: str | None = Field(default=None, max_length=256)
    parameters: dict[str, Any] = Field(default_factory=dict)
    inputs: list[InputTensor] = Field(max_length=_MAX_TENSORS)
    outputs: list[OutputTensor] = Field(default_factory=list, max_length=_MAX_TENSORS)


class GenerateBody(Body):
    """The body of `generate` and `generate_stream`; other fields are parameters, too."""

    model_config = ConfigDict(extra="allow")
    text_input: str
    id: str | None = Field(default=None, max_length=256)
    parameters: dict[str, Any] = Field(default_factory=dict)

    @property
    def asked(self) -> Asked:
        return kserve_infer.read_text(self.text_input, (self.model_extra or {}) | self.parameters)


class HttpInference:
    """One `infer` call over HTTP: JSON, or JSON followed by tensors in binary.

    Attributes:
      id: the caller's, or None.
    """

    def __init__(self, body: InferBody, tensors: bytes) -> None:
        self.id = body.id
        inputs, at = [], 0
        for each in body.inputs:
            size = each.parameters.get("binary_data_size")
            if size is None:
                inputs.append(kserve_tensors.from_json(each.name, each.datatype, each.shape, each.data))
                continue
            if type(size) is not int or not 0 <= size <= len(tensors) - at:
                raise InvalidRequest(each.name, f"has binary_data_size {size!r:.50}; {len(tensors) - at} bytes follow")
            raw = tensors[at : at + size]
            inputs.append(kserve_tensors.from_bytes(each.name, each.datatype, each.shape, raw))
            at += size
        if at != len(tensors):
            raise InvalidRequest("inputs", f"leave {len(tensors) - at} bytes of the body unread")
        self.asked = kserve_infer.read(inputs, body.parameters, [each.name for each in body.outputs])
        usual = bool(body.parameters.get("binary_data_output"))
        self._binary = {each.name: bool(each.parameters.get("binary_data", usual)) for each in body.outputs}
        self._usual = usual

    @classmethod
    async def of(cls, http_call: HttpCall) -> HttpInference:
        """Reads a call. Raises ApiError or InvalidRequest."""
        length = http_call.header(_HEADER)
        raw = await http_call.raw_body()
        if length and (not length.isdecimal() or int(length) > len(raw)):
            raise InvalidRequest(_HEADER, f"is {length[:50]!r}; the body has {len(raw)} bytes")
        size = int(length) if length else len(raw)
        body = await http_call.parsed(raw[:size], InferBody)
        return await http_call.offload(lambda: cls(body, raw[size:]))

    async def answer(self, http_call: HttpCall, model: str, tensors: Sequence[Tensor]) -> None:
        lines, binary = [], b""
        for each in tensors:
            line: dict[str, Any] = {"name": each.name, "datatype": each.datatype, "shape": each.shape}
            if self._binary.get(each.name, self._usual):
                raw = kserve_tensors.to_bytes(each)
                binary += raw
                line["parameters"] = {"binary_data_size": len(raw)}
            else:
                line["data"] = each.values
            lines.append(line)
        head = {"model_name": model, "outputs": lines} | ({} if self.id is None else {"id": self.id})
        if not binary:
            await http_call.json(head)
            return
        known = encoded(head)
        await http_call.whole(known + binary, "application/octet-stream", headers={_HEADER: str(len(known))})


def of_message(request: pb.ModelInferRequest) -> Asked:
    """What a gRPC message asks for. Raises InvalidRequest."""
    if len(request.inputs) > _MAX_TENSORS:
        raise InvalidRequest("inputs", f"has more than {_MAX_TENSORS} tensors")
    raw = request.raw_input_contents
    if raw and len(raw) != len(request.inputs):
        raise InvalidRequest("raw_input_contents", f"has {len(raw)} entries for {len(request.inputs)} inputs")
    inputs = [
        kserve_tensors.from_bytes(each.name, each.datatype, each.shape, raw[at])
        if raw
        else kserve_tensors.from_contents(each.name, each.datatype, each.shape, each.contents)
        for at, each in enumerate(request.inputs)
    ]
    parameters = kserve_tensors.plain_parameters(request.parameters)
    return kserve_infer.read(inputs, parameters, [each.name for each in request.outputs])


def to_message(request: pb.ModelInferRequest, model: str, tensors: Sequence[Tensor]) -> pb.ModelInferResponse:
    """An answer, with its tensors in the form that the request's have."""
    response = pb.ModelInferResponse(model_name=model, id=request.id)
    for each in tensors:
        output = response.outputs.add(name=each.name, datatype=each.datatype, shape=each.shape)
        if request.raw_input_contents:
            response.raw_output_contents.append(kserve_tensors.to_bytes(each))
        else:
            output.contents.CopyFrom(kserve_tensors.to_contents(each))
    return response
