"""Load over gRPC, against a server made up here."""

import time
from concurrent import futures

import grpc
import numpy as np
import pytest

from benchmarks.free_ports import free_ports
from jaxserve.simulate.workload import Job, Workload
from server.commands.bench import load_generator
from server.proto.jaxserve.v1 import inference_pb2 as pb
from server.proto.jaxserve.v1.inference_pb2_grpc import InferenceServicer, add_InferenceServicer_to_server


class FakeService(InferenceServicer):
    """Generates 0, 1, 2, ...; a token too few for 7, and none for 99."""

    def __init__(self):
        self.seen = []

    def GenerateStream(self, request, context):
        self.seen.append(request)
        if request.max_tokens == 99:
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "the queue is full")
        for token in range(request.max_tokens - (request.max_tokens == 7)):
            yield pb.GenerateResponse(token_ids=[token])

    def GetModel(self, request, context):
        return pb.GetModelResponse(name="made up", max_context=64)


@pytest.fixture
def server():
    running, service = grpc.server(futures.ThreadPoolExecutor(8)), FakeService()
    add_InferenceServicer_to_server(service, running)
    port = running.add_insecure_port("127.0.0.1:0")
    running.start()
    yield f"127.0.0.1:{port}", service.seen
    running.stop(None).wait()


def job(max_tokens: int, arrival: float = 0.0) -> Job:
    return Job(arrival=arrival, prompt=np.arange(1, 4, dtype=np.int32), max_tokens=max_tokens)


def test_the_model_of_a_server(server):
    address, _ = server
    assert load_generator.get_model(address) == pb.GetModelResponse(name="made up", max_context=64)


def test_a_server_of_something_else():
    running = grpc.server(futures.ThreadPoolExecutor(1))
    port = running.add_insecure_port("127.0.0.1:0")
    running.start()
    with pytest.raises(ValueError, match=r"does not serve jaxserve\.v1\.Inference"):
        load_generator.get_model(f"127.0.0.1:{port}")
    running.stop(None).wait()


def test_every_request_is_sent_and_its_tokens_are_timed(server):
    address, seen = server
    ended = []
    workload = Workload(name="x", jobs=(job(5), job(1, 0.02), job(3, 0.01)))
    began = time.monotonic()
    sent = load_generator.send(address, workload, ended.append)
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
    sent = load_generator.send(address, workload, lambda done: None)
    assert [outcome.error for outcome in sent.outcomes] == [
        "RESOURCE_EXHAUSTED: the queue is full",
        "the stream ended after 6 of 7 tokens",
        None,
    ]


def test_address_without_a_server():
    with pytest.raises(ValueError, match="no server answers at"):
        load_generator.get_model(f"127.0.0.1:{free_ports(1)[0]}", timeout=0.2)
