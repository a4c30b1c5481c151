"""A field means the same in every protocol: each is sent over each, and the answers are compared with Python's.
A protocol without the field refuses it by name."""

import asyncio
import json
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import httpx2 as httpx
import pytest

from jaxserve.engine import Engine
from jaxserve.sampling_params import SAMPLING_PARAMS
from jaxserve.text.chat_template import ChatTemplate
from server.commands.jsonl import LineServer
from server.proto.jaxserve.v1 import inference_pb2 as pb
from server.proto.jaxserve.v1.inference_pb2_grpc import InferenceStub
from server.proto.vllm.grpc.engine import vllm_engine_pb2 as vllm_pb
from server.proto.vllm.grpc.engine.vllm_engine_pb2_grpc import VllmEngineStub
from tests.docs.conftest import served

PROMPT, TOKENS = "It was a", 12
Answers = list[tuple[str, tuple[int, ...]]]  # text and tokens of each sample; no tokens where the protocol has none
FORM = {"type": "regex", "value": "( [a-z]+){3}[.!]"}
TEMPLATE = (
    "{% for message in messages %}{{ message.role + ': ' + message.content + ' ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'she:' }}{% endif %}"
)
CHAT = [{"role": "he", "content": "Good morning."}, {"role": "he", "content": "It was a"}]

# The fields as Python has them, and which protocols lack them.
SAID: dict[str, tuple[dict[str, Any], set[str]]] = {
    "greedy": ({"temperature": 0.0}, set()),
    "drawn": ({"temperature": 0.8, "top_p": 0.95, "top_k": 50, "seed": 7}, set()),
    "min_p": ({"min_p": 0.05, "seed": 7}, {"tgi"}),
    "typical_p": ({"typical_p": 0.5, "seed": 7}, {"vllm"}),
    "repeat less": ({"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.5}, set()),
    "presence_penalty": ({"temperature": 0.0, "presence_penalty": 1.5}, {"tgi"}),
    "logit_bias": ({"temperature": 0.0, "logit_bias": {387: -100.0}}, {"tgi"}),
    "bad_words": ({"temperature": 0.0, "bad_words": ["very", "good"]}, {"tgi", "vllm"}),
    "min_tokens": ({"temperature": 0.0, "min_tokens": 9, "stop": [" good"]}, {"tgi"}),
    "stop": ({"temperature": 0.0, "stop": [" thing"]}, set()),
    "stop_token_ids": ({"temperature": 0.0, "stop_token_ids": [569]}, {"tgi"}),
    "ignore_eos": ({"temperature": 0.0, "ignore_eos": True, "logit_bias": {0: 50.0}}, {"tgi"}),
    "grammar": ({"temperature": 0.0, "grammar": FORM}, set()),
    "n": ({"n": 3, "seed": 7}, {"tgi"}),
    "best_of": ({"best_of": 3, "seed": 7}, {"vllm"}),
    "priority": ({"temperature": 0.0, "priority": 3}, {"tgi", "vllm"}),
    "cache_salt": ({"temperature": 0.0, "cache_salt": "mine"}, {"tgi", "vllm"}),
    "timeout": ({"temperature": 0.0, "timeout": 60.0}, {"tgi"}),
    "beams": ({"use_beam_search": True, "n": 2, "best_of": 4, "length_penalty": 2.0}, {"tgi", "vllm"}),
}


def by_python(engine: Engine, said: dict[str, Any]) -> Answers:
    if said.get("use_beam_search"):
        searched = {name: value for name, value in said.items() if name != "use_beam_search"}
        found = engine.beam_search(PROMPT, max_tokens=TOKENS, **searched)
    else:
        found = engine.generate(PROMPT, max_tokens=TOKENS, **said)
    return [(each.text, each.token_ids) for each in found]


class Ways:
    """Clients of one server, one for each protocol."""

    def __init__(self, port: int, http_port: int) -> None:
        self.channel = grpc.insecure_channel(f"127.0.0.1:{port}")
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{http_port}", timeout=60)

    def grpc(self, said: dict[str, Any]) -> Answers:
        fields = {name: value for name, value in said.items() if name not in ("timeout", "grammar")}
        if "grammar" in said:
            fields["grammar"] = pb.Grammar(regex=said["grammar"]["value"])
        request = pb.GenerateRequest(prompt=PROMPT, max_tokens=TOKENS, **fields)
        answer = InferenceStub(self.channel).Generate(request, timeout=said.get("timeout"))
        return [(each.text, tuple(each.token_ids)) for each in answer.samples or [answer]]

    def openai(self, said: dict[str, Any]) -> Answers:
        fields = {name: value for name, value in said.items() if name != "grammar"}
        if "grammar" in said:
            fields["guided_regex"] = said["grammar"]["value"]
        body = {"prompt": PROMPT, "max_tokens": TOKENS} | fields
        answer = self.http.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        return [(each["text"], ()) for each in answer.json()["choices"]]

    def tgi(self, said: dict[str, Any]) -> Answers:
        answer = self.http.post("/generate", json={"inputs": PROMPT, "parameters": self.parameters(said)})
        assert answer.status_code == 200, answer.text
        told = answer.json()
        return [(told["generated_text"], tuple(token["id"] for token in told["details"]["tokens"]))]

    @staticmethod
    def parameters(said: dict[str, Any]) -> dict[str, Any]:
        """TGI has no temperature of 0: tokens are the likeliest unless it is asked to draw."""
        fields = {name: value for name, value in said.items() if name != "temperature" or value}
        return {"max_new_tokens": TOKENS, "details": True, "do_sample": said.get("temperature") != 0.0} | fields

    def vllm(self, said: dict[str, Any]) -> Answers:
        fields = {name: value for name, value in said.items() if name not in ("timeout", "grammar")}
        if "grammar" in said:
            fields["regex"] = said["grammar"]["value"]
        sampling = vllm_pb.SamplingParams(**{"temperature": 1.0, "max_tokens": TOKENS} | fields)
        request = vllm_pb.GenerateRequest(text=PROMPT, sampling_params=sampling)
        answers = VllmEngineStub(self.channel).Generate(request, timeout=said.get("timeout"))
        whole = sorted((message.complete for message in answers), key=lambda complete: complete.index)
        return [("", tuple(each.output_ids)) for each in whole]


@pytest.fixture(scope="module")
def ways(engine: Engine) -> Iterator[Ways]:
    with served(engine) as (port, http_port):
        it = Ways(port, http_port)
        with it.channel, it.http:
            yield it


def test_every_parameter_is_sent() -> None:
    sent = {"max_tokens", *(name for fields, _ in SAID.values() for name in fields)}
    assert sent >= SAMPLING_PARAMS.keys() - {"logprobs", "prompt_logprobs"}  # these change no answer


@pytest.mark.parametrize("name", SAID)
def test_field_means_the_same_everywhere(engine: Engine, ways: Ways, name: str) -> None:
    said, lacking = SAID[name]
    expected = by_python(engine, said)
    assert all(tokens for _, tokens in expected)
    calls: dict[str, Callable[[dict[str, Any]], Answers]] = {
        "grpc": ways.grpc,
        "openai": ways.openai,
        "tgi": ways.tgi,
        "vllm": ways.vllm,
    }
    for way in calls.keys() - lacking:
        answers = calls[way](said)
        assert len(answers) == len(expected), way
        for (text, tokens), (expected_text, expected_tokens) in zip(answers, expected, strict=True):
            assert way == "vllm" or text == expected_text, way
            assert way == "openai" or tokens == expected_tokens, way


@pytest.mark.parametrize("name", [name for name, (_, lacking) in SAID.items() if "tgi" in lacking])
def test_tgi_refuses_fields_of_other_protocols(ways: Ways, name: str) -> None:
    parameters = ways.parameters(SAID[name][0])
    answer = ways.http.post("/generate", json={"inputs": PROMPT, "parameters": parameters})
    assert answer.status_code == 422
    assert any(f"{field}: is not served by this call" in answer.json()["error"] for field in parameters)


@pytest.mark.parametrize(
    ("begins", "text"),
    [
        (None, "he: Good morning. he: It was a she:"),
        (True, "he: Good morning. he: It was a she:"),
        (False, "he: Good morning. he: It was a "),
    ],
)
def test_chat_prompt_is_the_same_everywhere(
    engine: Engine, ways: Ways, monkeypatch: pytest.MonkeyPatch, begins: bool | None, text: str
) -> None:
    monkeypatch.setattr(engine.tokenizer, "chat_template", ChatTemplate(TEMPLATE, {}))
    chat: dict[str, Any] = {"messages": CHAT} | ({} if begins is None else {"add_generation_prompt": begins})
    stub = InferenceStub(ways.channel)
    greedy: dict[str, Any] = {"max_tokens": TOKENS, "temperature": 0.0}
    (expected,) = engine.generate(text, **greedy)

    async def streamed() -> list[int]:
        return [token async for delta in engine.stream(chat, **greedy) for token in delta.token_ids]

    request = pb.GenerateRequest(**chat, **greedy)
    (line,) = LineServer(engine, greedy, window=1).answers([json.dumps(chat).encode()])
    assert {
        "Engine.generate": engine.generate(chat, **greedy)[0].token_ids,
        "Engine.stream": tuple(asyncio.run(streamed())),
        "Generate": tuple(stub.Generate(request).token_ids),
        "GenerateStream": tuple(token for message in stub.GenerateStream(request) for token in message.token_ids),
        "a line": tuple(json.loads(line.encoded)["token_ids"]),
    } == dict.fromkeys(("Engine.generate", "Engine.stream", "Generate", "GenerateStream", "a line"), expected.token_ids)
    answer = ways.http.post("/v1/chat/completions", json=chat | greedy)
    assert answer.json()["choices"][0]["message"]["content"] == expected.text

    found = engine.beam_search(text, n=2, max_tokens=3)
    assert [each.token_ids for each in engine.beam_search(chat, n=2, max_tokens=3)] == [
        each.token_ids for each in found
    ]
    search: dict[str, Any] = {"n": 2, "max_tokens": 3, "use_beam_search": True}
    by_grpc = stub.Generate(pb.GenerateRequest(**chat, **search)).samples
    assert [tuple(each.token_ids) for each in by_grpc] == [each.token_ids for each in found]
    by_http = ways.http.post("/v1/chat/completions", json=chat | search).json()["choices"]
    assert [each["message"]["content"] for each in by_http] == [each.text for each in found]
