"""A client that shares no line of code with us: gRPC's JavaScript library, driven by its own reading of the .proto."""

from collections.abc import Callable
from typing import Any

from tests.server.conftest import Served


def test_javascript_client(serve: Callable[..., None], foreign_client: Callable[..., Any]) -> None:
    async def scenario(it: Served) -> None:
        found = await foreign_client(it.address, 10**6)
        assert found == {
            "whole": {
                "code": "OK",
                "text": "héllo €! héllo €! ",
                "finish": "FINISH_REASON_LENGTH",
                "usage": {"prompt_tokens": 12, "completion_tokens": 24},
            },
            "cancelled": {"code": "CANCELLED", "text": found["cancelled"]["text"]},
            "late": {"code": "DEADLINE_EXCEEDED"},
            "refused": {"code": "INVALID_ARGUMENT"},
        }
        assert found["cancelled"]["text"].startswith("a")
        await it.until(lambda: it.engine.load().slots_used == 0)
        assert len(it.engine.aborted) == 2

    serve(scenario, max_context=2 * 10**6)
