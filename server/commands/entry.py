"""The console script `jaxserve`. It is ready for Ctrl-C before it imports the rest of ours."""

from __future__ import annotations

import signal

from server.commands import interrupt


def main() -> int:
    """Runs the command line, and returns its exit code (see `cli.main`).

    Python raises an exception at Ctrl-C. While it imports modules, or ends, that would be shown as a traceback: the
    process ends at once instead.
    """
    before = interrupt.end_at_once()
    from server.commands import cli

    try:
        signal.signal(signal.SIGINT, before)
        return cli.main()
    except KeyboardInterrupt:  # before the command began
        interrupt.end()
    finally:
        interrupt.end_at_once()
