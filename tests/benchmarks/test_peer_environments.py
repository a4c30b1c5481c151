"""The environments of peers: made once, and every failure in them is shown."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import engines, environments
from benchmarks.environments import Peer, PeerError
from server.commands.bench import shapes


def test_an_environment_is_made_once(tmp_path, monkeypatch):
    commands = []

    def fake(command, **settings):
        commands.append((command, settings["env"]["CMAKE_ARGS"]))
        Path(tmp_path / "made" / "x" / "bin").mkdir(parents=True, exist_ok=True)
        Path(tmp_path / "made" / "x" / "bin" / "python").touch()
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(environments.subprocess, "run", fake)
    peer = Peer(name="x", requirements=("y==1",), script="z.py", build={"CMAKE_ARGS": "-DA=B"})
    for _ in range(2):
        python = environments.ensure(peer, tmp_path / "made", lambda line: None)
    assert python == tmp_path / "made" / "x" / "bin" / "python"
    assert [command[1:3] for command, _ in commands] == [["-m", "venv"], ["-m", "pip"]]
    assert {flags for _, flags in commands} == {"-DA=B"}
    newer = Peer(name="x", requirements=("y==2",), script="z.py", build={"CMAKE_ARGS": ""})
    environments.ensure(newer, tmp_path / "made", lambda line: None)
    assert commands[-1][0][-1] == "y==2"
    assert len(commands) == 3


def test_failed_installation_shows_its_log(tmp_path, monkeypatch):
    def fake(command, *, stdout, **settings):
        stdout.write("no compiler found\n")
        stdout.flush()
        return subprocess.CompletedProcess(command, 1)

    monkeypatch.setattr(environments.subprocess, "run", fake)
    with pytest.raises(PeerError, match=r"(?s)environment of x cannot be made.*x\.log.*no compiler found"):
        environments.ensure(Peer(name="x", requirements=(), script="z.py"), tmp_path, lambda line: None)
    assert not (tmp_path / "x" / "installed.json").exists()


def test_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(PeerError, match=r"environment of x cannot be kept in .*file/peers: Not a directory"):
        environments.ensure(Peer(name="x", requirements=(), script="z.py"), tmp_path / "file" / "peers", lambda _: None)


BROKEN = "import sys; print('bad things', file=sys.stderr); sys.exit(3)"


def test_failed_run_shows_its_output():
    with pytest.raises(PeerError, match=r"(?s)x ended with code 3:\nbad things"):
        environments.run_command([sys.executable, "-c", BROKEN], "x")
    assert environments.run_command([sys.executable, "-c", "print(1); print('{}')"], "x") == "{}"


def test_every_peer_has_its_files():
    for peer in environments.PEERS.values():
        assert (environments.SCRIPTS / peer.script).exists()
        assert peer.environment in (None, *environments.PEERS)
        json.dumps([peer.requirements, peer.job])


def test_a_peer_that_cannot_serve_converts_nothing(monkeypatch, tmp_path):
    (tmp_path / "model.safetensors").touch()
    (tmp_path / "config.json").write_text(json.dumps(shapes.SHAPES["tiny"]))
    ran = []

    def run_script(python, script, *arguments, name):
        ran.append((script, arguments[1:]))
        if script == environments.CONVERTER:
            Path(arguments[2]).mkdir()
            return ""
        job = json.loads(Path(arguments[0]).read_text())
        assert job["ask"] == "bloom"
        return json.dumps({"cannot": "no such type"} if job["dtype"] == "bfloat16" else {})

    monkeypatch.setattr(environments, "ensure", lambda peer, folder, say: Path("python"))
    monkeypatch.setattr(environments, "run_script", run_script)
    dtypes = ["float32", "bfloat16"]
    for _ in range(2):  # a checkpoint is converted once
        made, notes = engines.peer("ctranslate2", tmp_path, dtypes, None, tmp_path, tmp_path, lambda line: None)
    assert [each.dtype for each in made] == ["float32"]
    assert made[0].model.is_dir()
    assert made[0].vocab_size == 128
    assert notes == [f"ctranslate2 is not compared with {tmp_path.name} in bfloat16: no such type"]
    assert [script for script, _ in ran].count(environments.CONVERTER) == 1
