"""A thread that ends a process whose other threads hang."""

from __future__ import annotations

import logging
import os
import sys
import threading
import traceback
from collections.abc import Callable
from typing import NoReturn

from jaxserve.multihost.failure import ExitCode

_log = logging.getLogger(__name__)

INTERVAL = 0.1  # seconds between two checks
BEAT = 0.5  # seconds between two heartbeats


class ProcessWatchdog:
    """Calls `look` ten times and `beat` twice per second, on its own thread.

    Args:
      look: checks for failures; returns whether to continue.
      beat: sends a heartbeat.
    """

    def __init__(self, look: Callable[[], bool], beat: Callable[[], None]) -> None:
        self._look, self._beat = look, beat
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="jaxserve-watchdog", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread."""
        self._stopped.set()

    def _run(self) -> None:
        looks = 0
        while not self._stopped.wait(INTERVAL):
            try:
                if looks % round(BEAT / INTERVAL) == 0:
                    self._beat()
                if not self._look():
                    return
            except Exception:
                # Without its watchdog, the process could hang unnoticed.
                traceback.print_exc()
                os._exit(ExitCode.UNWATCHED)
            looks += 1


def end_process(code: int) -> NoReturn:
    """End this process at once, because threads that hang in a collective cannot be stopped."""
    logging.shutdown()
    sys.stderr.flush()
    os._exit(code)
