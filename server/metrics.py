"""Metrics in Prometheus' text format, under jaxserve_ names and vllm: names."""

from __future__ import annotations

import contextlib
from collections import Counter, deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Histogram, ProcessCollector, generate_latest, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from jaxserve.generation.completion import Completion
from jaxserve.request import FinishReason
from server import ports, vllm_metrics
from server.call import Observer, RequestTiming
from server.engine_client import EngineNotReady
from server.errors import ApiError, ErrorKind
from server.http_metrics import HttpMetrics

if TYPE_CHECKING:
    from jaxserve.stats import IterationRecord
    from server.engine_client import EngineClient

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_HELD = 20_000  # iterations kept until `drain` counts them; more than an engine runs in between
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 10, 30, 60, 120, 300)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5, 5, 10)
_HOST_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 50_000)

# Field of Load -> (our name, what it is, vllm's name)
_GAUGES = {
    "running": ("requests_running", "Requests in the batch.", "num_requests_running"),
    "waiting": ("requests_waiting", "Requests in the queue.", "num_requests_waiting"),
    "waiting_tokens": ("waiting_tokens", "Prompt tokens of the requests in the queue.", None),
    "outstanding_tokens": (
        "outstanding_tokens",
        "Most tokens still to compute for live requests, prompts and answers.",
        None,
    ),
    "slots_used": ("slots_used", "Slots that requests hold.", None),
    "slots_cached": ("slots_cached", "Slots with cached prefixes that no request uses now.", None),
    "slots_total": ("slots", "Slots in total.", None),
    "host_cache_bytes": ("host_cache_bytes", "Bytes of cached blocks in host memory.", None),
    "host_cache_blocks": ("host_cache_blocks", "Cached blocks in host memory.", None),
}
_COUNTERS = {
    "iterations": ("iterations", "Iterations run.", None),
    "prompt_tokens": ("prompt_tokens", "Prompt tokens computed.", None),
    "generated_tokens": ("generated_tokens", "Tokens generated.", "generation_tokens"),
    "cached_tokens": ("cached_tokens", "Prompt tokens found in the prefix cache.", "prefix_cache_hits"),
    "drafted_tokens": ("drafted_tokens", "Tokens drafted by speculation.", "spec_decode_num_draft_tokens"),
    "accepted_tokens": (
        "accepted_tokens",
        "Drafted tokens that were chosen.",
        "spec_decode_num_accepted_tokens",
    ),
    "preemptions": (
        "preemptions",
        "Preemptions: a request loses its slots and is computed again later.",
        "num_preemptions",
    ),
    "host_seconds": ("host_seconds", "Host time of all iterations, in seconds.", None),
    "bucket_seconds": (
        "bucket_seconds",
        "Device time of all iterations, as the sum of their buckets' measured costs, in seconds.",
        None,
    ),
    "padding_seconds": ("padding_seconds", "The part of jaxserve_bucket_seconds_total that went into padding.", None),
    "compiled_after_ready": (
        "compiled_after_ready",
        "Programs compiled after the server was ready; above 0 is a defect.",
        None,
    ),
    "host_cache_stored": ("host_cache_stored_blocks", "Evicted blocks copied to host memory.", None),
    "host_cache_loaded": ("host_cache_loaded_blocks", "Blocks copied back from host memory.", None),
    "host_cache_corrupt": (
        "host_cache_corrupt_blocks",
        "Blocks that came back from host memory with a wrong checksum and were computed again.",
        None,
    ),
    "strangers": ("strangers", "Connections to host 0 that did not know the secret of the hosts.", None),
}
_HISTOGRAMS: dict[str, tuple[Any, ...]] = {  # the text, the buckets, and vLLM's names
    "time_to_first_token_seconds": (
        "Time from arrival to first token (TTFT).",
        _SECONDS,
        "time_to_first_token_seconds",
    ),
    "inter_token_latency_seconds": ("Time between two tokens of a request.", _SECONDS, "inter_token_latency_seconds"),
    "e2e_request_latency_seconds": ("Time from arrival to last token.", _SECONDS, "e2e_request_latency_seconds"),
    "queue_seconds": ("Time from arrival until the request joins the batch.", _SECONDS, "request_queue_time_seconds"),
    "prefill_seconds": (
        "Time from joining the batch to the first token.",
        _SECONDS,
        "request_prefill_time_seconds",
    ),
    "decode_seconds": ("Time from the first token to the last.", _SECONDS, "request_decode_time_seconds"),
    "time_per_output_token_seconds": (
        "Mean time between two tokens of a request; 0 for one token.",
        _TOKEN_SECONDS,
        "request_time_per_output_token_seconds",
    ),
    "request_prompt_tokens": ("Prompt tokens of a request.", _TOKENS, "request_prompt_tokens"),
    "request_computed_tokens": (
        "Prompt tokens of a request that were not in the prefix cache.",
        _TOKENS,
        "request_prefill_kv_computed_tokens",
    ),
    "request_generation_tokens": (
        "Generated tokens of a request.",
        _TOKENS,
        "request_generation_tokens",
        "request_max_num_generation_tokens",  # of the samples of a call, each of which is a request here
    ),
    "request_max_tokens": ("Most tokens that a request asks for.", _TOKENS, "request_params_max_tokens"),
    "iteration_seconds": ("Time of one iteration, host and device.", _SECONDS),
    "iteration_host_seconds": ("Host time of one iteration.", _HOST_SECONDS),
    "iteration_tokens": ("Tokens of one iteration, without padding.", _TOKENS, "iteration_tokens_total"),
}
_FINISHED = {
    FinishReason.LENGTH: "length",
    FinishReason.EOS: "stop",
    FinishReason.STOP: "stop",
    FinishReason.ERROR: "error",
    FinishReason.ABORTED: "abort",
    None: "abort",
}


class Metrics(Observer):
    """Counts requests and the iterations of an engine.

    Args:
      model: the value of the label model_name.
      healthy: whether the engine serves.
      outstanding_seconds: estimated seconds of work that live requests bring.

    Attributes:
      http: counts the calls over HTTP.
    """

    def __init__(
        self,
        engine: EngineClient,
        *,
        model: str,
        healthy: Callable[[], bool],
        outstanding_seconds: Callable[[], float],
    ) -> None:
        self._engine, self._model, self._healthy = engine, model, healthy
        self._outstanding_seconds = outstanding_seconds
        self._registry = CollectorRegistry()
        self.http = HttpMetrics(self._registry)
        ProcessCollector(registry=self._registry)  # of this process; the engine's is another
        self._drafts = 0
        self._accepted: Counter[int] = Counter()  # drafted tokens that were chosen, by their place in the draft
        self._iterations: deque[IterationRecord] = deque(maxlen=_HELD)
        self._histograms = {
            # Not in the registry: `collect` yields it under both of its names.
            name: Histogram(f"jaxserve_{name}", text, ("model_name",), registry=None, buckets=buckets)
            for name, (text, buckets, *_) in _HISTOGRAMS.items()
        }
        self._labelled = {name: histogram.labels(model) for name, histogram in self._histograms.items()}
        self._ended: Counter[FinishReason | None] = Counter(dict.fromkeys(_FINISHED, 0))
        self._refusals: Counter[ErrorKind] = Counter(dict.fromkeys(ErrorKind, 0))
        self._registry.register(self)  # pyright: ignore[reportArgumentType]
        engine.record(self._iterations.append)  # the engine's thread does no more than this for metrics

    def _observe(self, name: str, value: float) -> None:
        self._labelled[name].observe(value)

    # As an Observer

    def started(self, timing: RequestTiming) -> None:
        self._observe("request_prompt_tokens", len(timing.request.prompt))
        self._observe("request_max_tokens", timing.request.sampling.max_tokens)

    def tokens(self, timing: RequestTiming, count: int, gap: float | None) -> None:
        if gap is None:
            assert timing.first_token is not None
            self._observe("time_to_first_token_seconds", timing.first_token - timing.call.arrival)
            if timing.began is not None:
                self._observe("queue_seconds", timing.began - timing.call.arrival)
                self._observe("prefill_seconds", timing.first_token - timing.began)
        else:
            self._observe("inter_token_latency_seconds", gap / count)
            self._accepted.update(range(count - 1))  # an iteration's tokens: those of the draft, and one

    def ended(self, timing: RequestTiming, completion: Completion) -> None:
        self._ended[completion.finish_reason] += 1
        self._observe("request_generation_tokens", len(completion.token_ids))
        if (
            completion.finish_reason is not None
            and completion.finish_reason.is_answer
            and timing.last_token is not None
        ):
            assert timing.first_token is not None
            self._observe("e2e_request_latency_seconds", timing.last_token - timing.call.arrival)
            decode, gaps = timing.last_token - timing.first_token, len(completion.token_ids) - 1
            self._observe("decode_seconds", decode)
            self._observe("time_per_output_token_seconds", decode / gaps if gaps > 0 else 0.0)
            self._observe("request_computed_tokens", completion.prompt_tokens - completion.cached_tokens)

    def refused(self, call_id: str, refusal: ApiError) -> None:
        self._refusals[refusal.kind] += 1

    # For scrapers

    def drain(self) -> None:
        """Counts the iterations since the last call. Thread-safe; call it twice a second or more."""
        for _ in range(len(self._iterations)):
            try:
                record = self._iterations.popleft()
            except IndexError:  # another thread has counted the rest
                return
            host = record.schedule_s + record.pack_s + record.launch_s + record.complete_s
            self._observe("iteration_host_seconds", host)
            self._observe("iteration_seconds", host + record.wait_s)
            self._observe("iteration_tokens", record.num_tokens)
            if record.plan.drafts:
                self._drafts += sum(chunk.samples > 1 for chunk in record.plan.chunks)

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def serve(self, host: str, port: int) -> Callable[[], None]:
        """Serves /metrics on a separate port, without keys; returns a function that stops it.

        Raises:
          OSError: the port cannot be opened; the message names its address.
        """
        with ports.opening(host, port):
            server, thread = start_http_server(port, host, self._registry)

        def end() -> None:
            server.shutdown()
            server.server_close()
            thread.join()

        return end

    def describe(self) -> list[Metric]:
        """Returns nothing. Otherwise the registry would collect once to learn the names."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yields all metrics for prometheus_client."""
        self.drain()
        load = self._engine.load()
        held = load.slots_used / max(1, load.slots_total)  # no slots yet while the engine starts
        families = [(GaugeMetricFamily, field, known) for field, known in _GAUGES.items()]
        families += [(CounterMetricFamily, field, known) for field, known in _COUNTERS.items()]
        for family, field, (name, text, alias) in families:
            yield self._figure(family, f"jaxserve_{name}", text, getattr(load, field))
            if alias is not None:
                yield self._figure(family, f"vllm:{alias}", text, getattr(load, field))
        yield self._figure(GaugeMetricFamily, "jaxserve_healthy", "Whether the engine serves.", float(self._healthy()))
        text = "Seconds that the outstanding tokens take with all rows in use, at the costs measured at start."
        yield self._figure(GaugeMetricFamily, "jaxserve_outstanding_seconds", text, self._outstanding_seconds())
        text = "Share of the slots that requests hold."
        yield self._figure(GaugeMetricFamily, "vllm:kv_cache_usage_perc", text, held)
        with contextlib.suppress(EngineNotReady):
            report, prefix_cache = self._engine.report, self._engine.config.prefix_cache
            yield vllm_metrics.cache_config(self._model, report, prefix_cache=prefix_cache)
            accepted = [self._accepted[place] for place in range(self._engine.config.draft_tokens)]
            yield from vllm_metrics.families(
                self._model,
                load,
                healthy=self._healthy(),
                block_size=report.block_size,
                drafts=self._drafts,
                accepted=accepted,
            )
        for name, histogram in self._histograms.items():
            for metric in histogram.collect():
                yield metric
                for alias in _HISTOGRAMS[name][2:]:
                    yield vllm_metrics.renamed(metric, f"vllm:{alias}")
        yield from self._by_reason()

    def _figure(self, kind: Any, name: str, text: str, value: float) -> Metric:
        more = vllm_metrics.ENGINE if name.startswith("vllm:") else {}
        family = kind(name, text, labels=("model_name", *more))
        family.add_metric((self._model, *more.values()), value)
        return family

    def _by_reason(self) -> Iterator[Metric]:
        requests = CounterMetricFamily(
            "jaxserve_requests", "Requests that ended, by how.", labels=("model_name", "finish_reason")
        )
        successes = CounterMetricFamily(
            "vllm:request_success", "Requests that ended, by how.", labels=("model_name", "engine", "finished_reason")
        )
        theirs: Counter[str] = Counter()
        for reason, name in _FINISHED.items():
            requests.add_metric((self._model, reason.value if reason is not None else "cut short"), self._ended[reason])
            theirs[name] += self._ended[reason]
        for name, count in theirs.items():
            successes.add_metric((self._model, *vllm_metrics.ENGINE.values(), name), count)
        refusals = CounterMetricFamily(
            "jaxserve_refusals", "Calls that ended without an answer, by why.", labels=("model_name", "reason")
        )
        for kind, count in self._refusals.items():
            refusals.add_metric((self._model, kind.value), count)
        yield from (requests, successes, refusals)
