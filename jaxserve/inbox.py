"""The inbox of an engine loop: calls that other threads leave for it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable


class Inbox:
    """Calls that the loop's thread runs at its next turn. Any thread may post.

    Attributes:
      changed: the lock. It is notified when a call is posted and when the inbox closes.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self._calls: deque[Callable[[], None]] = deque()
        self._is_closed = False

    @property
    def is_closed(self) -> bool:
        """Whether the loop has been asked to stop."""
        return self._is_closed

    def post(self, call: Callable[[], None]) -> None:
        """Leave a call for the loop."""
        with self.changed:
            self._calls.append(call)
            self.changed.notify_all()

    def close(self) -> None:
        """Ask the loop to stop. Calls posted before still run."""
        with self.changed:
            self._is_closed = True
            self.changed.notify_all()

    def drain(self) -> None:
        """Run the calls that have been posted, in order."""
        with self.changed:
            calls, self._calls = self._calls, deque()
        for call in calls:  # without the lock: a sink may submit
            call()

    def wait(self) -> None:
        """Block until there is a call, or the inbox is closed."""
        with self.changed:
            self.changed.wait_for(lambda: self._calls or self._is_closed)
