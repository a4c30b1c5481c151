"""Spans of a request, where OpenTelemetry is installed, and a clear word where it is not."""

import os
import sys
from collections.abc import Callable

import pytest

from server.proto.jaxserve.v1 import inference_pb2 as pb
from server.tracing import Tracing
from tests.server.conftest import Served


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
        tracing.close()

    serve(scenario)
    spans = {span.name: span for span in memory.get_finished_spans()}
    assert set(spans) == {"generate", "queue", "prefill", "decode"}
    whole = spans["generate"]
    assert whole.attributes["gen_ai.usage.output_tokens"] == 4
    assert whole.attributes["jaxserve.request_id"] == "mine"
    assert whole.start_time == spans["queue"].start_time
    assert spans["queue"].end_time == spans["prefill"].start_time <= spans["prefill"].end_time
    assert spans["prefill"].end_time == spans["decode"].start_time <= spans["decode"].end_time == whole.end_time
    assert all(spans[name].parent.span_id == whole.context.span_id for name in ("queue", "prefill", "decode"))
