"""A gRPC stream that carries bytes there and back and does nothing else: the least that a control channel can take."""

from __future__ import annotations

import queue
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import grpc

_SERVICE, _METHOD = "benchmarks.Echo", "Follow"
_WARM_UP = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Echo:
    """Medians, in milliseconds.

    Attributes:
      pause: between an answer and the next question.
      round_trip: from a question to its answer.
      processor: time of both processes, of every round.
    """

    pause: float
    round_trip: float
    processor: float


def measure(there: int, back: int, rounds: int, pause: float) -> Echo:
    """So many bytes to a process of its own over the loopback, and so many back."""
    command = [sys.executable, "-m", "benchmarks.echo", str(back)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        say, hear = other.stdin, other.stdout
        out: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()

        def processor() -> float:
            """Seconds of both processes."""
            say.write("\n")
            say.flush()
            return time.process_time() + float(hear.readline())

        def ask(stream: Iterator[bytes]) -> float:
            """Seconds of a round."""
            time.sleep(pause / 1e3)
            started = time.perf_counter()
            out.put(bytes(there))
            next(stream)
            return time.perf_counter() - started

        try:
            with grpc.insecure_channel(f"127.0.0.1:{int(hear.readline())}") as channel:
                open_stream = channel.stream_stream(f"/{_SERVICE}/{_METHOD}")
                stream = open_stream(iter(out.get, None))
                for _ in range(_WARM_UP):
                    ask(stream)
                before = processor()
                times = [ask(stream) for _ in range(rounds)]
                used = processor() - before
                out.put(None)
        finally:
            other.kill()
    return Echo(pause=pause, round_trip=1e3 * statistics.median(times), processor=1e3 * used / rounds)


def work(back: int) -> None:
    """The other process: says its port, then for every line how much processor time it has used, in seconds."""
    answer = bytes(back)

    def follow(questions: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        for _ in questions:
            yield answer

    server = grpc.server(ThreadPoolExecutor(1))
    handler = grpc.stream_stream_rpc_method_handler(follow)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, {_METHOD: handler}),))
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    server.start()
    for _ in sys.stdin:
        print(time.process_time(), flush=True)


if __name__ == "__main__":
    work(int(sys.argv[1]))
