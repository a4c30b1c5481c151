"""What a start is said to have taken, of a server that is a script."""

import sys

import pytest

from benchmarks import start
from jaxserve.config import EngineConfig

SERVER = f"""#!{sys.executable}
import os, signal, time

child = os.fork()
if child == 0:  # as an engine process: its work counts once its front has seen it end
    while time.process_time() < 0.5:
        pass
    os._exit(0)

def stop(*_):
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for _ in range(1000):
        print("stopping", flush=True)
    os.waitpid(child, 0)
    os._exit(0)

signal.signal(signal.SIGTERM, stop)
for line in ("reading weights", "compiling", "measuring buckets"):
    print("jaxserve:", line, flush=True)
print("start load 0 s", flush=True)
print("ready on 127.0.0.1:1", flush=True)
while True:
    signal.pause()
"""


def test_the_work_of_all_processes_counts_though_the_server_talks_while_it_stops(tmp_path, monkeypatch) -> None:
    server = tmp_path / "server"
    server.write_text(SERVER)
    server.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(server))
    found = start.time_start("cold", tmp_path, EngineConfig())
    assert found.processor >= 0.5
    assert found.said == "start load 0 s"
    assert sum(found.steps.values()) == pytest.approx(found.ready)
