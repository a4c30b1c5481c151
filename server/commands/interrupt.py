"""Ends the process at Ctrl-C while nothing else could handle it; imports nothing of ours."""

from __future__ import annotations

import os
import signal
from types import FrameType
from typing import Any, NoReturn


def end_at_once() -> Any:
    """Let Ctrl-C end the process at once, instead of raising KeyboardInterrupt.

    Another handler of SIGINT stays. Returns the handler before.
    """
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # it may be ignored, as in the background of a script
        signal.signal(signal.SIGINT, end)
    return before


def end(number: int = signal.SIGINT, frame: FrameType | None = None) -> NoReturn:
    """Ends the process now, as a handler of signals or by itself."""
    show_cursor = b"\x1b[?25h" if os.isatty(2) else b""  # progress bars hide it
    os.write(2, show_cursor + b"jaxserve: interrupted\n")
    os._exit(128 + number)
