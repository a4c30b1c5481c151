"""What the server counts: the names, that the figures are true, and what dashboards make of them."""

import asyncio
import dataclasses
import json
import re
import urllib.request
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2 as httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.free_ports import free_ports
from jaxserve.config import EngineConfig
from jaxserve.iteration import Chunk
from server.live import LiveStats
from server.proto.jaxserve.v1 import inference_pb2 as pb
from tests.server.conftest import Served, some_traffic
from tests.server.fake_engine import WAIT_SECONDS, made_up_record

Serve = Callable[..., None]
DASHBOARD = Path(__file__).parents[2] / "deploy" / "grafana" / "jaxserve.json"


def samples(text: bytes) -> dict[tuple[str, str], float]:
    """Values of the model's metrics by sample name and the label besides model_name and engine (or "")."""
    found = {}
    for family in text_string_to_metric_families(text.decode()):
        if family.name.startswith(("process_", "http_")):
            continue
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("model_name") == "echo"
            assert labels.pop("engine", None) == ("0" if family.name.startswith("vllm:") else None)
            found[sample.name, next(iter(labels.values()), "")] = sample.value
    return found


def test_figures_are_true_under_both_names(serve: Serve) -> None:
    async def scenario(it: Served) -> None:
        await some_traffic(it)
        load, found = it.engine.load(), samples(it.app.metrics.text())
        for ours, theirs, value in (
            ("jaxserve_requests_running", "vllm:num_requests_running", 0),
            ("jaxserve_requests_waiting", "vllm:num_requests_waiting", 0),
            ("jaxserve_generated_tokens_total", "vllm:generation_tokens_total", 4 + 4 + 4 + 2),
            ("jaxserve_time_to_first_token_seconds_count", "vllm:time_to_first_token_seconds_count", 4),
            ("jaxserve_inter_token_latency_seconds_count", "vllm:inter_token_latency_seconds_count", 3 + 3 + 3 + 1),
            ("jaxserve_e2e_request_latency_seconds_count", "vllm:e2e_request_latency_seconds_count", 4),
            ("jaxserve_queue_seconds_count", "vllm:request_queue_time_seconds_count", 4),
            ("jaxserve_prefill_seconds_count", "vllm:request_prefill_time_seconds_count", 4),
            ("jaxserve_decode_seconds_count", "vllm:request_decode_time_seconds_count", 4),
            ("jaxserve_request_prompt_tokens_sum", "vllm:request_prompt_tokens_sum", 3 + 3 + 4 + 2 + 1),
            ("jaxserve_request_generation_tokens_sum", "vllm:request_generation_tokens_sum", 4 + 4 + 4 + 2),
            ("jaxserve_request_generation_tokens_sum", "vllm:request_max_num_generation_tokens_sum", 4 + 4 + 4 + 2),
        ):
            assert found[ours, ""] == found[theirs, ""] == value, ours
        assert found["jaxserve_prompt_tokens_total", ""] == load.prompt_tokens
        assert found["vllm:prompt_tokens_total", ""] == load.prompt_tokens + load.cached_tokens
        sums = {name: found[f"jaxserve_{name}_seconds_sum", ""] for name in ("queue", "prefill", "decode")}
        first, last = (found[f"jaxserve_{n}_seconds_sum", ""] for n in ("time_to_first_token", "e2e_request_latency"))
        assert (sums["queue"] + sums["prefill"], first + sums["decode"]) == pytest.approx((first, last))
        assert found["vllm:request_params_max_tokens_count", ""] == found["vllm:request_prompt_tokens_count", ""]
        assert found["vllm:kv_cache_usage_perc", ""] == 0
        assert found["jaxserve_outstanding_seconds", ""] == 0
        config = (
            'vllm:cache_config_info{block_size="16",cache_dtype="float32",enable_prefix_caching="True",engine="0",'
            'model_name="echo",num_gpu_blocks="512"} 1.0'
        )
        assert config in it.app.metrics.text().decode()
        assert found["jaxserve_healthy", ""] == 1
        assert found["jaxserve_iteration_seconds_count", ""] == load.iterations
        assert found["jaxserve_iteration_seconds_sum", ""] == pytest.approx(0.005 * load.iterations)
        assert found["jaxserve_iteration_host_seconds_sum", ""] == pytest.approx(0.001 * load.iterations)
        ended = {label: value for (name, label), value in found.items() if name == "jaxserve_requests_total"}
        assert ended == {"length": 2, "stop": 1, "eos": 1, "error": 1, "aborted": 0, "cut short": 0}
        theirs = {label: value for (name, label), value in found.items() if name == "vllm:request_success_total"}
        assert theirs == {"length": 2, "stop": 2, "error": 1, "abort": 0}
        assert found["jaxserve_refusals_total", "invalid"] == found["jaxserve_refusals_total", "failed"] == 1
        assert found["jaxserve_refusals_total", "rate limited"] == 0

    serve(scenario, poison=frozenset(b"!"))


def test_gauges_are_of_this_moment(serve: Serve) -> None:
    async def scenario(it: Served) -> None:
        calls = [it.stub.Generate(pb.GenerateRequest(prompt="abc", max_tokens=9)) for _ in range(6)]
        await it.until(lambda: it.engine.load().waiting == 6)
        await it.step()
        found = samples(it.app.metrics.text())
        assert found["vllm:engine_sleep_state", "awake"] == 1
        assert (found["vllm:num_requests_running", ""], found["vllm:num_requests_waiting", ""]) == (4, 2)
        assert found["vllm:kv_cache_usage_perc", ""] == 16 / 8192
        assert found["jaxserve_outstanding_tokens", ""] == 6 * 12 - 4
        seconds = it.app.handler.admission.outstanding_seconds()
        assert found["jaxserve_outstanding_seconds", ""] == seconds > 0
        it.engine.release()
        for call in calls:
            await call
        it.engine.fail()
        await it.until(lambda: not it.engine.is_healthy)
        failed = samples(it.app.metrics.text())
        assert failed["jaxserve_healthy", ""] == 0
        assert ("vllm:engine_sleep_state", "awake") not in failed  # which a board shows as down

    serve(scenario, held=True)


def test_a_scraper_has_a_port_of_its_own(serve: Serve) -> None:
    async def scenario(it: Served) -> None:
        (port,) = free_ports(1)
        end = it.app.metrics.serve("127.0.0.1", port)
        try:

            def scrape() -> bytes:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=WAIT_SECONDS) as answer:
                    return answer.read()

            assert samples(await asyncio.to_thread(scrape))["jaxserve_healthy", ""] == 1
        finally:
            end()

    serve(scenario)


def test_the_engines_thread_does_nothing_but_append(serve: Serve) -> None:
    async def scenario(it: Served) -> None:
        recorders = [
            each for each in it.engine._recorders if not isinstance(getattr(each, "__self__", None), LiveStats)
        ]
        assert [each.__name__ for each in recorders] == ["append"]

    serve(scenario)


def test_the_dashboard_asks_for_metrics_that_exist(serve: Serve) -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    asked = {
        name
        for panel in dashboard["panels"]
        for target in panel["targets"]
        for name in re.findall(r"\b(?:jaxserve_|vllm:)\w+", target["expr"])
    }

    async def scenario(it: Served) -> None:
        await some_traffic(it)
        known = {name for name, _ in samples(it.app.metrics.text())}
        assert asked <= known
        assert len(asked) > 20
        assert "jaxserve_healthy" in known
        assert dashboard["templating"]["list"][1]["query"] == "label_values(jaxserve_healthy, model_name)"

    serve(scenario, poison=frozenset(b"!"))


# What vLLM's dashboards ask for, read on 2026-11-27: the four of tools/generate_grafana_dashboards.py (0b9faa41), its
# status board (98b042cf) and its older single one (4b5c627c). Left out is what is shown only while a feature of vLLM's
# is on: LoRA, multimodal and external caches, connectors, offloading, block residency, estimates of FLOPs,
# operations of sleep mode. By metric, the label by which a panel selects, and its values.
VLLM_PANELS: dict[str, tuple[str, tuple[str, ...]]] = {
    **dict.fromkeys(
        (
            "vllm:request_success_total",
            "vllm:prompt_tokens_total",
            "vllm:generation_tokens_total",
            "vllm:num_requests_running",
            "vllm:num_requests_waiting",
            "vllm:kv_cache_usage_perc",
            "vllm:num_preemptions_total",
            "vllm:prefix_cache_hits_total",
            "vllm:prefix_cache_queries_total",
            "vllm:prompt_tokens_cached_total",
            "vllm:cache_config_info",
            "vllm:spec_decode_num_drafts_total",
            "vllm:spec_decode_num_draft_tokens_total",
            "vllm:spec_decode_num_accepted_tokens_total",
            "vllm:request_max_num_generation_tokens_sum",
            "process_start_time_seconds",
            "process_cpu_seconds_total",
            "process_resident_memory_bytes",
            "process_open_fds",
            "process_max_fds",
        ),
        ("", ()),
    ),
    **{
        f"vllm:{name}_bucket": ("le", ("+Inf",))
        for name in (
            "inter_token_latency_seconds",
            "e2e_request_latency_seconds",
            "request_queue_time_seconds",
            "request_prefill_time_seconds",
            "request_decode_time_seconds",
            "iteration_tokens_total",
            "request_prompt_tokens",
            "request_generation_tokens",
            "request_prefill_kv_computed_tokens",
        )
    },
    "vllm:time_to_first_token_seconds_bucket": ("le", ("0.1", "0.25", "0.5", "0.75", "1.0", "2.5", "5.0", "10.0")),
    "vllm:request_time_per_output_token_seconds_bucket": (
        "le",
        ("0.025", "0.05", "0.075", "0.1", "0.15", "0.2", "0.3", "0.5"),
    ),
    "vllm:prompt_tokens_by_source_total": ("source", ("local_compute", "local_cache_hit", "external_kv_transfer")),
    "vllm:prompt_tokens_cached_by_source_total": ("source", ("device", "host")),
    "vllm:num_requests_waiting_by_reason": ("reason", ("capacity", "deferred")),
    "vllm:engine_sleep_state": ("sleep_state", ("awake", "discard_all")),
    "http_requests_total": ("handler", ("/v1/completions",)),
    "http_request_duration_seconds_count": ("handler", ("/v1/completions",)),
}


def test_vllms_dashboards_have_no_empty_panel(serve: Serve) -> None:
    async def scenario(it: Served) -> None:
        await some_traffic(it)
        async with httpx.AsyncClient(base_url=it.url) as client:
            for body in ({"prompt": "abc"}, {"prompt": "abc", "top_p": 2}):
                await client.post("/v1/completions", json=body)
        every = [
            sample
            for family in text_string_to_metric_families(it.app.metrics.text().decode())
            for sample in family.samples
        ]
        for name, (label, values) in VLLM_PANELS.items():
            found = [sample for sample in every if sample.name == name]
            assert found, name
            assert set(values) <= {sample.labels.get(label) for sample in found}, name
            if name.startswith("vllm:"):
                assert {"model_name", "engine"} <= found[0].labels.keys(), name
        calls = {each.labels["status"]: each.value for each in every if each.name == "http_requests_total"}
        assert calls == {"2xx": 1, "4xx": 1}

    serve(scenario, http_port=0, poison=frozenset(b"!"))


def test_tokens_of_the_prefix_cache_are_told_by_source(serve: Serve) -> None:
    async def scenario(it: Served) -> None:
        load = it.engine.load
        changed = {"prompt_tokens": 30, "cached_tokens": 50, "host_cache_loaded": 2}
        it.engine.load = lambda: dataclasses.replace(load(), **changed)
        found = samples(it.app.metrics.text())
        sources = {label: value for (name, label), value in found.items() if name.endswith("tokens_by_source_total")}
        assert sources == {"local_compute": 30, "local_cache_hit": 50, "external_kv_transfer": 0}
        tiers = {label: value for (name, label), value in found.items() if name.endswith("cached_by_source_total")}
        assert tiers == {"device": 50 - 2 * 16, "host": 2 * 16}
        assert found["vllm:prompt_tokens_total", ""] == found["vllm:prefix_cache_queries_total", ""] == 80
        assert found["vllm:prefix_cache_hits_total", ""] == found["vllm:prompt_tokens_cached_total", ""] == 50

    serve(scenario)


def test_drafts_are_told_by_position(serve: Serve) -> None:
    async def scenario(it: Served) -> None:
        metrics = it.app.metrics
        timing: Any = SimpleNamespace()
        for count in (1, 3, 2, 4):  # an iteration's tokens: those of a draft, and one
            metrics.tokens(timing, count, 0.01)
        plan = made_up_record(0, [Chunk(0, 5, 4, 4), Chunk(1, 5, 1, 1)], waiting=0, finished_at=0.0).plan
        record = made_up_record(0, [], waiting=0, finished_at=0.0)._replace(
            plan=dataclasses.replace(plan, drafts=(1, 2, 3))
        )
        metrics._iterations.append(record)
        found = samples(metrics.text())
        assert found["vllm:spec_decode_num_drafts_total", ""] == 1
        by_position = {label: value for (name, label), value in found.items() if "per_pos" in name}
        assert by_position == {"0": 3, "1": 2, "2": 1, "3": 0}

    serve(scenario, config=EngineConfig(max_rows=4, speculate="ngram", speculate_tokens=4))
