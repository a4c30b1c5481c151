"""Exit codes of engine processes and of the process in front of them (docs/operating.md has the table)."""

from __future__ import annotations

import signal

ENDED = 0  # as it was told
USER_ERROR = 2  # a setting, a checkpoint or a file is wrong: starting again would not help
ENGINE_GONE = 69  # of the front: its engine process is gone, and is not started (again)
ENGINE_FAILED = 70  # the engine's loop raised; the log has the traceback
FRONT_GONE = 74  # the process in front has ended, or has read nothing for too long
BAD_FRAME = 76  # what came through the socket was not what the front would send

# Of the process of one of several hosts (jaxserve.multihost.failure).
HOST_OVERDUE, HOST_LOST, HOST_BROKEN = 71, 72, 73
OF_HOSTS = frozenset((HOST_OVERDUE, HOST_LOST, HOST_BROKEN))

_MEANINGS = {
    ENDED: "ended",
    USER_ERROR: "refused to start (exit code 2)",
    HOST_OVERDUE: "was late with an iteration (exit code 71)",
    HOST_LOST: "lost another host (exit code 72)",
    HOST_BROKEN: "failed at its own work (exit code 73)",
    FRONT_GONE: "took the front for gone (exit code 74)",
    BAD_FRAME: "was sent what is no message (exit code 76)",
}


def told(code: int) -> str:
    """What a process did that ended with this code, as the end of a sentence: "was killed by signal 9 (SIGKILL)"."""
    if code < 0:
        try:
            return f"was killed by signal {-code} ({signal.Signals(-code).name})"
        except ValueError:
            return f"was killed by signal {-code}"
    return _MEANINGS.get(code, f"ended with exit code {code}")
