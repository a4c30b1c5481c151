"""The page, and what it asks for."""

from __future__ import annotations

import re
from collections.abc import Callable

import httpx2 as httpx

from server.auth import ApiKeys
from server.http.app import _PAGE
from tests.server.conftest import Served
from tests.server.http.http_calls import ask

FIELDS = _PAGE.split("const FIELDS = [")[1].split("];")[0]


def test_the_page_holds_everything_it_needs(serve_http: Callable[..., None]) -> None:
    async def scenario(it: Served) -> None:
        async with httpx.AsyncClient(base_url=it.url, timeout=None) as client:
            page = await client.get("/")
        assert page.headers["content-type"].startswith("text/html")
        assert "default-src 'none'" in page.headers["content-security-policy"]
        assert "src=" not in page.text
        assert "href=" not in page.text

    serve_http(scenario)


def test_no_two_elements_have_one_id() -> None:
    made = re.findall(r'^  \["(\w+)", |, \["(\w+)", "', FIELDS, re.MULTILINE)
    fields = [first or second for first, second in made]
    assert {"max_tokens", "stop", "key", "seed"} <= set(fields)
    ids = [*re.findall(r'\bid="(\w+)"', _PAGE), *fields]
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'\$\("(\w+)"\)', _PAGE)) <= set(ids)


def test_colors_are_those_of_the_scheme() -> None:
    style, _, rest = _PAGE.partition("</style>")
    light, dark = (set(re.findall(r"--(\w+):", part)) for part in style.split("prefers-color-scheme: dark"))
    assert light - dark == {"queue"}  # which is read on both
    assert not re.findall(r"#[0-9a-f]{3,6}\b", rest)
    assert "<main>" in rest


def test_live_tells_what_was_served_since(serve_http: Callable[..., None]) -> None:
    async def scenario(it: Served) -> None:
        async with httpx.AsyncClient(base_url=it.url, timeout=None) as client:

            async def live(since: str) -> dict:
                answer = await client.get("/live", params={"since": since})
                assert answer.status_code == 200
                return answer.json()

            first = await live("0")
            assert (first["about"]["model"], first["about"]["rows"], first["next"]) == ("echo", 4, 0)
            await ask(it, "/v1/completions", model="echo", prompt="ab", max_tokens=5)
            await it.until(lambda: it.engine.iterations >= 5)
            told = await live("0")
            assert len(told["iterations"]) == told["next"] == 5
            assert told["latencies"]["first_token"] is not None
            assert told["latencies"]["gap"] is not None
            later = await live("3")
            assert (len(later["iterations"]), "about" in later) == (2, False)
            for strange in ("4711", "-1", "x", "9" * 30):  # the first: from before the server was started again
                assert (await live(strange))["about"]["model"] == "echo"

    serve_http(scenario)


def test_with_keys_the_page_alone_is_open(serve_http: Callable[..., None], tmp_path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text('[me]\nkeys = ["a-key-of-mine"]\n')
    keys.chmod(0o600)

    async def scenario(it: Served) -> None:
        async with httpx.AsyncClient(base_url=it.url, timeout=None) as client:
            calls = (("GET", "/"), ("POST", "/"), ("HEAD", "/live"), ("GET", "/live"), ("GET", "/health"))
            statuses = [(await client.request(*call)).status_code for call in calls]
            assert statuses == [200, 401, 401, 401, 200]
            allowed = {"authorization": "Bearer a-key-of-mine"}
            assert (await client.get("/live", headers=allowed)).status_code == 200

    serve_http(scenario, app={"keys": ApiKeys(keys)})
