"""Ports for servers that a benchmark or a test starts."""

import os
import socket

_FIRST, _COUNT = 20_000, 12_000
_next = os.getpid() * 7_919  # processes that run at once begin far apart


def free_ports(count: int) -> list[int]:
    """Consecutive ports on which nobody listens, each given once by this process.

    They lie below those that Linux and macOS give to connections and to port 0 (from 32,768 on), so that nobody else
    takes one before the server that it is for. Raises OSError if there are none.
    """
    global _next
    for _ in range(_COUNT):
        first = _FIRST + _next % (_COUNT - count)
        _next += count
        if all(map(_is_free, ports := list(range(first, first + count)))):
            return ports
    raise OSError(f"no {count} consecutive ports are free between {_FIRST} and {_FIRST + _COUNT}")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("", port))  # of all addresses
        except OSError:
            return False
    return True
