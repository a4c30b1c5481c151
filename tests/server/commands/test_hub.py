"""Checkpoints by name, from a stand-in of the Hugging Face Hub on this machine."""

import argparse
import hashlib
import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from server.commands import engine_start, hub
from server.commands.console import UserError

ROOT = Path(__file__).parents[3]
COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {
    "README.md": b"words",
    "config.json": b"{}",
    "chat_template.jinja": b"hi",
    "tokenizer.json": b'{"a": 1}',
    "model.safetensors.index.json": b'{"b": 2}',
    "model-00001-of-00002.safetensors": b"first",
    "model-00002-of-00002.safetensors": b"second",
    "consolidated.safetensors": b"the same again",
    "pytorch_model.bin": b"and again",
    "pytorch_model.bin.index.json": b'{"c": 3}',
    "onnx/config.json": b'{"d": 4}',
}
NEEDED = {name for name in FILES if name[0] in "ctm"} - {"consolidated.safetensors"}


class StandIn(http.server.BaseHTTPRequestHandler):
    """Answers the few calls of the Hub that a download makes."""

    served: dict[str, bytes] = FILES
    asked: list[tuple[str, str, str | None]] = []  # noqa: RUF012  # (method, path, token)

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        self.asked.append((self.command, path, self.headers.get("authorization")))
        if "/org/gated" in path:
            return self.refuse(403, "GatedRepo")
        if "/org/name" not in path:
            return self.refuse(404, "RepoNotFound")
        if "/none" in path:
            return self.refuse(404, "RevisionNotFound")
        if "/resolve/" in path:
            return self.give(self.served[path.split("/", 5)[5]])
        listed = [
            {"type": "file", "path": name, "size": len(data), "oid": etag(data)} for name, data in self.served.items()
        ]
        about = {"id": "org/name", "sha": COMMIT, "siblings": [{"rfilename": name} for name in self.served]}
        return self.give(json.dumps(listed if "/tree/" in path else about).encode())

    def refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def give(self, data: bytes) -> None:
        self.send_response(200)
        for name, value in (("X-Repo-Commit", COMMIT), ("ETag", f'"{etag(data)}"'), ("Content-Length", str(len(data)))):
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


def etag(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


@pytest.fixture
def endpoint() -> Iterator[str]:
    StandIn.asked.clear()
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), StandIn) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def find(model: str, home: Path, endpoint: str, **variables: str) -> tuple[Path | None, str]:
    """(the directory that a name stands for, what was said), in a process of its own: the library reads its settings
    once."""
    code = (
        "import sys\nfrom server.commands import hub, console\n"
        "try: print(hub.directory(sys.argv[1]))\nexcept console.UserError as problem: print(problem, file=sys.stderr)"
    )
    settings = {"HF_HOME": str(home), "HF_ENDPOINT": endpoint, "HF_HUB_DISABLE_TELEMETRY": "1", **variables}
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    done = subprocess.run(
        [sys.executable, "-c", code, model], cwd=ROOT, env=kept | settings, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return (Path(done.stdout.strip()) if done.stdout else None), done.stderr


def test_only_the_files_that_are_needed_are_downloaded_once(endpoint: str, tmp_path: Path) -> None:
    folder, told = find("org/name", tmp_path, endpoint, HF_TOKEN="hf_mine")
    assert folder == tmp_path / "hub" / "models--org--name" / "snapshots" / COMMIT
    assert {path.name for path in folder.rglob("*")} == NEEDED
    assert (folder / "model-00002-of-00002.safetensors").read_bytes() == b"second"
    assert "org/name: downloading" in told
    assert {token for _, path, token in StandIn.asked if "/org/name" in path} == {"Bearer hf_mine"}
    StandIn.asked.clear()
    assert find("org/name@main", tmp_path, endpoint)[0] == folder
    assert not [path for method, path, _ in StandIn.asked if method == "GET" and "/resolve/" in path]
    StandIn.asked.clear()
    found, told = find("org/name", tmp_path, endpoint, HF_HUB_OFFLINE="1")
    assert (found, "taken from the cache" in told) == (folder, True), told
    assert StandIn.asked == []


@pytest.mark.long  # the library tries for 20 s
def test_the_cache_is_taken_when_the_hub_is_out_of_reach(endpoint: str, tmp_path: Path) -> None:
    folder, _ = find("org/name", tmp_path, endpoint)
    found, told = find("org/name", tmp_path, "http://127.0.0.1:9")
    assert (found, "taken from the cache" in told) == (folder, True), told


def test_weights_of_torch_are_taken_where_there_are_no_others(
    endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = {name: data for name, data in FILES.items() if "safetensors" not in name}
    monkeypatch.setattr(StandIn, "served", others)
    folder, _ = find("org/name", tmp_path, endpoint)
    assert folder is not None
    expected = {
        "config.json",
        "chat_template.jinja",
        "tokenizer.json",
        "pytorch_model.bin",
        "pytorch_model.bin.index.json",
    }
    assert {path.name for path in folder.rglob("*")} == expected
    assert find("org/name", tmp_path, endpoint, HF_HUB_OFFLINE="1")[0] == folder


@pytest.mark.parametrize(
    ("model", "variables", "told"),
    [
        ("org/gated", {}, "org/gated is gated: accept its conditions on its page, and set HF_TOKEN"),
        ("org/missing", {}, "org/missing is neither a directory nor on the Hub"),
        ("org/name@none", {}, "org/name has no revision none"),
        (
            "org/name",
            {"HF_HUB_OFFLINE": "1"},
            "is not a directory, it is not in the cache, and the Hub cannot be reached",
        ),
    ],
)
def test_what_cannot_be_had_is_told_in_words(
    endpoint: str, tmp_path: Path, model: str, variables: dict[str, str], told: str
) -> None:
    folder, said = find(model, tmp_path, endpoint, **variables)
    assert folder is None
    assert f"--model {model}" in said
    assert told in said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("model", "is_one"),
    [
        ("org/name", True),
        ("org/name@v1.0", True),
        ("org/name@refs/pr/1", True),
        ("name", False),
        ("./org/name", False),
        ("/org/name", False),
        ("a/b/c", False),
        ("org/name@", False),
        ("../name", False),
    ],
)
def test_what_has_the_form_of_a_name(model: str, is_one: bool) -> None:
    assert hub.is_name(model) == is_one


def test_a_directory_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hub, "directory", lambda model: Path("/cache", model))
    args = argparse.Namespace(model=Path("org/name"))
    assert engine_start.model_directory(args) == Path("/cache/org/name")
    Path("org/name").mkdir(parents=True)
    assert engine_start.model_directory(argparse.Namespace(model=Path("org/name"))) == Path("org/name")
    for wrong in ("name", "/no/such/dir"):
        with pytest.raises(UserError, match="is not a directory"):
            engine_start.model_directory(argparse.Namespace(model=Path(wrong)))


def test_a_snapshot_is_not_called_by_its_commit(tmp_path: Path) -> None:
    assert hub.name_of(tmp_path / "hub" / "models--org--my-name" / "snapshots" / COMMIT) == "org/my-name"
    assert hub.name_of(Path("/models/bloom-560m")) == "bloom-560m"
    assert hub.name_of(Path("/snapshots/bloom-560m")) == "bloom-560m"
