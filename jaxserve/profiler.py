"""Captures of jax's profiler while an engine runs, one at a time."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path

from jaxserve.errors import WrongState

_log = logging.getLogger(__name__)

# Of a capture. On a CPU it grows by 25 MB a second and takes five times as long to write as it lasted. Meanwhile one of
# 30 s held up all threads for 4 s, which the watchdog of several hosts takes for a failure; one of 10 s for 0.03 s.
LONGEST_SECONDS = 10.0


class Profiler:
    """Writes captures of this process into a folder.

    Any thread may call it. A capture that nobody stops is written after `seconds`.

    Args:
      tell: called with True when a capture starts and with False when it has ended, such as to tell other hosts.
    """

    def __init__(
        self,
        folder: Path | str,
        *,
        seconds: float = LONGEST_SECONDS,
        tell: Callable[[bool], None] = lambda _: None,
    ) -> None:
        self._folder, self._seconds, self._tell = folder, seconds, tell
        self._lock = threading.Lock()
        self._ending: threading.Timer | None = None  # of the current capture

    def set(self, running: bool) -> None:
        """Start a capture or stop it. Raises WrongState."""
        self.start() if running else self.stop()

    def start(self) -> None:
        """Start a capture. Raises WrongState if one is running."""
        with self._lock:
            if self._ending is not None:
                raise WrongState(f"a profile is running: stop it, or wait until its {self._seconds:g} seconds are over")
            self._start()

    def stop(self) -> None:
        """Stop the capture and write it. Raises WrongState if none is running."""
        with self._lock:
            if self._ending is None:
                raise WrongState("no profile is running; start one first")
            self._stop()

    def close(self) -> None:
        """Stop the capture, if one is running."""
        self.ensure(False)

    def ensure(self, running: bool) -> None:
        """Start a capture unless one is running, or stop it if one is."""
        with self._lock:
            if running and self._ending is None:
                self._start()
            elif not running and self._ending is not None:
                self._stop()

    def _expire(self) -> None:
        with self._lock:
            if self._ending is threading.current_thread():
                _log.warning("the profile ends after %g s, since nobody has stopped it", self._seconds)
                self._stop()

    def _start(self) -> None:
        import jax

        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # Python's own calls: a third fewer iterations a second
        jax.profiler.start_trace(str(self._folder), profiler_options=options)
        self._ending = threading.Timer(self._seconds, self._expire)
        self._ending.daemon = True
        self._ending.start()
        self._tell(True)

    def _stop(self) -> None:
        import jax

        assert self._ending is not None
        self._ending.cancel()
        self._ending = None
        self._tell(False)
        jax.profiler.stop_trace()
