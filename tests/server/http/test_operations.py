"""What those who run a server rely on over HTTP: request ids, names of metrics, the description of the calls."""

import shutil
import subprocess
from collections.abc import Callable

import httpx2 as httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.server.conftest import Served
from tests.server.http.http_calls import ask

Serve = Callable[..., None]


@pytest.mark.parametrize("path", ["/v1/completions", "/generate"])
def test_a_request_id_of_the_caller_is_kept(serve_http: Serve, path: str) -> None:
    body = {"prompt": "abc", "inputs": "abc"}

    async def scenario(it: Served) -> None:
        async with httpx.AsyncClient(base_url=it.url) as client:
            answer = await client.post(path, json=body, headers={"x-request-id": "trace/7:a=b"})
            assert answer.headers["x-request-id"] == "trace/7:a=b"
            if path == "/v1/completions":
                assert answer.json()["id"] == "cmpl-trace/7:a=b"
            refused = await client.post(path, json={}, headers={"x-request-id": "mine"})
            assert (refused.status_code // 100, refused.headers["x-request-id"]) == (4, "mine")

    serve_http(scenario)


@pytest.mark.parametrize("path", ["/v1/completions", "/generate"])
def test_an_improper_request_id_is_replaced(serve_port: Serve, path: str) -> None:
    async def scenario(it: Served) -> None:
        body, made = {"prompt": "abc", "inputs": "abc"}, set()
        async with httpx.AsyncClient(base_url=it.url) as client:
            for wrong in ("a b", "x" * 129, "\u00e9".encode(), '"', ""):
                answer = await client.post(path, json=body, headers={"x-request-id": wrong})
                assert len(answer.headers["x-request-id"]) == 16
                made.add(answer.headers["x-request-id"])
        assert len(made) == 5

    serve_port(scenario)


def test_names_of_metrics_follow_prometheus_rules(serve_http: Serve) -> None:
    async def scenario(it: Served) -> None:
        await ask(it, "/v1/completions", prompt="abc", max_tokens=3)
        async with httpx.AsyncClient(base_url=it.url) as client:
            text = (await client.get("/metrics")).text
        ours = [family for family in text_string_to_metric_families(text) if family.name.startswith("jaxserve_")]
        assert {"jaxserve_slots", "jaxserve_iterations", "jaxserve_healthy"} <= {family.name for family in ours}
        for family in ours:
            assert family.documentation
            assert not family.name.endswith(("_total", "_count", "_sum", "_bucket")), family.name
            if family.type == "counter":
                assert {sample.name for sample in family.samples} <= {f"{family.name}_total"}
            else:
                assert not [sample.name for sample in family.samples if sample.name.endswith("_total")]

    serve_http(scenario)


@pytest.mark.clients
def test_promtool_has_no_complaint(serve_port: Serve) -> None:
    """Prometheus' own check of /metrics; vLLM's names are as vLLM has them."""
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("no promtool is installed (it is in Debian's package prometheus)")

    async def scenario(it: Served) -> None:
        await ask(it, "/v1/completions", prompt="abc", max_tokens=3)
        async with httpx.AsyncClient(base_url=it.url) as client:
            text = (await client.get("/metrics")).text
        checked = subprocess.run([promtool, "check", "metrics"], input=text, capture_output=True, text=True)
        complaints = checked.stderr.splitlines()
        assert any(line.startswith("vllm:") for line in complaints)  # whose colons it minds: it has read them
        assert [line for line in complaints if not line.startswith("vllm:")] == []

    serve_port(scenario)


def test_calls_are_described(serve_http: Serve) -> None:
    async def scenario(it: Served) -> None:
        async with httpx.AsyncClient(base_url=it.url) as client:
            told = (await client.get("/openapi.json")).json()
            assert (told["openapi"][:2], told["info"]["version"]) == ("3.", "1.2.3")
            schemas = told["components"]["schemas"]
            for path, method, name in (
                ("/v1/completions", "post", "CompletionBody"),
                ("/v1/chat/completions", "post", "ChatBody"),
                ("/", "post", "TgiBody"),
                ("/v2/models/{name}/versions/{version}/infer", "post", "InferBody"),
            ):
                schema = told["paths"][path][method]["requestBody"]["content"]["application/json"]["schema"]
                assert schema == {"$ref": f"#/components/schemas/{name}"}
                assert name in schemas
            assert {"temperature", "messages", "stream"} <= schemas["ChatBody"]["properties"].keys()
            (parameter,) = told["paths"]["/v1/models/{name}"]["get"]["parameters"]
            assert (parameter["name"], parameter["in"]) == ("name", "path")
            for path, calls in told["paths"].items():
                for method in calls:
                    answer = await client.request(
                        method, path.replace("{name}", "echo").replace("{version}", "1"), json={}
                    )
                    assert answer.status_code != 405, (method, path)
        names = str(told).split("#/components/schemas/")[1:]
        assert {name.split("'")[0] for name in names} <= schemas.keys()

    serve_http(scenario)
