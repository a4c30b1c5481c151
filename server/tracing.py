"""Optional OpenTelemetry traces: a span for every request, with queue, prefill and decode."""

from __future__ import annotations

import logging
import time

from jaxserve.generation.completion import Completion
from server.call import Observer, RequestTiming


class Tracing(Observer):
    """Sends a span for each ended request, a child of the span in the caller's traceparent.

    OpenTelemetry's environment variables set the endpoint (OTEL_EXPORTER_OTLP_ENDPOINT and others).

    Raises:
      ValueError: the libraries are not installed.
    """

    def __init__(self, *, model: str) -> None:
        try:
            from opentelemetry import trace  # pyright: ignore[reportMissingImports]
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter  # pyright: ignore[reportMissingImports]
            from opentelemetry.sdk.resources import Resource  # pyright: ignore[reportMissingImports]
            from opentelemetry.sdk.trace import TracerProvider  # pyright: ignore[reportMissingImports]
            from opentelemetry.sdk.trace.export import BatchSpanProcessor  # pyright: ignore[reportMissingImports]
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator  # pyright: ignore[reportMissingImports]
        except ImportError as missing:
            raise ValueError(f"--traces needs OpenTelemetry: pip install 'jaxserve[otel]' ({missing})") from None
        self._context_of, self._server = trace.set_span_in_context, trace.SpanKind.SERVER
        self._propagator = TraceContextTextMapPropagator()
        self._provider = TracerProvider(resource=Resource.create({"service.name": "jaxserve"}))
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        self._tracer = self._provider.get_tracer("jaxserve")
        self._model = model
        self._epoch = time.time_ns() - time.monotonic_ns()  # from monotonic time to wall-clock time

    def ended(self, timing: RequestTiming, completion: Completion) -> None:
        end, reason = time.monotonic(), completion.finish_reason
        attributes = {
            "gen_ai.request.model": self._model,
            "gen_ai.request.max_tokens": timing.request.sampling.max_tokens,
            "gen_ai.usage.input_tokens": completion.prompt_tokens,
            "gen_ai.usage.output_tokens": len(completion.token_ids),
            "gen_ai.response.finish_reasons": [reason.value if reason is not None else "cut short"],
            "jaxserve.request_id": timing.call.id,
            "jaxserve.protocol": timing.call.protocol,
            "jaxserve.cached_tokens": completion.cached_tokens,
        }
        start = timing.call.arrival
        caller = self._propagator.extract({"traceparent": timing.call.traceparent})
        whole = self._tracer.start_span(
            "generate", context=caller, kind=self._server, start_time=self._at(start), attributes=attributes
        )
        parts = (
            ("queue", start, timing.began or end),
            ("prefill", timing.began, timing.first_token or end),
            ("decode", timing.first_token, end),
        )
        for name, begin, until in parts:
            if begin is not None:
                part = self._tracer.start_span(name, context=self._context_of(whole), start_time=self._at(begin))
                part.end(self._at(until))
        whole.end(self._at(end))

    def close(self) -> None:
        """Sends the remaining spans, without a word if nobody takes them."""
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        self._provider.shutdown()

    def _at(self, monotonic: float) -> int:
        return self._epoch + int(monotonic * 1e9)
