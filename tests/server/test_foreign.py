"""A client that shares no line of code with us: gRPC's JavaScript library, driven by its own reading of the .proto."""

import asyncio
import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.server.conftest import Served

FOREIGN = Path(__file__).parent / "foreign"
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The client with its libraries, installed as its lock file says."""
    npm = shutil.which("npm")
    if npm is None or shutil.which("node") is None:
        pytest.skip("node and npm are not installed")
    folder = tmp_path_factory.mktemp("foreign")
    for path in FOREIGN.iterdir():
        if path.is_file():
            shutil.copy(path, folder)
    installed = subprocess.run(
        [npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
    )
    if installed.returncode != 0 and any(
        word in installed.stderr for word in ("ENOTFOUND", "EAI_AGAIN", "ECONNREFUSED")
    ):
        pytest.skip("npm cannot reach a registry")
    assert installed.returncode == 0, installed.stderr
    return folder / "client.js"


def test_a_javascript_client_streams_cancels_and_hits_a_deadline(serve: Callable[..., None], client: Path) -> None:
    async def scenario(it: Served) -> None:
        process = await asyncio.create_subprocess_exec(
            "node", str(client), it.address, str(ROOT), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        out, errors = await process.communicate()
        assert process.returncode == 0, errors.decode()
        found = json.loads(out)
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
