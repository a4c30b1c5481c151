"""What a caller who does its worst costs another one: `python -m tests.server.front_attack` prints a table.

A server on the demo model gets one bad call after another, from another process, while somebody who behaves times
health checks and short completions over HTTP and gRPC.
"""

from __future__ import annotations

import contextlib
import functools
import http.client
import json
import multiprocessing
import os
import re
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np
from grpc_health.v1 import health_pb2

from server.proto.inference import open_inference_grpc_pb2 as kserve_pb
from server.proto.jaxserve.v1 import inference_pb2 as pb

SERVICE = "/jaxserve.v1.Inference/"
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
_JSON = {"content-type": "application/json"}
SECONDS = 1.5  # of each attack
_SHORT = {"prompt": "It was a", "max_tokens": 4, "temperature": 0}


@dataclass(frozen=True)
class Attack:
    """A call to repeat: a path of HTTP, or the method of a gRPC service, and the bytes of its body.

    Without a path the bytes are a whole HTTP call.
    """

    where: str
    body: bytes

    @property
    def is_grpc(self) -> bool:
        return self.where.count("/") == 2 and "." in self.where


def _json(path: str, **fields: Any) -> Attack:
    return Attack(path, json.dumps(fields, separators=(",", ":")).encode())


@functools.cache
def attacks() -> dict[str, Attack]:
    """Every attack, by name; each body has nearly the most bytes that are taken."""
    ones, letters = [1] * 1_900_000, ["a"] * 900_000
    words = "a " * 1_900_000
    found = {
        "guided_choice of numbers": _json(COMPLETIONS, prompt="a", guided_choice=ones),
        "guided_choice of letters": _json(COMPLETIONS, prompt="a", guided_choice=letters),
        "a long prompt": _json(COMPLETIONS, prompt=words),
        "a long prompt of one letter": _json(COMPLETIONS, prompt="a" * 4_000_000),
        "many token ids": _json(COMPLETIONS, prompt=ones),
        "prompts of token ids": _json(COMPLETIONS, prompt=[[1] * 1_800] * 1_000),
        "as many values as are read": _json(COMPLETIONS, prompt=[1] * 262_000),
        "stop": _json(COMPLETIONS, prompt="a", stop=letters),
        "bad_words": _json(COMPLETIONS, prompt="a", bad_words=["a " * 500 + str(i) for i in range(64)]),
        "logit_bias": _json(COMPLETIONS, prompt="a", logit_bias={str(i): 1 for i in range(300_000)}),
        "an unknown field": _json(COMPLETIONS, prompt="a", surprise=ones),
        "empty lists": Attack(COMPLETIONS, b'{"prompt":"a","x":[' + b"[]," * 1_300_000 + b"0]}"),
        "nested lists": Attack(COMPLETIONS, b'{"prompt":' + b"[" * 4_000_000),
        "escapes": Attack(COMPLETIONS, b'{"prompt":"' + rb"\u00e9" * 650_000 + b'"}'),
        "commas in a text": _json(COMPLETIONS, prompt="1,2," * 1_000_000),
        "messages": _json(CHATS, messages=[{"role": "user", "content": "a"}] * 100_000),
        "parts of messages": _json(
            CHATS, messages=[{"role": "user", "content": [{"type": "text", "text": ""}] * 15}] * 2_000
        ),
        "a long message": _json(CHATS, messages=[{"role": "user", "content": words}]),
        "a schema": _json(COMPLETIONS, prompt="a", guided_json={"enum": ones}),
        "/tokenize": _json("/tokenize", prompt=words),
        "/detokenize": _json("/detokenize", tokens=ones),
        "TGI": _json("/generate", inputs=words),
        "TGI stop": _json("/generate", inputs="a", parameters={"stop": letters}),
        "KServe": _json(
            "/v2/models/demo/infer", inputs=[{"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ones}]
        ),
    }
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n".encode()
    found["chunks of a byte"] = Attack("", head + b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\n \r\n" * 2_000_000)
    found["headers"] = Attack("", head + b"a:\r\n" * 1_000_000 + b"\r\n")
    ids = pb.GenerateRequest()
    ids.prompt_token_ids.ids.extend([1] * 4_000_000)
    options = pb.GenerateRequest(prompt="a")
    options.grammar.choice.options.extend([""] * 2_000_000)
    message = pb.GenerateRequest(messages=[pb.ChatMessage()]).SerializeToString()
    tensor = kserve_pb.ModelInferRequest.InferInputTensor(name="text_input", datatype="BYTES", shape=[2_000_000])
    tensor.contents.bytes_contents.extend([b""] * 2_000_000)
    over_grpc = {
        "gRPC: a long prompt": ("Generate", pb.GenerateRequest(prompt=words)),
        "gRPC: Tokenize": ("Tokenize", pb.TokenizeRequest(text=words)),
        "gRPC: Detokenize": ("Detokenize", pb.DetokenizeRequest(token_ids=[1] * 4_000_000)),
        "gRPC: many token ids": ("Generate", ids),
        "gRPC: choices": ("Generate", options),
        "gRPC: stop": ("Generate", pb.GenerateRequest(prompt="a", stop=["a"] * 1_300_000)),
    }
    found |= {name: Attack(SERVICE + method, body.SerializeToString()) for name, (method, body) in over_grpc.items()}
    found["gRPC: messages"] = Attack(SERVICE + "Generate", message * 1_300_000)
    infer = kserve_pb.ModelInferRequest(model_name="demo", inputs=[tensor])
    found["gRPC: KServe"] = Attack("/inference.GRPCInferenceService/ModelInfer", infer.SerializeToString())
    return found


def attack(it: Attack, ports: tuple[int, int], done: Any, until: Any) -> None:
    """Repeats an attack until it is told to end; `done` gets each answer's status."""
    if it.is_grpc:
        options = [("grpc.max_send_message_length", -1)]
        with grpc.insecure_channel(f"127.0.0.1:{ports[0]}", options=options) as channel:
            call: Any = channel.unary_unary(it.where)
            while not until.is_set():
                try:
                    call(it.body)
                    done.put("OK")
                except grpc.RpcError as refusal:
                    done.put(f"{refusal.code().name}: {refusal.details()}"[:150])  # pyright: ignore[reportAttributeAccessIssue]
        return
    while not it.where and not until.is_set():
        with socket.create_connection(("127.0.0.1", ports[1]), timeout=120) as raw:
            with contextlib.suppress(ConnectionError):  # it may end before all is sent
                raw.sendall(it.body)
            with contextlib.suppress(ConnectionError):
                done.put(repr(raw.recv(150)))
                continue
            done.put("reset")
    while it.where and not until.is_set():
        connection = http.client.HTTPConnection("127.0.0.1", ports[1], timeout=120)
        with contextlib.closing(connection):
            try:
                connection.request("POST", it.where, it.body, _JSON)
                answer = connection.getresponse()
                done.put(f"{answer.status} {answer.read()[:150]!r}")
            except OSError as problem:
                done.put(repr(problem))


def _attack_in_turn(ports: tuple[int, int], given: Any, done: Any, until: Any) -> None:
    os.nice(19)  # a caller elsewhere would take no processor time of this machine
    while (it := given.get()) is not None:
        attack(it, ports, done, until)
        done.put(None)


class Attacker:
    """A process that makes one attack after the other."""

    def __init__(self, ports: tuple[int, int]) -> None:
        context = multiprocessing.get_context("spawn")
        self._given, self._done, self._until = context.Queue(), context.Queue(), context.Event()
        self._process = context.Process(target=_attack_in_turn, args=(ports, self._given, self._done, self._until))
        self._process.start()

    def under(self, name: str, polite: Polite, seconds: float) -> tuple[dict[str, list[float]], list[str]]:
        """The times of somebody polite during an attack, for so long and three answers to it, and what these were."""
        self._given.put(attacks()[name])
        answers = [self._done.get()]  # it has begun
        try:
            times = polite.measure(seconds)
            while len(answers) + self._done.qsize() < 3:
                for what, more in polite.measure(0.2).items():
                    times[what] += more
        finally:
            self._until.set()
            answers += iter(self._done.get, None)
            self._until.clear()
        return times, answers

    def close(self) -> None:
        self._given.put(None)
        self._process.join()


class Polite:
    """Times the calls of somebody who behaves, in milliseconds."""

    def __init__(self, ports: tuple[int, int]) -> None:
        self._http = http.client.HTTPConnection("127.0.0.1", ports[1], timeout=120)
        self._channel = grpc.insecure_channel(f"127.0.0.1:{ports[0]}")
        self._check: Any = self._channel.unary_unary("/grpc.health.v1.Health/Check")
        self._generate: Any = self._channel.unary_unary(SERVICE + "Generate")
        self._short = pb.GenerateRequest(**_SHORT).SerializeToString()
        self.refused = 0  # calls
        self._calls: dict[str, Callable[[], object]] = {
            "health": lambda: self._over_http("GET", "/health"),
            "gRPC health": lambda: self._check(health_pb2.HealthCheckRequest().SerializeToString()),
            "completion": lambda: self._over_http("POST", COMPLETIONS, json.dumps(_SHORT)),
            "gRPC completion": self._over_grpc,
        }

    def _over_grpc(self) -> None:
        try:
            self._generate(self._short)
        except grpc.RpcError:
            self.refused += 1

    def _over_http(self, method: str, path: str, body: str | None = None) -> None:
        for _ in range(2):  # a server that was frozen closes the connection as idle
            with contextlib.suppress(ConnectionError, http.client.RemoteDisconnected):
                self._http.request(method, path, body, _JSON)
                answer = self._http.getresponse()
                answer.read()
                self.refused += answer.status != 200
                return
            self._http.close()
        raise AssertionError("the connection is closed again and again")

    def measure(self, seconds: float) -> dict[str, list[float]]:
        self._http.close()  # an idle connection may be closed by now; the next call opens another
        ends, found = time.monotonic() + seconds, {name: [] for name in self._calls}
        while time.monotonic() < ends:
            for name, call in self._calls.items():
                began = time.perf_counter()
                call()
                found[name].append((time.perf_counter() - began) * 1e3)
                time.sleep(0.01)
        return found

    def close(self) -> None:
        self._http.close()
        self._channel.close()


@contextlib.contextmanager
def served(*flags: str) -> Iterator[tuple[int, int]]:
    """The gRPC and HTTP ports of `jaxserve serve` on the demo model."""
    command = [sys.executable, "-m", "server.commands.cli", "serve", "--port", "0", "--http-port", "0", *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert process.stdout is not None
        said = ""
        while (found := re.search(r"ready on 127\.0\.0\.1:(\d+).*?127\.0\.0\.1:(\d+)", said, re.DOTALL)) is None:
            line = process.stdout.readline()
            assert line, said
            said += line
        yield int(found[1]), int(found[2])
    finally:
        process.terminate()
        process.wait(30)
        process.stdout.close()


def medians(times: dict[str, list[float]]) -> dict[str, float]:
    return {name: statistics.median(each) for name, each in times.items()}


def slow(times: dict[str, list[float]]) -> dict[str, float]:
    """The 95th percentile of each kind of call."""
    return {name: float(np.percentile(each, 95)) for name, each in times.items()}


def shown(times: dict[str, list[float]]) -> str:
    """The median, the 95th percentile and the worst of each kind of call, as columns of a table."""
    columns = zip(medians(times).values(), slow(times).values(), map(max, times.values()), strict=True)
    return " | ".join(" / ".join(f"{number:.1f}" for number in column) for column in columns)


HEAD = "| median / 95th percentile / worst, ms | health | gRPC health | completion | gRPC completion |"
HEAD += "\n" + "|---" * 5 + "|"


def main(names: list[str]) -> None:
    closing = contextlib.closing
    with served() as ports, closing(Attacker(ports)) as attacker, closing(Polite(ports)) as polite:
        polite.measure(1)
        print(HEAD, flush=True)
        print(f"| quiet | {shown(polite.measure(SECONDS))} |", flush=True)
        together: dict[str, list[float]] = {}
        for name in names or attacks():
            times, answers = attacker.under(name, polite, SECONDS)
            assert (polite.refused, len(answers) > 2) == (0, True), name
            print(f"| {name} | {shown(times)} |", flush=True)
            for call, each in times.items():
                together.setdefault(call, []).extend(each)
        print(f"| all of them | {shown(together)} |")
        print(f"| quiet | {shown(polite.measure(SECONDS))} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
