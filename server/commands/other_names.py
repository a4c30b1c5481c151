"""Other servers' names of our commands and flags, for hints on the command line.

vLLM's are those of `vllm serve`, TGI's those of `text-generation-launcher`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

COMMANDS = {
    "complete": "client",
    "chat": "client",
    "launch": "serve",
    "run": "serve",
    "run-batch": "generate",
    "start": "serve",
    "text-generation-launcher": "serve",
}
FLAGS = {
    # vLLM
    "--api-key": "--api-keys",
    "--attention-backend": "--attention",
    "--data-parallel-size": "--replicas",
    "--disable-log-requests": "--request-log",
    "--enable-chunked-prefill": "--token-budget",
    "--enable-log-requests": "--request-log",
    "--enable-prefix-caching": "--prefix-cache",
    "--gpu-memory-utilization": "--slots",
    "--kv-events-config": "--kv-events",
    "--kv-offloading-size": "--host-cache",
    "--master-addr": "--coordinator",
    "--max-model-len": "--max-context",
    "--max-num-batched-tokens": "--token-budget",
    "--max-num-seqs": "--max-rows",
    "--nnodes": "--hosts",
    "--no-enable-prefix-caching": "--prefix-cache",
    "--node-rank": "--host-id",
    "--num-gpu-blocks-override": "--slots",
    "--otlp-traces-endpoint": "--traces",
    "--pipeline-parallel-size": "--stages",
    "--quantization": "--quantize",
    "--revision": "--model",
    "--speculative-config": "--speculate",
    "--ssl-ca-certs": "--tls-client-ca",
    "--ssl-certfile": "--tls-cert",
    "--ssl-keyfile": "--tls-key",
    "--tensor-parallel-size": "--tensor",
    "--tool-call-parser": "--tool-parser",
    "--uvicorn-log-level": "--log-level",
    "-dp": "--replicas",
    "-pp": "--stages",
    "-tp": "--tensor",
    # TGI
    "--cors-allow-origin": "--allowed-origins",
    "--hostname": "--host",
    "--max-batch-prefill-tokens": "--token-budget",
    "--max-batch-size": "--max-rows",
    "--max-batch-total-tokens": "--slots",
    "--max-concurrent-requests": "--max-queued-requests",
    "--max-input-length": "--max-context",
    "--max-input-tokens": "--max-context",
    "--max-total-tokens": "--max-context",
    "--model-id": "--model",
    "--num-shard": "--tensor",
    "--otlp-endpoint": "--traces",
    "--prometheus-port": "--metrics-port",
    "--sharded": "--tensor",
}


def hint(given: str, known: Iterable[str], others: dict[str, str]) -> str:
    """ " (did you mean ...?)" for a word that is not known; empty if nothing is near."""
    names = set(known)
    wanted = others.get(given)
    if wanted not in names:
        near = difflib.get_close_matches(given, sorted({*names, *others}), n=1, cutoff=0.7)
        wanted = others.get(near[0], near[0]) if near else None
    return f" (did you mean {wanted}?)" if wanted in names else ""
