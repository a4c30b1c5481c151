"""Keys: which are known, when a file counts, and that nothing is reached without one."""

import asyncio
import hashlib
import http.client
import json
import os
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from starlette.types import Scope

from server import auth
from server.auth import ApiKeys, KeyInterceptor, KeyMiddleware
from server.proto.jaxserve.v1 import inference_pb2 as pb
from tests.server.fake_engine import WAIT_SECONDS

KEYS = f"""
[plain]
keys = ["first-key-of-plain", "second-key-of-plain"]
rate = 10
[hashed]
keys = ["sha256:{hashlib.sha256(b"key-of-hashed").hexdigest()}"]
share = 2.5
"""


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "keys.toml"
    path.write_text(KEYS)
    return path


def name_of(keys: ApiKeys, key: str) -> str | None:
    tenant = keys.tenant_of(key.encode())
    return tenant and tenant.name


def test_keys_name_their_tenants(path: Path) -> None:
    keys = ApiKeys(path)
    assert [name_of(keys, key) for key in ("first-key-of-plain", "second-key-of-plain", "key-of-hashed")] == [
        "plain",
        "plain",
        "hashed",
    ]
    assert (keys.tenants["plain"].rate, keys.tenants["plain"].burst, keys.tenants["plain"].share) == (10, 10, 1)
    assert (keys.tenants["hashed"].rate, keys.tenants["hashed"].share) == (None, 2.5)
    digest = "sha256:" + hashlib.sha256(b"key-of-hashed").hexdigest()
    for wrong in ("", "first-key", "first-key-of-plain ", digest, "first-key-of-plain" + "x" * 2000):
        assert keys.tenant_of(wrong.encode()) is None


def test_every_key_is_compared_whichever_it_is(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys, compared = ApiKeys(path), []
    monkeypatch.setattr(auth.hmac, "compare_digest", lambda a, b: compared.append(a) or a == b)
    counts = []
    for key in (b"first-key-of-plain", b"key-of-hashed", b"unknown"):
        compared.clear()
        keys.tenant_of(key)
        counts.append(len(compared))
    assert counts == [3, 3, 3]


def test_key_file_is_read_again(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    keys = ApiKeys(path, clock=clock)
    path.write_text('[plain]\nkeys = ["the-new-key"]\n')
    assert name_of(keys, "first-key-of-plain") == "plain"  # it is not looked at for every call
    clock.now += 2
    assert name_of(keys, "the-new-key") == "plain"
    assert name_of(keys, "first-key-of-plain") is None
    for broken in ("[plain]\nkeys = [", ""):
        path.write_text(broken)
        for _ in range(3):
            clock.now += 2
            assert name_of(keys, "the-new-key") == "plain"
    os.unlink(path)
    clock.now += 2
    assert name_of(keys, "the-new-key") == "plain"
    assert len(caplog.records) == 3


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "it has no tenant"),
        ("a = 1", "a is outside a tenant's table"),
        ("[a]", "a has no keys"),
        ('[a]\nkeys = ["short"]', "a key of a is not a string of 8 to 1024 bytes"),
        ('[a]\nkeys = ["sha256:abcdef"]', "begins with sha256: but 64 hex digits do not follow"),
        (
            '[a]\nkeys = ["long-enough"]\nrates = 3',
            "a has rates; the fields are keys, share, rate, burst, shared_prefixes, operator, max_priority",
        ),
        *(
            (
                f'[a]\nkeys = ["long-enough"]\nmax_priority = {value}',
                f"a has max_priority {said}; it must be a whole number of at least 0",
            )
            for value, said in (("-1", "-1"), ("1.5", "1.5"), ("true", "True"))
        ),
        (
            '[a]\nkeys = ["long-enough"]\nshared_prefixes = 1',
            "a has shared_prefixes 1; it must be true or false",
        ),
        ('[a]\nkeys = ["long-enough"]\nrate = -1', "a has rate -1; it must be a number above 0"),
        ('[a]\nkeys = ["long-enough"]\n[b]\nkeys = ["long-enough"]', "b and a have the same key"),
        ("[a", "not TOML"),
    ],
)
def test_wrong_key_file(path: Path, text: str, told: str) -> None:
    path.write_text(text)
    with pytest.raises(ValueError, match=r"keys\.toml") as caught:
        ApiKeys(path)
    assert told in str(caught.value)
    assert not any(secret in str(caught.value) for secret in ("short", "abcdef", "long-enough"))


# On the way in


def test_an_rpc_without_a_key_is_refused_but_for_health(path: Path) -> None:
    seen = []

    async def echo(request: bytes, context: Any) -> bytes:
        seen.append(auth.current.get().name)
        return request

    async def scenario() -> None:
        server = grpc.aio.server(interceptors=[KeyInterceptor(ApiKeys(path), ["grpc.health.v1.Health"])])
        checks = health.aio.HealthServicer()  # pyright: ignore[reportAttributeAccessIssue]
        health_pb2_grpc.add_HealthServicer_to_server(checks, server)
        handlers = {"Echo": grpc.unary_unary_rpc_method_handler(echo)}
        server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("x.Y", handlers)])
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            health_stub: Any = health_pb2_grpc.HealthStub(channel)
            await health_stub.Check(health_pb2.HealthCheckRequest())
            for method in ("/x.Y/Echo", "/x.Y/None", "/grpc.health.v1.HealthX/Check", "/anything"):
                for metadata in (
                    (),
                    (("authorization", "Bearer nobodys-key"),),
                    (("authorization", "key-of-hashed"),),
                    (("authorization", "Basic key-of-hashed"),),
                    (("authorization-bin", b"Bearer key-of-hashed"),),
                ):
                    with pytest.raises(grpc.aio.AioRpcError) as caught:
                        await channel.unary_unary(method)(b"a", metadata=metadata)
                    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
                streamed = channel.stream_stream(method)()
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await streamed.read()
                assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
            assert not seen
            for metadata in (("authorization", "bearer key-of-hashed"), ("x-api-key", "first-key-of-plain")):
                assert await channel.unary_unary("/x.Y/Echo")(b"a", metadata=(metadata,)) == b"a"
        assert seen == ["hashed", "plain"]
        assert auth.current.get() is auth.ANYBODY
        await server.stop(None)

    asyncio.run(asyncio.wait_for(scenario(), WAIT_SECONDS))


def test_the_server_asks_for_keys_and_counts_rates(serve: Any, path: Path) -> None:
    path.write_text(KEYS.replace("rate = 10", "rate = 0.001"))

    async def scenario(it: Any) -> None:
        status = await health_pb2_grpc.HealthStub(it.channel).Check(health_pb2.HealthCheckRequest())
        assert status.status == health_pb2.HealthCheckResponse.SERVING
        request = pb.GenerateRequest(prompt="ab", max_tokens=1)
        for method in (it.stub.Generate, it.stub.GetLoad, it.stub.GetModel, it.stub.Tokenize):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await method(request)
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        seen, submit = [], it.engine.submit
        it.engine.submit = lambda request, sink: (seen.append(request), submit(request, sink))[1]
        for _ in range(3):
            assert (await it.stub.Generate(request, metadata=[("x-api-key", "key-of-hashed")])).text == "a"
        assert {(each.tenant, each.share) for each in seen} == {("hashed", 2.5)}
        limited = [("authorization", "Bearer first-key-of-plain")]
        await it.stub.Generate(request, metadata=limited)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await it.stub.Generate(request, metadata=limited)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "plain is limited to 0.001 requests a second" in str(caught.value.details())

        def get(target: str, **headers: str) -> int:
            connection = http.client.HTTPConnection("127.0.0.1", it.http_port, timeout=WAIT_SECONDS)
            connection.request("GET", target, headers=headers)
            status = connection.getresponse().status
            connection.close()
            return status

        for target, expected in (("/health", 200), ("/metrics", 401), ("/v1/models", 401), ("/no/such", 401)):
            assert await asyncio.to_thread(get, target) == expected
        for target in ("/metrics", "/v1/models"):
            assert await asyncio.to_thread(get, target, Authorization="Bearer key-of-hashed") == 200

    serve(scenario, http_port=0, app={"keys": ApiKeys(path)})


def ask(app: Any, path: str, *headers: tuple[str, str], method: str = "GET") -> list[dict[str, Any]]:
    """What an ASGI app sends for a request of this raw path."""
    sent = []
    scope = {
        "type": "http",
        "method": method,
        "path": "/health",  # as decoded and cut by whoever serves: nothing may trust it
        "raw_path": path.encode(),
        "headers": [(name.encode(), value.encode()) for name, value in headers],
    }

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    asyncio.run(app(scope, None, send))
    return sent


def test_a_path_without_a_key_is_refused_but_for_open_ones(path: Path) -> None:
    reached = []

    async def inner(scope: Scope, receive: Any, send: Any) -> None:
        reached.append((scope.get("raw_path"), auth.current.get().name))

    app = KeyMiddleware(inner, ApiKeys(path), [("GET", "/health")])
    for target in (
        "/v1/models",
        "/health/",
        "//health",
        "/%68ealth",
        "/health;x",
        "/Health",
        "/health/../v1/models",
        "",
    ):
        for headers in ((), (("authorization", "Bearer nobodys-key"),), (("authorization", "key-of-hashed"),)):
            start, body = ask(app, target, *headers)
            assert start["status"] == 401
            assert (b"www-authenticate", b"Bearer") in start["headers"]
            assert b"API key" in body["body"]
    assert ask(app, "/health", method="POST")[0]["status"] == 401
    assert not reached
    ask(app, "/health")
    ask(app, "/v1/models", ("authorization", "Bearer key-of-hashed"))
    assert reached == [(b"/health", ""), (b"/v1/models", "hashed")]


def test_cached_prefixes_belong_to_a_tenant(serve: Any, path: Path) -> None:
    lines = [f'[{name}]\nkeys = ["key-of-{name}"]\n' for name in ("a", "b", "c", "d")]
    path.write_text("".join([*lines[:2], *(line + "shared_prefixes = true\n" for line in lines[2:])]))

    async def scenario(it: Any) -> None:
        async def cached(name: str, salt: str = "") -> int:
            request = pb.GenerateRequest(prompt="abc", max_tokens=1, cache_salt=salt)
            answer = await it.stub.Generate(request, metadata=[("x-api-key", f"key-of-{name}")])
            return answer.usage.cached_tokens

        assert [await cached("a"), await cached("a"), await cached("b"), await cached("b")] == [0, 2, 0, 2]
        assert [await cached("c"), await cached("d"), await cached("a", "x"), await cached("d", "x")] == [0, 2, 0, 0]
        for salt in ("a", '["a", ""]', '["a"]', 'a", "'):  # no salt makes one tenant another
            assert [await cached("b", salt), await cached("d", salt)] == [0, 0]

    serve(scenario, app={"keys": ApiKeys(path)})


def test_callers_without_keys_share_prefixes() -> None:
    assert auth.ANYBODY.salt("mine") == "mine"
    salts = {auth.Tenant(name=name, shared_prefixes=shared).salt("") for name in "ab" for shared in (False, True)}
    assert len(salts) == 3


def test_priority_is_capped_by_key(serve: Any, path: Path) -> None:
    lines = [f'[{name}]\nkeys = ["key-of-{name}"]\n' for name in ("free", "two", "none")]
    path.write_text(lines[0] + lines[1] + "max_priority = 2\n" + lines[2] + "max_priority = 0\n")

    async def scenario(it: Any) -> None:
        async def refused(name: str, priority: int, **fields: Any) -> str:
            request = pb.GenerateRequest(prompt="abc", max_tokens=1, priority=priority, **fields)
            try:
                await it.stub.Generate(request, metadata=[("x-api-key", f"key-of-{name}")])
            except grpc.aio.AioRpcError as error:
                return f"{error.code().name} {error.details()}"
            return ""

        told = "INVALID_ARGUMENT priority: is 3; with this API key it may be at most 2"
        assert [await refused("two", priority) for priority in (-9, 2, 3)] == ["", "", told]
        assert await refused("two", 3, use_beam_search=True) == told
        assert [bool(await refused("none", priority)) for priority in (-1, 0, 1)] == [False, False, True]
        assert await refused("free", 2**31 - 1) == ""

    serve(scenario, app={"keys": ApiKeys(path)})


def test_only_operators_see_iterations(serve: Any, path: Path) -> None:
    path.write_text('[a]\nkeys = ["key-of-a"]\n[b]\nkeys = ["key-of-b"]\noperator = true\n')

    async def scenario(it: Any) -> None:
        await it.stub.Generate(pb.GenerateRequest(prompt="abc", max_tokens=3), metadata=[("x-api-key", "key-of-b")])

        def live(key: str) -> Any:
            connection = http.client.HTTPConnection("127.0.0.1", it.http_port, timeout=WAIT_SECONDS)
            connection.request("GET", "/live", headers={"x-api-key": key})
            found = json.loads(connection.getresponse().read())
            connection.close()
            return found

        before, a, after = [await asyncio.to_thread(live, f"key-of-{name}") for name in "bab"]
        assert (a["iterations"], bool(before["iterations"])) == ([], True)
        # The last iteration is recorded after the call has its answer.
        assert 0 < before["next"] <= a["next"] <= after["next"]
        assert a["load"].keys() == before["load"].keys()
        for name, value in a["load"].items():
            low, high = sorted(each["load"][name] for each in (before, after))
            assert low <= value <= high, name

    serve(scenario, http_port=0, app={"keys": ApiKeys(path)})
