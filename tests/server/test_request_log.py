"""The request log: a line for each request, and disks that are slow or full."""

import errno
import io
import json
import os
import re
import select
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from server import request_log
from server.errors import ApiError, ErrorKind
from server.proto.jaxserve.v1 import inference_pb2 as pb
from server.request_log import RequestLog
from tests.server.conftest import Served, some_traffic

Serve = Callable[..., None]


def test_a_slow_disk_delays_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    """A pipe that nobody reads takes 64 KiB."""
    monkeypatch.setattr(request_log, "_MOST_WAITING", 500)
    os.mkfifo(path := tmp_path / "pipe")
    reader = os.open(path, os.O_RDWR)
    log = RequestLog(str(path), tokenizer=None, prompts=False)
    for number in range(2000):
        log.refused(str(number), ApiError(ErrorKind.INVALID, "a" * 1000))
    assert "the request log is written too slowly: lines are dropped" in caplog.text
    kept = b""
    while log._lines.qsize() > 200:
        kept += os.read(reader, 2**16)
    log.refused("2000", ApiError(ErrorKind.INVALID, "a"))
    (dropped,) = re.findall(r"(\d+) lines of the request log were dropped", caplog.text)
    closing = threading.Thread(target=log.close)
    closing.start()
    while closing.is_alive() or select.select([reader], [], [], 0)[0]:
        kept += os.read(reader, 2**20) if select.select([reader], [], [], 0.05)[0] else b""
    ids = [int(json.loads(line)["id"]) for line in kept.splitlines()]
    assert len(ids) == 2001 - int(dropped)
    assert ids == sorted({*ids})
    assert ids[-1] == 2000
    os.close(reader)


@pytest.mark.parametrize("prompts", [False, True])
def test_a_line_for_every_ending(serve: Serve, tmp_path: Path, prompts: bool) -> None:
    path = tmp_path / "requests.jsonl"

    async def scenario(it: Served) -> None:
        log = RequestLog(str(path), tokenizer=it.engine.tokenizer, prompts=prompts)
        it.app.handler.observers.append(log)
        await some_traffic(it)
        log.close()

    serve(scenario, poison=frozenset(b"!"))
    lines: list[dict[str, Any]] = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line.get("finish_reason") or line["refused"] for line in lines] == [
        "length",
        "length",
        "stop",
        "eos",
        "invalid",
        "error",
        "failed",
    ]
    first = lines[0]
    assert (first["protocol"], first["prompt_tokens"], first["completion_tokens"]) == ("grpc", 3, 4)
    assert 0 <= first["queue_seconds"] <= first["first_token_seconds"] <= first["seconds"]
    assert lines[1]["cached_tokens"] == 2
    assert (lines[5]["id"], lines[6]["id"]) == ("poisoned", "poisoned")
    assert "poison" not in lines[6]["message"].replace("poisoned", "")
    assert [first.get("prompt"), first.get("completion")] == (["abc", "abca"] if prompts else [None, None])
    without_ids = [line | {"id": ""} for line in lines]  # a random id may hold the prompt's letters
    assert prompts or "abc" not in json.dumps(without_ids)


class FullDisk(io.StringIO):
    """A file whose third write alone succeeds."""

    writes = 0

    def write(self, text: str) -> int:
        self.writes += 1
        if self.writes != 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(text)


def test_a_full_disk_ends_no_request(serve: Serve, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(it: Served) -> None:
        log = RequestLog(str(tmp_path / "log"), tokenizer=None, prompts=False)
        log._file.close()
        log._file = FullDisk()
        it.app.handler.observers.append(log)
        for _ in range(5):
            assert (await it.stub.Generate(pb.GenerateRequest(prompt="abc", max_tokens=4))).text == "abca"
        log.close()

    serve(scenario)
    told = "the request log cannot be written: No space left on device"
    assert [record.message for record in caplog.records] == [told, told]  # each time that it fails anew
