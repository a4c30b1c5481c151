"""What Serve's proxy adds to the time to the first token and to the gap between tokens, beside `jaxserve serve`.

    python -m tests.ray.cost
    RAY_SERVE_THROUGHPUT_OPTIMIZED=1 python -m tests.ray.cost
    RAY_SERVE_ENABLE_DIRECT_INGRESS=1 python -m tests.ray.cost --port 30000
    RAY_SERVE_THROUGHPUT_OPTIMIZED=1 python -m tests.ray.cost --port 30000
    RAY_SERVE_THROUGHPUT_OPTIMIZED=1 python -m tests.ray.cost --port 30000 --routing prefix
    python -m tests.ray.cost --routing prefix

With --port they call the replica itself, at the first of the ports that Serve gives to replicas; with --routing prefix
that is the ingress.

The same model with the same flags, a front and an engine process each. Rounds of eight streaming callers go to one and
to the other in turn, so what else the machine does meets both. With fewer cores than processes the figures are upper
bounds: on two, callers, proxy, front and engine wait for each other.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time

import httpx2 as httpx

from tests.ray.local_cluster import FLAGS, ROOT, WAIT_SECONDS, Cluster, until

CALLERS, TOKENS = 8, 200


async def _stream(client: httpx.AsyncClient, url: str) -> tuple[float, float]:
    """Seconds until the first token, and mean seconds between two."""
    body = {"prompt": "It was", "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "stream": True}
    since = time.perf_counter()
    async with client.stream("POST", f"{url}/v1/completions", json=body) as response:
        times = [time.perf_counter() async for line in response.aiter_lines() if line.startswith("data: {")]
    return times[0] - since, (times[-1] - times[0]) / (TOKENS - 1)


async def _round(url: str) -> tuple[float, float]:
    """Medians over the callers, who come at once."""
    async with httpx.AsyncClient(timeout=WAIT_SECONDS, trust_env=False) as client:
        await _stream(client, url)  # connections are there
        firsts, gaps = zip(*await asyncio.gather(*[_stream(client, url) for _ in range(CALLERS)]), strict=True)
    return statistics.median(firsts), statistics.median(gaps)


def _show(name: str, plain: list[float], ray: list[float]) -> None:
    added = [theirs - ours for theirs, ours in zip(ray, plain, strict=True)]
    ratios = [theirs / ours for theirs, ours in zip(ray, plain, strict=True)]
    plain_ms, ray_ms, added_ms = (1000 * statistics.median(each) for each in (plain, ray, added))
    print(
        f"| {name} | {plain_ms:.1f} ms | {ray_ms:.1f} ms | {added_ms:+.1f} ms | {statistics.median(ratios):.2f} "
        f"({min(ratios):.2f} to {max(ratios):.2f}) |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--port", type=int, help="of Serve; its proxy's if left out")
    parser.add_argument("--routing", default="session", help="session or prefix")
    args = parser.parse_args()
    cluster = Cluster()
    with tempfile.TemporaryFile("w+") as log:
        command = [sys.executable, "-m", "server.commands.cli", "serve", "--port", "0", "--http-port", "0", *FLAGS]
        environment = os.environ | {"JAX_PLATFORMS": "cpu"}
        started = subprocess.Popen(command, cwd=ROOT, stderr=log, stdout=subprocess.DEVNULL, env=environment)
        try:
            cluster.deploy(routing=args.routing)

            def ready() -> re.Match[str] | None:
                log.seek(0)
                return re.search(r"ready on .* on (\S+) \(HTTP", log.read())

            through = f"http://127.0.0.1:{args.port}" if args.port else cluster.url
            urls = {"plain": f"http://{until(ready)[1]}", "ray": through}
            measured: dict[str, list[tuple[float, float]]] = {name: [] for name in urls}
            for name in [*urls] * (args.rounds + 1):
                measured[name].append(asyncio.run(_round(urls[name])))
        finally:
            started.terminate()
            started.wait()
            cluster.close()
    print(f"{CALLERS} callers, {args.rounds} rounds each, {os.cpu_count()} cores, load {os.getloadavg()[0]:.0f}")
    print("| | `jaxserve serve` | through Serve | added | ratio (least and most of a round) |")
    print("|---|---|---|---|---|")
    for index, name in enumerate(("time to the first token", "gap between tokens")):
        plain, ray = ([each[index] for each in measured[of][1:]] for of in urls)
        _show(name, plain, ray)


if __name__ == "__main__":
    main()
