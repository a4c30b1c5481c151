"""Structured output the whole way on the real engine: every protocol, every kind, and hostile ones beside good ones."""

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx2 as httpx
import pytest
from grpc_status import rpc_status

from jaxserve.config import EngineConfig
from jaxserve.demo import DEMO_MODEL
from jaxserve.engine import Engine
from jaxserve.structured_output import compiler
from jaxserve.text.chat_template import ChatTemplate
from server.app import ServerApp
from server.commands import cli
from server.proto.jaxserve.v1 import inference_pb2 as pb
from server.proto.jaxserve.v1.inference_pb2_grpc import InferenceStub
from tests.fixtures.texts import CASES, CHOICES, GBNF, LARK, REGEX, SCHEMA, is_json
from tests.server.fake_engine import WAIT_SECONDS

MESSAGES: list[Any] = [{"role": "user", "content": "It was a"}]
GRPC = {
    "json_schema": pb.Grammar(json_schema=json.dumps(SCHEMA)),
    "regex": pb.Grammar(regex=REGEX),
    "choice": pb.Grammar(choice=pb.Choice(options=CHOICES)),
    "lark": pb.Grammar(lark=LARK),
    "gbnf": pb.Grammar(lark=GBNF),
}
GUIDED = {"json_schema": "guided_json", "regex": "guided_regex", "choice": "guided_choice"}
HUGE = "(a{1000}){1000}"


@pytest.fixture(autouse=True)
def _on_any_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where these tests share it with others, the time that a good grammar may take can be too short."""
    monkeypatch.setattr(compiler, "COMPILE_SECONDS", WAIT_SECONDS)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    config = EngineConfig(max_rows=4, buckets=(8, 32), slots=2048, max_context=256, scoring=False)
    with Engine.from_checkpoint(DEMO_MODEL, config) as engine:
        assert engine.tokenizer is not None
        engine.tokenizer.chat_template = ChatTemplate(
            "{% for message in messages %}{{ message.content }}{% endfor %}", {}
        )
        yield engine


class Ports:
    def __init__(self, stub: Any, address: str, url: str) -> None:
        self.stub, self.address, self.url = stub, address, url

    async def post(self, path: str, **body: Any) -> tuple[int, Any]:
        async with httpx.AsyncClient(base_url=self.url, timeout=None) as client:
            answer = await client.post(path, json=body)
            return answer.status_code, answer.json()


@contextlib.asynccontextmanager
async def serving(engine: Engine) -> AsyncIterator[Ports]:
    app = ServerApp(engine, name="demo", version="0", stall_seconds=WAIT_SECONDS)
    port, http_port = await app.start("127.0.0.1", 0, 0)
    address = f"127.0.0.1:{port}"
    try:
        async with asyncio.timeout(6 * WAIT_SECONDS), grpc.aio.insecure_channel(address) as channel:
            yield Ports(InferenceStub(channel), address, f"http://127.0.0.1:{http_port}")
            await app.handler.calls.wait_until_none()
    finally:
        await app.stop()
    assert engine.load().compiled_after_ready == 0


def test_grpc(engine: Engine) -> None:
    async def scenario() -> None:
        async with serving(engine) as it:
            for kind, case in CASES.items():
                request = pb.GenerateRequest(prompt="It was a", max_tokens=100, seed=1, grammar=GRPC[kind])
                whole = await it.stub.Generate(request)
                assert whole.finish_reason == pb.FINISH_REASON_EOS
                assert case.judge(whole.text), whole.text
                streamed = [message async for message in it.stub.GenerateStream(request)]
                assert "".join(message.text for message in streamed) == whole.text
            request = pb.GenerateRequest(
                prompt="It was a", max_tokens=40, top_k=3, grammar=pb.Grammar(json_object=True)
            )
            assert (await it.stub.Generate(request)).text.startswith("{")
            cut = pb.GenerateRequest(prompt="It was a", max_tokens=2, grammar=GRPC["json_schema"])
            assert (await it.stub.Generate(cut)).finish_reason == pb.FINISH_REASON_LENGTH
            for wrong, told in (
                (pb.Grammar(), "grammar: is empty"),
                (pb.Grammar(json_object=False), "grammar: has json_object false"),
                (pb.Grammar(choice=pb.Choice()), "grammar: must be a list of strings"),
                (pb.Grammar(json_schema="{"), "grammar: is no JSON"),
                (pb.Grammar(regex="(a"), "grammar: cannot be compiled: unclosed group"),
                (pb.Grammar(regex=HUGE), "grammar: cannot be followed: lexer error"),
                (pb.Grammar(lark="x" * 70_000), "grammar: has 70000 bytes"),
            ):
                with pytest.raises(grpc.aio.AioRpcError) as refusal:
                    await it.stub.Generate(pb.GenerateRequest(prompt="a", grammar=wrong))
                assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT
                assert (refusal.value.details() or "").startswith(told)
                status = rpc_status.from_call(refusal.value)  # pyright: ignore[reportArgumentType]
                assert status is not None
                assert b"grammar" in status.details[0].value

    asyncio.run(scenario())


def test_completions_and_chats(engine: Engine) -> None:
    openai = pytest.importorskip("openai")

    async def scenario() -> None:
        async with (
            serving(engine) as it,
            openai.AsyncOpenAI(base_url=f"{it.url}/v1", api_key="none", max_retries=0) as ai,
        ):
            for kind, case in CASES.items():
                answer = await ai.completions.create(
                    model="demo",
                    prompt=["It was a", "She"],
                    n=2,
                    seed=3,
                    max_tokens=100,
                    extra_body={GUIDED.get(kind, "guided_grammar"): case.given["value"]},
                )
                assert [choice.finish_reason for choice in answer.choices] == ["stop"] * 4
                assert all(case.judge(choice.text) for choice in answer.choices)
                text = ""
                name = {"json_schema": "json", "lark": "grammar", "gbnf": "grammar"}.get(kind, kind)
                outputs = {"structured_outputs": {name: case.given["value"]}}
                async for chunk in await ai.chat.completions.create(
                    model="demo", messages=MESSAGES, seed=3, max_tokens=100, stream=True, extra_body=outputs
                ):
                    text += chunk.choices[0].delta.content or ""
                assert case.judge(text), text
            schema: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
            answer = await ai.chat.completions.create(
                model="demo", messages=MESSAGES, max_tokens=100, temperature=0, response_format=schema
            )
            assert is_json(answer.choices[0].message.content, SCHEMA)
            answer = await ai.completions.create(
                model="demo", prompt="It was a", max_tokens=100, temperature=0, extra_body={"response_format": schema}
            )
            assert is_json(answer.choices[0].text, SCHEMA)
            answer = await ai.chat.completions.create(
                model="demo", messages=MESSAGES, max_tokens=30, response_format={"type": "json_object"}
            )
            assert answer.choices[0].message.content.startswith("{")
            wrong: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "strin"}}}
            with pytest.raises(openai.BadRequestError, match="cannot be compiled: Invalid type") as refusal:
                await ai.chat.completions.create(model="demo", messages=MESSAGES, response_format=wrong)
            assert refusal.value.param == "response_format"

    asyncio.run(scenario())


def test_tgi(engine: Engine) -> None:
    async def scenario() -> None:
        async with serving(engine) as it:
            for grammar, case in (
                ({"type": "json", "value": SCHEMA}, "json_schema"),
                ({"type": "json", "value": json.dumps(SCHEMA)}, "json_schema"),
                ({"type": "json_schema", "value": {"name": "x", "schema": SCHEMA}}, "json_schema"),
                ({"type": "regex", "value": REGEX}, "regex"),
            ):
                parameters = {"grammar": grammar, "max_new_tokens": 100, "details": True}
                status, answer = await it.post("/generate", inputs="It was a", parameters=parameters)
                assert status == 200
                assert CASES[case].judge(answer["generated_text"])
                assert answer["details"]["finish_reason"] == "eos_token"
            parameters = {"grammar": {"type": "regex", "value": HUGE}}
            for path in ("/generate", "/generate_stream"):
                status, answer = await it.post(path, inputs="It was a", parameters=parameters)
                assert (status, answer["error_type"]) == (422, "validation")
                assert answer["error"].startswith("grammar: cannot be followed")

    asyncio.run(scenario())


@pytest.mark.long
def test_hostile_grammars_harm_nobody(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside them the answers of others are what they are alone."""
    monkeypatch.setattr(compiler, "COMPILE_SECONDS", 2.0)
    hostile = [{"guided_regex": f"(a{{1000}}){{{count}}}"} for count in range(600, 606)]
    hostile += [{"guided_grammar": "start: " + "(" * 9000 + f'"{count}"'} for count in range(3)]
    hostile += [
        {"guided_json": {"type": "object", "properties": {f"p{i}": {"enum": [i]} for i in range(count)}}}
        for count in range(500, 502)
    ]

    async def scenario() -> None:
        async with serving(engine) as it:

            async def plain(number: int) -> Any:
                request = pb.GenerateRequest(prompt=f"It was a {number}", max_tokens=60, seed=number, ignore_eos=True)
                return list((await it.stub.Generate(request)).token_ids)

            async def turned_away(given: dict[str, Any]) -> tuple[int, Any]:
                while True:  # as long as the others' are being compiled
                    status, answer = await it.post("/v1/completions", **fields, **given)
                    if status != 429:
                        return status, answer

            expected = [await plain(number) for number in range(6)]
            fields: dict[str, Any] = {"prompt": "It was a", "max_tokens": 8}
            answers, found = await asyncio.gather(
                asyncio.gather(*map(turned_away, hostile)),
                asyncio.gather(*map(plain, range(6))),
            )
            for status, answer in answers:
                assert status in (200, 400), answer
                if status == 400:
                    assert re.match(
                        r"guided_\w+: (cannot be|takes longer|has \d+ bytes|after)", answer["error"]["message"]
                    )
            assert sum(status == 400 for status, _ in answers) > len(answers) // 2
            same = sum(a == b for a, b in zip(found, expected, strict=True))
            assert same >= 5  # another bucket may round otherwise
            case = CASES["json_schema"]
            answer = await it.stub.Generate(
                pb.GenerateRequest(prompt="a", max_tokens=100, seed=1, grammar=GRPC["json_schema"])
            )
            assert case.judge(answer.text)

    asyncio.run(scenario())
    assert engine.is_healthy


def test_the_client_and_the_command_line(engine: Engine, capfd: Any, tmp_path: Path) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text(json.dumps(SCHEMA))
    flags = {
        "json_schema": ["--json-schema", f"@{schema}"],
        "regex": ["--regex", REGEX],
        "choice": ["--choice", "yes,no"],
        "lark": ["--lark", LARK],
    }

    async def scenario() -> None:
        async with serving(engine) as it:
            for kind, given in flags.items():
                command = ["client", "--server", it.address, "It was a", "--max-tokens", "100", *given]
                assert await asyncio.to_thread(cli.main, command) == 0
                assert CASES[kind].judge(capfd.readouterr().out.removesuffix("\n"))
            command = ["client", "--server", it.address, "It was a", "--max-tokens", "9", "--json-object"]
            assert await asyncio.to_thread(cli.main, command) == 0
            assert capfd.readouterr().out.startswith("{")

    asyncio.run(scenario())


def test_lines(tmp_path: Path, capfd: Any) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [{"id": kind, "prompt": "It was a", "grammar": case.given} for kind, case in CASES.items()]
    lines.append({"id": "default", "prompt": "It was a"})
    lines.append({"id": "hostile", "prompt": "It was a", "grammar": {"type": "regex", "value": HUGE}})
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = ["generate", "--input", str(source), "--output", str(target), "--choice", "left,right", "--seed", "4"]
    small = ["--buckets", "8,32", "--slots", "1024", "--max-rows", "4", "--max-context", "160", "--no-scoring"]
    assert cli.main([*command, *small, "--max-tokens", "100"]) == 1
    found = {line["id"]: line for line in map(json.loads, target.read_text().splitlines())}
    for kind, case in CASES.items():
        assert case.judge(found[kind]["text"]), found[kind]
        assert found[kind]["finish_reason"] == "eos"
    assert found["default"]["text"] in ("left", "right")
    assert found["hostile"]["error"].startswith("grammar: cannot be followed: ")


def test_flags_that_cannot_be_are_told(capfd: Any) -> None:
    for wrong in (["--regex", "a", "--choice", "b"], ["--json-schema", "@/no/such/file"]):
        with pytest.raises(SystemExit):
            cli.main(["generate", "--prompt", "a", *wrong])
        assert re.search(r"not allowed with|cannot be read", capfd.readouterr().err)


def test_required_calls_of_tools_follow_their_schemas(engine) -> None:
    """Two schemas have a definition of the same name; each refers to its own."""

    def tool(name: str, values: list[Any]) -> dict[str, Any]:
        schema = {"properties": {"is": {"$ref": "#/$defs/One"}}, "$defs": {"One": {"enum": values}}}
        return {"type": "function", "function": {"name": name, "parameters": schema, "strict": True}}

    values = {"first": ["a", "b"], "second": [1, 2]}
    asked = {"messages": MESSAGES, "max_tokens": 120, "tools": [tool(*each) for each in values.items()]}
    named = {"type": "function", "function": {"name": "second"}}

    async def scenario() -> None:
        async with serving(engine) as it:
            seen, numbers = set(), set()
            fields = [
                {"seed": seed, "parallel_tool_calls": seed % 2 == 0, "tool_choice": "required"} for seed in range(8)
            ]
            found = await asyncio.gather(*(it.post("/v1/chat/completions", **asked, **each) for each in fields))
            for seed, (_, answer) in enumerate(found):
                (choice,) = answer["choices"]
                calls = [call["function"] for call in choice["message"]["tool_calls"]]
                numbers.add(len(calls))
                if seed % 2:
                    assert (len(calls), choice["finish_reason"]) == (1, "tool_calls")
                for call in calls[: None if choice["finish_reason"] == "tool_calls" else -1]:  # the last is cut off
                    arguments = json.loads(call["arguments"])
                    assert arguments.keys() == {"is"}
                    assert arguments["is"] in values[call["name"]]
                    seen.add(call["name"])
            assert seen == values.keys()
            assert max(numbers) > 1
            _, answer = await it.post("/v1/chat/completions", **asked, tool_choice=named)
            (call,) = answer["choices"][0]["message"]["tool_calls"]
            assert call["function"]["name"] == "second"
            assert json.loads(call["function"]["arguments"])["is"] in values["second"]

    asyncio.run(scenario())
