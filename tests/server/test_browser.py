"""The pages in a browser: on a desk and on a phone, light and dark, and a chat. Pictures of each go to tmp_path."""

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from server.commands import cli
from tests.server.conftest import Served

PICTURES = {"light", "dark", "chat", "phone", "phone-chat", "plan", "plan-phone"}


@pytest.fixture(scope="session")
def browser() -> str:
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if found is None:
        pytest.skip("no chromium is installed")
    return found


@pytest.mark.clients
def test_pages_on_a_desk_and_on_a_phone(
    serve_http: Callable[..., None], foreign: Any, browser: str, tmp_path: Path
) -> None:
    plan = tmp_path / "plan.html"
    asked = ["plan", "--model", "bloom-176b", "--topology", "a100-80g:2x8", "--tensor", "16", "--html", str(plan)]
    assert cli.main(asked) == 0
    seen: dict[str, Any] = {}

    async def scenario(it: Served) -> None:
        load = it.engine.load
        it.engine.load = lambda: dataclasses.replace(load(), running=5)  # with 4 rows
        seen.update(await foreign("looks.js", f"{it.url}/", browser, tmp_path, plan))

    serve_http(scenario)
    assert [each for each in seen["complaints"] if "400" not in each] == []
    assert (seen["main"], seen["board"][0]) == (1, "img")
    assert "each request a row" in seen["board"][1]
    # The echo of "It was a" ends before its first " a".
    assert (seen["text"], seen["stopped"].split(":")[0]) == ("It was aIt was", "stop")
    assert seen["running"].split("\n") == ["5", "running, 4 rows"]  # not "5 / 4 running"
    assert (seen["light"], seen["dark"]) == ("rgb(255, 255, 255)", "rgb(18, 22, 31)")
    # The second call of the chat has the first and its answer. The template makes "<user>Hi<bot>" of a message.
    assert seen["first"].startswith("length: 12 tokens after 13, ")
    assert seen["said"] == [
        ["user", "Hi"],
        ["assistant", "<user>Hi<bot"],
        ["user", "Ho"],
        ["assistant", "<user>Hi<ass"],
    ]
    first, second, wrong = [each["messages"] for each in seen["asked"] if "messages" in each]
    assert first == [{"role": "user", "content": "Hi"}]
    assert second == [*first, {"role": "assistant", "content": "<user>Hi<bot"}, {"role": "user", "content": "Ho"}]
    assert len(wrong) == 5
    assert seen["refused"].startswith("temperature: ")
    assert seen["kept"] == ["Ha", 4]  # what was not answered can be sent again
    assert (seen["reloaded"], seen["anew"]) == (seen["said"], [])
    for layout in ("desk", "phone", "phoneChat", "plan"):
        assert seen[layout]["over"] <= 0, layout
    assert seen["desk"]["numbers"] < seen["desk"]["playing"]
    assert seen["phone"]["playing"] < seen["phone"]["numbers"]
    assert {path.stem for path in tmp_path.glob("*.png")} == PICTURES
