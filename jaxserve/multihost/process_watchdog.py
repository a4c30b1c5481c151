"""A thread with its own clock that ends a process which can no longer do its part, whatever its other threads are
stuck in."""

from __future__ import annotations

import logging
import os
import sys
import threading
import traceback
from collections.abc import Callable

_log = logging.getLogger(__name__)

INTERVAL = 0.1  # seconds between two looks
BEAT = 0.5  # seconds between two heartbeats


class ProcessWatchdog:
    """Looks at something ten times a second, from a thread of its own.

    Args:
      look: returns whether to go on looking.
      beat: called twice a second.
    """

    def __init__(self, look: Callable[[], bool], beat: Callable[[], None]) -> None:
        self._look, self._beat = look, beat
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="jaxserve-watchdog", daemon=True)

    def start(self) -> None:
        """Begins to look."""
        self._thread.start()

    def stop(self) -> None:
        """Looks no more."""
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
                # Whoever watches must not be the one that fails in silence.
                traceback.print_exc()
                os._exit(70)
            looks += 1


def end_process(code: int) -> None:
    """Ends this process at once: threads that are stuck in a collective cannot be asked."""
    logging.shutdown()
    sys.stderr.flush()
    os._exit(code)
