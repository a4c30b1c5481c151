"""Calls that are too large are refused before they are parsed, and cost nobody else anything."""

import contextlib
import json
import math
import time
from collections.abc import Callable
from typing import Any

import grpc
import httpx2 as httpx
import pytest

from jaxserve.errors import InvalidRequest
from jaxserve.generation.parsing import parse_sampling
from server.auth import ApiKeys
from server.errors import ApiError
from server.grpc import receive
from server.http import json_text
from server.http.schemas import CompletionBody
from server.limits import MAX_FIELDS, MAX_VALUES
from server.proto.jaxserve.v1 import inference_pb2 as pb
from tests.server import front_attack
from tests.server.conftest import Served
from tests.server.http.http_calls import post

Serve = Callable[..., None]
Figure = Callable[[dict[str, list[float]]], dict[str, float]]


# Bounds before parsing


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (b'{"prompt":[' + b"1," * MAX_VALUES + b"1]}", "values"),
        (b"[" * (json_text.MAX_NESTED + 1), "lists and objects"),
        (b"{" * (json_text.MAX_NESTED + 1), "lists and objects"),
        (b'["' + b'\\"' * 50_000 + b'",' + b"1," * MAX_VALUES + b"1]", "values"),
        (b'["' + b"\\\\" * 50_001 + b'",' + b"1," * MAX_VALUES + b"1]", "values"),
    ],
)
def test_a_body_with_too_many_values_is_not_parsed(body: bytes, problem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json, "loads", lambda *_args, **_more: pytest.fail("it is parsed"))
    with pytest.raises(ApiError, match=problem):
        json_text.parse(body, CompletionBody)


@pytest.mark.parametrize(
    "text", ["1,2," * 200_000, '"[,{\\' * 100_000, "\\" * 100_001, "é,\n" * 150_000, ',"' * 65_535]
)
def test_what_is_in_a_string_is_no_value(text: str) -> None:
    for at in range(3):  # pieces are cut elsewhere
        body = json.dumps({"a" * at: 0, "prompt": text}).encode()
        json_text.check_size(body)
        assert json_text.parse(body, CompletionBody)[1].prompt == [text]


def test_long_lists_are_refused_at_the_bound() -> None:
    body = json.dumps({"prompt": "a", "guided_choice": [1] * 200_000}).encode()
    began = time.perf_counter()
    with pytest.raises(ApiError, match=r"guided_choice"):
        json_text.parse(body, CompletionBody)
    assert time.perf_counter() - began < 1  # each wrong entry would be an error of its own: a second and 200 MB


def test_a_message_with_too_many_fields_is_not_parsed(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    many = pb.GenerateRequest(prompt="a", stop=["a"] * (MAX_FIELDS + 1))
    nested = pb.GenerateRequest(prompt="a")
    nested.grammar.choice.options.extend([""] * (MAX_FIELDS + 1))
    ids = pb.GenerateRequest()
    ids.prompt_token_ids.ids.extend([300] * (MAX_VALUES + 1))

    async def scenario(it: Served) -> None:
        for message in (many, nested, ids):
            raw = message.SerializeToString()
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await it.channel.unary_unary(front_attack.SERVICE + "Generate")(raw)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert "has more than" in str(caught.value.details())
        fine = pb.GenerateRequest(prompt="a" * 70_000, max_tokens=1, stop=["x"])
        assert (await it.stub.Generate(fine)).text == "a"

    serve(scenario, max_context=80_000)


@pytest.mark.parametrize("method", ["Generate", "GenerateStream", "Tokenize"])
@pytest.mark.parametrize("raw", [b"\xff\xff\xff", b"\x0a\x05a", b"\x0b" * 70_000, b"\xff" * 70_000, b"\x0a" * 70_001])
def test_a_malformed_message_is_an_invalid_argument(
    serve: Serve, method: str, raw: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(it: Served) -> None:
        call = it.channel.unary_stream if method == "GenerateStream" else it.channel.unary_unary
        answer: Any = call(front_attack.SERVICE + method)(raw)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await (answer.read() if method == "GenerateStream" else answer)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "cannot be parsed" in str(caught.value.details())

    serve(scenario)
    assert not caplog.records


@pytest.mark.parametrize(
    "message",
    [
        pb.GenerateRequest(prompt="é" * 40_000, temperature=0.5, max_tokens=3, logit_bias={1: 2.0}),
        pb.GenerateRequest(messages=[pb.ChatMessage(role="user", content="a" * 100)] * 1000),
        pb.GenerateRequest(prompt_token_ids=pb.TokenIds(ids=[-1, 0, 2**31 - 1] * 30_000)),
    ],
)
def test_a_long_message_within_the_bounds_is_parsed(message: pb.GenerateRequest) -> None:
    raw = message.SerializeToString()
    assert len(raw) > 2**16
    receive.check_size(raw, pb.GenerateRequest.DESCRIPTOR)


# Rates


def test_a_call_counts_against_the_rate_before_it_is_parsed(serve_http: Serve, tmp_path: Any) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text('[a]\nkeys = ["key-of-a"]\nrate = 0.001\nburst = 3\n')

    async def scenario(it: Served) -> None:
        async with httpx.AsyncClient(base_url=it.url, headers={"x-api-key": "key-of-a"}) as client:
            given = {"content-type": "application/json"}
            statuses = [
                (await client.post("/v1/completions", content=b"[" * 1000, headers=given)).status_code for _ in range(2)
            ]
            statuses.append((await client.post("/v1/completions", json={"prompt": "a"})).status_code)
            statuses.append((await client.post("/v1/completions", content=b"[", headers=given)).status_code)
        assert statuses == [400, 400, 200, 429]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await it.channel.unary_unary(front_attack.SERVICE + "Generate")(
                b"\xff" * 70_000, metadata=[("x-api-key", "key-of-a")]
            )
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED

    serve_http(scenario, app={"keys": ApiKeys(keys)})


# A real server


MOST = {"health": 20, "gRPC health": 20, "completion": 50, "gRPC completion": 50}  # milliseconds more than when quiet


@pytest.mark.processes
@pytest.mark.alone
@pytest.mark.parametrize(
    ("seconds", "figure"),
    [
        (1.0, front_attack.medians),
        pytest.param(front_attack.SECONDS, front_attack.slow, marks=pytest.mark.weekly),
    ],
)
def test_no_call_delays_another(seconds: float, figure: Figure, capsys: pytest.CaptureFixture[str]) -> None:
    """It prints the table that `python -m tests.server.front_attack` does."""
    with (
        front_attack.served() as ports,
        contextlib.closing(front_attack.Attacker(ports)) as attacker,
        contextlib.closing(front_attack.Polite(ports)) as polite,
        capsys.disabled(),
    ):
        polite.measure(1)
        quiet = front_attack.medians(times := polite.measure(seconds))
        print(f"\n{front_attack.HEAD}\n| quiet | {front_attack.shown(times)} |")
        for name in front_attack.attacks():
            late = dict.fromkeys(MOST, math.inf)  # the least of all rounds
            for _ in range(8):  # others use this machine too
                times, answers = attacker.under(name, polite, seconds)
                print(f"| {name} | {front_attack.shown(times)} |")
                assert (polite.refused, len(answers) > 2) == (0, True), name
                for what, each in figure(times).items():
                    late[what] = min(late[what], each - quiet[what])
                if all(late[what] <= most for what, most in MOST.items()):
                    break
                quiet = front_attack.medians(polite.measure(seconds))
            else:
                pytest.fail(f"{name}: {late}")


def test_wrong_ids_of_a_long_list_are_found(serve_http: Serve) -> None:
    async def scenario(it: Served) -> None:
        status, answer = await post(it, "/detokenize", tokens=[97] * 5000 + [10**6])
        assert status == 400
        assert "1000000" in str(answer)

    serve_http(scenario)


def test_lists_of_parameters_are_counted_first() -> None:
    with pytest.raises(InvalidRequest, match="has 300000 entries; at most 16 are allowed"):
        parse_sampling({"stop": [object()] * 300_000})
