"""A fake engine in a process of its own: `python -m tests.server.fake_engine_process ORDERS.json DESCRIPTOR`.

The file says what becomes of it, and may say something else before the next process is started:

  held / max_context: of the fake engine
  pause: seconds of every iteration
  wedged_after / fails_after: iterations, after which the engine's thread stands still, or raises
  deadly: requests whose prompts begin with this token end the process as they come
  refuses: why it does not start
  dies: the exit code that it ends with instead of starting
  waits_for: a file that must be there before it starts
  frozen: it refuses requests with the number of objects that garbage collections leave out
  babbles: it sends what is no message once it is ready
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxserve.errors import InvalidRequest
from jaxserve.request import Request
from jaxserve.stats import IterationRecord
from server.engine_process import main as engine_process
from server.engine_process.job import EngineJob
from tests.server.fake_engine import FakeEngine, Sink, byte_tokenizer


class Ordered(FakeEngine):
    """A fake engine that does as it is told."""

    def obey(self, orders: dict[str, Any]) -> None:
        self._orders = orders
        self.record(self._after)

    def submit_checked(self, request: Request, sink: Sink) -> None:
        if request.prompt[0] == self._orders.get("deadly"):
            os.kill(os.getpid(), signal.SIGKILL)
        if "frozen" in self._orders:
            raise InvalidRequest("frozen", str(gc.get_freeze_count()))
        super().submit_checked(request, sink)

    def _after(self, record: IterationRecord) -> None:
        done = record.plan.sequence + 1
        time.sleep(self._orders.get("pause", 0.001))
        if done == self._orders.get("wedged_after"):
            threading.Event().wait()
        if done == self._orders.get("fails_after"):
            self.fail()


def make(job: EngineJob, progress: Callable[[str, int, int], None]) -> FakeEngine:
    orders = json.loads(Path(sys.argv[1]).read_text())
    progress("loading", 0, 1)
    if "refuses" in orders:
        raise ValueError(orders["refuses"])
    if "dies" in orders:
        print("these are its last words", file=sys.stderr, flush=True)
        os._exit(orders["dies"])
    while "waits_for" in orders and not Path(orders["waits_for"]).exists():
        time.sleep(0.005)
    if orders.get("babbles"):
        os.write(int(sys.argv[-1]), b"\x05\x00\x00\x00hello")
    engine = Ordered(
        tokenizer=byte_tokenizer(),
        config=job.config,
        max_context=orders.get("max_context", 2 * 10**6),
        slots_total=10**9,
        held=orders.get("held", False),
    )
    engine.obey(orders)
    return engine


if __name__ == "__main__":
    sys.exit(engine_process.main(make))
