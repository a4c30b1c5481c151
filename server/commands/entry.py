"""The console script `jaxserve`. It imports nothing of ours before it is ready for Ctrl-C."""

from __future__ import annotations

import os
import signal
from types import FrameType
from typing import Any, NoReturn


def main() -> int:
    """Runs the command line, and returns its exit code (see `cli.main`).

    Python raises an exception at Ctrl-C. While it imports modules, or ends, that would be shown as a traceback: the
    process ends at once instead.
    """
    before = end_at_once()
    from server.commands import cli

    try:
        signal.signal(signal.SIGINT, before)
        return cli.main()
    except KeyboardInterrupt:  # before the command began
        _end()
    finally:
        end_at_once()


def end_at_once() -> Any:
    """Let Ctrl-C end the process at once, instead of raising KeyboardInterrupt.

    Another handler of SIGINT stays. Returns the handler before.
    """
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # it may be ignored, as in the background of a script
        signal.signal(signal.SIGINT, _end)
    return before


def _end(number: int = signal.SIGINT, frame: FrameType | None = None) -> NoReturn:
    show_cursor = b"\x1b[?25h" if os.isatty(2) else b""  # progress bars hide it
    os.write(2, show_cursor + b"jaxserve: interrupted\n")
    os._exit(128 + number)
