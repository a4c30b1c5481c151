"""Server-sent events, as OpenAI's and TGI's clients read them."""

from __future__ import annotations

from typing import Any

from server.http.call import encoded

DONE = b"data: [DONE]\n\n"


def event(value: Any) -> bytes:
    """One event that carries a JSON value."""
    return b"data: " + encoded(value) + b"\n\n"
