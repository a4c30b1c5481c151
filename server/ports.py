"""Ports on which a server listens: their addresses, and errors that name them."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator


def address(host: str, port: int) -> str:
    """HOST:PORT, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def check_free(host: str, port: int) -> None:
    """Raises OSError, which names the address, if a port cannot be opened now."""
    with opening(host, port):
        family, kind, protocol, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(where)


@contextlib.contextmanager
def opening(host: str, port: int) -> Iterator[None]:
    """Adds the address to an error of the block, which opens a port. Raises OSError."""
    try:
        yield
    except (OSError, RuntimeError, UnicodeError) as problem:  # RuntimeError: grpc's; UnicodeError: no host name
        why = getattr(problem, "strerror", None) or problem
        raise OSError(f"cannot listen on {address(host, port)}: {why}") from None
