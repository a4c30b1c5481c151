"""The whole way once, on the real engine: a tiny checkpoint from its files to text over gRPC and in output lines."""

import asyncio
import contextlib
import json
import re
import shutil
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx2 as httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.generation.completion import Completion
from jaxserve.text.tokenizer import Tokenizer
from server.app import ServerApp
from server.commands import cli, flags
from server.engine_process.job import EngineJob
from server.engine_process.remote_engine import RemoteEngine
from server.engine_process.supervisor import Supervisor
from server.proto.jaxserve.v1 import inference_pb2 as pb
from server.proto.jaxserve.v1.inference_pb2_grpc import InferenceStub
from server.proto.vllm.grpc.engine import vllm_engine_pb2 as engine_pb
from server.proto.vllm.grpc.engine.vllm_engine_pb2_grpc import VllmEngineStub
from tests.server import fuzz
from tests.server.fake_engine import VOCAB_SIZE, WAIT_SECONDS

pytestmark = pytest.mark.usefixtures("compiled_at_start")  # a stalled engine is told to those who watch it
SMALL = ["--buckets", "4,16", "--slots", "512", "--max-rows", "4", "--max-context", "64", "--compilation-cache", "off"]
FIELDS: dict[str, Any] = {"max_tokens": 12, "seed": 11, "ignore_eos": True, "logprobs": 2, "prompt_logprobs": 0}
TEXTS = [f"Question {i}? Answer: {answer}" for i in range(3) for answer in ("yes", "no", "maybe")]
PROMPTS = ["It was a", "Grüße", "a longer prompt than any bucket"]


@pytest.fixture(scope="module")
def completed(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Output lines of `jaxserve generate`, one for each of PROMPTS, with a bad line between them."""
    folder = tmp_path_factory.mktemp("lines")
    source, target = folder / "in.jsonl", folder / "out.jsonl"
    lines = [FIELDS | {"prompt": prompt} for prompt in PROMPTS]
    lines.insert(1, {"prompt": "a", "max_tokens": 64})
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = ["generate", "--model", str(checkpoint), "--input", str(source), "--output", str(target)]
    assert cli.main([*command, *SMALL]) == 1
    found = [json.loads(line) for line in target.read_text().splitlines()]
    assert found.pop(1).keys() == {"id", "error"}
    return found


@pytest.fixture(scope="module")
def scored(checkpoint: Path) -> list[Completion]:
    """TEXTS, scored from Python."""
    with engine_of(checkpoint) as engine:
        return engine.generate(TEXTS, max_tokens=1, prompt_logprobs=1, temperature=0.0)


@contextlib.contextmanager
def engine_of(model: Path, *more: str) -> Iterator[Any]:
    from jaxserve.engine import Engine

    args = cli.parser().parse_args(["serve", "--model", str(model), *SMALL, *more])
    with Engine.from_checkpoint(model, flags.engine_config(args)) as engine:
        yield engine


def await_idle(engine: Any) -> None:
    """Returns once the engine has taken in that its callers have gone: it holds no request and no slot."""
    until = time.monotonic() + WAIT_SECONDS
    while engine.load().running or engine.load().slots_used:
        assert time.monotonic() < until
        time.sleep(0.01)


def run_served(front: str, model: Path, scenario: Callable[[Any], Coroutine[Any, Any, None]], *more: str) -> None:
    """Runs a coroutine that serves an engine, in this process or in one of its own, and sees it idle again."""
    if front == "thread":
        with engine_of(model, *more) as engine:
            asyncio.run(scenario(engine))
            await_idle(engine)
        return

    async def behind() -> None:
        async with engine_process(model, *SMALL, *more) as engine:
            await scenario(engine)
            while engine.load().running or engine.load().slots_used:
                await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(behind(), 6 * WAIT_SECONDS))


@contextlib.asynccontextmanager
async def engine_process(model: Path, *given: str) -> AsyncIterator[RemoteEngine]:
    """An engine in a process of its own, ready, with the settings that the flags of `jaxserve serve` give it."""
    config = flags.engine_config(cli.parser().parse_args(["serve", "--model", str(model), *given]))
    engine = RemoteEngine(config, Tokenizer.from_directory(model))
    supervisor = Supervisor(engine, EngineJob.of(str(model), config), restarts=None)
    running = asyncio.create_task(supervisor.run())
    ready = asyncio.create_task(supervisor.ready.wait())
    await asyncio.wait([running, ready], return_when=asyncio.FIRST_COMPLETED)
    ready.cancel()
    try:
        yield engine
    finally:
        await supervisor.close()
        await running


fronts = pytest.mark.parametrize("front", ["thread", "process"])


def test_lines_have_what_they_asked_for(completed: list[dict[str, Any]]) -> None:
    assert [line["id"] for line in completed] == [1, 3, 4]
    for prompt, line in zip(PROMPTS, completed, strict=True):
        assert len(line["token_ids"]) == len(line["logprobs"]) == len(line["top_logprobs"]) == 12
        assert all(len(top) == 2 for top in line["top_logprobs"])
        assert len(line["prompt_logprobs"]) == len(prompt.encode())
        assert line["prompt_logprobs"][0] is None
        assert (line["finish_reason"], line["seed"]) == ("length", 11)


@fronts
def test_the_server_answers_as_the_command_does(
    checkpoint: Path, completed: list[dict[str, Any]], scored: list[Completion], front: str
) -> None:
    async def scenario(engine: Any) -> None:
        app = ServerApp(engine, name="tiny", version="0")
        port, http_port = await app.start("127.0.0.1", 0, 0)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub: Any = InferenceStub(channel)

            async def stream(prompt: str) -> list[pb.GenerateResponse]:
                return [message async for message in stub.GenerateStream(pb.GenerateRequest(prompt=prompt, **FIELDS))]

            for prompt, messages, line in zip(
                PROMPTS, await asyncio.gather(*map(stream, PROMPTS)), completed, strict=True
            ):
                whole = await stub.Generate(pb.GenerateRequest(prompt=prompt, **FIELDS))
                assert list(whole.token_ids) == line["token_ids"]
                assert whole.text == line["text"] == "".join(message.text for message in messages)
                assert [token for message in messages for token in message.token_ids] == line["token_ids"]
                assert list(whole.logprobs) == pytest.approx(line["logprobs"], abs=1e-3)
                assert list(whole.prompt_logprobs) == pytest.approx(line["prompt_logprobs"][1:], abs=1e-3)

            await same_to_routers(channel, completed)
            await same_over_http(f"http://127.0.0.1:{http_port}", completed)
            await same_scores_over_http(f"http://127.0.0.1:{http_port}", scored)

            endless = stub.GenerateStream(pb.GenerateRequest(prompt="a", max_tokens=60, ignore_eos=True))
            await endless.read()
            endless.cancel()
            await app.handler.calls.wait_until_none()
            load = await stub.GetLoad(pb.GetLoadRequest())
            assert (load.compiled_after_ready, load.iterations > 12) == (0, True)
        assert await app.drain(10) == 0

    run_served(front, checkpoint, scenario)


def test_hostile_calls_leave_the_real_engine_as_it_was(checkpoint: Path) -> None:
    async def scenario(engine: Any, hostile: list[tuple[str, bytes, str]]) -> None:
        app = ServerApp(engine, name="tiny", version="0")
        port, _ = await app.start("127.0.0.1", 0, None)
        await fuzz.attack(f"127.0.0.1:{port}", hostile)
        await fuzz.reset_connections(f"127.0.0.1:{port}", 20)
        await app.handler.calls.wait_until_none()
        assert await app.drain(10) == 0

    with engine_of(checkpoint) as engine:

        @settings(fuzz.together, max_examples=4)
        @given(hostile=st.lists(fuzz.calls, min_size=40, max_size=40))
        def attacked(hostile: list[tuple[str, bytes, str]]) -> None:
            asyncio.run(scenario(engine, hostile))

        before = engine.generate(PROMPTS, max_tokens=12, temperature=0.0, ignore_eos=True)
        attacked()
        await_idle(engine)
        after = engine.generate(PROMPTS, max_tokens=12, temperature=0.0, ignore_eos=True)
        assert [each.token_ids for each in after] == [each.token_ids for each in before]
        assert engine.is_healthy
        assert engine.load().outstanding_tokens == engine.load().compiled_after_ready == 0


@pytest.mark.clients
def test_a_browser_sees_what_is_served(checkpoint: Path, foreign: Any, tmp_path: Path) -> None:
    """The page, in a browser, while the engine serves others too."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no chromium is installed")

    async def scenario(engine: Any) -> None:
        app = ServerApp(engine, name="tiny", version="0")
        _, http_port = await app.start("127.0.0.1", 0, 0)
        url = f"http://127.0.0.1:{http_port}"
        async with httpx.AsyncClient(base_url=url, timeout=WAIT_SECONDS) as client:

            async def load() -> None:
                while True:
                    body = {"prompt": [prompt * 2 for prompt in PROMPTS], "max_tokens": 20, "ignore_eos": True}
                    await client.post("/v1/completions", json=body)

            others = asyncio.create_task(load())
            seen = await foreign("page.js", f"{url}/", browser, tmp_path / "page.png")
            others.cancel()
        assert re.match(r"(length|stop): \d+ tokens after 8, first after ", seen["done"])
        assert seen["answer"].startswith("It was a")
        assert (seen["health"], "tokens/s" in seen["numbers"]) == ("serving", True)
        assert seen["refused"].startswith("temperature: ")
        assert [each for each in seen["complaints"] if "400" not in each] == []
        assert (tmp_path / "page.png").read_bytes().startswith(b"\x89PNG")
        assert await app.drain(10) == 0

    with engine_of(checkpoint) as engine:
        asyncio.run(scenario(engine))


async def same_to_routers(channel: grpc.aio.Channel, completed: list[dict[str, Any]]) -> None:
    """vLLM's protocol gives the tokens that output lines have, and says of the model what it is."""
    stub: Any = VllmEngineStub(channel)
    sampling = engine_pb.SamplingParams(
        temperature=1.0, max_tokens=12, seed=11, ignore_eos=True, logprobs=2, prompt_logprobs=0
    )
    for prompt, line in zip(PROMPTS, completed, strict=True):
        tokenized = engine_pb.TokenizedInput(input_ids=prompt.encode())
        request = engine_pb.GenerateRequest(tokenized=tokenized, sampling_params=sampling, stream=True)
        *chunks, last = [message async for message in stub.Generate(request)]
        whole = last.complete
        assert list(whole.output_ids) == [token for each in chunks for token in each.chunk.token_ids]
        assert (list(whole.output_ids), whole.finish_reason) == (line["token_ids"], line["finish_reason"])
        assert list(whole.output_logprobs.token_logprobs) == pytest.approx(line["logprobs"], abs=1e-3)
        scored = [each.value for each in chunks[0].chunk.input_logprobs.token_logprobs[1:]]
        assert scored == pytest.approx(line["prompt_logprobs"][1:], abs=1e-3)
    info = await stub.GetModelInfo(engine_pb.GetModelInfoRequest())
    assert (info.model_type, info.vocab_size, info.max_context_length) == ("bloom", VOCAB_SIZE, 64)
    (load,) = (await stub.GetLoads(engine_pb.GetLoadsRequest())).loads
    assert (load.max_total_num_tokens, load.max_running_requests) == (512, 4)


async def same_over_http(url: str, completed: list[dict[str, Any]]) -> None:
    """OpenAI's and TGI's calls give the tokens that output lines have."""
    body = {"max_tokens": 12, "seed": 11, "ignore_eos": True, "logprobs": 2, "echo": True}
    async with httpx.AsyncClient(base_url=url, timeout=WAIT_SECONDS) as client:
        answer = (await client.post("/v1/completions", json=body | {"prompt": PROMPTS})).json()
        for prompt, choice, line in zip(PROMPTS, answer["choices"], completed, strict=True):
            assert choice["text"] == prompt + line["text"]
            told = line["prompt_logprobs"] + line["logprobs"]
            assert choice["logprobs"]["token_logprobs"] == pytest.approx(told, abs=1e-3)
        for prompt, line in zip(PROMPTS, completed, strict=True):
            parameters = {"max_new_tokens": 12, "seed": 11, "do_sample": True, "details": True}
            answer = (await client.post("/generate", json={"inputs": prompt, "parameters": parameters})).json()
            tokens = [token["id"] for token in answer["details"]["tokens"]]
            assert tokens == line["token_ids"][: len(tokens)]  # an end of sequence ends it


async def same_scores_over_http(url: str, expected: list[Completion]) -> None:
    """Texts are scored over HTTP, as evaluation harnesses ask for it, as from Python."""
    body = {"prompt": [list(text.encode()) for text in TEXTS], "max_tokens": 0, "logprobs": 1, "echo": True}
    async with httpx.AsyncClient(base_url=url, timeout=WAIT_SECONDS) as client:
        answer = (await client.post("/v1/completions", json=body)).json()
    assert answer["usage"]["completion_tokens"] == 0
    for choice, completion in zip(answer["choices"], expected, strict=True):
        told = choice["logprobs"]
        assert told["token_logprobs"][0] is None
        assert told["token_logprobs"][1:] == pytest.approx(completion.prompt_logprobs[1:], abs=1e-3)
        for logprob, tops, alternatives in zip(
            told["token_logprobs"][1:], told["top_logprobs"][1:], completion.prompt_top_logprobs[1:], strict=True
        ):
            assert max(tops.values()) == pytest.approx(alternatives.logprobs[0], abs=1e-3)
            assert logprob in tops.values()  # equal to the bit: whether it is the likeliest is read off


def test_a_converted_checkpoint_serves_alike(
    checkpoint: Path, completed: list[dict[str, Any]], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["convert", str(checkpoint), str(tmp_path / "orbax")]) == 0
    capfd.readouterr()
    command = ["generate", "--model", str(tmp_path / "orbax"), "--prompt", PROMPTS[0], "--max-tokens", "12"]
    assert cli.main([*command, "--seed", "11", "--ignore-eos", *SMALL]) == 0
    assert capfd.readouterr().out == completed[0]["text"] + "\n"
    assert cli.main(["convert", str(checkpoint), str(tmp_path / "orbax")]) == 2
    assert "exists and is not an empty directory" in capfd.readouterr().err


@fronts
@pytest.mark.clients
def test_a_javascript_client_of_the_real_engine(
    checkpoint: Path, foreign_client: Callable[..., Any], front: str
) -> None:
    async def scenario(engine: Any) -> None:
        app = ServerApp(engine, name="tiny", version="0")
        port, _ = await app.start("127.0.0.1", 0, None)
        found = await foreign_client(f"127.0.0.1:{port}", 16_000)
        assert (found["whole"]["code"], found["whole"]["usage"]["prompt_tokens"]) == ("OK", 12)
        assert [found[name]["code"] for name in ("cancelled", "late")] == ["CANCELLED", "DEADLINE_EXCEEDED"]
        assert found["refused"]["code"] == "INVALID_ARGUMENT"
        await app.handler.calls.wait_until_none()
        assert await app.drain(10) == 0
        assert 0 < engine.load().generated_tokens < 16_000

    run_served(front, checkpoint, scenario, "--buckets", "16", "--max-context", "16384", "--slots", "32768")
