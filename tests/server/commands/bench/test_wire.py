"""Load over the wire, against a server made up here whose service is known by its reflection only."""

import time
from concurrent import futures

import grpc
import numpy as np
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from grpc_reflection.v1alpha import reflection

from jaxserve.config import EngineConfig
from jaxserve.simulate.workload import Job, Workload
from server.commands.bench import serve, wire

INT, STRING, BOOL, DOUBLE, MESSAGE = 5, 9, 8, 1, 11


def build_pool() -> descriptor_pool.DescriptorPool:
    """A service of the same name, with the messages that load generation needs."""
    file = descriptor_pb2.FileDescriptorProto(name="made_up.proto", package="jaxserve.v1", syntax="proto3")
    for name, fields in (
        ("TokenIds", [("ids", INT, 3, "")]),
        (
            "GenerateRequest",
            [
                ("prompt_token_ids", MESSAGE, 1, ".jaxserve.v1.TokenIds"),
                ("max_tokens", INT, 1, ""),
                ("temperature", DOUBLE, 1, ""),
                ("ignore_eos", BOOL, 1, ""),
                ("request_id", STRING, 1, ""),
            ],
        ),
        ("GenerateResponse", [("token_ids", INT, 3, "")]),
        ("GetModelRequest", []),
        ("GetModelResponse", [("name", STRING, 1, ""), ("max_context", INT, 1, "")]),
    ):
        message = file.message_type.add(name=name)
        for number, (field, kind, label, type_name) in enumerate(fields, start=1):
            message.field.add(name=field, number=number, type=kind, label=label, type_name=type_name or None)
    service = file.service.add(name="Inference")
    for name, streams in (("GenerateStream", True), ("GetModel", False)):
        stem = name.removesuffix("Stream")
        service.method.add(
            name=name,
            input_type=f".jaxserve.v1.{stem}Request",
            output_type=f".jaxserve.v1.{stem}Response",
            server_streaming=streams,
        )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return pool


@pytest.fixture
def server():
    pool = build_pool()

    def message(name):
        return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"jaxserve.v1.{name}"))

    seen = []

    def generate(request, context):
        seen.append(request)
        if request.max_tokens == 99:
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "the queue is full")
        for token in range(request.max_tokens - (request.max_tokens == 7)):
            yield message("GenerateResponse")(token_ids=[token])

    handlers = {
        "GenerateStream": grpc.unary_stream_rpc_method_handler(
            generate,
            request_deserializer=message("GenerateRequest").FromString,
            response_serializer=lambda answer: answer.SerializeToString(),
        ),
        "GetModel": grpc.unary_unary_rpc_method_handler(
            lambda request, context: message("GetModelResponse")(name="made up", max_context=64),
            request_deserializer=message("GetModelRequest").FromString,
            response_serializer=lambda answer: answer.SerializeToString(),
        ),
    }
    running = grpc.server(futures.ThreadPoolExecutor(8))
    running.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(wire.SERVICE, handlers),))
    reflection.enable_server_reflection((wire.SERVICE, reflection.SERVICE_NAME), running, pool=pool)
    port = running.add_insecure_port("127.0.0.1:0")
    running.start()
    yield f"127.0.0.1:{port}", seen
    running.stop(None).wait()


def job(max_tokens: int, arrival: float = 0.0) -> Job:
    return Job(arrival=arrival, prompt=np.arange(1, 4, dtype=np.int32), max_tokens=max_tokens)


def test_the_service_is_known_by_reflection(server):
    address, _ = server
    known = wire.methods(address)
    assert set(known) == {"GenerateStream", "GetModel"}
    assert wire.call(address, known["GetModel"]) == {"name": "made up", "max_context": 64}


def test_every_request_is_sent_and_its_tokens_are_timed(server):
    address, seen = server
    ended = []
    workload = Workload(name="x", jobs=(job(5), job(1, 0.02), job(3, 0.01)))
    began = time.monotonic()
    sent = wire.send(address, workload, wire.methods(address), ended.append)
    assert [len(outcome.token_times) for outcome in sent.outcomes] == [5, 1, 3]
    assert ended == [1, 2, 3]
    assert all(outcome.error is None for outcome in sent.outcomes)
    assert all(outcome.prompt_tokens == 3 for outcome in sent.outcomes)
    for outcome in sent.outcomes:
        assert began <= outcome.arrival <= outcome.token_times[0]
        assert outcome.token_times == sorted(outcome.token_times)
    gaps = [outcome.arrival - sent.outcomes[0].arrival for outcome in sent.outcomes]
    assert gaps == pytest.approx([0.0, 0.02, 0.01])
    assert sent.late >= 0
    assert sorted(request.max_tokens for request in seen) == [1, 3, 5]
    assert all(request.ignore_eos and list(request.prompt_token_ids.ids) == [1, 2, 3] for request in seen)


def test_refusals_and_short_answers_are_failures(server):
    address, _ = server
    workload = Workload(name="x", jobs=(job(99), job(7), job(2)))
    sent = wire.send(address, workload, wire.methods(address), lambda done: None)
    assert [outcome.error for outcome in sent.outcomes] == [
        "RESOURCE_EXHAUSTED: the queue is full",
        "the stream ended after 6 of 7 tokens",
        None,
    ]


def test_an_address_where_nobody_answers():
    with pytest.raises(ValueError, match="no server answers at"):
        wire.methods(f"127.0.0.1:{serve.free_port()}", timeout=0.2)


def test_engine_flags_describe_a_configuration():
    assert serve.engine_flags(EngineConfig()) == []
    assert serve.engine_flags(EngineConfig(compilation_cache=None)) == ["--compilation-cache", "off"]
    config = EngineConfig(
        max_rows=8, buckets=(16, 32), target_tpot=0.1, prefix_cache=False, scoring=False, compilation_cache="/tmp/x"
    )
    assert " ".join(serve.engine_flags(config)) == (
        "--max-rows 8 --buckets 16,32 --target-tpot 0.1s --prefix-cache off --no-scoring --compilation-cache /tmp/x"
    )
    config = EngineConfig(deterministic=True, slot_policy="reserve")
    assert " ".join(serve.engine_flags(config)) == "--slot-policy reserve --deterministic"
