"""A tenant that floods a real server, and one that does not."""

import asyncio
import statistics
from pathlib import Path
from typing import Any

import grpc
import pytest

from jaxserve.engine import Engine
from jaxserve.scheduler.state import RequestState
from jaxserve.scheduler.tenants import FairQueue
from server.app import ServerApp
from server.auth import ApiKeys
from server.commands import cli, flags
from server.proto.jaxserve.v1 import inference_pb2 as pb
from server.proto.jaxserve.v1.inference_pb2_grpc import InferenceStub
from tests.server.fake_engine import WAIT_SECONDS

KEYS = '[polite]\nkeys = ["key-of-polite"]\n[flood]\nkeys = ["key-of-flood"]\n'
SETTINGS = ["--buckets", "4,16", "--slots", "512", "--max-rows", "4", "--max-context", "64"]


@pytest.mark.long
def test_a_flood_of_one_tenant_hardly_delays_another(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forty calls of one tenant wait at any time; the other's get the next rows that are free."""
    path = tmp_path / "keys.toml"
    path.write_text(KEYS)
    started: dict[str, int] = {"polite": 0, "flood": 0}  # requests that got a row
    overtaken: dict[str, list[int]] = {"polite": [], "flood": []}  # requests of the flood that each waited for
    pushed: dict[str, int] = {}
    push, pop = FairQueue.push, FairQueue.pop

    def noted_push(queue: FairQueue, state: RequestState) -> None:
        pushed[state.request.request_id] = started["flood"]
        push(queue, state)

    def noted_pop(queue: FairQueue) -> RequestState:
        state = pop(queue)
        name = state.tenant.name
        overtaken[name].append(started["flood"] - pushed[state.request.request_id])
        started[name] += 1
        return state

    monkeypatch.setattr(FairQueue, "push", noted_push)
    monkeypatch.setattr(FairQueue, "pop", noted_pop)

    async def ask(stub: Any, tenant: str) -> None:
        # Long enough for calls to come faster than the engine answers them, on any machine.
        priority = 9 * (tenant == "flood")
        request = pb.GenerateRequest(prompt="It was a", max_tokens=40, ignore_eos=True, priority=priority)
        await stub.Generate(request, metadata=(("authorization", f"Bearer key-of-{tenant}"),))

    async def flood(stub: Any) -> None:
        while started["polite"] < 30 and started["flood"] < 2000:
            await ask(stub, "flood")

    async def scenario(engine: Engine) -> None:
        app = ServerApp(engine, name="tiny", version="0", keys=ApiKeys(path), stall_seconds=WAIT_SECONDS)
        port, _ = await app.start("127.0.0.1", 0, None)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub = InferenceStub(channel)
            floods = [asyncio.create_task(flood(stub)) for _ in range(40)]
            while started["flood"] < 80:
                await asyncio.sleep(0.01)
            for _ in range(30):
                await ask(stub, "polite")
            await asyncio.gather(*floods)
        await app.stop()

    args = cli.parser().parse_args(["serve", "--model", str(checkpoint), *SETTINGS, "--compilation-cache", "off"])
    with Engine.from_checkpoint(checkpoint, flags.engine_config(args)) as engine:
        asyncio.run(scenario(engine))
    print({name: (len(n), statistics.median(n), max(n)) for name, n in overtaken.items()})
    assert len(overtaken["polite"]) == 30
    assert max(overtaken["polite"]) <= 4  # as many as there are rows
    assert statistics.median(overtaken["flood"]) > 20


def test_another_tenants_prefixes_are_not_cached(checkpoint: Path, tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(KEYS)

    async def scenario(engine: Engine) -> None:
        app = ServerApp(engine, name="tiny", version="0", keys=ApiKeys(path), stall_seconds=WAIT_SECONDS)
        port, _ = await app.start("127.0.0.1", 0, None)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub: Any = InferenceStub(channel)

            async def cached(tenant: str) -> int:
                request = pb.GenerateRequest(prompt="a prompt that fills several blocks of slots", max_tokens=1)
                answer = await stub.Generate(request, metadata=(("authorization", f"Bearer key-of-{tenant}"),))
                return answer.usage.cached_tokens

            assert await cached("polite") == 0
            own = await cached("polite")
            assert own >= 32
            assert [await cached("flood"), await cached("flood"), await cached("polite")] == [0, own, own]
        await app.stop()

    args = cli.parser().parse_args(
        ["serve", "--model", str(checkpoint), *SETTINGS, "--block-size", "8", "--compilation-cache", "off"]
    )
    with Engine.from_checkpoint(checkpoint, flags.engine_config(args)) as engine:
        asyncio.run(scenario(engine))
