"""Exit codes of engine processes and of the front process; docs/operating.md has the table."""

from __future__ import annotations

import signal

from jaxserve.multihost.failure import ExitCode

ENDED = 0  # a normal end
USER_ERROR = 2  # a setting, a checkpoint or a file is wrong; a restart would not help
ENGINE_GONE = 69  # the front's: its engine process has ended and is not restarted
ENGINE_FAILED = 70  # the engine's loop raised; the log has the traceback
FRONT_GONE = 74  # the front process has ended, or has read nothing for too long
BAD_FRAME = 76  # the engine process received something that the front would not send

OF_HOSTS: frozenset[int] = frozenset(ExitCode)  # of the process of one of several hosts

_MEANINGS = {
    ENDED: "ended",
    USER_ERROR: "refused to start (exit code 2)",
    ExitCode.OVERDUE: "was late with an iteration (exit code 71)",
    ExitCode.LOST: "lost another host (exit code 72)",
    ExitCode.BROKEN: "failed at its own work (exit code 73)",
    ExitCode.UNWATCHED: "lost its watchdog (exit code 75)",
    FRONT_GONE: "found its front gone (exit code 74)",
    BAD_FRAME: "was sent something that is not a message (exit code 76)",
}


def describe(code: int) -> str:
    """How a process with this exit code ended, such as "was killed by signal 9 (SIGKILL)"."""
    if code < 0:
        try:
            return f"was killed by signal {-code} ({signal.Signals(-code).name})"
        except ValueError:
            return f"was killed by signal {-code}"
    return _MEANINGS.get(code, f"ended with exit code {code}")
