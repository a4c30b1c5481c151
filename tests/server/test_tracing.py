"""Spans of a request, where OpenTelemetry is installed, and a clear word where it is not."""

import asyncio
import os
import sys
from collections.abc import Callable
from typing import Any

import httpx2 as httpx
import pytest

from server.proto.jaxserve.v1 import inference_pb2 as pb
from server.tracing import Tracing
from tests.server.conftest import Served

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_without_the_libraries_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(ValueError, match=r"pip install 'jaxserve\[otel\]'"):
        Tracing(model="echo")


def test_a_request_is_a_span_of_queue_prefill_and_decode(
    serve: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not os.environ.get("CI"):  # which installs it
        pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import (  # pyright: ignore[reportMissingImports]
        InMemorySpanExporter,
    )

    memory = InMemorySpanExporter()
    monkeypatch.setattr("opentelemetry.exporter.otlp.proto.http.trace_exporter.OTLPSpanExporter", lambda: memory)

    async def scenario(it: Served) -> None:
        tracing = Tracing(model="echo")
        it.app.handler.observers.append(tracing)
        await it.stub.Generate(pb.GenerateRequest(prompt="abc", max_tokens=4, request_id="mine"))
        await it.app.handler.calls.wait_until_none()
        tracing._provider.force_flush()
        alone.extend(memory.get_finished_spans())
        memory.clear()
        request = pb.GenerateRequest(prompt="abc", max_tokens=1)
        await it.stub.Generate(request, metadata=(("traceparent", PARENT),))
        async with httpx.AsyncClient(base_url=it.url) as client:
            body = {"prompt": "abc", "max_tokens": 1}
            await client.post("/v1/completions", json=body, headers={"traceparent": PARENT})
            await client.post("/v1/completions", json=body, headers={"traceparent": "nonsense"})
        await it.app.handler.calls.wait_until_none()
        tracing.close()

    alone: list[Any] = []
    serve(scenario, http_port=0)
    *children, stranger = [span for span in memory.get_finished_spans() if span.name == "generate"]
    assert len(children) == 2
    for span in children:
        assert f"{span.parent.trace_id:032x}-{span.parent.span_id:016x}" == PARENT[3:52]
        assert span.context.trace_id == span.parent.trace_id
    assert stranger.parent is None
    assert {span.kind.name for span in (*children, stranger)} == {"SERVER"}
    spans = {span.name: span for span in alone}
    assert spans["generate"].parent is None
    assert set(spans) == {"generate", "queue", "prefill", "decode"}
    whole = spans["generate"]
    assert whole.attributes["gen_ai.usage.output_tokens"] == 4
    assert whole.attributes["jaxserve.request_id"] == "mine"
    assert whole.start_time == spans["queue"].start_time
    assert spans["queue"].end_time == spans["prefill"].start_time <= spans["prefill"].end_time
    assert spans["prefill"].end_time == spans["decode"].start_time <= spans["decode"].end_time == whole.end_time
    assert all(spans[name].parent.span_id == whole.context.span_id for name in ("queue", "prefill", "decode"))


@pytest.mark.long  # the exporter tries for 7 s
def test_a_collector_that_is_gone_is_not_complained_about(
    serve: Callable[..., None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if not os.environ.get("CI"):
        pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")

    async def scenario(it: Served) -> None:
        tracing = Tracing(model="echo")
        it.app.handler.observers.append(tracing)
        await it.stub.Generate(pb.GenerateRequest(prompt="abc", max_tokens=1))
        await it.app.handler.calls.wait_until_none()
        await asyncio.to_thread(tracing.close)

    serve(scenario)
    assert not [record for record in caplog.records if record.levelname in ("ERROR", "WARNING")], caplog.text
