"""Features of docs/features.md on the real engine: what callers ask for reaches the model, and its answers them.

Answers are compared with those of `Engine.generate`.
"""

import io
import re
import shutil
import statistics
import time
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import httpx2 as httpx
import pytest
import tokenizers

from jaxserve.config import EngineConfig
from jaxserve.engine import Engine
from jaxserve.text.chat_template import ChatTemplate
from jaxserve.text.tokenizer import Tokenizer
from server.proto.inference import open_inference_grpc_pb2 as kserve_pb
from server.proto.inference.open_inference_grpc_pb2_grpc import GRPCInferenceServiceStub
from server.proto.jaxserve.v1 import inference_pb2 as pb
from server.proto.jaxserve.v1.inference_pb2_grpc import InferenceStub
from server.proto.vllm.grpc.engine import vllm_engine_pb2 as vllm_pb
from server.proto.vllm.grpc.engine.vllm_engine_pb2_grpc import VllmEngineStub
from tests.docs.conftest import served
from tests.server.fake_engine import EOS, WAIT_SECONDS

CONFIG = EngineConfig(buckets=(4, 16), slots=8192, max_rows=4, max_context=4096, compilation_cache=None)
TEMPLATE = "{{ messages[0].content }}{{ style }}{{ reasoning_effort }}"
# Drawn, since the likeliest tokens of this model are the same after most prompts.
ASKED: dict[str, Any] = {"max_tokens": 12, "temperature": 1.5, "seed": 5, "ignore_eos": True}
LONG = 4000  # tokens: more than the engine computes until its caller leaves


class Callers:
    """Clients of a server on an engine.

    Attributes:
      engine: the server's.
      grpc: the channel of `jaxserve` and of the other two stubs.
    """

    def __init__(self, engine: Engine, port: int, http_port: int) -> None:
        self.engine, self.grpc = engine, grpc.insecure_channel(f"127.0.0.1:{port}")
        self.jaxserve: Any = InferenceStub(self.grpc)
        self.vllm: Any = VllmEngineStub(self.grpc)
        self.kserve: Any = GRPCInferenceServiceStub(self.grpc)
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{http_port}", timeout=WAIT_SECONDS)

    def post(self, path: str, **body: Any) -> Any:
        answer = self.http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def complete(self, **body: Any) -> Any:
        """The only choice of a completion, with its token ids."""
        return self.post("/v1/completions", **ASKED | body, return_token_ids=True)["choices"][0]

    def answer(self, prompt: Any, **fields: Any) -> Any:
        """What Python gets."""
        return self.engine.generate([prompt], **ASKED | fields)[0]

    def metric(self, name: str) -> float:
        (found,) = re.findall(rf"^{name}{{.*}} (\S+)$", self.http.get("/metrics").text, re.MULTILINE)
        return float(found)

    def await_idle(self) -> None:
        """Returns once the engine holds no request and no slot."""
        until = time.monotonic() + WAIT_SECONDS
        while self.engine.load().running or self.engine.load().slots_used:
            assert time.monotonic() < until
            time.sleep(0.005)


@pytest.fixture(scope="module")
def it(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callers]:
    """Its tokenizer puts an end of sequence before a prompt, as a checkpoint's files may say."""
    folder = tmp_path_factory.mktemp("features")
    shutil.copytree(checkpoint, folder, dirs_exist_ok=True)
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(  # pyright: ignore[reportAttributeAccessIssue]
        single="<eos> $A", special_tokens=[("<eos>", EOS)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    with Engine.from_checkpoint(folder, CONFIG) as engine:
        assert engine.tokenizer is not None
        engine.tokenizer.chat_template = ChatTemplate(TEMPLATE, {})
        with served(engine, kv_events=True) as (port, http_port):
            callers = Callers(engine, port, http_port)
            with callers.grpc, callers.http:
                yield callers


def test_prompts_reach_the_model_as_they_are_asked_for(it: Callers) -> None:
    text, ids = "a prompt", [EOS, *b"a prompt"]
    plain = it.complete(prompt=text)
    answer = it.answer(ids_of(ids))
    assert (plain["prompt_token_ids"], plain["token_ids"], plain["text"]) == (ids, [*answer.token_ids], answer.text)
    bare = it.complete(prompt=text, add_special_tokens=False)
    assert (bare["prompt_token_ids"], bare["token_ids"]) == (ids[1:], [*it.answer(ids_of(ids[1:])).token_ids])
    assert bare["token_ids"] != plain["token_ids"]
    cut = it.complete(prompt=text, truncate_prompt_tokens=3)
    assert (cut["prompt_token_ids"], cut["token_ids"]) == (ids[-3:], [*it.answer(ids_of(ids[-3:])).token_ids])
    assert it.complete(prompt=ids)["token_ids"] == plain["token_ids"]
    echoed = it.complete(prompt=text, echo=True)
    assert echoed["text"] == text + plain["text"]
    drawn = {"max_new_tokens": 12, "do_sample": True, "temperature": 1.5, "seed": 5}
    parameters = drawn | {"return_full_text": True, "truncate": 3}
    full = it.post("/generate", inputs=text, parameters=parameters)["generated_text"]
    assert full.startswith(text)
    assert it.answer(ids_of(ids[-3:]), ignore_eos=False).text == full.removeprefix(text)


def ids_of(ids: list[int]) -> dict[str, Any]:
    return {"prompt_token_ids": ids}


def test_special_tokens_are_shown_on_request(it: Callers) -> None:
    asked = {"prompt": "a", "max_tokens": 2, "logit_bias": {str(EOS): 100}}
    assert it.complete(**asked)["text"] == ""
    assert it.complete(**asked, skip_special_tokens=False)["text"] == "<eos><eos>"


def test_template_variables_reach_the_template(it: Callers) -> None:
    def prompt(**fields: Any) -> bytes:
        messages = [{"role": "user", "content": "Hi"}]
        answer = it.post("/v1/chat/completions", messages=messages, **ASKED, return_token_ids=True, **fields)
        choice, ids = answer["choices"][0], answer["prompt_token_ids"]
        assert choice["token_ids"] == [*it.answer(ids_of(ids)).token_ids]
        return bytes(ids)

    assert prompt() == b"Hi"
    assert prompt(chat_template_kwargs={"style": ", you"}) == b"Hi, you"
    assert prompt(reasoning_effort="low") == b"Hilow"


def test_a_deadline_ends_a_request_in_the_engine(it: Callers) -> None:
    before = it.engine.load().generated_tokens
    with pytest.raises(grpc.RpcError) as late:
        it.jaxserve.Generate(pb.GenerateRequest(prompt="a", max_tokens=LONG, ignore_eos=True), timeout=0.2)
    assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    it.await_idle()
    assert it.engine.load().generated_tokens - before < LONG


def test_two_callers_may_send_the_same_request_id(it: Callers) -> None:
    def ask(prompt: str) -> pb.GenerateResponse:
        return it.jaxserve.Generate(pb.GenerateRequest(prompt=prompt, request_id="mine", **ASKED | {"max_tokens": 40}))

    with ThreadPoolExecutor(4) as callers:
        for prompt, answer in zip("abcd", callers.map(ask, "abcd"), strict=True):
            assert answer.request_id == "mine"
            assert [*answer.token_ids] == [*it.answer(prompt, max_tokens=40).token_ids]


def test_models_have_names(it: Callers) -> None:
    assert it.complete(prompt="a", model="demo")["finish_reason"] == "length"
    refused = it.http.post("/v1/completions", json={"prompt": "a", "model": "other"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (404, "model")
    assert [each["id"] for each in it.http.get("/v1/models").json()["data"]] == ["demo"]


def test_prefixes_are_shared_under_the_same_salt_only(it: Callers) -> None:
    def cached(salt: str) -> int:
        request = pb.GenerateRequest(prompt="a prompt that fills some blocks of slots " * 3, cache_salt=salt, **ASKED)
        return it.jaxserve.Generate(request).usage.cached_tokens

    assert [cached("mine"), cached("yours")] == [0, 0]
    assert [cached("mine") > 0, cached("yours") > 0, cached("others'")] == [True, True, 0]


def test_scores_are_the_models_own(it: Callers) -> None:
    first, second = "It was", [" a", " what it was"]
    answer = it.post("/score", text_1=first, text_2=second)
    for text, found in zip(second, answer["data"], strict=True):
        logprobs = it.answer(first + text, prompt_logprobs=0).prompt_logprobs
        assert found["score"] == pytest.approx(statistics.mean(logprobs[-len(text) :]), abs=1e-3)
    ranked = it.post("/rerank", query="Who was it?", documents=["It was he.", "Nobody", "Good morning"])["results"]
    scores = [each["relevance_score"] for each in ranked]
    assert scores == sorted(scores, reverse=True)
    assert len({*scores}) == 3


def test_texts_are_tokenized_and_back(it: Callers) -> None:
    (ids, text) = ([EOS, *"Grüße".encode()], "Grüße")
    assert it.post("/tokenize", prompt=text)["tokens"] == ids
    assert [*it.jaxserve.Tokenize(pb.TokenizeRequest(text=text)).token_ids] == ids
    assert it.post("/detokenize", tokens=ids[1:])["prompt"] == text
    assert it.jaxserve.Detokenize(pb.DetokenizeRequest(token_ids=ids[1:])).text == text


def test_open_inference_protocol(it: Callers) -> None:
    answer = it.answer("a")
    tensor = {"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["a"]}
    whole = it.post("/v2/models/demo/infer", inputs=[tensor], parameters=ASKED)
    assert whole["outputs"][0]["data"] == [answer.text]

    def ask(prompt: str, name: str) -> kserve_pb.ModelInferRequest:
        contents = kserve_pb.InferTensorContents(bytes_contents=[prompt.encode()])
        kind = kserve_pb.ModelInferRequest.InferInputTensor
        inputs = [kind(name="text_input", datatype="BYTES", shape=[1], contents=contents)]
        given = {
            "max_tokens": kserve_pb.InferParameter(int64_param=12),
            "temperature": kserve_pb.InferParameter(double_param=1.5),
            "seed": kserve_pb.InferParameter(int64_param=5),
            "ignore_eos": kserve_pb.InferParameter(bool_param=True),
        }
        return kserve_pb.ModelInferRequest(id=name, model_name="demo", inputs=inputs, parameters=given)

    texts = {"a": b"", "b": b""}
    for message in it.kserve.ModelStreamInfer(iter([ask("a", "a"), ask("b", "b")])):
        assert not message.error_message
        response = message.infer_response
        texts[response.id] += text_of(response)
    assert {name: text.decode() for name, text in texts.items()} == {"a": answer.text, "b": it.answer("b").text}


def text_of(response: kserve_pb.ModelInferResponse) -> bytes:
    (text,) = [each for each in response.outputs if each.name == "text_output"]
    return b"".join(text.contents.bytes_contents)


def test_a_subscriber_reads_the_blocks_of_the_prefix_cache(it: Callers) -> None:
    it.await_idle()
    prompt = "a prompt that nobody else sends, of some blocks of slots"
    ids, start = [EOS, *prompt.encode()], last_sequence(it)
    request = vllm_pb.SubscribeKvEventsRequest(start_sequence_number=start)
    call = it.vllm.SubscribeKvEvents(request)
    call.initial_metadata()
    it.answer(prompt)
    known: list[int] = []
    size = it.engine.report.block_size
    while len(known) < len(ids) // size * size:
        for event in next(call).events:
            for block in event.stored.blocks:
                assert block.block_size == size
                known += block.token_ids
    assert known[: len(ids) // size * size] == ids[: len(ids) // size * size]
    call.cancel()


def last_sequence(it: Callers) -> int:
    """The newest number of a batch, after one that this makes."""
    call = it.vllm.SubscribeKvEvents(vllm_pb.SubscribeKvEventsRequest())
    call.initial_metadata()
    it.answer(f"something new: {time.monotonic_ns()} " * 3)
    last = next(call).sequence_number
    call.cancel()
    return last


def test_a_router_tokenizes_with_the_fetched_files(it: Callers, tmp_path: Path) -> None:
    archive = b"".join(part.data for part in it.vllm.GetTokenizer(vllm_pb.GetTokenizerRequest()))
    zipfile.ZipFile(io.BytesIO(archive)).extractall(tmp_path)
    fetched, own = Tokenizer.from_directory(tmp_path), it.engine.tokenizer
    assert fetched is not None
    assert own is not None
    assert fetched.encode("a router's text") == own.encode("a router's text")


def test_abort_ends_the_calls_of_an_id_and_no_other(it: Callers) -> None:
    def ask(name: str, most: int) -> Any:
        sampling = vllm_pb.SamplingParams(**ASKED | {"max_tokens": most})
        return it.vllm.Generate(
            vllm_pb.GenerateRequest(request_id=name, text="a", sampling_params=sampling, stream=True)
        )

    before = it.engine.load().generated_tokens
    doomed, other = [ask("doomed", LONG), ask("doomed", LONG)], ask("other", 20)
    for call in doomed:
        next(call)
    it.vllm.Abort(vllm_pb.AbortRequest(request_ids=["doomed"]))
    for call in doomed:
        *_, last = call
        assert last.complete.finish_reason == "abort"
    *_, last = other
    assert [*last.complete.output_ids] == [*it.answer("a", max_tokens=20).token_ids]
    it.await_idle()
    assert it.engine.load().generated_tokens - before < 2 * LONG


def test_metrics_count_what_the_engine_did(it: Callers) -> None:
    names = ("jaxserve_prompt_tokens_total", "jaxserve_generated_tokens_total", "jaxserve_iterations_total")
    before = [it.metric(name) for name in names]
    it.complete(prompt="not cached", add_special_tokens=False, cache_salt="metrics")
    prompt, generated, iterations = (it.metric(name) - then for name, then in zip(names, before, strict=True))
    assert (prompt, generated) == (len("not cached"), 12)
    assert iterations >= 12
    assert it.metric("vllm:generation_tokens_total") == it.metric(names[1])
    assert it.metric("jaxserve_compiled_after_ready_total") == it.engine.load().compiled_after_ready
