"""Defaults of requests that the checkpoint recommends, over every protocol."""

from collections.abc import Callable
from typing import Any

from jaxserve.config import EngineConfig
from jaxserve.sampling_params import SamplingParams
from jaxserve.text.tokenizer import Tokenizer
from server.call import RequestTiming
from server.commands.console import say_defaults
from server.commands.jsonl import LineServer
from server.proto.jaxserve.v1 import inference_pb2 as pb
from tests.server.compat.vllm_calls import ask as ask_vllm
from tests.server.compat.vllm_calls import generate as generate_vllm
from tests.server.compat.vllm_calls import watched
from tests.server.conftest import Served
from tests.server.fake_engine import FakeEngine
from tests.server.http.http_calls import ask

Serve = Callable[..., None]
DEFAULTS = {"temperature": 0.6, "top_p": 0.9, "max_tokens": 20}
CHAT = {"messages": [{"role": "user", "content": "Hi"}]}


def of(sampling: SamplingParams) -> tuple[float, float, int]:
    return sampling.temperature, sampling.top_p, sampling.max_tokens


def test_calls_have_them_where_they_say_nothing(serve_http: Serve) -> None:
    async def scenario(it: Served) -> None:
        await it.stub.Generate(pb.GenerateRequest(prompt="ab"))
        await it.stub.Generate(pb.GenerateRequest(prompt="ab", temperature=0, max_tokens=3))
        await ask(it, "/v1/completions", prompt="ab", temperature=None, top_p=1)
        await ask(it, "/v1/chat/completions", **CHAT)
        await ask(it, "/v1/chat/completions", **CHAT, min_tokens=30)
        await ask(it, "/v1/chat/completions", **CHAT, max_completion_tokens=5, temperature=0.2)
        await ask(
            it, "/generate", inputs="ab", parameters={"do_sample": True, "temperature": 0.5, "max_new_tokens": 30}
        )
        await generate_vllm(it, ask_vllm("ab"))
        assert [of(timing.request.sampling) for timing in timings] == [
            (0.6, 0.9, 20),
            (0, 0.9, 3),
            (0.6, 1, 16),  # the limit of OpenAI's own protocol
            (0.6, 0.9, 20),
            (0.6, 0.9, 30),
            (0.2, 0.9, 5),
            (0.5, 0.9, 30),
            (1, 1, 62),  # a router has put in its own
        ]

    timings: list[RequestTiming] = []
    serve_http(lambda it: watched(it, timings, scenario), request_defaults=DEFAULTS, max_context=64)


def test_a_limit_is_cut_to_the_context(serve_http: Serve) -> None:
    async def scenario(it: Served) -> None:
        await it.stub.Generate(pb.GenerateRequest(prompt="ab"))
        await ask(it, "/v1/chat/completions", **CHAT)
        lengths = [len(timing.request.prompt) + timing.request.sampling.max_tokens for timing in timings]
        assert lengths == [64, 64]

    timings: list[RequestTiming] = []
    serve_http(lambda it: watched(it, timings, scenario), request_defaults={"max_tokens": 500}, max_context=64)


def test_a_beam_search_has_the_limit_only(serve: Serve) -> None:
    async def scenario(it: Served) -> None:
        searched = await it.stub.Generate(pb.GenerateRequest(prompt="ab", use_beam_search=True, n=2))
        assert searched.samples[0].usage.completion_tokens == 20

    serve(scenario, request_defaults=DEFAULTS)


def test_the_queue_counts_the_default_limit(serve: Serve) -> None:
    async def scenario(it: Served) -> None:
        counted: list[int] = []
        admit = it.app.handler.admission.admit

        def counting(*args: Any, **fields: Any) -> Any:
            counted.append(fields["new_tokens"])
            return admit(*args, **fields)

        it.app.handler.admission.admit = counting
        await it.stub.Generate(pb.GenerateRequest(prompt="ab"))
        await it.stub.Generate(pb.GenerateRequest(prompt="ab", max_tokens=3))
        assert counted == [20, 3]

    serve(scenario, request_defaults=DEFAULTS)


def test_lines_have_them_too(tokenizer: Tokenizer) -> None:
    with FakeEngine(tokenizer=tokenizer, request_defaults={"max_tokens": 4, "temperature": 0.0}) as engine:
        server = LineServer(engine, {}, window=8)  # pyright: ignore[reportArgumentType]
        lines = [b'{"prompt": "ab"}\n', b'{"prompt": "ab", "max_tokens": 2, "temperature": 1}\n']
        answers = [answer.encoded for answer in server.answers(lines)]
    assert b'"abab"' in answers[0]
    assert b'"seed"' not in answers[0]
    assert b'"ab"' in answers[1]
    assert b'"seed"' in answers[1]


def test_they_are_told_once(capsys) -> None:
    say_defaults(DEFAULTS)
    say_defaults({})
    told = capsys.readouterr().err
    assert told == (
        "jaxserve: generation_config.json: temperature 0.6, top_p 0.9, max_tokens 20 are the defaults of requests\n"
    )
    assert EngineConfig().generation_config == "auto"
