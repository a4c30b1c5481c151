"""What an engine tells its front: all of it, without waiting, in messages of bounded size."""

import queue
import re
import socket
import threading
from typing import Any

import pytest

from jaxserve.request import FinishReason, Request, TokenEvent
from jaxserve.sampling_params import SamplingParams
from server.engine_process import frames, messages
from server.engine_process import messages_pb2 as engine_pb
from server.engine_process import outbox as outbox_module
from server.engine_process.frames import Splitter
from server.engine_process.outbox import Outbox
from tests.server.fake_engine import FakeEngine, byte_tokenizer


@pytest.mark.parametrize("max_body", [frames.MAX_BODY, 4096])
def test_engine_never_waits_for_the_front(monkeypatch: pytest.MonkeyPatch, max_body: int) -> None:
    """However much there is to be told in the end: one message may hold it or not."""
    monkeypatch.setattr(frames, "MAX_BODY", max_body)
    monkeypatch.setattr(outbox_module, "end_process", lambda code: pytest.fail(f"ended with {code}"))
    ours, theirs = socket.socketpair()
    engine = FakeEngine(tokenizer=byte_tokenizer(), max_context=10**6)
    with ours, theirs, engine:
        outbox = Outbox(theirs, engine)
        outbox.start()
        engine.submit(Request(request_id="a", prompt=(97,), sampling=SamplingParams(max_tokens=3000)), outbox.put)
        engine.wait_until(lambda: engine.iterations >= 3000)  # none of which was read: the socket was full long before
        reader = _reading(ours)
        outbox.let_engine_end()
        outbox.close()
        theirs.close()
        tokens = [token for events in iter(reader.get, None) for event in events for token in event.token_ids]
    assert tokens == [97] * 3000


def test_too_large_an_event_ends_only_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "MAX_BODY", 4096)
    monkeypatch.setattr(outbox_module, "end_process", lambda code: pytest.fail(f"ended with {code}"))
    ours, theirs = socket.socketpair()
    engine = FakeEngine(tokenizer=byte_tokenizer(), max_context=10**6)
    with ours, theirs, engine:
        outbox = Outbox(theirs, engine)
        alike = ((-1.0, None),)
        events = [TokenEvent("a", (1,), (0.5,)), TokenEvent("b", prompt_logprobs=alike * 2000)]
        outbox._held.put([*events, TokenEvent("c", prompt_logprobs=alike * 200), TokenEvent("d", (2,), (0.5,))])
        reader = _reading(ours)
        outbox.start()
        outbox.let_engine_end()
        outbox.close()
        theirs.close()
        told = [event for events in iter(reader.get, None) for event in events]
    assert [event.request_id for event in told] == ["a", "b", "c", "d"]
    assert [len(event.prompt_logprobs) for event in told] == [0, 0, 200, 0]
    assert [event.finish_reason for event in told] == [None, FinishReason.ERROR, None, None]
    assert re.search(r"is \d+ bytes, more than the 4096 that one message holds; ask for fewer", told[1].error or "")


def _reading(channel: socket.socket) -> queue.SimpleQueue[Any]:
    """Events that come, then None."""
    found: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def read() -> None:
        splitter = Splitter()
        while data := channel.recv(2**16):
            for body in splitter.feed(data):
                _, message = messages.parse(engine_pb.FromEngine, body)
                found.put(messages.decode_iterations(message.iterations).events)
        found.put(None)

    threading.Thread(target=read, daemon=True).start()
    return found
