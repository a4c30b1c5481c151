"""The peers: their requirements, and a Python environment for each outside the project."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


class PeerError(Exception):
    """A peer cannot be installed or run; the others continue without it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """An engine that ours is compared with.

    Attributes:
      requirements: what pip installs into its environment.
      script: the file in peer_scripts that runs its jobs.
      environment: the peer whose environment it shares, if any.
      job: fields that its jobs have in addition.
      build: environment variables for the installation.
      converted: the ending of the name of a checkpoint in the peer's own format, with {dtype} where each dtype has its
        own; None where the peer reads ours.
      quantized: the format with as many bits as ours of each `--quantize`; it takes the place of {dtype}.
    """

    name: str
    requirements: tuple[str, ...]
    script: str
    environment: str | None = None
    job: Mapping[str, Any] = field(default_factory=dict)
    build: Mapping[str, str] = field(default_factory=dict)
    converted: str | None = None
    quantized: Mapping[str, str] = field(default_factory=dict)


OURS = "jaxserve"
_TRANSFORMERS = ("torch==2.13.0", "transformers==5.23.0", "safetensors>=0.6", "numpy>=2")
_CUDA = "ON" if shutil.which("nvcc") and shutil.which("nvidia-smi") else "OFF"  # a compiler, and a device to run on
PEERS = {
    peer.name: peer
    for peer in (
        Peer(name="transformers", requirements=_TRANSFORMERS, script="run_transformers.py"),
        Peer(
            name="continuous",
            requirements=_TRANSFORMERS,
            script="run_transformers.py",
            environment="transformers",
            job={"continuous": True},
        ),
        Peer(
            name="ctranslate2",
            requirements=("ctranslate2==4.8.5", "safetensors>=0.6", "numpy>=2"),
            script="run_ctranslate2.py",
            converted=".ct2",
        ),
        Peer(
            name="llama.cpp",
            requirements=("llama-cpp-python==0.3.36", "gguf==0.19.0", "safetensors>=0.6", "numpy>=2"),
            script="run_llama_cpp.py",
            build={"CMAKE_ARGS": f"-DLLAVA_BUILD=OFF -DMTMD_BUILD=OFF -DGGML_CUDA={_CUDA}"},  # no image models
            converted="-{dtype}.gguf",
            quantized={"int8": "q8_0", "int4": "q4_0"},
        ),
    )
}
CONVERTER = "write_checkpoint.py"
SCRIPTS = Path(__file__).with_name("peer_scripts")


def ensure(peer: Peer, folder: Path, say: Callable[[str], None]) -> Path:
    """Makes a peer's environment under `folder`, unless one with the same requirements exists.

    Returns:
      Its Python.

    Raises:
      PeerError: the folder cannot be written, or the installation failed; then the message holds the end of its output
        and names the log.
    """
    try:
        return _ensure(peer, folder, say)
    except OSError as problem:
        raise PeerError(f"the environment of {peer.name} cannot be kept in {folder}: {problem.strerror}") from None


def _ensure(peer: Peer, folder: Path, say: Callable[[str], None]) -> Path:
    path = folder / (peer.environment or peer.name)
    python, marker = path / "bin" / "python", path / "installed.json"
    if marker.exists() and json.loads(marker.read_text()) == list(peer.requirements):
        return python
    log = folder / f"{peer.name}.log"
    say(f"making the environment of {peer.name} in {path} (minutes; output in {log})")
    folder.mkdir(parents=True, exist_ok=True)
    commands = [[str(python), "-m", "pip", "install", *peer.requirements]]
    if not python.exists():
        commands.insert(0, [sys.executable, "-m", "venv", str(path)])
    with log.open("w", encoding="utf-8") as output:
        for command in commands:
            code = subprocess.run(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={**os.environ, **peer.build},
                check=False,
            ).returncode
            if code != 0:
                raise PeerError(
                    f"the environment of {peer.name} cannot be made: `{' '.join(command)}` ended with code {code}; "
                    f"{log} ends with:\n{tail(log.read_text(encoding='utf-8', errors='replace'))}"
                )
    marker.write_text(json.dumps(list(peer.requirements)))
    return python


def run_script(python: Path, script: str, *arguments: str, name: str) -> str:
    """Runs a file of peer_scripts with a peer's Python; returns the last line it printed.

    Raises:
      PeerError: it failed; the message holds the end of its standard error.
    """
    return run_command([str(python), str(SCRIPTS / script), *arguments], name)


def run_command(command: list[str], name: str) -> str:
    """Runs a command to its end; returns the last line it printed (see `run_script`)."""
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    if done.returncode != 0:
        raise PeerError(f"{name} ended with code {done.returncode}:\n{tail(done.stderr)}")
    lines = done.stdout.strip().splitlines()
    return lines[-1] if lines else ""


def tail(text: str, lines: int = 8) -> str:
    """The last lines of a text."""
    return "\n".join(text.rstrip().splitlines()[-lines:])
