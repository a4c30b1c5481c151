"""Runs other people's clients as they come: `python -m tests.clients.run [NAME ...]`.

Each `NAME_client.py` here is a script that names its packages in its first lines (PEP 723). It runs in an environment
of its own, `.venv-clients/NAME`, which is made on first use, and gets the URLs of two servers: one of the demo model,
and one that answers a chat with its last message, so that a script says what the model says.
"""

from __future__ import annotations

import contextlib
import re
import socket
import subprocess
import sys
import tempfile
import time
import tomllib
import urllib.request
import venv
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
ENVIRONMENTS = ROOT / ".venv-clients"
SECONDS = 300
ECHO = "{# <tool_call> #}{% if tools %}{% endif %}{{ messages[-1].content }}"


def packages(script: Path) -> list[str]:
    """The packages that a script names."""
    block = re.search(r"(?m)^# /// script\n((?:#.*\n)+?)# ///$", script.read_text(encoding="utf-8"))
    assert block is not None, script
    return tomllib.loads(re.sub("(?m)^# ?", "", block[1]))["dependencies"]


def python_with(name: str, wanted: list[str]) -> Path:
    """The interpreter of a client's environment. Raises CalledProcessError if a package cannot be installed."""
    folder = ENVIRONMENTS / name
    python, stamp = folder / "bin" / "python", folder / "installed"
    if not stamp.exists() or stamp.read_text() != "\n".join(wanted):
        venv.create(folder, clear=True)
        pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, *wanted], check=True)
        stamp.write_text("\n".join(wanted))
    return python


@contextlib.contextmanager
def server(*command: str) -> Iterator[str]:
    """A server's URL, once it is ready."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = subprocess.Popen([sys.executable, "-m", *command, "--port", "0", "--http-port", str(port)], cwd=ROOT)
    try:
        url, until = f"http://127.0.0.1:{port}", time.monotonic() + SECONDS
        while True:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health"):
                break
            assert process.poll() is None
            assert time.monotonic() < until
            time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        process.wait()


def main(names: list[str]) -> int:
    scripts = {path.stem.removesuffix("_client"): path for path in sorted(FOLDER.glob("*_client.py"))}
    with tempfile.NamedTemporaryFile("w", suffix=".jinja") as template:
        template.write(ECHO)
        template.flush()
        with (
            server("server.commands.cli", "serve") as demo,
            server("tests.server.serve_fake", "--chat-template", template.name) as echo,
            ThreadPoolExecutor(2) as installers,
        ):
            results = {}
            wanted_by = {name: packages(scripts[name]) for name in names or scripts}
            pythons = {name: installers.submit(python_with, name, wanted) for name, wanted in wanted_by.items()}
            for name, wanted in wanted_by.items():
                try:
                    command = [pythons[name].result(), scripts[name], demo, echo]
                    results[name] = "works" if subprocess.run(command, timeout=SECONDS).returncode == 0 else "FAILS"
                except subprocess.CalledProcessError:
                    results[name] = "cannot be installed"
                print(f"{name} ({', '.join(wanted)}): {results[name]}", flush=True)
    return int(set(results.values()) != {"works"})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
